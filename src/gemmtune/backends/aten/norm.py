"""A norm in front of a product by a kernel of its own, then any ATen formulation of the product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...core.epilogue import Step
from ...core.problem import Problem, bits
from ...core.weights import PackedWeight
from ..base import Kernel
from .kernel import AtenKernel
from .steps import normalize_rows


def normalize_rows_by_kernel(a: Tensor, norm: Step, weight: Tensor) -> Tensor:
    """Return the result of ``normalize_rows``, on a GPU by a Triton kernel where that takes these tensors. Not
    differentiable."""
    if a.is_cuda:
        # Imported when it is needed: the Triton backend's modules take time that ``import gemmtune`` must not.
        from ..triton.rms_norm import rms_norm_of

        out = a.new_empty(a.shape)
        if rms_norm_of(norm.value).run(a, weight, out):
            return out
    return normalize_rows(a, norm, weight)


class NormThen(Kernel):
    """The kernel of a Problem whose A is normalised: ``normalize_rows_by_kernel``, then another kernel.

    product: the kernel of ``problem.without_norm()``.
    """

    counts_writes = True

    def __init__(self, problem: Problem, product: AtenKernel) -> None:
        norm = problem.norm
        assert norm is not None
        self.problem, self.candidate, self.packing = problem, product.candidate, product.packing
        self.workspace_bytes = product.workspace_bytes + problem.m * problem.k * bits(problem.a.dtype) // 8
        rounding = product.rounding  # behind the norm, which is the first step
        self.rounding = None if rounding is None else rounding._replace(steps=rounding.steps + 1)
        self._norm, self._product = norm, product

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        self._product.run(normalize_rows_by_kernel(a, self._norm, aux[0]), b, aux[1:], out)

    def functional(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        return self._product.functional(normalize_rows_by_kernel(a, self._norm, aux[0]), b, aux[1:])

    def keep_torch_flags(self) -> None:
        self._product.keep_torch_flags()

    def pack(self, b: Any) -> PackedWeight:
        return self._product.pack(b)
