"""TuningSession with a fake worker: the candidates that are tried and raced, and the use of the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gemmtune import backends
from gemmtune.backends.base import Artifact
from gemmtune.core import devices
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision, Evidence, LayoutDecision, Sample, Verdict
from gemmtune.core.devices import TuningProfile
from gemmtune.core.errors import WorkerError
from gemmtune.core.events import BestSoFar, CandidateTried, Progress, silent
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.core.workloads import build
from gemmtune.dispatch import current_target
from gemmtune.store import MemoryStore
from gemmtune.timing.outcome import LeaderUpdate, RaceResult
from gemmtune.tuning import exploration, session, time_budget
from gemmtune.tuning.ledger import ONE_DRAW
from gemmtune.tuning.search import SearchOptions
from gemmtune.tuning.session import TuningSession
from gemmtune.workers.contract import WorkerLost
from gemmtune.workers.protocol import Attempted, Confirmed
from helpers.builds import finished
from helpers.steps import run_alone

PROBLEM = build(16, 4096, 4096, "bf16")
# The worker is fake. CPUs with AVX-512 have kernels of several packed layouts, and those without may have one only.
TARGET = replace(
    current_target(), isa=("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16")
)


@pytest.mark.parametrize(
    ("seconds", "default_s", "expected"),
    [
        (None, None, (3.0, False, math.inf)), (9.0, None, (9.0, True, math.inf)), (9.0, 2.2, (9.0, True, 2.0)),
        (None, 2.2, (2.2, False, 2.0)), (None, 1.1, (1.1, False, 1.0)), (None, 4.4, (4.4, False, 2.0)),
    ],
)  # fmt: skip
def test_less_than_the_usual_time_excludes_less_of_the_builds(
    seconds: float | None, default_s: float | None, expected: tuple[float, bool, float]
) -> None:
    profile = TuningProfile(default_s=3.0, tuned_m_s=2.2)
    budget = session.budget_of(profile, seconds, default_s)
    assert (budget.seconds, budget.strict, budget.excludable_s) == pytest.approx(expected)


class FakeTime:
    """Fake of the module ``time`` that only the fake worker advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class FakeWorker:
    """Fake worker whose candidates take ``seconds(candidate)`` per call, and five calls to try or verify."""

    def __init__(self, clock: FakeTime, seconds: Callable[[Candidate], float], open_s: float = 0.3) -> None:
        self.clock, self.seconds, self.open_s = clock, seconds, open_s
        self.tried: list[Candidate] = []
        self.raced: list[Candidate] = []
        self.race_s, self.hot = 0.0, False

    def start(self) -> None: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...

    def open(self, problem: Problem, seed: int) -> None:
        self.clock.now += self.open_s

    def pause(self) -> None: ...

    def resume(self, problem: Problem) -> None: ...

    def attempt(self, candidate: Candidate, deadline: float | None, cutoff_s: float | None) -> Attempted:
        self.tried.append(candidate)
        call_s = self.seconds(candidate)
        self.clock.now += 5 * call_s
        packing = f"native:nr{candidate['nr']}" if candidate.backend == "native" else None
        return Attempted(Verdict("within_bound"), packing, 0.0, 0, (call_s,) * 5)

    def confirm(self, candidate: Candidate, deadline: float | None) -> Confirmed:
        self.clock.now += 5 * self.seconds(candidate)
        return Confirmed(Verdict("within_bound"))

    def race(
        self, candidates: Sequence[Candidate], budget_s: float, seed: int, progress: Any, hot: bool, earlier_s: Any
    ) -> RaceResult:
        self.raced, self.race_s, self.hot = list(candidates), budget_s, hot
        self.clock.now += budget_s
        times = [self.seconds(candidate) for candidate in candidates]
        fastest = min(range(len(times)), key=lambda index: times[index])
        evidence = {
            c.id: Evidence(c.to_dict(), c.id, "winner" if i == fastest else "finalist", sample=Sample(s, s, s, 50))
            for i, (c, s) in enumerate(zip(candidates, times, strict=True))
        }
        outcome = "tie" if candidates[fastest].backend == "aten" else "winner"
        return RaceResult(outcome, candidates[fastest].id, evidence=evidence)  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake_time = FakeTime()
    for module in (session, exploration, time_budget):
        monkeypatch.setattr(module, "time", fake_time)
    return fake_time


def run_session(clock: FakeTime, worker: FakeWorker, seconds: float | None, **options: Any) -> float:
    """Tune the problem, and return the seconds that it took."""
    start = clock.now
    names = ("aten", "native")
    tuning = TuningSession(PROBLEM, TARGET, names, MemoryStore(), worker, silent, 0, **options)  # type: ignore[arg-type]
    decision = run_alone(tuning.steps(seconds, None))
    assert decision.outcome != "none_valid"
    assert decision.seconds == pytest.approx(clock.now - start)
    return clock.now - start


