"""From times at some M to intervals of M: which kernels a Plan has, where each serves, and where to measure next.

Nothing here runs a kernel. All times are of one layout: kernels of different layouts never serve one weight.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from ..core.plan_times import least_times
from ..core.tuned_plan import PlanInterval

# Kernels of a layout, ATen's plain op not counted. Of the kernels that eight plans of fp8, int8 and int4 weights had
# timed on an H200 and H100s, the best 8 are 1.3% to 5.9% slower than all in the mean over M, the best 10 0.6% to 3.8%.
MAX_KERNELS = 10
MEAN_REGRET = 0.007  # kernels are added while the weighted mean regret is above this, and falls by _WORTH
_WORTH = 0.002
_BEYOND = 3.0  # what exceeds the bound adds this multiple of itself to the regret
_EXCESS = 1e3  # the cost of a regret above the bound, at an M of any weight
_SWITCH = 0.004  # the regret, at an M of average weight, that a change of kernels between two M must save
# A kernel is no faster than ATen's plain op, which serves without risk, unless it is by this share of ATen's time.
MARGIN = 0.01
MAX_NOISE = 0.03  # more noise than this does not excuse a difference
CLOSE = 0.15  # kernels within this share of the fastest may be the fastest at an M nearby
IRREGULAR = 1.3  # a kernel that takes this multiple of its own time at a larger M is not served at all
_UNKNOWN = 10.0
_REACH = 1.6  # estimates are compared with times at M within this factor
_EXPECTED_GAIN = 0.03  # that a change of kernels between two measured M must have: estimates are no better
# By this share of ATen's time a kernel must be faster between two measured M than the plain op is at least. fp8 kernels
# that took 0.94 to 0.98 of its time beside such M took 1.02 and 1.045 there, in the steady load of a benchmark (H100).
_BESIDE = 0.05
_GRID = 16  # rows from one M to the next at which estimates choose between two measured M
# cuBLAS is faster at multiples of it than at the M around them: fp8 4608x4096x4096 was served at 1.04 of its time
# (H100), between two other M at which it took longer.
_ALIGNED = 16
_PER_GAP = 8  # M between two measured ones at which a loss is estimated
_NARROW = 1.04  # below this ratio of two neighboring M, times between them are interpolated


def no_estimate(name: str, m: int) -> float | None:
    """Return None: there are no estimates of times."""
    return None


@dataclass(frozen=True)
class Curves:
    """The times of kernels of one layout over M.

    times: seconds by kernel id and M. steps: by kernel id, the rows of its output tile (its
    time has a step at each multiple of them); 1 where they are not known. plain: id of ATen's plain op, which may serve
    any M; "" in a packed layout, where it cannot. counts: recorded calls by M. noise: of the times at an M, relative.
    overhead_s: what is added to a kernel's time for the comparison with ATen's plain op (``TunedPlan.overhead_s``).
    waves: whether the device computes many tiles at a time, so that one row of tiles more may take as long as several.
    estimated_s: returns a backend's estimate of a kernel's seconds at an M; None where it has none.
    """

    first: int
    last: int
    times: Mapping[str, Mapping[int, float]]
    plain: str = ""
    steps: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[int, int] = field(default_factory=dict)
    noise: Mapping[int, float] = field(default_factory=dict)
    overhead_s: float = 0.0
    waves: bool = False
    estimated_s: Callable[[str, int], float | None] = no_estimate

    @cached_property
    def sizes(self) -> list[int]:
        """The M at which at least one kernel was timed, ascending."""
        return sorted({m for times in self.times.values() for m in times})

    @cached_property
    def _usable(self) -> dict[str, dict[int, float]]:
        """The times without those at which ATen's plain op should serve instead."""
        return {
            name: {m: s for m, s in times.items() if name == self.plain or self._beats_plain(m, s)}
            for name, times in self.times.items()
        }

    @cached_property
    def _best(self) -> dict[int, float]:
        """The least usable time by M."""
        return least_times(self._usable.values())

    def _beats_plain(self, m: int, seconds: float) -> bool:
        plain_s = self.times[self.plain].get(m, math.inf) if self.plain else math.inf
        return seconds + self.overhead_s <= (1.0 - max(MARGIN, self._tolerance(m))) * plain_s

    @cached_property
    def _sizes_of(self) -> dict[str, list[int]]:
        """The M at which each kernel was timed, ascending."""
        return {name: sorted(times) for name, times in self.times.items()}

    def at_most(self, name: str, m: int) -> float:
        """Return the seconds that a kernel takes at M, or at the next larger M at which it was timed: fewer rows take
        no longer. Infinite where it was timed at smaller M only."""
        sizes = self._sizes_of[name]
        index = bisect_left(sizes, m)
        return self.times[name][sizes[index]] if index < len(sizes) else math.inf

    def expected(self, name: str, m: int) -> float | None:
        """Return the seconds that a kernel is expected to take at M: its time there, or the estimate for M times what
        its times at the next M on either side are of the estimates there (their geometric mean, weighted by distance).
        None without an estimate, and where it was not timed at a larger M nearby.

        Estimates know how many waves of tiles there are, which a line between two times does not.
        """
        if m in self.times[name]:
            return self.times[name][m]
        sizes = self._sizes_of[name]
        index = bisect_left(sizes, m)
        if index == len(sizes) or sizes[index] > _REACH * m or not (estimate_s := self.estimated_s(name, m)):
            return None
        above, below = sizes[index], sizes[max(index - 1, 0)]
        estimates = {size: self.estimated_s(name, size) or estimate_s for size in (below, above)}
        ratios = {size: self.times[name][size] / seconds for size, seconds in estimates.items()}
        if not m / _REACH <= below <= m or (estimate_s == estimates[above] and estimate_s != estimates[below]):
            return estimate_s * ratios[above]
        if estimate_s == estimates[below]:
            return estimate_s * ratios[below]
        share = (m - below) / (above - below)
        return float(estimate_s * ratios[below] ** (1.0 - share) * ratios[above] ** share)

    @cached_property
    def _aligned_sizes(self) -> list[int]:
        """The M at which ATen's plain op was timed that are multiples of ``_ALIGNED``, ascending."""
        return sorted(m for m in self.times.get(self.plain, {}) if m % _ALIGNED == 0)

    def plain_at_least(self, m: int) -> float:
        """Return the seconds that ATen's plain op may take near a measured M: its time there, or less where the line
        between its times at the next multiples of ``_ALIGNED`` is below that. Infinite where it was not timed."""
        plain, sizes = self.times.get(self.plain, {}), self._aligned_sizes
        index = bisect_left(sizes, m)
        seconds = plain.get(m, math.inf)
        if not self.waves or not 0 < index < len(sizes) or sizes[index] > 2 * sizes[index - 1]:
            return seconds
        below, above = sizes[index - 1], sizes[index]
        line_s = plain[below] + (plain[above] - plain[below]) * (m - below) / (above - below)
        return min(seconds, line_s)

    def usable(self, name: str, m: int) -> float:
        """Return the seconds that a kernel takes at most at a measured M; infinite where ATen's plain op should serve
        instead, and where the plain op was not timed itself."""
        if m in self.times[name] or name == self.plain:
            return self._usable[name].get(m, math.inf)
        seconds = self.at_most(name, m)
        return seconds if self._beats_plain(m, seconds) else math.inf

    def _tolerance(self, m: int) -> float:
        """Return the share of a time below which a difference at M is noise."""
        return min(self.noise.get(m, 0.0), MAX_NOISE)

    def best(self, m: int) -> float:
        """Return the least usable time at a measured M."""
        return self._best.get(m, math.inf)

    def regret(self, name: str, m: int) -> float:
        """Return by how much a kernel's time exceeds the least at a measured M beyond the noise, as a share of the
        latter."""
        best = self.best(m)
        return max(0.0, self.usable(name, m) / best - 1.0 - self._tolerance(m)) if best < math.inf else math.inf

    def without(self, names: Collection[str]) -> Curves:
        """Return the curves without some kernels, and without the M at which only ATen's plain op was timed besides
        them, or for another layout: they do not show that it is the fastest. Those below and above all M at which
        kernels were timed stay, since ATen's plain op serves where no kernel was timed."""
        times = {name: curve for name, curve in self.times.items() if name not in names}
        plain = self.plain if self.plain in times else ""
        compared = {m for name, curve in times.items() if name != plain for m in curve}
        if plain and compared:
            least, most = min(compared), max(compared)
            times[plain] = {m: s for m, s in times[plain].items() if m in compared or not least < m < most}
        return replace(self, times=times, plain=plain)

    def weight(self) -> Callable[[int, int], float]:
        """Return the function weight(lo, hi): the share of calls that M from ``lo`` to ``hi`` are expected to have.

        Half of the calls are spread evenly over M and half over log M; where calls were recorded, those are half of
        all.
        """
        total = sum(self.counts.values())
        span, log_span = self.last - self.first + 1, math.log((self.last + 1) / self.first)

        def weight(lo: int, hi: int) -> float:
            prior = 0.5 * (hi - lo + 1) / span + 0.5 * math.log((hi + 1) / lo) / log_span
            if not total:
                return prior
            return 0.5 * prior + 0.5 * sum(n for m, n in self.counts.items() if lo <= m <= hi) / total

        return weight


