"""Tests that plans made on a GPU serve no kernel at an M where it is wrong or slow."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import gemmtune
from gemmtune import backends
from gemmtune.core.workloads import linear_problem
from gemmtune.dispatch import current_target
from gemmtune.store import MemoryStore
from helpers import planted_kernels
from helpers.planted_kernels import WRONG_ROWS, assert_no_fault_is_served, faulty_rows

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
