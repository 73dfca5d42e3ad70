"""Tests that ``tune(m=...)`` makes plans whose kernels are right at every M of the range."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gemmtune
from gemmtune import backends
from gemmtune.core.events import Event, PlanDone
from gemmtune.core.problem import Problem
from gemmtune.core.tuned_plan import TunedPlan
from gemmtune.core.workloads import bmm_problem, linear_problem
from gemmtune.dispatch import current_target
from gemmtune.store import MemoryStore
from gemmtune.tuning.verified_sizes import batches_to_verify, sizes_to_verify
from gemmtune.workers.local_worker import LocalWorker
from gemmtune.workers.protocol import SizedCandidate
from helpers import planted_kernels
from helpers.planted_kernels import (
    PACKING,
    RIGHT,
    WRONG_BATCHES,
    WRONG_ROWS,
    assert_no_fault_is_served,
    faulty_batches,
    faulty_rows,
    planted,
)
from helpers.undisturbed import undisturbed


@pytest.fixture(name="undisturbed")
def make_undisturbed() -> Iterator[None]:
    with undisturbed():
        yield


@pytest.mark.usefixtures("undisturbed")
def test_kernels_wrong_at_some_m_do_not_serve() -> None:
    """One is found when it is tuned for a single M, the other only when it is verified for a plan's intervals."""
    backends.register("planted", planted_kernels.ENTRY_POINT)
    store, problem, events = MemoryStore(), linear_problem(32, 64, 96, "float32"), list[Event]()
    decisions = gemmtune.tune(
        problem, m=range(1, 33), budget=1.0, store=store, backends=["planted"], progress=events.append
    )
    assert [decision.problem["m"] for decision in decisions] == [1, 8, 32]
    plan = store.get_plan(current_target(), problem.plan_key)
    assert events[-1] == PlanDone(problem.plan_key, plan, 0)
    if all(decision.outcome == "inconclusive" for decision in decisions):  # on a loaded machine
        return
    assert plan is not None
    assert (plan.first, plan.last) == (1, 32)
    failures = store.failures(current_target(), problem.plan_key)
    assert planted(3).id in failures
    assert {name: verdict.kind for name, verdict in failures.items()}.items() <= {
        planted(3).id: "wrong", planted(6).id: "wrong",
    }.items()  # fmt: skip
    assert_right_where_they_serve(plan)
    assert {interval.kernel for interval in plan.intervals.get(PACKING, ())} <= {planted(RIGHT).id}
    weight = torch.randn(64, 96)
    for m in range(1, 33):
        x = torch.randn(m, 96)
        torch.testing.assert_close(gemmtune.linear(x, weight), torch.nn.functional.linear(x, weight))


@pytest.mark.usefixtures("undisturbed")
def test_kernels_of_keys_are_right_at_every_m_that_they_serve() -> None:
    """The fastest planted kernels are right at the M that represent the keys, and wrong at every seventh M."""
    backends.register("planted", planted_kernels.ENTRY_POINT)
    store, problem = MemoryStore(), linear_problem(32, 64, 96, "float32")
    options: dict[str, Any] = {"budget": 0.5, "store": store, "backends": ["planted"]}
    decisions = gemmtune.tune(problem, m=range(1, 33), config_key=lambda m: 8 if m <= 8 else 29, **options)
    assert [decision.problem["m"] for decision in decisions] == [8, 29]
    plan = store.get_plan(current_target(), problem.plan_key)
    if all(decision.outcome == "inconclusive" for decision in decisions):  # on a loaded machine
        return
    assert plan is not None
    assert all([(i.first, i.last) for i in found] == [(1, 8), (9, 32)] for found in plan.intervals.values())
    assert_right_where_they_serve(plan)
    weight = torch.randn(64, 96)
    for m in range(1, 33):
        x = torch.randn(m, 96)
        torch.testing.assert_close(gemmtune.linear(x, weight), torch.nn.functional.linear(x, weight))
    gemmtune.tune(problem, m=range(1, 33), config_key="exact", **options)
    assert store.get_plan(current_target(), problem.plan_key) is None


def assert_right_where_they_serve(plan: TunedPlan) -> None:
    """Assert that no interval of a kernel that is wrong at every seventh M contains such an M."""
    for interval in (interval for found in plan.intervals.values() for interval in found):
        for remainder in (3, 6):
            wrong = [m for m in range(interval.first, interval.last + 1) if m % 7 == remainder]
            assert interval.kernel != planted(remainder).id or not wrong, interval


