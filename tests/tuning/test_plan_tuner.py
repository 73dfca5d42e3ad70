"""PlanTuner: which weights and M are tuned, when a stored plan is kept, and what two tuners at once do."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gemmtune.backends.aten import AtenBackend
from gemmtune.core import devices
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision, Verdict
from gemmtune.core.errors import StoreError, WorkerError
from gemmtune.core.events import Event, PlanDone
from gemmtune.core.problem import Dim, Problem
from gemmtune.core.target import Target
from gemmtune.core.tuned_plan import TunedPlan
from gemmtune.core.workloads import bmm_problem, linear_problem
from gemmtune.dispatch import current_target
from gemmtune.store import MemoryStore
from gemmtune.tuning import plan_session, plan_tuner
from gemmtune.tuning.plan_pool import PoolKernel
from gemmtune.tuning.plan_tuner import MAX_RECORDED, PlanTuner, recorded, weights_of
from gemmtune.tuning.sizes import SizeRange
from gemmtune.workers.contract import WorkerStartError
from gemmtune.workers.protocol import SizedCandidate, SizesVerified
from helpers.plans import (
    LARGE,
    PLAIN,
    PLAIN_S,
    PROBLEM,
    SMALL,
    FakeTime,
    FakeWorker,
    SimulatedKernel,
    decisions_at,
    serving_kernels,
    simulated,
    use_fake_time,
)  # fmt: skip


class FakePool:
    begin_builds = None

    def __init__(self, worker: FakeWorker) -> None:
        self._worker, self.closed = worker, False

    def start(self) -> None:
        pass

    def worker(self) -> FakeWorker:
        return self._worker

    def close(self) -> None:
        self.closed = True


class FakeTuner:
    """Tuner whose Decisions are those of simulated kernels. tuned: the M of each call. pools: all that it returned."""

    def __init__(self, clock: FakeTime, kernels: Sequence[SimulatedKernel] = (SMALL, LARGE), dim: Dim = "m") -> None:
        self.clock, self.kernels, self.dim = clock, kernels, dim
        self.worker = FakeWorker(clock, kernels)
        self.tuned: list[list[int]] = []
        self.counts: list[int] = []
        self.pools: list[FakePool] = []
        self.outcome: str | None = None
        self.shares: list[float] = []
        self.begun: list[int] = []
        self.begun_now: list[int] = []

    def begin_builds(self, problem: Problem, pool: Any, *, later: bool = True) -> None:
        (self.begun if later else self.begun_now).append(problem.m)

    def new_pool(self) -> FakePool:
        self.pools.append(FakePool(self.worker))
        return self.pools[-1]

    def tune(self, problems: Iterable[tuple[Problem, int]], pool: Any, *, share: float = 1.0) -> list[Decision]:
        problems = list(problems)
        assert not self.pools[-1].closed
        self.shares.append(share)
        self.tuned.append([problem.size(self.dim) for problem, _ in problems])
        self.counts += [count for _, count in problems]
        found = [
            decisions_at(self.kernels, [problem.size(self.dim)], problem, dim=self.dim)[0] for problem, _ in problems
        ]
        return [msgspec.structs.replace(item, outcome=self.outcome or item.outcome) for item in found]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    return use_fake_time(monkeypatch)


def tune(
    tuner: FakeTuner,
    store: MemoryStore,
    m: Any,
    problems: Sequence[tuple[Problem, int]] = ((PROBLEM, 1),),
    **options: Any,
) -> tuple[list[Decision], list[TunedPlan]]:
    return PlanTuner(tuner, current_target(), store, **options).tune(problems, m)  # type: ignore[arg-type]


def timed_m(tuner: FakeTuner) -> set[int]:
    return {m for request in tuner.worker.timed for m in request}


def test_weight_has_a_plan_for_the_range(clock: FakeTime, store: MemoryStore) -> None:
    tuner, events = FakeTuner(clock), list[Event]()
    decisions, plans = tune(tuner, store, range(1, 129), progress=events.append)
    (plan,) = plans
    assert store.get_plan(current_target(), PROBLEM.plan_key) == plan
    assert (plan.first, plan.last) == (1, 128)
    assert [decision.problem["m"] for decision in decisions] == tuner.tuned[0] == [1, 8, 32, 128]
    assert serving_kernels(plan) == {SMALL.id, LARGE.id}
    assert events[-1] == PlanDone(PROBLEM.plan_key, plan, 0)
    assert plan.counts == {}
    assert tuner.pools[0].closed


class Immediate:
    """A thread that has done its work when ``start`` returns."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], name: str, daemon: bool) -> None:
        self.start = partial(target, *args)

    def join(self) -> None:
        pass


