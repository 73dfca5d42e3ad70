"""The duel: leader against the fastest incumbent, in interleaved pairs, on timings that chose neither."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from .clock import Clock
from .lane import EntrantError, Lane
from .stats import Interval, binomial_tail, mad, ratio_interval

ALPHA = 0.01  # two-sided, over all looks: at most 0.5% of duels between equals have a winner
MAX_PAIRS = 600
_MOST_PAIRS = 4 * MAX_PAIRS  # while only the stalls' origin is open
_GROWTH = 1.5  # pairs from one look to the next
# Pairs this long, with the emptying of caches before each timing, may be looked at before ``min_pairs``: they span time
# enough.
SLOW_PAIR_S = 10e-3
FIRST_SLOW_LOOK = 12
_FEW = 5  # pairs in one place that say something of it
_FEWEST = 9  # fewer pairs cannot give an interval of the first look's level
_STALL_SIGMAS, _STALL_LEAST = 6.0, 0.2  # a timing this far above its side's median, in robust sigmas and in share
_STALL_MOST = 0.25  # with more of them they belong to the kernel, not to the machine
# Probability that the machine alone gives one side so many of the stalls, below which they are that side's own: while
# more pairs can be timed, and at the last look.
_BALANCED, _UNBALANCED = 0.5, 0.002
_NEGLIGIBLE = 0.02  # a gain below this share is not worth another race


@dataclass(slots=True)
class Duel:
    """challenger, incumbent: seconds per call, pair by pair. reason: the decision and why, in words.

    stalled: the share of pairs set aside at the last look. places: the
    pairs before which operands were moved. spent: of the error allowed. interval: the paired ratio's interval at the
    last look, None with too few pairs. decided: whether the interval (or a win) settled it, rather than the deadline.
    unclear: whether the medians show a gain, and the mean does not (yet).
    """

    won: bool = False
    reason: str = ""
    challenger: list[float] = field(default_factory=list)
    incumbent: list[float] = field(default_factory=list)
    stalled: float = 0.0
    places: list[int] = field(default_factory=list)
    spent: float = 0.0
    interval: Interval | None = None
    decided: bool = False
    unclear: bool = False
    earlier: tuple[Sequence[float], Sequence[float]] = ((), ())

    @property
    def may_hide_a_gain(self) -> bool:
        """Whether the challenger may be faster by 2% or more, for all that the duel showed."""
        if self.won or self.decided:
            return False
        return self.interval is None or self.interval.lo < 1.0 - _NEGLIGIBLE


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
    the operands elsewhere in memory (False: it does not); called twice before the first look (once where that comes
    after 12 pairs) and after each. A winner has the better median in every place, and the better mean (see
    ``_mean_agreement``).
    """
    found = Duel(earlier=challenger.paired(incumbent))
    cost, timed_s, look_at = challenger.cost + incumbent.cost, 0.0, min_pairs
    while True:
        if not found.spent:
            look_at = min(FIRST_SLOW_LOOK, min_pairs) if cost > SLOW_PAIR_S else min_pairs
            moves_at = {look_at // 2} if look_at < 3 * _FEW else {look_at // 3, 2 * look_at // 3}
        if len(found.challenger) in moves_at and move():
            found.places.append(len(found.challenger))
        most = _MOST_PAIRS if found.unclear else MAX_PAIRS
        last = len(found.challenger) >= most or clock.now() + cost > deadline(found)
        if len(found.challenger) >= look_at or last:
            if _decide(found, gain, last):
                return found
            look_at = min(_MOST_PAIRS if found.unclear else MAX_PAIRS, round(look_at * _GROWTH) + 1)
            if move():
                found.places.append(len(found.challenger))
        try:
            began = clock.now()
            _pair(found, challenger, incumbent, clock, rng)
            timed_s += clock.now() - began
            cost = max(challenger.cost + incumbent.cost, timed_s / len(found.challenger))
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
    split = _split_stalls(found.challenger, found.incumbent)
    pairs = len(split.challenger)
    found.stalled = 1.0 - pairs / len(found.challenger) if found.challenger else 0.0
    if pairs < _FEWEST:
        found.reason = f"the budget allowed {pairs} pairs; a decision needs {_FEWEST}, so the incumbent stays"
        return last
    text, faster = _look(found, split, gain, last)
    if found.decided:
        found.reason = f"{text}: not faster by {gain:.1%}"
        return True
    if not faster:
        found.reason = f"{text}: not decided, so the incumbent stays"
        return last
    agreement = _mean_agreement(found, split, last)
    found.won, found.unclear = agreement == "agrees", agreement != "agrees"
    found.decided = found.won or (last and agreement == "differs")
    found.reason = text if found.won else f"{text}, but {_mean_words(found)}: the incumbent stays"
    return found.won or last


def _look(found: Duel, split: _Split, gain: float, last: bool) -> tuple[str, bool]:
    """The ratio's interval in words, and whether it shows a gain; ``found.decided`` says that there is none.

    When the pairs have spent the error, a gain that they showed stands, and only the stalls are looked at.
    """
    share = 1.0 if last else min(1.0, (len(found.challenger) / MAX_PAIRS) ** (1 / 3))
    alpha = ALPHA * share - found.spent
    spent = found.unclear and (last or alpha <= 0.0)
    ratio = found.interval if spent and found.interval else ratio_interval(split.challenger, split.incumbent, alpha)
    found.interval, found.spent = ratio, max(found.spent, ALPHA * share)
    pairs = len(split.challenger)
    text = f"{ratio.center:.3f}x the incumbent's time ({ratio.lo:.3f}..{ratio.hi:.3f}) after {pairs} pairs"
    found.decided = ratio.lo > 1.0 - gain
    attained = spent or 1.0 - ratio.level <= alpha * (1 + 1e-9)
    return text, ratio.hi < 1.0 - gain and attained and _everywhere(found)


def _mean_words(found: Duel) -> str:
    mine, base = _all_times(found)
    return f"{sum(mine) / sum(base):.3f}x its mean time, stalls counted"


def _all_times(found: Duel) -> tuple[list[float], list[float]]:
    """Every pair of times of the race: what stalls now and then shows the oftener, the more is looked at."""
    return [*found.earlier[0], *found.challenger], [*found.earlier[1], *found.incumbent]


def _everywhere(found: Duel) -> bool:
    """Whether the challenger has the better median wherever the operands lay for a few pairs."""
    bounds = [0, *found.places, len(found.challenger)]
    for first, last in itertools.pairwise(bounds):
        mine, base = found.challenger[first:last], found.incumbent[first:last]
        if len(mine) >= _FEW and median(m / b for m, b in zip(mine, base, strict=True)) >= 1.0:
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Split:
    """The pairs of a duel without those in which either side stalled, and the number of stalls of each side."""

    challenger: list[float]
    incumbent: list[float]
    own: int = 0
    others: int = 0


def _mean_agreement(found: Duel, split: _Split, last: bool) -> Literal["agrees", "differs", "unclear"]:
    """Whether the challenger has the lower mean time, too: the interval is one of medians, and a kernel that stalls in
    every fifth call has a good median.

    Stalls do not count where the machine explains them, so that both sides have their share of them. A side that has
    more of them than chance gives it (one-sided binomial test: each stall hits either side in proportion to the time
    that it runs) has stalls of its own, and the mean of all pairs counts. Without a stall of the incumbent's nothing
    shows that the machine stalls at all.
    """
    if sum(split.challenger) >= sum(split.incumbent):
        return "differs"
    mine, base = _all_times(found)
    if sum(mine) < sum(base):
        return "agrees"
    counted = _split_stalls(mine, base)
    share = median(mine) / (median(mine) + median(base))
    chance = binomial_tail(counted.own, counted.own + counted.others, share)
    if chance > _BALANCED:
        return "agrees"
    if chance < _UNBALANCED:
        return "differs"
    return "agrees" if last and counted.others else "unclear"


def _split_stalls(challenger: Sequence[float], incumbent: Sequence[float]) -> _Split:
    """Set the pairs aside in which a side stalled, as its median and MAD tell; none where they are a quarter."""
    if len(challenger) < _FEWEST:
        return _Split(list(challenger), list(incumbent))
    limits = [
        median(times) * (1.0 + max(_STALL_LEAST, _STALL_SIGMAS * mad(times) / median(times)))
        for times in (challenger, incumbent)
    ]
    own = sum(seconds > limits[0] for seconds in challenger)
    others = sum(seconds > limits[1] for seconds in incumbent)
    kept = [(c, i) for c, i in zip(challenger, incumbent, strict=True) if c <= limits[0] and i <= limits[1]]
    if len(kept) < (1.0 - _STALL_MOST) * len(challenger):
        return _Split(list(challenger), list(incumbent), own, others)
    return _Split([c for c, _ in kept], [i for _, i in kept], own, others)
