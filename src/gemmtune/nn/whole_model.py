"""Whether a whole model is faster with gemmtune's weights: both forms are timed in pairs, in random order."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch

from ..timing.stats import Interval, ratio_interval

log = logging.getLogger("gemmtune")

_SECONDS = 2.0  # a comparison takes about that long, or _LEAST pairs, but no longer than _PATIENCE
_LEAST, _MOST = 6, 200  # an interval needs six
_PATIENCE = 60.0
# A turn repeats a short call for about so long, and so often at most, behind one that is not timed: the first call
# after the weights changed form prepares what serves them, which is nothing to a call of _LONG_S.
_TURN_S, _REPEATS, _LONG_S = 2e-3, 16, 0.2
# Smaller losses are not undone: of all examples together, and of a single one (where chance has as many tries as there
# are examples, so that the interval must be clear of a loss as well).
_NOTICEABLE, _NOTICEABLE_ALONE, _CLEAR_ALONE = 1.01, 1.03, 1.01


@dataclass(frozen=True, slots=True)
class Comparison:
    """Time with gemmtune's weights over time without, as 95% intervals: of all examples together, and of each one."""

    total: Interval
    examples: tuple[Interval, ...]

    @property
    def loss(self) -> str:
        """The loss that a user would notice, in words; empty where there is none."""
        if self.total.lo > 1.0 and self.total.center > _NOTICEABLE:
            return f"({_words(self.total)})"
        for number, found in enumerate(self.examples, 1):
            if found.lo > _CLEAR_ALONE and found.center > _NOTICEABLE_ALONE:
                return (
                    f"on example {number} of {len(self.examples)} ({_words(found)}; all together {_words(self.total)})"
                )
        return ""


def _words(found: Interval) -> str:
    return f"{found.center:.2f}x, {found.lo:.2f}..{found.hi:.2f}"


def can_hold(extra_bytes: int, device: torch.device) -> bool:
    """Whether both forms of the weights fit into half of the memory that is free on ``device``."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return extra_bytes <= free // 2


def compare(
    calls: Sequence[Callable[[], None]], set_form: Callable[[bool], None], devices: Sequence[torch.device]
) -> Comparison | None:
    """Time each of ``calls`` in both forms of the model.

    calls: the model on one example each. set_form: gives the model gemmtune's weights (True) or its ordinary ones
    (False); the caller settles which it ends with. None when a call cannot be repeated, or when all are too slow for
    six pairs in a minute.
    """
    times: dict[bool, list[list[float]]] = {True: [], False: []}
    counts = [0] * len(calls)
    rng, began = random.Random(0), time.perf_counter()
    try:
        for pair in range(_MOST + 1):
            for ours in rng.sample((True, False), 2):
                set_form(ours)
                seconds = [_turn(call, count, devices) for call, count in zip(calls, counts, strict=True)]
                if pair:
                    times[ours].append(seconds)
            if not pair:  # the first pair warms up, and tells how long a call takes
                counts = [_count(each) for each in seconds]
            spent = time.perf_counter() - began
            if spent > (_SECONDS if pair >= _LEAST else _PATIENCE):
                break
    except Exception as error:  # the model's own: a cache that is full after so many calls, say
        log.info("the whole model is not timed: %s: %s", type(error).__name__, error)
        return None
    if len(times[True]) < _LEAST:
        return None
    mine, theirs = times[True], times[False]
    examples = tuple(
        ratio_interval([row[place] for row in mine], [row[place] for row in theirs]) for place in range(len(calls))
    )
    return Comparison(ratio_interval([sum(row) for row in mine], [sum(row) for row in theirs]), examples)


def _count(seconds: float) -> int:
    """How many calls a turn has behind its first one; 0 where the first one is long enough to be timed itself."""
    return 0 if seconds > _LONG_S else min(_REPEATS, max(1, int(_TURN_S / max(seconds, 1e-6))))


def _turn(call: Callable[[], None], count: int, devices: Sequence[torch.device]) -> float:
    """Seconds a call."""
    if count:
        call()
    _synchronize(devices)
    start = time.perf_counter()
    for _ in range(max(1, count)):
        call()
    _synchronize(devices)
    return (time.perf_counter() - start) / max(1, count)


def _synchronize(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
