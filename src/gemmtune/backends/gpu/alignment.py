"""Copies of operands whose start, or whose batches' starts, are not at multiples of 16 bytes.

GPU kernels load 16 bytes at a time. Leading dimensions are part of the Problem, and a kernel is generated for them.
Addresses and batch strides are known only at a call. docs/notes/cuda.md says what each kernel assumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.memory import require_kernel_operands
from ...core.problem import Problem, bits
from ..base import Launch
from .rules import ALIGN, leading_dimensions

MISALIGNED_MASK = ALIGN - 1  # bits of an address that are 0 at a 16-byte boundary


def is_misaligned(t: Tensor) -> int:
    """Return whether a tensor starts off a 16-byte boundary (0: it does not)."""
    return t.data_ptr() & MISALIGNED_MASK


def aligned_copy(t: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy of it if it starts off a 16-byte boundary."""
    return t.clone(memory_format=torch.contiguous_format) if is_misaligned(t) else t


def launch_aligned(launch: Launch, out: Tensor, a: Tensor, b: Tensor, *extra: Tensor) -> None:
    """Call ``launch`` with copies in the place of those of ``out``, ``a``, ``b`` and the vectors of ``extra`` that are
    not at a 16-byte boundary.

    Each copy has its operand's strides: no two elements of ``a`` or ``b`` may share memory. All copies are allocated
    before anything runs.
    """
    copies = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) if is_misaligned(t) else t
              for t in (out, a, b)]  # fmt: skip
    for source, copy in zip((a, b), copies[1:], strict=True):
        if copy is not source:
            copy.copy_(source)
    launch(*copies, *(aligned_copy(t) if t.dim() == 1 else t for t in extra))
    if copies[0] is not out:
        out.data.copy_(copies[0])  # through .data, since dispatch increments out's version counter for this write


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Memory layout of a batched operand; lengths and strides are in elements.

    size: bytes of an element. count: number of matrices. outer: runs of contiguous elements in a matrix (rows, or
    columns of a column-major one). inner: elements of a run. lead: elements from one run to the next. stride: elements
    from one matrix to the next; 0 where all matrices are one. needs_alignment: whether the kernel assumes that the
    start of every matrix is aligned as the starts of its runs are.
    """

    size: int
    count: int
    outer: int
    inner: int
    lead: int
    stride: int
    needs_alignment: bool

    @property
    def fits(self) -> bool:
        """Whether the kernel supports this batch stride: it assumes no more alignment of it than of the leading
        dimension."""
        if not self.needs_alignment or self.count == 1:
            return True
        return self.stride * self.size % math.gcd(ALIGN, self.lead * self.size) == 0

    @property
    def copy_stride(self) -> int:
        """The number of elements from one matrix to the next in ``empty_copy``."""
        return self.outer * self.lead if self.stride else 0

    def empty_copy(self, t: Tensor) -> Tensor:
        """Return memory for a copy of ``t``, [count, outer, inner]; count is 1 where all matrices are one."""
        count = self.count if self.stride else 1
        return torch.empty((count, self.outer, self.lead), dtype=t.dtype, device=t.device)[..., : self.inner]

    def as_runs(self, t: Tensor) -> Tensor:
        """Return the memory of ``t`` as [count, outer, inner]; count is 1 where all matrices are one."""
        count = self.count if self.stride else 1
        return t.as_strided((count, self.outer, self.inner), (self.stride, self.lead, 1))


def batch_layouts(
    problem: Problem, m: int, strides: tuple[int, int], needs_alignment: bool
) -> tuple[BatchLayout, BatchLayout]:
    """Return the memory layouts of A and B of a batched Problem for m rows.

    strides: elements from one matrix of A, and of B, to the next. needs_alignment: see BatchLayout.
    """
    lda, ldb, _ = leading_dimensions(problem, m)
    a_sizes = (m, problem.k) if problem.a.layout.order == "row" else (problem.k, m)
    b_sizes = (problem.k, problem.n) if problem.b.layout.order == "row" else (problem.n, problem.k)
    size, count = bits(problem.a.dtype) // 8, problem.batch
    return (
        BatchLayout(size, count, *a_sizes, lda, strides[0], needs_alignment),
        BatchLayout(size, count, *b_sizes, ldb, strides[1], needs_alignment),
    )


def batched_launch(bind: Callable[[int, int], Launch], a_layout: BatchLayout, b_layout: BatchLayout) -> Launch:
    """Return a launch that copies each operand that starts off a 16-byte boundary or has an unsupported batch stride.

    bind: returns the launch for given batch strides of A and B. Batches whose matrices are expanded or overlap are
    copied matrix by matrix. All copies are allocated before anything runs.
    """

    def launch(out: Tensor, a: Tensor, b: Tensor, *extra: Tensor) -> None:
        require_kernel_operands(a, b)  # the copies below read and write memory, too
        operands, strides, sources = [a, b], [a_layout.stride, b_layout.stride], []
        for index, layout in enumerate((a_layout, b_layout)):
            t = operands[index]
            if is_misaligned(t) or not layout.fits:
                operands[index], strides[index] = layout.empty_copy(t), layout.copy_stride
                sources.append((operands[index], layout.as_runs(t)))
        result = out
        if is_misaligned(out):
            result = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
        for copy, source in sources:
            copy.copy_(source)
        bind(*strides)(result, *operands, *extra)
        if result is not out:
            out.data.copy_(result)

    return launch
