"""Floating-point products: mm and addmm (raw, transposed, with a copied weight, through oneDNN, rounded before further
steps), bmm, and the composite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.candidate import Candidate, Scalar
from ...core.epilogue import Epilogue
from ...core.problem import Problem
from ...core.target import Target
from ...core.torch_compat import MKLDNN_SUPPORTS, linear_pointwise, reorder_linear_weight
from ...core.weights import PackedWeight, QuantWeight
from ..base import Rounding
from .cuda_rules import why_too_many_rows
from .fusion import Fused, addmm_prefix, mkldnn_prefix, remaining_epilogue
from .kernel import (
    FLOATS,
    AtenKernel,
    CopiedKernel,
    OutVariantKernel,
    dense_packed_weight,
    dense_weight_bytes,
    require_layout,
    why_not_packable,
)
from .quantized import IntMm, dequantize
from .steps import dtype_name, dtype_of

# M for which oneDNN chooses the blocked layout. Its choice was the same for every M measured, from 1 to 256.
_MKLDNN_ROWS = 16
PADDED = "aten:pad16"  # column-major, with zeros up to multiples of 16


def why_not_one_float_dtype(problem: Problem) -> str:
    """Return why the operands are not of one floating dtype, or empty."""
    if problem.a.dtype not in FLOATS or problem.b.dtype != problem.a.dtype:
        return f"needs one floating dtype; got {problem.a.dtype} and {problem.b.dtype}"
    return ""


class Mm(OutVariantKernel):
    """``torch.mm``, or ``torch.addmm`` when the epilogue starts as addmm does: the op that PyTorch runs."""

    template = "mm"
    is_fallback = True

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        return why_not_one_float_dtype(problem)

    @classmethod
    def fused_prefix(cls, problem: Problem) -> Fused:
        return addmm_prefix(problem)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        fused = self.fused
        if not fused.tensors:
            return torch.mm(a, self.matrix(b))
        return torch.addmm(self._addend(aux[0]), a, self.matrix(b), beta=fused.beta, alpha=fused.alpha)

    def product_out(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        fused = self.fused
        if not fused.tensors:
            torch.mm(a, self.matrix(b), out=out)
        else:
            addend = self._addend(aux[0])
            torch.addmm(addend, a, self.matrix(b), beta=fused.beta, alpha=fused.alpha, out=out)

    def library_product(self) -> Problem | None:
        dtype = self.product_dtype(self.problem)
        return replace(self.problem, epilogue=self.problem.epilogue[: self.fused.steps], out_dtype=dtype)

    def _addend(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(-1) if self.fused.axis == "row" else tensor


class MmRounded(Mm):
    """``torch.mm`` (or ``addmm``), rounded to bfloat16, then the other steps by one kernel: what ``torch.compile``
    makes of the same operations. An element of the result moves 6 bytes, one of ``MmWide``'s 10."""

    template = "mm_rounded"
    has_cpu_kernel_behind = True

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        super().__init__(problem, candidate)
        self.rounding = Rounding(self.fused.steps, problem.a.dtype)

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        if not remaining_epilogue(problem, problem.a.dtype, addmm_prefix(problem))[1]:
            return "torch.mm or addmm computes all that rounds"
        if {problem.a.dtype, problem.out_dtype} != {"bfloat16"}:
            # The product of float16 may overflow although the result is finite.
            return "what torch.compile runs for bfloat16 operands and results"
        return super().why_unsupported(problem, config)

    @classmethod
    def remaining_steps(cls, problem: Problem) -> tuple[Epilogue | None, str]:
        return problem.epilogue[cls.fused_prefix(problem).steps :], ""