def irregular(
    curves: Curves, margin: int = 0, reference: Mapping[int, float] | None = None
) -> dict[str, dict[int, int]]:
    """Return the kernels whose time at some M is far above their own time at a larger M, beyond the noise of both:
    other M, which were not measured, may be as slow. By kernel: each such M, with the larger M of the least time.

    reference: seconds by M of ATen's plain op. Where it was slower, too, than at the larger M, the machine was. Only
    the range of M in which a kernel may serve counts: from the first to the last M at which its time is close to the
    least, and ``margin`` more measured M on either side. Surcharges must not be part of the times: they fall with M.
    """
    found: dict[str, dict[int, int]] = {}
    reference = reference or {}
    least = least_times(curves.times.values())
    for name, times in curves.times.items():
        sizes = sorted(times)
        close = [index for index, m in enumerate(sizes) if times[m] <= (1.0 + CLOSE) * least[m]]
        inside = set(sizes[max(close[0] - margin, 0) : close[-1] + margin + 1]) if close else set()
        fastest = sizes[-1] if sizes else 0  # of the M above
        for m in reversed(sizes):
            noise = (1.0 + curves.noise.get(m, 0.0)) * (1.0 + curves.noise.get(fastest, 0.0))
            slower = reference[m] / reference[fastest] if {m, fastest} <= set(reference) else 1.0
            if m in inside and times[m] > IRREGULAR * noise * max(1.0, slower) * times[fastest]:
                found.setdefault(name, {})[m] = fastest
            if times[m] < times[fastest]:
                fastest = m
    return found


