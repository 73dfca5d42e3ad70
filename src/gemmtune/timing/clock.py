"""Clocks, which measure how long a call takes. The race uses the protocol; tests race on a simulated clock."""

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
_SLOW_S = 20e-3  # a call this long is timed alone, and only once


FLOOR_S = 500e-6
"""What one timing lasts at least: the timer's own cost vanishes, and 8 ms stalls stay rare."""


class Clock(Protocol):
    """A clock that times callables. Indices of operand sets grow from call to call over all callables, so that operands
    are always cold.

    paired_timing_s: the least duration of one timing in a paired test, so that the device is as busy as in serving.
    calibrates_once: whether ``calls_for`` calls a callable once only if that takes 20 ms or longer.
    """

    paired_timing_s: float
    calibrates_once: bool

    def now(self) -> float:
        """Return the seconds since a fixed moment; budgets are counted in them."""

    def calls_for(self, run: Run, floor_s: float) -> int:
        """Warm up, then return how many calls make one timing last at least ``floor_s``."""

    def time_round(self, runs: Sequence[Run], calls: Sequence[int]) -> list[float]:
        """Time each callable once, in the given order, with ``calls[j]`` calls of ``runs[j]``. Return seconds per
        call."""

    def call_again(self, run: Run, operand_set: int) -> Sequence[int]:
        """Repeat the call the way that it was timed, and wait. Return the operand sets' numbers in the order of the
        calls.

        operand_set: the number of the operand set to call it with, where the call is not a replayed graph.
        """

    def conditions(self, run: Run, finalist: bool) -> dict[str, str]:
        """Return how a callable was timed, for its Sample. finalist: include conditions that take time to find out."""


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable the garbage collector within the context."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CpuClock:
    """Wall time on this CPU (``perf_counter_ns``); the garbage collector is disabled during timing.

    flush: empties the caches; called before each timing. most_calls: the most calls in one timing, so that with
    ``flush`` each call has a set of operands that was not used since. synchronize: waits for a device that runs the
    calls; None where a call returns when it is done.
    """

    paired_timing_s = FLOOR_S
    calibrates_once = True

    def __init__(
        self,
        flush: Callable[[], None] | None = None,
        most_calls: int = _MAX_CALLS,
        *,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self._next, self._flush, self._max_calls, self._synchronize = 0, flush, most_calls, synchronize

    def now(self) -> float:
        return time.perf_counter()

    def calls_for(self, run: Run, floor_s: float) -> int:
        warm_s = self._batch(run, 1)
        if warm_s > max(_SLOW_S, floor_s):
            return 1
        calls = 1
        while True:
            elapsed_s = self._batch(run, calls)
            if elapsed_s >= floor_s / 2.0 or calls >= self._max_calls:
                return max(1, min(self._max_calls, math.ceil(calls * floor_s / max(elapsed_s, 1e-9))))
            calls = min(self._max_calls, calls * 4)

    def time_round(self, runs: Sequence[Run], calls: Sequence[int]) -> list[float]:
        with gc_disabled():
            return [self._timed(run, min(n, self._max_calls)) for run, n in zip(runs, calls, strict=True)]

    def call_again(self, run: Run, operand_set: int) -> Sequence[int]:
        run(operand_set)
        if self._synchronize is not None:
            self._synchronize()
        return (operand_set,)

    def conditions(self, run: Run, finalist: bool) -> dict[str, str]:
        return {}

    def _timed(self, run: Run, calls: int) -> float:
        if self._flush is not None:
            self._flush()
        return self._batch(run, calls) / calls

    def _batch(self, run: Run, calls: int) -> float:
        """Return the seconds that ``calls`` calls take."""
        first = self._next
        self._next += calls
        if self._synchronize is not None:
            self._synchronize()
        start = time.perf_counter_ns()
        for i in range(first, first + calls):
            run(i)
        if self._synchronize is not None:
            self._synchronize()
        return (time.perf_counter_ns() - start) * 1e-9
