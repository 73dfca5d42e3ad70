"""PlanSession with a fake worker: faulty kernels do not serve, sound ones do, and the time is used where it counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gemmtune.backends.base import Artifact
from gemmtune.backends.cuda import CudaBackend
from gemmtune.core import devices
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import LayoutDecision, Verdict
from gemmtune.core.devices import HostDevice
from gemmtune.core.errors import StoreError
from gemmtune.core.events import Event, PlanProgress, silent
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.core.tuned_plan import TunedPlan
from gemmtune.core.workloads import weight_only_problem
from gemmtune.dispatch import current_target
from gemmtune.dispatch.forms import choose_forms
from gemmtune.dispatch.plan_layouts import rank_layouts_of_plan
from gemmtune.dispatch.portfolio import build_plan
from gemmtune.report import plan_rows
from gemmtune.store import MemoryStore
from gemmtune.tuning import plan_session, weight_session
from gemmtune.tuning.plan_measurements import Measurements
from gemmtune.tuning.plan_pool import PoolKernel
from gemmtune.tuning.plan_session import PlanSession
from gemmtune.tuning.sizes import SizeRange
from gemmtune.tuning.worker_pool import BeginBuilds
from gemmtune.workers.contract import WorkerLost
from helpers.builds import finished
from helpers.gpus import H200
from helpers.plans import (
    COMPOSITE,
    HALF,
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
    staircase,
)  # fmt: skip

TUNED = (1, 8, 48, 256)
RANGE = SizeRange(1, 512, TUNED)
SOUND = (SMALL, LARGE)


def fastest(m: int) -> float:
    """Return 90% of the time of the fastest sound kernel."""
    return 0.9 * min(kernel.seconds(m) for kernel in SOUND)


def run_session(
    worker: FakeWorker,
    kernels: Sequence[SimulatedKernel],
    store: MemoryStore,
    *,
    seconds: float = 20.0,
    sizes: SizeRange = RANGE,
    counts: Mapping[int, int] = {},
    progress: Callable[[Event], None] = silent,
    begin_builds: BeginBuilds | None = None,
    **options: Any,
) -> TunedPlan | None:
    decisions = decisions_at(kernels, sizes.tuned)
    session = PlanSession(
        PROBLEM, current_target(), store, worker, decisions, sizes, progress, 0, counts=counts, **options
    )  # type: ignore[arg-type]
    plan = session.run(seconds, begin_builds)
    if plan is not None:
        store.put_plan(current_target(), plan)  # which checks it
    return plan


def make_plan(
    clock: FakeTime, kernels: Sequence[SimulatedKernel], store: MemoryStore, **options: Any
) -> tuple[TunedPlan, FakeWorker]:
    worker = FakeWorker(clock, kernels)
    plan = run_session(worker, kernels, store, **options)
    assert plan is not None
    return plan, worker


def assert_close_to_the_fastest(plan: TunedPlan, kernels: Sequence[SimulatedKernel], packing: str = "") -> None:
    """Assert that what serves takes at most 5% more than the fastest of sound kernels, at each M that was measured, and
    1% more at a mean M."""
    models = {kernel.id: kernel.seconds for kernel in kernels} | {PLAIN.id: PLAIN_S}
    ratios = {}
    for m in range(plan.first, plan.last + 1):
        serving = plan.serving(m, packing)
        assert serving is not None
        ratios[m] = models[serving.id](m) / min(models[kernel.id](m) for kernel in kernels)
    assert max(ratios[m] for m in plan.noise) <= 1.05 / 0.99  # a kernel must be faster than plain by 1%
    assert sum(ratios.values()) / len(ratios) < 1.01


# --- sound kernels


def test_kernels_serve_where_they_are_fastest(clock: FakeTime, store: MemoryStore) -> None:
    plan, worker = make_plan(clock, SOUND, store)
    assert (plan.first, plan.last, list(plan.intervals)) == (1, 512, [""])
    served = [plan.serving(m) for m in (1, 8, 16, 128, 256, 512)]
    small, large = SMALL.id, LARGE.id
    assert [kernel.id for kernel in served if kernel is not None] == [small, small, small, large, large, large]
    assert_close_to_the_fastest(plan, SOUND)
    assert {kernel.id for kernel in plan.kernels} == {SMALL.id, LARGE.id, PLAIN.id}
    assert worker.opened == [PROBLEM.with_m(16)]
    assert store.get_plan(current_target(), PROBLEM.plan_key) == plan


def test_kernels_that_serve_are_verified_at_many_m(clock: FakeTime, store: MemoryStore) -> None:
    plan, worker = make_plan(clock, SOUND, store)
    for name in serving_kernels(plan):
        kernel = plan.find(name)
        assert kernel is not None
        assert kernel.verdict == Verdict("within_bound", worst=0.25)
        assert list(kernel.verified) == sorted(worker.verified[name])
        for interval in plan.intervals[""]:
            if interval.kernel == name:
                assert {interval.first, interval.last} <= set(kernel.verified)
    assert all(kernel.verdict is None for kernel in plan.kernels if kernel.id not in serving_kernels(plan))


def test_kernel_slower_than_plain_does_not_serve(clock: FakeTime, store: MemoryStore) -> None:
    slow = simulated("slow", lambda m: 0.995 * PLAIN_S(m))
    plan, _ = make_plan(clock, [LARGE, slow], store)
    assert slow.id not in serving_kernels(plan)
    below = simulated("below", lambda m: (0.8 if m < 100 else 1.1) * PLAIN_S(m))
    plan, _ = make_plan(clock, [below], MemoryStore())
    assert serving_kernels(plan) == {below.id, PLAIN.id}
    assert [interval.kernel for interval in plan.intervals[""]] == [below.id, PLAIN.id]
    assert 64 <= plan.intervals[""][0].last <= 99


def test_conversion_of_the_operands_serves_where_pytorchs_operator_is_slower(clock: FakeTime) -> None:
    """The operator is what kernels are compared with, and serves where the conversion takes longer."""
    plain = staircase(2.0, 2.0)
    kernels = [replace(COMPOSITE, seconds=staircase(12.0, 0.4))]
    decisions, worker = decisions_at(kernels, TUNED, HALF, plain), FakeWorker(clock, kernels, plain)
    store = MemoryStore()
    session = PlanSession(HALF, current_target(), store, worker, decisions, RANGE, silent, 0, counts={})  # type: ignore[arg-type]
    plan = session.run(5.0)
    assert plan is not None
    store.put_plan(current_target(), plan)  # which checks it
    assert plan_rows.plain_kernel(plan) == plan.find(PLAIN.id)
    served = {m: kernel.id for m in (1, 4, 16, 64, 512) if (kernel := plan.serving(m)) is not None}
    assert served == {1: PLAIN.id, 4: PLAIN.id, 16: COMPOSITE.id, 64: COMPOSITE.id, 512: COMPOSITE.id}
    conversion = plan.find(COMPOSITE.id)
    assert conversion is not None
    assert conversion.verdict == Verdict("within_bound", worst=0.25)
    raw = build_plan(decisions, None, plan)
    assert raw is not None
    assert {m: raw.pick(m).candidate for m in (4, 64)} == {4: None, 64: COMPOSITE.candidate}


def test_recorded_m_are_measured(clock: FakeTime, store: MemoryStore) -> None:
    counts = {37: 100, 211: 5}
    plan, worker = make_plan(clock, SOUND, store, counts=counts)
    assert plan.counts == counts
    measured = {m for m, names in worker.timed[0].items()} | {m for request in worker.timed for m in request}
    assert {37, 211} <= measured
    assert {37, 211} <= set(plan.noise)
    assert all(m in kernel.times for m in counts for kernel in plan.kernels)


def test_range_is_not_left(clock: FakeTime, store: MemoryStore) -> None:
    plan, worker = make_plan(clock, SOUND, store, sizes=SizeRange(7, 61, (8, 48)), counts={3: 50, 20: 2, 99: 7})
    assert all(7 <= m <= 61 for request in worker.timed for m in request)
    assert all(7 <= m <= 61 for sizes in worker.verified.values() for m in sizes)
    assert (plan.intervals[""][0].first, plan.intervals[""][-1].last) == (7, 61)
    assert {7, 8, 16, 20, 32, 48, 61} <= set(plan.noise)


def test_one_m_is_a_range(clock: FakeTime, store: MemoryStore) -> None:
    plan, _ = make_plan(clock, SOUND, store, sizes=SizeRange(8, 8, (8,)))
    assert [(interval.first, interval.last) for interval in plan.intervals[""]] == [(8, 8)]
    assert serving_kernels(plan) == {SMALL.id}


# --- faulty kernels


@pytest.mark.parametrize("wrong_at", [lambda m: m % 7 == 3, lambda m: m >= 129, lambda m: m == 1, lambda m: m == 512])
def test_wrong_kernel_does_not_serve(clock: FakeTime, store: MemoryStore, wrong_at: Callable[[int], bool]) -> None:
    planted = simulated("planted", fastest, wrong_at=wrong_at)
    plan, _ = make_plan(clock, [*SOUND, planted], store)
    assert planted.id not in serving_kernels(plan)
    assert_close_to_the_fastest(plan, SOUND)
    failures = store.failures(current_target(), PROBLEM.plan_key)
    assert {name: verdict.kind for name, verdict in failures.items()} == {planted.id: "wrong"}
    row = plan.find(planted.id)
    assert row is not None
    assert row.verdict is None


def test_kernel_slower_at_odd_m_does_not_serve(clock: FakeTime, store: MemoryStore) -> None:
    planted = simulated("planted", lambda m: fastest(m) * (3.0 if m % 2 else 1.0))
    plan, _ = make_plan(clock, [*SOUND, planted], store)
    assert planted.id not in serving_kernels(plan)
    assert_close_to_the_fastest(plan, SOUND)
    assert store.failures(current_target(), PROBLEM.plan_key) == {}


@pytest.mark.parametrize("slow", [1.2, 3.0])
def test_both_parities_of_m_are_timed_where_a_kernel_serves(clock: FakeTime, store: MemoryStore, slow: float) -> None:
    """Times that do not grow with M call for no other measurement."""
    kernels = [
        simulated("even", lambda m: 5e-6 * (slow if m % 2 else 1.0), rows=256),
        simulated("all", lambda m: 5.4e-6, rows=256),
    ]
    plan, worker = make_plan(clock, kernels, store, sizes=SizeRange(66, 256, (128,)))
    assert set(worker.timed[0]) == {66, 128, 256}
    for interval in plan.intervals[""]:
        kernel = plan.find(interval.kernel)
        assert kernel is not None
        if interval.last > interval.first + 1:
            assert {m % 2 for m in kernel.times if interval.first <= m <= interval.last} == {0, 1}
    assert any(interval.kernel == kernels[1].id for interval in plan.intervals[""])


@pytest.mark.parametrize("crashes_at", [lambda m: m == 64, lambda m: m >= 256, lambda m: m % 2 == 1])
def test_kernel_that_crashes_the_worker_does_not_serve(
    clock: FakeTime, store: MemoryStore, crashes_at: Callable[[int], bool]
) -> None:
    planted = simulated("planted", fastest, crashes_at=crashes_at)
    plan, worker = make_plan(clock, [*SOUND, planted], store)
    assert worker.losses == 1
    assert planted.id not in serving_kernels(plan)
    assert_close_to_the_fastest(plan, SOUND)
    failures = store.failures(current_target(), PROBLEM.plan_key)
    assert failures == {planted.id: Verdict("crashed", "SIGSEGV")}


def test_kernel_that_crashes_while_verified_does_not_serve(clock: FakeTime, store: MemoryStore) -> None:
    planted = simulated("planted", fastest)
    worker = FakeWorker(clock, [*SOUND, replace(planted, wrong_at=lambda m: m == 100)])
    original = worker.verify_sizes
    worker.verify_sizes = lambda item, sizes, dim: original(item, [*sizes, 100])  # type: ignore[method-assign]
    plan = run_session(worker, [*SOUND, planted], store)
    assert plan is not None
    assert planted.id not in serving_kernels(plan)
    assert planted.id in store.failures(current_target(), PROBLEM.plan_key)


def test_kernel_that_raises_does_not_serve(clock: FakeTime, store: MemoryStore) -> None:
    planted = simulated("planted", fastest, raises_at=lambda m: m > 100)
    plan, worker = make_plan(clock, [*SOUND, planted], store)
    assert worker.losses == 0
    assert planted.id not in serving_kernels(plan)
    assert_close_to_the_fastest(plan, SOUND)
    assert set(store.failures(current_target(), PROBLEM.plan_key)) == {planted.id}


def test_kernel_that_crashes_wherever_it_is_loaded_is_sent_once(clock: FakeTime, store: MemoryStore) -> None:
    """A worker loads and packs all kernels of a request, also those that it does not time."""
    plan, worker = make_plan(clock, [*SOUND, simulated("planted", fastest, unpackable=True)], store)
    assert worker.losses == 1
    assert serving_kernels(plan) == {SMALL.id, LARGE.id}


def test_worker_lost_in_no_kernel_raises(clock: FakeTime, store: MemoryStore) -> None:
    class Lost(FakeWorker):
        def time_sizes(self, *_: Any) -> Any:
            raise WorkerLost(Verdict("crashed", "SIGKILL"), None)

    with pytest.raises(WorkerLost, match="SIGKILL"):
        run_session(Lost(clock, SOUND), SOUND, store)


def test_several_wrong_kernels_leave_the_sound_ones(clock: FakeTime, store: MemoryStore) -> None:
    planted = [
        simulated(f"planted{i}", lambda m, i=i: (1.0 + 0.01 * i) * fastest(m), wrong_at=lambda m: m > 200)
        for i in range(3)
    ]
    plan, _ = make_plan(clock, [*SOUND, *planted], store)
    assert serving_kernels(plan) == {SMALL.id, LARGE.id}
    assert set(store.failures(current_target(), PROBLEM.plan_key)) == {kernel.id for kernel in planted}


def test_m_timed_for_a_wrong_kernel_only_are_not_served_by_plain(clock: FakeTime, store: MemoryStore) -> None:
    """Where it seemed far ahead, the sound kernels were not timed."""
    planted = simulated("planted", lambda m: 0.94 * fastest(m), wrong_at=lambda m: m == 512)
    plan, worker = make_plan(clock, [*SOUND, planted], store)
    assert any(names == [PLAIN.id, planted.id] for request in worker.timed for names in request.values())
    assert serving_kernels(plan) == {SMALL.id, LARGE.id}


def test_kernels_that_a_wrong_one_kept_out_serve_in_the_same_session(clock: FakeTime, store: MemoryStore) -> None:
    """A kernel far faster than all others is the only one of its layout that is timed, until it turns out wrong."""
    planted = simulated("planted", lambda m: 0.5 * fastest(m), wrong_at=lambda m: m == 512)
    plan, worker = make_plan(clock, [*SOUND, planted], store)
    assert SMALL.id not in {name for request in worker.timed[:4] for names in request.values() for name in names}
    assert serving_kernels(plan) == {SMALL.id, LARGE.id}
    assert_close_to_the_fastest(plan, SOUND)
    refused = plan.find(planted.id)
    assert refused is not None
    assert refused.reason.startswith("wrong: M = 512")
    assert [kernel.reason for kernel in plan.kernels if kernel.id != planted.id] == ["", "", ""]
    assert plan.seconds <= 20.0 + 0.5 * 20.0


def test_refused_kernel_does_not_count_for_the_regret(clock: FakeTime, store: MemoryStore) -> None:
    planted = simulated("planted", fastest, wrong_at=lambda m: m == 512)
    plan, _ = make_plan(clock, [*SOUND, planted], store)
    assert all((plan.regret(m) or 0.0) < 0.06 for m in plan.noise)


def test_kernel_slowed_by_its_surroundings_below_plain_does_not_serve(clock: FakeTime, store: MemoryStore) -> None:
    """At 0.8 of ATen's time alone, and slower than ATen between other kernels."""
    kernel = simulated("k", lambda m: 0.8 * PLAIN_S(m))
    for worst, serves in ((0.9, True), (1.05, False)):
        test = LayoutDecision("tie", kernel.id, PLAIN.id, 0.8, 0.79, 0.81, {"between": worst})
        decisions = [msgspec.structs.replace(item, layouts={"": test}) for item in decisions_at([kernel], TUNED)]
        worker = FakeWorker(clock, [kernel])
        session = PlanSession(PROBLEM, current_target(), store, worker, decisions, RANGE, silent, 0, counts={})  # type: ignore[arg-type]
        plan = session.run(20.0)
        assert plan is not None
        assert serving_kernels(plan) == {kernel.id if serves else PLAIN.id}


