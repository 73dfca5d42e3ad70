"""The time budget of one tuning session."""

from __future__ import annotations

import math
import time


class TimeBudget:
    """The seconds of a session and how much of them is spent.

    seconds: the whole budget. strict: whether the user set it, so that it is kept; without, builds and most of the
    preparation of operands are not counted. excludable_s: how much of the later builds is not counted; what is left of
    it.
    """

    def __init__(self, seconds: float, strict: bool, excludable_s: float = math.inf) -> None:
        self.seconds, self.strict, self.excludable_s = seconds, strict, excludable_s
        self._started = time.perf_counter()

    def cap_spent(self, share: float) -> None:
        """Count no more than ``share`` of the budget as spent so far."""
        self._started = max(self._started, time.perf_counter() - share * self.seconds)

    def exclude(self, seconds: float, *, limited: bool = True) -> None:
        """Do not count the last ``seconds`` seconds; if ``limited``, only while less than ``excludable_s`` was not
        counted."""
        if limited:
            seconds = min(seconds, self.excludable_s)
            self.excludable_s -= seconds
        self._started += seconds

    @property
    def elapsed_s(self) -> float:
        """The seconds that are spent."""
        return time.perf_counter() - self._started

    @property
    def share_spent(self) -> float:
        """The share of the budget that is spent."""
        return self.elapsed_s / self.seconds

    @property
    def remaining_s(self) -> float:
        """The seconds that remain; 0 when the budget is spent."""
        return max(0.0, self.seconds - self.elapsed_s)
