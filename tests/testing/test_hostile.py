"""Planted kernels: the correct one is correct, and each wrong one is wrong in its own way only."""

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


def answer(fault: str | None) -> torch.Tensor:
    inputs = make_inputs(PROBLEM, 1)
    memory = torch.full((17 * 24,), -7.0)
    out = memory[: 16 * 24].view(16, 24)
    (hostile.FAULTY_KERNELS[fault] if fault else hostile.correct)(PROBLEM)(inputs, out)
    return memory


def test_correct_is_correct() -> None:
    found = answer(None)
    torch.testing.assert_close(found[: 16 * 24].view(16, 24), expected())
    assert bool((found[16 * 24 :] == -7.0).all())


@pytest.mark.parametrize("fault", ["dropped K tail", "x1.002", "swapped stride", "reversed epilogue"])
def test_faults_that_spread(fault: str) -> None:
    wrong = (answer(fault)[: 16 * 24].view(16, 24) - expected()).abs() > 1e-4
    assert float(wrong.float().mean()) > 0.2


@pytest.mark.parametrize(("fault", "most"), [("one element", 1), ("8x8 block 10% off", 64), ("partial write", 16)])
def test_faults_that_do_not(fault: str, most: int) -> None:
    wrong = (answer(fault)[: 16 * 24].view(16, 24) - expected()).abs() > 1e-4
    assert int(wrong.sum()) <= most


def test_writing_nothing_and_too_much() -> None:
    assert bool((answer("no write") == -7.0).all())
    beyond = answer("write past the end")[16 * 24 :]
    assert beyond.tolist() == [0.0] + [-7.0] * 23


def test_stale_and_racy_kernels_start_out_right() -> None:
    for fault in ("stale buffer", "race"):
        run = hostile.FAULTY_KERNELS[fault](PROBLEM)
        out, inputs = torch.empty(16, 24), make_inputs(PROBLEM, 1)
        run(inputs, out)
        torch.testing.assert_close(out, expected())
        first = out.clone()
        run(make_inputs(PROBLEM, 2) if fault == "stale buffer" else inputs, out)
        changed = not torch.equal(out, first)
        assert changed == (fault == "race")


def test_nan_is_swallowed() -> None:
    inputs = make_inputs(PROBLEM, 1)
    inputs.a[3, 4] = torch.nan
    out = torch.empty(16, 24)
    hostile.nan_swallowed(PROBLEM)(inputs, out)
    assert bool(out.isfinite().all())