@pytest.mark.parametrize("seconds", [1.0, 6.0, 60.0])
@pytest.mark.parametrize("call_s", [1e-4, 1e-2])
def test_session_stays_within_its_budget(clock: FakeTime, seconds: float, call_s: float) -> None:
    worker = FakeWorker(clock, lambda c: call_s if c.backend == "native" else 2 * call_s)
    assert run_session(clock, worker, seconds) <= 1.1 * seconds


def test_slow_calls_leave_time_for_a_challenger_and_a_race(clock: FakeTime) -> None:
    worker = FakeWorker(clock, lambda c: 0.05 if c.backend == "native" else 0.1)
    assert run_session(clock, worker, 6.0) <= 6.6
    assert {c.backend for c in worker.raced} == {"aten", "native"}
    assert worker.race_s >= 0.5


def test_too_small_a_budget_tries_one_candidate_of_each_side(clock: FakeTime) -> None:
    worker = FakeWorker(clock, lambda c: 1.0)
    run_session(clock, worker, 2.0)
    assert sorted(c.backend for c in worker.tried) == ["aten", "native"]


def test_slow_problems_take_longer_without_a_budget(clock: FakeTime) -> None:
    worker = FakeWorker(clock, lambda c: 0.05 if c.backend == "native" else 0.1)
    assert 6.6 < run_session(clock, worker, None) < 30.0
    assert worker.race_s >= 80 * 0.05


def test_default_budget_of_a_gpu_is_half(clock: FakeTime) -> None:
    gpu = Target("cuda", "NVIDIA H200", "9.0", caches=(232448, 0, 60 << 20), cores=132)
    worker = FakeWorker(clock, lambda c: 1e-4)
    start = clock.now
    tuning = TuningSession(build(16, 4096, 4096, "bf16"), gpu, ("aten",), MemoryStore(), worker, silent, 0)  # type: ignore[arg-type]
    run_alone(tuning.steps(None, None))
    assert worker.race_s > 0.0
    assert clock.now - start <= 3.3


def test_best_candidates_of_all_layouts_are_raced(clock: FakeTime) -> None:
    listed = backends.get("native").candidates(PROBLEM, TARGET)
    widths = list(dict.fromkeys(item["nr"] for item in listed if isinstance(item, Candidate)))[:3]
    times = dict(zip(widths, (1.0e-2, 1.1e-2, 1.2e-2), strict=False))
    worker = FakeWorker(clock, lambda c: times.get(c["nr"], 5e-2) if c.backend == "native" else 2e-2)  # type: ignore[call-overload]
    run_session(clock, worker, 20.0)
    assert {c["nr"] for c in worker.raced if c.backend == "native"} >= set(widths)


@pytest.mark.parametrize(("seconds", "check_s"), [(20.0, 1.0), (None, 0.6)])
def test_best_candidate_of_each_layout_is_verified_with_little_time(
    clock: FakeTime, seconds: float | None, check_s: float
) -> None:
    """Only verified candidates can serve, and a layout that other M chose needs a kernel at this M."""
    widths: list[Any] = []

    class SlowVerification(FakeWorker):
        def confirm(self, candidate: Candidate, deadline: float | None) -> Confirmed:
            self.clock.now += check_s
            if candidate.backend == "native":
                widths.append(candidate["nr"])
            return super().confirm(candidate, deadline)

    worker = SlowVerification(clock, lambda c: 1e-2 if c.backend == "native" else 2e-2)
    run_session(clock, worker, seconds)
    count = min(3, len({c["nr"] for c in worker.tried if c.backend == "native"}))
    assert len(set(widths[:count])) == count


@pytest.mark.parametrize("seconds", [None, 2.0])
def test_aten_candidates_of_similar_speed_are_raced_with_little_time(clock: FakeTime, seconds: float | None) -> None:
    """Screening times do not decide which of them serves, unless a user's budget is too short for a race."""

    class SlowVerification(FakeWorker):
        def confirm(self, candidate: Candidate, deadline: float | None) -> Confirmed:
            self.clock.now += 5.0
            return super().confirm(candidate, deadline)

    times = {"mm": 1.1e-2, "mm_t": 1.2e-2}
    worker = SlowVerification(clock, lambda c: times.get(c.template, 1e-2) if c.backend == "aten" else 1e-1)
    run_session(clock, worker, seconds)
    raced_templates = {c.template for c in worker.raced if c.backend == "aten"}
    assert ("mm" in raced_templates) == (seconds is None)
    assert "mm_t" not in raced_templates


