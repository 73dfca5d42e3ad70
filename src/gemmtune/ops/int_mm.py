"""``gemmtune.int_mm``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.aten.padding import canonical_strides
from ..core import checks
from ..core.call import Call
from ..core.problem import Problem
from ..core.torch_compat import int_mm as torch_int_mm
from ..core.weights import PackedWeight
from ..dispatch import fallback
from ..dispatch.specialize import TorchFunction
from ..fuse import BoundStep
from .dynamo import graph_break
from .operands import Weight, is_constant, matrix_call
from .spec import OpSpec

_OUTPUTS = (torch.int32, torch.int8, torch.uint8, torch.float32, torch.bfloat16, torch.float16)


def describe(
    self: Tensor,
    mat2: Weight,
    out_dtype: torch.dtype | None = None,
    epilogue: Sequence[BoundStep] = (),
    *,
    constant: bool = False,
) -> Call:
    """Return the Call of int8 or uint8 [M, K] @ int8 [K, N] -> int32, or what the epilogue and out_dtype make of it.

    constant: whether mat2 is a weight. Raises TypeError, ShapeError, DtypeError or PackedWeightError.
    """
    a, b = self, mat2
    checks.require_matrix("int_mm", "self", a)
    checks.require_dtype("int_mm", "self's dtype", a.dtype, (torch.int8, torch.uint8))
    if isinstance(b, PackedWeight):
        checks.require_matching_packed_weight("int_mm", b, a.shape[1], ("int8",), quantized=False)
    else:
        checks.require_matrix("int_mm", "mat2", b)
        checks.require_dtype("int_mm", "mat2's dtype", b.dtype, (torch.int8,))
        checks.require_equal_inner_size(tuple(a.shape), tuple(b.shape))
    out = checks.require_out_dtype("int_mm", torch.int32 if out_dtype is None else out_dtype, _OUTPUTS)
    a, b = canonical_strides(a), b if isinstance(b, PackedWeight) else canonical_strides(b)
    call = matrix_call("int_mm", a, b, out, epilogue, prefer="col", constant=constant)
    return call._replace(
        adapt_a=None if a is self else canonical_strides, adapt_b=None if b is mat2 else canonical_strides
    )


def _torch_function(self: Any, mat2: Any, **_: object) -> TorchFunction | None:
    checks.require_tensor("int_mm", "self", 1, self)
    checks.require_tensor("int_mm", "mat2", 2, mat2, packed=True)
    if isinstance(mat2, PackedWeight) or not self.dim() == mat2.dim() == 2 or 0 in (*self.shape, *mat2.shape):
        return None
    if canonical_strides(self) is not self or canonical_strides(mat2) is not mat2:
        return None
    return TorchFunction(fallback.int_product(self))


def _trace(self: Tensor, mat2: Any, out_dtype: Any, epilogue: Sequence[BoundStep], out: Tensor | None) -> Tensor:
    return graph_break(int_mm, self, mat2, out_dtype=out_dtype, epilogue=epilogue, out=out)


def _recorded(self: Tensor, mat2: Tensor, **_: Any) -> Problem:
    return describe(self, mat2, constant=is_constant(mat2)).problem


SPEC = OpSpec(
    name="int_mm",
    operands=("self", "mat2"),
    describe=describe,
    trace=_trace,
    torch_function=_torch_function,
    raw="raw_t",
    records={torch_int_mm: _recorded},
    differentiable=False,
    torch_in_special_states=False,
)


@SPEC.public
def int_mm(  # type: ignore[empty-body]
    self: Tensor,
    mat2: Tensor | PackedWeight,
    *,
    out_dtype: torch.dtype | None = None,
    epilogue: Sequence[BoundStep] = (),
    out: Tensor | None = None,
) -> Tensor:
    """``torch._int_mm``: int8 (or uint8) [M, K] @ int8 [K, N] (or packed) -> int32, exact.

    The epilogue requantises: scales, bias and activations in float32, then one rounding (to nearest even, saturating)
    to ``out_dtype`` (int32, int8, uint8, float32, bfloat16, float16). On GPUs too any M, K and N will do. It has no
    gradient. Raises TypeError, ShapeError, DtypeError, GradError or PackedWeightError before anything runs.
    """