class FakeBuilders:
    """Builders that record the M and the candidate of each build that is begun."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, str]] = []

    def ahead(self, problem: Problem, candidates: Iterable[Candidate], target: Target, *, later: bool) -> None:
        assert later
        self.begun += [(problem.m, candidate.id) for candidate in candidates]


def test_expected_kernels_are_built_while_the_last_two_decisions_are_made(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner, builders, seen, listed = FakeTuner(clock), FakeBuilders(), list[list[int]](), list[Any]()
    expected = [PoolKernel.of(SMALL.candidate, 77, None), PoolKernel.of(LARGE.candidate, 17, None)]

    def expected_kernels(problem: Problem, target: Target, decisions: Sequence[Decision], *_: Any) -> list[PoolKernel]:
        seen.append([int(decision.problem["m"]) for decision in decisions])
        return expected

    monkeypatch.setattr(plan_tuner, "threading", SimpleNamespace(Thread=Immediate))
    monkeypatch.setattr(plan_tuner, "list_ahead", lambda *args: listed.append((args, list(tuner.tuned))))
    monkeypatch.setattr(plan_tuner, "expected_kernels", expected_kernels)
    monkeypatch.setattr(plan_session, "expected_kernels", lambda *_: [])
    monkeypatch.setattr(FakePool, "begin_builds", lambda *_: {})
    monkeypatch.setattr(FakePool, "builders", builders, raising=False)
    profile = devices.get("cpu").profile._replace(max_predicted=4, builds_overlap=True)
    monkeypatch.setattr(type(devices.get("cpu")), "profile", profile)
    decisions, plans = tune(tuner, store, range(1, 129))
    assert tuner.tuned == [[128], [32], [8], [1]]
    assert (tuner.begun_now, tuner.begun) == ([128, 32, 8, 1], [32, 8, 1])  # before the others, and behind them
    assert seen == [[128, 32], [128, 32, 8]]
    (((problem, target, sizes), tuned_before),) = listed
    assert (problem.plan_key, target) == (plans[0].plan_key, current_target())
    assert (sizes.tuned, tuned_before) == ((1, 8, 32, 128), [])
    # First those for M between the Decisions.
    assert builders.begun == [(77, SMALL.id), (77, SMALL.id), (17, LARGE.id)]
    assert sorted(decision.problem["m"] for decision in decisions) == [1, 8, 32, 128]
    assert len(plans) == 1


@pytest.mark.parametrize("has_plan", [False, True])
def test_next_weight_is_prepared_while_other_m_are_timed(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, has_plan: bool
) -> None:
    """Unless its stored plan is kept."""
    other = linear_problem(1, 64, 32, "float32")
    if has_plan:
        tune(FakeTuner(clock), store, range(1, 129), [(other, 1)])
    tuner, events = FakeTuner(clock), list[Any]()
    monkeypatch.setattr(plan_tuner, "threading", SimpleNamespace(Thread=Immediate))
    monkeypatch.setattr(plan_tuner, "list_ahead", lambda problem, *_: events.append((problem.n, len(tuner.tuned))))
    monkeypatch.setattr(plan_tuner.PlanSession, "run", lambda *_: events.append((tuner.begun.copy(), len(tuner.tuned))))
    monkeypatch.setattr(plan_tuner, "expected_kernels", lambda *_: [])
    monkeypatch.setattr(FakePool, "begin_builds", lambda *_: {})
    monkeypatch.setattr(FakePool, "builders", FakeBuilders(), raising=False)
    profile = devices.get("cpu").profile._replace(max_predicted=4, builds_overlap=True)
    monkeypatch.setattr(type(devices.get("cpu")), "profile", profile)
    first = linear_problem(1, 128, 32, "float32")  # costs more than the other one
    tune(tuner, store, range(1, 129), [(first, 1), (other, 1)])
    own = [32, 8, 1]  # while the M before each is decided
    prepared = [] if has_plan else [(other.n, 4)]
    assert events[: 2 + len(prepared)] == [
        (first.n, 0), *prepared, ([*own, *([] if has_plan else [128, 32, 8, 1])], 4)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "sizes", "expected"),
    [(None, (1, 512), 16.0), (None, (1, 1024), 16.0), (None, (1, 32), 16.0 * math.log(33) / math.log(513)),
     (None, (400, 512), 4.0), (7.0, (1, 32), 7.0)],
)  # fmt: skip
def test_part_of_the_range_takes_a_part_of_the_time(
    clock: FakeTime, store: MemoryStore, seconds: float | None, sizes: tuple[int, int], expected: float
) -> None:
    tuner = PlanTuner(FakeTuner(clock), current_target(), store, seconds=seconds)  # type: ignore[arg-type]
    assert tuner._sweep_s(SizeRange(*sizes, (1,)), 0.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("decided_s", "expected"), [(4 * 6.0, 16.0), (4 * 6.0 + 3.0, 13.0), (4 * 6.0 + 60.0, 0.3 * 16.0)]
)
def test_decisions_that_take_long_leave_less_time_for_other_m(
    clock: FakeTime, store: MemoryStore, decided_s: float, expected: float
) -> None:
    sizes = SizeRange(1, 512, (1, 8, 32, 128))
    tuner = PlanTuner(FakeTuner(clock), current_target(), store)  # type: ignore[arg-type]
    assert tuner._sweep_s(sizes, decided_s) == pytest.approx(expected)
    own = PlanTuner(FakeTuner(clock), current_target(), store, seconds=7.0)  # type: ignore[arg-type]
    assert own._sweep_s(sizes, decided_s) == 7.0


def test_time_of_the_decisions_is_passed_on(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowTuner(FakeTuner):
        def tune(self, *args: Any, **options: Any) -> list[Decision]:
            clock.now += 100.0
            return super().tune(*args, **options)

    seconds = list[float]()
    monkeypatch.setattr(plan_tuner.PlanSession, "run", lambda self, s, *_: seconds.append(s))
    monkeypatch.setattr(plan_tuner, "time", clock)
    tune(SlowTuner(clock), store, "all")
    assert seconds == [0.3 * 16.0]


@pytest.mark.parametrize(
    ("left", "spent_s", "expected"),
    [(4, 0.0, 1.0), (3, 6.0, 1.0), (3, 6.0 + 1.35, 0.9), (1, 18.0 + 0.45, 0.9), (3, 60.0, 0.4), (1, 7.0, 1.0)],
)
def test_decisions_that_take_long_leave_less_time_for_the_following_ones(
    clock: FakeTime, store: MemoryStore, left: int, spent_s: float, expected: float
) -> None:
    tuner = PlanTuner(FakeTuner(clock), current_target(), store)  # type: ignore[arg-type]
    assert tuner._share_of_time(4, left, spent_s) == pytest.approx(expected)


def test_time_of_a_decision_is_passed_on(clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    class LateStart(FakeTuner):
        def tune(self, *args: Any, **options: Any) -> list[Decision]:
            clock.now += 60.0 if not self.tuned else 0.0
            return super().tune(*args, **options)

    monkeypatch.setattr(plan_tuner, "time", clock)
    tuner = LateStart(clock)
    planner = PlanTuner(tuner, current_target(), store)  # type: ignore[arg-type]
    monkeypatch.setattr(planner, "_profile", planner._profile._replace(max_predicted=1))
    planner.tune([(PROBLEM, 1)], "all")
    assert tuner.shares == [1.0, 0.4, 0.4, 0.4]


def test_worker_of_the_caller_is_used_and_not_closed(clock: FakeTime, store: MemoryStore) -> None:
    tuner = FakeTuner(clock)
    pool = tuner.new_pool()
    _, plans = PlanTuner(tuner, current_target(), store).tune([(PROBLEM, 1)], range(1, 129), pool)  # type: ignore[arg-type]
    assert len(plans) == 1
    assert tuner.pools == [pool]
    assert not pool.closed


# --- stored plans


BATCHED = bmm_problem(6, 4, 24, 32, "float32")
BATCHED_PLAIN = AtenBackend().default_candidate(BATCHED)


def batch_tuner(clock: FakeTime, *kernels: SimulatedKernel) -> FakeTuner:
    """Return a tuner of batches, of SMALL, LARGE and more kernels besides ATen's for batched products."""
    tuner = FakeTuner(clock, (SMALL, LARGE, *kernels), dim="batch")
    tuner.worker = FakeWorker(clock, (*tuner.kernels, SimulatedKernel(BATCHED_PLAIN, PLAIN_S)))
    return tuner


