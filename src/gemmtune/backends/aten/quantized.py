"""Integer, weight-only and fp8 products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.candidate import Candidate, Scalar
from ...core.epilogue import Epilogue
from ...core.problem import Layout, Problem
from ...core.target import Target
from ...core.torch_compat import (
    convert_weight_to_int4pack_for_cpu,
    int_mm,
    scaled_mm,
    weight_int4pack_mm_for_cpu,
    weight_int8pack_mm,
)
from ...core.weights import PackedWeight, QuantWeight
from ..base import Rounding
from .cpu_rules import why_no_row_scales, why_no_uint8
from .cuda_rules import (
    why_byte_layout_unsupported,
    why_scaled_layout_unsupported,
    why_scales_unsupported,
    why_too_many_rows,
)
from .fusion import Fused
from .kernel import (
    AtenKernel,
    CopiedKernel,
    OutVariantKernel,
    dense_weight_bytes,
    require_layout,
    why_not_packable,
)
from .padding import canonical_strides, cpu_int_mm, int_operands, int_product, scaled_product, why_int_sizes_unsupported
from .steps import dtype_of

_HALVES = ("bfloat16", "float16")
# Beyond this many rows converting the weight pays, because _weight_int8pack_mm reuses nothing between rows.
INT8PACK_ROWS = 16


def nibbles(weight: QuantWeight) -> Tensor:
    """Return the integers of a QuantWeight as int8 or uint8 [K, N] (int4 pairs are split, low nibble first)."""
    if weight.dtype != "int4":
        return weight.data
    data = weight.data
    halves = torch.stack((data & 15, data >> 4), dim=1)
    return halves.reshape(2 * data.shape[0], data.shape[1])[: weight.k]


def dequantize(weight: QuantWeight, dtype: torch.dtype) -> Tensor:
    """Return ``(q - zero) * scale`` in ``dtype`` [K, N], a full copy of the weight. ``problem.Quant`` defines the
    formula."""
    values = nibbles(weight).to(dtype)
    if weight.zero_point is not None:
        for part, zero in _by_group(values, weight.zero_point.to(dtype), weight.quant.group):
            part.sub_(zero)
    elif weight.dtype == "int4":
        values.sub_(8)
    for part, scale in _by_group(values, weight.scale.to(dtype), weight.quant.group):
        part.mul_(scale)
    return values


def _by_group(values: Tensor, per_group: Tensor, group: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views that cover ``values`` [K, N], each with its part of a scale or zero point [N] or [groups, N], shaped
    to broadcast.

    Updating these views in place needs neither a second copy of the weight nor a scale expanded over K.
    """
    if group is None:
        yield values, per_group.reshape(1, -1)
        return
    full_groups, columns = values.shape[0] // group, values.shape[1]
    if full_groups:
        yield values[: full_groups * group].view(full_groups, group, columns), per_group[:full_groups].unsqueeze(1)
    if values.shape[0] % group:
        yield values[full_groups * group :], per_group[full_groups]


