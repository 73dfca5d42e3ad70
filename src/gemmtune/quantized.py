"""The ops on integers, weight-only operands and fp8: int_mm, mixed_mm, scaled_mm. None of them has a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import checks, describe, launch
from .backends.base import PackedWeight, QuantWeight
from .dispatch.guards import special, special_state
from .dispatch.runtime import RUNTIME, TABLE
from .fuse import Bound
from .fuse import bias as bias_step
from .traced import is_compiling, outside

_lookup = TABLE.get
_threads = torch.get_num_threads


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
    to ``out_dtype`` (int32, int8, uint8, float32, bfloat16, float16). Raises TypeError, ShapeError, DtypeError,
    GradError or PackedWeightError before anything runs.
    """
    if is_compiling():
        return outside(_int_mm, self, mat2, out_dtype, epilogue, out)
    if epilogue or out is not None or out_dtype is not None:
        return _int_mm(self, mat2, out_dtype, epilogue, out)
    try:
        weight: Any = mat2._key if isinstance(mat2, PackedWeight) else (mat2.shape, mat2.stride(), mat2.dtype)
        key: Any = ("int_mm", self.shape, self.stride(), self.dtype, weight, _threads())
    except (AttributeError, RuntimeError, TypeError):
        return _int_mm(self, mat2, None, (), None)
    entry = _lookup(key) or _first_int_mm(key, self, mat2)
    return entry(self, mat2)


def _described_int_mm(a: Tensor, b: Any, epilogue: Sequence[Bound], out_dtype: torch.dtype | None) -> describe.Call:
    checks.tensor("int_mm", "self", 1, a)
    checks.tensor("int_mm", "mat2", 2, b, packed=True)
    return describe.int_mm(a, b, epilogue, out_dtype)


def _int_mm(a: Tensor, b: Any, out_dtype: torch.dtype | None, epilogue: Sequence[Bound], out: Tensor | None) -> Tensor:
    return launch.execute("int_mm", _described_int_mm(a, b, epilogue, out_dtype), out, differentiable=False)


def _first_int_mm(key: Any, a: Tensor, b: Any) -> launch.Entry:
    generation = RUNTIME.generation
    call = _described_int_mm(a, b, (), None)

    def described(a: Tensor, b: Any, _: Any = None) -> Tensor:
        return _int_mm(a, b, None, (), None)

    if RUNTIME.observer is not None:
        return described
    turned = (call.a is not a, call.b is not b)
    copies = call.problem.b.constant and not call.a.is_contiguous()

    def operands(a: Tensor, b: Any) -> tuple[Tensor, Any]:
        a, b = describe.regular(a) if turned[0] else a, describe.regular(b) if turned[1] else b
        return (launch.dense(a) if copies else a), b

    plain = call.packed is None and 0 not in (*a.shape, *b.shape)
    entry = launch.prepared(call, lambda a, b, _: (*operands(a, b), ()), _no_gradient, described)
    entry = entry or (_plain_int_mm(described, operands if any(turned) else None) if plain else described)
    RUNTIME.remember(key, entry, generation)
    return entry


def _plain_int_mm(
    described: launch.Entry, operands: Callable[[Tensor, Any], tuple[Tensor, Any]] | None
) -> launch.Entry:
    """``torch._int_mm`` itself for ordinary tensors, whose shapes and dtypes were checked at first sight."""
    product = torch._int_mm

    def entry(a: Tensor, b: Any, _: Any = None) -> Tensor:
        if special_state() or special(a) or special(b):
            return described(a, b)
        return product(a, b) if operands is None else product(*operands(a, b))

    return entry