def test_plan_over_the_batch(clock: FakeTime, store: MemoryStore) -> None:
    """Its sizes are batches; kernels of packed weights, which have a batch of their own, are left out."""
    packed = simulated("packed", lambda m: 1e-7, packing="toy")
    tuner = batch_tuner(clock, packed)
    decisions, plans = tune(tuner, store, "all", [(BATCHED, 1), (BATCHED.with_size("batch", 20), 3)], dim="batch")
    assert tuner.tuned == [[1, 6, 20, 64]]
    assert [decision.problem["batch"] for decision in decisions] == [1, 6, 20, 64]
    (plan,) = plans
    assert plan == store.get_plan(current_target(), BATCHED.plan_key_over("batch"))
    assert (plan.dim, plan.first, plan.last, plan.counts) == ("batch", 1, 128, {6: 1, 20: 3})
    assert serving_kernels(plan) == {SMALL.id, LARGE.id}
    assert {kernel.packing for kernel in plan.kernels} == {None}
    assert tuner.worker.dims == {"batch"}
    assert tuner.worker.opened[0] == BATCHED.with_size("batch", 128)
    assert {kernel.tuned_m for kernel in plan.kernels} <= {1, 6, 20, 64}
    assert store.get_plan(current_target(), BATCHED.plan_key) is None
    again = batch_tuner(clock)
    assert tune(again, store, range(3, 9), [(BATCHED, 1)], dim="batch")[1] == [plan]
    assert again.worker.timed == []


