"""The comparison of a whole model with and without gemmtune's weights, timed in pairs in random order.

Below, the optimized form of a model is the one with gemmtune's weights, and the original form the one without.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..core.devices import get as get_device
from ..timing.stats import Interval, ratio_interval

log = logging.getLogger("gemmtune")

_SECONDS = 2.0  # a comparison takes about that long, or _LEAST pairs, but no longer than _PATIENCE
_LEAST, _MOST = 6, 200  # pairs; a confidence interval needs six
_PATIENCE = 60.0  # seconds
# One timing of a short call repeats it for about _TURN_S, at most _REPEATS times, after one call that is not timed: the
# first call after the weights changed form prepares the functions that serve them. In a call of _LONG_S that cost is
# negligible.
_TURN_S, _REPEATS, _LONG_S = 2e-3, 16, 0.2
# Ratios up to these are not undone: of all examples together, and of a single one. With many examples one of them may
# seem slower by chance, so that the lower end of its interval must exceed _CLEAR_ALONE as well.
_NOTICEABLE, _NOTICEABLE_ALONE, _CLEAR_ALONE = 1.01, 1.03, 1.01


@dataclass(frozen=True, slots=True)
class Comparison:
    """95% confidence intervals of the time in the optimized form over the time in the original form.

    total: for all examples together. examples: for each example.
    """

    total: Interval
    examples: tuple[Interval, ...]

    @property
    def loss(self) -> str:
        """A slowdown that a user would notice, in words; empty if there is none."""
        if self.total.lo > 1.0 and self.total.center > _NOTICEABLE:
            return f"({_as_text(self.total)})"
        for number, interval in enumerate(self.examples, 1):
            if interval.lo > _CLEAR_ALONE and interval.center > _NOTICEABLE_ALONE:
                return (
                    f"on example {number} of {len(self.examples)} "
                    f"({_as_text(interval)}; all together {_as_text(self.total)})"
                )
        return ""


def _as_text(interval: Interval) -> str:
    return f"{interval.center:.2f}x, {interval.lo:.2f}..{interval.hi:.2f}"


def fits_in_memory(extra_bytes: int, device: torch.device) -> bool:
    """Whether ``extra_bytes`` are at most half of the memory that is free on ``device``."""
    free = get_device(device.type).free_bytes(device)
    return extra_bytes <= free // 2


def compare(
    calls: Sequence[Callable[[], None]], set_form: Callable[[bool], None], devices: Sequence[torch.device]
) -> Comparison | None:
    """Time a model in both forms, and return the comparison. None if a call cannot be repeated, or if the calls are too
    slow for six pairs in a minute.

    calls: one function for each example; it calls the model on it. set_form: brings the model into its optimized (True)
    or original (False) form. The model ends in either of them. devices: those that the model runs on.
    """
    times: dict[bool, list[list[float]]] = {True: [], False: []}
    counts = [0] * len(calls)
    rng, start = random.Random(0), time.perf_counter()
    try:
        for pair in range(_MOST + 1):
            for optimized in rng.sample((True, False), 2):
                set_form(optimized)
                seconds = [_time(call, count, devices) for call, count in zip(calls, counts, strict=True)]
                if pair:
                    times[optimized].append(seconds)
            if not pair:  # the first pair is a warm-up, and shows how long a call takes
                counts = [_repeat_count(each) for each in seconds]
            elapsed = time.perf_counter() - start
            if elapsed > (_SECONDS if pair >= _LEAST else _PATIENCE):
                break
    except Exception as error:  # the model's own error: a cache that is full after so many calls, say
        log.info("the whole model is not timed: %s: %s", type(error).__name__, error)
        return None
    if len(times[True]) < _LEAST:
        return None
    new, old = times[True], times[False]
    examples = tuple(
        ratio_interval([row[index] for row in new], [row[index] for row in old]) for index in range(len(calls))
    )
    return Comparison(ratio_interval([sum(row) for row in new], [sum(row) for row in old]), examples)


def _repeat_count(seconds: float) -> int:
    """Return how many calls a timing has after the one that is not timed; 0 if a call of ``seconds`` is so long that
    the first call itself is timed."""
    return 0 if seconds > _LONG_S else min(_REPEATS, max(1, int(_TURN_S / max(seconds, 1e-6))))


def _time(call: Callable[[], None], count: int, devices: Sequence[torch.device]) -> float:
    """Return the seconds per call of one timing. count: as ``_repeat_count`` returns it."""
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
        get_device(device.type).synchronize(device)
