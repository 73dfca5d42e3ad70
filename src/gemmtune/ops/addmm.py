"""``gemmtune.addmm``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import fuse
from ..core import checks
from ..core.call import Call
from ..core.epilogue import Step
from ..core.problem import Problem
from ..core.weights import PackedWeight
from ..dispatch.specialize import FunctionalFn, TorchFunction
from . import autograd
from .dynamo import graph_break
from .mm import describe as describe_mm
from .mm import mm
from .operands import Weight, dtype_name, is_constant, is_torchs_alone
from .spec import OpSpec


def describe(
    input: Tensor, mat1: Tensor, mat2: Weight, beta: float = 1, alpha: float = 1, *, constant: bool = False
) -> Call:
    """Return the Call of ``beta * input + alpha * (mat1 @ mat2)``; input broadcasts to [M, N], and is left out when
    beta is 0.

    constant: whether mat2 is a weight. Raises as ``mm.describe``.
    """
    if input.dtype != mat1.dtype:
        raise checks.DtypeError(
            f"self and mat2 must have the same dtype, but got {dtype_name(input.dtype)} and {dtype_name(mat1.dtype)}"
        )
    arguments = {} if alpha == 1 else {"alpha": fuse.scale(float(alpha))}
    if beta != 0:
        n = mat2.shape[-1]
        per_column = tuple(input.shape) in ((n,), (1, n)) and n > 1
        step = fuse.bias(input.reshape(-1)) if per_column else fuse.add(input)
        if beta != 1 or not per_column:
            step = _weighted(input, float(beta), per_column)
        arguments["input"] = step
    return describe_mm(mat1, mat2, op="addmm", arguments=arguments, constant=constant)


def _weighted(input: Tensor, beta: float, per_column: bool) -> fuse.BoundStep:
    bound = fuse.add(input, beta)
    if not per_column:
        return bound
    return fuse.BoundStep(Step("bias", "col", bound.step.dtype, beta), input.reshape(-1), "col")


def _torch_function(input: Any, mat1: Any, mat2: Any, beta: Any, alpha: Any) -> TorchFunction:
    """Return torch.addmm for operands in the order of launches: mat1, mat2, input."""
    checks.require_tensor("addmm", "input", 1, input)
    checks.require_tensor("addmm", "mat1", 2, mat1)
    checks.require_tensor("addmm", "mat2", 3, mat2, packed=True)
    for name, value in (("beta", beta), ("alpha", alpha)):
        if not isinstance(value, int | float):
            raise TypeError(f"addmm(): {name} must be a number, not {type(value).__name__}")

    def functional(mat1: Tensor, mat2: Tensor, input: Tensor) -> Tensor:
        return torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha)

    def out_variant(out: Tensor, mat1: Tensor, mat2: Tensor, input: Tensor) -> Tensor:
        return torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha, out=out)

    def with_backward(compute: FunctionalFn, mat1: Tensor, mat2: Tensor, input: Tensor) -> Tensor:
        return autograd.addmm(mm, compute, input, mat1, mat2, beta, alpha)

    required = isinstance(mat2, Tensor) and is_torchs_alone(mat1, mat2, input)
    return TorchFunction(functional, out_variant, with_backward, required)


def _trace(input: Tensor, mat1: Tensor, mat2: Any, beta: float, alpha: float, out: Tensor | None) -> Tensor:
    if isinstance(mat2, PackedWeight) or out is not None:
        return graph_break(addmm, input, mat1, mat2, beta=beta, alpha=alpha, out=out)
    return torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha)


def _recorded(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, **_: Any) -> Problem:
    return describe(input, mat1, mat2, beta, alpha, constant=is_constant(mat2)).problem


SPEC = OpSpec(
    name="addmm",
    operands=("mat1", "mat2", "input"),
    describe=describe,
    trace=_trace,
    torch_function=_torch_function,
    raw="raw_t",
    records={torch.addmm: _recorded, Tensor.addmm: _recorded},
    settings=("beta", "alpha"),
    sizes=("input",),
)


@SPEC.public
def addmm(  # type: ignore[empty-body]
    input: Tensor,
    mat1: Tensor,
    mat2: Weight,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """``torch.addmm``: ``beta * input + alpha * (mat1 @ mat2)``; input broadcasts to [M, N], and is ignored (NaN
    and all) when beta is 0. Raises as ``mm``."""