def point_weights(curves: Curves) -> dict[int, float]:
    """Return the weight of each measured M: that of the M nearest to it by ratio."""
    sizes, weight = curves.sizes, curves.weight()
    edges = [curves.first]
    edges += [max(a + 1, math.ceil(math.sqrt(a * b))) for a, b in itertools.pairwise(sizes)]
    edges.append(curves.last + 1)
    return {m: weight(lo, hi - 1) if hi > lo else 0.0 for m, lo, hi in zip(sizes, edges, edges[1:], strict=False)}


def choose_kernels(curves: Curves, bound: float) -> list[str]:
    """Return the fewest kernels with which no measured M has a regret above ``bound``, found greedily, with exchanges;
    more where they lower the mean regret. ATen's plain op is always among them where it can serve."""
    choice = _Choice(curves, bound)
    chosen = [curves.plain] if curves.plain else []
    free = len(chosen)
    score = choice.score(chosen)
    while len(chosen) - free < MAX_KERNELS:
        options = [(choice.score([*chosen, name]), name) for name in curves.times if name not in chosen]
        if not options:
            break
        best, name = min(options)
        is_enough = score.excess <= 0.0 and (score.cost <= MEAN_REGRET or score.cost - best.cost < _WORTH)
        if best.cost >= score.cost or is_enough:
            break
        chosen.append(name)
        chosen, score = choice.exchange(chosen, best)
    return choice.without_useless(chosen, score)


class _Score(NamedTuple):
    """How well a set of kernels serves.

    cost: the weighted mean of the regrets, to which what exceeds the bound adds ``_BEYOND`` times itself. excess: by
    how much the largest regret exceeds the bound; at most 0 where none does.
    """

    cost: float
    excess: float


