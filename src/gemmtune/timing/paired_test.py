"""The paired test of the leading challenger against the fastest baseline, on timings that were used to choose
neither."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from .clock import Clock
from .race_entry import EntrantError, RaceEntry
from .stats import Interval, binomial_tail, mad, ratio_interval

ALPHA = 0.01  # two-sided, over all looks: at most 0.5% of the tests between equals have a winner
MAX_PAIRS = 600
_MAX_PAIRS_STALLS = 4 * MAX_PAIRS  # the limit while only the origin of the stalls is open
_GROWTH = 1.5  # pairs from one look to the next
# Pairs that take longer than this, cache flushes included, are looked at before ``min_pairs``: they cover enough time.
_SLOW_PAIR_S = 10e-3
# The same where the rounds before the test showed a difference of over 10%: fewer pairs show it.
_FAR_APART_PAIR_S = 3e-3
FIRST_SLOW_LOOK = 12
_MIN_PAIRS_PER_PLACEMENT = 5  # pairs with the operands at one address that allow a statement about that placement
_MIN_PAIRS = 9  # fewer pairs cannot give an interval at the confidence level of the first look
# A stall: a timing this far above the median of its side, in robust sigmas and as a share.
_STALL_SIGMAS, _STALL_MIN_SHARE = 6.0, 0.2
_MAX_STALLED_SHARE = 0.25  # above this share of the pairs, stalls belong to the kernel, not to the machine
# Probability that the machine alone causes so many of the stalls on one side. Below the first value they count as that
# side's own while more pairs can be timed, below the second at the last look.
_STALLS_BALANCED, _STALLS_UNBALANCED = 0.5, 0.002
_NEGLIGIBLE = 0.02  # a gain below this share is not worth another race


@dataclass(slots=True)
class PairedTest:
    """The state and result of one paired test.

    challenger, baseline: seconds per call of the challenger and of the baseline, pair by pair. reason: the decision
    and why, in words. stalled: the share of pairs set aside at the last look. moves: the numbers of the pairs before
    which operands were moved. error_spent: the part of the allowed error that the looks have used. interval: the paired
    ratio's interval at the last look, None with too few pairs. decided: whether the interval (or a win) settled the
    test, rather than the deadline. unclear: whether the medians show a gain, and the mean does not (yet). round_times:
    the times of both in the rounds before the test.
    """

    won: bool = False
    reason: str = ""
    challenger: list[float] = field(default_factory=list)
    baseline: list[float] = field(default_factory=list)
    stalled: float = 0.0
    moves: list[int] = field(default_factory=list)
    error_spent: float = 0.0
    interval: Interval | None = None
    decided: bool = False
    unclear: bool = False
    round_times: tuple[Sequence[float], Sequence[float]] = ((), ())

    @property
    def may_hide_a_gain(self) -> bool:
        """Whether the challenger may still be faster by 2% or more, given the pairs of the test."""
        if self.won or self.decided:
            return False
        return self.interval is None or self.interval.lo < 1.0 - _NEGLIGIBLE


def paired_test(
    challenger: RaceEntry,
    baseline: RaceEntry,
    clock: Clock,
    deadline: Callable[[PairedTest], float],
    rng: random.Random,
    move: Callable[[], bool] = lambda: False,
    *,
    min_pairs: int = 50,
    gain: float = 0.003,
    far_apart: bool = False,
) -> PairedTest:
    """Time pairs, in random order within each, until the ratio's interval is below ``1 - gain`` or cannot become so any
    more.

    Looks are as ``first_look`` says, then at 1.5 times as many pairs, up to 600. far_apart: whether earlier timings
    showed a large difference; they are no part of the test, so that its error stays the same. Each look spends
    a part of a 1% two-sided error that grows with the cube root of the pairs, and the last look spends the rest. When
    time runs out the pairs so far get the last look. deadline(test so far): when time runs out, on ``clock``; it may
    move. move: moves the operands to other memory and returns whether it did; called twice before the first look (once
    where that comes after 12 pairs) and after each look. A winner has the better median at every placement of the
    operands, and the better mean (see ``_mean_agreement``).
    """
    test = PairedTest(round_times=challenger.paired(baseline))
    expected_s, timed_s, look_at = challenger.cost + baseline.cost, 0.0, min_pairs
    cost = expected_s  # seconds of a pair
    while True:
        if not test.error_spent:
            look_at = first_look(cost, min_pairs, far_apart)
            moves_at = {look_at // 2} if look_at < 3 * _MIN_PAIRS_PER_PLACEMENT else {look_at // 3, 2 * look_at // 3}
        if len(test.challenger) in moves_at and move():
            test.moves.append(len(test.challenger))
        max_pairs = _MAX_PAIRS_STALLS if test.unclear else MAX_PAIRS
        last = len(test.challenger) >= max_pairs or clock.now() + cost > deadline(test)
        if len(test.challenger) >= look_at or last:
            if _decide(test, gain, last):
                return test
            look_at = min(_MAX_PAIRS_STALLS if test.unclear else MAX_PAIRS, round(look_at * _GROWTH) + 1)
            if move():
                test.moves.append(len(test.challenger))
        try:
            started = clock.now()
            _time_pair(test, challenger, baseline, clock, rng)
            timed_s += clock.now() - started
            cost = max(expected_s, timed_s / len(test.challenger))
        except EntrantError as error:
            test.reason = f"{error.entry.id} {error} in the paired test"
            error.entry.drop("failed", test.reason)
            return test


def first_look(pair_s: float, min_pairs: int, far_apart: bool) -> int:
    """Return the number of pairs before a paired test's first look: ``min_pairs``, or 12 where fewer pairs cover enough
    time, since one takes over 10 ms (over 3 ms for entries that are ``far_apart``). pair_s: seconds that a pair takes.
    """
    enough_s = _FAR_APART_PAIR_S if far_apart else _SLOW_PAIR_S
    return min(FIRST_SLOW_LOOK, min_pairs) if pair_s > enough_s else min_pairs


def _time_pair(test: PairedTest, challenger: RaceEntry, baseline: RaceEntry, clock: Clock, rng: random.Random) -> None:
    entries = [challenger, baseline]
    if rng.random() < 0.5:
        entries.reverse()
    times = clock.time_round([entry.guarded for entry in entries], [entry.calls for entry in entries])
    times_by_entry = dict(zip(map(id, entries), times, strict=True))
    test.challenger.append(times_by_entry[id(challenger)])
    test.baseline.append(times_by_entry[id(baseline)])


def _decide(test: PairedTest, gain: float, last: bool) -> bool:
    """Take a look at the pairs and update the test. Returns whether the test is over (it is when ``last``)."""
    split = _split_stalls(test.challenger, test.baseline)
    pairs = len(split.challenger)
    test.stalled = 1.0 - pairs / len(test.challenger) if test.challenger else 0.0
    if pairs < _MIN_PAIRS:
        test.reason = f"the budget allowed {pairs} pairs; a decision needs {_MIN_PAIRS}, so the baseline stays"
        return last
    text, is_faster = _look(test, split, gain, last)
    if test.decided:
        test.reason = f"{text}: not faster by {gain:.1%}"
        return True
    if not is_faster:
        test.reason = f"{text}: not decided, so the baseline stays"
        return last
    agreement = _mean_agreement(test, split, last)
    test.won, test.unclear = agreement == "agrees", agreement != "agrees"
    test.decided = test.won or (last and agreement == "differs")
    test.reason = text if test.won else f"{text}, but {_describe_means(test)}: the baseline stays"
    return test.won or last


def _look(test: PairedTest, split: _Split, gain: float, last: bool) -> tuple[str, bool]:
    """Return the ratio's interval in words, and whether it shows a gain; ``decided`` is set when it shows that there is
    none.

    When the pairs have spent the error, a gain that they showed stands, and only the stalls are looked at.
    """
    spent_share = 1.0 if last else min(1.0, (len(test.challenger) / MAX_PAIRS) ** (1 / 3))
    alpha = ALPHA * spent_share - test.error_spent
    is_error_spent = test.unclear and (last or alpha <= 0.0)
    interval = (
        test.interval if is_error_spent and test.interval else ratio_interval(split.challenger, split.baseline, alpha)
    )
    test.interval, test.error_spent = interval, max(test.error_spent, ALPHA * spent_share)
    pairs = len(split.challenger)
    text = f"{interval.center:.3f}x the baseline's time ({interval.lo:.3f}..{interval.hi:.3f}) after {pairs} pairs"
    test.decided = interval.lo > 1.0 - gain
    attained = is_error_spent or 1.0 - interval.level <= alpha * (1 + 1e-9)
    return text, interval.hi < 1.0 - gain and attained and _faster_at_every_placement(test)


def _describe_means(test: PairedTest) -> str:
    challenger_s, baseline_s = _all_times(test)
    return f"{sum(challenger_s) / sum(baseline_s):.3f}x its mean time, stalls counted"


def _all_times(test: PairedTest) -> tuple[list[float], list[float]]:
    """Return every pair of times of the race. A kernel that stalls now and then shows it more often the more pairs are
    looked at."""
    return [*test.round_times[0], *test.challenger], [*test.round_times[1], *test.baseline]


def _faster_at_every_placement(test: PairedTest) -> bool:
    """Whether the challenger has the better median at every placement of the operands that has a few pairs."""
    bounds = [0, *test.moves, len(test.challenger)]
    for first, last in itertools.pairwise(bounds):
        challenger_s, baseline_s = test.challenger[first:last], test.baseline[first:last]
        if (
            len(challenger_s) >= _MIN_PAIRS_PER_PLACEMENT
            and median(m / b for m, b in zip(challenger_s, baseline_s, strict=True)) >= 1.0
        ):
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Split:
    """The pairs of a paired test without those in which either side stalled, and the number of stalls of each side."""

    challenger: list[float]
    baseline: list[float]
    challenger_stalls: int = 0
    baseline_stalls: int = 0


def _mean_agreement(test: PairedTest, split: _Split, last: bool) -> Literal["agrees", "differs", "unclear"]:
    """Return whether the challenger has the lower mean time, too.

    The interval is one of medians, and a kernel that stalls in every fifth call has a good median. Stalls do not count
    where the machine explains them, so that both sides have their share of them. A side with more stalls than chance
    explains (one-sided binomial test: each stall hits either side in proportion to the time that it runs) has stalls of
    its own, and the mean of all pairs counts. Without a stall of the baseline nothing shows that the machine stalls at
    all.
    """
    if sum(split.challenger) >= sum(split.baseline):
        return "differs"
    challenger_s, baseline_s = _all_times(test)
    if sum(challenger_s) < sum(baseline_s):
        return "agrees"
    all_pairs = _split_stalls(challenger_s, baseline_s)
    share = median(challenger_s) / (median(challenger_s) + median(baseline_s))
    chance = binomial_tail(all_pairs.challenger_stalls, all_pairs.challenger_stalls + all_pairs.baseline_stalls, share)
    if chance > _STALLS_BALANCED:
        return "agrees"
    if chance < _STALLS_UNBALANCED:
        return "differs"
    return "agrees" if last and all_pairs.baseline_stalls else "unclear"


def _split_stalls(challenger: Sequence[float], baseline: Sequence[float]) -> _Split:
    """Set aside the pairs in which a side stalled, judged by that side's median and MAD; none where a quarter or more
    stalled."""
    if len(challenger) < _MIN_PAIRS:
        return _Split(list(challenger), list(baseline))
    limits = [
        median(times) * (1.0 + max(_STALL_MIN_SHARE, _STALL_SIGMAS * mad(times) / median(times)))
        for times in (challenger, baseline)
    ]
    challenger_stalls = sum(seconds > limits[0] for seconds in challenger)
    baseline_stalls = sum(seconds > limits[1] for seconds in baseline)
    unstalled = [(c, i) for c, i in zip(challenger, baseline, strict=True) if c <= limits[0] and i <= limits[1]]
    if len(unstalled) < (1.0 - _MAX_STALLED_SHARE) * len(challenger):
        return _Split(list(challenger), list(baseline), challenger_stalls, baseline_stalls)
    return _Split([c for c, _ in unstalled], [i for _, i in unstalled], challenger_stalls, baseline_stalls)
