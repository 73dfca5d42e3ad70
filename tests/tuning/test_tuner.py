"""Tuner: decisions despite failing candidates, remembered failures, leases and interrupts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from gemmtune import backends
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision
from gemmtune.core.devices import CudaDevice
from gemmtune.core.errors import StoreError
from gemmtune.core.events import BestSoFar, CandidateTried, Event, ProblemDone, ProblemStarted, Progress
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.target import Target, current_cpu
from gemmtune.core.workloads import build
from gemmtune.store import MemoryStore
from gemmtune.testing import hostile_backend
from gemmtune.testing.hostile_backend import HostileBackend
from gemmtune.tuning import tuner as tuner_module
from gemmtune.tuning.tuner import Budget, Tuner
from gemmtune.tuning.turns import Pause, Steps
from gemmtune.tuning.worker_pool import WorkerPool
from gemmtune.verify.inputs import operand_bytes
from gemmtune.workers.contract import Limits, WorkerStartError
from gemmtune.workers.host_pool import HOST_POOL
from gemmtune.workers.local_worker import LocalWorker
from gemmtune.workers.process_tags import VARIABLE
from gemmtune.workers.worker import Worker
from helpers.factories import ATEN, NATIVE, SLOW, make_decision, make_evidence

PROBLEM = Problem("mm", 5, 24, 32, Operand("float32"), Operand("float32", Layout("col"), constant=True), "float32")
QUICK = Budget(seconds=8.0)  # generous: small kernels need little of it, and a loaded machine must not change a test
FAST = Limits(try_s=2.0, race_slack_s=2.0)


def hostile_id(name: str) -> str:
    return Candidate.make("hostile", name, kind=name).id


def worker_processes() -> set[psutil.Process]:
    """Return the hosts among the descendants of this process, and what they started. Those that wait for another
    tuning are ended first."""
    HOST_POOL.close()
    processes = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if VARIABLE in process.environ():
                processes.add(process)
    return processes


@pytest.fixture(scope="module")
def target() -> Target:
    return replace(current_cpu(), threads=1)  # OpenMP barriers stall when other tests use the cores


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the candidates of the hostile backend."""
    backends.register("hostile", hostile_backend.ENTRY_POINT)

    def set_kinds(*kinds: str, illegal: int = 0) -> None:
        monkeypatch.setattr(HostileBackend, "kinds", kinds)
        monkeypatch.setattr(HostileBackend, "illegal", illegal)

    return set_kinds


@pytest.fixture
def tune(target: Target, store: MemoryStore) -> Callable[..., Decision]:
    def run(problem: Problem = PROBLEM, budget: Budget = QUICK, **options: object) -> Decision:
        options.setdefault("isolate", False)
        tuner = Tuner(target, ["aten", "hostile"], store, budget, **options)  # type: ignore[arg-type]
        (decision,) = tuner.tune([(problem, 1)])
        return decision

    return run


def assert_sound(decision: Decision, problem: Problem = PROBLEM) -> None:
    """Assert that the winner and the alternatives have a sample and passed the full verification."""
    assert decision.problem_key == problem.key
    for name in (decision.chosen, *decision.alternatives.values()):
        row = decision.find(name)
        assert row is not None
        assert row.verdict is not None
        assert row.verdict.ok
        assert row.sample is not None
        assert row.verdict.detail != "checked on one draw of operands only"


def test_decision_has_evidence_for_all_candidates(
    tune: Callable[..., Decision], hostile: Callable[..., None], store: MemoryStore, target: Target
) -> None:
    hostile("good", "packed", "wrong", "raise", illegal=50)
    decision = tune()
    assert_sound(decision)
    assert decision.outcome in ("winner", "tie", "inconclusive")  # inconclusive on a loaded machine
    assert set(decision.alternatives) >= {"", hostile_backend.PACKING}
    assert decision.alternatives[hostile_backend.PACKING] == hostile_id("packed")
    stages = {row.id: row.stage for row in decision.evidence}
    assert stages[hostile_id("wrong")] == stages[hostile_id("raise")] == "failed"
    assert stages["aten/mm"] != "failed"
    illegal_rows = [
        row for row in decision.evidence if row.stage == "illegal" and row.candidate["backend"] == "hostile"
    ]
    assert len(illegal_rows) == 4
    assert illegal_rows[-1].reason == "3 is no good (and 46 more like it)"
    assert store.get(target, PROBLEM.key) == decision
    assert set(store.failures(target, PROBLEM.key)) == {hostile_id("wrong"), hostile_id("raise")}


