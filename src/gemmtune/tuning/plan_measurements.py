"""The times of a weight's kernels at many M, and what they tell: the layouts worth serving, the kernel for each M, and
where to measure next."""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median

from ..core.plan_times import least_times, surcharge_at
from ..core.tuned_plan import PlanInterval
from ..dispatch.plan_layouts import NO_SLOWER, largest_share
from . import gaps, intervals, kernel_choice, plain_scan
from .curves import CLOSE, Curves, irregular, point_weights
from .plain_times import NO_ALGORITHMS
from .plan_pool import PoolKernel
from .sizes import SizeRange

BATCH = 8  # the M of one request to the worker
_LOSS = 0.01  # a gap between two measured M is not measured if less may be lost there
_MAX_LAYOUTS = 2  # packed layouts that are still timed after the first M
_FAR_BEHIND = 2.0  # a kernel that took this multiple of the least time is not timed at larger M, or again
# A kernel that took up to this multiple of the least time at an M may be the fastest at M within this factor.
_NEARLY, _NEARBY = 1.3, 1.5
# Kernels that are timed at an M for what they took at the next M on either side. In ten plans of H100s (38 to 68 M
# each, a script that was not kept) the fastest of six was 0.0% to 0.6% slower in the mean than that of the 6 to 14
# within ``CLOSE``. Plans of H100s have 83 to 100 measured M since, 73 to 97 before (every-m-20261127-*.json).
_MOST_NEAR = 6
_LOADED_S = 2e-5  # shorter calls do not keep a GPU busy enough to reach its power limit
_SLOWER = 1.1  # times of a request in which the machine was slower by this factor replace none
# Where ATen's plain op took this multiple of what its times at other M allow, the machine was slower. One thread of an
# Intel Xeon took 16 ms or 36 for the same product, each for ten seconds or more, without other work in its virtual
# machine (bfloat16 375x4096x4096, a script that was not kept).
_TOO_SLOW = 1.25
_TILE = 32  # rows that a CPU's kernels may compute for one: a tile of AMX's, twice
_RETIMED = 2  # an M at which a kernel looks irregular is measured so often before the kernel is left out