class MmTransposed(Mm):
    """``out^T = B^T A^T``: another loop order inside the BLAS library."""

    template = "mm_t"
    is_fallback = False

    @classmethod
    def why_unsupported_on_cuda(cls, problem: Problem, config: Mapping[str, Scalar], target: Target) -> str:
        return why_too_many_rows(problem)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
        self.product_out(a, b, aux, out)
        return out

    def product_out(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        if not a.is_cuda:
            self._transposed_out(a, b, aux, out.t())
        elif a.shape[0] == 1:
            self._transposed_out(a, b, aux, out.view(-1, 1))
        else:  # writing into out.t() would give cuBLAS exactly the call that torch.mm gives it
            flipped = torch.empty(b.shape[1], a.shape[0], dtype=out.dtype, device=a.device)
            self._transposed_out(a, b, aux, flipped)
            out.copy_(flipped.t())

    def _transposed_out(self, a: Tensor, b: Any, aux: Sequence[Tensor], flipped: Tensor) -> None:
        """Write the transposed product into ``flipped`` [N, M]."""
        fused = self.fused
        if not fused.tensors:
            torch.mm(b.t(), a.t(), out=flipped)
            return
        addend = aux[0]
        if fused.axis in ("col", "full"):
            addend = addend.t() if addend.dim() == 2 else addend.unsqueeze(-1)
        torch.addmm(addend, b.t(), a.t(), beta=fused.beta, alpha=fused.alpha, out=flipped)


class MmCopied(CopiedKernel, Mm):
    """``torch.mm`` with a constant weight that is copied once into the other memory order."""

    template = "mm_copy"


class Mkldnn(AtenKernel):
    """oneDNN's linear with a weight that is reordered once into oneDNN's blocked layout, which is the op that a frozen
    torch.compile model runs."""

    template = "mkldnn"
    device_types = ("cpu",)
    operators = ("reorder_linear_weight", "linear_pointwise")

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        reason = why_not_packable(problem) or why_not_one_float_dtype(problem)
        if reason:
            return reason
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return "this torch has no oneDNN"
        if min(problem.m, problem.n, problem.k) == 0:
            return "oneDNN makes no primitive for an empty operand"
        return _mkldnn_dtype(problem.a.dtype)

    @classmethod
    def fused_prefix(cls, problem: Problem) -> Fused:
        return mkldnn_prefix(problem)

    @classmethod
    def layout(cls, problem: Problem, config: Mapping[str, Scalar]) -> str | None:
        return f"aten:mkldnn/{problem.b.dtype}/m{_MKLDNN_ROWS}"

    def pack(self, b: Any) -> PackedWeight:
        data = reorder_linear_weight(b.t().contiguous(), _MKLDNN_ROWS)
        return dense_packed_weight(self.packing or "", data, self.problem)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        fused, weight = self.fused, require_layout(b, self.packing or "").data[0]
        bias = aux[0] if fused.axis else None
        if fused.binary:
            other = aux[fused.tensors - 1]
            out: Tensor = linear_pointwise.binary(a, other, weight, bias, fused.binary)
            return out
        activation, algorithm = fused.activation
        result: Tensor = linear_pointwise(a, weight, bias, activation, [], algorithm)
        return result


def _mkldnn_dtype(dtype: str) -> str:
    if dtype == "float64":
        return "oneDNN has no float64 matmul"
    supports = MKLDNN_SUPPORTS.get(dtype)
    if supports is not None and not supports():
        return f"oneDNN has no {dtype} on this CPU"
    return ""


class Bmm(OutVariantKernel):
    """``torch.bmm``."""

    template = "bmm"
    is_fallback = True
    family = ("bmm",)

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        return why_not_one_float_dtype(problem)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        return torch.bmm(a, b)

    def product_out(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        torch.bmm(a, b, out=out)


class BmmTransposed(Bmm):
    """``out^T = B^T A^T`` for every matrix of the batch."""

    template = "bmm_t"
    is_fallback = False

    @classmethod
    def why_unsupported_on_cuda(cls, problem: Problem, config: Mapping[str, Scalar], target: Target) -> str:
        return why_too_many_rows(problem)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        out = torch.bmm(b.mT, a.mT).mT
        return out.contiguous() if a.is_cuda else out

    def product_out(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(torch.bmm(b.mT, a.mT).mT)


class Composite(AtenKernel):
    """The formulation that is always legal: convert both operands to a wide dtype (float32, or float64 for integers and
    doubles), multiply, then run the epilogue."""

    template = "composite"
    is_fallback = True
    family = ("mm", "bmm", "int_mm", "mixed_mm", "scaled_mm")

    @classmethod
    def runs_as_pytorch(cls, problem: Problem) -> bool:
        """Whether plain PyTorch computes the Problem so: where there is nothing to convert, and where ``torch.mm``,
        ``torch.bmm`` or ``torch._int_mm`` does not compute it. On a CPU with AVX2 these take up to eight times as long
        with 128 rows of bfloat16 or int8: this template is then a kernel that is faster than PyTorch.

        Weight-only and fp8 products always count: ``_weight_int8pack_mm`` takes 20 times as long with 512 rows of
        float32, so that ``dispatch/fallback.py`` calls it for few rows only, and which products ``_scaled_mm`` takes
        depends on the GPU.
        """
        operators = _OPERATORS.get(problem.family)
        if operators is None or problem.a.dtype == cls.product_dtype(problem):
            return True
        return all(each.why_illegal(problem, {}) or each.why_unsupported_on_cpu(problem, {}) for each in operators)

    @classmethod
    def product_dtype(cls, problem: Problem) -> str:
        return {"int_mm": "int32"}.get(problem.family, "float64" if problem.acc == "float64" else "float32")

    @classmethod
    def scratch_bytes(cls, problem: Problem) -> int:
        width = "float64" if problem.family == "int_mm" or problem.acc == "float64" else "float32"
        outputs = 4 * problem.batch * problem.m * problem.n
        nibbles = problem.k * problem.n if problem.b.dtype == "int4" else 0  # a byte each before the conversion
        return outputs + nibbles + dense_weight_bytes(problem, width)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        if self.problem.family == "int_mm":
            # Products of bytes, summed over K < 2^38, are exact in float64; int32 wraps as the hardware's does.
            return torch.matmul(a.double(), b.double()).to(torch.int64).to(torch.int32)
        width = dtype_of(self.product_dtype(self.problem))
        weight = dequantize(b, width) if isinstance(b, QuantWeight) else b.to(width)
        return torch.matmul(a.to(width), weight)


# The operators of the families whose operands plain PyTorch converts only where the operator does not take them. What
# ``torch._int_mm`` does not take on GPUs is padded instead (``IntMmPadded``).
_OPERATORS: dict[str, tuple[type[AtenKernel], ...]] = {"mm": (Mm, MmRounded), "bmm": (Bmm,), "int_mm": (IntMm,)}


def is_dense_layout(layout: str) -> bool:
    """Whether a layout name is one of this module's."""
    return layout in ("aten:row", "aten:col", PADDED) or layout.startswith("aten:mkldnn/")


def unpack_dense(packed: PackedWeight) -> Tensor:
    """Return the raw B [K, N] of a weight packed in a layout of this module, in its original memory order."""
    data = packed.data[0]
    matrix = data.to_dense().t() if data.is_mkldnn else data
    if packed.layout == PADDED:
        matrix = matrix[: packed.k, : packed.n].clone(memory_format=torch.contiguous_format)
    if dtype_name(matrix.dtype) != packed.dtype:
        raise ValueError(f"packed weight says {packed.dtype} and holds {dtype_name(matrix.dtype)}")
    return matrix.contiguous() if packed.raw_order == "row" else matrix.t().contiguous().t()
