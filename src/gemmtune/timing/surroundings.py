"""The surroundings that kernels are served in: other work runs before and after each call. A winner must win in each of
them.

A kernel's time depends on the work around it: a GPU that has just waited has a higher clock, a GPU that is busy all the
time runs into its power limit, and an activation that the preceding kernel has written is in the cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from .clock import Clock, Run
from .race_entry import EntrantError, RaceEntry
from .stats import Interval, ratio_interval

ROUNDS = 14
_MIN_ROUNDS = 6
# After so many rounds, a challenger whose interval is below _CLEAR times the baseline's time is not timed further.
_CLEAR_ROUNDS, _CLEAR = 8, 0.9
# A ratio above 1 by no more than _TOLERANCE is no disagreement; one above 1 by more than SLOWER is, however noisy it
# was.
_TOLERANCE, SLOWER = 0.005, 0.015
_GAIN = 0.02  # of a challenger that wins for its times among other work
_ALPHA = 0.1

OVERLAP = "overlap"
"""The variant of a GPU's kernel that may begin before the kernel in front of it ends."""


@dataclass(frozen=True, slots=True)
class Surrounding:
    """One kind of work around a kernel's calls.

    run_of(id, variant): returns a callable that makes one call of an entrant with the work around it. variants(id): the
    ways in which the challenger can be launched there ("" is the usual one, which the baseline uses). idle: the
    surrounding work alone; None where there is none. timing_s: the least duration of one timing in seconds.
    """

    name: str
    run_of: Callable[[str, str], Run]
    variants: Callable[[str], tuple[str, ...]] = lambda _: ("",)
    idle: Run | None = None
    timing_s: float = 1e-3


@dataclass(frozen=True, slots=True)
class Comparison:
    """The ratio of the challenger's time to the baseline's in one surrounding: its median and its bounds (95% one-sided
    each)."""

    ratio: float
    ratio_lo: float
    ratio_hi: float

    @property
    def disagrees(self) -> bool:
        """Whether the challenger is slower in this surrounding."""
        return self.ratio > 1.0 + SLOWER or (self.ratio > 1.0 + _TOLERANCE and self.ratio_lo > 1.0)

    @property
    def is_faster(self) -> bool:
        """Whether the challenger is faster in this surrounding by 2% or more."""
        return self.ratio_hi < 1.0 - _GAIN


def compare(
    surrounding: Surrounding,
    challenger: RaceEntry,
    baseline: RaceEntry,
    clock: Clock,
    rng: random.Random,
    deadline: float,
) -> dict[str, Comparison]:
    """Time both entries in a surrounding, in interleaved rounds until ``deadline`` on ``clock``, and return a
    Comparison for each variant of the challenger.

    Empty when there was no time for six rounds. There are 14 rounds, or 8 when every variant is clearly faster by then.
    The time that the surrounding takes by itself is subtracted. Raises EntrantError for an entrant that raises.
    """
    variants = surrounding.variants(challenger.id)
    runs: dict[str, Run] = {
        f"challenger {variant}": _guarded(challenger, surrounding.run_of(challenger.id, variant))
        for variant in variants
    }
    runs["baseline"] = _guarded(baseline, surrounding.run_of(baseline.id, ""))
    if surrounding.idle is not None:
        runs["idle"] = surrounding.idle
    fastest_s = max(min(challenger.median, baseline.median), 1e-9)
    calls = max(1, math.ceil(surrounding.timing_s / fastest_s))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for completed in range(ROUNDS):
        if clock.now() > deadline and completed < _MIN_ROUNDS:
            return {}
        if clock.now() > deadline:
            break
        names = list(runs)
        rng.shuffle(names)
        seconds = clock.time_round([runs[name] for name in names], [calls] * len(names))
        for name, value in zip(names, seconds, strict=True):
            times[name].append(value)
        if completed + 1 == _CLEAR_ROUNDS and all(ratio.hi < _CLEAR for ratio in _ratios(times, variants).values()):
            break
    return {name: Comparison(ratio.center, ratio.lo, ratio.hi) for name, ratio in _ratios(times, variants).items()}


def _ratios(times: Mapping[str, list[float]], variants: tuple[str, ...]) -> dict[str, Interval]:
    """Return the interval of the ratio of each variant's time to the baseline's."""
    idle_s = median(times["idle"]) if "idle" in times else 0.0
    baseline_s = _subtract_idle(times["baseline"], idle_s)
    return {
        name: ratio_interval(_subtract_idle(times[f"challenger {name}"], idle_s), baseline_s, _ALPHA)
        for name in variants
    }


def _subtract_idle(times: list[float], idle_s: float) -> list[float]:
    """Return the times without the surrounding's own (at least a twentieth of each remains where the difference would
    be negative)."""
    return [max(seconds - idle_s, 0.05 * seconds) for seconds in times]


def _guarded(entry: RaceEntry, run: Run) -> Run:
    """Return ``run`` wrapped so that an exception becomes an EntrantError of this entry."""

    def guarded(i: int) -> None:
        try:
            run(i)
        except Exception as error:  # a kernel may raise anything, and only that kernel fails
            raise EntrantError(entry, error) from error

    return guarded
