"""The algorithm that cuBLAS chooses for a product at each M.

PyTorch's ops leave the choice to cuBLAS, whose ranking cuBLASLt tells. On an H200 the first algorithm of the ranking
changes at exactly the M at which PyTorch's op runs another kernel (``benchmarks/library_algorithms.py``).
"""

from __future__ import annotations

import functools
import threading

import torch

from ...core.errors import KernelError, UnsupportedError
from ...core.problem import Problem
from ..gpu.rules import ALIGN
from . import library
from .library import Call, Operation
from .product import WORKSPACE, describe_product, why_unsupported


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
        call.set_m(m)
        (best,) = call.ranked_algorithms(1, WORKSPACE, ALIGN)
    except (KernelError, UnsupportedError):
        return ""
    return "-".join(f"{word:x}" for word in best.algorithm.data)


@functools.lru_cache(maxsize=2)
def _call_of(problem: Problem, device: int, thread: int) -> Call | None:
    """Return the Call of a Problem that a thread uses; None where cuBLASLt does not support it."""
    if why_unsupported(problem):
        return None
    product = describe_product(problem, problem.m)
    return Call(product, device, Operation(product))
