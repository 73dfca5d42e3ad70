"""The times of one layout's kernels at the M at which they were measured, and what they say of one kernel at others.

Kernels of different layouts never serve one weight.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

from ..core.plan_times import least_times
from .plain_times import NO_ALGORITHMS, LibraryAlgorithms, PlainTimes

# A kernel is no faster than ATen's plain op, which serves without risk, unless it is by this share of ATen's time.
MARGIN = 0.01
MAX_NOISE = 0.03  # more noise than this does not excuse a difference
# By how much a kernel's time, as a share of the fastest one's at the same M, differs in another tuning of the weight,
# beside the noise within one. On H200s and H100s 95% of the differences are within 1.5% where the noise is 0.3% or
# less, and within 3.8% where it is 0.6% to 1.2%. With 2%, 84 plans have 5.7 kernels in the mean, 6.2 without; the
# largest regret stays 9.8% (``benchmarks/repeatability.py``). The fastest of thirty is often one timed too fast.
REPEATABLE = 0.02
CLOSE = 0.15  # kernels within this share of the fastest may be the fastest at an M nearby
IRREGULAR = 1.3  # a kernel that takes this multiple of its own time at a larger M is not served at all
_PACE_NEAR = 5  # M
_REACH = 1.6  # estimates are compared with times at M within this factor


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
    scan: seconds of ATen's plain op by M, at more M than those in ``times`` (``plain_scan``). algorithms: of the plain
    op.
    with_plain_product: ids of kernels that run the plain op's product, and differ from it by work that takes as long
    for any M: the plain op's seconds at M are their estimate.
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
    scan: Mapping[int, float] = field(default_factory=dict)
    algorithms: LibraryAlgorithms = NO_ALGORITHMS
    with_plain_product: Collection[str] = ()

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
        return seconds + self.overhead_s <= (1.0 - max(MARGIN, self._noise_at(m))) * plain_s

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
        if index == len(sizes) or sizes[index] > _REACH * m or not (estimate_s := self.uncorrected_s(name, m)):
            return None
        above, below = sizes[index], sizes[max(index - 1, 0)]
        estimates = {size: self.uncorrected_s(name, size) or estimate_s for size in (below, above)}
        ratios = {size: self.times[name][size] / seconds for size, seconds in estimates.items()}
        if not m / _REACH <= below <= m or (estimate_s == estimates[above] and estimate_s != estimates[below]):
            return estimate_s * ratios[above]
        if estimate_s == estimates[below]:
            return estimate_s * ratios[below]
        share = (m - below) / (above - below)
        return float(estimate_s * ratios[below] ** (1.0 - share) * ratios[above] ** share)

    def uncorrected_s(self, name: str, m: int) -> float | None:
        """Return the estimate of a kernel's seconds at M, not corrected by its times; None without one."""
        return self.plain_times.expected(m) if name in self.with_plain_product else self.estimated_s(name, m)

    def expected_or_most(self, name: str, m: int) -> float:
        """Return the seconds that a kernel is expected to take at M. Without an estimate, those that it takes at most:
        what it takes at the next M on either side, whichever is more."""
        below = bisect_left(self._sizes_of[name], m) - 1
        below_s = self.times[name][self._sizes_of[name][below]] if below >= 0 else 0.0
        return self.expected(name, m) or max(self.at_most(name, m), below_s)

    def usable(self, name: str, m: int) -> float:
        """Return the seconds that a kernel takes at most at a measured M; infinite where ATen's plain op should serve
        instead, and where the plain op was not timed itself."""
        if m in self.times[name] or name == self.plain:
            return self._usable[name].get(m, math.inf)
        seconds = self.at_most(name, m)
        return seconds if self._beats_plain(m, seconds) else math.inf

    @cached_property
    def plain_times(self) -> PlainTimes:
        """The times of ATen's plain op where it was timed or scanned; none if it was not scanned, or cannot serve."""
        timed = self.times.get(self.plain, {})
        return PlainTimes(least_times((self.scan, timed)) if self.scan and timed else {}, self.algorithms)

    @cached_property
    def at_scan_pace(self) -> Curves:
        """These curves with all times at an M divided by what calls took there, when they were timed, over what they
        took in the scan; these curves where the plain op was not scanned.

        A GPU at its power limit takes longer: ATen's plain op took 1.03 to 1.19 times as long beside other kernels as
        in its scan, from M = 2047 on (bfloat16 4096x22016, H200, ``plan_us`` and ``scan_us`` of
        every-m-20261130-055805). Kernels looked slower than the scanned plain op, by as much. Single ratios are noisy:
        that of an M counts up to the median of those at the nearest ``_PACE_NEAR`` M.
        """
        timed, scan = self.times.get(self.plain, {}), PlainTimes(self.scan, self.algorithms)
        ratios = {m: timed[m] / seconds for m in sorted(timed) if (seconds := scan.expected(m))}
        sizes, pace = list(ratios), dict[int, float]()
        for index, m in enumerate(sizes):
            start = min(max(index - _PACE_NEAR // 2, 0), max(len(sizes) - _PACE_NEAR, 0))
            near = median(ratios[size] for size in sizes[start : start + _PACE_NEAR])
            pace[m] = max(1.0, min(ratios[m], near))
        if not pace:
            return self
        times = {name: {m: s / pace.get(m, 1.0) for m, s in by_m.items()} for name, by_m in self.times.items()}
        return replace(self, times=times)

    def least_of_kernels(self, m: int) -> float:
        """Return the least seconds of the kernels other than ATen's plain op at a measured M; infinite without any."""
        kernels = (times for name, times in self.times.items() if name != self.plain)
        return min((times[m] for times in kernels if m in times), default=math.inf)

    def fastest(self, m: int) -> str:
        """Return the kernel of the least time at a measured M."""
        return min(self.times, key=lambda name: self.times[name].get(m, math.inf))

    def best(self, m: int) -> float:
        """Return the least usable time at a measured M."""
        return self._best.get(m, math.inf)

    def regret(self, name: str, m: int) -> float:
        """Return by how much a kernel's time exceeds the least at a measured M beyond the noise, as a share of the
        latter."""
        best = self.best(m)
        return max(0.0, self.usable(name, m) / best - 1.0 - self._noise_at(m)) if best < math.inf else math.inf

    def excess(self, regret: float, m: int, bound: float) -> float:
        """Return by how much a regret at M exceeds ``bound`` beyond what another tuning may find: the noise, without
        which the regret is, and ``REPEATABLE`` together are ``MAX_NOISE`` at most."""
        noise = self._noise_at(m)
        return max(0.0, regret - bound - (min(math.hypot(noise, REPEATABLE), MAX_NOISE) - noise))

    def _noise_at(self, m: int) -> float:
        """Return the share of a time below which a difference at M is noise."""
        return min(self.noise.get(m, 0.0), MAX_NOISE)

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
    slow: dict[str, dict[int, int]] = {}
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
                slow.setdefault(name, {})[m] = fastest
            if times[m] < times[fastest]:
                fastest = m
    return slow


def point_weights(curves: Curves) -> dict[int, float]:
    """Return the weight of each measured M: that of the M nearest to it by ratio."""
    sizes, weight = curves.sizes, curves.weight()
    edges = [curves.first]
    edges += [max(a + 1, math.ceil(math.sqrt(a * b))) for a, b in itertools.pairwise(sizes)]
    edges.append(curves.last + 1)
    return {m: weight(lo, hi - 1) if hi > lo else 0.0 for m, lo, hi in zip(sizes, edges, edges[1:], strict=False)}