@pytest.mark.usefixtures("undisturbed")
def test_kernels_with_faults_at_some_m_do_not_serve_there() -> None:
    """Wrong from M = 129 on, wrong at every seventh M, and as slow as three products at odd M."""
    backends.register("faulty_rows", planted_kernels.ROWS_ENTRY_POINT)
    store, problem = MemoryStore(), linear_problem(256, 64, 96, "float32")
    gemmtune.tune(problem, m=range(1, 257), budget=1.0, store=store, backends=["faulty_rows"])
    plan = store.get_plan(current_target(), problem.plan_key)
    assert plan is not None
    assert (plan.first, plan.last) == (1, 256)
    assert store.failures(current_target(), problem.plan_key).keys() >= {faulty_rows(fault).id for fault in WRONG_ROWS}
    assert_no_fault_is_served(plan)


def batched_problem(batch: int) -> Problem:
    return bmm_problem(batch, 4, 24, 32, "float32")


@pytest.mark.usefixtures("undisturbed")
def test_kernels_with_faults_at_some_batches_do_not_serve_there() -> None:
    """Wrong from 17 matrices on, and wrong at every seventh batch; both are right at the tuned batches 1 and 8."""
    backends.register("faulty_batches", planted_kernels.BATCHES_ENTRY_POINT)
    store, problem = MemoryStore(), batched_problem(8)
    gemmtune.tune(problem, batch=range(1, 33), budget=1.0, store=store, backends=["faulty_batches"])
    plan = store.get_plan(current_target(), problem.plan_key_over("batch"))
    assert plan is not None
    assert (plan.dim, plan.first, plan.last) == ("batch", 1, 32)
    for interval in plan.intervals.get("", ()):
        for fault, is_wrong in WRONG_BATCHES.items():
            served = range(interval.first, interval.last + 1) if interval.kernel == faulty_batches(fault).id else ()
            assert not any(map(is_wrong, served)), interval
    for batch in range(1, 36):
        a, b = torch.randn(batch, 4, 32), torch.randn(batch, 32, 24)
        torch.testing.assert_close(gemmtune.bmm(a, b), torch.bmm(a, b))


@pytest.mark.parametrize("seed", range(3))
def test_kernel_right_at_the_tuned_batch_is_found_wrong_at_others(seed: int) -> None:
    backends.register("faulty_batches", planted_kernels.BATCHES_ENTRY_POINT)
    with LocalWorker(current_target()) as worker:
        worker.open(batched_problem(32), seed)
        sizes = batches_to_verify([(1, 32)], random.Random(seed))
        for fault, is_wrong in WRONG_BATCHES.items():
            item = SizedCandidate(faulty_batches(fault).to_dict(), 8)
            result = worker.verify_sizes(item, sizes, "batch")
            assert result.verdict.kind == "wrong"
            assert is_wrong(result.failed_m)
            assert worker.verify_sizes(item, [1, 8, 16], "batch").verdict.ok


@pytest.mark.parametrize("seed", range(3))
def test_kernel_right_at_the_tuned_m_is_found_wrong_at_others(seed: int) -> None:
    backends.register("planted", planted_kernels.ENTRY_POINT)
    with LocalWorker(current_target()) as worker:
        worker.open(linear_problem(16, 64, 96, "float32"), seed)
        for remainder in (3, 6, RIGHT):
            candidate = planted(remainder)
            assert worker.confirm(candidate).verdict.ok == (remainder != 3)
            sizes = sizes_to_verify([(1, 32)], candidate, random.Random(seed))
            result = worker.verify_sizes(SizedCandidate(candidate.to_dict(), 8), sizes)
            assert result.verdict.ok == (remainder == RIGHT)
            assert result.verdict.ok or result.failed_m % 7 == remainder


def test_plan_is_made_by_a_worker_process() -> None:
    backends.register("planted", planted_kernels.ENTRY_POINT)
    store, problem = MemoryStore(), linear_problem(4, 64, 96, "float32")
    gemmtune.tune(problem, m=range(1, 9), budget=0.5, store=store, backends=["planted"])
    plan = store.get_plan(current_target(), problem.plan_key)
    if plan is not None:  # on a loaded machine, all decisions may be inconclusive
        assert (plan.first, plan.last) == (1, 8)
        assert_right_where_they_serve(plan)
