"""``gemmtune.mixed_mm``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .. import fuse
from ..core import checks
from ..core.call import Call
from ..core.problem import Problem, Quant
from ..core.torch_compat import weight_int8pack_mm
from ..core.weights import PackedWeight, QuantWeight
from ..fuse import BoundStep
from .dynamo import graph_break
from .operands import dtype_name, is_constant, matrix_call
from .spec import OpSpec


def describe_product(
    mat1: Tensor,
    weight: QuantWeight | PackedWeight,
    epilogue: Sequence[BoundStep] = (),
    out_dtype: torch.dtype | None = None,
    *,
    arguments: Mapping[str, BoundStep] = MappingProxyType({}),
    constant: bool = False,
) -> Call:
    """Return the Call of floating activations [M, K] by a weight-only operand.

    arguments, constant: as for ``matrix_call``. Raises TypeError, ShapeError, DtypeError or PackedWeightError.
    """
    checks.require_matrix("mixed_mm", "mat1", mat1)
    checks.require_dtype("mixed_mm", "mat1's dtype", mat1.dtype, checks.FLOATS)
    if isinstance(weight, PackedWeight):
        checks.require_matching_packed_weight(
            "mixed_mm", weight, mat1.shape[1], ("int8", "int4", "float8_e4m3fn"), quantized=True
        )
    else:
        checks.require_equal_inner_size(tuple(mat1.shape), weight.shape)
    out = checks.require_out_dtype("mixed_mm", mat1.dtype if out_dtype is None else out_dtype, checks.FLOATS)
    return matrix_call(
        "mixed_mm", mat1, weight, out, epilogue, arguments=arguments, names=("mat1", "mat2"), prefer="col",
        constant=constant,
    )  # fmt: skip


def quant_weight(
    data: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int, group_size: int | None, k: int
) -> QuantWeight:
    """Check and wrap a weight-only operand: int8 or float8_e4m3fn [K, N], or uint8 [ceil(K / 2), N] with bits=4; scale
    [N] or [groups, N]. float8 takes no zero point. Raises TypeError, DtypeError, ShapeError or ValueError."""
    if bits not in (4, 8):
        raise ValueError(f"mixed_mm(): bits must be 8 or 4; got {bits!r}")
    checks.require_matrix("mixed_mm", "mat2", data)
    allowed = (torch.int8, torch.float8_e4m3fn) if bits == 8 else (torch.uint8,)
    checks.require_dtype("mixed_mm", f"mat2's dtype (bits={bits})", data.dtype, allowed)
    rows = k if bits == 8 else -(-k // 2)
    if data.shape[0] != rows:
        stored_k = data.shape[0] if bits == 8 else 2 * data.shape[0]
        raise checks.ShapeError(f"mixed_mm(): mat1 has K = {k}, and mat2 {list(data.shape)} holds K = {stored_k}")
    if group_size is not None and (isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1):
        raise ValueError(f"mixed_mm(): group_size must be a positive int or None; got {group_size!r}")
    group = None if group_size is None or group_size >= k else group_size
    scale = _scales("scale", 3, scale, data.shape[1], group, k)
    checks.require_dtype("mixed_mm", "scale's dtype", scale.dtype, checks.FLOATS)
    if zero_point is not None:
        if data.dtype == torch.float8_e4m3fn:
            raise ValueError("mixed_mm(): float8 weights have scales and no zero point; leave zero_point out")
        zero_point = _scales("zero_point", 4, zero_point, data.shape[1], group, k)
        if zero_point.is_floating_point() and zero_point.dtype != scale.dtype:
            raise checks.DtypeError(
                f"mixed_mm(): expected zero_point to be of scale's dtype {scale.dtype} or integers; "
                f"got {zero_point.dtype}"
            )
        zero_point = zero_point.to(scale.dtype)
    quant = Quant(group, dtype_name(scale.dtype), zero_point is not None)
    dtype = "int4" if bits == 4 else dtype_name(data.dtype)
    return QuantWeight(data, scale, zero_point, k, quant, dtype)


def _scales(name: str, position: int, value: Any, n: int, group: int | None, k: int) -> Tensor:
    checks.require_tensor("mixed_mm", name, position, value)
    tensor: Tensor = value
    wanted = (n,) if group is None else (-(-k // group), n)
    if tuple(tensor.shape) not in (wanted, (1, *wanted) if group is None else wanted):
        raise checks.ShapeError(f"mixed_mm(): expected {name} of shape {list(wanted)}; got {list(tensor.shape)}")
    return tensor.resolve_neg().reshape(wanted).contiguous()


def describe(
    mat1: Tensor, mat2: Any, scale: Any, zero_point: Any, bits: int, group_size: int | None, bias: Any,
    out_dtype: torch.dtype | None, epilogue: Sequence[BoundStep],
) -> Call:  # fmt: skip
    """Return the Call of ``mixed_mm``'s arguments. Raises as ``mixed_mm``."""
    weight = _as_weight(mat1, mat2, scale, zero_point, bits, group_size)
    if bias is not None:
        checks.require_tensor("mixed_mm", "bias", 7, bias)
    arguments = {} if bias is None else {"bias": fuse.bias(bias)}
    call = describe_product(mat1, weight, epilogue, out_dtype, arguments=arguments)
    if isinstance(weight, PackedWeight):
        return call
    return call._replace(adapt_b=_weight_maker(weight, scale, zero_point, bits, group_size))