class Measurements:
    """The measurements of one weight's kernels.

    sizes: the range of M. counts: recorded calls by M. bound: the largest regret at a measured M. pool: the kernels by
    id. overhead_s, surcharges: as for ``TunedPlan``. max_kernels: as for ``TuningProfile``. waves: as for ``Curves``.
    times: seconds by id and M, with what load adds to them (``record_load``). noise: by M, of the times there.
    timed_often: how often a kernel was timed at an M. out: the kernels that cannot serve, with the reason. scan:
    seconds of ATen's plain op by M, as scanned. algorithms: of the plain op. estimated_s: returns the estimate of a
    kernel's seconds at an M, or None.
    """

    def __init__(
        self,
        sizes: SizeRange,
        counts: Mapping[int, int],
        bound: float,
        overhead_s: float,
        surcharges: dict[str, dict[int, float]],
        *,
        max_kernels: int,
        waves: bool = False,
        estimated_s: Callable[[PoolKernel, int], float | None] = lambda kernel, m: None,
    ) -> None:
        self.surcharges, self._waves, self._max_kernels = surcharges, waves, max_kernels
        self._estimate = functools.cache(lambda name, m: estimated_s(self.pool[name], m))
        self._sizes, self._counts, self._bound, self._overhead_s = sizes, counts, bound, overhead_s
        self.pool: dict[str, PoolKernel] = {}
        self.times: dict[str, dict[int, float]] = {}
        self.noise: dict[int, float] = {}
        self.timed_often: dict[tuple[str, int], int] = {}
        self._load: dict[str, dict[int, float]] = {}
        self.out: dict[str, str] = {}
        self.scan: dict[int, float] = {}
        self.algorithms = NO_ALGORITHMS

    def add(self, kernel: PoolKernel) -> None:
        """Add a kernel to the pool."""
        self.pool[kernel.id], self.times[kernel.id] = kernel, {}

    @property
    def plain_names(self) -> list[str]:
        """The id of ATen's plain op, if it is in the pool."""
        return [name for name, kernel in self.pool.items() if kernel.is_plain]

    def record(self, wanted: Mapping[int, Iterable[str]], times: Mapping[int, Mapping[str, float]]) -> None:
        """Record the times of a request for the kernels ``wanted[m]`` at each M.

        Later times replace earlier ones at the same M, and those of other kernels there are multiplied by what the
        machine's pace has changed by. Where the machine was slower than before, the earlier times are kept, and new
        ones are divided by that.
        """
        for m, names in wanted.items():
            for name in names:
                self.timed_often[name, m] = self.timed_often.get((name, m), 0) + 1
        for m, seconds in times.items():
            later = {name: value * self._load_at(name, m) for name, value in seconds.items()}
            pace = self._pace(m, later)
            if pace > _SLOWER:
                later = {name: value / pace for name, value in later.items() if m not in self.times[name]}
            else:
                for by_m in self.times.values():
                    if m in by_m:
                        by_m[m] *= pace
            for name, value in later.items():
                self.times[name][m] = value

    def _pace(self, m: int, later: Mapping[str, float]) -> float:
        """Return what calls at M take in a later request over what they took in the earlier ones: the ratio that is
        nearest to 1 of the kernels that were timed in both, since one of them may have been stalled. 1.0 where fewer
        than two were."""
        ratios = [value / self.times[name][m] for name, value in later.items() if m in self.times[name]]
        return min(ratios, key=lambda ratio: abs(math.log(ratio))) if len(ratios) > 1 else 1.0

    def sizes_for_load(self) -> list[int]:
        """Return the M at which kernels are timed under load, none if they were: the last, and the measured one nearest
        to a quarter of it, where calls take ``_LOADED_S`` or more."""
        curves = self.curves(next(iter(self.layouts()), ""))
        quarter = min(curves.sizes, key=lambda m: abs(math.log(4.0 * m / self._sizes.last)), default=0)
        sizes = {quarter, self._sizes.last} & set(curves.sizes)
        return [] if self._load else [m for m in sorted(sizes) if curves.best(m) >= _LOADED_S]

    def record_load(self, times: Mapping[int, Mapping[str, float]]) -> None:
        """Record times under load, which were not recorded before. The kernels' times, now and later, are multiplied by
        what load adds to them beyond what it adds to those of ATen's plain op (of the median kernel without one).

        Short timings leave a GPU below its power limit. Under load the clock is lower, by an amount that depends on the
        kernel: one was at 1.04 of the plain op's time at once, and at 1.08 after 0.1 s (fp8 2416x4096x11008, H100).
        """
        for m, seconds in times.items():
            added = {name: value / self.times[name][m] for name, value in seconds.items() if m in self.times[name]}
            plain = [factor for name, factor in added.items() if self.pool[name].is_plain]
            if added:
                reference = plain[0] if plain else median(added.values())
                for name, factor in added.items():
                    # Where load slows the plain op more, a kernel must be fast enough without load, too.
                    relative = max(1.0, factor / reference) if plain else factor / reference
                    self._load.setdefault(name, {})[m] = relative
        for name, by_m in self.times.items():
            self.times[name] = {m: value * self._load_at(name, m) for m, value in by_m.items()}

    def _load_at(self, name: str, m: int) -> float:
        """Return what load adds to a kernel's times, as a factor: that at the nearest M by ratio at which kernels were
        timed under load, of the median kernel if it was not; 1.0 for ATen's plain op and for few rows."""
        kernels = [by_m for other, by_m in self._load.items() if not self.pool[other].is_plain]
        sizes = set[int]().union(*kernels)
        if self.pool[name].is_plain or not sizes or 2 * m < min(sizes):
            return 1.0
        own = self._load.get(name, {})
        nearest = min(own or sizes, key=lambda size: abs(math.log(size / m)))
        return own[nearest] if own else median(by_m[nearest] for by_m in kernels if nearest in by_m)

    def expected_s(self, name: str, m: int) -> float:
        """Return the seconds that a call of a kernel may take at M, from its times at other M: at most as long as at a
        larger M, or as that many calls at a smaller one. Zero without times."""
        return min((seconds * max(1.0, m / size) for size, seconds in self.times[name].items()), default=0.0)

    def fastest(self, calls_s: Mapping[str, float], seconds: float) -> list[str]:
        """Return the kernels to time at an M in ``seconds``, by one call of each: ATen's plain op, those that were not
        timed yet, and the fastest of each layout that is within ``CLOSE`` of the fastest of all, even if these take
        longer; then, while there is time, the others, those with the shortest calls first.

        calls_s: the expected seconds of a call, by id; zero for kernels that were not timed yet.
        """
        order = sorted(calls_s, key=lambda name: calls_s[name])
        least_s = min((call_s for call_s in calls_s.values() if call_s > 0.0), default=0.0)
        kept = [name for name in order if self.pool[name].is_plain or calls_s[name] == 0.0]
        led = set[str | None]()
        for name in order:
            packing = self.pool[name].packing
            if name not in kept and packing not in led and calls_s[name] <= (1.0 + CLOSE) * least_s:
                kept.append(name)
                led.add(packing)
        seconds -= sum(calls_s[name] for name in kept)
        for name in order:
            if name not in kept and calls_s[name] <= seconds:
                kept.append(name)
                seconds -= calls_s[name]
        return kept

    def fast_at(self) -> dict[str | None, set[int]]:
        """Return the M of the Decisions in which a kernel of each layout was fast."""
        by_layout: dict[str | None, set[int]] = {}
        for kernel in self.pool.values():
            by_layout.setdefault(kernel.packing, set()).update(kernel.fast_at)
        return by_layout

    def far_behind(self, m: int) -> set[str]:
        """Return the kernels that took more than ``_FAR_BEHIND`` times the least time of all that may serve at the
        largest M below ``m`` at which they were timed. Times at smaller M than those at which Decisions found a kernel
        do not count: one for many rows may be slow there."""
        least = least_times(times for name, times in self.times.items() if name not in self.out)
        below = {name: max((size for size in times if size < m), default=0) for name, times in self.times.items()}
        return {
            name
            for name, size in below.items()
            if size in least
            and size >= max(self.pool[name].fast_at, default=0)
            and self.times[name][size] > _FAR_BEHIND * least[size]
        }

    def curves(self, packing: str, *, surcharged: bool = True) -> Curves:
        """Return the times of a layout's kernels in the surroundings where they are slowest beside ATen's plain op.
        surcharged: False for their times as they were measured."""
        names = [name for name, kernel in self.pool.items() if (kernel.packing or "") == packing]
        surcharges = self.surcharges if surcharged else {}
        sizes = {m for name in names for m in self.times[name]}
        slower = {m: surcharge_at(surcharges, packing, m) for m in sizes}
        times = {
            name: {m: s if self.pool[name].is_plain else s * slower[m] for m, s in self.times[name].items()}
            for name in names
            if self.times[name]
        }
        plain = next((name for name in times if self.pool[name].is_plain), "")
        steps = {name: self.pool[name].tile_rows for name in names}
        return Curves(
            self._sizes.first, self._sizes.last, times, plain, steps, self._counts, self.noise, self._overhead_s,
            self._waves, self._estimate, self.scan, self.algorithms,
            {name for name in names if self.pool[name].has_plain_product},
        )  # fmt: skip

    def serving(self, curves: Curves) -> dict[int, str]:
        """Return the id of the kernel that serves each measured M."""
        chosen = kernel_choice.choose_kernels(curves, self._bound, self._max_kernels)
        return kernel_choice.serving(curves, chosen, self._bound)

    def _plain_s(self, m: int) -> float:
        """Return the seconds of ATen's plain op at a measured M; infinite where it was not timed."""
        plain = [self.times[name].get(m, math.inf) for name, kernel in self.pool.items() if kernel.is_plain]
        return min(plain, default=math.inf)

    def _reference_s(self, m: int) -> float:
        """Return the seconds that the times at a measured M are divided by: those of ATen's plain op; the least of all
        if it was timed nowhere."""
        return self._plain_s(m) if self._has_plain else min(times[m] for times in self.times.values() if m in times)

    @property
    def _has_plain(self) -> bool:
        """Whether ATen's plain op was timed."""
        return any(self.times[name] for name, kernel in self.pool.items() if kernel.is_plain)

    def layouts(self) -> list[str]:
        """Return the packed layouts with the least times relative to ATen's plain op, the best first, then the raw
        layout.

        Packed layouts that were slower than the plain op at some M, as ``dispatch.plan_layouts`` judges that, come
        after the others, since they serve only a weight that is kept raw, too: the plain op's time counts at these M.
        One that may serve only because the times there are noisy comes before another if it takes 2% less time. One
        without a time at either end of the range is left out: it was far behind before.
        """
        totals: dict[str, tuple[bool, float]] = {}
        for packing in {kernel.packing or "" for name, kernel in self.pool.items() if name not in self.out}:
            curves = self.curves(packing).without(self.out)
            if packing and not {self._sizes.first, self._sizes.last} <= set(curves.sizes):
                continue
            weights = point_weights(curves)
            shares = {
                m: curves.best(m) / self._reference_s(m)
                for m in curves.sizes
                if max(curves.best(m), self._reference_s(m)) < math.inf
            }
            weight = sum(weights[m] for m in shares)
            if weight > 0.0:
                is_slow = self._has_plain and any(
                    share > largest_share(self.noise.get(m, 0.0)) for m, share in shares.items()
                )
                by_noise = self._has_plain and not is_slow and max(shares.values()) > 1.0 + NO_SLOWER
                if packing and is_slow:
                    shares = {m: min(share, 1.0) for m, share in shares.items()}
                mean = sum(weights[m] * share for m, share in shares.items()) / weight
                totals[packing] = is_slow, mean * (1.0 + NO_SLOWER) if by_noise else mean
        packed = sorted((packing for packing in totals if packing), key=lambda packing: totals[packing])
        return [*packed[:_MAX_LAYOUTS], *(packing for packing in totals if not packing)]

    def next_measurements(self, packing: str) -> dict[int, list[str]]:
        """Return the M to measure next for a layout, with the kernels to time there."""
        curves = self.curves(packing)
        if suspicious := self._suspicious(packing):
            return self._again(curves, suspicious)
        curves = curves.without(self.out)
        if not curves.times or not curves.sizes:
            return {}
        points = self.serving(curves)
        if holes := self._holes(curves, set(points.values())):
            return holes
        if packing and (slow := self.slower_than_plain(points)):
            return self._again(curves, slow)
        plan_intervals = intervals.intervals(curves, points)
        unseen = self._unseen_parities(curves, plan_intervals)
        promising = unseen[:BATCH] or self._expected_losses(curves, plan_intervals)[: BATCH // 2]
        wanted = {m: list(dict.fromkeys((*self.names_near(curves, m), name))) for m, name in promising}
        if not unseen:
            urgent = [gap for gap in gaps.gaps(curves, points) if gap.loss > _LOSS and gap.urgency > 0.0]
            for index, gap in enumerate(urgent[: BATCH - len(wanted)]):
                m = gaps.next_size(curves, gap, odd=index % 2 == 0)
                wanted.setdefault(m, self.names_near(curves, m))
        return wanted

    def ranges_to_scan(self) -> list[plain_scan.Range]:
        """Return the ranges of M in which to scan ATen's plain op (``plain_scan.ranges_to_scan``), for the raw
        layout."""
        curves = self.curves("").without(self.out)
        return plain_scan.ranges_to_scan(curves) if self._waves and curves.plain else []

    def record_scan(self, times: Mapping[int, Mapping[str, float]]) -> None:
        """Record the times of a scan of ATen's plain op."""
        self.scan |= {m: seconds for m, by_name in times.items() for seconds in by_name.values()}

    def thin_margins(self, limit: int) -> dict[int, list[str]]:
        """Return up to ``limit`` of the M of ``gaps.thin_margins`` for the raw layout, with ATen's plain op and the
        kernel that serves there."""
        curves = self.curves("").without(self.out)
        if not curves.plain or len(curves.times) < 2:
            return {}
        thin = gaps.thin_margins(curves, intervals.intervals(curves, self.serving(curves)))
        return {m: [curves.plain, name] for m, name in thin[:limit]}

    def sizes_timed_too_slow(self) -> dict[int, list[str]]:
        """Return the M at which the machine was slower than at others, by the times of ATen's plain op: it took longer
        than at a larger M, or than the rows beyond a smaller one explain. Each has the kernels to time again, the plain
        op among them. The M at which the machine was slowest comes first.

        None for devices with waves of tiles, whose times do not grow evenly, and no M that was timed three times.
        """
        plain = next((name for name, kernel in self.pool.items() if kernel.is_plain), "")
        times = self.times.get(plain, {})
        if self._waves or len(times) < 2:
            return {}
        shares = {
            m: s
            / min(other_s * max(1.0, _TILE * -(-m // _TILE) / other) for other, other_s in times.items() if other != m)
            for m, s in times.items()
        }
        slow = [m for m in shares if shares[m] > _TOO_SLOW and self.timed_often.get((plain, m), 0) <= _RETIMED]
        layouts = [self.curves(packing).without(self.out) for packing in self.layouts()] if slow else []
        return {
            m: list(dict.fromkeys((plain, *(name for curves in layouts for name in self._names_again(curves, m)))))
            for m in sorted(slow, key=lambda m: -shares[m])
        }

    def sizes_that_exclude(self, packing: str, most: int) -> dict[int, list[str]]:
        """Return the M that keep a packed layout from serving because it looked slower than ATen's plain op there, or
        that would if the times there were less noisy. Each has the kernels to time there, the plain op among them:
        those that are expected to be faster and were not timed (``_holes``), else those to time again. Empty where
        there are more than ``most`` such M, and, without a kernel that was not timed, where one of them was timed
        ``_RETIMED`` times."""
        curves = self.curves(packing).without(self.out)
        if not packing or not curves.sizes:
            return {}
        points = self.serving(curves)
        slow = {
            m: [name]
            for m, name in points.items()
            if m in curves.times[name]
            and curves.times[name][m] + self._overhead_s > (1.0 + NO_SLOWER) * self._plain_s(m)
        }
        if len(slow) > most:
            return {}
        holes = self._holes(curves, set(points.values()))
        if untimed := {m: [*self.plain_names, *names] for m, names in holes.items() if m in slow}:
            return untimed
        if any(self.timed_often[name, m] >= _RETIMED for m, (name,) in slow.items()):
            return {}
        return self._again(curves, slow)

    def _suspicious(self, packing: str) -> dict[int, list[str]]:
        """Return the M to measure again because kernels of a layout looked irregular, with these kernels: where they
        were slow, and the larger M at which they were fast. Those that looked so repeatedly are left out."""
        again: dict[int, list[str]] = {}
        curves = self.curves(packing, surcharged=False).without(self.out)
        reference = next((self.times[name] for name, kernel in self.pool.items() if kernel.is_plain), {})
        certain = irregular(curves, 0, reference)
        for name, slow in irregular(curves, 1, reference).items():
            once = {m for pair in slow.items() for m in pair if self.timed_often[name, m] < _RETIMED}
            for m in once:
                again.setdefault(m, []).append(name)
            if not once and name in certain and name != curves.plain:
                m = min(certain[name])
                self.out[name] = f"irregular: slower at M = {m} than at M = {certain[name][m]}"
        return again

    def slower_than_plain(self, points: Mapping[int, str]) -> dict[int, list[str]]:
        """Return the M to measure again because the kernel of a packed layout looked slower than ATen's plain op, with
        these kernels: one such M keeps the layout from serving."""
        return {
            m: [name]
            for m, name in points.items()
            if m in self.times[name]
            and self.times[name][m] + self._overhead_s > self._plain_s(m)
            and self.timed_often[name, m] < _RETIMED
        }

    def _holes(self, curves: Curves, chosen: Collection[str]) -> dict[int, list[str]]:
        """Return the measured M at which a chosen kernel was not timed, and is expected to be faster than all that
        were, with these kernels and the fastest of the others, beside which they are timed. Otherwise a slower kernel
        would serve them.

        On a device without waves of tiles this includes the next M above all at which the kernel was timed. In int8
        11008x4096 (one thread of an EPYC) a kernel of the Decision for 8 rows was the fastest of its layout at M = 128,
        and was not timed at 256 and 512 with those of the Decision for 128. These took up to 1.13 of the plain op's
        time there, so that the plain op served all M (every-m-20261129-155448).
        """
        weights = point_weights(curves)
        losses: dict[int, float] = {}
        wanted: dict[int, list[str]] = {}
        for name in chosen:
            own = sorted(curves.times[name])
            for before, m in itertools.pairwise(curves.sizes):
                position = bisect_left(own, m)
                if m in curves.times[name] or self.timed_often.get((name, m), 0) >= _RETIMED or position == 0:
                    continue
                if position < len(own):
                    expected_s = intervals.estimate(curves, name, m, own[position - 1], own[position])
                elif not self._waves and own[-1] == before:
                    expected_s = curves.times[name][before] * m / before  # as many calls, for that many rows each
                else:
                    continue
                loss = weights[m] * (curves.best(m) / expected_s - 1.0)
                if loss > 0.0:
                    wanted.setdefault(m, [curves.fastest(m)]).append(name)
                    losses[m] = max(loss, losses.get(m, 0.0))
        return {m: wanted[m] for m in sorted(wanted, key=lambda m: -losses[m])[:BATCH]}

    def _again(self, curves: Curves, wanted: Mapping[int, Sequence[str]]) -> dict[int, list[str]]:
        """Return the first few of the M to measure again, with their kernels and those that may be faster there."""
        return {m: list(dict.fromkeys((*self._names_again(curves, m), *wanted[m]))) for m in sorted(wanted)[:BATCH]}

    def _names_again(self, curves: Curves, m: int) -> list[str]:
        """Return the kernels to time again at a measured M: on a CPU ATen's plain op, and all that are not far behind
        there, otherwise those of ``names_near``.

        A slow moment does not slow all kernels alike: the pace of some does not tell what others would take now. Those
        of AMX took 1.9 times as long with tiles of 32 rows, 1.4 times with tiles of 16 (bfloat16 768x3072, a host whose
        pace changes). Only the latter were timed again at M from 257 to 504, and ATen's op served all M, which takes
        1.3 times as long as the former.
        """
        if self._waves:
            return self.names_near(curves, m)
        least_s = curves.best(m)
        timed = (name for name, times in curves.times.items() if times.get(m, math.inf) <= _FAR_BEHIND * least_s)
        return list(dict.fromkeys((*self.plain_names, *timed)))

    def _unseen_parities(self, curves: Curves, plan_intervals: Sequence[PlanInterval]) -> list[tuple[int, str]]:
        """Return an M and a kernel for each interval whose kernel was not timed at an odd, or at an even, M of it; or
        nearby, for kernels with estimates and where ATen's plain op was scanned: there intervals need no measurement
        inside."""
        sizes = []
        for interval in plan_intervals:
            if interval.kernel == curves.plain or interval.last - interval.first < 2:
                continue
            is_scanned = curves.plain_times.at_least(interval.first, interval.last) is not None
            reach = 1.0 if self._estimate(interval.kernel, interval.first) is None and not is_scanned else _NEARBY
            nearby = PlanInterval(math.ceil(interval.first / reach), int(interval.last * reach), interval.kernel)
            seen = {m % 2 for m in intervals.measured_inside(curves, interval.kernel, nearby)}
            for parity in {0, 1} - seen:
                middle = round(math.sqrt(interval.first * interval.last))
                m = middle if middle % 2 == parity else middle + 1 if middle < interval.last else middle - 1
                if self.timed_often.get((interval.kernel, m), 0) < _RETIMED:
                    sizes.append((m, interval.kernel))
        return sizes

    def _expected_losses(self, curves: Curves, plan_intervals: Sequence[PlanInterval]) -> list[tuple[int, str]]:
        """Return M at which a kernel is expected to be faster than the one that serves, and this kernel."""
        least = least_times(curves.times.values())
        fast = {
            name: [m for m in sorted(times) if times[m] <= _NEARLY * least[m]]
            for name, times in curves.times.items()
            if name != curves.plain
        }

        def nearly_fastest(m: int) -> list[str]:
            """Return the kernels that were nearly the fastest at an M nearby."""
            return [
                name
                for name, sizes in fast.items()
                if any(_NEARBY * size >= m for size in sizes[: bisect_left(sizes, m)][-1:])
                or any(size <= _NEARBY * m for size in sizes[bisect_left(sizes, m) :][:1])
            ]

        return gaps.expected_losses(curves, plan_intervals, nearly_fastest, _LOSS)

    def names_near(self, curves: Curves, m: int) -> list[str]:
        """Return the kernels that may be the fastest at M: ATen's plain op, and up to ``_MOST_NEAR`` of those close to
        the fastest at the next measured M on either side, the closest first."""
        below = max((size for size in curves.sizes if size <= m), default=None)
        above = min((size for size in curves.sizes if size >= m), default=None)
        behind: dict[str, float] = {}
        for size in {size for size in (below, above) if size is not None}:
            for name, times in curves.times.items():
                share = times.get(size, math.inf) / curves.best(size)
                if share <= 1.0 + CLOSE:
                    behind[name] = min(share, behind.get(name, math.inf))
        return list(dict.fromkeys((*self.plain_names, *sorted(behind, key=lambda name: behind[name])[:_MOST_NEAR])))