def test_stored_decision_starts_no_worker(
    tune: Callable[..., Decision], hostile: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile("good")
    first = tune()
    monkeypatch.setattr(Worker, "start", lambda self: pytest.fail("a worker was started for a hit"))
    events: list[Event] = []
    assert tune(progress=events.append, isolate=True) == first
    assert events == [ProblemStarted(0, 1, PROBLEM, cached=True), ProblemDone(0, 1, first, 0.0)]


def test_latency_is_passed_to_the_worker(
    tune: Callable[..., Decision], hostile: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile("good")
    latencies, original = [], LocalWorker.__init__

    def init(self: LocalWorker, target: Target, *, latency: str, **options: object) -> None:
        latencies.append(latency)
        original(self, target, latency=latency, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalWorker, "__init__", init)
    tune(latency="eager")
    assert latencies == ["eager"]


def test_unknown_latency_raises_value_error(target: Target, store: MemoryStore) -> None:
    with pytest.raises(ValueError, match="graph, eager; got 'fast'"):
        Tuner(target, ["aten"], store, latency="fast")  # type: ignore[arg-type]


def test_force_repeats_the_tuning(tune: Callable[..., Decision], hostile: Callable[..., None]) -> None:
    hostile("good")
    first = tune()
    again = tune(force=True)
    assert again.created > first.created


def test_events_cover_all_tried_candidates(tune: Callable[..., Decision], hostile: Callable[..., None]) -> None:
    hostile("good", "wrong")
    events: list[Event] = []
    decision = tune(progress=events.append)
    assert events[0] == ProblemStarted(0, 1, PROBLEM, cached=False)
    assert events[-1] == ProblemDone(0, 1, decision, 0.0)
    tried = {event.candidate_id: event for event in events if isinstance(event, CandidateTried)}
    assert set(tried) == {row.id for row in decision.evidence if row.stage not in ("illegal", "untried")}
    assert tried[hostile_id("wrong")].median_s is None
    assert [event.left for event in events if isinstance(event, CandidateTried)][-1] == 0
    assert any(isinstance(event, BestSoFar) for event in events)


def test_failing_candidates_have_verdicts_and_are_remembered(
    tune: Callable[..., Decision], hostile: Callable[..., None], store: MemoryStore, target: Target
) -> None:
    before = worker_processes()
    failing = ("segv", "hang", "exit", "wrong", "raise", "sys_exit", "oom", "unbuildable", "late_segv")
    hostile("good", *failing)
    decision = tune(budget=Budget(seconds=60.0), isolate=True, limits=FAST)
    assert_sound(decision)
    verdicts = {name: decision.find(hostile_id(name)) for name in failing}
    kinds = {name: row.verdict.kind for name, row in verdicts.items() if row is not None and row.verdict is not None}
    assert kinds == {
        "segv": "crashed", "hang": "hung", "exit": "crashed", "wrong": "wrong", "raise": "crashed",
        "sys_exit": "crashed", "oom": "out_of_memory", "unbuildable": "build_failed", "late_segv": "crashed",
    }  # fmt: skip
    row = decision.find(hostile_id("good"))
    assert row is not None
    assert row.verdict is None or row.verdict.ok
    failures = set(store.failures(target, PROBLEM.key))
    assert failures == {hostile_id(name) for name in failing if name != "unbuildable"}
    assert worker_processes() <= before


def test_remembered_failures_are_not_repeated(
    tune: Callable[..., Decision], hostile: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile("good", "raise")
    tune()
    monkeypatch.setattr(HostileBackend, "load", _load_but_raise)
    row = tune(force=True).find(hostile_id("raise"))
    assert row is not None
    assert row.stage == "failed"
    assert row.reason == "not tried again: crashed before"


def _load_but_raise(self: HostileBackend, artifact: object, problem: Problem) -> hostile_backend.HostileKernel:
    candidate: Candidate = artifact.candidate  # type: ignore[attr-defined]
    if candidate["kind"] == "raise":
        pytest.fail("a remembered failure was tried again")
    return hostile_backend.HostileKernel(problem, candidate)


def test_outcome_is_none_valid_when_all_candidates_fail(
    tune: Callable[..., Decision], hostile: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile("wrong", "raise")
    monkeypatch.setattr("gemmtune.backends.aten.AtenBackend.candidates", lambda *_: iter(()))
    decision = tune()
    assert (decision.outcome, decision.chosen, decision.alternatives) == ("none_valid", None, {})


def test_best_candidate_wins_without_aten(
    tune: Callable[..., Decision], hostile: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile("good")
    monkeypatch.setattr("gemmtune.backends.aten.AtenBackend.candidates", lambda *_: iter(()))
    decision = tune()
    assert (decision.outcome, decision.chosen) == ("winner", hostile_id("good"))


def test_aten_candidates_are_always_tried(target: Target, store: MemoryStore, hostile: Callable[..., None]) -> None:
    hostile("good")
    (decision,) = Tuner(target, ["hostile"], store, QUICK, isolate=False).tune([(PROBLEM, 1)])
    assert decision.find("aten/mm") is not None


def test_duplicates_are_tuned_once_and_the_largest_problem_first(target: Target, store: MemoryStore) -> None:
    small, large = PROBLEM, PROBLEM.with_m(50)
    started: list[str] = []

    def record_start(event: Event) -> None:
        if isinstance(event, ProblemStarted):
            started.append(event.problem.key)

    tuner = Tuner(target, ["aten"], store, QUICK, record_start, isolate=False)
    decisions = tuner.tune([(small, 4), (large, 1), (small, 3)])
    assert [row.problem_key for row in decisions] == [small.key, large.key]
    assert started == [large.key, small.key]
    again = tuner.tune([(small, 1)])
    if decisions[0].outcome != "inconclusive":  # an inconclusive problem (loaded machine) is tuned again
        assert again == decisions[:1]


def test_ctrl_c_keeps_finished_decisions(target: Target, store: MemoryStore) -> None:
    before = worker_processes()
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
    assert [decision.problem_key for decision in finished] == [first.key]
    # What a busy machine left undecided is not stored.
    assert list(store.decisions()) == [decision for decision in finished if decision.outcome != "inconclusive"]
    assert worker_processes() <= before


def test_candidate_budget_limits_the_tried_candidates(
    tune: Callable[..., Decision], hostile: Callable[..., None]
) -> None:
    hostile("good", "packed")
    decision = tune(budget=Budget(seconds=5.0, candidates=3))
    assert sum(row.stage not in ("illegal", "untried") for row in decision.evidence) == 3


def test_time_budget_limits_the_tuning_time(tune: Callable[..., Decision], hostile: Callable[..., None]) -> None:
    hostile(*(["good"] * 3))
    start = time.perf_counter()
    decision = tune(budget=Budget(seconds=1.0))
    assert decision.seconds <= time.perf_counter() - start < 20.0  # a loaded machine may take longer
    assert decision.seconds < 20.0


@pytest.mark.parametrize("budget", [{"seconds": 0}, {"seconds": float("nan")}, {"seconds": "1"}, {"candidates": 0}])
def test_budget_must_be_positive(budget: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="positive"):
        Budget(**budget)  # type: ignore[arg-type]


def test_unknown_backend_raises_value_error(target: Target, store: MemoryStore) -> None:
    with pytest.raises(ValueError, match="unknown backend 'nope'"):
        Tuner(target, ["nope"], store, QUICK, isolate=False).tune([(PROBLEM, 1)])


def test_unwritable_store_logs_a_warning_and_tuning_succeeds(
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
    if decision.outcome == "inconclusive":  # on a loaded machine: there is no record to store
        return
    assert [record.getMessage() for record in caplog.records] == ["decisions of this run are not kept: disk full"]


def test_problem_beyond_the_memory_limit_affects_no_other_problem(target: Target, store: MemoryStore) -> None:
    huge = Problem("mm", 1 << 22, 1 << 22, 1 << 22, Operand("float32"), Operand("float32"), "float32")
    tuner = Tuner(target, ["aten"], store, QUICK, limits=Limits(memory=1 << 30))
    failed, decision = tuner.tune([(huge, 1), (PROBLEM, 1)])
    assert failed.outcome == "none_valid"
    assert "allocate" in failed.stopped
    assert_sound(decision)
    stored = [] if decision.outcome == "inconclusive" else [PROBLEM.key]
    assert [row.problem_key for row in store.decisions()] == stored


def test_worker_that_cannot_start_raises_worker_start_error(
    target: Target, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemmtune.workers.process._BOOT", "raise SystemExit('no python today')")
    with pytest.raises(WorkerStartError, match="no python today"):
        Tuner(target, ["aten"], store, QUICK).tune([(PROBLEM, 1)])


GPU = Target("cuda", "NVIDIA H200", "9.0", caches=(232448, 0, 62914560), cores=132, versions=(("hip", "None"),))


@pytest.mark.parametrize(("target", "latency", "expected"), [
    (GPU, "graph", [[1, 2, 3, 4], [5], [6], [7]]), (GPU, "eager", [[], [], [], []]),
    (current_cpu(), "graph", [[], [], [], []]),
])  # fmt: skip
def test_problems_are_built_ahead_while_a_worker_starts_and_a_gpu_times(
    target: Target, latency: str, expected: list[list[int]], store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A problem and the three after it are built, each once, and none where builds would disturb the host's clock.
    After the last one come those that may follow. Those of later problems wait for others, and are more."""
    monkeypatch.setattr("gemmtune.backends.triton.triton_version", lambda: "3.6.0")  # nothing is compiled here
    built: list[int] = []

    class FakeBuilders:
        def ahead(self, problem: Problem, candidates: list[Candidate], target: Target, *, later: bool) -> None:
            templates = Counter((candidate.backend, candidate.template) for candidate in candidates)
            assert {backend for backend, _ in templates} == {"triton"}
            assert later == (problem.m > 1)
            assert max(templates.values()) == (12 if later else 6)
            built.append(problem.m)

    problems = [build(m, 256, 512, "bf16") for m in range(1, 9)]
    pool = WorkerPool(target, True, None, "graph")
    pool.builders, pool.pending, pool.expected = FakeBuilders(), problems[:4], problems[4:]  # type: ignore[assignment]
    tuner = Tuner(target, ("triton",), store, latency=latency)  # type: ignore[arg-type]
    built_ms = []
    for problem in pool.pending:
        tuner._build_ahead(problem, pool)
        built_ms.append(built.copy())
        built.clear()
    assert built_ms == expected


class InTurns:
    """Tuning on a GPU by sessions that decide after a wait for a build. log: what the sessions did, by M and N."""

    def __init__(self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log, self.store, self.events = list[str](), store, list[str]()
        self.builds: list[Future[None]] = []
        self.free_bytes = 1 << 30
        turns = self

        class FakeSession:
            def __init__(self, problem: Problem, target: Target, *args: Any, **more: Any) -> None:
                self.problem, self.target, self.progress = problem, target, args[3]

            def steps(self, *_: object) -> Steps[Decision]:
                leased = store.lease_remaining_s(GPU, self.problem.key) is not None
                turns.note(f"{self.name} begins{'' if leased else ' without a lease'}", self.progress)
                build = Future[None]()
                turns.builds.append(build)
                if len(turns.builds) == turns.needed:  # all of them are done: those that are in progress go on
                    for item in turns.builds:
                        item.set_result(None)
                    turns.builds.clear()
                yield Pause([build])
                turns.note(f"{self.name} decides", self.progress)
                return make_decision(self.problem, target=self.target)

            @property
            def name(self) -> str:
                return f"{self.problem.m}x{self.problem.n}"

        monkeypatch.setattr(tuner_module, "TuningSession", FakeSession)
        monkeypatch.setattr(Tuner, "_build_ahead", lambda *_: None)
        monkeypatch.setattr(CudaDevice, "free_bytes", lambda *_: self.free_bytes)
        monkeypatch.setattr(WorkerPool, "worker", lambda _: SimpleNamespace(wait=lambda: None))
        self.needed = 2

    def note(self, text: str, progress: Progress) -> None:
        self.log.append(text)
        progress(BestSoFar(text, 1.0, 1.0))

    def report(self, event: Event) -> None:
        match event:
            case ProblemStarted(index, total):
                self.events.append(f"start {index} of {total}")
            case BestSoFar(text):
                self.events.append(text)
            case ProblemDone(index, total, decision):
                assert self.store.get(GPU, decision.problem_key) == decision
                self.events.append(f"done {index} of {total}")

    def tune(self, *sizes: tuple[int, int], needed: int, seconds: float | None = None) -> list[Decision]:
        """Tune products of M x N; builds are done when ``needed`` of them are waited for."""
        self.needed = needed
        problems = [(build(m, n, 512, "bf16"), 1) for m, n in sizes]
        return Tuner(GPU, (), self.store, Budget(seconds), self.report).tune(problems)


@pytest.fixture
def in_turns(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> InTurns:
    return InTurns(store, monkeypatch)


def test_next_problem_is_tuned_while_one_waits_for_builds_on_a_gpu(in_turns: InTurns) -> None:
    """Each under its own lease. Their events are those of one after another."""
    decisions = in_turns.tune((8, 768), (8, 512), needed=2)
    assert in_turns.log == ["8x768 begins", "8x512 begins", "8x768 decides", "8x512 decides"]
    assert in_turns.events == [
        "start 0 of 2", "8x768 begins", "8x768 decides", "done 0 of 2",
        "start 1 of 2", "8x512 begins", "8x512 decides", "done 1 of 2",
    ]  # fmt: skip
    assert [decision.problem["n"] for decision in decisions] == [768, 512]
    assert all(in_turns.store.lease_remaining_s(GPU, decision.problem_key) is None for decision in decisions)


@pytest.mark.parametrize(("sizes", "seconds"), [([(16, 512), (8, 512)], None), ([(8, 768), (8, 512)], 2.0)])
def test_problems_of_one_plan_and_those_with_a_users_budget_are_tuned_one_after_another(
    in_turns: InTurns, sizes: list[tuple[int, int]], seconds: float | None
) -> None:
    in_turns.tune(*sizes, needed=1, seconds=seconds)
    names = [f"{m}x{n}" for m, n in sizes]
    assert in_turns.log == [f"{name} {what}" for name in names for what in ("begins", "decides")]


@pytest.mark.parametrize(("spare_bytes", "in_order"), [(0, False), (-1, True)])
def test_problems_are_in_progress_together_only_if_the_device_has_the_memory_for_both(
    in_turns: InTurns, spare_bytes: int, in_order: bool
) -> None:
    """16 times their operands, as a worker may allocate."""
    operands = sum(operand_bytes(build(8, n, 512, "bf16")) for n in (768, 512))
    in_turns.free_bytes = 16 * operands + spare_bytes
    in_turns.tune((8, 768), (8, 512), needed=1 if in_order else 2)
    order = ["8x768 decides", "8x512 begins"] if in_order else ["8x512 begins", "8x768 decides"]
    assert in_turns.log == ["8x768 begins", *order, "8x512 decides"]


def test_interrupted_problems_leave_no_lease(in_turns: InTurns, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is interrupted while the first waits."""
    original = in_turns.note

    def note(text: str, progress: Progress) -> None:
        original(text, progress)
        if text == "8x512 begins":
            raise KeyboardInterrupt

    monkeypatch.setattr(in_turns, "note", note)
    with pytest.raises(KeyboardInterrupt):
        in_turns.tune((8, 768), (8, 512), needed=2)
    assert in_turns.log == ["8x768 begins", "8x512 begins"]
    for n in (768, 512):
        assert in_turns.store.lease_remaining_s(GPU, build(8, n, 512, "bf16").key) is None


def test_decision_is_stored_for_its_target_only(target: Target, store: MemoryStore) -> None:
    Tuner(target, ["aten"], store, QUICK, isolate=False).tune([(PROBLEM, 1)])
    other = replace(target, versions=(("torch", "0"),))
    assert store.get(other, PROBLEM.key) is None


def test_stored_record_size_is_bounded(tune: Callable[..., Decision], hostile: Callable[..., None]) -> None:
    hostile("good", illegal=5000)
    assert len(msgspec.json.encode(tune())) < 100_000


@pytest.mark.parametrize("m", [0, 1])
def test_problems_with_no_row_and_one_row_are_decided(
    tune: Callable[..., Decision], hostile: Callable[..., None], m: int
) -> None:
    hostile("good")
    problem = PROBLEM.with_m(m)
    assert_sound(tune(problem), problem)


def test_lease_is_valid_while_tuning_and_released_after(target: Target, store: MemoryStore) -> None:
    leased: list[bool] = []

    def watch(event: Event) -> None:
        if isinstance(event, CandidateTried):
            leased.append(store.lease_remaining_s(target, PROBLEM.key) is not None)

    Tuner(target, ["aten"], store, QUICK, watch, isolate=False).tune([(PROBLEM, 1)])
    assert leased
    assert all(leased)
    assert store.lease_remaining_s(target, PROBLEM.key) is None


def test_ctrl_c_releases_the_lease(target: Target, store: MemoryStore) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, CandidateTried):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tuner(target, ["aten"], store, QUICK, interrupt, isolate=False).tune([(PROBLEM, 1)])
    assert store.lease_remaining_s(target, PROBLEM.key) is None


def test_concurrent_tuners_wait_for_one_decision(
    target: Target, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemmtune.tuning.tuner.POLL_S", 0.01)
    tuned, decisions = [], []
    original = Tuner._tune_one

    def tune_one(self: Tuner, problem: Problem, *rest: Any) -> Steps[Decision]:
        tuned.append(problem)
        return original(self, problem, *rest)

    def work() -> None:
        decisions.extend(Tuner(target, ["aten"], store, QUICK, isolate=False).tune([(PROBLEM, 1)]))

    monkeypatch.setattr(Tuner, "_tune_one", tune_one)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tuned == [PROBLEM]
    assert decisions == [store.get(target, PROBLEM.key)] * 4


def test_tuner_without_wait_omits_a_leased_problem(target: Target, store: MemoryStore) -> None:
    other = PROBLEM.with_m(6)
    tuner = Tuner(target, ["aten"], store, QUICK, isolate=False, wait=False)
    lease = store.lease(target, PROBLEM.key, 60.0)
    assert lease is not None
    assert [row.problem_key for row in tuner.tune([(PROBLEM, 1), (other, 1)])] == [other.key]
    lease.release()
    assert [row.problem_key for row in tuner.tune([(PROBLEM, 1)])] == [PROBLEM.key]


def test_expired_lease_is_taken_over(target: Target, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.tuning.tuner.POLL_S", 0.01)
    assert store.lease(target, PROBLEM.key, 0.2) is not None
    (decision,) = Tuner(target, ["aten"], store, QUICK, isolate=False).tune([(PROBLEM, 1)])
    assert_sound(decision)


@pytest.mark.parametrize(("budget", "expected"), [(Budget(default_s=4.0), 2.8), (Budget(), None)])
def test_share_of_the_default_time_is_passed_on(
    target: Target, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, budget: Budget, expected: float | None
) -> None:
    seconds: list[float | None] = []

    class FakeSession:
        """Session that decides at once."""

        def __init__(self, problem: Problem, *args: object, **more: object) -> None:
            self.problem = problem

        def steps(self, _: float | None, limit: int | None, default_s: float | None) -> Steps[Decision]:
            yield Pause(seconds=0.0)
            seconds.append(default_s)
            return make_decision(self.problem, target=target)

    monkeypatch.setattr(tuner_module, "TuningSession", FakeSession)
    tuner = Tuner(target, ["native"], store, budget, isolate=False)
    tuner.tune([(PROBLEM, 1)], share=0.7)
    tuner.tune([(replace(PROBLEM, m=PROBLEM.m + 1), 1)])
    assert seconds == [pytest.approx(expected), budget.default_s]


def test_session_gets_the_layouts_of_the_weights_other_m(
    target: Target, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layouts come from stored decisions and those of this run, for weights of equal shape only."""
    layouts_by_m: dict[int, list[str]] = {}

    class FakeSession:
        """Session that decides at once for layouts named after M, the second of them slower."""

        def __init__(self, problem: Problem, *args: object, layouts: list[str], **more: object) -> None:
            self.problem = problem
            layouts_by_m[problem.m] = layouts

        def steps(self, seconds: float | None, limit: int | None, default_s: float | None) -> Steps[Decision]:
            yield Pause(seconds=0.0)
            decision = make_decision(self.problem, target=target)
            names = (f"fast{self.problem.m}", f"slow{self.problem.m}")
            rows = [
                make_evidence(candidate, "finalist", ratio * 4e-3, ratio=ratio, packing=packing)
                for candidate, ratio, packing in ((NATIVE, 0.25, names[0]), (SLOW, 0.5, names[1]), (ATEN, 1.0, None))
            ]
            alternatives = dict(zip((*names, ""), (NATIVE.id, SLOW.id, ATEN.id), strict=True))
            return msgspec.structs.replace(decision, evidence=tuple(rows), alternatives=alternatives)

    monkeypatch.setattr(tuner_module, "TuningSession", FakeSession)
    first = build(4, 512, 256, "fp32")
    Tuner(target, ["native"], store, isolate=False).tune([(first, 1)])
    others = [(replace(first, m=64), 1), (replace(first, m=32), 1), (build(7, 256, 256, "fp32"), 1)]
    Tuner(target, ["native"], store, isolate=False).tune(others)
    assert layouts_by_m == {
        4: [],
        64: ["fast4", "slow4"],
        32: ["fast64", "slow64", "fast4", "slow4"],
        7: [],
    }
