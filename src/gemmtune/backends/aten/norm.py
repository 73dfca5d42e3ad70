"""A norm in front of a product by a kernel of its own, then any ATen formulation of the product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.epilogue import Epilogue
from ...core.problem import Problem, bits
from ...core.weights import PackedWeight
from ..base import Kernel
from .kernel import AtenKernel, JitCalls
from .steps import dtype_of, normalize_rows


def normalize_rows_by_kernel(a: Tensor, norm: Epilogue, tensors: Sequence[Tensor]) -> Tensor:
    """Return the result of ``normalize_rows``, on a GPU by a Triton kernel where that takes these tensors. Not
    differentiable."""
    if a.is_cuda:
        # Imported when it is needed: the Triton backend's modules take time that ``import gemmtune`` must not.
        from ..triton.row_norm import row_norm_of

        out = a.new_empty(a.shape)
        if row_norm_of(norm[0].kind, norm[0].value).run(a, tensors, out):
            return out
    return normalize_rows(a, norm, tensors)


class NormThen(Kernel):
    """The kernel of a Problem whose A is normalised: ``normalize_rows_by_kernel``, then another kernel.

    product: the kernel of ``problem.without_norm()``.
    """

    counts_writes = True

    def __init__(self, problem: Problem, product: AtenKernel) -> None:
        self.problem, self.candidate, self.packing = problem, product.candidate, product.packing
        self.workspace_bytes = product.workspace_bytes + problem.m * problem.k * bits(problem.a.dtype) // 8
        self._norm, self._product = problem.norm_steps, product
        rounding = product.rounding  # behind the norm, whose steps are the first
        self.rounding = None if rounding is None else rounding._replace(steps=rounding.steps + len(self._norm))

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        rows, rest = self._normalize(a, aux)
        self._product.run(rows, b, rest, out)

    def functional(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        rows, rest = self._normalize(a, aux)
        return self._product.functional(rows, b, rest)

    def _normalize(self, a: Tensor, aux: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the normalised rows, and the tensors of the other steps."""
        count = len(self._norm)
        return normalize_rows_by_kernel(a, self._norm, aux[:count]), aux[count:]

    def jit_calls(self) -> JitCalls:
        """Return what ``AtenKernel.jit_calls`` does, with the kernel of the norm."""
        from ..triton.row_norm import MOST_COLUMNS, row_norm_of

        problem, norm = self.problem, self._norm
        if problem.is_empty or problem.k > MOST_COLUMNS:
            return self._product.jit_calls()
        rows, result = (torch.empty(problem.m, problem.k, dtype=dtype_of(problem.a.dtype), device="meta") for _ in "ab")
        tensors = [torch.empty(problem.k, dtype=dtype_of(str(step.dtype)), device="meta") for step in norm]
        return [(row_norm_of(norm[0].kind, norm[0].value), (rows, tensors, result)), *self._product.jit_calls()]

    def keep_torch_flags(self) -> None:
        self._product.keep_torch_flags()

    def library_algorithm(self, m: int) -> str:
        return self._product.library_algorithm(m)

    def pack(self, b: Any) -> PackedWeight:
        return self._product.pack(b)