def test_two_best_candidates_on_the_raw_weight_are_raced_with_little_time(clock: FakeTime) -> None:
    """A paired test of its own decides what serves a raw weight. It needs ATen's candidate on the raw weight, too."""

    class SlowVerification(FakeWorker):
        def attempt(self, candidate: Candidate, deadline: float | None, cutoff_s: float | None) -> Attempted:
            attempted = super().attempt(candidate, deadline, cutoff_s)
            packing = "aten:ahead" if candidate.backend == "aten" and candidate.template != "mm" else None
            return msgspec.structs.replace(attempted, packing=packing)

        def confirm(self, candidate: Candidate, deadline: float | None) -> Confirmed:
            self.clock.now += 5.0
            if candidate.backend == "native" and candidate.id == wrong_id:
                return Confirmed(Verdict("wrong", "an element is off"))
            return super().confirm(candidate, deadline)

    listed = [c for c in backends.get("native").candidates(PROBLEM, TARGET) if isinstance(c, Candidate)]
    wrong_id = listed[0].id  # the fastest of them
    times = {"mm": 2e-2}
    worker = SlowVerification(
        clock,
        lambda c: times.get(c.template, 1e-2) if c.backend == "aten" else (1.2e-2 if c.id == wrong_id else 1.3e-2),
    )
    run_session(clock, worker, None)
    assert "mm" in {c.template for c in worker.raced if c.backend == "aten"}
    assert wrong_id not in {c.id for c in worker.raced}
    assert "native" in {c.backend for c in worker.raced}


@pytest.mark.parametrize("seconds", [None, 8.0])
def test_slow_aten_candidate_is_not_verified_at_the_cost_of_the_race(clock: FakeTime, seconds: float | None) -> None:
    """PyTorch on an int4 weight took 56 times as long as a kernel, and its verification used the time of the race."""

    class SlowVerification(FakeWorker):
        def attempt(self, candidate: Candidate, deadline: float | None, cutoff_s: float | None) -> Attempted:
            attempted = super().attempt(candidate, deadline, cutoff_s)
            self.clock.now += 0.1  # exploring uses its whole share
            packing = "aten:ahead" if candidate.backend == "aten" and candidate.template != "mm" else attempted.packing
            return msgspec.structs.replace(attempted, packing=packing)

        def confirm(self, candidate: Candidate, deadline: float | None) -> Confirmed:
            self.clock.now += 16 * self.seconds(candidate)
            return Confirmed(Verdict("within_bound"))

    worker = SlowVerification(clock, lambda c: (0.15 if c.template == "mm" else 5e-3) if c.backend == "aten" else 1e-3)
    run_session(clock, worker, seconds)
    assert worker.race_s >= 0.24 * (seconds or 6.0)
    assert "mm" not in {c.template for c in worker.raced}


def test_race_starts_with_the_best_candidate_of_each_layout(clock: FakeTime) -> None:
    worker = FakeWorker(clock, lambda c: (1e-2 if c["nr"] == 64 else 1.2e-2) if c.backend == "native" else 2e-2)
    run_session(clock, worker, 6.0)
    widths = [c["nr"] for c in worker.raced if c.backend == "native"]
    assert len(set(widths[:2])) == 2


def test_candidates_that_fail_to_build_are_not_tried(clock: FakeTime) -> None:
    built: list[str] = []

    def build_some(problem: Problem, candidates: Sequence[Candidate], target: Target) -> dict[str, Any]:
        built.extend(candidate.id for candidate in candidates)
        failed, good = finished(Verdict("build_failed", "no")), finished(Artifact(candidates[0], ""))
        return {c.id: failed if c.backend == "native" and c["nr"] != 64 else good for c in candidates}

    worker = FakeWorker(clock, lambda c: 1e-3 if c.backend == "native" else 2e-3)
    run_session(clock, worker, 6.0, build=build_some)
    assert {c["nr"] for c in worker.tried if c.backend == "native"} == {64}
    assert {c.id for c in worker.tried} < set(built)


def test_likely_candidates_are_built_ahead(clock: FakeTime) -> None:
    """Each likely candidate is built once, and none that has been built."""
    built: set[str] = set()
    built_ahead: list[str] = []

    def build_all(problem: Problem, candidates: Sequence[Candidate], target: Target) -> dict[str, Any]:
        built.update(candidate.id for candidate in candidates)
        return {candidate.id: finished(Artifact(candidate, "")) for candidate in candidates}

    def build_ahead(problem: Problem, candidates: Sequence[Candidate], target: Target) -> None:
        assert not built & {candidate.id for candidate in candidates}
        built_ahead.extend(candidate.id for candidate in candidates)

    worker = FakeWorker(clock, lambda c: 1e-3 if c.backend == "native" else 2e-3)
    run_session(clock, worker, None, build=build_all, build_ahead=build_ahead)
    assert built_ahead
    tried = {candidate.id for candidate in worker.tried}
    assert len(tried & set(built_ahead)) > 0.5 * len(set(built_ahead))


