"""The duel: leader against the fastest incumbent, in interleaved pairs, on timings that chose neither."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from .clock import Clock
from .lane import EntrantError, Lane
from .stats import Interval, ratio_interval, spend

ALPHA = 0.05  # two-sided, over all looks
MAX_PAIRS = 400
_GROWTH = 1.5  # pairs from one look to the next
_SLOW_PAIR_S = 10e-3  # pairs this long may be looked at before ``min_pairs``: they span time enough
_FIRST_SLOW_LOOK = 12
_FEWEST = 6  # fewer pairs cannot give a 95% interval


@dataclass(slots=True)
class Duel:
    """challenger, incumbent: seconds per call, pair by pair. reason: the decision and why, in words."""

    won: bool = False
    reason: str = ""
    challenger: list[float] = field(default_factory=list)
    incumbent: list[float] = field(default_factory=list)
    ratio: Interval | None = None


def duel(
    challenger: Lane,
    incumbent: Lane,
    clock: Clock,
    deadline: float,
    rng: random.Random,
    *,
    min_pairs: int = 50,
    gain: float = 0.01,
) -> Duel:
    """Time pairs, in random order within each, until the ratio's interval clears ``1 - gain`` or cannot any more.

    Looks are at ``min_pairs`` (12 when a pair takes over 10 ms), then 1.5 times as many, up to 400; each spends its
    share of a 5% two-sided error. When time runs out the pairs there are get the last look. deadline: on ``clock``.
    """
    found = Duel()
    cost = challenger.cost + incumbent.cost
    look_at = min(_FIRST_SLOW_LOOK, min_pairs) if cost > _SLOW_PAIR_S else min_pairs
    look = 1
    while True:
        last = clock.now() + cost > deadline or len(found.challenger) >= MAX_PAIRS
        if len(found.challenger) >= look_at or last:
            if _decide(found, gain, look, last):
                return found
            look, look_at = look + 1, min(MAX_PAIRS, round(look_at * _GROWTH) + 1)
        try:
            _pair(found, challenger, incumbent, clock, rng)
        except EntrantError as error:
            found.reason = f"{error.lane.id} {error} in the duel"
            error.lane.drop("failed", found.reason)
            return found


def _pair(found: Duel, challenger: Lane, incumbent: Lane, clock: Clock, rng: random.Random) -> None:
    lanes = [challenger, incumbent]
    if rng.random() < 0.5:
        lanes.reverse()
    times = clock.time_round([lane.guarded for lane in lanes], [lane.calls for lane in lanes])
    by_lane = dict(zip(map(id, lanes), times, strict=True))
    found.challenger.append(by_lane[id(challenger)])
    found.incumbent.append(by_lane[id(incumbent)])


def _decide(found: Duel, gain: float, look: int, last: bool) -> bool:
    """Look at the pairs; whether this settles it (it does when ``last``)."""
    pairs = len(found.challenger)
    alpha = spend(ALPHA, look)
    if pairs < _FEWEST:
        found.reason = f"the budget allowed {pairs} pairs; a decision needs {_FEWEST}, so the incumbent stays"
        return last
    ratio = ratio_interval(found.challenger, found.incumbent, alpha)
    found.ratio = ratio
    text = f"{ratio.center:.3f}x the incumbent's time ({ratio.lo:.3f}..{ratio.hi:.3f}) after {pairs} pairs"
    attained = 1.0 - ratio.level <= alpha * (1 + 1e-9)
    if ratio.hi < 1.0 - gain and attained:
        found.won, found.reason = True, text
    elif ratio.lo > 1.0 - gain:
        found.reason = f"{text}: not faster by {gain:.1%}"
    else:
        found.reason = f"{text}: not decided, so the incumbent stays"
        return last
    return True
