"""A problem's way to a decision, with hands that only pretend to work: what is tried, and what the time goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from gemmtune import backends
from gemmtune.backends.base import Artifact
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision, Evidence, Sample, Verdict
from gemmtune.core.events import silent
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.core.workloads import build
from gemmtune.dispatch import current_target
from gemmtune.store import MemoryStore
from gemmtune.timing.outcome import RaceResult
from gemmtune.tuning import session
from gemmtune.tuning.ledger import ONE_DRAW
from gemmtune.tuning.search import SearchOptions
from gemmtune.tuning.session import TuningSession
from gemmtune.workers.protocol import Attempted, Confirmed

PROBLEM = build(16, 4096, 4096, "bf16")


class Clock:
    """Stands in for the module ``time``."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Pretending:
    """Hands whose candidates take ``seconds(candidate)`` a call and five calls each to try or check."""

    def __init__(self, clock: Clock, seconds: Callable[[Candidate], float], open_s: float = 0.3) -> None:
        self.clock, self.seconds, self.open_s = clock, seconds, open_s
        self.tried: list[Candidate] = []
        self.raced: list[Candidate] = []
        self.race_s, self.hot = 0.0, False

    def start(self) -> None: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...

    def open(self, problem: Problem, seed: int) -> None:
        self.clock.now += self.open_s

    def attempt(self, candidate: Candidate, deadline: float | None, cutoff_s: float | None) -> Attempted:
        self.tried.append(candidate)
        each = self.seconds(candidate)
        self.clock.now += 5 * each
        packing = f"native:nr{candidate['nr']}" if candidate.backend == "native" else None
        return Attempted(Verdict("within_bound"), packing, 0.0, 0, (each,) * 5)

    def confirm(self, candidate: Candidate, deadline: float | None) -> Confirmed:
        self.clock.now += 5 * self.seconds(candidate)
        return Confirmed(Verdict("within_bound"))

    def race(
        self, candidates: Sequence[Candidate], budget_s: float, seed: int, progress: Any, hot: bool, earlier_s: Any
    ) -> RaceResult:
        self.raced, self.race_s, self.hot = list(candidates), budget_s, hot
        self.clock.now += budget_s
        each = [self.seconds(candidate) for candidate in candidates]
        best = min(range(len(each)), key=lambda place: each[place])
        evidence = {
            c.id: Evidence(c.to_dict(), c.id, "winner" if i == best else "finalist", sample=Sample(s, s, s, 50))
            for i, (c, s) in enumerate(zip(candidates, each, strict=True))
        }
        outcome = "tie" if candidates[best].backend == "aten" else "winner"
        return RaceResult(outcome, candidates[best].id, evidence=evidence)  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(session, "time", made)
    return made


def run(clock: Clock, hands: Pretending, seconds: float | None, **more: Any) -> float:
    """Seconds that tuning took."""
    began = clock.now
    found = TuningSession(PROBLEM, current_target(), ("aten", "native"), MemoryStore(), hands, silent, 0, **more)  # type: ignore[arg-type]
    decision = found.run(seconds, None)
    assert decision.outcome != "none_valid"
    assert decision.seconds == pytest.approx(clock.now - began)
    return clock.now - began


@pytest.mark.parametrize("seconds", [1.0, 6.0, 60.0])
@pytest.mark.parametrize("each", [1e-4, 1e-2])
def test_a_budget_is_kept(clock: Clock, seconds: float, each: float) -> None:
    hands = Pretending(clock, lambda c: each if c.backend == "native" else 2 * each)
    assert run(clock, hands, seconds) <= 1.1 * seconds


def test_slow_calls_leave_time_for_a_rival_and_a_race(clock: Clock) -> None:
    hands = Pretending(clock, lambda c: 0.05 if c.backend == "native" else 0.1)
    assert run(clock, hands, 6.0) <= 6.6
    assert {c.backend for c in hands.raced} == {"aten", "native"}
    assert hands.race_s >= 0.5


def test_what_a_budget_cannot_hold_is_one_look_at_either_side(clock: Clock) -> None:
    hands = Pretending(clock, lambda c: 1.0)
    run(clock, hands, 2.0)
    assert sorted(c.backend for c in hands.tried) == ["aten", "native"]


