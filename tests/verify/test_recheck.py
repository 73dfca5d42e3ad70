"""The second verification after timing: the number of its calls on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gemmtune.backends.aten.cuda_narrow import UpcastRounded
from gemmtune.backends.base import Rounding
from gemmtune.core.candidate import Candidate
from gemmtune.core.workloads import linear_problem, weight_only_problem
from gemmtune.testing.lapsing import LapsingKernel
from gemmtune.verify.inputs import make_inputs
from gemmtune.verify.recheck import CALLS, RacedKernel, recheck
from gemmtune.verify.verify import allowed_rounding

PROBLEM = linear_problem(4, 40, 32, "float32")


def raced_kernel(set_count: int, wrong_call: int) -> RacedKernel:
    """Return a kernel with operand sets of its race. One element is wrong in call number ``wrong_call`` and later."""
    kernel, calls = LapsingKernel(PROBLEM), 0
    operands = [make_inputs(PROBLEM, seed) for seed in range(set_count)]
    sets: list[tuple[object, object, Tensor]] = [(inputs, inputs.b, torch.empty(4, 40)) for inputs in operands]

    def call(index: int) -> Sequence[int]:
        nonlocal calls
        calls += 1
        out = sets[index][2]
        kernel.run(operands[index].a, operands[index].b, (), out)
        if calls >= wrong_call:
            out[0, 0] += 1.0
        return [index]

    return RacedKernel(kernel, call, sets)  # type: ignore[arg-type]


@pytest.mark.parametrize("set_count", [1, 3])
def test_fault_in_the_last_of_thirty_calls_is_found(set_count: int) -> None:
    late = raced_kernel(set_count, CALLS)
    faults = recheck(PROBLEM, [late], 1, time_limit_s=60.0)
    assert list(faults) == [late.kernel.candidate.id]
    assert f"(call {CALLS} after it)" in faults[late.kernel.candidate.id].detail


@pytest.mark.parametrize("set_count", [1, 3])
def test_correct_kernel_has_no_fault(set_count: int) -> None:
    assert recheck(PROBLEM, [raced_kernel(set_count, CALLS + 1)], 1, time_limit_s=60.0) == {}


@pytest.mark.parametrize("declares", [True, False])
def test_rounding_of_the_product_is_allowed_where_the_kernel_declares_it(declares: bool) -> None:
    """What plain PyTorch runs for int8 weights differs from the oracle by the rounding of the product."""
    problem = weight_only_problem(64, 64, 512)
    kernel = UpcastRounded(problem, Candidate.make("aten", "upcast_rounded"))
    kernel.rounding = kernel.rounding if declares else None
    operands = [make_inputs(problem, seed) for seed in range(3)]
    sets = [(inputs, inputs.b, torch.empty(64, 64, dtype=torch.bfloat16)) for inputs in operands]

    def call(index: int) -> Sequence[int]:
        inputs, weight, out = sets[index]
        kernel.run(inputs.a, weight, (), out)
        return [index]

    assert bool(recheck(problem, [RacedKernel(kernel, call, sets)], 1, time_limit_s=60.0)) is not declares


def test_only_atens_kernels_may_round_the_product() -> None:
    kernel = UpcastRounded(weight_only_problem(64, 64, 512), Candidate.make("aten", "upcast_rounded"))
    assert allowed_rounding(kernel) == Rounding(0, "bfloat16")
    kernel.candidate = Candidate.make("plugin", "upcast_rounded")
    assert allowed_rounding(kernel) is None
