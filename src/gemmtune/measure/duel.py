"""The duel: leader against the fastest incumbent, in interleaved pairs, on timings that chose neither."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from .clock import Clock
from .lane import EntrantError, Lane
from .stats import mad, ratio_interval

ALPHA = 0.01  # two-sided, over all looks: at most 0.5% of duels between equals have a winner
MAX_PAIRS = 600
_GROWTH = 1.5  # pairs from one look to the next
_SLOW_PAIR_S = 10e-3  # pairs this long may be looked at before ``min_pairs``: they span time enough
_FIRST_SLOW_LOOK = 12
_FEW = 5  # pairs in one place that say something of it
_FEWEST = 9  # fewer pairs cannot give an interval of the first look's level
_STALL_SIGMAS, _STALL_LEAST = 6.0, 0.2  # a timing this far above its side's median, in robust sigmas and in share
_STALL_MOST = 0.25  # with more of them they belong to the kernel, not to the machine


@dataclass(slots=True)
class Duel:
    """challenger, incumbent: seconds per call, pair by pair. reason: the decision and why, in words.

    stalled: the share of pairs set aside at the last look. places: the
    pairs before which operands were moved. spent: of the error allowed.
    """

    won: bool = False
    reason: str = ""
    challenger: list[float] = field(default_factory=list)
    incumbent: list[float] = field(default_factory=list)
    stalled: float = 0.0
    places: list[int] = field(default_factory=list)
    spent: float = 0.0


def duel(
    challenger: Lane,
    incumbent: Lane,
    clock: Clock,
    deadline: Callable[[Duel], float],
    rng: random.Random,
    move: Callable[[], bool] = lambda: False,
    *,
    min_pairs: int = 50,
    gain: float = 0.003,
) -> Duel:
    """Time pairs, in random order within each, until the ratio's interval clears ``1 - gain`` or cannot any more.

    Looks are at ``min_pairs`` (12 when a pair takes over 10 ms), then 1.5 times as many, up to 600; each spends a part
    of a 1% two-sided error that grows with the cube root of the pairs, and the last one the rest. When time runs out
    the pairs there are get the last look. deadline(duel so far): when that is, on ``clock``; it may move. move: puts
    the operands elsewhere in memory (False: it does not); called twice before the first look and after each. A winner
    has the better median in every place.
    """
    found = Duel()
    cost = challenger.cost + incumbent.cost
    look_at = min(_FIRST_SLOW_LOOK, min_pairs) if cost > _SLOW_PAIR_S else min_pairs
    moves_at = {min_pairs // 3, 2 * min_pairs // 3}
    while True:
        if len(found.challenger) in moves_at and move():
            found.places.append(len(found.challenger))
        last = len(found.challenger) >= MAX_PAIRS or clock.now() + cost > deadline(found)
        if len(found.challenger) >= look_at or last:
            if _decide(found, gain, last):
                return found
            look_at = min(MAX_PAIRS, round(look_at * _GROWTH) + 1)
            if move():
                found.places.append(len(found.challenger))
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


def _decide(found: Duel, gain: float, last: bool) -> bool:
    """Look at the pairs; whether this settles it (it does when ``last``)."""
    mine, base = _unstalled(found.challenger, found.incumbent)
    pairs = len(mine)
    found.stalled = 1.0 - pairs / len(found.challenger) if found.challenger else 0.0
    alpha = ALPHA * (1.0 if last else (len(found.challenger) / MAX_PAIRS) ** (1 / 3)) - found.spent
    found.spent += alpha
    if pairs < _FEWEST:
        found.reason = f"the budget allowed {pairs} pairs; a decision needs {_FEWEST}, so the incumbent stays"
        return last
    ratio = ratio_interval(mine, base, alpha)
    text = f"{ratio.center:.3f}x the incumbent's time ({ratio.lo:.3f}..{ratio.hi:.3f}) after {pairs} pairs"
    attained = 1.0 - ratio.level <= alpha * (1 + 1e-9)
    if ratio.hi < 1.0 - gain and attained and _everywhere(found):
        found.won, found.reason = True, text
    elif ratio.lo > 1.0 - gain:
        found.reason = f"{text}: not faster by {gain:.1%}"
    else:
        found.reason = f"{text}: not decided, so the incumbent stays"
        return last
    return True


def _everywhere(found: Duel) -> bool:
    """Whether the challenger has the better median wherever the operands lay for a few pairs."""
    bounds = [0, *found.places, len(found.challenger)]
    for first, last in itertools.pairwise(bounds):
        mine, base = found.challenger[first:last], found.incumbent[first:last]
        if len(mine) >= _FEW and median(m / b for m, b in zip(mine, base, strict=True)) >= 1.0:
            return False
    return True


def _unstalled(challenger: Sequence[float], incumbent: Sequence[float]) -> tuple[list[float], list[float]]:
    """The pairs without those in which the machine stalled, as the MAD of either side tells."""
    if len(challenger) < _FEWEST:
        return list(challenger), list(incumbent)
    limits = [
        median(times) * (1.0 + max(_STALL_LEAST, _STALL_SIGMAS * mad(times) / median(times)))
        for times in (challenger, incumbent)
    ]
    kept = [(c, i) for c, i in zip(challenger, incumbent, strict=True) if c <= limits[0] and i <= limits[1]]
    if len(kept) < (1.0 - _STALL_MOST) * len(challenger):
        return list(challenger), list(incumbent)
    return [c for c, _ in kept], [i for _, i in kept]