class _Choice:
    """Scores of sets of kernels. An M without any kernel counts as a regret of ``_UNKNOWN``."""

    def __init__(self, curves: Curves, bound: float) -> None:
        weights = point_weights(curves)
        total = sum(weights.values()) or 1.0
        self._plain, self._bound = curves.plain, bound
        self._shares = [weight / total for weight in weights.values()]
        self._is_served = [curves.best(m) < math.inf for m in weights]
        self._regrets = {name: [min(curves.regret(name, m), _UNKNOWN) for m in weights] for name in curves.times}

    def score(self, chosen: Sequence[str]) -> _Score:
        return self._score(self._least(chosen))

    def exchange(self, chosen: list[str], score: _Score) -> tuple[list[str], _Score]:
        """Return the kernels and their score after all exchanges of one kernel for another that lower it."""
        for name in chosen:
            if name == self._plain:
                continue
            rest = [other for other in chosen if other != name]
            least = self._least(rest)
            best, other = min(
                (self._score(list(map(min, least, regrets))), other)
                for other, regrets in self._regrets.items()
                if other not in rest
            )
            if best < score:
                return self.exchange([*rest, other], best)
        return chosen, score

    def without_useless(self, chosen: list[str], score: _Score) -> list[str]:
        """Return ``chosen`` without the kernels that others, chosen later, made needless."""
        for name in chosen:
            if name == self._plain:
                continue
            rest = [other for other in chosen if other != name]
            without = self.score(rest)
            if without.excess <= max(score.excess, 0.0) and without.cost <= max(MEAN_REGRET, score.cost + _WORTH):
                return self.without_useless(rest, without)
        return chosen

    def _least(self, chosen: Sequence[str]) -> list[float]:
        """Return the least regret of some kernels at each M."""
        return [min(regrets) for regrets in zip(*(self._regrets[name] for name in chosen), strict=True)] or [
            _UNKNOWN
        ] * len(self._shares)

    def _score(self, regrets: Sequence[float]) -> _Score:
        mean = sum(share * regret for share, regret in zip(self._shares, regrets, strict=True))
        beyond = [
            regret - self._bound if is_served else 0.0
            for regret, is_served in zip(regrets, self._is_served, strict=True)
        ]
        cost = mean + _BEYOND * sum(share * max(0.0, part) for share, part in zip(self._shares, beyond, strict=True))
        return _Score(cost, max(beyond, default=0.0))


def serving(curves: Curves, chosen: Sequence[str], bound: float) -> dict[int, str]:
    """Return the kernel that serves each measured M: the least regret, with few changes from M to M. It is above
    ``bound`` only where that of all chosen kernels is."""
    weights = point_weights(curves)
    sizes, mean = curves.sizes, sum(weights.values()) / max(len(weights), 1)
    costs: dict[str, float] = dict.fromkeys(chosen, 0.0)
    back: list[dict[str, str]] = []
    for m in sizes:
        before = min(costs, key=lambda name: costs[name])
        step, origin = {}, {}
        regrets = {name: curves.regret(name, m) for name in chosen}
        limit = max(bound, min(regrets.values()))
        for name in chosen:
            stay = costs[name] <= costs[before] + _SWITCH * mean
            origin[name] = name if stay else before
            regret = weights[m] * min(regrets[name], 10.0) + (_EXCESS if regrets[name] > limit else 0.0)
            step[name] = (costs[name] if stay else costs[before] + _SWITCH * mean) + regret
        costs = step
        back.append(origin)
    name = min(costs, key=lambda item: costs[item])
    result: dict[int, str] = {}
    for m, origin in zip(reversed(sizes), reversed(back), strict=True):
        result[m] = name
        name = origin[name]
    return dict(sorted(result.items()))


