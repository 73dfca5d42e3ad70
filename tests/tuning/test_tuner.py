"""The tuner: decisions come whatever candidates do, failures are remembered, finished work is kept."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import psutil
import pytest

from gemmtune import backends
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision
from gemmtune.core.errors import StoreError
from gemmtune.core.events import BestSoFar, CandidateTried, Event, ProblemDone, ProblemStarted
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.target import Target, current_cpu
from gemmtune.core.workloads import build
from gemmtune.store import MemoryStore
from gemmtune.testing import hostile_backend
from gemmtune.testing.hostile_backend import HostileBackend
from gemmtune.tuning import tuner as tuner_module
from gemmtune.tuning.tuner import Budget, Tuner, _WorkerPool
from gemmtune.workers.process_tags import VARIABLE
from gemmtune.workers.worker import Limits, LocalWorker, Worker, WorkerStartError
from helpers.factories import ATEN, NATIVE, SLOW, make_decision, make_evidence

PROBLEM = Problem("mm", 5, 24, 32, Operand("float32"), Operand("float32", Layout("col"), constant=True), "float32")
QUICK = Budget(seconds=8.0)  # generous: tiny kernels need little of it, and a busy machine must not change a test
FAST = Limits(try_s=2.0, race_slack_s=2.0)


def kind(name: str) -> str:
    return Candidate.make("hostile", name, kind=name).id


def ours() -> set[psutil.Process]:
    """Living descendants of this process that come of a worker's host."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if VARIABLE in process.environ():
                found.add(process)
    return found


