"""Where to measure next: the M between measured ones at which the choice of a kernel may lose most."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..core.tuned_plan import PlanInterval
from .curves import CLOSE, Curves
from .intervals import GRID

_PER_GAP = 8  # M between two measured ones at which a loss is estimated
_THIN = 0.88  # a kernel that is expected to take this share of the plain op's time or more is timed beside it
_GENERIC = 11  # the remainder by ``GRID`` of the M at which a margin is measured
_NARROW = 1.04  # below this ratio of two neighboring M, times between them are interpolated


def expected_losses(
    curves: Curves, intervals: Sequence[PlanInterval], names: Callable[[int], Sequence[str]], least: float
) -> list[tuple[int, str]]:
    """Return M that were not measured at which a kernel is expected to be faster than the one that serves, and this
    kernel; at most one M between two measured ones. Those come first at which most is lost, by the share of calls.

    names(m): the kernels to consider at M. least: the share of time below which a loss does not count.
    """
    curves = curves.at_scan_pace
    weight, starts = curves.weight(), [interval.first for interval in intervals]
    losses: dict[int, tuple[float, int, str]] = {}
    for a, b in itertools.pairwise(curves.sizes):
        step = max(GRID, GRID * round((b - a) / (GRID * _PER_GAP)))
        for m in range(step * (a // step + 1), b, step):
            serving = intervals[bisect_right(starts, m) - 1].kernel
            seconds = _serving_s(curves, serving, m)
            options = [(expected_s, name) for name in names(m) if (expected_s := curves.expected(name, m))]
            best_s, name = min(options, default=(math.inf, ""))
            loss = min(seconds / best_s - 1.0, 1.0)
            if loss > least:
                worth = loss * weight(m - step // 2, m + step // 2)
                losses[a] = max(losses.get(a, (0.0, 0, "")), (worth, m, name))
    return [(m, name) for _, m, name in sorted(losses.values(), reverse=True)]


def thin_margins(curves: Curves, intervals: Sequence[PlanInterval]) -> list[tuple[int, str]]:
    """Return M between measured ones at which a kernel serves that is expected to take ``_THIN`` of ATen's plain op's
    time or more, each with this kernel; at most one M of an interval between two measured M. Those come first at which
    it is expected to take the most of it.

    The M is odd, not beside a multiple of 8, away from the ends of that part. Most measured M are edges of tiles, where
    kernels may be faster than beside them: fp8 4096x4096 was served at 1.04 of the plain op's time at M = 5234, since
    the kernel was timed at 4896 and 5376 only (H100).
    """
    curves = curves.at_scan_pace
    thin: dict[tuple[int, str], float] = {}
    for interval in intervals if curves.waves else ():
        inside = (m for m in curves.sizes if interval.first < m < interval.last)
        for a, b in itertools.pairwise((interval.first, *inside, interval.last)):
            shares = {} if interval.kernel == curves.plain else _shares_of_plain(curves, interval.kernel, a, b)
            m = max(shares, key=lambda m: shares[m], default=0)
            if m and shares[m] >= _THIN:
                thin[m, interval.kernel] = shares[m]
    return sorted(thin, key=lambda at: -thin[at])


def _shares_of_plain(curves: Curves, name: str, a: int, b: int) -> dict[int, float]:
    """Return the share of ATen's plain op's time that a kernel is expected to take, by M: at M between ``a`` and ``b``,
    away from both, that are no edges of tiles, where the plain op was scanned. Empty where the two are close."""
    quarter = (b - a) // 4
    sizes = range(GRID * ((a + quarter) // GRID) + _GENERIC, b - quarter + 1, GRID) if b - a >= GRID - 1 else range(0)
    plain = {m: curves.plain_times.at_least(m, m) for m in sizes if a < m < b}
    return {m: _serving_s(curves, name, m) / seconds for m, seconds in plain.items() if seconds is not None}


def _serving_s(curves: Curves, name: str, m: int) -> float:
    """Return the seconds that the kernel which serves ``m`` takes there: expected, scanned or at most."""
    scanned_s = curves.plain_times.at_least(m, m) if name == curves.plain else None
    return curves.expected(name, m) or scanned_s or curves.at_most(name, m)


@dataclass(frozen=True)
class Gap:
    """Two neighboring measured M with others between them. loss: the share of time that choosing a kernel there without
    a measurement may lose. urgency: the loss times the share of calls in the gap. is_plain: whether ATen's plain op
    serves all of it because it serves ``a``."""

    a: int
    b: int
    loss: float
    urgency: float
    is_plain: bool = False


def gaps(curves: Curves, points: Mapping[int, str]) -> list[Gap]:
    """Return the gaps between measured M, the most urgent first."""
    sizes, weight = curves.sizes, curves.weight()
    result = []
    for a, b in itertools.pairwise(sizes):
        if b - a > 1:
            loss = _possible_loss(curves, points, a, b)
            result.append(Gap(a, b, loss, loss * weight(a + 1, b - 1), points[a] == curves.plain))
    return sorted(result, key=lambda gap: -gap.urgency)


def _possible_loss(curves: Curves, points: Mapping[int, str], a: int, b: int) -> float:
    """Return the share of time that may be lost between ``a`` and ``b``.

    A kernel's time lies between those at the two ends, on a line if it has no steps. A step moves it off that line by
    at most the time of one row of tiles.
    """
    close = [name for name in curves.times if _is_close(curves, name, a) or _is_close(curves, name, b)]
    steps = [_step(curves, name, a, b) for name in close]
    off_line = max(steps, default=0.0)
    left, right = points[a], points[b]
    if left == right:
        return off_line
    at_a, at_b = _ratio(curves, right, left, a), _ratio(curves, left, right, b)
    # ATen's plain op serves the whole gap if it is one of the two: up to where the other one was measured.
    crossing = at_b if left == curves.plain else at_a if right == curves.plain else min(at_a, at_b)
    return max(off_line, min(crossing, 1.0))


def _ratio(curves: Curves, slower: str, faster: str, m: int) -> float:
    slow, fast = curves.times[slower].get(m, math.inf), curves.times[faster].get(m, math.inf)
    return max(0.0, slow / fast - 1.0) if fast < math.inf else 1.0


def _is_close(curves: Curves, name: str, m: int) -> bool:
    seconds, best = curves.times[name].get(m, math.inf), curves.best(m)
    return seconds <= (1.0 + CLOSE) * best


def _step(curves: Curves, name: str, a: int, b: int) -> float:
    """Return how far a kernel's time between ``a`` and ``b`` may be off the line between its times there, as a share of
    it.

    The growth is that of all rows of tiles between the two. One row of tiles is a share of it; waves of tiles, which
    group several rows, are allowed for by a factor of two. ATen's steps are not known: as if its tiles had 64 rows.
    """
    times = curves.times[name]
    if a not in times or b not in times or times[b] <= times[a]:
        return 0.0
    rows = curves.steps.get(name, 64)
    steps = -(-b // rows) - -(-a // rows)
    if steps <= 0:
        return 0.0
    return (times[b] / times[a] - 1.0) * min(1.0, 2.0 / steps)


def next_size(curves: Curves, gap: Gap, odd: bool = True) -> int:
    """Return the M to measure in a gap: next to a step of the closest kernel's tiles, near the middle by ratio;
    without a step in the gap, the middle. odd: prefer an odd M where there is no step.

    A row of tiles is full at the last M before a step, and has a single row of the output at the first M after it.
    Beside ATen's kernels, which have other tiles, a kernel is usually fast at one and slow at the other. The M is of
    the kind that the gap's ends are not; of either kind, in turn along M, where that does not decide.

    Where ATen's plain op serves the gap after a full row of tiles, the M is the next one: the plain op's time often
    jumps there, too, and then a kernel serves the whole gap. fp8 4096x4096 at M = 3118 was served by the plain op at
    1.14 of a kernel's time (H100), since they were alike at M = 2944.
    """
    middle = math.sqrt(gap.a * gap.b) if gap.b > _NARROW * gap.a else (gap.a + gap.b) / 2
    ranked = sorted(curves.times, key=lambda name: curves.times[name].get(gap.b, math.inf))
    for name in ranked[:2]:
        rows = curves.steps.get(name, 1)
        if rows == 1:
            continue
        if gap.is_plain and gap.a % rows == 0:
            return gap.a + 1
        ends = (gap.a % rows, gap.b % rows)
        is_first = ends.count(0) > ends.count(1) if ends.count(0) != ends.count(1) else int(middle // rows) % 2 == 0
        edges = [rows * (int(middle // rows) + step) + is_first for step in (0, 1)]
        inside = [edge for edge in edges if gap.a < edge < gap.b]
        if inside:
            return min(inside, key=lambda edge: abs(edge - middle))
    m = min(max(round(middle), gap.a + 1), gap.b - 1)
    if odd and m % 2 == 0:
        m = m + 1 if m + 1 < gap.b else m - 1 if m - 1 > gap.a else m
    return m
