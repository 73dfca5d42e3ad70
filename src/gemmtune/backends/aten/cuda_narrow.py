"""Integer, weight-only and fp8 products that only CUDA offers or needs; ``cuda_dense`` says why they run on CPUs
too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.candidate import Candidate, Scalar
from ...core.epilogue import Epilogue, Step
from ...core.problem import Operand, Problem
from ...core.target import Target
from ...core.torch_compat import convert_weight_to_int4pack, weight_int4pack_mm
from ...core.weights import PackedWeight, QuantWeight
from ..base import Kernel, Rounding
from .cuda_dense import padded_packed_weight
from .cuda_rules import (
    HALVES,
    why_byte_layout_unsupported,
    why_fp8_unsupported,
    why_scaled_layout_unsupported,
    why_scales_unsupported,
)
from .dense import PADDED
from .kernel import (
    AtenKernel,
    JitCalls,
    SlicedKernel,
    dense_weight_bytes,
    require_layout,
    steps_kernel,
    why_not_packable,
)
from .padding import int_product, scaled_product, why_int_sizes_unsupported, wide_mm
from .quantized import IntMm, ScaledMm, aligned, clone_raw, nibbles, quantized_packed_weight, scaled_operands
from .steps import apply_steps, dtype_of


class IntMmPadded(SlicedKernel):
    """``torch._int_mm`` with padding for operands that its rules on CUDA exclude (few rows, odd K or N, uint8)."""

    template = "int_mm_pad"
    is_fallback = True
    family = ("int_mm",)
    device_types = ("cuda",)
    accumulator = "int32"

    @classmethod
    def configs(cls, problem: Problem) -> list[dict[str, Scalar]]:
        return [{"turned": False}, {"turned": True}]

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        reason = IntMm.why_unsupported(problem, {})
        if reason:
            return reason
        m, n = (problem.n, problem.m) if config.get("turned") else (problem.m, problem.n)
        needed = (
            problem.a.dtype == "uint8"
            or why_byte_layout_unsupported(problem)
            or why_int_sizes_unsupported(m, n, problem.k)
        )
        return "" if needed else "nothing to pad: _int_mm takes these operands as they are"

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        return int_product(a, b, turned=bool(dict(self.candidate.config).get("turned")))


class IntMmPaddedOnce(SlicedKernel):
    """``torch._int_mm`` with a constant int8 weight of odd K or N that is padded once."""

    template = "int_mm_pad_copy"
    family = ("int_mm",)
    device_types = ("cuda",)
    accumulator = "int32"

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        if not (problem.k % 8 or problem.n % 8):
            return "K and N are multiples of 8: the weight needs no padding"
        return why_not_packable(problem) or IntMmPadded.why_unsupported(problem, {"turned": False})

    @classmethod
    def layout(cls, problem: Problem, config: Mapping[str, Scalar]) -> str | None:
        return PADDED

    def pack(self, b: Any) -> PackedWeight:
        return padded_packed_weight(b, self.problem)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        weight = require_layout(b, PADDED).data[0]
        left = torch.nn.functional.pad(a, (0, weight.shape[0] - a.shape[1]))
        return int_product(left, weight)[:, : self.problem.n]


class Upcast(AtenKernel):
    """Integers converted (exactly) to the activations' dtype, multiplied, and scaled in float32."""

    template = "upcast"
    is_fallback = True
    family = ("mixed_mm",)
    device_types = ("cuda",)
    accumulator = "float32"

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        quant = problem.b.quant
        if quant is None or quant.group is not None or quant.zero_point:
            return "exact only with one scale per output channel and no zero point"
        if problem.a.dtype not in (*HALVES, "float32"):
            return f"sums in float32; got {problem.a.dtype}"
        return ""

    @classmethod
    def scratch_bytes(cls, problem: Problem) -> int:
        return super().scratch_bytes(problem) + dense_weight_bytes(problem, problem.a.dtype)

    @classmethod
    def runs_as_pytorch(cls, problem: Problem) -> bool:
        return cls.is_fallback and bool(UpcastRounded.why_unsupported(problem, {}))

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        acc: Tensor = wide_mm(a, levels(b, a.dtype)) * b.scale.float()
        return acc

    def library_product(self) -> Problem | None:
        a, b, dtype = self.problem.a, self.problem.b, self.product_dtype(self.problem)
        if b.layout.ld is not None:
            return None
        return replace(self.problem, family="mm", b=Operand(a.dtype, b.layout), epilogue=(), out_dtype=dtype)