@pytest.fixture(scope="module")
def target() -> Target:
    return replace(current_cpu(), threads=1)  # OpenMP barriers stall when other tests keep the cores busy


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Choose what the hostile backend lists."""
    backends.register("hostile", hostile_backend.ENTRY_POINT)

    def choose(*kinds: str, illegal: int = 0) -> None:
        monkeypatch.setattr(HostileBackend, "kinds", kinds)
        monkeypatch.setattr(HostileBackend, "illegal", illegal)

    return choose


@pytest.fixture
def tune(target: Target, store: MemoryStore) -> Callable[..., Decision]:
    def run(problem: Problem = PROBLEM, budget: Budget = QUICK, **options: object) -> Decision:
        options.setdefault("isolate", False)
        tuner = Tuner(target, ["aten", "hostile"], store, budget, **options)  # type: ignore[arg-type]
        (decision,) = tuner.tune([(problem, 1)])
        return decision

    return run


def assert_sound(decision: Decision, problem: Problem = PROBLEM) -> None:
    """Whatever it offers to serve has passed every check."""
    assert decision.problem_key == problem.key
    for name in (decision.chosen, *decision.alternatives.values()):
        row = decision.find(name)
        assert row is not None
        assert row.verdict is not None
        assert row.verdict.ok
        assert row.sample is not None
        assert row.verdict.detail != "checked on one draw of operands only"


def test_a_decision_with_evidence(
    tune: Callable[..., Decision], hostile: Callable[..., None], store: MemoryStore, target: Target
) -> None:
    hostile("good", "packed", "wrong", "raise", illegal=50)
    decision = tune()
    assert_sound(decision)
    assert decision.outcome in ("winner", "tie", "inconclusive")  # the last on a machine that others use
    assert set(decision.alternatives) >= {"", hostile_backend.PACKING}
    assert decision.alternatives[hostile_backend.PACKING] == kind("packed")
    stages = {row.id: row.stage for row in decision.evidence}
    assert stages[kind("wrong")] == stages[kind("raise")] == "failed"
    assert stages["aten/mm"] != "failed"
    illegal = [row for row in decision.evidence if row.stage == "illegal" and row.candidate["backend"] == "hostile"]
    assert len(illegal) == 4
    assert illegal[-1].reason == "3 is no good (and 46 more like it)"
    assert store.get(target, PROBLEM.key) == decision
    assert set(store.failures(target, PROBLEM.key)) == {kind("wrong"), kind("raise")}


def test_a_hit_starts_nothing(
    tune: Callable[..., Decision], hostile: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile("good")
    first = tune()
    monkeypatch.setattr(Worker, "start", lambda self: pytest.fail("a worker was started for a hit"))
    events: list[Event] = []
    assert tune(progress=events.append, isolate=True) == first
    assert events == [ProblemStarted(0, 1, PROBLEM, cached=True), ProblemDone(0, 1, first, 0.0)]


def test_latency_reaches_whoever_times(
    tune: Callable[..., Decision], hostile: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile("good")
    seen, make = [], LocalWorker.__init__

    def init(self: LocalWorker, target: Target, *, latency: str, **more: object) -> None:
        seen.append(latency)
        make(self, target, latency=latency, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalWorker, "__init__", init)
    tune(latency="eager")
    assert seen == ["eager"]


def test_an_unknown_latency_is_refused(target: Target, store: MemoryStore) -> None:
    with pytest.raises(ValueError, match="graph, eager; got 'fast'"):
        Tuner(target, ["aten"], store, latency="fast")  # type: ignore[arg-type]


def test_force_tunes_again(tune: Callable[..., Decision], hostile: Callable[..., None]) -> None:
    hostile("good")
    first = tune()
    again = tune(force=True)
    assert again.created > first.created


def test_events_tell_the_story(tune: Callable[..., Decision], hostile: Callable[..., None]) -> None:
    hostile("good", "wrong")
    events: list[Event] = []
    decision = tune(progress=events.append)
    assert events[0] == ProblemStarted(0, 1, PROBLEM, cached=False)
    assert events[-1] == ProblemDone(0, 1, decision, 0.0)
    tried = {event.candidate_id: event for event in events if isinstance(event, CandidateTried)}
    assert set(tried) == {row.id for row in decision.evidence if row.stage not in ("illegal", "untried")}
    assert tried[kind("wrong")].median_s is None
    assert [event.left for event in events if isinstance(event, CandidateTried)][-1] == 0
    assert any(isinstance(event, BestSoFar) for event in events)


def test_everything_that_can_go_wrong_in_a_worker(
    tune: Callable[..., Decision], hostile: Callable[..., None], store: MemoryStore, target: Target
) -> None:
    before = ours()
    bad = ("segv", "hang", "exit", "wrong", "raise", "sys_exit", "oom", "unbuildable", "late_segv")
    hostile("good", *bad)
    decision = tune(budget=Budget(seconds=60.0), isolate=True, limits=FAST)
    assert_sound(decision)
    verdicts = {name: decision.find(kind(name)) for name in bad}
    kinds = {name: row.verdict.kind for name, row in verdicts.items() if row is not None and row.verdict is not None}
    assert kinds == {
        "segv": "crashed", "hang": "hung", "exit": "crashed", "wrong": "wrong", "raise": "crashed",
        "sys_exit": "crashed", "oom": "out_of_memory", "unbuildable": "build_failed", "late_segv": "crashed",
    }  # fmt: skip
    row = decision.find(kind("good"))
    assert row is not None
    assert row.verdict is None or row.verdict.ok
    remembered = set(store.failures(target, PROBLEM.key))
    assert remembered == {kind(name) for name in bad if name != "unbuildable"}
    assert ours() <= before


def test_remembered_failures_are_not_tried_again(
    tune: Callable[..., Decision], hostile: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile("good", "raise")
    tune()
    monkeypatch.setattr(HostileBackend, "load", _load_but_raise)
    row = tune(force=True).find(kind("raise"))
    assert row is not None
    assert row.stage == "failed"
    assert row.reason == "not tried again: crashed before"


def _load_but_raise(self: HostileBackend, artifact: object, problem: Problem) -> hostile_backend.HostileKernel:
    candidate: Candidate = artifact.candidate  # type: ignore[attr-defined]
    if candidate["kind"] == "raise":
        pytest.fail("a remembered failure was tried again")
    return hostile_backend.HostileKernel(problem, candidate)


def test_none_valid_when_nothing_passes(
    tune: Callable[..., Decision], hostile: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile("wrong", "raise")
    monkeypatch.setattr("gemmtune.backends.aten.AtenBackend.candidates", lambda *_: iter(()))
    decision = tune()
    assert (decision.outcome, decision.chosen, decision.alternatives) == ("none_valid", None, {})


def test_without_aten_the_best_of_the_rest_wins(
    tune: Callable[..., Decision], hostile: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile("good")
    monkeypatch.setattr("gemmtune.backends.aten.AtenBackend.candidates", lambda *_: iter(()))
    decision = tune()
    assert (decision.outcome, decision.chosen) == ("winner", kind("good"))


def test_aten_is_always_a_candidate(target: Target, store: MemoryStore, hostile: Callable[..., None]) -> None:
    hostile("good")
    (decision,) = Tuner(target, ["hostile"], store, QUICK, isolate=False).tune([(PROBLEM, 1)])
    assert decision.find("aten/mm") is not None


def test_duplicates_are_tuned_once_and_the_heaviest_first(target: Target, store: MemoryStore) -> None:
    small, large = PROBLEM, PROBLEM.with_m(50)
    started: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, ProblemStarted):
            started.append(event.problem.key)

    tuner = Tuner(target, ["aten"], store, QUICK, note, isolate=False)
    decisions = tuner.tune([(small, 4), (large, 1), (small, 3)])
    assert [row.problem_key for row in decisions] == [small.key, large.key]
    assert started == [large.key, small.key]
    again = tuner.tune([(small, 1)])
    if decisions[0].outcome != "inconclusive":  # what others' use of the machine left undecided is tuned again
        assert again == decisions[:1]


def test_ctrl_c_keeps_what_is_finished(target: Target, store: MemoryStore) -> None:
    before = ours()
    first, second = PROBLEM.with_m(50), PROBLEM

    def interrupt(event: Event) -> None:
        if isinstance(event, CandidateTried) and finished:
            raise KeyboardInterrupt
        if isinstance(event, ProblemDone):
            finished.append(event.decision)

    finished: list[Decision] = []
    tuner = Tuner(target, ["aten"], store, QUICK, interrupt)
    with pytest.raises(KeyboardInterrupt):
        tuner.tune([(first, 1), (second, 1)])
    assert [row.problem_key for row in store.decisions()] == [first.key]
    assert list(store.decisions()) == finished
    assert ours() <= before


def test_the_candidate_budget_holds(tune: Callable[..., Decision], hostile: Callable[..., None]) -> None:
    hostile("good", "packed")
    decision = tune(budget=Budget(seconds=5.0, candidates=3))
    assert sum(row.stage not in ("illegal", "untried") for row in decision.evidence) == 3


def test_the_budget_of_seconds_holds_roughly(tune: Callable[..., Decision], hostile: Callable[..., None]) -> None:
    hostile(*(["good"] * 3))
    start = time.perf_counter()
    decision = tune(budget=Budget(seconds=1.0))
    assert decision.seconds <= time.perf_counter() - start < 20.0  # a loaded machine may take its time
    assert decision.seconds < 20.0


@pytest.mark.parametrize("budget", [{"seconds": 0}, {"seconds": float("nan")}, {"seconds": "1"}, {"candidates": 0}])
def test_a_budget_is_positive(budget: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="positive"):
        Budget(**budget)  # type: ignore[arg-type]


def test_an_unknown_backend(target: Target, store: MemoryStore) -> None:
    with pytest.raises(ValueError, match="unknown backend 'nope'"):
        Tuner(target, ["nope"], store, QUICK, isolate=False).tune([(PROBLEM, 1)])


def test_a_store_that_cannot_be_written_costs_the_record_only(
    tune: Callable[..., Decision],
    hostile: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("disk full")

    hostile("good", "wrong")
    monkeypatch.setattr(MemoryStore, "put", refuse)
    monkeypatch.setattr(MemoryStore, "lease", refuse)
    monkeypatch.setattr(MemoryStore, "remember_failure", refuse)
    decision = tune()
    assert_sound(decision)
    if decision.outcome == "inconclusive":  # on a machine that others use: nothing was to be kept
        return
    assert [record.getMessage() for record in caplog.records] == ["decisions of this run are not kept: disk full"]


def test_a_problem_that_cannot_be_made_costs_only_itself(target: Target, store: MemoryStore) -> None:
    huge = Problem("mm", 1 << 22, 1 << 22, 1 << 22, Operand("float32"), Operand("float32"), "float32")
    tuner = Tuner(target, ["aten"], store, QUICK, limits=Limits(memory=1 << 30))
    lost, found = tuner.tune([(huge, 1), (PROBLEM, 1)])
    assert lost.outcome == "none_valid"
    assert "allocate" in lost.stopped
    assert_sound(found)
    kept = [] if found.outcome == "inconclusive" else [PROBLEM.key]
    assert [row.problem_key for row in store.decisions()] == kept


def test_no_worker_at_all_is_an_error(target: Target, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.workers.process._BOOT", "raise SystemExit('no python today')")
    with pytest.raises(WorkerStartError, match="no python today"):
        Tuner(target, ["aten"], store, QUICK).tune([(PROBLEM, 1)])


GPU = Target("cuda", "NVIDIA H200", "9.0", caches=(232448, 0, 62914560), cores=132, versions=(("hip", "None"),))


@pytest.mark.parametrize(("target", "latency", "expected"), [
    (GPU, "graph", [[2, 3], [4], []]), (GPU, "eager", [[], [], []]), (current_cpu(), "graph", [[], [], []]),
])  # fmt: skip
def test_what_comes_next_is_built_while_a_gpu_times(
    target: Target, latency: str, expected: list[list[int]], store: MemoryStore
) -> None:
    """Two problems ahead, each begun once; never where builds would disturb the host's clock."""
    begun: list[int] = []

    class Recorder:
        def ahead(self, problem: Problem, candidates: list[Candidate], target: Target) -> None:
            assert {candidate.backend for candidate in candidates} == {"triton"}
            begun.append(problem.m)

    problems = [build(m, 256, 512, "bf16") for m in (1, 2, 3, 4)]
    pool = _WorkerPool(target, True, None, "graph")
    pool.builders, pool.pending = Recorder(), problems  # type: ignore[assignment]
    tuner = Tuner(target, ("triton",), store, latency=latency)  # type: ignore[arg-type]
    seen = []
    for problem in problems[:3]:
        tuner._build_ahead(problem, pool)
        seen.append(begun.copy())
        begun.clear()
    assert seen == expected


