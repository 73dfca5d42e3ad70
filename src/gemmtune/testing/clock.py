"""A simulated clock: kernels of known speed under seeded noise, drift and stalls. No real time passes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from ..measure.clock import Run


class FakeClock:
    """A ``measure.clock.Clock`` whose kernels, made by ``kernel``, only move its hands.

    noise: standard deviation of a timing, relative (log-normal). drift: relative change of speed over ``drift_s``
    simulated seconds, there and back (a sine). stalls: share of timings that lose ``stall_s`` seconds.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        noise: float = 0.02,
        drift: float = 0.0,
        drift_s: float = 1.0,
        stalls: float = 0.0,
        stall_s: float = 8e-3,
    ) -> None:
        self._rng = random.Random(seed)
        self._noise, self._drift, self._drift_s = noise, drift, drift_s
        self._stalls, self._stall_s = stalls, stall_s
        self._time = 0.0
        self._next = 0

    def kernel(self, seconds: float) -> Run:
        """A callable that takes ``seconds`` of this clock's time."""

        def run(i: int) -> None:
            self._time += seconds

        return run

    def now(self) -> float:
        return self._time

    def calls_for(self, run: Run, floor_s: float) -> int:
        took = self._batch(run, 1)
        return max(1, math.ceil(floor_s / took)) if took > 0.0 else 1

    def time_round(self, runs: Sequence[Run], calls: Sequence[int]) -> list[float]:
        return [self._batch(run, n) / n for run, n in zip(runs, calls, strict=True)]

    def _batch(self, run: Run, calls: int) -> float:
        start = self._time
        for i in range(self._next, self._next + calls):
            run(i)
        self._next += calls
        took = self._time - start
        took *= math.exp(self._rng.gauss(0.0, self._noise))
        took *= 1.0 + self._drift / 2.0 * math.sin(2.0 * math.pi * start / self._drift_s)
        if self._rng.random() < self._stalls:
            took += self._stall_s
        self._time = start + took
        return took