def test_fault_at_a_batch_is_a_fault_of_the_plan_over_the_batch(clock: FakeTime, store: MemoryStore) -> None:
    wrong = simulated("wrong", lambda m: 1e-7, wrong_at=lambda batch: batch % 2 == 1)
    (plan,) = tune(batch_tuner(clock, wrong), store, range(1, 65), [(BATCHED, 1)], dim="batch")[1]
    assert wrong.id not in serving_kernels(plan)
    assert store.failures(current_target(), BATCHED.plan_key_over("batch")).keys() == {wrong.id}
    assert store.failures(current_target(), BATCHED.plan_key) == {}


def test_problems_without_a_batch_have_no_plan_over_it(clock: FakeTime, store: MemoryStore) -> None:
    with pytest.raises(ValueError, match="mm has no batch"):
        tune(batch_tuner(clock), store, "all", dim="batch")


@pytest.mark.parametrize("m", [range(1, 129), range(5, 100), range(7, 8)])
def test_stored_plan_that_covers_the_range_is_kept(clock: FakeTime, store: MemoryStore, m: range) -> None:
    first = FakeTuner(clock)
    (plan,) = tune(first, store, range(1, 129))[1]
    second = FakeTuner(clock)
    assert tune(second, store, m)[1] == [plan]
    assert second.worker.timed == []
    assert second.worker.verified == {}
    assert store.get_plan(current_target(), PROBLEM.plan_key) == plan


def test_force_makes_the_plan_anew(clock: FakeTime, store: MemoryStore) -> None:
    (plan,) = tune(FakeTuner(clock), store, range(1, 129))[1]
    second = FakeTuner(clock)
    clock.now += 100.0
    (again,) = tune(second, store, range(1, 129), force=True)[1]
    assert second.worker.timed
    assert again.created > plan.created
    assert store.get_plan(current_target(), PROBLEM.plan_key) == again


def test_forced_plan_of_a_part_covers_the_whole_range(clock: FakeTime, store: MemoryStore) -> None:
    tune(FakeTuner(clock), store, range(1, 257))
    (again,) = tune(FakeTuner(clock), store, [64, 100], force=True)[1]
    assert (again.first, again.last) == (1, 512)
    assert {1, 8, 32, 64, 100} <= set(again.tuned)


def test_recorded_m_that_are_tuned_are_limited(clock: FakeTime, store: MemoryStore) -> None:
    tuner = FakeTuner(clock)
    problems = [(PROBLEM.with_m(m), 4 if m == 33 else 1) for m in range(20, 90)]
    (plan,) = tune(tuner, store, "all", problems)[1]
    others = set(plan.tuned) - {1, 8, 32, 128}
    assert len(others) <= MAX_RECORDED
    assert {33, 89} <= others
    assert sum(plan.counts.values()) == 73


@pytest.mark.parametrize(("earlier", "later", "hull"), [
    (range(1, 33), range(1, 129), (1, 128)), (range(1, 33), range(16, 129), (1, 128)),
    (range(100, 129), range(1, 33), (1, 128)), (range(40, 50), "all", (1, 512)),
])  # fmt: skip
def test_narrower_plan_is_replaced_by_one_of_both_ranges(
    clock: FakeTime, store: MemoryStore, earlier: Any, later: Any, hull: tuple[int, int]
) -> None:
    (narrow,) = tune(FakeTuner(clock), store, earlier)[1]
    tuner = FakeTuner(clock)
    (plan,) = tune(tuner, store, later)[1]
    assert (plan.first, plan.last) == hull
    assert store.get_plan(current_target(), PROBLEM.plan_key) == plan
    # The M from whose Decisions the earlier plan's kernels come are among the later one's.
    assert {kernel.tuned_m for kernel in narrow.kernels} <= set(tuner.tuned[0])
    assert tuner.worker.timed


# --- config_key


def halves(m: int) -> int:
    return 32 if m <= 32 else 128