class IntMm(OutVariantKernel):
    """``torch._int_mm``."""

    template = "int_mm"
    is_fallback = True
    family = ("int_mm",)
    accumulator = "int32"

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        if problem.b.dtype != "int8" or problem.a.dtype not in ("int8", "uint8"):
            return f"_int_mm takes int8 (or uint8) x int8; got {problem.a.dtype} x {problem.b.dtype}"
        return "an operand is empty" if min(problem.m, problem.n, problem.k) == 0 else ""

    @classmethod
    def why_unsupported_on_cpu(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        return why_no_uint8(problem)

    @classmethod
    def why_unsupported_on_cuda(cls, problem: Problem, config: Mapping[str, Scalar], target: Target) -> str:
        if problem.a.dtype != "int8":
            return "_int_mm takes int8 x int8 on CUDA"
        return why_byte_layout_unsupported(problem) or why_int_sizes_unsupported(problem.m, problem.n, problem.k)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        weight = self.matrix(b)
        if a.is_cuda:  # on CUDA it must also serve M below 17, and unaligned operands
            return int_product(a, weight).contiguous()
        return cpu_int_mm(a, weight)

    def product_out(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        weight = self.matrix(b)
        a, weight = int_operands(a, weight) if a.is_cuda else (canonical_strides(a), canonical_strides(weight))
        if out.is_contiguous() and out.shape == (a.shape[0], weight.shape[1]):
            int_mm(a, weight, out=out)
        else:  # _int_mm accepts no other output
            out.copy_(int_mm(a, weight)[: out.shape[0], : out.shape[1]])

    def library_product(self) -> Problem | None:
        return replace(self.problem, epilogue=(), out_dtype=self.accumulator)


class IntMmTransposed(IntMm):
    """``out^T = B^T A^T`` through ``_int_mm``."""

    template = "int_mm_t"
    is_fallback = False

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        if problem.a.dtype != "int8":
            return "the transposed form needs int8 activations"
        return super().why_unsupported(problem, config)

    @classmethod
    def why_unsupported_on_cuda(cls, problem: Problem, config: Mapping[str, Scalar], target: Target) -> str:
        return (
            why_byte_layout_unsupported(problem)
            or why_int_sizes_unsupported(problem.n, problem.m, problem.k)
            or why_too_many_rows(problem)
        )

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        if a.is_cuda:  # M may be any number, also no multiple of 8
            return int_product(a, b, turned=True).contiguous()
        return cpu_int_mm(b.t(), a.t()).t()

    def product_out(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(int_product(a, b, turned=True) if a.is_cuda else self.product(a, b, aux))


class IntMmCopied(CopiedKernel, IntMm):
    """``torch._int_mm`` with a constant weight that is copied once into the other memory order."""

    template = "int_mm_copy"

    @classmethod
    def why_unsupported_on_cuda(cls, problem: Problem, config: Mapping[str, Scalar], target: Target) -> str:
        if config.get("order") == "row":
            return "cuBLASLt wants a column-major weight of bytes"
        column_major = replace(problem, b=replace(problem.b, layout=Layout("col")))
        return super().why_unsupported_on_cuda(column_major, config, target)


class Int8Pack(AtenKernel):
    """``torch._weight_int8pack_mm``: an int8 weight [N, K] that is not packed, with one scale per output channel."""

    template = "int8pack"
    is_fallback = True
    has_cpu_kernel_behind = True
    operators = ("weight_int8pack_mm",)
    family = ("mixed_mm",)

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        quant, dtype = problem.b.quant, problem.a.dtype
        if problem.b.dtype != "int8" or quant is None:
            return f"_weight_int8pack_mm takes int8 weights; got {problem.b.dtype}"
        if quant.group is not None or quant.zero_point:
            return "_weight_int8pack_mm has one scale per output channel and no zero point"
        if quant.scale_dtype != dtype or dtype == "float64":
            return f"_weight_int8pack_mm wants scales of the activations' dtype; got {quant.scale_dtype} and {dtype}"
        if problem.b.layout.order != "col" or problem.b.layout.ld is not None:
            return "_weight_int8pack_mm wants the weight as a contiguous [N, K]"
        return _int8pack_shape(problem)

    @classmethod
    def why_unsupported_on_cuda(cls, problem: Problem, config: Mapping[str, Scalar], target: Target) -> str:
        return "" if problem.m <= 16 else "_weight_int8pack_mm reads the weight once for every row on CUDA"

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        return int8pack(a, b)


class Int8PackRounded(Int8Pack):
    """``torch._weight_int8pack_mm``, rounded to bfloat16, then the steps of the epilogue by one kernel: what
    ``torch.compile`` makes of the same operations. For few rows only, as ``dispatch.fallback``."""

    template = "int8pack_rounded"
    is_fallback = False
    device_types = ("cpu",)

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        super().__init__(problem, candidate)
        self.rounding = Rounding(0, problem.a.dtype)

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        if super().remaining_steps(problem)[0] is not None:
            return "_weight_int8pack_mm computes all that rounds"
        if {problem.a.dtype, problem.out_dtype} != {"bfloat16"}:
            # The product of float16 may overflow although the result is finite.
            return "what torch.compile runs for bfloat16 operands and results"
        if problem.m > INT8PACK_ROWS:
            return f"_weight_int8pack_mm reuses nothing between rows; it is offered for {INT8PACK_ROWS} rows at most"
        return super().why_unsupported(problem, config)

    @classmethod
    def remaining_steps(cls, problem: Problem) -> tuple[Epilogue | None, str]:
        return problem.epilogue, ""


def int8pack(a: Tensor, b: QuantWeight) -> Tensor:
    """Return ``_weight_int8pack_mm`` of operands that ``Int8Pack`` supports, at any address.

    In torch 2.13 its half-width kernel loads 32 bytes of activations and 16 of weights with instructions that fault on
    unaligned addresses, so that unaligned operands (slices) are copied first.
    """
    out: Tensor = weight_int8pack_mm(aligned(a.contiguous()), aligned(b.data.t()), aligned(b.scale))
    return out


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of it, at an address that is a multiple of 64 bytes."""
    return tensor if tensor.data_ptr() % 64 == 0 else tensor.clone(memory_format=torch.contiguous_format)


def _int8pack_shape(problem: Problem) -> str:
    if min(problem.m, problem.n, problem.k) == 0:
        return "an operand is empty"
    # Seen in torch 2.13: with half-width activations it reads 16 weights at a time, past the end of odd rows
    # (wrong results, or a segmentation fault).
    if problem.a.dtype in _HALVES and problem.k % 16:
        return f"_weight_int8pack_mm reads out of bounds for {problem.a.dtype} when K is no multiple of 16"
    return ""


class Int4Pack(AtenKernel):
    """``_weight_int4pack_mm_for_cpu``, which computes ``(q - 8) * scale + zero``."""

    template = "int4pack"
    device_types = ("cpu",)
    operators = ("convert_weight_to_int4pack_for_cpu", "weight_int4pack_mm_for_cpu")
    family = ("mixed_mm",)

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        quant = problem.b.quant
        if problem.b.dtype != "int4" or quant is None:
            return f"_weight_int4pack_mm takes int4 weights; got {problem.b.dtype}"
        if quant.group not in (32, 64, 128, 256) or problem.k % quant.group or problem.n % 16 or problem.k == 0:
            return "_weight_int4pack_mm wants groups of 32, 64, 128 or 256 that divide K, and N a multiple of 16"
        if problem.a.dtype not in ("float32", *_HALVES) or quant.scale_dtype != problem.a.dtype:
            return "_weight_int4pack_mm wants scales of the activations' dtype"
        if quant.zero_point and problem.a.dtype in _HALVES:
            # ATen adds its zero, a rounded float, after scaling; gemmtune subtracts its zero before scaling.
            return f"the zero points would be rounded to {problem.a.dtype}"
        return why_not_packable(problem) or ("an operand is empty" if problem.m * problem.n == 0 else "")

    @classmethod
    def layout(cls, problem: Problem, config: Mapping[str, Scalar]) -> str | None:
        return f"aten:int4pack/g{problem.b.quant.group}" if problem.b.quant else None

    def pack(self, b: Any) -> PackedWeight:
        codes = nibbles(b).t().contiguous().to(torch.int32)
        blocks = convert_weight_to_int4pack_for_cpu(codes, 1)
        zero = torch.zeros_like(b.scale) if b.zero_point is None else (8 - b.zero_point) * b.scale
        pair = torch.stack((b.scale, zero), dim=-1).contiguous()
        # ATen's packed form cannot be inverted bit for bit, so that the raw tensors are stored beside it.
        return quantized_packed_weight(self.packing or "", (blocks, pair, *clone_raw(b)), self.problem)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        packed = require_layout(b, self.packing or "")
        group = packed.quant.group if packed.quant else None
        out: Tensor = weight_int4pack_mm_for_cpu(aligned(a.contiguous()), packed.data[0], group, packed.data[1])
        return out


class Dequantized(AtenKernel):
    """A weight-only operand that is dequantised once into a full float32 copy: legal for every M. The memory of the
    copy is counted."""

    template = "dequant"
    family = ("mixed_mm",)

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        return why_not_packable(problem)

    @classmethod
    def product_dtype(cls, problem: Problem) -> str:
        return "float64" if problem.acc == "float64" else "float32"

    @classmethod
    def layout(cls, problem: Problem, config: Mapping[str, Scalar]) -> str | None:
        return f"aten:dequant/{cls.product_dtype(problem)}"

    @classmethod
    def scratch_bytes(cls, problem: Problem) -> int:
        return super().scratch_bytes(problem) + dense_weight_bytes(problem, cls.product_dtype(problem))

    def pack(self, b: Any) -> PackedWeight:
        copy = dequantize(b, dtype_of(self.product_dtype(self.problem)))
        return quantized_packed_weight(self.packing or "", (copy, *clone_raw(b)), self.problem)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        weight = require_layout(b, self.packing or "").data[0]
        return torch.mm(a.to(weight.dtype), weight)


def clone_raw(b: QuantWeight) -> tuple[Tensor, ...]:
    """Return copies of the raw tensors, which are stored beside a packed form that cannot be inverted bit for bit."""
    tensors = (b.data, b.scale) if b.zero_point is None else (b.data, b.scale, b.zero_point)
    return tuple(tensor.clone() for tensor in tensors)


def quantized_packed_weight(layout: str, data: tuple[Tensor, ...], problem: Problem) -> PackedWeight:
    """Return the PackedWeight of a weight-only operand, with ``data`` as its tensors."""
    b = problem.b
    return PackedWeight(layout, data, problem.n, problem.k, b.dtype, b.quant, "", b.layout.order)


def unpack_quantized(packed: PackedWeight) -> QuantWeight:
    """Return the QuantWeight that a layout of this module stores beside its packed form."""
    if packed.quant is None:
        raise ValueError(f"layout {packed.layout!r} holds no quantised weight")
    raw = packed.data[2 if packed.layout.startswith("aten:int4pack") else 1 :]
    zero = raw[2] if len(raw) > 2 else None
    return QuantWeight(raw[0], raw[1], zero, packed.k, packed.quant, packed.dtype)


class ScaledMm(OutVariantKernel):
    """``torch._scaled_mm``, when the epilogue consists of its own scales and bias."""

    template = "scaled_mm"
    is_fallback = True
    family = ("scaled_mm",)

    @classmethod
    def fused_prefix(cls, problem: Problem) -> Fused:
        steps = problem.epilogue
        biased = len(steps) > 2 and steps[2].kind == "bias"
        return Fused(axis="col" if biased else "", steps=3 if biased else 2, tensors=3 if biased else 2)

    @classmethod
    def product_dtype(cls, problem: Problem) -> str:
        return problem.out_dtype

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        kinds = tuple((step.kind, step.axis) for step in problem.epilogue)
        tensorwise = (("scale", "tensor"), ("scale", "tensor"))
        rowwise = (("scale", "row"), ("scale", "col"))
        if kinds[:2] not in (tensorwise, rowwise) or kinds[2:] not in ((), (("bias", "col"),)):
            return "_scaled_mm fuses one scale per operand (both per tensor, or per row and column) and a bias"
        if any(step.value != 1.0 or step.dtype is None for step in problem.epilogue):
            return "_scaled_mm takes its scales as tensors"
        if any(step.dtype != "float32" for step in problem.epilogue[:2]):
            return "_scaled_mm wants float32 scales"
        return _scaled_shape(problem)

    @classmethod
    def why_unsupported_on_cpu(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        return why_no_row_scales(problem)

    @classmethod
    def why_unsupported_on_cuda(cls, problem: Problem, config: Mapping[str, Scalar], target: Target) -> str:
        return why_scaled_layout_unsupported(problem) or why_scales_unsupported(problem, target.compute_capability)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        scale_a, scale_b, bias = scaled_operands(self.problem, aux)
        if a.is_cuda:  # operands may be unaligned
            return scaled_product(a, b, scale_a, scale_b, bias, self.out_dtype)
        return scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=self.out_dtype)

    def product_out(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        if not out.is_contiguous():  # _scaled_mm overwrites the memory between the rows
            out.copy_(self.product(a, b, aux))
            return
        scale_a, scale_b, bias = scaled_operands(self.problem, aux)
        if a.is_cuda:
            result = scaled_product(a, b, scale_a, scale_b, bias, self.out_dtype, out)
            if result is not out:
                out.copy_(result)
        else:
            scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=self.out_dtype, out=out)

    def library_product(self) -> Problem | None:
        return self.problem


def scaled_operands(problem: Problem, aux: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the scales of A and B in the shapes that ``_scaled_mm`` requires, and the bias or None."""
    rows = problem.epilogue[0].axis == "row"
    scale_a = aux[0].reshape(-1, 1) if rows else aux[0].reshape(())
    scale_b = aux[1].reshape(1, -1) if rows else aux[1].reshape(())
    return scale_a, scale_b, aux[2] if len(aux) > 2 else None


def _scaled_shape(problem: Problem) -> str:
    if min(problem.m, problem.n, problem.k) == 0:
        return "an operand is empty"
    bias = problem.epilogue[2:]
    if bias and bias[0].dtype not in ("bfloat16", "float16", "float32"):
        return "_scaled_mm wants a floating-point bias"
    return ""