@pytest.mark.parametrize("hot", [False, True])
def test_hot_option_is_passed_to_the_race(clock: FakeTime, hot: bool) -> None:
    worker = FakeWorker(clock, lambda c: 1e-3)
    run_session(clock, worker, 6.0, hot=hot)
    assert worker.hot is hot


def test_candidate_wrong_after_its_race_fails_and_the_race_is_repeated(clock: FakeTime) -> None:
    class WrongAfterRace(FakeWorker):
        races = 0

        def race(self, candidates: Sequence[Candidate], *args: Any) -> RaceResult:
            raced = super().race(candidates, *args)
            self.races += 1
            if self.races == 1 and raced.leader is not None:
                raced.faults = {raced.leader: Verdict("wrong", "right before the race, wrong after it: idle")}
            return raced

    worker, store = (
        WrongAfterRace(clock, lambda candidate: 1e-3 if candidate.backend == "native" else 2e-3),
        MemoryStore(),
    )
    target = TARGET
    decision = run_alone(TuningSession(PROBLEM, target, ("aten", "native"), store, worker, silent, 0).steps(None, None))
    failed = {row.id: row for row in decision.evidence if row.stage == "failed"}
    assert worker.races == 2
    assert len(failed) == 1
    assert decision.chosen not in failed
    (row,) = failed.values()
    assert row.verdict is not None
    assert "after it" in row.verdict.detail
    assert set(store.failures(target, PROBLEM.key)) == set(failed)


def native_layouts() -> list[str]:
    """Return the packed layouts of the native candidates, in the order of the candidates."""
    native = backends.get("native")
    candidates = [item for item in native.candidates(PROBLEM, TARGET) if isinstance(item, Candidate)]
    names = dict.fromkeys(native.packing_of(PROBLEM, candidate) for candidate in candidates)
    return [name for name in names if name is not None]


@pytest.mark.parametrize("seconds", [None, 3.0])
def test_layouts_of_other_m_are_raced_with_little_time(clock: FakeTime, seconds: float | None) -> None:
    """One layout serves all M of a weight: a layout without a kernel at one M cannot serve at any."""
    layout = native_layouts()[-1]

    def packing(candidate: Candidate) -> str | None:
        return backends.get(candidate.backend).packing_of(PROBLEM, candidate)

    def call_s(candidate: Candidate) -> float:
        return (2e-2 if packing(candidate) == layout else 1.8e-2) if candidate.backend == "native" else 6e-2

    class WorkerWithLayouts(FakeWorker):
        def attempt(self, candidate: Candidate, deadline: float | None, cutoff_s: float | None) -> Attempted:
            return msgspec.structs.replace(super().attempt(candidate, deadline, cutoff_s), packing=packing(candidate))

    default_worker, layout_worker = WorkerWithLayouts(clock, call_s), WorkerWithLayouts(clock, call_s)
    run_session(clock, default_worker, seconds)
    run_session(clock, layout_worker, seconds, layouts=["another:layout", layout])
    assert layout not in map(packing, default_worker.raced)
    assert layout in map(packing, layout_worker.raced)
    assert next(packing(c) for c in layout_worker.tried if c.backend == "native") == layout


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


def decide(
    worker: FakeWorker, seconds: float | None, count: int | None = None, progress: Progress = silent
) -> Decision:
    """Return the decision of a session whose search is a ``ListedSearch`` of ``count``."""

    def search(candidates: Sequence[Candidate], options: SearchOptions) -> ListedSearch:
        return ListedSearch(candidates, count)

    names = ("aten", "native")
    tuning = TuningSession(PROBLEM, TARGET, names, MemoryStore(), worker, progress, 0, search=search)
    return run_alone(tuning.steps(seconds, None))


def native_candidates() -> list[Candidate]:
    listed = backends.get("native").candidates(PROBLEM, TARGET)
    return [item for item in listed if isinstance(item, Candidate)]


def test_exploring_takes_half_of_a_users_budget(clock: FakeTime) -> None:
    times: list[float] = []

    class Recording(FakeWorker):
        def attempt(self, candidate: Candidate, deadline: float | None, cutoff_s: float | None) -> Attempted:
            attempted = super().attempt(candidate, deadline, cutoff_s)
            times.append(self.clock.now)
            return attempted

    start = clock.now
    worker = Recording(clock, lambda c: 1e-2 if c.backend == "native" else 2e-2)
    decide(worker, 3.0)
    assert len(worker.tried) < len(native_candidates())
    assert 0.45 * 3.0 < times[-1] - start < 0.55 * 3.0