def test_overhead_of_a_call_keeps_short_kernels_from_serving(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_session, "SERVING_S", 3e-6)
    kernel = simulated("k", lambda m: 0.8 * PLAIN_S(m))  # 2 us less at M = 1, 12 us less at M = 512
    plan, _ = make_plan(clock, [kernel], store)
    assert plan.overhead_s == 3e-6
    assert [interval.kernel for interval in plan.intervals[""]] == [PLAIN.id, kernel.id]


def test_wrong_plain_op_is_not_remembered(clock: FakeTime, store: MemoryStore) -> None:
    plain = SimulatedKernel(PLAIN, PLAIN_S, wrong_at=lambda m: m == 512)
    kernel = simulated("k", lambda m: (0.8 if m < 100 else 1.1) * PLAIN_S(m))
    worker = FakeWorker(clock, [kernel])
    worker._kernels[PLAIN.id] = plain
    run_session(worker, [kernel], store)
    assert store.failures(current_target(), PROBLEM.plan_key) == {}


def test_kernel_with_a_remembered_failure_is_not_timed(clock: FakeTime, store: MemoryStore) -> None:
    """Decisions may be older than the failure. Dispatch does not serve a kernel that has one."""
    target, planted = current_target(), simulated("planted", fastest)
    store.remember_failure(target, PROBLEM.plan_key, planted.id, Verdict("wrong", "M = 100"))
    store.remember_failure(target, PROBLEM.plan_key, PLAIN.id, Verdict("wrong", "M = 100"))
    plan, worker = make_plan(clock, [*SOUND, planted], store)
    assert plan.find(planted.id) is None
    assert planted.id not in {name for request in worker.timed for names in request.values() for name in names}
    assert plan.find(PLAIN.id) is not None


