"""Whether a whole model is faster with packed weights: both forms are timed in pairs, in random order."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence

import psutil
import torch

from ..measure.stats import Interval, ratio_interval

log = logging.getLogger("gemmtune")

_SECONDS = 2.0  # a comparison takes about that long, or _LEAST pairs, but no longer than _PATIENCE
_LEAST, _MOST = 6, 25  # an interval needs six
_PATIENCE = 60.0
_NOTICEABLE = 1.01  # a smaller loss is not undone


def can_hold(extra_bytes: int, device: torch.device) -> bool:
    """Whether both forms of the weights fit into half of the memory that is free on ``device``."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return extra_bytes <= free // 2


def compare(run: Callable[[], None], pack: Callable[[bool], None], devices: Sequence[torch.device]) -> Interval | None:
    """Time of ``run`` with packed weights over its time without, with a 95% interval.

    pack: gives the model packed (True) or ordinary (False) weights; the caller settles which it ends with. None when
    ``run`` cannot be repeated, or is too slow for six pairs in a minute.
    """
    times: dict[bool, list[float]] = {True: [], False: []}
    rng, began = random.Random(0), time.perf_counter()
    try:
        for pair in range(_MOST + 1):
            for packed in rng.sample((True, False), 2):
                pack(packed)
                seconds = _timed(run, devices)
                if pair:  # the first pair warms up
                    times[packed].append(seconds)
            seconds = time.perf_counter() - began
            if seconds > (_SECONDS if pair >= _LEAST else _PATIENCE):
                break
    except Exception as error:  # the model's own: a cache that is full after so many calls, say
        log.info("the whole model is not timed: %s: %s", type(error).__name__, error)
        return None
    return ratio_interval(times[True], times[False]) if len(times[True]) >= _LEAST else None


def is_slower(found: Interval) -> bool:
    """Whether the interval shows a loss that a user would notice."""
    return found.lo > 1.0 and found.center > _NOTICEABLE


def _timed(run: Callable[[], None], devices: Sequence[torch.device]) -> float:
    cuda = [device for device in devices if device.type == "cuda"]
    for device in cuda:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    for device in cuda:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
