"""Loaded cuBLASLt products: one of cuBLASLt's algorithms for a Problem, and its launch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core import torch_compat
from ...core.candidate import Candidate
from ...core.errors import UnsupportedError
from ...core.memory import LOWEST_USUAL_ADDRESS, require_kernel_operands
from ...core.problem import Problem
from ..base import Kernel, Launch
from ..gpu.alignment import MISALIGNED_MASK, aligned_copy, batch_layouts, batched_launch, launch_aligned
from ..gpu.any_batch import AnyBatch
from ..gpu.kernel import alloc_workspace
from ..gpu.rules import ALIGN
from .library import Algorithm, Call, Layouts, Operation
from .product import RANKS, WORKSPACE, Product, describe_product

_MAX_LAUNCHES = 256  # launches that a kernel caches, one for each M


class _ThreadOperation(threading.local):
    """A thread's own Operation, since an Operation stores the addresses of a bias and scales."""

    def __init__(self, product: Product) -> None:
        self.operation = Operation(product)


class _ThreadCall(threading.local):
    """A thread's own Call. parts: the Call, its Operation's ``set_pointer``, and the function from its ``bind_run``."""

    def __init__(
        self, product: Product, device: int, own: _ThreadOperation, layouts: Layouts, algorithm: Algorithm,
        workspace: int,
    ) -> None:  # fmt: skip
        call = Call(product, device, own.operation, layouts)
        self.parts = call, own.operation.set_pointer, call.bind_run(algorithm, workspace)


class RankedKernel(AnyBatch, Kernel):
    """The algorithm that cuBLASLt ranks at ``rank`` for ``m`` rows and ``batch`` matrices, for any M and any batch.

    Where cuBLASLt does not support the algorithm for others, the first that it ranks for them is used. Matrices
    that start off a 16-byte boundary are copied.
    """

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        super().__init__()
        self.problem, self.candidate = problem, candidate
        m, rank, device = int(candidate["m"]), int(candidate["rank"]), torch.cuda.current_device()
        # The batch strides are not known yet; assume batches without gaps.
        strides = (m * problem.k, problem.k * problem.n)
        named = problem.with_size("batch", int(candidate["batch"])) if problem.is_batched else problem
        product = describe_product(named, m, strides)
        self._own, self._layouts = _ThreadOperation(product), Layouts()
        call = Call(product, device, self._own.operation, self._layouts)
        ranked = call.ranked_algorithms(RANKS, WORKSPACE, ALIGN)
        if rank >= len(ranked):
            raise UnsupportedError(f"cuBLASLt ranks {len(ranked)} algorithms for this product, and none {rank}")
        self._algorithm = ranked[rank].algorithm
        self.workspace_bytes = int(ranked[rank].workspace)
        self._bound: dict[tuple[int, ...], Launch] = {}

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        self.bind(a, b, aux)(out, a, b, *aux)

    def bind(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Launch:
        m, device = a.shape[-2], a.device.index
        if self.problem.family != "bmm":
            return self.bind_any_m(a, b, aux)(m)
        return self.of_batch(a.shape[0])._bind_batches(m, device, (a.stride(0), b.stride(0)))

    def bind_any_m(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Callable[[int], Launch]:
        return partial(self._cached_launch, device=a.device.index, strides=(0, 0), misaligned=launch_aligned)

    def _bind_batches(self, m: int, device: int, strides: tuple[int, int]) -> Launch:
        """Return the launch for these batch strides of A and B.

        Algorithms are chosen for operands at multiples of 16 bytes. cuBLASLt's alignment attribute refers to addresses
        only; which batch strides the algorithms support is not documented.
        """
        layouts = batch_layouts(self.problem, m, strides, needs_alignment=True)
        copy_launch = batched_launch(lambda *copy_strides: self._bind_batches(m, device, copy_strides), *layouts)
        if not all(layout.fits for layout in layouts):
            return copy_launch
        return self._cached_launch(m, device, strides, lambda _, *operands: copy_launch(*operands))

    def _cached_launch(self, m: int, device: int, strides: tuple[int, int], misaligned: Callable[..., None]) -> Launch:
        """Return the launch for M rows and these batch strides, from the kernel's cache where it has one.

        misaligned: a function that the launch calls with itself and the operands where one of them starts off a 16-byte
        boundary.
        """
        key = (m, device, *strides)
        launch = self._bound.get(key)
        if launch is None:
            if len(self._bound) >= _MAX_LAUNCHES:
                self._bound.clear()
                self._layouts.clear()
            launch = self._bound[key] = self._make_launch(m, device, strides, misaligned)
        return launch

    def _make_launch(self, m: int, device: int, strides: tuple[int, int], misaligned: Callable[..., None]) -> Launch:
        product = describe_product(self.problem, m, strides)
        call, algorithm = Call(product, device, self._own.operation, self._layouts), self._algorithm
        workspace = call.required_workspace(algorithm)
        if workspace is None or workspace > WORKSPACE:
            (best, *_) = call.ranked_algorithms(1, WORKSPACE, ALIGN)
            algorithm, workspace = best.algorithm, int(best.workspace)
        thread_call = _ThreadCall(product, device, self._own, self._layouts, algorithm, workspace)
        stream_of, attributes = torch_compat.stream_of, product.pointers

        def launch(out: Tensor, a: Tensor, b: Tensor, *aux: Tensor) -> None:
            call, set_pointer, run = thread_call.parts
            d_ptr, a_ptr, b_ptr = out.data_ptr(), a.data_ptr(), b.data_ptr()
            if a_ptr < LOWEST_USUAL_ADDRESS or b_ptr < LOWEST_USUAL_ADDRESS:
                require_kernel_operands(a, b)
            if (d_ptr | a_ptr | b_ptr) & MISALIGNED_MASK:
                misaligned(launch, out, a, b, *aux)
                return
            aligned_aux = [aligned_copy(tensor) for tensor in aux]  # kept alive until the launch
            for attribute, tensor in zip(attributes, aligned_aux):  # noqa: B905 - of equal length; strict= costs time
                address = tensor.data_ptr()
                if address < LOWEST_USUAL_ADDRESS:
                    require_kernel_operands(tensor)
                set_pointer(attribute, address)
            stream = stream_of(device)
            workspace_tensor = alloc_workspace(workspace) if workspace else None  # kept alive until the launch
            scratch = 0 if workspace_tensor is None else workspace_tensor.data_ptr()
            status = run(b_ptr, a_ptr, d_ptr, scratch, stream)
            if status:
                call.retry_or_raise(status, lambda: run(b_ptr, a_ptr, d_ptr, scratch, stream))

        return launch
