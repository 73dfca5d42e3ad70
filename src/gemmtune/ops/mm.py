"""``gemmtune.mm``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..core import checks
from ..core.call import Call
from ..core.problem import Order, Problem
from ..core.weights import PackedWeight
from ..dispatch.specialize import FunctionalFn, TorchFunction
from ..fuse import BoundStep
from . import autograd
from .dynamo import apply_epilogue, graph_break
from .operands import Weight, dtype_name, is_constant, is_torchs_alone, matrix_call
from .spec import OpSpec


def describe(
    input: Tensor,
    mat2: Weight,
    out_dtype: torch.dtype | None = None,
    epilogue: Sequence[BoundStep] = (),
    *,
    op: str = "mm",
    arguments: Mapping[str, BoundStep] = MappingProxyType({}),
    prefer: Order = "row",
    constant: bool = False,
) -> Call:
    """Return the Call of ``epilogue(input[M, K] @ mat2[K, N])`` for floating matrices of one dtype.

    op, arguments, prefer, constant: as for ``matrix_call``. Raises TypeError, ShapeError, DtypeError or
    PackedWeightError.
    """
    checks.require_matrix(op, "input" if op == "mm" else "mat1", input)
    if not isinstance(mat2, PackedWeight):
        checks.require_matrix(op, "mat2", mat2)
        checks.require_equal_inner_size(tuple(input.shape), tuple(mat2.shape))
        checks.require_same_dtype(input.dtype, mat2.dtype)
    else:
        checks.require_matching_packed_weight(op, mat2, input.shape[1], (dtype_name(input.dtype),), quantized=False)
    checks.require_dtype(op, "the operands' dtype", input.dtype, checks.FLOATS)
    out = checks.require_out_dtype(op, input.dtype if out_dtype is None else out_dtype, checks.FLOATS)
    return matrix_call(
        op, input, mat2, out, epilogue, arguments=arguments, family="mm", prefer=prefer, constant=constant
    )


def _mm_out(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out=out)


def _with_backward(compute: FunctionalFn, a: Tensor, b: Tensor) -> Tensor:
    return autograd.addmm(mm, compute, None, a, b, 1, 1)


_TORCH = TorchFunction(torch.mm, _mm_out, _with_backward)


def _torch_function(input: Any, mat2: Any, **_: object) -> TorchFunction:
    checks.require_tensor("mm", "input", 1, input)
    checks.require_tensor("mm", "mat2", 2, mat2, packed=True)
    return _TORCH._replace(required=isinstance(mat2, Tensor) and is_torchs_alone(input, mat2))


def _trace(input: Tensor, mat2: Any, out_dtype: Any, epilogue: Sequence[BoundStep], out: Tensor | None) -> Tensor:
    if isinstance(mat2, PackedWeight) or out is not None:
        return graph_break(mm, input, mat2, out_dtype=out_dtype, epilogue=epilogue, out=out)
    return apply_epilogue(torch.mm(input, mat2), epilogue, out_dtype)


def _recorded(input: Tensor, mat2: Tensor, **_: Any) -> Problem:
    return describe(input, mat2, constant=is_constant(mat2)).problem


SPEC = OpSpec(
    name="mm",
    operands=("input", "mat2"),
    describe=describe,
    trace=_trace,
    torch_function=_torch_function,
    raw="raw_t",
    records={torch.mm: _recorded, Tensor.mm: _recorded},
    autocasts=True,
)


@SPEC.public
def mm(  # type: ignore[empty-body]
    input: Tensor,
    mat2: Weight,
    *,
    out_dtype: torch.dtype | None = None,
    epilogue: Sequence[BoundStep] = (),
    out: Tensor | None = None,
) -> Tensor:
    """``torch.mm``: input [M, K] @ mat2 [K, N] (or packed), then the epilogue, then one rounding to ``out_dtype``.

    dtypes: one floating dtype for both (integers go to ``torch.mm`` as they are). out_dtype: a floating dtype, by
    default the input's. Raises TypeError, ShapeError, DtypeError, GradError or PackedWeightError before anything runs.
    """