def test_evidence_has_the_stage_that_a_candidate_reached_in_the_race(clock: FakeTime) -> None:
    class ExcludesTheLast(FakeWorker):
        def race(self, candidates: Sequence[Candidate], *args: Any) -> RaceResult:
            raced = super().race(candidates, *args)
            last = raced.evidence[candidates[-1].id]
            last = msgspec.structs.replace(last, stage="untried", reason="short of memory", sample=None)
            return msgspec.structs.replace(raced, evidence={**raced.evidence, last.id: last})

    worker = ExcludesTheLast(clock, lambda c: 1e-3 if c.backend == "native" else 1.1e-3)
    decision = decide(worker, 6.0)
    stages = {row.id: row.stage for row in decision.evidence}
    *others, last = (candidate.id for candidate in worker.raced)
    assert {stages[name] for name in others if name != decision.chosen} == {"finalist"}
    assert stages[decision.chosen or ""] == "winner"
    assert stages[last] == "screened"


def test_checked_candidate_that_is_not_raced_has_the_reason(clock: FakeTime) -> None:
    """The best candidate of a layout that other M may share is checked, although it is too slow to race."""
    slow = next(c["nr"] for c in native_candidates() if c["nr"] != native_candidates()[0]["nr"])
    worker = FakeWorker(clock, lambda c: (3e-3 if c["nr"] == slow else 1e-3) if c.backend == "native" else 4e-3)
    decision = decide(worker, 60.0, 200)
    raced = {candidate.id for candidate in worker.raced}
    reasons = {row.id: row.reason for row in decision.evidence}
    assert any(
        reasons[c.id] == "3.00x the best screening time: not raced"
        for c in native_candidates() if c["nr"] == slow and c.id in reasons
    )  # fmt: skip
    assert not any("not raced" in reasons[name] for name in raced)


def test_second_timing_without_a_check_leaves_the_verdict_of_the_first(clock: FakeTime) -> None:
    class ChecksOnce(FakeWorker):
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
def test_raw_kernel_is_raced_within_eight_times_the_best_packed_one(
    clock: FakeTime, seconds: float, is_raced: bool
) -> None:
    raw = native_candidates()[0]

    class Unpacked(FakeWorker):
        def attempt(self, candidate: Candidate, deadline: float | None, cutoff_s: float | None) -> Attempted:
            attempted = super().attempt(candidate, deadline, cutoff_s)
            return msgspec.structs.replace(attempted, packing=None) if candidate == raw else attempted

    worker = Unpacked(clock, lambda c: (seconds if c == raw else 1e-3) if c.backend == "native" else 1e-2)
    decide(worker, None)
    assert (raw in worker.raced) is is_raced


def test_events_tell_how_many_candidates_the_remaining_time_allows(clock: FakeTime) -> None:
    counts: list[tuple[float, int]] = []

    def progress(event: object) -> None:
        if isinstance(event, CandidateTried):
            counts.append((clock.now - start, event.left))

    start = clock.now
    worker = FakeWorker(clock, lambda c: 1e-2, open_s=0.0)
    decide(worker, 6.0, progress=progress)
    for number, (elapsed_s, left) in enumerate(counts, start=1):
        assert left == pytest.approx(max(0.0, 3.0 - elapsed_s) / (elapsed_s / number), abs=1.5)
    assert counts[0][1] > 50


def test_candidates_far_behind_have_a_cutoff(clock: FakeTime) -> None:
    """The cutoff of ATen's candidates is a multiple of ATen's best time, that of the others of the best time of all."""
    cutoffs: dict[str, float | None] = {}

    class RecordsCutoffs(FakeWorker):
        def attempt(self, candidate: Candidate, deadline: float | None, cutoff_s: float | None) -> Attempted:
            cutoffs.setdefault(candidate.id, cutoff_s)
            return super().attempt(candidate, deadline, cutoff_s)

    worker = RecordsCutoffs(clock, lambda c: 1e-3 if c.backend == "native" else 4e-3)
    decide(worker, None, 12)
    aten = [cutoffs[c.id] for c in worker.tried if c.backend == "aten"]
    native = [cutoffs[c.id] for c in worker.tried if c.backend == "native"]
    assert aten[0] is None
    assert aten[1:] == pytest.approx([exploration.CLOSE_BASELINE * 4e-3] * len(aten[1:]))
    assert native[0] == pytest.approx(exploration.CLOSE * 4e-3)
    assert native[1] == pytest.approx(exploration.CLOSE * 1e-3)


def test_two_lost_races_leave_the_fastest_baseline_and_no_decision(clock: FakeTime) -> None:
    class LosesRaces(FakeWorker):
        races = 0

        def race(self, candidates: Sequence[Candidate], *args: Any) -> RaceResult:
            self.races += 1
            raise WorkerError("the connection was closed")

    worker = LosesRaces(clock, lambda c: 1e-3 if c.backend == "native" else 4e-3)
    decision = decide(worker, 6.0, 12)
    assert worker.races == 2
    assert decision.outcome == "inconclusive"
    assert (decision.chosen or "").startswith("aten/")
    assert "the race failed: the connection was closed" in decision.stopped


