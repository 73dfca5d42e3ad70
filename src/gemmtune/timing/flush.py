"""Emptying the last-level cache between timings."""

from __future__ import annotations

import torch

from ..core.devices import is_host
from ..core.problem import Problem
from ..core.target import Target
from ..verify.inputs import operand_bytes

_DEFAULT_LLC = 32 << 20
_FLUSH_SHARE = 2.0  # multiple of the last-level cache: random replacement keeps some lines longer than its size
_MAX_FLUSH_BYTES = 128 << 20
COLD_SHARE = 3.0  # operand sets that together take this multiple of the cache evict one another


class Flush:
    """A flush of the last-level cache, by reading twice as much memory; it does nothing for operands of thrice the
    cache.

    On a GPU the read is enqueued on the current stream. (Writing would leave dirty lines, which have to be written back
    at the cost of the next call.)
    """

    def __init__(self, problem: Problem, target: Target) -> None:
        size = last_level_cache(target)
        is_needed = operand_bytes(problem) < COLD_SHARE * size
        bytes_ = (
            int(_FLUSH_SHARE * size) if not is_host(target.device) else min(int(_FLUSH_SHARE * size), _MAX_FLUSH_BYTES)
        )
        device = target.torch_device
        self._memory = torch.ones(bytes_ // 4, dtype=torch.int32, device=device) if is_needed else None

    def __call__(self) -> None:
        if self._memory is not None:
            self._memory.max()


def last_level_cache(target: Target) -> int:
    """Return the bytes of the target's last-level cache, a GPU's L2 (32 MiB where it is unknown)."""
    caches = target.caches if is_host(target.device) else target.caches[2:]
    return next((size for size in reversed(caches) if size), _DEFAULT_LLC)
