"""The algorithm that cuBLAS chooses for a product at each M.

PyTorch's ops leave the choice to cuBLAS, whose ranking cuBLASLt tells. On an H200 the first algorithm of the ranking
changes at exactly the M at which PyTorch's op runs another kernel (``benchmarks/library_algorithms.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...core import torch_compat
from ...core.errors import KernelError, UnsupportedError
from ...core.problem import Problem
from ..gpu.rules import ALIGN
from . import library
from .library import Algorithm, Call, Operation
from .product import WORKSPACE, describe_product, why_unsupported

_FEW_ROWS = 16
_LOADED: set[tuple[int | None, str]] = set()  # the devices and the Problems' plan keys of ``load_chosen_kernels``


def chosen_algorithm(problem: Problem, m: int) -> str:
    """Return a name of the algorithm that cuBLAS chooses for a Problem with ``m`` rows, whose own M does not count.
    Empty where cuBLASLt does not support the product, or has no algorithm for it.

    The first call for a Problem makes descriptors.
    """
    try:
        library.library()  # raises UnsupportedError where there is none
        call = _call_of(problem, torch.cuda.current_device(), threading.get_ident())
        if call is None:
            return ""
        return _name_of(_chosen(call, m))
    except (KernelError, UnsupportedError):
        return ""


def load_chosen_kernels(problem: Problem, sizes: Iterable[int], b: Tensor) -> int:
    """Have cuBLAS load the kernels that it chooses for a Problem at some M, whose own M does not count, by products of
    few rows of uninitialized memory with ``b``, its B. Return the number of algorithms; 0 where there is no cuBLASLt,
    and where this process has loaded those of the Problem before. Raises ValueError for a Problem that is not
    ``is_mm_alone``: those products read tensors that are not given.

    cuBLAS loads a kernel when a product first needs it, for which that call waits: 2 to 3 ms beside an H200, and it has
    some 60 for bf16 1024x1024 (``benchmarks/new_m.py``, new-m-20261130-122133).
    """
    if not problem.is_mm_alone:
        raise ValueError(f"load_chosen_kernels(): expected a product that torch.mm computes alone; got {problem.key}")
    device = b.device
    key = device.index, problem.plan_key
    if key in _LOADED:
        return 0
    _LOADED.add(key)
    try:
        library.library()
        call = _call_of(problem, device.index, threading.get_ident())
    except (KernelError, UnsupportedError):
        return 0
    if call is None:
        return 0
    chosen: dict[str, Algorithm] = {}
    for m in sizes:
        with contextlib.suppress(KernelError, UnsupportedError):  # PyTorch's op will say so
            algorithm = _chosen(call, m)
            chosen[_name_of(algorithm)] = algorithm
    with torch.cuda.device(device), contextlib.suppress(torch.OutOfMemoryError):
        _run_each(call, list(chosen.values()), problem, b)
    return len(chosen)


def _run_each(call: Call, algorithms: Sequence[Algorithm], problem: Problem, b: Tensor) -> None:
    """Multiply a few rows of uninitialized memory by ``b`` with each algorithm that supports them. Raises
    torch.OutOfMemoryError."""
    a = torch.empty(_FEW_ROWS, problem.k, dtype=getattr(torch, problem.a.dtype), device=b.device)
    out = torch.empty(_FEW_ROWS, problem.n, dtype=getattr(torch, problem.out_dtype), device=b.device)
    scratch = torch.empty(WORKSPACE, dtype=torch.uint8, device=b.device)
    addresses = b.data_ptr(), a.data_ptr(), out.data_ptr(), scratch.data_ptr()
    stream, run = torch_compat.stream_of(b.device.index), call.bind_run()
    call.set_m(_FEW_ROWS)
    for algorithm in algorithms:
        workspace = call.required_workspace(algorithm)
        if workspace is not None and workspace <= WORKSPACE:
            run(ctypes.addressof(algorithm), *addresses, WORKSPACE, stream)


def _chosen(call: Call, m: int) -> Algorithm:
    """Return the algorithm that is ranked first for M. Raises UnsupportedError where there is none."""
    call.set_m(m)
    (best,) = call.ranked_algorithms(1, WORKSPACE, ALIGN)
    algorithm: Algorithm = best.algorithm
    return algorithm


def _name_of(algorithm: Algorithm) -> str:
    return "-".join(f"{word:x}" for word in algorithm.data)


@functools.lru_cache(maxsize=2)
def _call_of(problem: Problem, device: int, thread: int) -> Call | None:
    """Return the Call of a Problem that a thread uses; None where cuBLASLt does not support it."""
    if why_unsupported(problem):
        return None
    product = describe_product(problem, problem.m)
    return Call(product, device, Operation(product))
