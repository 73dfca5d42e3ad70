"""The surroundings that kernels are served in: among other work, not alone. A winner must be one in each of them.

What a kernel takes depends on what runs around it: a GPU that has just waited has a higher clock, one that is busy all
the time runs into its power limit, and an activation that the kernel before has written is in the cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from .clock import Clock, Run
from .lane import EntrantError, Lane
from .stats import Interval, ratio_interval

ROUNDS = 14
_LEAST_ROUNDS = 6
# Rounds after which a challenger below _CLEAR of the incumbent's time (by its interval) is not timed further.
_CLEAR_ROUNDS, _CLEAR = 8, 0.9
# A ratio above 1 by no more than the first is no disagreement; one above the second is, however noisy it was.
_TOLERANCE, _PLAIN = 0.005, 0.015
_ALPHA = 0.1

OVERLAP = "overlap"
"""The variant of a GPU's kernel that may begin before the kernel in front of it ends."""


@dataclass(frozen=True, slots=True)
class Surrounding:
    """One kind of work around a kernel's calls.

    run_of(id, variant): a callable that makes one call of an entrant with the work around it. variants: the ways in
    which the challenger can be launched there ("" is the usual one, which the incumbent takes).
    idle: the work around alone; None where there is none. timing_s: what one timing lasts at least.
    """

    name: str
    run_of: Callable[[str, str], Run]
    variants: Callable[[str], tuple[str, ...]] = lambda _: ("",)
    idle: Run | None = None
    timing_s: float = 1e-3


@dataclass(frozen=True, slots=True)
class Comparison:
    """The challenger's time over the incumbent's in one surrounding: the median ratio and its lower bound (95%
    one-sided)."""

    ratio: float
    ratio_lo: float

    @property
    def disagrees(self) -> bool:
        """Whether the challenger is the slower one here."""
        return self.ratio > 1.0 + _PLAIN or (self.ratio > 1.0 + _TOLERANCE and self.ratio_lo > 1.0)


def compare(
    surrounding: Surrounding, challenger: Lane, incumbent: Lane, clock: Clock, rng: random.Random, deadline: float
) -> dict[str, Comparison]:
    """Time both in a surrounding, in interleaved rounds until ``deadline`` on ``clock``. Returns the comparison of each
    of the challenger's variants; none when there was no time for six rounds, so that nothing is known. There are 14
    rounds, or 8 when every variant is clearly faster by then.

    What the surrounding takes by itself is subtracted. Raises EntrantError for an entrant that raises.
    """
    variants = surrounding.variants(challenger.id)
    lanes: dict[str, Run] = {
        f"challenger {variant}": _guarded(challenger, surrounding.run_of(challenger.id, variant))
        for variant in variants
    }
    lanes["incumbent"] = _guarded(incumbent, surrounding.run_of(incumbent.id, ""))
    if surrounding.idle is not None:
        lanes["idle"] = surrounding.idle
    fastest_s = max(min(challenger.median, incumbent.median), 1e-9)
    calls = max(1, math.ceil(surrounding.timing_s / fastest_s))
    times: dict[str, list[float]] = {name: [] for name in lanes}
    for done in range(ROUNDS):
        if clock.now() > deadline and done < _LEAST_ROUNDS:
            return {}
        if clock.now() > deadline:
            break
        names = list(lanes)
        rng.shuffle(names)
        seconds = clock.time_round([lanes[name] for name in names], [calls] * len(names))
        for name, value in zip(names, seconds, strict=True):
            times[name].append(value)
        if done + 1 == _CLEAR_ROUNDS and all(ratio.hi < _CLEAR for ratio in _ratios(times, variants).values()):
            break
    return {name: Comparison(ratio.center, ratio.lo) for name, ratio in _ratios(times, variants).items()}


def _ratios(times: Mapping[str, list[float]], variants: tuple[str, ...]) -> dict[str, Interval]:
    """Return the ratio of each variant's time to the incumbent's."""
    idle_s = median(times["idle"]) if "idle" in times else 0.0
    base = _net(times["incumbent"], idle_s)
    return {name: ratio_interval(_net(times[f"challenger {name}"], idle_s), base, _ALPHA) for name in variants}


def _net(times: list[float], idle_s: float) -> list[float]:
    """Times without the surrounding's own (a twentieth is left of what the subtraction would make negative)."""
    return [max(seconds - idle_s, 0.05 * seconds) for seconds in times]


def _guarded(lane: Lane, run: Run) -> Run:
    """``run``, with what it raises tied to the lane."""

    def guarded(i: int) -> None:
        try:
            run(i)
        except Exception as error:  # a kernel may raise anything, and it costs that kernel
            raise EntrantError(lane, error) from error

    return guarded
