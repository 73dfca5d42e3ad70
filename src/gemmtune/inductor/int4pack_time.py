"""The time of PyTorch's operator for int4 weights.

It takes part in no race: on GPUs its result is outside of the error bound, and nowhere has a Problem zeros that are
added after scaling. So it is timed by itself, on random operands, while a graph is compiled.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from statistics import median

import torch

from ..backends.aten.steps import dtype_of
from ..core.problem import Problem
from ..dispatch.runtime import current_target
from ..ops.int4pack import multiply
from ..timing import devices
from ..timing.eviction import can_evict, evict
from ..timing.flush import Flush
from .hooks import outside_of_compilation

log = logging.getLogger("gemmtune")

_REPEATS = 3  # each times a few calls


@functools.lru_cache(maxsize=1024)
def operator_s(
    problem: Problem, shape: tuple[int, ...], dtype: torch.dtype, scale_dtype: torch.dtype, device: torch.device
) -> float | None:
    """Return the seconds of a call of ``_weight_int4pack_mm`` with the weight in memory, not in a cache. None where
    there is no memory for its operands. Remembered for this process.

    problem: the product's, without what is in front of it and behind it. shape, dtype: of the packed weight.
    scale_dtype: of the scales and zeros.
    """
    group = (problem.b.quant.group if problem.b.quant is not None else None) or problem.k
    target = current_target(device)
    try:
        with outside_of_compilation():
            a = torch.randn(problem.m, problem.k, device=device).to(dtype_of(problem.a.dtype))
            bytes_shape = (*shape[:-1], shape[-1] * dtype.itemsize)
            packed = torch.randint(256, bytes_shape, dtype=torch.uint8, device=device).view(dtype)
            scales_and_zeros = torch.rand(problem.k // group, problem.n, 2, device=device).to(scale_dtype)
            evict_weight: Callable[[], None] = functools.partial(evict, [packed, scales_and_zeros])
            flush = evict_weight if can_evict(target) else Flush(problem, target)
            timing = devices.of(target)

            def call() -> None:
                multiply(a, packed, group, scales_and_zeros)

            times = [timing.screening_times(call, flush, None, None) for _ in range(_REPEATS)]
    except torch.OutOfMemoryError as error:
        log.info("PyTorch's operator serves an int4 weight: it could not be timed (%s)", error)
        return None
    return median(second for seconds in times for second in seconds)
