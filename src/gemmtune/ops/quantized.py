"""The ops on integers, weight-only operands and fp8: int_mm, mixed_mm, scaled_mm. None of them has a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.aten.padding import canonical_strides
from ..core import checks
from ..core.torch_compat import scaled_mm as torch_scaled_mm
from ..core.weights import PackedWeight, QuantWeight
from ..dispatch import fallback, serve
from ..dispatch.serve import Sight
from ..fuse import Bound
from ..fuse import bias as bias_step
from . import describe
from .dynamo import is_compiling, outside

_threads = torch.get_num_threads
_grad = torch.is_grad_enabled  # as in ops: a check says only whether an operand requires a gradient
_serve = serve.serve


def int_mm(
    self: Tensor,
    mat2: Tensor | PackedWeight,
    *,
    out_dtype: torch.dtype | None = None,
    epilogue: Sequence[Bound] = (),
    out: Tensor | None = None,
) -> Tensor:
    """``torch._int_mm``: int8 (or uint8) [M, K] @ int8 [K, N] (or packed) -> int32, exact.

    The epilogue requantises: scales, bias and activations in float32, then one rounding (to nearest even, saturating)
    to ``out_dtype`` (int32, int8, uint8, float32, bfloat16, float16). On GPUs too any M, K and N will do. Raises
    TypeError, ShapeError, DtypeError, GradError or PackedWeightError before anything runs.
    """
    if is_compiling():
        return outside(_int_mm, self, mat2, out_dtype, epilogue, out)
    key: Any = None
    given: tuple[Any, ...] = (self, mat2)
    checked = given
    try:
        packed = isinstance(mat2, PackedWeight)
        key = ("int_mm", self.shape, mat2._key if packed else mat2.numel(), _threads(), _grad())  # type: ignore[union-attr]
        if epilogue or out is not None or out_dtype is not None:
            key, given, checked = serve.with_more(key, given, packed, epilogue, out, out_dtype)
        elif packed:
            checked = (self,)
    except (AttributeError, RuntimeError, TypeError):
        key = None  # they are no operands at all, or odd ones
    result = _serve(key, given, checked)
    return _first_int_mm(Sight(key, given, checked), self, mat2, out_dtype, epilogue, out) if result is None else result


def _described_int_mm(a: Tensor, b: Any, epilogue: Sequence[Bound], out_dtype: torch.dtype | None) -> describe.Call:
    checks.tensor("int_mm", "self", 1, a)
    checks.tensor("int_mm", "mat2", 2, b, packed=True)
    return describe.int_mm(a, b, epilogue, out_dtype)


def _int_mm(a: Tensor, b: Any, out_dtype: torch.dtype | None, epilogue: Sequence[Bound], out: Tensor | None) -> Tensor:
    return serve.execute("int_mm", _described_int_mm(a, b, epilogue, out_dtype), out, differentiable=False)


def _first_int_mm(
    sight: Sight, a: Tensor, b: Any, out_dtype: torch.dtype | None, epilogue: Sequence[Bound], out: Tensor | None
) -> Tensor:
    if not sight.ordinary:
        return _int_mm(a, b, out_dtype, epilogue, out)
    call = _described_int_mm(a, b, epilogue, out_dtype)
    turned = (call.a is not a, call.b is not b)
    copies = call.problem.b.constant and not call.a.is_contiguous()

    def pair(a: Tensor, b: Any) -> tuple[Tensor, Any]:
        if any(turned):
            a, b = canonical_strides(a) if turned[0] else a, canonical_strides(b) if turned[1] else b
        return a.contiguous() if copies else a, b

    function = None
    if not (any(turned) or epilogue or out_dtype is not None or 0 in (*a.shape, *b.shape)):
        function = fallback.int_product(a)
    return serve.meet(sight, "int_mm", call, pair, function=function, differentiable=False, out=out)


def mixed_mm(
    mat1: Tensor,
    mat2: Tensor | PackedWeight,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    *,
    bits: int = 8,
    group_size: int | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    epilogue: Sequence[Bound] = (),
    out: Tensor | None = None,
) -> Tensor:
    """Floating activations [M, K] by a quantised weight: ``mat1 @ ((mat2 - zero_point) * scale) + bias``.

    mat2: int8 or float8_e4m3fn [K, N] (pass ``weight.t()``); with ``bits=4`` uint8 [ceil(K / 2), N], two values 0..15
    to a byte along K, the low nibble first; or packed (scale and zero point then live in it). scale: [N], or
    [groups, N] with ``group_size`` elements of K to a group. zero_point: as scale, of its dtype or integers; without
    one it is 0 for 8 bits and 8 for 4; float8 has none. bias: [N]. Raises TypeError, ValueError, ShapeError,
    DtypeError, GradError or PackedWeightError.
    """
    if is_compiling():
        return outside(_mixed_mm, mat1, mat2, scale, zero_point, bits, group_size, bias, out_dtype, epilogue, out)
    key: Any = None
    given: tuple[Any, ...] = (mat1, mat2)
    checked = given
    try:
        packed = isinstance(mat2, PackedWeight)
        shown: Any = mat2._key if packed else mat2.numel()  # type: ignore[union-attr]
        if scale is not None:
            given = (*given, scale)
        if zero_point is not None:
            given = (*given, zero_point)
        if bias is not None:
            given = (*given, bias)
        key = (
            "mixed_mm", mat1.shape, shown, scale is None, zero_point is None, bias is None, bits, group_size,
            _threads(), _grad(),
        )  # fmt: skip
        checked = given
        if epilogue or out is not None or out_dtype is not None:
            key, given, checked = serve.with_more(key, given, packed, epilogue, out, out_dtype)
        elif packed:
            checked = (mat1, *given[2:])
    except (AttributeError, RuntimeError, TypeError):
        key = None
    result = _serve(key, given, checked)
    if result is not None:
        return result
    sight = Sight(key, given, checked)
    return _first_mixed_mm(
        sight, mat1, mat2, scale, zero_point, bits, group_size, bias, out_dtype, epilogue, out
    )  # fmt: skip


def _mixed_mm(
    a: Tensor, b: Any, scale: Any, zero_point: Any, bits: int, group_size: int | None, bias: Any,
    out_dtype: torch.dtype | None, epilogue: Sequence[Bound], out: Tensor | None,
) -> Tensor:  # fmt: skip
    call = _described_mixed_mm(a, b, scale, zero_point, bits, group_size, bias, out_dtype, epilogue)
    return serve.execute("mixed_mm", call, out, differentiable=False)


def _described_mixed_mm(
    a: Tensor, b: Any, scale: Any, zero_point: Any, bits: int, group_size: int | None, bias: Any,
    out_dtype: torch.dtype | None, epilogue: Sequence[Bound],
) -> describe.Call:  # fmt: skip
    checks.tensor("mixed_mm", "mat1", 1, a)
    checks.tensor("mixed_mm", "mat2", 2, b, packed=True)
    weight = _weight(a, b, scale, zero_point, bits, group_size)
    if bias is not None:
        checks.tensor("mixed_mm", "bias", 7, bias)
    named = () if bias is None else (describe.argument("mixed_mm(): bias", bias_step(bias)),)
    steps = describe.steps_of("mixed_mm", epilogue, *named)
    return describe.mixed_mm(a, weight, steps, out_dtype)


def _first_mixed_mm(
    sight: Sight, a: Tensor, b: Any, scale: Any, zero_point: Any, bits: int, group_size: int | None, bias: Any,
    out_dtype: torch.dtype | None, epilogue: Sequence[Bound], out: Tensor | None,
) -> Tensor:  # fmt: skip
    call = _described_mixed_mm(a, b, scale, zero_point, bits, group_size, bias, out_dtype, epilogue)
    weight = call.b
    if not sight.ordinary or (isinstance(weight, QuantWeight) and not _as_given(weight, scale, zero_point)):
        return serve.execute("mixed_mm", call, out, differentiable=False)
    copies = call.problem.b.constant and not call.a.is_contiguous()

    def packed_pair(a: Tensor, b: Any) -> tuple[Tensor, Any]:
        return a.contiguous() if copies else a, b

    if not isinstance(weight, QuantWeight):
        return serve.meet(sight, "mixed_mm", call, packed_pair, differentiable=False, out=out)
    k, quant, dtype = weight.k, weight.quant, weight.dtype

    def pair(a: Tensor, b: Tensor, scale: Tensor, zero: Tensor | None = None) -> tuple[Tensor, QuantWeight]:
        return a.contiguous() if copies else a, QuantWeight(b, scale, zero, k, quant, dtype)

    return serve.meet(sight, "mixed_mm", call, pair, differentiable=False, out=out)


def _weight(
    a: Tensor, b: Any, scale: Any, zero_point: Any, bits: int, group_size: int | None
) -> QuantWeight | PackedWeight:
    if isinstance(b, PackedWeight):
        if scale is not None or zero_point is not None:
            raise ValueError("mixed_mm(): a packed weight holds its scale and zero point; do not pass them again")
        _agrees(b, bits, group_size)
        return b
    if scale is None:
        raise TypeError("mixed_mm(): missing argument 'scale' (position 3): it is needed unless mat2 is packed")
    checks.matrix("mixed_mm", "mat1", a)
    return describe.quantized(b, scale, zero_point, bits, group_size, a.shape[1])


def _agrees(packed: PackedWeight, bits: int, group_size: int | None) -> None:
    """bits and group_size need not be said again for a packed weight; what is said must be so. Raises ValueError."""
    if packed.quant is None:
        return
    if bits != 8 and f"int{bits}" != packed.dtype:
        raise ValueError(f"mixed_mm(): bits = {bits!r}, and the packed weight holds {packed.dtype}")
    group = packed.quant.group
    if group_size is not None and group_size != group and (group is not None or group_size < packed.k):
        held = "one scale per output channel" if group is None else f"groups of {group}"
        raise ValueError(f"mixed_mm(): group_size = {group_size!r}, and the packed weight has {held}")


def _as_given(weight: QuantWeight, scale: Tensor, zero_point: Tensor | None) -> bool:
    """Whether kernels take the scales and zero points just as the caller holds them."""
    same = weight.scale is scale or (weight.scale.shape == scale.shape and scale.is_contiguous())
    if zero_point is None or weight.zero_point is None:
        return same
    zero = weight.zero_point
    return same and zero.shape == zero_point.shape and zero.dtype == zero_point.dtype and zero_point.is_contiguous()


def scaled_mm(
    mat1: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """``torch._scaled_mm``: fp8 [M, K] @ fp8 [K, N], times scale_a and scale_b, plus bias [N].

    scales: float32, one element each, or [M, 1] and [1, N]. out_dtype: default mat1's. scale_result divides the output
    when an fp8 out_dtype is given (as ATen's CPU op does). On GPUs any K and N will do; what only GPUs know goes to
    ``torch._scaled_mm`` as it is: scale_result there, scales by blocks, and use_fast_accum=True, for whose accumulator
    no error bound is known, so that nothing else could be proven to be as good. Raises TypeError, ShapeError,
    DtypeError or GradError before anything runs.
    """
    if is_compiling():
        return torch_scaled_mm(mat1, mat2, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
    if use_fast_accum or scale_result is not None:
        return _scaled_mm(mat1, mat2, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
    key: Any = None
    given: tuple[Any, ...] = (
        (mat1, mat2, scale_a, scale_b) if bias is None else (mat1, mat2, scale_a, scale_b, bias)
    )  # fmt: skip
    try:
        key = ("scaled_mm", mat1.shape, mat2.numel(), out_dtype, bias is None, _threads(), _grad())
    except (AttributeError, RuntimeError, TypeError):
        key = None
    result = _serve(key, given, given)
    return (
        _first_scaled_mm(Sight(key, given, given), mat1, mat2, scale_a, scale_b, bias, out_dtype)
        if result is None
        else result
    )


def _is_atens(mat1: Any, mat2: Any, scale_a: Any, scale_b: Any, scale_result: Any, fast: bool) -> bool:
    """Whether a call is for ``torch._scaled_mm`` alone: other devices than CPUs and GPUs, and what only GPUs know."""
    if not isinstance(mat1, Tensor) or mat1.is_cpu or mat1.is_meta:
        return False
    if not mat1.is_cuda or fast or scale_result is not None:
        return True
    known = all(isinstance(t, Tensor) and t.dim() for t in (mat1, mat2)) and isinstance(scale_a, Tensor)
    if not known or not isinstance(scale_b, Tensor):
        return False  # the checks name what is wrong
    sizes = scale_a.numel() in (1, mat1.shape[0]) and scale_b.numel() in (1, mat2.shape[-1])
    return not (sizes and scale_a.dtype == scale_b.dtype == torch.float32)


def _described_scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, result: Any, out: Any) -> describe.Call:
    checks.tensor("scaled_mm", "mat1", 1, a)
    checks.tensor("scaled_mm", "mat2", 2, b)
    return describe.scaled_mm(a, b, scale_a, scale_b, bias, result, out)


def _scaled_mm(
    a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, result: Any, out: Any, fast: bool = False
) -> Tensor:
    if _is_atens(a, b, scale_a, scale_b, result, fast):
        return torch_scaled_mm(a, b, scale_a, scale_b, bias, result, out, fast)
    call = _described_scaled_mm(a, b, scale_a, scale_b, bias, result, out)
    return serve.execute("scaled_mm", call, differentiable=False)


def _first_scaled_mm(sight: Sight, a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, out: Any) -> Tensor:
    if not sight.ordinary or _is_atens(a, b, scale_a, scale_b, None, False):
        return _scaled_mm(a, b, scale_a, scale_b, bias, None, out)
    call = _described_scaled_mm(a, b, scale_a, scale_b, bias, None, out)
    return serve.meet(sight, "scaled_mm", call, lambda a, b: (a, b), differentiable=False)
