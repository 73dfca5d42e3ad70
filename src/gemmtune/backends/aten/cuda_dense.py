"""Floating-point products that only CUDA offers: results from the float32 accumulator, fused activations, padding.

Each also runs on a CPU (converting its operands to a wide dtype), where it is never a candidate, so that its arithmetic
is tested on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.candidate import Scalar
from ...core.problem import Problem
from ...core.torch_compat import addmm_activation
from ...core.weights import PackedWeight
from .cuda_rules import HALVES
from .dense import PADDED, why_not_one_float_dtype
from .fusion import Fused, addmm_prefix
from .kernel import OutVariantKernel, SlicedKernel, dense_packed_weight, require_layout, why_not_packable
from .padding import ALIGN, as_rows, padded, round_up, wide_bmm, wide_mm


def _why_not_half(problem: Problem) -> str:
    reason = why_not_one_float_dtype(problem)
    return reason or ("" if problem.a.dtype in HALVES else f"for bfloat16 and float16; got {problem.a.dtype}")


class MmWide(OutVariantKernel):
    """``torch.mm(.., out_dtype=float32)``: the unrounded accumulator, for a wider output or an epilogue of any kind."""

    template = "mm_wide"
    device_types = ("cuda",)
    accumulator = "float32"

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        if not problem.epilogue and problem.out_dtype == problem.a.dtype:
            return "the output is rounded to the operands' dtype at once, as torch.mm does"
        return _why_not_half(problem)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        return wide_mm(a, b)

    def product_out(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        if a.is_cuda:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
        else:
            out.copy_(wide_mm(a, b))


class BmmWide(MmWide):
    """``torch.bmm(.., out_dtype=float32)``."""

    template = "bmm_wide"
    family = ("bmm",)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        return wide_bmm(a, b)

    def product_out(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(wide_bmm(a, b))


class MmActivated(OutVariantKernel):
    """``torch._addmm_activation``: cuBLASLt's epilogue of bias and relu, or bias and gelu (in its tanh form)."""

    template = "addmm_act"
    device_types = ("cuda",)
    operators = ("addmm_activation",)

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        fused = addmm_prefix(problem)
        if fused.axis != "col" or fused.beta != 1.0:
            return "_addmm_activation wants a bias first, of the operands' dtype"
        if len(problem.epilogue) == fused.steps or problem.epilogue[fused.steps].kind not in ("relu", "gelu_tanh"):
            return "_addmm_activation wants relu or gelu (tanh) after the bias"
        return why_not_one_float_dtype(problem)

    @classmethod
    def fused_prefix(cls, problem: Problem) -> Fused:
        fused = addmm_prefix(problem)
        steps = min(fused.steps + 1, len(problem.epilogue))
        return fused._replace(steps=steps)

    def prepare(self, config: Mapping[str, Scalar]) -> None:
        self._gelu = self.problem.epilogue[self.fused.steps - 1].kind == "gelu_tanh"

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        result: Tensor = addmm_activation(aux[0], a, b, alpha=self.fused.alpha, use_gelu=self._gelu)
        return result

    def product_out(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        addmm_activation(aux[0], a, b, alpha=self.fused.alpha, use_gelu=self._gelu, out=out)


class MmPadded(SlicedKernel):
    """``torch.mm`` with zero padding for operands whose rows are not a multiple of 16 bytes, so that tensor cores can
    load full rows."""

    template = "mm_pad"
    device_types = ("cuda",)

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        reason = _why_not_half(problem)
        if reason:
            return reason
        if min(problem.m, problem.n, problem.k) == 0:
            return "an operand is empty"
        aligned = not (problem.k % 8 or problem.n % 8)
        return "K and N are multiples of 8: nothing to pad" if aligned else ""

    @classmethod
    def product_dtype(cls, problem: Problem) -> str:
        direct = not problem.epilogue and problem.out_dtype == problem.a.dtype
        return problem.a.dtype if direct else "float32"

    @classmethod
    def scratch_bytes(cls, problem: Problem) -> int:
        rows = problem.m + (round_up(problem.n, ALIGN) if cls.layout(problem, {}) is None else 0)
        return super().scratch_bytes(problem) + 2 * round_up(problem.k, ALIGN) * rows

    def matrix(self, b: Any) -> Tensor:
        """Return B padded with zeros to multiples of 16 [K', N']."""
        inner, columns = round_up(self.problem.k, ALIGN), round_up(self.problem.n, ALIGN)
        return padded(b.t(), columns, inner).t() if b.stride(0) == 1 else padded(b, inner, columns)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        right = self.matrix(b)
        left = padded(as_rows(a), a.shape[0], right.shape[0])
        direct = self.product_dtype(self.problem) == self.problem.a.dtype
        return (torch.mm(left, right) if direct else wide_mm(left, right))[:, : self.problem.n]


class MmPaddedOnce(MmPadded):
    """``MmPadded`` with a constant weight that is padded once, so that a call pads only the activations."""

    template = "mm_pad_copy"

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        return why_not_packable(problem) or super().why_unsupported(problem, config)

    @classmethod
    def layout(cls, problem: Problem, config: Mapping[str, Scalar]) -> str | None:
        return PADDED

    def matrix(self, b: Any) -> Tensor:
        return require_layout(b, PADDED).data[0]

    def pack(self, b: Any) -> PackedWeight:
        return padded_packed_weight(b, self.problem)


def padded_packed_weight(b: Tensor, problem: Problem) -> PackedWeight:
    """Return B [K, N] as a PackedWeight: a column-major copy, padded with zeros to multiples of 16."""
    rows = padded(b.t(), round_up(problem.n, ALIGN), round_up(problem.k, ALIGN)).contiguous()
    data = rows.clone() if rows.data_ptr() == b.data_ptr() else rows
    return dense_packed_weight(PADDED, data.t(), problem)