def test_another_target_is_another_decision(target: Target, store: MemoryStore) -> None:
    Tuner(target, ["aten"], store, QUICK, isolate=False).tune([(PROBLEM, 1)])
    other = replace(target, versions=(("torch", "0"),))
    assert store.get(other, PROBLEM.key) is None


def test_records_stay_small(tune: Callable[..., Decision], hostile: Callable[..., None]) -> None:
    hostile("good", illegal=5000)
    assert len(msgspec.json.encode(tune())) < 100_000


@pytest.mark.parametrize("m", [0, 1])
def test_empty_and_tiny_problems(tune: Callable[..., Decision], hostile: Callable[..., None], m: int) -> None:
    hostile("good")
    problem = PROBLEM.with_m(m)
    assert_sound(tune(problem), problem)


def test_the_lease_is_held_while_tuning_and_given_back(target: Target, store: MemoryStore) -> None:
    held: list[bool] = []

    def watch(event: Event) -> None:
        if isinstance(event, CandidateTried):
            held.append(store.lease_remaining_s(target, PROBLEM.key) is not None)

    Tuner(target, ["aten"], store, QUICK, watch, isolate=False).tune([(PROBLEM, 1)])
    assert held
    assert all(held)
    assert store.lease_remaining_s(target, PROBLEM.key) is None


