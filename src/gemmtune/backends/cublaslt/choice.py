"""The algorithm that cuBLAS chooses for a product at each M.

PyTorch's ops leave the choice to cuBLAS, whose ranking cuBLASLt tells. On an H200 the first algorithm of the ranking
changes at exactly the M at which PyTorch's op runs another kernel (``benchmarks/library_algorithms.py``).
"""

from __future__ import annotations

import functools

import torch

from ...core.errors import KernelError, UnsupportedError
from ...core.problem import Problem
from ..gpu.rules import ALIGN
from .library import Call, Layouts, Operation
from .product import WORKSPACE, describe_product, why_unsupported


def chosen_algorithm(problem: Problem, m: int) -> str:
    """Return a name of the algorithm that cuBLAS chooses for a Problem with ``m`` rows, whose own M does not count.
    Empty where cuBLASLt does not support the product, or has no algorithm for it.

    The first call for a Problem makes descriptors; later ones take 90 to 180 us beside an H200 (a script
    that was not kept).
    """
    try:
        operation = _operation_of(problem)
        if operation is None:
            return ""
        call = Call(describe_product(problem, m), torch.cuda.current_device(), operation, Layouts())
        (best,) = call.ranked_algorithms(1, WORKSPACE, ALIGN)
    except (KernelError, UnsupportedError):
        return ""
    return "-".join(f"{word:x}" for word in best.algorithm.data)


@functools.lru_cache(maxsize=2)
def _operation_of(problem: Problem) -> Operation | None:
    """Return the Operation of a Problem; None where cuBLASLt does not support it."""
    return None if why_unsupported(problem) else Operation(describe_product(problem, problem.m))
