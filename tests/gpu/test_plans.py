"""Tests that plans made on a GPU serve no kernel at an M where it is wrong or slow."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import gemmtune
from gemmtune import backends
from gemmtune.core.workloads import bmm_problem, linear_problem
from gemmtune.dispatch import current_target
from gemmtune.store import MemoryStore
from helpers import planted_kernels
from helpers.planted_kernels import (
    WRONG_BATCHES,
    WRONG_ROWS,
    assert_no_fault_is_served,
    faulty_batches,
    faulty_rows,
)

pytestmark = pytest.mark.gpu


def test_kernels_with_faults_at_some_m_do_not_serve_there() -> None:
    """Wrong from M = 129 on, wrong at every seventh M, and as slow as three products at odd M."""
    backends.register("faulty_rows", planted_kernels.ROWS_ENTRY_POINT)
    store, problem = MemoryStore(), linear_problem(256, 2048, 1024, "bfloat16")
    gemmtune.tune([problem], m=range(1, 257), budget=1.0, store=store, backends=["faulty_rows"], device="cuda")
    plan = store.get_plan(current_target("cuda"), problem.plan_key)
    assert plan is not None
    assert (plan.first, plan.last) == (1, 256)
    failures = store.failures(current_target("cuda"), problem.plan_key)
    assert failures.keys() >= {faulty_rows(fault).id for fault in WRONG_ROWS}, failures
    assert_no_fault_is_served(plan)
    weight = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16)
    for m in range(1, 257):
        x = torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(gemmtune.linear(x, weight), F.linear(x, weight), rtol=2e-2, atol=2e-1)


def test_plan_over_the_batch_serves_right_kernels() -> None:
    """As tuned by default, and beside kernels that are wrong at some batches."""
    backends.register("faulty_batches", planted_kernels.BATCHES_ENTRY_POINT)
    target, problem = current_target("cuda"), bmm_problem(8, 16, 256, 512, "bfloat16")
    for names in (["faulty_batches"], None):
        store = MemoryStore()
        gemmtune.tune([problem], batch=range(1, 65), budget=1.0, store=store, backends=names, device="cuda")
        plan = store.get_plan(target, problem.plan_key_over("batch"))
        assert plan is not None
        assert (plan.dim, plan.first, plan.last) == ("batch", 1, 64)
        for interval in plan.intervals.get("", ()):
            for fault, is_wrong in WRONG_BATCHES.items():
                wrong = [batch for batch in range(interval.first, interval.last + 1) if is_wrong(batch)]
                assert interval.kernel != faulty_batches(fault).id or not wrong, interval
        for batch in (*range(1, 66), 200):
            a = torch.randn(batch, 16, 512, device="cuda", dtype=torch.bfloat16)
            b = torch.randn(batch, 512, 256, device="cuda", dtype=torch.bfloat16)
            torch.testing.assert_close(gemmtune.bmm(a, b), torch.bmm(a, b), rtol=2e-2, atol=2e-1)