@pytest.mark.parametrize("seconds", [None, 6.0])
def test_preparing_operands_takes_little_of_the_default_budget_and_all_it_needs_of_a_users(
    clock: FakeTime, seconds: float | None
) -> None:
    worker = FakeWorker(clock, lambda c: 1e-3 if c.backend == "native" else 2e-3, open_s=4.0)
    assert run_session(clock, worker, seconds) == pytest.approx(6.0 if seconds else 4.0 + 0.7 * 6.0, abs=0.1)
    assert (len(worker.tried) > 30) == (seconds is None)


@pytest.mark.parametrize(
    ("call_s", "seconds", "race_s"),
    [
        (1e-3, 4.0, 0.2),  # 5% of the budget
        (1.0, 4.0, 0.2),
        (1e-3, None, 3.0),  # 50% of the default budget
        (5e-2, None, 4.0),  # 80 calls
        (1.0, None, 4.5),  # 75% of the default budget
    ],
)
def test_race_has_a_least_duration_when_the_budget_is_spent(
    clock: FakeTime, call_s: float, seconds: float | None, race_s: float
) -> None:
    class SlowVerification(FakeWorker):
        def confirm(self, candidate: Candidate, deadline: float | None) -> Confirmed:
            self.clock.now += 20.0
            return Confirmed(Verdict("within_bound"))

    worker = SlowVerification(clock, lambda c: call_s if c.backend == "native" else 2 * call_s)
    decide(worker, seconds, 4)
    assert worker.race_s == pytest.approx(race_s)


@pytest.mark.parametrize("seconds", [None, 4.0])
def test_race_has_the_remaining_time(clock: FakeTime, seconds: float | None) -> None:
    start = clock.now
    worker = FakeWorker(clock, lambda c: 1e-4 if c.backend == "native" else 2e-4)
    decide(worker, seconds, 4)
    assert clock.now - start == pytest.approx(seconds or 6.0)
    assert worker.race_s > 0.5 * (seconds or 6.0)


def test_race_on_a_gpu_has_a_limit(clock: FakeTime) -> None:
    gpu = Target("cuda", "NVIDIA H200", "9.0", caches=(232448, 0, 60 << 20), cores=132)
    worker = FakeWorker(clock, lambda c: 1e-5)
    run_alone(TuningSession(PROBLEM, gpu, ("aten",), MemoryStore(), worker, silent, 0).steps(None, None))  # type: ignore[arg-type]
    limit_s = devices.get("cuda").profile.race_s
    assert limit_s is not None
    assert worker.race_s == limit_s


def test_baseline_that_crashes_once_is_checked_again(clock: FakeTime) -> None:
    """Another kernel may have damaged the heap that it crashed on. A kernel that crashes itself is not tried again."""
    checks: list[str] = []

    class CrashesOnce(FakeWorker):
        def confirm(self, candidate: Candidate, deadline: float | None) -> Confirmed:
            checks.append(candidate.id)
            crashes = checks.count(candidate.id) == 1
            return Confirmed(Verdict("crashed", "signal 11") if crashes else Verdict("within_bound"))

    worker = CrashesOnce(clock, lambda c: 1e-3 if c.backend == "native" else 2e-3)
    decision = decide(worker, 6.0, 4)
    rows = {row.id: row for row in decision.evidence}
    assert {rows[name].stage for name in checks if name.startswith("native")} == {"failed"}
    assert "failed" not in {rows[name].stage for name in checks if name.startswith("aten")}
    assert {checks.count(name) for name in checks if name.startswith("native")} == {1}
    assert {checks.count(name) for name in checks if name.startswith("aten")} == {2}


@pytest.mark.parametrize("kind", ["wrong", "crashed"])
def test_without_a_candidate_that_passes_nothing_is_valid(clock: FakeTime, kind: Any) -> None:
    checks: list[str] = []

    class FailsEverything(FakeWorker):
        def confirm(self, candidate: Candidate, deadline: float | None) -> Confirmed:
            checks.append(candidate.id)
            return Confirmed(Verdict(kind, "no"))

    decision = decide(FailsEverything(clock, lambda c: 1e-3), 6.0, 4)
    assert (decision.outcome, decision.chosen, decision.alternatives) == ("none_valid", None, {})
    assert decision.stopped.endswith("; no candidate passed its checks")
    assert {checks.count(name) for name in checks if name.startswith("native")} == {1}
    assert {checks.count(name) for name in checks if name.startswith("aten")} == {2 if kind == "crashed" else 1}


