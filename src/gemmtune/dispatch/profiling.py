"""Events of torch.profiler for the calls of ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..core.torch_compat import RecordFunction, profiler


def run_profiled(key: Any, function: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
    """Call ``function(*args)``; while a profiler records, inside an event ``gemmtune::<op>`` with the args' shapes.

    key: the call's, or the op's name; None for a call without a key, which has no event.
    """
    if not profiler._is_profiler_enabled or key is None:
        return function(*args)
    name = key if isinstance(key, str) else next(part for part in key if isinstance(part, str))
    with RecordFunction(f"gemmtune::{name}", args):
        return function(*args)
