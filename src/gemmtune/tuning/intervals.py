"""Intervals of M from the kernels that serve the measured M: which kernel serves those between."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from ..core.tuned_plan import PlanInterval
from .curves import MARGIN, Curves
from .plain_scan import TILE

GRID = 16  # rows from one M to the next at which estimates choose between two measured M
_UNKNOWN = 10.0
_EXPECTED_GAIN = 0.03  # that a change of kernels between two measured M must have: estimates are no better
# By this share of ATen's time a kernel must be faster between two measured M than the plain op is at least, where that
# was not scanned. In a replay of seven plans for fp8 (each measured M by those beside it; a script that was not kept)
# 0.03 lost 5.2% in the mean and took more than 1.02 of ATen's time at 3 of 500 M; 0.05, with a lower bound of ATen's
# times from multiples of 16, lost 6.7%, and 2 of 500.
_BESIDE = 0.03


def intervals(curves: Curves, points: Mapping[int, str]) -> tuple[PlanInterval, ...]:
    """Return the intervals of kernels that serve as ``points`` says at the measured M.

    Between two measured M with different kernels, ATen's plain op serves if it is one of them, since nothing shows that
    the other is faster there, unless the plain op was scanned between them. Otherwise the boundary is where the
    estimated times cross; where backends have estimates any kernel of the points may serve between. Where a kernel
    between two measured M may take longer than ATen's plain op, the latter serves.
    """
    curves = curves.at_scan_pace
    sizes, chosen = sorted(points), sorted(set(points.values()) - {curves.plain})
    starts = [(curves.first, points[sizes[0]])]
    for a, b in itertools.pairwise(sizes):
        starts += _starts_between(curves, chosen, points[a], points[b], a, b)
    changes = [start for before, start in itertools.pairwise([(0, ""), *starts]) if before[1] != start[1]]
    ends = [*(start - 1 for start, _ in changes[1:]), curves.last]
    return tuple(PlanInterval(start, end, name) for (start, name), end in zip(changes, ends, strict=True))


def _starts_between(
    curves: Curves, chosen: Sequence[str], left: str, right: str, a: int, b: int
) -> list[tuple[int, str]]:
    """Return (first M, kernel) of each run of M with one kernel, after the measured M ``a``, which ``left`` serves. The
    last run begins at the next measured M, ``b``, or before, and is that of ``right``, which serves ``b``. chosen: the
    kernels of all points, without ATen's plain op."""
    has_estimates = [curves.expected(name, a + 1) is not None for name in (left, right) if name != curves.plain]
    if curves.plain_times.at_least(a, b) is not None or has_estimates == [True, True]:
        return [*_expected_starts(curves, chosen, left, a, b), (b, right)]
    if left == curves.plain:
        return [(b, right)]
    if right == curves.plain:
        return [(a + 1, right)]
    boundary = b if left == right else _boundary(curves, left, right, a, b)
    rows = max(1, curves.steps.get(left, 1))
    step = min(rows * -(-a // rows) + 1, boundary)  # up to here ``left`` takes as long as at ``a``
    starts = list[tuple[int, str]]()
    for first, end, name in ((step, boundary, left), (boundary, b, right)):
        if first < end:
            starts += [(first, curves.plain), (_first_not_slower(curves, name, a, b, first, end), name)]
    starts.append((b, right))
    # Where the next run begins at the same M, a run is empty.
    return [start for start, after in itertools.pairwise([*starts, (b + 1, "")]) if start[0] < after[0]]


def _expected_starts(curves: Curves, chosen: Sequence[str], left: str, a: int, b: int) -> list[tuple[int, str]]:
    """Return the starts of runs between the measured M ``a``, which ``left`` serves, and ``b``: of the kernels that are
    expected to be the fastest, among those that take no longer than ATen's plain op. Those without estimates take part
    where the plain op was scanned, with the times that they take at most."""
    starts, current = list[tuple[int, str]](), left
    steps = {GRID, *(curves.steps.get(name, GRID) for name in chosen)} - {1}
    firsts = {m for rows in steps for m in range(rows * (a // rows + 1) + 1, b, rows)}  # of a row of tiles
    is_scanned = curves.plain_times.at_least(a, b) is not None
    if is_scanned:  # at full rows of tiles the plain op may be faster than on either side
        firsts |= {m for full in range(TILE * (a // TILE + 1), b, TILE) for m in (full, full + 1)}
    firsts = {a + 1, *firsts} - {b}
    blocks = [(m, after - 1) for m, after in itertools.pairwise([*sorted(firsts), b])]
    for m, last in (part for block in blocks for part in (_parts(curves, chosen, *block) if is_scanned else [block])):
        expected = {
            name: curves.expected_or_most(name, m) if is_scanned else curves.expected(name, m) for name in chosen
        }
        options = {name: s for name, s in expected.items() if s and _is_safe(curves, name, a, b, m, last)}
        fastest = min(options, key=lambda name: options[name], default=curves.plain or left)
        if current not in options or options[current] > (1.0 + _EXPECTED_GAIN) * options[fastest]:
            if fastest != current:
                starts.append((m, fastest))
            current = fastest
    return starts


def _parts(curves: Curves, chosen: Sequence[str], first: int, last: int) -> list[tuple[int, int]]:
    """Return the first and last M of the parts of a block in each of which the library of ATen's plain op chooses one
    algorithm, where a kernel is expected to be faster than the plain op by ``_EXPECTED_GAIN`` in one of them, and is
    not in another; the whole block where that is not so."""
    runs = [(start, end) for start, end, _ in curves.algorithms.runs(first, last)]
    if len(runs) > 1:
        plain = [curves.plain_times.at_least(*run) or 0.0 for run in runs]
        fastest_s = min((curves.expected_or_most(name, last) for name in chosen), default=math.inf)
        if min(plain) * (1.0 - MARGIN) < fastest_s + curves.overhead_s <= max(plain) * (1.0 - _EXPECTED_GAIN):
            return runs
    return [(first, last)]


def _is_safe(curves: Curves, name: str, a: int, b: int, m: int, last: int) -> bool:
    """Return whether a kernel is faster than ATen's plain op from ``m`` to ``last``, between two neighboring measured
    M.

    Where the plain op was scanned, it is if it is faster than the least time there by ``MARGIN``: in a replay of 34
    plans for bfloat16, fp8 and int8 weights (2,888 measured M, each by those beside it; a script that was not kept) 0,
    0.01 and 0.03 lose 2.2%, 2.3% and 2.6% in the mean, and take more than 1.02 of ATen's time at 41, 37 and 30 M.
    Elsewhere by ``_BESIDE``. There, a kernel that is faster at ``a`` takes as long as there where its estimates are
    equal: with as many waves of tiles.
    """
    if (plain_s := curves.plain_times.at_least(m, last)) is not None:
        seconds = max(curves.expected_or_most(name, m), curves.expected_or_most(name, last))
        return seconds + curves.overhead_s <= (1.0 - MARGIN) * plain_s
    times, rows = curves.times[name], max(1, curves.steps.get(name, 1))
    if a in times and curves.usable(name, a) < math.inf:
        is_same = curves.uncorrected_s(name, last) == curves.uncorrected_s(name, a)
        plain = curves.times.get(curves.plain, {})
        least_s = min(plain.get(a, math.inf), plain.get(b, math.inf))
        if is_same and (-(-last // rows) <= -(-a // rows) or times[a] + curves.overhead_s <= (1.0 - _BESIDE) * least_s):
            return True
    return _first_not_slower(curves, name, a, b, m, b, _BESIDE) <= m


def _first_not_slower(curves: Curves, name: str, a: int, b: int, first: int, end: int, margin: float = 0.0) -> int:
    """Return the least M from ``first`` to ``end`` from which a kernel takes no longer than ATen's plain op, less
    ``margin`` of its time, where its next row of tiles may take it as long as it takes at ``b``; ``first`` on a device
    without waves.

    The times of the plain op are those of its scan, if all of these M were scanned, but not all from ``a`` to ``b``;
    otherwise they are interpolated between ``a`` and ``b``. fp8
    3481x4096x11008 was served at 1.086 of the plain op's time (H100): at M = 3378 and 3713 the kernel is 5% and 6%
    faster, but it has another wave of tiles from 3457 on. A kernel of a library, whose tiles are not known, was at
    1.043 at M = 7897, between two M where it is 2% and 3% faster (bf16 4096x4096, H200).
    """
    plain = curves.times.get(curves.plain, {})
    if not curves.waves or a not in plain or b not in plain:
        return first
    plain_b = plain[b]
    least_s = min(plain[a], plain_b)
    seconds = (curves.at_most(name, b) + curves.overhead_s) / (1.0 - margin)
    if curves.plain_times.at_least(first, end) is not None:
        slower = (m for m in range(end - 1, first - 1, -1) if seconds > (curves.plain_times.at_least(m, m) or math.inf))
        return next(slower, first - 1) + 1
    if seconds <= least_s or seconds == math.inf:
        return first
    if seconds >= plain_b:
        return end
    share = (seconds - least_s) / (plain_b - least_s)
    return min(max(first, math.ceil(a + share * (b - a))), end)


def _boundary(curves: Curves, left: str, right: str, a: int, b: int) -> int:
    """Return the first M that ``right`` serves, where ``left`` serves the measured M ``a`` and ``right`` ``b``, and
    neither is ATen's plain op."""
    losses = 0.0
    best, boundary = math.inf, b
    gains = [estimate(curves, left, m, a, b) - estimate(curves, right, m, a, b) for m in range(a + 1, b)]
    for m, gain in zip(range(b - 1, a, -1), reversed(gains), strict=True):
        losses -= gain  # what serving m by ``right`` adds to the total time
        if losses < min(best, 0.0):
            best, boundary = losses, m
    return boundary


def estimate(curves: Curves, name: str, m: int, a: int, b: int) -> float:
    """Return the estimated seconds of a kernel at ``m`` between two neighboring measured M, ``a`` and ``b``: by the
    estimates of its backend where there are any (``Curves.expected``).

    Without, and with as many rows of tiles as at one of them, it takes as long. Otherwise the times are interpolated by
    rows of tiles. A kernel that was not timed at ``a`` takes no longer than at ``b``, or than at the next larger M at
    which it was timed. For one that was not timed at ``b``, more rows of tiles count as ``_UNKNOWN`` times as long, if
    that is less: a kernel that is fast because its tiles just fill the multiprocessors takes twice as long with one row
    of tiles more.
    """
    times, rows = curves.times[name], max(1, curves.steps.get(name, 1))
    ta, tm, tb = (-(-size // rows) for size in (a, m, b))
    if (expected_s := curves.expected(name, m)) is not None:
        return expected_s
    if a not in times:
        return curves.at_most(name, b)
    if tm <= ta or ta == tb:
        return times[a]
    if b not in times:
        return min(_UNKNOWN * times[a], curves.at_most(name, b))
    return times[a] + (times[b] - times[a]) * (tm - ta) / (tb - ta)


def measured_inside(curves: Curves, name: str, interval: PlanInterval) -> list[int]:
    """Return the M of an interval at which its kernel was timed, ascending."""
    sizes = sorted(curves.times[name])
    return sizes[bisect_left(sizes, interval.first) : bisect_left(sizes, interval.last + 1)]