def test_candidate_whose_race_loses_the_worker_fails_and_the_others_race_again(clock: FakeTime) -> None:
    class LosesOneRace(FakeWorker):
        lost: str | None = None

        def race(self, candidates: Sequence[Candidate], *args: Any) -> RaceResult:
            if self.lost is None:
                self.lost = candidates[1].id
                raise WorkerLost(Verdict("hung", "no reply"), self.lost)
            return super().race(candidates, *args)

    worker = LosesOneRace(clock, lambda c: 1e-3 if c.backend == "native" else 2e-3)
    decision = decide(worker, 6.0, 6)
    row = decision.find(worker.lost)
    assert row is not None
    assert (row.stage, row.reason) == ("failed", "no reply")
    assert worker.lost not in {candidate.id for candidate in worker.raced}
    assert decision.outcome == "winner"


def test_race_that_loses_the_worker_twice_without_a_culprit_decides_nothing(clock: FakeTime) -> None:
    class LosesRaces(FakeWorker):
        races = 0

        def race(self, candidates: Sequence[Candidate], *args: Any) -> RaceResult:
            self.races += 1
            raise WorkerLost(Verdict("crashed", "signal 9"), None)

    worker = LosesRaces(clock, lambda c: 1e-3 if c.backend == "native" else 2e-3)
    decision = decide(worker, 6.0, 6)
    assert worker.races == 2
    assert decision.outcome == "inconclusive"
    assert "the race was lost: signal 9" in decision.stopped
    assert "failed" not in {row.stage for row in decision.evidence}


def test_lost_races_without_a_valid_baseline_leave_nothing_valid(clock: FakeTime) -> None:
    class WithoutBaseline(FakeWorker):
        def confirm(self, candidate: Candidate, deadline: float | None) -> Confirmed:
            return Confirmed(Verdict("wrong", "no") if candidate.backend == "aten" else Verdict("within_bound"))

        def race(self, candidates: Sequence[Candidate], *args: Any) -> RaceResult:
            raise WorkerError("the connection was closed")

    decision = decide(WithoutBaseline(clock, lambda c: 1e-3), 6.0, 6)
    assert (decision.outcome, decision.chosen) == ("none_valid", None)


def test_race_after_one_lost_race_counts(clock: FakeTime) -> None:
    class LosesOneRace(FakeWorker):
        races = 0

        def race(self, candidates: Sequence[Candidate], *args: Any) -> RaceResult:
            self.races += 1
            if self.races == 1:
                raise WorkerError("the connection was closed")
            return super().race(candidates, *args)

    worker = LosesOneRace(clock, lambda c: 1e-3 if c.backend == "native" else 2e-3)
    assert decide(worker, 6.0, 6).outcome == "winner"
    assert worker.races == 2


def test_layout_of_a_candidate_that_failed_in_the_race_is_left_out(clock: FakeTime) -> None:
    class FailsOne(FakeWorker):
        def race(self, candidates: Sequence[Candidate], *args: Any) -> RaceResult:
            raced = super().race(candidates, *args)
            first, second = (c for c in candidates[1:3])
            failed = msgspec.structs.replace(raced.evidence[second.id], verdict=Verdict("crashed", "signal 11"))
            layouts = {
                name: LayoutDecision("winner", candidate.id, candidates[0].id, 0.5, 0.4, 0.6)
                for name, candidate in (("kept", first), ("lost", second))
            }
            return msgspec.structs.replace(
                raced, layouts=layouts, evidence={**raced.evidence, second.id: failed}, alternatives={"lost": second.id}
            )

    worker = FailsOne(clock, lambda c: 1e-3 if c.backend == "native" else 2e-3)
    decision = decide(worker, 6.0, 6)
    assert set(decision.layouts) == {"kept"}
    assert "lost" not in decision.alternatives
    row = decision.find(worker.raced[2].id)
    assert row is not None
    assert (row.stage, row.reason) == ("failed", "signal 11")


def test_next_raw_kernel_is_checked_when_the_first_one_fails(clock: FakeTime) -> None:
    """The raw layout has a paired test only when a kernel and a candidate of ATen on the raw weight are checked."""
    raw = native_candidates()[1:7]

    class SlowVerification(FakeWorker):
        def __init__(self, failing: int) -> None:
            super().__init__(clock, self.call_s)
            self.failing = {candidate.id for candidate in raw[:failing]}

        @staticmethod
        def call_s(candidate: Candidate) -> float:
            if candidate.backend == "aten":
                return 2e-3
            return 1.5e-3 + 1e-5 * raw.index(candidate) if candidate in raw else 1e-3

        def attempt(self, candidate: Candidate, deadline: float | None, cutoff_s: float | None) -> Attempted:
            packing = None if candidate in raw or candidate.backend == "aten" else "native:packed"
            return msgspec.structs.replace(super().attempt(candidate, deadline, cutoff_s), packing=packing)

        def confirm(self, candidate: Candidate, deadline: float | None) -> Confirmed:
            self.clock.now += 5.0
            return Confirmed(Verdict("wrong", "no") if candidate.id in self.failing else Verdict("within_bound"))

    for failing, is_raced in ((0, True), (1, True), (3, True), (4, False)):
        worker = SlowVerification(failing)
        decide(worker, None, 8)
        assert (raw[failing] in worker.raced) is is_raced
        assert raw[failing + 1] not in worker.raced


