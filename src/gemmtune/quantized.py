"""The ops on integers, weight-only operands and fp8: int_mm, mixed_mm, scaled_mm. None of them has a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import checks, describe, launch, plain
from .backends.base import PackedWeight, QuantWeight
from .dispatch.guards import special_state, unusual
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
    to ``out_dtype`` (int32, int8, uint8, float32, bfloat16, float16). On GPUs too any M, K and N will do. Raises
    TypeError, ShapeError, DtypeError, GradError or PackedWeightError before anything runs.
    """
    if is_compiling():
        return outside(_int_mm, self, mat2, out_dtype, epilogue, out)
    if epilogue or out is not None or out_dtype is not None:
        return _int_mm(self, mat2, out_dtype, epilogue, out)
    try:
        weight: Any = (
            mat2._key if isinstance(mat2, PackedWeight)
            else (mat2.shape, mat2.stride(), mat2.dtype, mat2.is_cpu or mat2.device)
        )  # fmt: skip
        key: Any = ("int_mm", self.shape, self.stride(), self.dtype, self.is_cpu or self.device, weight, _threads())
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

    if RUNTIME.observer is not None or launch.passing(call):
        return described
    turned = (call.a is not a, call.b is not b)
    copies = call.problem.b.constant and not call.a.is_contiguous()

    def operands(a: Tensor, b: Any) -> tuple[Tensor, Any]:
        a, b = describe.regular(a) if turned[0] else a, describe.regular(b) if turned[1] else b
        return (launch.dense(a) if copies else a), b

    entry = launch.prepared(call, (a, b), lambda a, b, _: (*operands(a, b), ()), _no_gradient, described)
    if entry is None and call.packed is None and 0 not in (*a.shape, *b.shape):
        entry = _plain_int_mm(described, operands if any(turned) else None, plain.int_product(call.a))
    entry = entry or described
    RUNTIME.remember(key, entry, generation)
    return entry


def _plain_int_mm(
    described: launch.Entry,
    operands: Callable[[Tensor, Any], tuple[Tensor, Any]] | None,
    product: Callable[[Tensor, Tensor], Tensor],
) -> launch.Entry:
    """``product`` itself for ordinary tensors, whose shapes and dtypes were checked at first sight."""

    def entry(a: Tensor, b: Any, _: Any = None) -> Tensor:
        if special_state() or unusual(a) or unusual(b):
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
    if epilogue or out is not None or out_dtype is not None:
        return _mixed_mm(*arguments)
    if not isinstance(mat2, PackedWeight):
        return _raw_mixed_mm(mat1, mat2, scale, zero_point, bits, group_size, bias)
    if scale is not None or zero_point is not None:
        return _mixed_mm(*arguments)
    try:
        key: Any = (
            "mixed_mm", mat1.shape, mat1.stride(), mat1.dtype, mat1.is_cpu or mat1.device, mat2._key, bits, group_size,
            _threads(),
        )  # fmt: skip
        if bias is not None:
            key = (key, bias.shape, bias.stride(), bias.dtype, bias.is_cpu or bias.device)
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
    if launch.passing(call):
        return described
    copies = not call.a.is_contiguous()

    def prepare(a: Tensor, b: Any, bias: Tensor | None) -> tuple[Tensor, Any, Sequence[Tensor]]:
        return launch.dense(a) if copies else a, b, () if bias is None else (bias,)

    entry = launch.prepared(call, (a, b, bias), prepare, _no_gradient, described) or described
    RUNTIME.remember(key, entry, generation)
    return entry