def test_store_that_refuses_failures_does_not_end_the_session(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("disk full")

    monkeypatch.setattr(MemoryStore, "remember_failure", refuse)
    monkeypatch.setattr(MemoryStore, "failures", refuse)
    plan, _ = make_plan(clock, [*SOUND, simulated("planted", fastest, wrong_at=lambda m: m > 200)], store)
    assert serving_kernels(plan) == {SMALL.id, LARGE.id}


@pytest.mark.parametrize("m", [3, 16, 64])
def test_one_stalled_timing_does_not_exclude_a_kernel(clock: FakeTime, store: MemoryStore, m: int) -> None:
    worker = FakeWorker(clock, SOUND)
    worker.stalls[SMALL.id, m] = 5.0
    plan = run_session(worker, SOUND, store)
    assert plan is not None
    assert worker.stalls == {}
    assert SMALL.id in serving_kernels(plan)
    small = plan.find(SMALL.id)
    assert small is not None
    assert small.times[m] == SMALL.seconds(m)


@pytest.mark.parametrize("seconds", [0.1, 30.0])
def test_layout_that_was_slow_once_at_one_m_serves(clock: FakeTime, store: MemoryStore, seconds: float) -> None:
    """Also where the time for other M is over before that M is timed again."""
    packed = simulated("packed", lambda m: 0.9 * PLAIN_S(m), packing="p:x")
    worker = FakeWorker(clock, [packed], timing_s=0.01)
    worker.stalls[packed.id, RANGE.last] = 1.3
    plan = run_session(worker, [packed], store, seconds=seconds)
    assert plan is not None
    assert worker.stalls == {}
    assert rank_layouts_of_plan(plan) == ["p:x", None]


def test_m_at_which_the_machine_was_slow_is_timed_again(clock: FakeTime, store: MemoryStore) -> None:
    """There the packed layout was faster, since the machine slows it less; on a quiet one the plain op is."""
    packed = simulated("packed", lambda m: 1.2 * PLAIN_S(m), packing="p:x")
    worker = FakeWorker(clock, [packed])
    worker.stalls[PLAIN.id, 64], worker.stalls[packed.id, 64] = 4.0, 2.0
    plan = run_session(worker, [packed], store)
    assert plan is not None
    assert worker.stalls == {}
    kernel = plan.find(packed.id)
    assert kernel is not None
    assert kernel.times[64] == pytest.approx(packed.seconds(64))
    assert rank_layouts_of_plan(plan) == [None]


def test_timings_of_other_kernels_are_no_repeats(clock: FakeTime, store: MemoryStore) -> None:
    """A stall is discounted when the kernel itself is timed again, not when those of another layout are."""
    packed = simulated("packed", SMALL.seconds, packing="p:x")
    kernels = [SMALL, packed]
    worker = FakeWorker(clock, kernels)
    session = PlanSession(
        PROBLEM, current_target(), store, worker, decisions_at(kernels, TUNED), RANGE, silent, 0, counts={}
    )  # type: ignore[arg-type]
    session._extend_pool()
    session._time({32: [packed.id], 64: [packed.id]}, 1.0)
    session._time({32: [packed.id]}, 1.0)
    worker.stalls[SMALL.id, 32] = 5.0
    session._time({32: [SMALL.id], 64: [SMALL.id]}, 1.0)
    found = session._measurements
    assert found._suspicious("") == {32: [SMALL.id], 64: [SMALL.id]}
    worker.stalls[SMALL.id, 32] = 5.0
    session._time({32: [SMALL.id], 64: [SMALL.id]}, 1.0)
    assert found._suspicious("") == {}
    assert found.out == {SMALL.id: "irregular: slower at M = 32 than at M = 64"}


def test_surcharges_that_fall_with_m_make_no_kernel_irregular(clock: FakeTime, store: MemoryStore) -> None:
    packed = simulated("packed", SMALL.seconds, packing="p:x")
    worker = FakeWorker(clock, [packed])
    session = PlanSession(
        PROBLEM, current_target(), store, worker, decisions_at([packed], TUNED), RANGE, silent, 0, counts={}
    )  # type: ignore[arg-type]
    session._extend_pool()
    session._measurements.surcharges = {"packed": {1: 2.0, 64: 1.0}}
    session._time({m: [packed.id] for m in (1, 2, 64)}, 1.0)
    assert session._measurements._suspicious("p:x") == {}


def test_kernels_with_copies_of_their_code_are_verified_in_each(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that is wrong in one of 24 copies does not serve."""

    def path(m: int) -> int:
        return m % 192 // 8

    monkeypatch.setattr(PlanSession, "_code_paths", lambda self, kernel: path if "copies" in kernel.id else None)
    for wrong in (None, 5, 23):
        copies = simulated("copies", fastest, wrong_at=lambda m, wrong=wrong: path(m) == wrong)
        plan, worker = make_plan(clock, [copies, *SOUND], store)
        assert (copies.id in serving_kernels(plan)) == (wrong is None)
        if wrong is None:
            assert {path(m) for m in worker.verified[copies.id]} == set(range(24))


def test_copies_are_those_of_the_backend_that_has_the_kernel(clock: FakeTime, store: MemoryStore) -> None:
    problem = weight_only_problem(500, 4096, 4096)
    session = PlanSession(problem, H200, store, FakeWorker(clock, SOUND), [], RANGE, silent, 0, counts={})  # type: ignore[arg-type]
    fitted = CudaBackend().plan_candidates(problem, H200)[0]
    path = session._code_paths(PoolKernel.of(fitted, 500, None))
    assert path is not None
    assert len({path(m) for m in range(1, 512)}) > 3
    assert session._code_paths(PoolKernel.of(SMALL.candidate, 1, None)) is None
    assert session._estimated_s(PoolKernel.of(fitted, 500, None), 300) == CudaBackend().estimated_s(
        problem.with_m(300), fitted, H200
    )
    assert session._estimated_s(PoolKernel.of(SMALL.candidate, 1, None), 300) is None


# --- load


def test_kernel_that_is_slower_than_the_plain_op_under_load_does_not_serve_many_rows(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is served for few rows, where calls are too short for a power limit. A short tuning does without load."""
    for load_s, seconds in ((0.0, 20.0), (0.2, 20.0), (0.2, 1.0)):
        monkeypatch.setattr(HostDevice, "profile", HostDevice.profile._replace(load_s=load_s))
        kernel = simulated("hot", lambda m: 0.9 * PLAIN_S(m), under_load=1.2)
        plan, _ = make_plan(clock, [kernel], store, seconds=seconds)
        served = [item.id for item in (plan.serving(500), plan.serving(16)) if item is not None]
        assert served == [PLAIN.id if load_s and seconds > 1.0 else kernel.id, kernel.id]


# --- time


@pytest.mark.parametrize("seconds", [1.0, 5.0])
def test_time_budget_ends_the_refinement(clock: FakeTime, store: MemoryStore, seconds: float) -> None:
    many = [simulated(f"k{i}", staircase(3.0 + i, 8.0 / (i + 1), 8 * (i + 1)), rows=8 * (i + 1)) for i in range(6)]
    worker = FakeWorker(clock, many, timing_s=0.02)
    verifying_s = []
    original = worker.verify_sizes

    def verify_sizes(*arguments: Any) -> Any:
        start = clock.now
        result = original(*arguments)
        verifying_s.append(clock.now - start)
        return result

    worker.verify_sizes = verify_sizes  # type: ignore[method-assign]
    start = clock.now
    plan = run_session(worker, many, store, seconds=seconds)
    assert plan is not None
    assert plan.stopped == "the time for other M was over"
    assert plan.seconds == pytest.approx(clock.now - start)
    # One request for six M of all kernels may begin before the end.
    assert plan.seconds - sum(verifying_s) <= max(seconds, 0.02 * 7 * 20) + 0.02 * 7 * 12


def slowed(kernels: Sequence[SimulatedKernel], factor: float) -> list[SimulatedKernel]:
    """Return the kernels with calls that take a multiple of the time."""
    return [replace(kernel, seconds=lambda m, kernel=kernel: factor * kernel.seconds(m)) for kernel in kernels]


@pytest.mark.parametrize(("factor", "are_all_timed"), [(10.0, True), (3e3, False)])
def test_of_kernels_with_slow_calls_only_the_fastest_are_timed_at_large_m(
    clock: FakeTime, store: MemoryStore, factor: float, are_all_timed: bool
) -> None:
    """Six kernels take 1.00 to 1.10 of the fastest one's time: all are timed at M = 512 unless a call takes 0.1 s."""
    close = [simulated(f"k{i}", staircase((1.0 + 0.02 * i) * 3.0, (1.0 + 0.02 * i) * 0.08)) for i in range(6)]
    kernels = slowed(close, factor)
    worker = FakeWorker(clock, kernels, lambda m: factor * PLAIN_S(m), timing_s=1e-3)
    decisions = decisions_at(kernels, TUNED, plain=lambda m: factor * PLAIN_S(m))
    session = PlanSession(PROBLEM, current_target(), store, worker, decisions, RANGE, silent, 0, counts={})  # type: ignore[arg-type]
    plan = session.run(0.5)
    assert plan is not None
    timed = {name for request in worker.timed for name in request.get(512, ())}
    assert {PLAIN.id, kernels[0].id} <= timed
    assert (len(timed) > 2) is are_all_timed
    assert all(len(request) == 1 for request in worker.timed if 512 in request) or are_all_timed
    assert plan.serving(512, "").id == kernels[0].id  # type: ignore[union-attr]


def test_refinement_ends_when_nothing_is_worth_a_measurement(clock: FakeTime, store: MemoryStore) -> None:
    plan, worker = make_plan(clock, SOUND, store, seconds=1e4)
    assert plan.stopped == "no other M was worth a measurement"
    assert len(plan.noise) < 150
    assert sum(len(request) for request in worker.timed) < 200


def test_longer_time_measures_more_m_near_the_crossing(clock: FakeTime, store: MemoryStore) -> None:
    slow = [replace(kernel, seconds=lambda m, s=kernel.seconds: s(m)) for kernel in SOUND]
    plans = [
        run_session(FakeWorker(clock, slow, timing_s=0.01), slow, MemoryStore(), seconds=seconds)
        for seconds in (0.1, 20.0)
    ]
    assert plans[0] is not None
    assert plans[1] is not None
    assert len(plans[0].noise) < len(plans[1].noise)
    assert_close_to_the_fastest(plans[1], SOUND)


def test_progress_is_reported_after_each_request(clock: FakeTime, store: MemoryStore) -> None:
    events: list[Event] = []
    plan, worker = make_plan(clock, SOUND, store, progress=events.append)
    assert len(events) == len(worker.timed)
    measured = [event.measured for event in events if isinstance(event, PlanProgress)]
    assert measured == sorted(measured)
    assert measured[-1] == len(plan.noise)


def test_m_whose_calls_take_longer_than_the_time_left_are_not_measured(clock: FakeTime, store: MemoryStore) -> None:
    """Calls take 30 ms and more: another M would take longer than the 50 ms that are left after the first M."""

    def requests(seconds: float) -> list[dict[int, list[str]]]:
        kernels = [simulated(kernel.id, lambda m, k=kernel: 1e4 * k.seconds(m), rows=16) for kernel in SOUND]
        worker = FakeWorker(clock, kernels, lambda m: 1e4 * PLAIN_S(m), timing_s=0.1)
        decisions = decisions_at(kernels, TUNED, plain=lambda m: 1e4 * PLAIN_S(m))
        PlanSession(PROBLEM, current_target(), store, worker, decisions, RANGE, silent, 0, counts={}).run(seconds)  # type: ignore[arg-type]
        return worker.timed

    first = requests(0.001)
    spent = 0.1 * sum(len(names) for request in first for names in request.values())
    assert requests(spent + 0.05) == first
    assert len(requests(spent + 5.0)) > len(first)


# --- layouts


def test_each_layout_has_intervals_of_its_own_kernels(clock: FakeTime, store: MemoryStore) -> None:
    packed = [
        simulated("packed_small", staircase(2.0, 2.0, 16), rows=16, packing="p:x"),
        simulated("packed_large", staircase(5.0, 4.0, 128), rows=128, packing="p:x"),
    ]
    plan, _ = make_plan(clock, [*SOUND, *packed], store)
    assert set(plan.intervals) == {"", "p:x"}
    assert {interval.kernel for interval in plan.intervals[""]} == {kernel.id for kernel in SOUND}
    assert {interval.kernel for interval in plan.intervals["p:x"]} == {kernel.id for kernel in packed}
    assert_close_to_the_fastest(plan, SOUND)
    assert_close_to_the_fastest(plan, packed, "p:x")


def test_packed_layout_is_served_where_it_is_slower_than_plain(clock: FakeTime, store: MemoryStore) -> None:
    """A packed weight has no plain op: its kernels serve all M or none."""
    packed = simulated("packed", lambda m: (0.5 if m < 200 else 1.3) * PLAIN_S(m), packing="p:x")
    plan, _ = make_plan(clock, [SMALL, packed], store)
    assert [interval.kernel for interval in plan.intervals["p:x"]] == [packed.id]


def test_wrong_kernel_of_one_layout_leaves_the_other(clock: FakeTime, store: MemoryStore) -> None:
    packed = simulated("packed", fastest, packing="p:x", wrong_at=lambda m: m % 7 == 3)
    plan, _ = make_plan(clock, [*SOUND, packed], store)
    assert set(plan.intervals) == {""}
    assert_close_to_the_fastest(plan, SOUND)


def test_best_packed_layout_with_right_kernels_has_intervals(clock: FakeTime, store: MemoryStore) -> None:
    packed = [simulated(f"packed{i}", lambda m, i=i: (1.0 + 0.1 * i) * fastest(m), packing=f"p:{i}") for i in range(3)]
    plan, worker = make_plan(clock, [*SOUND, *packed], store)
    assert set(plan.intervals) == {"", "p:0"}
    assert not {kernel.id for kernel in packed[1:]} & set(worker.verified)
    wrong = replace(packed[0], wrong_at=lambda m: m % 7 == 3)
    plan, _ = make_plan(clock, [*SOUND, wrong, *packed[1:]], MemoryStore())
    assert set(plan.intervals) == {"", "p:1"}


def test_layouts_are_compared_over_the_whole_range(clock: FakeTime, store: MemoryStore) -> None:
    """A layout whose kernels were fast at M = 1 only is timed at the other M, too, where it is slower than another."""
    short = simulated("short", lambda m: 1e-6 * (1.0 + 0.08 * m), packing="p:short")
    even = simulated("even", lambda m: 1e-6 * (2.0 + 0.05 * m), packing="p:even")
    plan, _ = make_plan(clock, [short, even], store)
    kernel = plan.find(short.id)
    assert kernel is not None
    assert {1, 512} <= set(kernel.times)
    assert rank_layouts_of_plan(plan) == ["p:even", None]


def test_layout_far_behind_on_the_way_has_no_intervals(clock: FakeTime, store: MemoryStore) -> None:
    short = simulated("short", lambda m: 1e-6 * (1.0 + 4.0 * m), packing="p:short")
    even = simulated("even", lambda m: 1e-6 * (6.0 + 0.05 * m), packing="p:even")
    plan, _ = make_plan(clock, [short, even], store)
    assert "p:short" not in plan.intervals
    assert set(plan.intervals) == {"p:even", ""}


def test_kernel_for_many_rows_that_is_slow_with_few_is_timed_above_its_own_m(
    clock: FakeTime, store: MemoryStore
) -> None:
    many = simulated("many", lambda m: (0.6 if m > 20 else 3.0) * fastest(m))
    plan, _ = make_plan(clock, [*SOUND, many], store, sizes=SizeRange(1, 128, (1, 8, 48)))
    kernel = plan.find(many.id)
    assert kernel is not None
    assert {16, 48, 64, 128} <= set(kernel.times)
    served = plan.serving(128)
    assert served is not None
    assert served.id == many.id


def test_layouts_that_may_serve_are_measured_before_faster_ones_that_may_not(
    clock: FakeTime, store: MemoryStore
) -> None:
    """Three layouts, of which two are measured closely: two faster ones are slower than ATen at large M."""

    def model(large: float, share: float) -> Callable[[int], float]:
        return lambda m: PLAIN_S(m) * (large if m > 400 else share)

    kernels = [
        simulated(name, model(large, share), packing=f"p:{name}")
        for name, large, share in (("a", 1.2, 0.45), ("b", 1.2, 0.45), ("c", 0.9, 0.56))
    ]
    plan, _ = make_plan(clock, kernels, store)
    assert "p:c" in plan.intervals
    assert rank_layouts_of_plan(plan) == ["p:c", None]


def test_layout_for_a_weight_that_is_kept_raw_too_is_the_fastest_where_plain_does_not_serve(
    clock: FakeTime, store: MemoryStore
) -> None:
    """Both layouts are slower than ATen at large M. In the mean over all M the second one is faster."""
    short = simulated("short", lambda m: (0.3 if m <= 64 else 1.9) * PLAIN_S(m), packing="p:short")
    even = simulated("even", lambda m: (0.9 if m <= 64 else 1.1) * PLAIN_S(m), packing="p:even")
    plan, worker = make_plan(clock, [short, even], store)
    assert [interval.kernel for interval in plan.intervals["p:short"]] == [short.id]
    assert worker.verified[short.id]
    forms = choose_forms("p:short", [], plan)
    assert forms.pays
    assert {m for m in plan.noise if forms.is_raw(m)} == {m for m in plan.noise if m > 64}


# --- kernels that no Decision has

Builds = Mapping[str, Future[Artifact | Verdict]]

TILE = simulated("tile", lambda m: (0.5 if 320 < m <= 400 else 1.5) * fastest(m), rows=400)


def expect(monkeypatch: pytest.MonkeyPatch, kernel: SimulatedKernel, *sizes: int) -> None:
    """Make the session expect that a kernel is fast at some M."""

    def expected_kernels(*_: object) -> list[PoolKernel]:
        expected = PoolKernel.of(kernel.candidate, sizes[0], kernel.packing)
        expected.predicted_for = set(sizes)
        return [expected]

    monkeypatch.setattr(plan_session, "expected_kernels", expected_kernels)


def make_plan_with_tile(clock: FakeTime, store: MemoryStore, **options: Any) -> TunedPlan:
    worker = FakeWorker(clock, [*SOUND, TILE])
    plan = run_session(worker, SOUND, store, **options)
    assert plan is not None
    return plan


def test_expected_kernel_is_built_timed_and_serves_where_it_is_fast(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect(monkeypatch, TILE, 323, 390)
    begun: list[tuple[int, str]] = []

    def begin_builds(wanted: Sequence[tuple[Problem, Candidate]], target: Target) -> Builds:
        begun.extend((problem.m, candidate.id) for problem, candidate in wanted)
        return {candidate.id: finished(Artifact(candidate, "digest")) for _, candidate in wanted}

    plan = make_plan_with_tile(clock, store, begin_builds=begin_builds)
    assert begun == [(323, TILE.id)]
    kernel = plan.find(TILE.id)
    assert kernel is not None
    assert kernel.tuned_m == 323
    assert {323, 390} <= set(kernel.times)
    assert 512 in kernel.times  # a power of two nearby
    assert 16 not in kernel.times
    served = [plan.serving(m) for m in (128, 323, 370, 390, 512)]
    assert [item.id for item in served if item is not None] == [LARGE.id, TILE.id, TILE.id, TILE.id, LARGE.id]
    assert kernel.verdict is not None
    assert kernel.verdict.ok


def test_expected_kernel_of_a_decision_is_timed_at_the_expected_m_and_not_built_again(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect(monkeypatch, SMALL, 323)
    begun: list[str] = []

    def begin_builds(wanted: Sequence[tuple[Problem, Candidate]], target: Target) -> Builds:
        begun.extend(candidate.id for _, candidate in wanted)
        return {}

    kernel = make_plan_with_tile(clock, store, begin_builds=begin_builds).find(SMALL.id)
    assert kernel is not None
    assert 323 in kernel.times
    assert begun == []


def test_other_kernels_are_timed_until_an_expected_kernel_is_built_where_builds_overlap(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect(monkeypatch, TILE, 323, 390)
    monkeypatch.setattr(type(devices.get("cpu")), "profile", devices.get("cpu").profile._replace(builds_overlap=True))
    timed_before = list[dict[int, list[str]]]()
    worker = FakeWorker(clock, [*SOUND, TILE])

    class Build(Future[Artifact | Verdict]):
        def result(self, timeout: float | None = None) -> Artifact | Verdict:
            clock.now += 100.0  # more than there is for timing other M
            timed_before.extend(worker.timed)
            return Artifact(TILE.candidate, "digest")

    plan = run_session(worker, SOUND, store, begin_builds=lambda *_: {TILE.id: Build()})
    assert plan is not None
    before = {(m, name) for request in timed_before for m, names in request.items() for name in names}
    assert {(1, SMALL.id), (512, LARGE.id)} <= before
    assert TILE.id not in {name for _, name in before}
    kernel = plan.find(TILE.id)
    assert kernel is not None
    assert {323, 390, 512} <= set(kernel.times)
    assert 16 not in kernel.times
    served = [plan.serving(m) for m in (128, 323, 370, 390, 512)]
    assert [item.id for item in served if item is not None] == [LARGE.id, TILE.id, TILE.id, TILE.id, LARGE.id]


def test_build_that_fails_late_adds_no_kernel(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect(monkeypatch, TILE, 323)
    monkeypatch.setattr(type(devices.get("cpu")), "profile", devices.get("cpu").profile._replace(builds_overlap=True))

    class Build(Future[Artifact | Verdict]):
        def result(self, timeout: float | None = None) -> Artifact | Verdict:
            return Verdict("build_failed", "no compiler")

    assert make_plan_with_tile(clock, store, begin_builds=lambda *_: {TILE.id: Build()}).find(TILE.id) is None


def test_expected_kernel_that_cannot_be_built_is_not_timed(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect(monkeypatch, TILE, 323)

    def begin_builds(wanted: Sequence[tuple[Problem, Candidate]], target: Target) -> Builds:
        return {candidate.id: finished(Verdict("build_failed", "no compiler")) for _, candidate in wanted}

    assert make_plan_with_tile(clock, store, begin_builds=begin_builds).find(TILE.id) is None


def test_wrong_expected_kernel_does_not_serve(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect(monkeypatch, TILE, 323)
    worker = FakeWorker(clock, [*SOUND, replace(TILE, wrong_at=lambda m: True)])
    plan = run_session(worker, SOUND, store)
    assert plan is not None
    assert TILE.id not in serving_kernels(plan)
    assert TILE.id in store.failures(current_target(), PROBLEM.plan_key)


def test_kernels_that_surroundings_slow_down_serve_no_m_at_which_they_lose_there(
    clock: FakeTime, store: MemoryStore
) -> None:
    """The tests at M = 1 and 8 found a surrounding in which kernels take four times as long; at larger M none does."""
    tests = [
        LayoutDecision("winner", SMALL.id, PLAIN.id, 0.4, 0.39, 0.41, {"between": 0.4 * surcharge})
        for surcharge in (4.0, 4.0, 1.0, 1.0)
    ]
    decisions = [
        msgspec.structs.replace(decision, layouts={"": test})
        for decision, test in zip(decisions_at(SOUND, TUNED), tests, strict=True)
    ]
    worker = FakeWorker(clock, SOUND)
    plan = PlanSession(PROBLEM, current_target(), store, worker, decisions, RANGE, silent, 0, counts={}).run(2.0)  # type: ignore[arg-type]
    assert plan is not None
    assert plan.surcharges == {"raw": {1: 4.0, 8: 4.0, 48: 1.0, 256: 1.0}}
    served = {m: kernel.id for m in (1, 8, 64, 192) if (kernel := plan.serving(m)) is not None}
    assert served == {1: PLAIN.id, 8: PLAIN.id, 64: LARGE.id, 192: LARGE.id}


def have_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as on a GPU."""

    def with_waves(*args: Any, **options: Any) -> Measurements:
        return Measurements(*args, **{**options, "waves": True})

    monkeypatch.setattr(weight_session, "Measurements", with_waves)


def test_plain_op_is_scanned_where_a_kernel_takes_about_as_long(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = simulated("close", lambda m: PLAIN_S(m) * (0.9 if m >= 128 else 0.5))
    sizes = SizeRange(1, 512, (1, 128, 512))
    plan, worker = make_plan(clock, [close], store, sizes=sizes)
    assert plan.scan == {}
    have_waves(monkeypatch)
    plan, worker = make_plan(clock, [close], store, sizes=sizes)
    assert {129, 161, 193, 225, 255, 256, 257} <= set(plan.scan)
    assert min(plan.scan) >= 64
    assert plan.scan == {m: PLAIN_S(m) for m in plan.scan}
    alone = [m for request in worker.timed for m, names in request.items() if names == [PLAIN.id]]
    assert sorted(alone) == sorted(plan.scan)  # each once
    assert store.get_plan(current_target(), PROBLEM.plan_key) == plan


def test_plain_op_is_scanned_for_as_long_as_kernels_are_timed_at_most(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_waves(monkeypatch)
    monkeypatch.setattr(plan_session, "_SCANNED_AT_ONCE", 4)
    close = simulated("close", lambda m: 0.95 * PLAIN_S(m))
    sizes = SizeRange(64, 512, (64, 512))
    whole, _ = make_plan(clock, [close], store, sizes=sizes)
    part, _ = make_plan(clock, [close], store, sizes=sizes, seconds=0.01)  # a timing takes 1 ms
    assert 8 < len(part.scan) < len(whole.scan)
    assert sorted(part.scan) == sorted(whole.scan)[: len(part.scan)]


def test_plain_op_is_scanned_where_its_library_chooses_other_algorithms(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_waves(monkeypatch)
    close = simulated("close", lambda m: 0.95 * PLAIN_S(m))
    worker = FakeWorker(clock, [close])
    worker.algorithms = lambda m: "a" if 200 <= m < 240 else "b"
    plan = run_session(worker, [close], store, sizes=SizeRange(64, 512, (64, 512)))
    assert plan is not None
    assert {193, 200, 239, 256} <= set(plan.scan)
    assert len(plan.scan) < 30
    assert len(worker.asked) == len(set(worker.asked)) < 0.5 * 512


def test_library_is_asked_at_each_m_between_different_algorithms(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_waves(monkeypatch)
    close = simulated("close", lambda m: 0.95 * PLAIN_S(m))
    worker = FakeWorker(clock, [close])
    worker.algorithms = lambda m: "a" if m < 203 else "b"
    plan = run_session(worker, [close], store, sizes=SizeRange(64, 512, (64, 512)))
    assert plan is not None
    assert {193, 202, 203, 256} <= set(plan.scan)
    assert set(range(200, 208)) <= set(worker.asked)
    assert 210 not in worker.asked


def test_kernel_that_the_library_chooses_at_another_m_serves(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain op takes twice as long from M = 330 to 360, by another algorithm."""
    have_waves(monkeypatch)
    fast = simulated("fast", lambda m: 20e-6)
    close = simulated("close", lambda m: 39e-6)
    worker = FakeWorker(clock, [close, fast], plain=lambda m: 40e-6 if 328 <= m < 360 else 20e-6)
    worker.algorithms = lambda m: "slow" if 328 <= m < 360 else "fast"
    asked = []

    def choose(problem: Problem, target: Target, *arguments: Any) -> list[PoolKernel]:
        _, curves, sizes, without = arguments
        asked.append(sizes)
        assert close.id in without
        assert curves.plain_times.at_least(330, 350) == 40e-6
        kernel = PoolKernel.of(fast.candidate, 360, None)
        kernel.predicted_for = {340, 360}
        return [kernel] if kernel.id not in without else []

    monkeypatch.setattr(plan_session, "kernels_chosen_by_library", choose)
    plan = run_session(worker, [close], store, sizes=SizeRange(256, 512, (340, 512)))
    assert plan is not None
    assert asked
    served = {m: kernel.id for m in (300, 330, 358, 400) if (kernel := plan.serving(m)) is not None}
    assert served == {300: PLAIN.id, 330: fast.id, 358: fast.id, 400: PLAIN.id}


def test_plain_op_is_not_scanned_where_kernels_are_far_faster(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_waves(monkeypatch)
    plan, _ = make_plan(clock, [simulated("fast", lambda m: 0.5 * PLAIN_S(m))], store)
    assert plan.scan == {}


def test_plain_op_serves_between_measured_m_where_only_its_scan_is_faster(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes half of its time from M = 410 to 430, where no time is left to measure kernels."""
    have_waves(monkeypatch)
    monkeypatch.setattr(plan_session, "_MARGIN_ROUNDS", 0)
    close = simulated("close", lambda m: 40e-6)
    worker = FakeWorker(clock, [close], plain=lambda m: 22e-6 if 410 <= m <= 430 else 45e-6)
    plan = run_session(worker, [close], store, sizes=SizeRange(256, 512, (512,)), seconds=0.01)
    assert plan is not None
    assert not set(plan.noise) & set(range(385, 450))
    served = {m: kernel.id for m in (300, 410, 430, 460) if (kernel := plan.serving(m)) is not None}
    assert served == {300: close.id, 410: PLAIN.id, 430: PLAIN.id, 460: close.id}


def test_kernel_that_is_slower_than_the_plain_op_between_edges_of_tiles_does_not_serve_there(
    clock: FakeTime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where edges are measured most."""

    def is_edge(m: int) -> bool:
        return m % 8 in (0, 1, 7)

    have_waves(monkeypatch)
    kernel = simulated("edges", lambda m: PLAIN_S(m) * (0.9 if is_edge(m) else 1.1))
    plan, _ = make_plan(clock, [kernel], store, sizes=SizeRange(64, 512, (64, 128, 512)), seconds=0.01)
    served = [m for m in range(64, 513) if (serving := plan.serving(m)) is not None and serving.id == kernel.id]
    assert sum(not is_edge(m) for m in served) <= 8
