"""Floating-point products that only CUDA has: results from the float32 accumulator, fused activations, padding.

Each also runs on a CPU (widening its operands), where it is never a candidate: so its arithmetic is tested anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.candidate import Scalar
from ...core.problem import Problem
from ...core.torch_compat import addmm_activation
from ...core.weights import PackedWeight
from .cuda_rules import HALVES
from .dense import PADDED, same_floats
from .fusion import Fused, addmm_prefix
from .kernel import Sliced, WritesOut, constant_b, dense_pack, packed_as
from .padding import ALIGN, as_rows, padded, up, wide_bmm, wide_mm


def _halves(problem: Problem) -> str:
    reason = same_floats(problem)
    return reason or ("" if problem.a.dtype in HALVES else f"for bfloat16 and float16; got {problem.a.dtype}")


class MmWide(WritesOut):
    """``torch.mm(.., out_dtype=float32)``: the accumulator unrounded, for a wider output or an epilogue of any kind."""

    template = "mm_wide"
    cuda_only = True

    @classmethod
    def refuses(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        if not problem.epilogue and problem.out_dtype == problem.a.dtype:
            return "the output is rounded to the operands' dtype at once, as torch.mm does"
        return _halves(problem)

    @classmethod
    def natural(cls, problem: Problem) -> str:
        return "float32"

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        return wide_mm(a, b)

    def write(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
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

    def write(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(wide_bmm(a, b))


class MmActivated(WritesOut):
    """``torch._addmm_activation``: cuBLASLt's epilogue of bias and relu, or bias and gelu (its tanh form)."""

    template = "addmm_act"
    cuda_only = True
    operators = ("addmm_activation",)

    @classmethod
    def refuses(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        fused = addmm_prefix(problem)
        if fused.axis != "col" or fused.beta != 1.0:
            return "_addmm_activation wants a bias first, of the operands' dtype"
        if len(problem.epilogue) == fused.steps or problem.epilogue[fused.steps].kind not in ("relu", "gelu_tanh"):
            return "_addmm_activation wants relu or gelu (tanh) after the bias"
        return same_floats(problem)

    @classmethod
    def fuses(cls, problem: Problem) -> Fused:
        fused = addmm_prefix(problem)
        steps = min(fused.steps + 1, len(problem.epilogue))
        return replace(fused, steps=steps)

    def prepare(self, config: Mapping[str, Scalar]) -> None:
        self._gelu = self.problem.epilogue[self.fused.steps - 1].kind == "gelu_tanh"

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        result: Tensor = addmm_activation(aux[0], a, b, alpha=self.fused.alpha, use_gelu=self._gelu)
        return result

    def write(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        addmm_activation(aux[0], a, b, alpha=self.fused.alpha, use_gelu=self._gelu, out=out)


class MmPadded(Sliced):
    """Operands whose rows are no multiple of 16 bytes, padded with zeros so that tensor cores read them whole."""

    template = "mm_pad"
    cuda_only = True

    @classmethod
    def refuses(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        reason = _halves(problem)
        if reason:
            return reason
        if min(problem.m, problem.n, problem.k) == 0:
            return "an operand is empty"
        aligned = not (problem.k % 8 or problem.n % 8)
        return "K and N are multiples of 8: nothing to pad" if aligned else ""

    @classmethod
    def natural(cls, problem: Problem) -> str:
        direct = not problem.epilogue and problem.out_dtype == problem.a.dtype
        return problem.a.dtype if direct else "float32"

    @classmethod
    def scratch(cls, problem: Problem) -> int:
        rows = problem.m + (up(problem.n, ALIGN) if cls.layout(problem, {}) is None else 0)
        return super().scratch(problem) + 2 * up(problem.k, ALIGN) * rows

    def matrix(self, b: Any) -> Tensor:
        """B with zeros up to multiples of 16 [K', N']."""
        inner, columns = up(self.problem.k, ALIGN), up(self.problem.n, ALIGN)
        return padded(b.t(), columns, inner).t() if b.stride(0) == 1 else padded(b, inner, columns)

    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        right = self.matrix(b)
        left = padded(as_rows(a), a.shape[0], right.shape[0])
        direct = self.natural(self.problem) == self.problem.a.dtype
        return (torch.mm(left, right) if direct else wide_mm(left, right))[:, : self.problem.n]


class MmPaddedOnce(MmPadded):
    """A constant weight padded once, so that only the activations are padded at a call."""

    template = "mm_pad_copy"

    @classmethod
    def refuses(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        return constant_b(problem) or super().refuses(problem, config)

    @classmethod
    def layout(cls, problem: Problem, config: Mapping[str, Scalar]) -> str | None:
        return PADDED

    def matrix(self, b: Any) -> Tensor:
        return packed_as(b, PADDED).data[0]

    def pack(self, b: Any) -> PackedWeight:
        return pad_once(b, self.problem)


def pad_once(b: Tensor, problem: Problem) -> PackedWeight:
    """B [K, N] column-major with zeros up to multiples of 16, in memory of its own."""
    rows = padded(b.t(), up(problem.n, ALIGN), up(problem.k, ALIGN)).contiguous()
    data = rows.clone() if rows.data_ptr() == b.data_ptr() else rows
    return dense_pack(PADDED, data.t(), problem)