def _no_gradient(compute: launch.Entry, a: Tensor, b: Any, extra: Tensor | None) -> Tensor:
    checks.no_grad_for("int_mm or mixed_mm", "a quantised product", a, extra)
    return compute(a, b, extra)


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

    mat2: int8 [K, N] (pass ``weight.t()``); with ``bits=4`` uint8 [ceil(K / 2), N], two values 0..15 to a byte along K,
    the low nibble first; or packed (scale and zero point then live in it). scale: [N], or [groups, N] with
    ``group_size`` elements of K to a group. zero_point: as scale, of its dtype or integers; without one it is 0 for
    8 bits and 8 for 4. bias: [N]. Raises TypeError, ValueError, ShapeError, DtypeError, GradError or PackedWeightError.
    """
    arguments = (mat1, mat2, scale, zero_point, bits, group_size, bias, out_dtype, epilogue, out)
    if is_compiling():
        return outside(_mixed_mm, *arguments)
    if not isinstance(mat2, PackedWeight) or epilogue or out is not None or out_dtype is not None:
        return _mixed_mm(*arguments)
    if scale is not None or zero_point is not None:
        return _mixed_mm(*arguments)
    try:
        key: Any = ("mixed_mm", mat1.shape, mat1.stride(), mat1.dtype, mat2._key, bits, group_size, _threads())
        if bias is not None:
            key = (key, bias.shape, bias.stride(), bias.dtype)
    except (AttributeError, RuntimeError, TypeError):
        return _mixed_mm(*arguments)
    entry = _lookup(key) or _first_mixed_mm(key, mat1, mat2, bits, group_size, bias)
    return entry(mat1, mat2, bias)


def _mixed_mm(
    a: Tensor, b: Any, scale: Any, zero_point: Any, bits: int, group_size: int | None, bias: Any,
    out_dtype: torch.dtype | None, epilogue: Sequence[Bound], out: Tensor | None,
) -> Tensor:  # fmt: skip
    checks.tensor("mixed_mm", "mat1", 1, a)
    checks.tensor("mixed_mm", "mat2", 2, b, packed=True)
    weight = _weight(a, b, scale, zero_point, bits, group_size)
    if bias is not None:
        checks.tensor("mixed_mm", "bias", 7, bias)
    steps = epilogue if bias is None else (bias_step(bias), *epilogue)
    call = describe.mixed_mm(a, weight, steps, out_dtype)
    return launch.execute("mixed_mm", call, out, differentiable=False)


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


def _first_mixed_mm(
    key: Any, a: Tensor, b: PackedWeight, bits: int, group_size: int | None, bias: Tensor | None
) -> launch.Entry:
    def described(a: Tensor, b: Any, bias: Tensor | None) -> Tensor:
        return _mixed_mm(a, b, None, None, 8, None, bias, None, (), None)

    generation = RUNTIME.generation
    checks.tensor("mixed_mm", "mat1", 1, a)
    _agrees(b, bits, group_size)
    if bias is not None:
        checks.tensor("mixed_mm", "bias", 7, bias)
    if RUNTIME.observer is not None or (bias is not None and not bias.is_contiguous()):
        return described
    call = describe.mixed_mm(a, b, () if bias is None else (bias_step(bias),))
    copies = not call.a.is_contiguous()

    def prepare(a: Tensor, b: Any, bias: Tensor | None) -> tuple[Tensor, Any, Sequence[Tensor]]:
        return launch.dense(a) if copies else a, b, () if bias is None else (bias,)

    entry = launch.prepared(call, prepare, _no_gradient, described) or described
    RUNTIME.remember(key, entry, generation)
    return entry


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
    when an fp8 out_dtype is given (as ATen's CPU op does). use_fast_accum only matters on GPUs. Other devices than the
    CPU go to ``torch._scaled_mm``. Raises TypeError, ShapeError, DtypeError or GradError before anything runs.
    """
    if is_compiling() or (isinstance(mat1, Tensor) and mat1.device.type not in ("cpu", "meta")):
        return torch._scaled_mm(mat1, mat2, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
    checks.tensor("scaled_mm", "mat1", 1, mat1)
    checks.tensor("scaled_mm", "mat2", 2, mat2)
    call = describe.scaled_mm(mat1, mat2, scale_a, scale_b, bias, scale_result, out_dtype)
    return launch.execute("scaled_mm", call, differentiable=False)
