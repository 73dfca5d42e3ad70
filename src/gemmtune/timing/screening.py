"""Screening times of candidates on the host: a few cold calls of each, before any race."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

# Calls shorter than this are timed together, on operands that stay in the cache: one is too short for the clock.
SHORT_S = 100e-6
_BATCH_S = 300e-6
_SLOW_S = 50e-3
_AS_FAST = 1.1  # a slow first call within this factor of the second counts
_STALL_S = 20e-3  # seconds that a busy machine may add to one call
_SCREENING_TIMINGS = 3  # timings per candidate
_MUCH_FASTER = 0.6
_SETTING_UP_S = 0.2  # seconds that a first call may need for compiling, or for memory of its own


class SpeedReference:
    """The machine's present speed relative to the beginning, measured by timing one reference kernel beside each
    candidate.

    Candidates are tried one after the other, and where others compute on the same machine its speed changes by a tenth
    from one second to the next. The reference kernel is the first that worked and is none of ATen's (some of which are
    slow beyond reason), or a later one that is much faster.
    """

    def __init__(self) -> None:
        self._call: Callable[[], None] | None = None
        self._calls = 1  # calls that are timed together
        self._first_s = 0.0  # seconds per call when the kernel was chosen, at the speed of the beginning
        self._times: deque[float] = deque(maxlen=2 * _SCREENING_TIMINGS)

    def now(self) -> float:
        """Return the time of a call over its time in the beginning, by the last few timings; 1.0 without any."""
        return min(self._times) / self._first_s if self._times else 1.0

    def look(self, flush: Callable[[], None]) -> None:
        """Time the reference kernel once, after ``flush`` (as a batch of calls when one is too short)."""
        if self._call is not None:
            flush()
            self._times.append(_timed(self._call, self._calls))

    def warm_up(self) -> None:
        """Call the reference kernel as often as a candidate is called before it is timed.

        The flush does not empty the cache everywhere (some hosts have 480 MB of it). On such a host the kernel's weight
        would be in the cache when the kernel was chosen and not beside later candidates, and these would look up to
        five times as fast as they are.
        """
        if self._call is not None:
            for _ in range(_SCREENING_TIMINGS):
                self._call()

    def offer(self, call: Callable[[], None], seconds: float) -> None:
        """Consider a kernel that works as the reference. seconds: its least time, at the speed of the beginning."""
        if self._call is None or seconds < _MUCH_FASTER * self._first_s:
            self._call, self._first_s, self._calls = call, seconds, _batch(seconds)
            self._times.clear()


def screening_times(
    call: Callable[[], None],
    flush: Callable[[], None],
    cutoff_s: float | None = None,
    pace: SpeedReference | None = None,
) -> tuple[float, ...]:
    """Return the screening times of a call: three times in seconds, each after ``flush`` emptied the cache, scaled to
    the machine's speed at the beginning of ``pace``.

    Calls too short to be timed alone are timed in batches, on operands that stay in the cache. Slow calls are timed
    twice (their operands are large, or their time is not the memory's). A call that is slower than ``cutoff_s`` even
    when warm returns the one time that showed it. The very first call, which sets things up, does not count, unless it
    takes so long that setting things up cannot be why, or is slow and about as fast as the second.
    """
    first_s = _timed(call, 1)
    if cutoff_s is not None and first_s > 4.0 * cutoff_s + _SETTING_UP_S:
        return (first_s,)
    warm_s = _timed(call, 1)
    if cutoff_s is not None and warm_s > 2.0 * cutoff_s + _STALL_S:
        return (warm_s,)
    if warm_s > _SLOW_S:
        return (warm_s, first_s if first_s <= _AS_FAST * warm_s else _timed(call, 1))
    warm_s = min(warm_s, _timed(call, 1))
    calls, times, pace = _batch(warm_s), [], pace or SpeedReference()
    flush_cache = flush if calls == 1 else lambda: None
    pace.warm_up()
    for _ in range(_SCREENING_TIMINGS):
        pace.look(flush_cache)
        flush_cache()
        times.append(_timed(call, calls))
    return tuple(seconds / pace.now() for seconds in times)


def _batch(seconds: float) -> int:
    """Return the number of calls that are timed together: one, unless a call is too short for that."""
    return math.ceil(_BATCH_S / max(seconds, 1e-7)) if seconds < SHORT_S else 1


def _timed(call: Callable[[], None], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls
