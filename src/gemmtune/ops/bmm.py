"""``gemmtune.bmm``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core import checks
from ..core.call import Call
from ..core.problem import Operand, Problem
from ..dispatch.specialize import TorchFunction
from . import autograd
from .dynamo import graph_break
from .mm import describe as describe_mm
from .operands import accumulator_of, dtype_name, is_constant, is_torchs_alone, layout_of
from .spec import OpSpec


def describe(input: Tensor, mat2: Tensor) -> Call:
    """Return the Call of ``torch.bmm``: input [batch, M, K], mat2 [batch, K, N]. Raises as ``mm.describe``."""
    for name, value in (("batch1", input), ("batch2", mat2)):
        if value.dim() != 3:
            raise checks.ShapeError(f"{name} must be a 3D tensor")
    batch, m, k = input.shape
    if (mat2.shape[0], mat2.shape[1]) != (batch, k):
        raise checks.ShapeError(
            f"Expected size for first two dimensions of batch2 tensor to be: [{batch}, {k}] but got: "
            f"[{mat2.shape[0]}, {mat2.shape[1]}]."
        )
    checks.require_same_dtype(input.dtype, mat2.dtype)
    checks.require_dtype("bmm", "the operands' dtype", input.dtype, checks.FLOATS)
    checks.require_same_device("bmm", ("input", input), ("mat2", mat2))
    dtype = dtype_name(input.dtype)
    operands = (Operand(dtype, layout_of(input)), Operand(dtype, layout_of(mat2)))
    problem = Problem("bmm", m, mat2.shape[2], k, *operands, dtype, batch=batch, acc=accumulator_of(dtype))
    return Call(problem, input, mat2, (), (batch, m, mat2.shape[2]))


def _bmm_out(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b, out=out)


_TORCH = TorchFunction(torch.bmm, _bmm_out, autograd.bmm)


def _torch_function(input: Any, mat2: Any) -> TorchFunction:
    checks.require_tensor("bmm", "input", 1, input)
    checks.require_tensor("bmm", "mat2", 2, mat2)
    return _TORCH._replace(required=is_torchs_alone(input, mat2))


def _trace(input: Tensor, mat2: Tensor, out: Tensor | None) -> Tensor:
    return torch.bmm(input, mat2) if out is None else graph_break(bmm, input, mat2, out=out)


def _recorded(input: Tensor, mat2: Tensor, **_: Any) -> Problem:
    return describe(input, mat2).problem


def _recorded_matmul(input: Tensor, other: Tensor, **_: Any) -> Problem | None:
    """Return the Problem of matmul as PyTorch computes it: a matrix B takes all leading sizes of A as rows, equal
    batches make a bmm. None for vectors."""
    a, b = input, other
    if a.dim() < 2 or b.dim() < 2:
        return None
    if b.dim() == 2:
        return describe_mm(a.reshape(-1, a.shape[-1]), b, constant=is_constant(b)).problem
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    left, right = (t.expand(*batch, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (a, b))
    return describe(left, right).problem


def _recorded_rmatmul(other: Tensor, input: Tensor, **_: Any) -> Problem | None:
    return _recorded_matmul(input, other)


SPEC = OpSpec(
    name="bmm",
    operands=("input", "mat2"),
    describe=describe,
    trace=_trace,
    torch_function=_torch_function,
    records={
        torch.bmm: _recorded, Tensor.bmm: _recorded, torch.matmul: _recorded_matmul, Tensor.matmul: _recorded_matmul,
        Tensor.__matmul__: _recorded_matmul, Tensor.__rmatmul__: _recorded_rmatmul,
    },
    packable=False,
)  # fmt: skip


@SPEC.public
def bmm(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:  # type: ignore[empty-body]
    """``torch.bmm``: [batch, M, K] @ [batch, K, N], one floating dtype. Raises as ``mm``."""
