"""Loaded cuBLASLt products: one of cuBLASLt's algorithms for a Problem, and its launch."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
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
from .library import Algorithm, Call, Operation
from .product import RANKS, WORKSPACE, Product, describe_product

_MAX_LAUNCHES = 256  # that a kernel caches: of batched products one for each M
_MAX_SIZES = 4096  # values of M for which a launch remembers the algorithm

# The address of an Algorithm, the bytes of workspace that it requires, and the Algorithm itself.
_Choice = tuple[int, int, Algorithm]


class _ThreadOperation(threading.local):
    """A thread's own Operation, since an Operation stores the addresses of a bias and scales."""

    def __init__(self, product: Product) -> None:
        self.operation = Operation(product)


class _ThreadCall(threading.local):
    """A thread's own Call. parts: the Call, its Operation's ``set_pointer``, and the function from its ``bind_run``."""

    def __init__(self, product: Product, device: int, own: _ThreadOperation) -> None:
        call = Call(product, device, own.operation)
        self.parts = call, own.operation.set_pointer, call.bind_run()


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
        self._own = _ThreadOperation(product)
        call = Call(product, device, self._own.operation)
        ranked = call.ranked_algorithms(RANKS, WORKSPACE, ALIGN)
        if rank >= len(ranked):
            raise UnsupportedError(f"cuBLASLt ranks {len(ranked)} algorithms for this product, and none {rank}")
        self._choice = _choice(ranked[rank].algorithm, ranked[rank].workspace)
        self.workspace_bytes = self._choice[1]
        self._bound: dict[tuple[int, ...], Launch] = {}

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        self.bind(a, b, aux)(out, a, b, *aux)

    def bind(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Launch:
        m, device = a.shape[-2], a.device.index
        if self.problem.family != "bmm":
            return self.bind_any_m(a, b, aux)
        return self.of_batch(a.shape[0])._bind_batches(m, device, (a.stride(0), b.stride(0)))

    def bind_any_m(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Launch:
        return self._cached_launch(self.problem.m, a.device.index, (0, 0), launch_aligned)

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
        """Return the launch for M rows (any, of a product that is not batched) and these batch strides, from the
        kernel's cache where it has one.

        misaligned: a function that the launch calls with itself and the operands where one of them starts off a 16-byte
        boundary.
        """
        key = (m, device, *strides)
        launch = self._bound.get(key)
        if launch is None:
            if len(self._bound) >= _MAX_LAUNCHES:
                self._bound.clear()
            launch = self._bound[key] = self._make_launch(m, device, strides, misaligned)
        return launch

    def _make_launch(self, m: int, device: int, strides: tuple[int, int], misaligned: Callable[..., None]) -> Launch:
        product = describe_product(self.problem, m, strides)
        thread_call = _ThreadCall(product, device, self._own)
        stream_of, attributes = torch_compat.stream_of, product.pointers
        row_elements = self.problem.columns * self.problem.batch
        choices: dict[int, _Choice] = {}  # by M

        def launch(out: Tensor, a: Tensor, b: Tensor, *aux: Tensor) -> None:
            call, set_pointer, run = thread_call.parts
            m = out.numel() // row_elements
            if call.m != m:
                call.set_m(m)
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
            choice = choices.get(m)
            if choice is None:
                if len(choices) >= _MAX_SIZES:
                    choices.clear()
                choice = choices[m] = self._choice_for(call)
            algorithm, workspace, _ = choice
            workspace_tensor = alloc_workspace(workspace) if workspace else None  # kept alive until the launch
            scratch = 0 if workspace_tensor is None else workspace_tensor.data_ptr()
            status = run(algorithm, b_ptr, a_ptr, d_ptr, scratch, workspace, stream)
            if status:
                call.retry_or_raise(status, lambda: run(algorithm, b_ptr, a_ptr, d_ptr, scratch, workspace, stream))

        return launch

    def _choice_for(self, call: Call) -> _Choice:
        """Return the kernel's algorithm, with the workspace that it requires for the Call's M; the first that is ranked
        for that M where it is not supported. Raises UnsupportedError where there is none.

        cublasLtMatmul does not refuse to run with less workspace than that (docs/notes/cublaslt.md).
        """
        _, own_workspace, algorithm = self._choice
        workspace = call.required_workspace(algorithm)
        if workspace == own_workspace:
            return self._choice
        if workspace is not None and workspace <= WORKSPACE:
            return _choice(algorithm, workspace)
        (best, *_) = call.ranked_algorithms(1, WORKSPACE, ALIGN)
        return _choice(best.algorithm, best.workspace)


def _choice(algorithm: Algorithm, workspace: int) -> _Choice:
    return ctypes.addressof(algorithm), int(workspace), algorithm