def test_without_a_budget_slow_problems_take_longer(clock: Clock) -> None:
    hands = Pretending(clock, lambda c: 0.05 if c.backend == "native" else 0.1)
    assert 6.6 < run(clock, hands, None) < 30.0
    assert hands.race_s >= 80 * 0.05


def test_a_gpu_takes_half_the_time(clock: Clock) -> None:
    gpu = Target("cuda", "NVIDIA H200", "9.0", caches=(232448, 0, 60 << 20), cores=132)
    hands = Pretending(clock, lambda c: 1e-4)
    began = clock.now
    TuningSession(build(16, 4096, 4096, "bf16"), gpu, ("aten",), MemoryStore(), hands, silent, 0).run(None, None)  # type: ignore[arg-type]
    assert hands.race_s > 0.0
    assert clock.now - began <= 3.3


def test_every_packing_is_raced(clock: Clock) -> None:
    listed = backends.get("native").candidates(PROBLEM, current_target())
    widths = list(dict.fromkeys(item["nr"] for item in listed if isinstance(item, Candidate)))[:3]
    times = dict(zip(widths, (1.0e-2, 1.1e-2, 1.2e-2), strict=False))
    hands = Pretending(clock, lambda c: times.get(c["nr"], 5e-2) if c.backend == "native" else 2e-2)  # type: ignore[call-overload]
    run(clock, hands, 20.0)
    assert {c["nr"] for c in hands.raced if c.backend == "native"} >= set(widths)


def test_the_best_of_each_packing_is_checked_though_time_is_short(clock: Clock) -> None:
    """Only what is checked can be served: a layout chosen for other M must have its kernel here."""
    widths: list[Any] = []

    class Slow(Pretending):
        def confirm(self, candidate: Candidate, deadline: float | None) -> Confirmed:
            self.clock.now += 1.0
            if candidate.backend == "native":
                widths.append(candidate["nr"])
            return super().confirm(candidate, deadline)

    hands = Slow(clock, lambda c: 1e-2 if c.backend == "native" else 2e-2)
    run(clock, hands, 20.0)
    count = min(3, len({c["nr"] for c in hands.tried if c.backend == "native"}))
    assert len(set(widths[:count])) == count


@pytest.mark.parametrize("seconds", [None, 2.0])
def test_atens_ways_that_are_about_as_fast_are_raced_though_time_is_short(clock: Clock, seconds: float | None) -> None:
    """Which of them serves is no matter of a few rough times, unless a user's budget leaves no more."""

    class Slow(Pretending):
        def confirm(self, candidate: Candidate, deadline: float | None) -> Confirmed:
            self.clock.now += 5.0
            return super().confirm(candidate, deadline)

    times = {"mm": 1.1e-2, "mm_t": 1.2e-2}
    hands = Slow(clock, lambda c: times.get(c.template, 1e-2) if c.backend == "aten" else 1e-1)
    run(clock, hands, seconds)
    raced = {c.template for c in hands.raced if c.backend == "aten"}
    assert ("mm" in raced) == (seconds is None)
    assert "mm_t" not in raced


def test_the_raw_weights_two_best_are_raced_though_time_is_short(clock: Clock) -> None:
    """A raw weight is served by the winner of a duel of its own, which takes ATen's way on the raw weight, too."""

    class Slow(Pretending):
        def attempt(self, candidate: Candidate, deadline: float | None, cutoff_s: float | None) -> Attempted:
            attempted = super().attempt(candidate, deadline, cutoff_s)
            packing = "aten:ahead" if candidate.backend == "aten" and candidate.template != "mm" else None
            return msgspec.structs.replace(attempted, packing=packing)

        def confirm(self, candidate: Candidate, deadline: float | None) -> Confirmed:
            self.clock.now += 5.0
            if candidate.backend == "native" and candidate.id == wrong:
                return Confirmed(Verdict("wrong", "an element is off"))
            return super().confirm(candidate, deadline)

    listed = [c for c in backends.get("native").candidates(PROBLEM, current_target()) if isinstance(c, Candidate)]
    wrong = listed[0].id  # the fastest of them
    times = {"mm": 2e-2}
    hands = Slow(
        clock,
        lambda c: times.get(c.template, 1e-2) if c.backend == "aten" else (1.2e-2 if c.id == wrong else 1.3e-2),
    )
    run(clock, hands, None)
    assert "mm" in {c.template for c in hands.raced if c.backend == "aten"}
    assert wrong not in {c.id for c in hands.raced}
    assert "native" in {c.backend for c in hands.raced}