def intervals(curves: Curves, points: Mapping[int, str]) -> tuple[PlanInterval, ...]:
    """Return the intervals of kernels that serve as ``points`` says at the measured M.

    Between two measured M with different kernels, ATen's plain op serves if it is one of them, since nothing shows that
    the other is faster there. Otherwise the boundary is where the estimated times cross; where backends have estimates
    any kernel of the points may serve between. Where a kernel between two measured M may take longer than ATen's plain
    op, the latter serves.
    """
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
    if left == curves.plain:
        return [(b, right)]
    if right == curves.plain:
        return [(a + 1, right)]
    if curves.expected(left, a + 1) is not None and curves.expected(right, a + 1) is not None:
        return [*_expected_starts(curves, chosen, left, a, b), (b, right)]
    boundary = b if left == right else _boundary(curves, left, right, a, b)
    rows = max(1, curves.steps.get(left, 1))
    step = min(rows * -(-a // rows) + 1, boundary)  # up to here ``left`` takes as long as at ``a``
    found = list[tuple[int, str]]()
    for first, end, name in ((step, boundary, left), (boundary, b, right)):
        if first < end:
            found += [(first, curves.plain), (_first_not_slower(curves, name, a, b, first, end), name)]
    found.append((b, right))
    # Where the next run begins at the same M, a run is empty.
    return [start for start, after in itertools.pairwise([*found, (b + 1, "")]) if start[0] < after[0]]


def _expected_starts(curves: Curves, chosen: Sequence[str], left: str, a: int, b: int) -> list[tuple[int, str]]:
    """Return the starts of runs between the measured M ``a``, which ``left`` serves, and ``b``: of the kernels that are
    expected to be the fastest, among those that take no longer than ATen's plain op."""
    found, current = list[tuple[int, str]](), left
    steps = {_GRID, *(curves.steps.get(name, _GRID) for name in chosen)} - {1}
    firsts = {m for rows in steps for m in range(rows * (a // rows + 1) + 1, b, rows)}  # of a row of tiles
    for m in sorted({a + 1, *firsts} - {b}):
        options = {name: s for name in chosen if (s := curves.expected(name, m)) and _is_safe(curves, name, a, b, m)}
        fastest = min(options, key=lambda name: options[name], default=curves.plain or left)
        if current not in options or options[current] > (1.0 + _EXPECTED_GAIN) * options[fastest]:
            if fastest != current:
                found.append((m, fastest))
            current = fastest
    return found


def _is_safe(curves: Curves, name: str, a: int, b: int, m: int) -> bool:
    """Return whether a kernel is faster than ATen's plain op, by ``_BESIDE``, from ``m`` to ``_GRID`` rows further,
    between two neighboring measured M.

    One that is faster at ``a`` takes as long as there where its estimates are equal: with as many waves of tiles.
    """
    times, rows, last = curves.times[name], max(1, curves.steps.get(name, 1)), min(m + _GRID - 1, b - 1)
    if a in times and curves.usable(name, a) < math.inf:
        is_same = curves.estimated_s(name, last) == curves.estimated_s(name, a)
        least_s = min(curves.plain_at_least(a), curves.plain_at_least(b))
        if is_same and (-(-last // rows) <= -(-a // rows) or times[a] + curves.overhead_s <= (1.0 - _BESIDE) * least_s):
            return True
    return _first_not_slower(curves, name, a, b, m, b, _BESIDE) <= m


def _first_not_slower(curves: Curves, name: str, a: int, b: int, first: int, end: int, margin: float = 0.0) -> int:
    """Return the least M from ``first`` to ``end`` from which a kernel takes no longer than ATen's plain op, less
    ``margin`` of its time, where its next row of tiles may take it as long as it takes at ``b``; ``first`` for a kernel
    whose tiles are not known, and on a device without waves.

    The times of the plain op are interpolated between what it takes at least near ``a`` and ``b``. fp8 3481x4096x11008
    was served at 1.086 of the plain op's time (H100): at M = 3378 and 3713 the kernel is 5% and 6% faster, but it has
    another wave of tiles from 3457 on.
    """
    plain = curves.times.get(curves.plain, {})
    if not curves.waves or curves.steps.get(name, 1) == 1 or a not in plain or b not in plain:
        return first
    plain_b = curves.plain_at_least(b)
    least_s = min(curves.plain_at_least(a), plain_b)
    seconds = (curves.at_most(name, b) + curves.overhead_s) / (1.0 - margin)
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


def expected_losses(
    curves: Curves, found: Sequence[PlanInterval], names: Callable[[int], Sequence[str]], least: float
) -> list[tuple[int, str]]:
    """Return M that were not measured at which a kernel is expected to be faster than the one that serves, and this
    kernel; at most one M between two measured ones. Those come first at which most is lost, by the share of calls.

    names(m): the kernels to consider at M. least: the share of time below which a loss does not count.
    """
    weight, starts = curves.weight(), [interval.first for interval in found]
    losses: dict[int, tuple[float, int, str]] = {}
    for a, b in itertools.pairwise(curves.sizes):
        step = max(_GRID, _GRID * round((b - a) / (_GRID * _PER_GAP)))
        for m in range(step * (a // step + 1), b, step):
            serving = found[bisect_right(starts, m) - 1].kernel
            seconds = curves.expected(serving, m) or curves.at_most(serving, m)
            options = [(expected_s, name) for name in names(m) if (expected_s := curves.expected(name, m))]
            best_s, name = min(options, default=(math.inf, ""))
            loss = min(seconds / best_s - 1.0, 1.0)
            if loss > least:
                worth = loss * weight(m - step // 2, m + step // 2)
                losses[a] = max(losses.get(a, (0.0, 0, "")), (worth, m, name))
    return [(m, name) for _, m, name in sorted(losses.values(), reverse=True)]


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
    found = []
    for a, b in itertools.pairwise(sizes):
        if b - a > 1:
            loss = _possible_loss(curves, points, a, b)
            found.append(Gap(a, b, loss, loss * weight(a + 1, b - 1), points[a] == curves.plain))
    return sorted(found, key=lambda gap: -gap.urgency)


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


def measured_inside(curves: Curves, name: str, interval: PlanInterval) -> list[int]:
    """Return the M of an interval at which its kernel was timed, ascending."""
    sizes = sorted(curves.times[name])
    return sizes[bisect_left(sizes, interval.first) : bisect_left(sizes, interval.last + 1)]