def _shown(tensor: Tensor) -> Any:
    """What a key says of a tensor."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.is_cpu or tensor.device


def _unfit(*tensors: Tensor | None) -> bool:
    """Whether the general path must see these operands: transforms, subclasses, or a gradient (which it refuses)."""
    if special_state():
        return True
    grad = torch.is_grad_enabled()
    for tensor in tensors:  # noqa: SIM110 - a generator would cost as much as all that it asks
        if tensor is not None and (unusual(tensor) or (grad and tensor.requires_grad)):
            return True
    return False


def _raw_mixed_mm(
    a: Tensor, b: Any, scale: Any, zero_point: Any, bits: int, group_size: int | None, bias: Any
) -> Tensor:
    """``mixed_mm`` by a weight as it lies."""
    try:
        zero = None if zero_point is None else _shown(zero_point)
        added = None if bias is None else _shown(bias)
        key: Any = (
            "mixed_mm", a.shape, a.stride(), a.dtype, a.is_cpu or a.device, b.shape, b.stride(), b.dtype,
            b.is_cpu or b.device, _shown(scale), zero, added, bits, group_size, _threads(),
        )  # fmt: skip
        entry = _lookup(key)
    except (AttributeError, RuntimeError, TypeError):
        return _mixed_mm(a, b, scale, zero_point, bits, group_size, bias, None, (), None)
    entry = entry or _first_raw_mixed_mm(key, a, b, scale, zero_point, bits, group_size, bias)
    return entry(a, b, scale, zero_point, bias)


def _first_raw_mixed_mm(
    key: Any, a: Tensor, b: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int, group_size: int | None,
    bias: Tensor | None,
) -> launch.Entry:  # fmt: skip
    def described(a: Tensor, b: Any, scale: Any, zero_point: Any, bias: Any) -> Tensor:
        return _mixed_mm(a, b, scale, zero_point, bits, group_size, bias, None, (), None)

    generation = RUNTIME.generation
    checks.tensor("mixed_mm", "mat1", 1, a)
    checks.tensor("mixed_mm", "mat2", 2, b, packed=True)
    weight = _weight(a, b, scale, zero_point, bits, group_size)
    if bias is not None:
        checks.tensor("mixed_mm", "bias", 7, bias)
    call = describe.mixed_mm(a, weight, () if bias is None else (bias_step(bias),))
    plainly = RUNTIME.observer is not None or launch.passing(call) or _unfit(a, b, scale, zero_point, bias)
    if plainly or not isinstance(weight, QuantWeight) or not _as_given(weight, scale, zero_point, bias):
        return described
    k, quant, dtype = weight.k, weight.quant, weight.dtype
    copies, zeros = call.problem.b.constant and not a.is_contiguous(), zero_point is not None

    def prepare(a: Tensor, b: Any, scale: Any, *rest: Any) -> tuple[Tensor, QuantWeight, Sequence[Tensor]]:
        zero = rest[0] if zeros else None
        return launch.dense(a) if copies else a, QuantWeight(b, scale, zero, k, quant, dtype), rest[1 if zeros else 0 :]

    compute = launch.serving(call, [t for t in (a, b, scale, zero_point, bias) if t is not None], prepare)

    def entry(a: Tensor, b: Any, scale: Any, zero_point: Any, bias: Any) -> Tensor:
        if _unfit(a, b, scale, zero_point, bias):
            return described(a, b, scale, zero_point, bias)
        if zero_point is None:
            return compute(a, b, scale) if bias is None else compute(a, b, scale, bias)
        return compute(a, b, scale, zero_point) if bias is None else compute(a, b, scale, zero_point, bias)

    RUNTIME.remember(key, entry, generation)
    return entry


def _as_given(weight: QuantWeight, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None) -> bool:
    """Whether kernels take the scales, zero points and bias just as the caller holds them."""
    same = weight.scale is scale or (weight.scale.shape == scale.shape and scale.is_contiguous())
    if zero_point is not None and weight.zero_point is not None:
        zero = weight.zero_point
        same = same and zero.shape == zero_point.shape and zero.dtype == zero_point.dtype and zero_point.is_contiguous()
    return same and (bias is None or (bias.dim() == 1 and bias.is_contiguous()))


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
    key: Any = None
    compiling = is_compiling()
    if not compiling and scale_result is None and not use_fast_accum:
        try:
            key = (
                "scaled_mm", mat1.shape, mat1.stride(), mat1.dtype, mat1.is_cpu or mat1.device, mat2.shape,
                mat2.stride(), mat2.dtype, mat2.is_cpu or mat2.device, scale_a.shape, scale_a.stride(), scale_a.dtype,
                scale_a.is_cpu or scale_a.device, scale_b.shape, scale_b.stride(), scale_b.dtype,
                scale_b.is_cpu or scale_b.device, None if bias is None else _shown(bias), out_dtype, _threads(),
            )  # fmt: skip
            entry = _lookup(key)
        except (AttributeError, RuntimeError, TypeError):
            key = entry = None
        if entry is not None:
            result: Tensor = entry(mat1, mat2, scale_a, scale_b, bias)
            return result
    if compiling or _is_atens(mat1, mat2, scale_a, scale_b, scale_result, use_fast_accum):
        return torch._scaled_mm(mat1, mat2, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
    if key is None:
        return _scaled_mm(mat1, mat2, scale_a, scale_b, bias, scale_result, out_dtype)
    entry = _first_scaled_mm(key, mat1, mat2, scale_a, scale_b, bias, out_dtype)
    return entry(mat1, mat2, scale_a, scale_b, bias)


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


def _scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, result: Any, out: Any) -> Tensor:
    call = _described_scaled_mm(a, b, scale_a, scale_b, bias, result, out)
    return launch.execute("scaled_mm", call, differentiable=False)


def _first_scaled_mm(
    key: Any, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out: torch.dtype | None
) -> launch.Entry:
    def described(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any) -> Tensor:
        return _scaled_mm(a, b, scale_a, scale_b, bias, None, out)

    generation = RUNTIME.generation
    call = _described_scaled_mm(a, b, scale_a, scale_b, bias, None, out)
    tensors = [t for t in (scale_a, scale_b, bias) if t is not None]
    if RUNTIME.observer is not None or launch.passing(call) or _unfit(a, b, *tensors):
        return described
    if len(call.aux) != len(tensors) or not all(t.is_contiguous() for t in tensors):
        return described
    shapes = [tensor.shape for tensor in call.aux]

    def prepare(a: Tensor, b: Tensor, *aux: Tensor) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        return a, b, [t.view(shape) for t, shape in zip(aux, shapes, strict=True)]

    compute = launch.serving(call, (a, b, *tensors), prepare)

    def entry(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any) -> Tensor:
        if _unfit(a, b, scale_a, scale_b, bias):
            return described(a, b, scale_a, scale_b, bias)
        return compute(a, b, scale_a, scale_b) if bias is None else compute(a, b, scale_a, scale_b, bias)

    RUNTIME.remember(key, entry, generation)
    return entry