def _as_weight(
    a: Tensor, b: Any, scale: Any, zero_point: Any, bits: int, group_size: int | None
) -> QuantWeight | PackedWeight:
    if isinstance(b, PackedWeight):
        if scale is not None or zero_point is not None:
            raise ValueError("mixed_mm(): a packed weight holds its scale and zero point; do not pass them again")
        _require_agreement(b, bits, group_size)
        return b
    if scale is None:
        raise TypeError("mixed_mm(): missing argument 'scale' (position 3): it is needed unless mat2 is packed")
    checks.require_matrix("mixed_mm", "mat1", a)
    return quant_weight(b, scale, zero_point, bits, group_size, a.shape[1])


def _require_agreement(packed: PackedWeight, bits: int, group_size: int | None) -> None:
    """bits and group_size need not be said again for a packed weight; what is said must be so. Raises ValueError."""
    if packed.quant is None:
        return
    if bits != 8 and f"int{bits}" != packed.dtype:
        raise ValueError(f"mixed_mm(): bits = {bits!r}, and the packed weight holds {packed.dtype}")
    group = packed.quant.group
    if group_size is not None and group_size != group and (group is not None or group_size < packed.k):
        packed_scales = "one scale per output channel" if group is None else f"groups of {group}"
        raise ValueError(f"mixed_mm(): group_size = {group_size!r}, and the packed weight has {packed_scales}")


def _takes_as_they_are(weight: QuantWeight, scale: Tensor, zero_point: Tensor | None) -> bool:
    """Whether kernels take the caller's scales and zero points without a copy."""
    same = weight.scale is scale or (weight.scale.shape == scale.shape and scale.is_contiguous())
    if zero_point is None or weight.zero_point is None:
        return same
    zero = weight.zero_point
    return same and zero.shape == zero_point.shape and zero.dtype == zero_point.dtype and zero_point.is_contiguous()


def _weight_maker(
    weight: QuantWeight, scale: Tensor, zero_point: Tensor | None, bits: int, group_size: int | None
) -> Callable[..., QuantWeight]:
    """Return a function from data, scale and perhaps a zero point, like those of ``weight``, to a QuantWeight."""
    k, quant, dtype = weight.k, weight.quant, weight.dtype
    if not _takes_as_they_are(weight, scale, zero_point):
        return lambda data, scale, zero_point=None: quant_weight(data, scale, zero_point, bits, group_size, k)
    return lambda data, scale, zero_point=None: QuantWeight(data, scale, zero_point, k, quant, dtype)


def _torch_function(mat1: Any, mat2: Any, **_: object) -> None:
    checks.require_tensor("mixed_mm", "mat1", 1, mat1)
    checks.require_tensor("mixed_mm", "mat2", 2, mat2, packed=True)


def _trace(**arguments: Any) -> Tensor:
    return graph_break(mixed_mm, **arguments)


def _recorded_int8pack(input: Tensor, mat2: Tensor, scales: Tensor) -> Problem:
    weight = quant_weight(mat2.t(), scales, None, 8, None, input.shape[-1])
    return describe_product(input, weight, constant=is_constant(mat2)).problem


SPEC = OpSpec(
    name="mixed_mm",
    operands=("mat1", "mat2", "scale", "zero_point", "bias"),
    describe=describe,
    trace=_trace,
    torch_function=_torch_function,
    records={weight_int8pack_mm: _recorded_int8pack},
    settings=("bits", "group_size"),
    differentiable=False,
)


@SPEC.public
def mixed_mm(  # type: ignore[empty-body]
    mat1: Tensor,
    mat2: Tensor | PackedWeight,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    *,
    bits: int = 8,
    group_size: int | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    epilogue: Sequence[BoundStep] = (),
    out: Tensor | None = None,
) -> Tensor:
    """Floating activations [M, K] by a quantised weight: ``mat1 @ ((mat2 - zero_point) * scale) + bias``.

    mat2: int8 or float8_e4m3fn [K, N] (pass ``weight.t()``); with ``bits=4`` uint8 [ceil(K / 2), N], two values 0..15
    to a byte along K, the low nibble first; or packed (scale and zero point then live in it). scale: [N], or
    [groups, N] with ``group_size`` elements of K to a group. zero_point: as scale, of its dtype or integers; without
    one it is 0 for 8 bits and 8 for 4; float8 has none. bias: [N]. Raises TypeError, ValueError, ShapeError,
    DtypeError, GradError or PackedWeightError.
    """