def quarters(m: int) -> int:
    return 32 * -(-m // 32)


def tune_keyed(tuner: FakeTuner, store: MemoryStore, config_key: Any, m: Any = range(1, 129)) -> TunedPlan:
    (plan,) = tune(tuner, store, m, config_key=config_key)[1]
    assert store.get_plan(current_target(), PROBLEM.plan_key) == plan
    return plan


def test_keys_divide_the_range(clock: FakeTime, store: MemoryStore) -> None:
    tuner = FakeTuner(clock)
    plan = tune_keyed(tuner, store, halves)
    assert tuner.tuned == [[32, 128]]
    assert [(interval.first, interval.last) for interval in plan.intervals[""]] == [(1, 32), (33, 128)]
    assert timed_m(tuner) == {1, 32, 33, 128}


def test_recorded_m_are_not_tuned_besides_the_keys(clock: FakeTime, store: MemoryStore) -> None:
    tuner = FakeTuner(clock)
    tune(tuner, store, "all", [(PROBLEM.with_m(700), 5), (PROBLEM.with_m(3), 2)], config_key="power_of_2")
    assert tuner.tuned == [[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 700]]


def test_exact_keys_make_no_plan(clock: FakeTime, store: MemoryStore) -> None:
    tuner, events = FakeTuner(clock), list[Event]()
    decisions, plans = tune(tuner, store, [8, 64], config_key="exact", progress=events.append)
    assert (tuner.tuned, len(decisions), plans) == ([[8, 64]], 2, [])
    assert events == [PlanDone(PROBLEM.plan_key, None, 0)]
    assert timed_m(tuner) == set()


def test_exact_keys_remove_a_stored_plan(clock: FakeTime, store: MemoryStore) -> None:
    tune_keyed(FakeTuner(clock), store, halves)
    tune(FakeTuner(clock), store, [8, 64], config_key="exact")
    assert store.get_plan(current_target(), PROBLEM.plan_key) is None


def test_plan_that_cannot_be_removed_is_a_warning(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("disk full")

    tune_keyed(FakeTuner(clock), store, halves)
    monkeypatch.setattr(MemoryStore, "remove_plan", refuse)
    assert len(tune(FakeTuner(clock), store, [8], config_key="exact")[0]) == 1
    assert "is not removed, and goes on serving: disk full" in caplog.text


@pytest.mark.parametrize(("earlier", "later"), [
    (None, halves), (halves, None), (halves, quarters), ("power_of_2", halves), (halves, "power_of_2"),
])  # fmt: skip
def test_plan_with_another_key_is_replaced(clock: FakeTime, store: MemoryStore, earlier: Any, later: Any) -> None:
    tune_keyed(FakeTuner(clock), store, earlier, range(1, 257))
    tuner = FakeTuner(clock)
    plan = tune_keyed(tuner, store, later)
    assert tuner.worker.timed
    assert (plan.first, plan.last) == (1, 128)


def test_function_of_the_same_name_with_other_keys_is_another(clock: FakeTime, store: MemoryStore) -> None:
    tune_keyed(FakeTuner(clock), store, lambda m: 32 if m <= 32 else 128)
    tuner = FakeTuner(clock)
    plan = tune_keyed(tuner, store, lambda m: 64 if m <= 64 else 128)
    assert tuner.worker.timed
    assert [interval.last for interval in plan.intervals[""]] == [64, 128]


@pytest.mark.parametrize("config_key", [halves, "power_of_2"])
@pytest.mark.parametrize("m", [range(1, 129), range(5, 100)])
def test_keyed_plan_that_covers_the_range_is_kept(
    clock: FakeTime, store: MemoryStore, config_key: Any, m: range
) -> None:
    plan = tune_keyed(FakeTuner(clock), store, config_key)
    tuner = FakeTuner(clock)
    assert tune_keyed(tuner, store, config_key, m) == plan
    assert tuner.worker.timed == []
    assert {size for sizes in tuner.tuned for size in sizes} <= set(plan.tuned)


def test_narrower_keyed_plan_is_replaced_by_one_of_both_ranges(clock: FakeTime, store: MemoryStore) -> None:
    tune_keyed(FakeTuner(clock), store, halves, range(1, 20))
    tuner = FakeTuner(clock)
    plan = tune_keyed(tuner, store, halves, range(30, 129))
    assert [(interval.first, interval.last) for interval in plan.intervals[""]] == [(1, 32), (33, 128)]
    assert tuner.tuned == [[32, 128]]  # not 19, which represented the key before


def test_undecided_key_is_tried_again(clock: FakeTime, store: MemoryStore) -> None:
    class Disturbed(FakeTuner):
        def tune(self, problems: Iterable[tuple[Problem, int]], pool: Any, **options: Any) -> list[Decision]:
            first, *others = super().tune(problems, pool, **options)
            return [msgspec.structs.replace(first, outcome="inconclusive"), *others]

    plan = tune_keyed(Disturbed(clock), store, halves)
    assert [interval.kernel for interval in plan.intervals[""]] == [PLAIN.id, LARGE.id]
    assert plan.tuned == (128,)
    plan = tune_keyed(FakeTuner(clock), store, halves)
    assert [interval.kernel for interval in plan.intervals[""]] == [SMALL.id, LARGE.id]


def test_bad_key_functions_are_refused_before_anything_is_tuned(clock: FakeTime, store: MemoryStore) -> None:
    tuner = FakeTuner(clock)
    with pytest.raises(TypeError, match="must return an int"):
        tune(tuner, store, range(1, 5), config_key=lambda m: m / 2)
    with pytest.raises(ValueError, match="512 runs"):
        tune(tuner, store, "all", config_key=lambda m: m)
    assert tuner.pools == []


# --- two tuners


def test_plan_that_another_tuner_made_meanwhile_is_used(clock: FakeTime, store: MemoryStore) -> None:
    """It is stored between the first look at the store and the lease."""
    other = FakeTuner(clock)

    class Slow(FakeTuner):
        def tune(self, problems: Iterable[tuple[Problem, int]], pool: Any, **options: Any) -> list[Decision]:
            if not other.tuned:
                tune(other, store, range(1, 257))
            return super().tune(problems, pool, **options)

    tuner = Slow(clock)
    (plan,) = tune(tuner, store, range(1, 129))[1]
    assert (plan.first, plan.last) == (1, 256)
    assert tuner.worker.timed == []


def test_tuners_of_overlapping_ranges_make_one_plan_of_both(clock: FakeTime, store: MemoryStore) -> None:
    """The second one reads the Decisions of the first, whose kernels serve the M that the second has not tuned."""
    other = FakeTuner(clock)

    class Slow(FakeTuner):
        def tune(self, problems: Iterable[tuple[Problem, int]], pool: Any, **options: Any) -> list[Decision]:
            if not other.tuned:
                tune(other, store, range(1, 65), [(PROBLEM.with_m(8), 1)])
            return super().tune(problems, pool, **options)

    tuner = Slow(clock)
    (plan,) = tune(tuner, store, range(200, 401), [(PROBLEM.with_m(256), 1)])[1]
    assert (plan.first, plan.last) == (1, 400)
    assert tuner.tuned[0] == [256]
    assert {m for sizes in tuner.tuned[1:] for m in sizes} >= {1, 32}
    assert serving_kernels(plan) == {SMALL.id, LARGE.id}
    assert store.get_plan(current_target(), PROBLEM.plan_key) == plan


def test_concurrent_tuners_of_overlapping_ranges(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_tuner, "POLL_S", 0.01)
    tuners = [FakeTuner(clock) for _ in range(4)]
    ranges = [range(1, 65), range(32, 129), range(1, 65), range(100, 301)]
    started = threading.Barrier(len(tuners))

    def work(tuner: FakeTuner, m: range) -> None:
        started.wait()
        tune(tuner, store, m)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(tuners, ranges, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    plan = store.get_plan(current_target(), PROBLEM.plan_key)
    assert plan is not None
    assert (plan.first, plan.last) == (1, 300)
    assert store.lease_remaining_s(current_target(), PROBLEM.plan_key) is None


def test_tuner_waits_for_the_lease_of_another(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = store.lease(current_target(), PROBLEM.plan_key, 60.0)
    assert lease is not None
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            lease.release()

    monkeypatch.setattr(plan_tuner.time, "sleep", sleep)
    assert len(tune(FakeTuner(clock), store, range(1, 33))[1]) == 1
    assert waits == [plan_tuner.POLL_S] * 3


# --- weights


def test_problems_that_differ_in_m_are_one_weight(clock: FakeTime, store: MemoryStore) -> None:
    other = Problem(**{**_fields(PROBLEM), "n": 128})
    problems = [(PROBLEM.with_m(5), 3), (other.with_m(300), 9), (PROBLEM.with_m(70), 2), (PROBLEM.with_m(5), 1)]
    tuner, events = FakeTuner(clock), list[Event]()
    _, plans = tune(tuner, store, range(1, 129), problems, progress=events.append)
    assert [plan.plan_key for plan in plans] == [other.plan_key, PROBLEM.plan_key]  # the costlier one first
    assert [event.remaining for event in events if isinstance(event, PlanDone)] == [1, 0]
    assert [plan.counts for plan in plans] == [{300: 9}, {5: 4, 70: 2}]
    assert {5, 70} <= set(tuner.tuned[1])
    assert {5, 70} <= set(plans[1].noise)
    assert len(tuner.pools) == 1


def _fields(problem: Problem) -> Mapping[str, Any]:
    names = ("family", "m", "n", "k", "a", "b", "out_dtype", "epilogue", "batch", "out", "acc")
    return {name: getattr(problem, name) for name in names}


def test_empty_problems_are_left_out() -> None:
    assert weights_of([(PROBLEM.with_m(0), 3)]) == []
    (weight,) = weights_of([(PROBLEM.with_m(0), 3), (PROBLEM.with_m(2), 1), (PROBLEM.with_m(2), 4)])
    assert weight.counts == {2: 5}


def test_single_call_is_no_record() -> None:
    assert recorded({8: 1}) == {}
    assert recorded({8: 2}) == {8: 2}
    assert recorded({8: 1, 9: 1}) == {8: 1, 9: 1}


def test_calls_of_tuned_m_are_counted(clock: FakeTime, store: MemoryStore) -> None:
    tuner = FakeTuner(clock)
    tune(tuner, store, [8, 64], [(PROBLEM.with_m(8), 7), (PROBLEM.with_m(20), 2)])
    assert tuner.tuned == [[8, 20, 64]]
    assert tuner.counts == [7, 2, 1]


# --- failures


def test_inconclusive_decisions_make_no_plan(clock: FakeTime, store: MemoryStore) -> None:
    tuner = FakeTuner(clock)
    tuner.outcome = "inconclusive"
    decisions, plans = tune(tuner, store, range(1, 33))
    assert (len(decisions), plans) == (3, [])
    assert tuner.worker.opened == []


def test_weight_whose_kernels_all_fail_has_no_plan(
    clock: FakeTime, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    class FailsAll(FakeWorker):
        def verify_sizes(self, item: SizedCandidate, sizes: Sequence[int], dim: Dim = "m") -> SizesVerified:
            return SizesVerified(Verdict("wrong", "an element is off"), sizes[0])

    tuner = FakeTuner(clock)
    tuner.worker = FailsAll(clock, tuner.kernels)
    _, plans = tune(tuner, store, range(1, 33))
    assert plans == []
    assert f"no plan for {PROBLEM.plan_key}, whose kernels cannot serve" in caplog.text
    assert "wrong: an element is off" in caplog.text


def test_weight_whose_worker_fails_has_no_plan(
    clock: FakeTime, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(FakeWorker):
        error: Exception = WorkerError("out of memory")

        def open(self, problem: Problem, seed: int) -> None:
            raise self.error

    tuner = FakeTuner(clock)
    tuner.worker = Fails(clock, tuner.kernels)
    events: list[Event] = []
    decisions, plans = tune(tuner, store, range(1, 33), progress=events.append)
    assert (len(decisions), plans) == (3, [])
    assert events == [PlanDone(PROBLEM.plan_key, None, 0)]
    assert f"no plan for {PROBLEM.plan_key}: out of memory" in caplog.text
    tuner.worker.error = WorkerStartError("no python today")
    with pytest.raises(WorkerStartError):
        tune(tuner, store, range(1, 33))
    assert store.lease_remaining_s(current_target(), PROBLEM.plan_key) is None


def test_unwritable_store_logs_a_warning(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("disk full")

    monkeypatch.setattr(MemoryStore, "put_plan", refuse)
    monkeypatch.setattr(MemoryStore, "lease", refuse)
    (plan,) = tune(FakeTuner(clock), store, range(1, 33))[1]
    assert serving_kernels(plan) <= {SMALL.id, LARGE.id, PLAIN.id}
    assert f"the plan for {PROBLEM.plan_key} is not kept: disk full" in caplog.text


def test_plan_without_other_kernels_is_stored_so_that_it_is_not_made_again(clock: FakeTime, store: MemoryStore) -> None:
    tuner = FakeTuner(clock, [])
    (plan,) = tune(tuner, store, range(1, 33))[1]
    assert serving_kernels(plan) == {PLAIN.id}
    assert store.get_plan(current_target(), PROBLEM.plan_key) == plan


def test_invalid_m_is_refused_before_anything_is_tuned(clock: FakeTime, store: MemoryStore) -> None:
    tuner = FakeTuner(clock)
    with pytest.raises(ValueError, match="range of M must"):
        tune(tuner, store, range(0, 5))
    assert tuner.pools == []
