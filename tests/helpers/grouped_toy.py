"""Op family of a plug-in: rows of activations in two groups, each multiplied by its own weight.

The plug-in uses public functions only. One module, which worker processes import, has the family, its oracle, ATen's
only candidate for it, and the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gemmtune.backends import aten
from gemmtune.backends.aten.kernel import AtenKernel
from gemmtune.core import checks
from gemmtune.core.call import Call
from gemmtune.core.problem import Family, Operand, Problem, register_family
from gemmtune.dispatch.specialize import TorchFunction
from gemmtune.ops import table
from gemmtune.ops.operands import accumulator_of, dtype_name, is_torchs_alone, layout_of
from gemmtune.ops.spec import OpSpec
from gemmtune.verify import oracle

FAMILY = Family("grouped_toy", batched=True)
ORACLE_CALLS: list[str] = []


def oracle_products(problem: Problem, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return each group's product in float64, and the product of the absolute values."""
    ORACLE_CALLS.append(problem.key)
    return a.double() @ b.double(), (a.double().abs() @ b.double().abs()).float()


class GroupedBmm(AtenKernel):
    """Kernel that calls ``torch.bmm`` on the groups."""

    template = "grouped_bmm"
    family = (FAMILY.name,)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        return torch.bmm(a, b)


def describe(input: Tensor, weight1: Tensor, weight2: Tensor) -> Call:
    """Return the Call of input [2 M, K] and two weights [N, K]. Raise ShapeError for other shapes."""
    checks.require_matrix("grouped_toy", "input", input)
    rows, k = input.shape
    if rows % 2 or weight1.shape != weight2.shape or weight1.shape[-1] != k:
        raise checks.ShapeError("grouped_toy(): expected input [2 M, K] and two weights [N, K]")
    m, n = rows // 2, weight1.shape[0]
    a, b = _halves(input), _stack(weight1, weight2)
    dtype = dtype_name(input.dtype)
    operands = Operand(dtype, layout_of(a)), Operand(dtype, layout_of(b))
    problem = Problem(FAMILY.name, m, n, k, *operands, dtype, batch=2, acc=accumulator_of(dtype))
    return Call(problem, a, b, (), (rows, n), adapt_a=_halves, adapt_b=_stack)


def _halves(input: Tensor) -> Tensor:
    return input.reshape(2, -1, input.shape[1])


def _stack(weight1: Tensor, weight2: Tensor) -> Tensor:
    return torch.stack((weight1.t(), weight2.t()))


def fallback(input: Tensor, weight1: Tensor, weight2: Tensor) -> Tensor:
    """Compute the op with PyTorch's functions."""
    first, second = input.chunk(2)
    return torch.cat((first @ weight1.t(), second @ weight2.t()))


def _torch_function(input: Any, weight1: Any, weight2: Any) -> TorchFunction:
    for position, (name, value) in enumerate((("input", input), ("weight1", weight1), ("weight2", weight2)), 1):
        checks.require_tensor("grouped_toy", name, position, value)
    return TorchFunction(fallback, required=is_torchs_alone(input, weight1, weight2))


SPEC = OpSpec(
    name="grouped_toy",
    operands=("input", "weight1", "weight2"),
    describe=describe,
    trace=fallback,
    torch_function=_torch_function,
    packable=False,
)


@SPEC.public
def grouped_toy(input: Tensor, weight1: Tensor, weight2: Tensor) -> Tensor:  # type: ignore[empty-body]
    """Multiply each half of the rows [2 M, K] by its own weight [N, K]; return [2 M, N]."""


register_family(FAMILY, __name__)
oracle.register(FAMILY.name, oracle_products)
aten.register(GroupedBmm)
table.register(SPEC)
