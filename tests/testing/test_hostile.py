"""Faulty kernels: the correct kernel is correct, and each faulty one has its own fault only."""

from __future__ import annotations

import pytest
import torch

from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.testing import hostile
from gemmtune.verify.inputs import make_inputs

STEPS = (Step("bias", "col", "float32"), Step("relu"))
PROBLEM = Problem("mm", 16, 24, 40, Operand("float32"), Operand("float32", Layout("col")), "float32", STEPS)


def expected() -> torch.Tensor:
    inputs = make_inputs(PROBLEM, 1)
    assert isinstance(inputs.b, torch.Tensor)
    return torch.relu(inputs.a @ inputs.b + inputs.aux[0])


def run_kernel(fault: str | None) -> torch.Tensor:
    inputs = make_inputs(PROBLEM, 1)
    storage = torch.full((17 * 24,), -7.0)
    out = storage[: 16 * 24].view(16, 24)
    (hostile.FAULTY_KERNELS[fault] if fault else hostile.correct)(PROBLEM)(inputs, out)
    return storage


def test_correct_kernel_matches_torch() -> None:
    storage = run_kernel(None)
    torch.testing.assert_close(storage[: 16 * 24].view(16, 24), expected())
    assert bool((storage[16 * 24 :] == -7.0).all())


@pytest.mark.parametrize("fault", ["dropped K tail", "x1.002", "swapped stride", "reversed epilogue"])
def test_systematic_faults_affect_many_elements(fault: str) -> None:
    is_wrong = (run_kernel(fault)[: 16 * 24].view(16, 24) - expected()).abs() > 1e-4
    assert float(is_wrong.float().mean()) > 0.2


@pytest.mark.parametrize(("fault", "most"), [("one element", 1), ("8x8 block 10% off", 64), ("partial write", 16)])
def test_local_faults_affect_few_elements(fault: str, most: int) -> None:
    is_wrong = (run_kernel(fault)[: 16 * 24].view(16, 24) - expected()).abs() > 1e-4
    assert int(is_wrong.sum()) <= most


def test_no_write_and_write_past_the_end() -> None:
    assert bool((run_kernel("no write") == -7.0).all())
    after_output = run_kernel("write past the end")[16 * 24 :]
    assert after_output.tolist() == [0.0] + [-7.0] * 23


def test_stale_and_racy_kernels_are_correct_at_first() -> None:
    for fault in ("stale buffer", "race"):
        run = hostile.FAULTY_KERNELS[fault](PROBLEM)
        out, inputs = torch.empty(16, 24), make_inputs(PROBLEM, 1)
        run(inputs, out)
        torch.testing.assert_close(out, expected())
        first = out.clone()
        run(make_inputs(PROBLEM, 2) if fault == "stale buffer" else inputs, out)
        changed = not torch.equal(out, first)
        assert changed == (fault == "race")


def test_nan_swallowed_returns_finite_values() -> None:
    inputs = make_inputs(PROBLEM, 1)
    inputs.a[3, 4] = torch.nan
    out = torch.empty(16, 24)
    hostile.nan_swallowed(PROBLEM)(inputs, out)
    assert bool(out.isfinite().all())