def test_ctrl_c_gives_the_lease_back(target: Target, store: MemoryStore) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, CandidateTried):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tuner(target, ["aten"], store, QUICK, interrupt, isolate=False).tune([(PROBLEM, 1)])
    assert store.lease_remaining_s(target, PROBLEM.key) is None


def test_the_others_wait_for_the_decision(target: Target, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.tuning.tuner.POLL_S", 0.01)
    tuned, found = [], []
    real = Tuner._tune_one

    def tune_one(self: Tuner, problem: Problem, pool: object) -> Decision:
        tuned.append(problem)
        return real(self, problem, pool)  # type: ignore[arg-type]

    def work() -> None:
        found.extend(Tuner(target, ["aten"], store, QUICK, isolate=False).tune([(PROBLEM, 1)]))

    monkeypatch.setattr(Tuner, "_tune_one", tune_one)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tuned == [PROBLEM]
    assert found == [store.get(target, PROBLEM.key)] * 4


def test_a_tuner_that_does_not_wait_leaves_the_problem_out(target: Target, store: MemoryStore) -> None:
    other = PROBLEM.with_m(6)
    tuner = Tuner(target, ["aten"], store, QUICK, isolate=False, wait=False)
    lease = store.lease(target, PROBLEM.key, 60.0)
    assert lease is not None
    assert [row.problem_key for row in tuner.tune([(PROBLEM, 1), (other, 1)])] == [other.key]
    lease.release()
    assert [row.problem_key for row in tuner.tune([(PROBLEM, 1)])] == [PROBLEM.key]


def test_a_lease_that_runs_out_is_taken_over(
    target: Target, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemmtune.tuning.tuner.POLL_S", 0.01)
    assert store.lease(target, PROBLEM.key, 0.2) is not None
    (decision,) = Tuner(target, ["aten"], store, QUICK, isolate=False).tune([(PROBLEM, 1)])
    assert_sound(decision)


def test_a_session_is_told_the_layouts_of_the_weights_other_m(
    target: Target, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the store knows and those that this run decided, of the same weight's shape alone."""
    told: dict[int, list[str]] = {}

    class Decided:
        """A session that decides at once: packed layouts named after M, the second of them slower."""

        def __init__(self, problem: Problem, *args: object, layouts: list[str], **more: object) -> None:
            self.problem = problem
            told[problem.m] = layouts

        def run(self, seconds: float | None, limit: int | None) -> Decision:
            made = make_decision(self.problem, target=target)
            names = (f"fast{self.problem.m}", f"slow{self.problem.m}")
            rows = [
                make_evidence(candidate, "finalist", ratio * 4e-3, ratio=ratio, packing=packing)
                for candidate, ratio, packing in ((NATIVE, 0.25, names[0]), (SLOW, 0.5, names[1]), (ATEN, 1.0, None))
            ]
            alternatives = dict(zip((*names, ""), (NATIVE.id, SLOW.id, ATEN.id), strict=True))
            return msgspec.structs.replace(made, evidence=tuple(rows), alternatives=alternatives)

    monkeypatch.setattr(tuner_module, "TuningSession", Decided)
    first = build(4, 512, 256, "fp32")
    Tuner(target, ["native"], store, isolate=False).tune([(first, 1)])
    others = [(replace(first, m=64), 1), (replace(first, m=32), 1), (build(7, 256, 256, "fp32"), 1)]
    Tuner(target, ["native"], store, isolate=False).tune(others)
    assert told == {
        4: [],
        64: ["fast4", "slow4"],
        32: ["fast64", "slow64", "fast4", "slow4"],
        7: [],
    }