class UpcastRounded(Upcast):
    """The formulation that users write today: the product is rounded to the activations' dtype, then scaled. It moves a
    third of the bytes of ``Upcast``'s results (8192x1024, M = 4231: 127 us and 140, H100). One kernel scales and
    computes the steps of the epilogue."""

    template = "upcast_rounded"
    accumulator = ""
    # The most elements of a product that ``torch.mul`` scales, as in eager PyTorch, where nothing follows the scale.
    most_scaled_by_operator: float = math.inf

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        super().__init__(problem, candidate)
        assert problem.b.quant is not None
        self.rounding = Rounding(0, problem.a.dtype)
        self._steps = (Step("scale", "col", problem.b.quant.scale_dtype), *problem.epilogue)
        self._scaled_steps = steps_kernel(self._steps, problem.a.dtype, problem.out_dtype)

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        if problem.b.dtype != "int8" or {problem.a.dtype, problem.out_dtype} != {"bfloat16"}:
            # The product of float16 may overflow although the scaled one is finite.
            return "what plain PyTorch runs for int8 weights and bfloat16 activations"
        return super().why_unsupported(problem, config)

    @classmethod
    def runs_as_pytorch(cls, problem: Problem) -> bool:
        return cls.is_fallback

    @classmethod
    def remaining_steps(cls, problem: Problem) -> tuple[Epilogue | None, str]:
        return problem.epilogue, ""

    def functional(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        return Kernel.functional(self, a, b, aux)  # ``run`` scales by one kernel

    def integers(self, b: QuantWeight, dtype: torch.dtype) -> Tensor:
        """Return the weight's integers in ``dtype`` [K, N]."""
        return levels(b, dtype)

    def jit_calls(self) -> JitCalls:
        scale_dtype, elements = self._steps[0].dtype, self.problem.m * self.problem.n
        if self._is_scaled_by_operator(elements, scale_dtype == self.problem.out_dtype):
            return []
        return self._steps_calls(self._scaled_steps, self._steps, self.problem.a.dtype)

    def _is_scaled_by_operator(self, elements: int, same_dtype: bool) -> bool:
        """Whether ``torch.mul`` scales a product of so many elements, with scales of the result's dtype or others."""
        return not self.remaining and same_dtype and elements <= self.most_scaled_by_operator

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        product = self._without_reduced_precision(a, torch.mm, a, self.integers(b, a.dtype))
        if self._is_scaled_by_operator(product.numel(), b.scale.dtype == out.dtype):
            torch.mul(product, b.scale, out=out)
        elif self._scaled_steps is None or not self._scaled_steps.run(product, (b.scale, *aux), out):
            out.copy_(apply_steps(product.float() * b.scale, self.remaining, aux))


class UpcastConverted(UpcastRounded):
    """``UpcastRounded`` with the integers converted by a Triton kernel, as in graphs of Inductor's: in 0.78 of its time
    for 2048x4096x4096 (H200, every-m-20261129-063427.json). A Triton kernel scales products of many elements, too:
    8191x1024x8192 takes 205 us then, 217 with ``torch.mul`` (scaled-product-h200-20261129.txt)."""

    template = "upcast_converted"
    is_fallback = False
    most_scaled_by_operator = 1 << 20  # each process compiles the kernel, for which few elements are too few
    has_plain_product = True

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        if problem.b.layout.ld is not None:
            return "converts weights without memory between their rows or columns"
        return super().why_unsupported(problem, config)

    @classmethod
    def why_unsupported_on_cuda(cls, problem: Problem, config: Mapping[str, Scalar], target: Target) -> str:
        from ..triton.compiler import triton_version, why_unusable

        return why_unusable(triton_version())

    def jit_calls(self) -> JitCalls:
        from ..triton.conversion import conversion

        k, n = self.problem.k, self.problem.n
        source, result = (
            torch.empty(k, n, dtype=dtype_of(name), device="meta") for name in ("int8", self.problem.a.dtype)
        )
        return [*super().jit_calls(), (conversion(), (source, result))]

    def integers(self, b: QuantWeight, dtype: torch.dtype) -> Tensor:
        from ..triton.conversion import conversion

        result = torch.empty_like(b.data, dtype=dtype)
        if not conversion().run(b.data, result):
            result.copy_(b.data)
        return result


def levels(b: QuantWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight's integers minus their fixed zero (8 for int4) in ``dtype`` [K, N], which represents them
    exactly."""
    values = nibbles(b).to(dtype)
    return values.sub_(8) if b.dtype == "int4" else values


class UpcastOnce(Upcast):
    """``Upcast`` with integers that are converted once. The copy takes twice the weight's bytes or more, which is
    counted."""

    template = "upcast_once"
    is_fallback = False

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        return why_not_packable(problem) or super().why_unsupported(problem, config)

    @classmethod
    def layout(cls, problem: Problem, config: Mapping[str, Scalar]) -> str | None:
        return f"aten:cast/{problem.a.dtype}"

    def pack(self, b: Any) -> PackedWeight:
        wide = levels(b, dtype_of(self.problem.a.dtype))
        return quantized_packed_weight(self.packing or "", (wide, *clone_raw(b)), self.problem)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        packed = require_layout(b, self.packing or "")
        acc: Tensor = wide_mm(a, packed.data[0]) * packed.data[2].float()
        return acc


class Int4PackCuda(AtenKernel):
    """``_weight_int4pack_mm``, which computes ``(q - 8) * scale + zero``, in bfloat16."""

    template = "int4pack_cuda"
    operators = ("convert_weight_to_int4pack", "weight_int4pack_mm")
    family = ("mixed_mm",)
    device_types = ("cuda",)

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        quant = problem.b.quant
        if problem.b.dtype != "int4" or quant is None:
            return f"_weight_int4pack_mm takes int4 weights; got {problem.b.dtype}"
        if quant.group not in (32, 64, 128, 256) or problem.k % quant.group or problem.n % 8 or problem.k == 0:
            return "_weight_int4pack_mm wants groups of 32, 64, 128 or 256 that divide K, and N a multiple of 8"
        if problem.a.dtype != "bfloat16" or quant.scale_dtype != "bfloat16":
            return "_weight_int4pack_mm wants bfloat16 activations and scales on CUDA"
        if quant.zero_point:
            # ATen adds the zero points after scaling; gemmtune subtracts them before.
            return "the zero points would be rounded to bfloat16"
        return why_not_packable(problem) or ("an operand is empty" if problem.m * problem.n == 0 else "")

    @classmethod
    def why_unsupported_on_cuda(cls, problem: Problem, config: Mapping[str, Scalar], target: Target) -> str:
        return "" if target.compute_capability >= (8, 0) else "_weight_int4pack_mm needs compute capability 8.0"

    @classmethod
    def layout(cls, problem: Problem, config: Mapping[str, Scalar]) -> str | None:
        return f"aten:int4pack_cuda/g{problem.b.quant.group}" if problem.b.quant else None

    def pack(self, b: Any) -> PackedWeight:
        # CUDA's form has the even element of a pair in the high nibble, and the shape [N, K / 2].
        pairs = ((b.data << 4) | (b.data >> 4)).t().contiguous()
        blocks = convert_weight_to_int4pack(pairs, _inner_tiles(self.problem.k))
        pair = torch.stack((b.scale, torch.zeros_like(b.scale)), dim=-1).contiguous()
        return quantized_packed_weight(self.packing or "", (blocks, pair, *clone_raw(b)), self.problem)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        packed = require_layout(b, self.packing or "")
        group = (packed.quant.group if packed.quant else None) or 128
        out: Tensor = weight_int4pack_mm(aligned(a.contiguous()), packed.data[0], group, packed.data[1])
        return out


def _inner_tiles(k: int) -> int:
    """Return how many tiles of 16 along K are stored together: the largest number that divides K."""
    return next(tiles for tiles in (8, 4, 2) if k % (16 * tiles) == 0)


class ScaledMmPadded(SlicedKernel, ScaledMm):
    """``torch._scaled_mm`` for a K, N or layout that it does not take on CUDA, padded or copied at every call."""

    template = "scaled_mm_pad"
    is_fallback = True
    device_types = ("cuda",)

    @classmethod
    def why_unsupported_on_cuda(cls, problem: Problem, config: Mapping[str, Scalar], target: Target) -> str:
        if not why_scaled_layout_unsupported(problem):
            return "nothing to pad: _scaled_mm takes these operands as they are"
        return why_scales_unsupported(problem, target.compute_capability)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        scale_a, scale_b, bias = scaled_operands(self.problem, aux)
        return scaled_product(a, b, scale_a, scale_b, bias, self.out_dtype)


class ScaledMmRounded(ScaledMm):
    """``torch._scaled_mm`` with its scales and bias into bfloat16, then the other steps by one kernel: what
    ``torch.compile`` makes of the same operations."""

    template = "scaled_mm_rounded"
    device_types = ("cuda",)

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        super().__init__(problem, candidate)
        self.rounding = Rounding(self.fused.steps, problem.out_dtype)

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        if len(problem.epilogue) <= cls.fused_prefix(problem).steps:
            return "torch._scaled_mm computes all"
        if problem.out_dtype != "bfloat16":  # results of float16 may overflow before the last steps
            return "what torch.compile runs for bfloat16 results"
        return super().why_unsupported(scaled_alone(problem), config)

    @classmethod
    def why_unsupported_on_cuda(cls, problem: Problem, config: Mapping[str, Scalar], target: Target) -> str:
        return super().why_unsupported_on_cuda(scaled_alone(problem), config, target)

    @classmethod
    def remaining_steps(cls, problem: Problem) -> tuple[Epilogue | None, str]:
        return problem.epilogue[cls.fused_prefix(problem).steps :], ""

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        return super().product(a, b, aux[: self.fused.tensors])


def scaled_alone(problem: Problem) -> Problem:
    """Return the Problem of fp8 operands without the steps behind the scales and the bias of ``_scaled_mm``."""
    return replace(problem, epilogue=problem.epilogue[: ScaledMm.fused_prefix(problem).steps])


class ScaledMmWide(AtenKernel):
    """``torch._scaled_mm`` with scales of 1 into float32, followed by the whole epilogue, whatever its steps are."""

    template = "scaled_mm_wide"
    family = ("scaled_mm",)
    device_types = ("cuda",)
    accumulator = "float32"

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        return "an operand is empty" if min(problem.m, problem.n, problem.k) == 0 else ""

    @classmethod
    def why_unsupported_on_cuda(cls, problem: Problem, config: Mapping[str, Scalar], target: Target) -> str:
        if not ScaledMm.why_illegal(problem, {}) and not why_scales_unsupported(problem, target.compute_capability):
            return "_scaled_mm does all of it in one step"
        return why_fp8_unsupported(problem, target.compute_capability)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        return scaled_wide(a, b)


def scaled_wide(a: Tensor, b: Tensor) -> Tensor:
    """Return the unscaled fp8 product ``a @ b`` in float32."""
    one = torch.ones((), device=a.device)
    return scaled_product(a, b, one, one, None, torch.float32)