def test_users_budget_leaves_the_raw_pair_unchecked(clock: FakeTime) -> None:
    raw = native_candidates()[1]

    class SlowVerification(FakeWorker):
        def attempt(self, candidate: Candidate, deadline: float | None, cutoff_s: float | None) -> Attempted:
            packing = None if candidate == raw or candidate.backend == "aten" else "native:packed"
            return msgspec.structs.replace(super().attempt(candidate, deadline, cutoff_s), packing=packing)

        def confirm(self, candidate: Candidate, deadline: float | None) -> Confirmed:
            self.clock.now += 5.0
            return Confirmed(Verdict("within_bound"))

    worker = SlowVerification(clock, lambda c: 2e-3 if c.backend == "aten" else 1.5e-3 if c == raw else 1e-3)
    decide(worker, 6.0, 8)
    assert raw not in worker.raced
    assert len(worker.raced) == 2


def test_problem_that_no_worker_can_open_has_no_valid_candidate(clock: FakeTime) -> None:
    worker = FakeWorker(clock, lambda c: 1e-3)
    tuning = TuningSession(PROBLEM, TARGET, ("aten", "native"), MemoryStore(), worker, silent, 3)
    decision = tuning.none_valid_decision("the worker did not start")
    assert (decision.outcome, decision.chosen, decision.alternatives) == ("none_valid", None, {})
    assert (decision.stopped, decision.seed) == ("the worker did not start", 3)
    assert {row.stage for row in decision.evidence} <= {"untried", "illegal"}
    run_alone(tuning.steps(6.0, 12))
    after = tuning.none_valid_decision("lost")
    assert after.alternatives == {}
    assert "winner" in {row.stage for row in after.evidence}


def test_decision_names_its_problem_and_its_target(clock: FakeTime) -> None:
    decision = decide(FakeWorker(clock, lambda c: 1e-3 if c.backend == "native" else 2e-3), 6.0, 6)
    assert (decision.problem_key, decision.target_key) == (PROBLEM.key, TARGET.key)
    assert Problem.from_dict(decision.problem) == PROBLEM
    assert decision.created == clock.now


def test_leader_of_the_race_is_reported(clock: FakeTime) -> None:
    events: list[object] = []

    class Reports(FakeWorker):
        def race(
            self, candidates: Sequence[Candidate], budget_s: float, seed: int, progress: Any, hot: bool, earlier_s: Any
        ) -> RaceResult:
            progress(LeaderUpdate(candidates[1].id, 0.125, 0.5))
            self.earlier_s = earlier_s
            return super().race(candidates, budget_s, seed, progress, hot, earlier_s)

    worker = Reports(clock, lambda c: 1e-3 if c.backend == "native" else 2e-3)
    decide(worker, 6.0, 6, progress=events.append)
    assert events[-1] == BestSoFar(worker.raced[1].id, 0.125, 0.5)
    assert worker.earlier_s == {c.id: worker.seconds(c) for c in worker.raced}


def test_users_budget_keeps_the_time_that_checking_and_racing_the_best_two_takes(clock: FakeTime) -> None:
    """A timing takes half a second besides its calls, as much as the race of the best two needs in all."""

    class SlowTimings(FakeWorker):
        def attempt(self, candidate: Candidate, deadline: float | None, cutoff_s: float | None) -> Attempted:
            attempted = super().attempt(candidate, deadline, cutoff_s)
            self.clock.now += 0.5 * len(attempted.times_s)
            return attempted

        def confirm(self, candidate: Candidate, deadline: float | None) -> Confirmed:
            return Confirmed(Verdict("within_bound"))

    worker = SlowTimings(clock, lambda c: 1e-3)
    decide(worker, 20.0, 8)
    assert len(worker.tried) > 3
    assert sorted(c.backend for c in worker.raced) == ["aten", "native"]


def test_as_many_kernels_as_race_are_checked_when_time_is_short(clock: FakeTime) -> None:
    checks: list[str] = []

    class FailsSlowly(FakeWorker):
        def confirm(self, candidate: Candidate, deadline: float | None) -> Confirmed:
            self.clock.now += 5.0
            checks.append(candidate.backend)
            return Confirmed(Verdict("wrong" if candidate.backend == "native" else "within_bound", "no"))

    decision = decide(FailsSlowly(clock, lambda c: 1e-3), 6.0, 30)
    assert decision.outcome == "tie"
    assert checks == ["aten"] + ["native"] * devices.get("cpu").profile.max_raced