@pytest.mark.parametrize("seconds", [None, 8.0])
def test_checking_a_way_that_is_far_behind_leaves_time_for_the_race(clock: Clock, seconds: float | None) -> None:
    """Plain PyTorch on an int4 weight took 56 times as long as a kernel, and checking it all the time of the race."""

    class Thorough(Pretending):
        def attempt(self, candidate: Candidate, deadline: float | None, cutoff_s: float | None) -> Attempted:
            attempted = super().attempt(candidate, deadline, cutoff_s)
            self.clock.now += 0.1  # exploring takes its whole share
            packing = "aten:ahead" if candidate.backend == "aten" and candidate.template != "mm" else attempted.packing
            return msgspec.structs.replace(attempted, packing=packing)

        def confirm(self, candidate: Candidate, deadline: float | None) -> Confirmed:
            self.clock.now += 16 * self.seconds(candidate)
            return Confirmed(Verdict("within_bound"))

    hands = Thorough(clock, lambda c: (0.15 if c.template == "mm" else 5e-3) if c.backend == "aten" else 1e-3)
    run(clock, hands, seconds)
    assert hands.race_s >= 0.24 * (seconds or 6.0)
    assert "mm" not in {c.template for c in hands.raced}


def test_the_best_of_each_packing_goes_first(clock: Clock) -> None:
    hands = Pretending(clock, lambda c: (1e-2 if c["nr"] == 64 else 1.2e-2) if c.backend == "native" else 2e-2)
    run(clock, hands, 6.0)
    others = [c["nr"] for c in hands.raced if c.backend == "native"]
    assert len(set(others[:2])) == 2


def test_what_cannot_be_built_is_not_tried(clock: Clock) -> None:
    asked: list[str] = []

    def build_some(problem: Problem, candidates: Sequence[Candidate], target: Target) -> dict[str, Verdict]:
        asked.extend(candidate.id for candidate in candidates)
        return {c.id: Verdict("build_failed", "no") for c in candidates if c.backend == "native" and c["nr"] != 64}

    hands = Pretending(clock, lambda c: 1e-3 if c.backend == "native" else 2e-3)
    run(clock, hands, 6.0, build=build_some)
    assert {c["nr"] for c in hands.tried if c.backend == "native"} == {64}
    assert {c.id for c in hands.tried} < set(asked)


def test_what_may_be_tried_next_is_built_while_others_are_timed(clock: Clock) -> None:
    """Once each, what the search is likeliest to ask for, and not what has been built."""
    built: set[str] = set()
    begun: list[str] = []

    def build_all(problem: Problem, candidates: Sequence[Candidate], target: Target) -> dict[str, Any]:
        built.update(candidate.id for candidate in candidates)
        return {candidate.id: Artifact(candidate, "") for candidate in candidates}

    def ahead(problem: Problem, candidates: Sequence[Candidate], target: Target) -> None:
        assert not built & {candidate.id for candidate in candidates}
        begun.extend(candidate.id for candidate in candidates)

    hands = Pretending(clock, lambda c: 1e-3 if c.backend == "native" else 2e-3)
    run(clock, hands, None, build=build_all, build_ahead=ahead)
    assert begun
    tried = {candidate.id for candidate in hands.tried}
    assert len(tried & set(begun)) > 0.5 * len(set(begun))


@pytest.mark.parametrize("hot", [False, True])
def test_the_condition_reaches_the_race(clock: Clock, hot: bool) -> None:
    hands = Pretending(clock, lambda c: 1e-3)
    run(clock, hands, 6.0, hot=hot)
    assert hands.hot is hot


