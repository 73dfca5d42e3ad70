"""Loaded products: one of cuBLASLt's algorithms for a Problem, and its launch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core import torch_compat
from ...core.candidate import Candidate
from ...core.errors import UnsupportedError
from ...core.memory import LOW, require_kernel_operands
from ...core.problem import Problem
from ..base import Kernel, Launch
from ..gpu.alignment import MISALIGNED_MASK, aligned_copy, batch_layouts, batched_launch, launch_aligned
from ..gpu.kernel import alloc_workspace
from ..gpu.rules import ALIGN
from .library import Algorithm, Call
from .product import RANKS, Product, described

_WORKSPACE = 32 << 20  # bytes, as PyTorch gives cuBLASLt on an H100
_BOUND = 256  # launches kept a kernel: one an M


class _Own(threading.local):
    """A thread's own call: it says where a bias and scales are."""

    def __init__(self, product: Product, device: int, algorithm: Algorithm, workspace: int) -> None:
        call = Call(product, device)
        self.held = call, call.point, call.runner(algorithm, workspace)


class RankedKernel(Kernel):
    """The algorithm that cuBLASLt ranks ``rank`` (0: first) for the Problem's own M, with any other M, too, where that
    algorithm can; else the first that it has there. Matrices that start off a 16-byte boundary are copied."""

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        self.problem, self.candidate = problem, candidate
        rank, device = int(candidate["rank"]), torch.cuda.current_device()
        # Batches without gaps, as good as any: what strides there are is not known yet.
        sizes = (problem.m * problem.k, problem.k * problem.n)
        found = Call(described(problem, problem.m, sizes), device).ranked(RANKS, _WORKSPACE, ALIGN)
        if rank >= len(found):
            raise UnsupportedError(f"cuBLASLt ranks {len(found)} algorithms for this product, and none {rank}")
        self._algorithm = found[rank].algorithm
        self.workspace_bytes = int(found[rank].workspace)
        self._bound: dict[tuple[int, ...], Launch] = {}

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        self.bind(a, b, aux)(out, a, b, *aux)

    def bind(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Launch:
        m, device = a.shape[-2], a.device.index
        if self.problem.family != "bmm":
            return self._cached_launch(m, device, (0, 0), launch_aligned)
        return self._bind_batches(m, device, (a.stride(0), b.stride(0)))

    def _bind_batches(self, m: int, device: int, strides: tuple[int, int]) -> Launch:
        """``bind`` for these batch strides of A and B. Algorithms are chosen for operands at multiples of 16 bytes,
        which is said of addresses alone: what batch strides they take is not documented."""
        layouts = batch_layouts(self.problem, m, strides, needs_alignment=True)
        copying = batched_launch(lambda *copies: self._bind_batches(m, device, copies), *layouts)
        if not all(layout.fits for layout in layouts):
            return copying
        return self._cached_launch(m, device, strides, lambda _, *operands: copying(*operands))

    def _cached_launch(self, m: int, device: int, strides: tuple[int, int], misaligned: Callable[..., None]) -> Launch:
        """The launch for M rows and these batch strides, made at their first sight. misaligned: called with it and the
        operands where one of these starts off a 16-byte boundary."""
        key = (m, device, *strides)
        held = self._bound.get(key)
        if held is None:
            if len(self._bound) >= _BOUND:
                self._bound.clear()
            held = self._bound[key] = self._make_launch(m, device, strides, misaligned)
        return held

    def _make_launch(self, m: int, device: int, strides: tuple[int, int], misaligned: Callable[..., None]) -> Launch:
        product = described(self.problem, m, strides)
        call, algorithm = Call(product, device), self._algorithm
        workspace = call.fits(algorithm)
        if workspace is None or workspace > _WORKSPACE:
            (first, *_) = call.ranked(1, _WORKSPACE, ALIGN)
            algorithm, workspace = first.algorithm, int(first.workspace)
        own = _Own(product, device, algorithm, workspace)
        stream_of, places = torch_compat.stream_of, product.pointers

        def launch(out: Tensor, a: Tensor, b: Tensor, *rest: Tensor) -> None:
            call, point, run = own.held
            d_ptr, a_ptr, b_ptr = out.data_ptr(), a.data_ptr(), b.data_ptr()
            if a_ptr < LOW or b_ptr < LOW:
                require_kernel_operands(a, b)
            if (d_ptr | a_ptr | b_ptr) & MISALIGNED_MASK:
                misaligned(launch, out, a, b, *rest)
                return
            aligned = [aligned_copy(tensor) for tensor in rest]  # which live until they are used
            for place, tensor in zip(places, aligned):  # noqa: B905 - as many; saying so costs
                pointer = tensor.data_ptr()
                if pointer < LOW:
                    require_kernel_operands(tensor)
                point(place, pointer)
            stream = stream_of(device)
            space = alloc_workspace(workspace) if workspace else None  # which lives until it is launched
            scratch = 0 if space is None else space.data_ptr()
            status = run(b_ptr, a_ptr, d_ptr, scratch, stream)
            if status:
                call.failed(status, lambda: run(b_ptr, a_ptr, d_ptr, scratch, stream))

        return launch
