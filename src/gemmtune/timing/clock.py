"""Clocks: how long does a call take? The race is written against the protocol; tests race on a simulated one."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

Run = Callable[[int], object]
"""``run(i)``: one call on the operand set ``i % sets``."""

Latency = Literal["graph", "eager"]
"""What a GPU's calls are timed as: nodes of a CUDA graph, or launches from Python one by one."""

_MAX_CALLS = 10_000
_SLOW = 20e-3  # a call this long is timed alone, and needs no second look


FLOOR_S = 500e-6
"""What one timing lasts at least: the timer's own cost vanishes, and 8 ms stalls stay rare."""


class Clock(Protocol):
    """Times callables. Rotation indices grow from call to call over all callables, so operands are always cold.

    duel_s: what a timing of a duel lasts at least, so that the device is as busy as whoever is served keeps it.
    """

    duel_s: float

    def now(self) -> float:
        """Seconds since some fixed moment: what budgets are counted in."""

    def calls_for(self, run: Run, floor_s: float) -> int:
        """Warm up, then say how many calls make one timing last at least ``floor_s``."""

    def time_round(self, runs: Sequence[Run], calls: Sequence[int]) -> list[float]:
        """Time each callable once, in the order given, ``calls[j]`` calls of ``runs[j]``; seconds per call."""

    def call_again(self, run: Run, place: int) -> Sequence[int]:
        """Call it the way that it was timed, and wait; returns the operand sets' numbers in the order of the calls.

        place: the number to call it with where each call is a call.
        """

    def conditions(self, run: Run, finalist: bool) -> dict[str, str]:
        """How it timed a callable, for its Sample to say. finalist: what takes time to find out, too."""


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """The garbage collector does not run meanwhile."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class CpuClock:
    """Wall time on this CPU (``perf_counter_ns``); the garbage collector rests while the clock runs.

    chill: empties the caches, called before each timing. most_calls: calls in one timing at most, so that with
    ``chill`` each finds a set of operands that was not used since.
    """

    duel_s = FLOOR_S

    def __init__(self, chill: Callable[[], None] | None = None, most_calls: int = _MAX_CALLS) -> None:
        self._next, self._chill, self._most = 0, chill, most_calls

    def now(self) -> float:
        return time.perf_counter()

    def calls_for(self, run: Run, floor_s: float) -> int:
        warm = self._batch(run, 1)
        if warm > max(_SLOW, floor_s):
            return 1
        calls = 1
        while True:
            took = self._batch(run, calls)
            if took >= floor_s / 2.0 or calls >= self._most:
                return max(1, min(self._most, math.ceil(calls * floor_s / max(took, 1e-9))))
            calls = min(self._most, calls * 4)

    def time_round(self, runs: Sequence[Run], calls: Sequence[int]) -> list[float]:
        with collector_at_rest():
            return [self._timed(run, min(n, self._most)) for run, n in zip(runs, calls, strict=True)]

    def call_again(self, run: Run, place: int) -> Sequence[int]:
        run(place)
        return (place,)

    def conditions(self, run: Run, finalist: bool) -> dict[str, str]:
        return {}

    def _timed(self, run: Run, calls: int) -> float:
        if self._chill is not None:
            self._chill()
        return self._batch(run, calls) / calls

    def _batch(self, run: Run, calls: int) -> float:
        """Seconds for ``calls`` calls."""
        first = self._next
        self._next += calls
        start = time.perf_counter_ns()
        for i in range(first, first + calls):
            run(i)
        return (time.perf_counter_ns() - start) * 1e-9