def test_what_is_wrong_after_its_race_is_out_and_the_rest_race_again(clock: Clock) -> None:
    class Faulty(Pretending):
        races = 0

        def race(self, candidates: Sequence[Candidate], *args: Any) -> RaceResult:
            raced = super().race(candidates, *args)
            self.races += 1
            if self.races == 1 and raced.leader is not None:
                raced.faults = {raced.leader: Verdict("wrong", "right before the race, wrong after it: idle")}
            return raced

    hands, store = Faulty(clock, lambda candidate: 1e-3 if candidate.backend == "native" else 2e-3), MemoryStore()
    target = current_target()
    decision = TuningSession(PROBLEM, target, ("aten", "native"), store, hands, silent, 0).run(None, None)
    failed = {row.id: row for row in decision.evidence if row.stage == "failed"}
    assert hands.races == 2
    assert len(failed) == 1
    assert decision.chosen not in failed
    (row,) = failed.values()
    assert row.verdict is not None
    assert "after it" in row.verdict.detail
    assert set(store.failures(target, PROBLEM.key)) == set(failed)


def listed_layouts() -> list[str]:
    """The packed layouts of the native candidates, that of the first candidate first."""
    native = backends.get("native")
    listed = [item for item in native.candidates(PROBLEM, current_target()) if isinstance(item, Candidate)]
    names = dict.fromkeys(native.packing_of(PROBLEM, candidate) for candidate in listed)
    return [name for name in names if name is not None]


@pytest.mark.parametrize("seconds", [None, 3.0])
def test_the_layouts_of_a_weights_other_m_are_raced_though_time_is_short(clock: Clock, seconds: float | None) -> None:
    """One layout serves all M of a weight: where a layout has no kernel at one M it serves at none."""
    layout = listed_layouts()[-1]

    def packing(candidate: Candidate) -> str | None:
        return backends.get(candidate.backend).packing_of(PROBLEM, candidate)

    def each(candidate: Candidate) -> float:
        return (2e-2 if packing(candidate) == layout else 1.8e-2) if candidate.backend == "native" else 6e-2

    class Named(Pretending):
        def attempt(self, candidate: Candidate, deadline: float | None, cutoff_s: float | None) -> Attempted:
            return msgspec.structs.replace(super().attempt(candidate, deadline, cutoff_s), packing=packing(candidate))

    without, told = Named(clock, each), Named(clock, each)
    run(clock, without, seconds)
    run(clock, told, seconds, layouts=["another:layout", layout])
    assert layout not in map(packing, without.raced)
    assert layout in map(packing, told.raced)
    assert next(packing(c) for c in told.tried if c.backend == "native") == layout


class ListedSearch:
    """A search that asks for candidates once, in the order in which the backends listed them.

    It asks for ATen's candidates and the first ``count`` others.
    """

    left = 0

    def __init__(self, candidates: Sequence[Candidate], count: int | None) -> None:
        others = [candidate for candidate in candidates if candidate.backend != "aten"][:count]
        self._batches = [[candidate for candidate in candidates if candidate.backend == "aten"] + others]
        self.likely: list[Candidate] = []

    def ask(self) -> list[Candidate] | None:
        return self._batches.pop() if self._batches else None

    def tell(self, candidate_id: str, seconds: float | None) -> None: ...


def decide(worker: Pretending, seconds: float | None, count: int | None = None) -> Decision:
    """Return the decision of a session whose search is a ``ListedSearch`` of ``count``."""

    def search(candidates: Sequence[Candidate], options: SearchOptions) -> ListedSearch:
        return ListedSearch(candidates, count)

    names = ("aten", "native")
    tuning = TuningSession(PROBLEM, current_target(), names, MemoryStore(), worker, silent, 0, search=search)
    return tuning.run(seconds, None)


def native_candidates() -> list[Candidate]:
    listed = backends.get("native").candidates(PROBLEM, current_target())
    return [item for item in listed if isinstance(item, Candidate)]


def test_exploring_takes_half_of_a_users_budget(clock: Clock) -> None:
    times: list[float] = []

    class Recording(Pretending):
        def attempt(self, candidate: Candidate, deadline: float | None, cutoff_s: float | None) -> Attempted:
            attempted = super().attempt(candidate, deadline, cutoff_s)
            times.append(self.clock.now)
            return attempted

    start = clock.now
    worker = Recording(clock, lambda c: 1e-2 if c.backend == "native" else 2e-2)
    decide(worker, 3.0)
    assert len(worker.tried) < len(native_candidates())
    assert 0.45 * 3.0 < times[-1] - start < 0.55 * 3.0


def test_evidence_has_the_stage_that_a_candidate_reached_in_the_race(clock: Clock) -> None:
    class LeavesOneOut(Pretending):
        def race(self, candidates: Sequence[Candidate], *args: Any) -> RaceResult:
            raced = super().race(candidates, *args)
            last = raced.evidence[candidates[-1].id]
            last = msgspec.structs.replace(last, stage="untried", reason="short of memory", sample=None)
            return msgspec.structs.replace(raced, evidence={**raced.evidence, last.id: last})

    worker = LeavesOneOut(clock, lambda c: 1e-3 if c.backend == "native" else 1.1e-3)
    decision = decide(worker, 6.0)
    stages = {row.id: row.stage for row in decision.evidence}
    *others, last = (candidate.id for candidate in worker.raced)
    assert {stages[name] for name in others if name != decision.chosen} == {"finalist"}
    assert stages[decision.chosen or ""] == "winner"
    assert stages[last] == "screened"


def test_a_checked_candidate_that_is_not_raced_has_the_reason(clock: Clock) -> None:
    """It is the best of its layout, which other M may share, and too slow for the race."""
    slow = next(c["nr"] for c in native_candidates() if c["nr"] != native_candidates()[0]["nr"])
    worker = Pretending(clock, lambda c: (3e-3 if c["nr"] == slow else 1e-3) if c.backend == "native" else 4e-3)
    decision = decide(worker, 60.0, 200)
    raced = {candidate.id for candidate in worker.raced}
    reasons = {row.id: row.reason for row in decision.evidence}
    assert any(
        reasons[c.id] == "3.00x the best rough time: not raced"
        for c in native_candidates() if c["nr"] == slow and c.id in reasons
    )  # fmt: skip
    assert not any("not raced" in reasons[name] for name in raced)


def test_a_second_timing_without_a_check_leaves_the_verdict_of_the_first(clock: Clock) -> None:
    class ChecksOnce(Pretending):
        def attempt(self, candidate: Candidate, deadline: float | None, cutoff_s: float | None) -> Attempted:
            is_second = candidate in self.tried
            attempted = super().attempt(candidate, deadline, cutoff_s)
            return msgspec.structs.replace(attempted, verdict=None) if is_second else attempted

    fastest = native_candidates()[0]
    worker = ChecksOnce(clock, lambda c: (1e-3 if c == fastest else 2e-3) if c.backend == "native" else 5e-3)
    decision = decide(worker, None, 12)
    retimed = {candidate.id for candidate in worker.tried if worker.tried.count(candidate) == 2}
    assert len(retimed) > 2
    rows = [row for row in decision.evidence if row.id in retimed]
    assert all(row.verdict is not None and row.verdict.ok for row in rows)
    assert ONE_DRAW in {row.verdict.detail for row in rows if row.verdict is not None}


@pytest.mark.parametrize(("seconds", "is_raced"), [(7e-3, True), (9e-3, False)])
def test_a_raw_kernel_is_raced_within_eight_times_the_best_packed_one(
    clock: Clock, seconds: float, is_raced: bool
) -> None:
    raw = native_candidates()[0]

    class Unpacked(Pretending):
        def attempt(self, candidate: Candidate, deadline: float | None, cutoff_s: float | None) -> Attempted:
            attempted = super().attempt(candidate, deadline, cutoff_s)
            return msgspec.structs.replace(attempted, packing=None) if candidate == raw else attempted

    worker = Unpacked(clock, lambda c: (seconds if c == raw else 1e-3) if c.backend == "native" else 1e-2)
    decide(worker, None)
    assert (raw in worker.raced) is is_raced
