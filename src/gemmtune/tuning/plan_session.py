"""The tuning of one weight as a function of M, from its Decisions at a few M to a TunedPlan.

The kernels of the Decisions, and those that backends expect to be fast between their M, are timed against one another
at more M: first at powers of two, then where kernels are expected to be fast, then where a measurement may change the
choice most. The fewest kernels that keep the regret within a bound are chosen, verified at many M of their intervals,
and stored with the intervals.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from ..backends.base import Artifact
from ..core import devices
from ..core.decision import Verdict
from ..core.tuned_plan import PlanInterval, TunedPlan
from . import intervals, plain_scan
from .library_kernels import kernels_chosen_by_library
from .plain_times import LibraryAlgorithms, sizes_to_ask
from .plan_measurements import BATCH
from .plan_pool import PoolKernel, kernel_pool, nearest_sizes
from .predicted_kernels import expected_kernels
from .weight_session import WeightSession
from .worker_pool import BeginBuilds

_STEPS_UP_TO = 16  # the M after a power of two is timed up to this part of the range: calls take long at its end
# From here on the M before a power of two is timed, too, and the M in the middle to the next one. cuBLAS takes 108 us
# for 4096x4096x4096 in fp8, and 127 at M = 3970 (H100): it is fastest where its tiles fill all rows. By its time there
# it would serve the M around them, and a kernel that is faster around 1536 or 6144 would serve these.
_DENSE_FROM = 1024
_COARSE_SHARE = 0.5  # of the time, for the first M
_PREDICTED_SHARE = 0.5  # of the time that remains, for the M at which kernels are expected to be fast
_NEAR_EXPECTED = 1.6
_LEAST_CALLS = 3  # of a kernel that is timed at an M
_SLOW_CALL_S = 0.02  # from which on an M with too little time for all of its kernels has fewer
_UNDER_LOAD = 2.0  # times the seconds of load are needed at an M: for the load, and for the timings under it
_MOST_LOAD = 0.25  # kernels are not timed under load if it takes more than this share of the time
_AGAIN_SHARE = 0.5  # of the time, for kernels that are added because another failed
# How often M with thin margins are timed, how many of them at most, and the calls of a kernel at each.
_MARGIN_ROUNDS, _MOST_THIN, _MARGIN_CALLS = 2, 32, 20
# Seconds for M at which the machine was slower than at others, before and after M that are worth a measurement.
_SLOW_SIZES_S = 3.0
_MOST_EXCLUDING, _EXCLUDING_S = 3, 2.0  # M that exclude a layout and are timed again, and the seconds for each
_EXCLUDING_ROUNDS = 2  # the second times again, or at a larger M, what the first timed there for the first time
_SCANNED_AT_ONCE = 64  # M of one request to the worker
_MAX_CHECKS = 4  # times that kernels are chosen anew because one failed verification


class _Building(NamedTuple):
    """A kernel whose build was begun."""

    kernel: PoolKernel
    outcome: Future[Artifact | Verdict]


class PlanSession(WeightSession):
    """The tuning session of one weight over a range of M, whose intervals are found by measurements."""

    _late: Sequence[_Building] = ()  # those that were not built when others began to be timed

    def run(self, seconds: float, begin_builds: BeginBuilds | None = None) -> TunedPlan | None:
        """Return the TunedPlan, measured in about ``seconds``; None when no kernel can serve anything.

        begin_builds: begins to build kernels that no Decision has, and returns the future of each outcome by its id;
        None: the worker builds them. When a kernel fails, those that it kept out of the pool by its speed are measured,
        too, in up to half of the time again. Raises WorkerError when the worker cannot open the Problem, or is lost
        again and again.
        """
        self._extend_pool()
        self._started = time.perf_counter()
        self._add_predicted(begin_builds)
        self._end = time.perf_counter() + seconds
        self._worker.open(self._problem, self._seed)
        while True:
            self._time_coarsely()
            self._time_predicted()
            self._scan_plain(seconds)
            added = self._add_chosen_by_library()
            if self._time_late() or added:
                self._time_predicted()
            self._time_under_load(seconds)
            self._time_slow_sizes()
            stopped = self._refine()
            self._time_slow_sizes()
            self._time_thin_margins()
            self._time_excluding_sizes()
            chosen = self._verified_choice()
            if not self._extend_pool():
                break
            self._end = max(self._end, time.perf_counter() + _AGAIN_SHARE * seconds)
        return self._plan(chosen, stopped)

    def _extend_pool(self) -> bool:
        """Add the kernels that the pool lacks, without the faulty ones. Return whether there are any."""
        pool = kernel_pool(self._decisions, self._faulty, self._sizes.dim)
        new = [kernel for kernel in pool if kernel.id not in self._measurements.pool]
        self._add(new)
        return bool(new)

    def _add_predicted(self, begin_builds: BeginBuilds | None) -> None:
        """Add kernels that are expected to be fast at other M. Those that no Decision has are built first; where builds
        do not disturb timing, others are timed meanwhile (``_time_late``)."""
        expected = expected_kernels(
            self._problem, self._target, self._decisions, self._sizes, self._counts, self._faulty
        )
        for kernel in expected:
            if kernel.id in self._measurements.pool:
                self._measurements.pool[kernel.id].predicted_for |= kernel.predicted_for
        kernels = [kernel for kernel in expected if kernel.id not in self._measurements.pool]
        if not kernels or begin_builds is None:
            self._add(kernels)
            return
        outcomes = begin_builds(
            [(self._sizes.at(self._problem, k.tuned_m), k.candidate) for k in kernels], self._target
        )
        builds = [_Building(kernel, outcomes[kernel.id]) for kernel in kernels]
        if devices.get(self._target.device).profile.builds_overlap:
            self._late = [build for build in builds if not build.outcome.done()]
        self._add_built(build for build in builds if build not in self._late)

    def _add_built(self, builds: Iterable[_Building]) -> list[str]:
        """Wait for builds, and add the kernels of those that succeeded. Return their ids."""
        kernels = [build.kernel for build in builds if not isinstance(build.outcome.result(), Verdict)]
        self._add(kernels)
        return [kernel.id for kernel in kernels]

    # --- timing

    def _time_late(self) -> bool:
        """Add the kernels that were still being built, and time them. Return whether there were any. The time for other
        M is not shortened by what their builds take."""
        if not self._late:
            return False
        started = time.perf_counter()
        added, self._late = self._add_built(self._late), ()
        self._end += time.perf_counter() - started
        self._time_added(added)
        return True

    def _time_added(self, added: Sequence[str]) -> None:
        """Time kernels at the M of ``_time_coarsely`` near those at which they are expected to be fast, beside ATen's
        plain op and the fastest kernel of each layout there."""
        layouts = [self._measurements.curves(packing) for packing in self._measurements.layouts()]
        wanted: dict[int, list[str]] = {}
        for m in self._coarse_sizes():
            if new := set(added).intersection(self._active(m)):
                fastest = (curves.fastest(m) for curves in layouts if curves.times)
                wanted[m] = list(dict.fromkeys((*self._measurements.plain_names, *fastest, *sorted(new))))
        budget_s = _PREDICTED_SHARE * max(0.0, self._end - time.perf_counter())
        self._time_in_batches(list(wanted), lambda m: wanted[m], budget_s, self._fewer_if_slow)

    def _coarse_sizes(self) -> list[int]:
        """Return the powers of two, some odd neighbors and the M of the Decisions, ascending."""
        first, last = self._sizes.first, self._sizes.last
        powers = [1 << exponent for exponent in range(last.bit_length() + 1)]
        steps = {power + 1 for power in powers[4::2] if _STEPS_UP_TO * power <= last}
        steps |= {m for power in powers if power >= _DENSE_FROM for m in (power - 1, power + power // 2)}
        wanted = {first, last, 3, *self._sizes.tuned, *powers, *steps}
        wanted |= set(sorted(self._counts, key=lambda m: -self._counts[m])[:BATCH])
        return sorted(m for m in wanted if first <= m <= last)

    def _time_coarsely(self) -> None:
        """Time the kernels at some M of the whole range, smallest M first."""
        budget_s = _COARSE_SHARE * max(0.0, self._end - time.perf_counter())
        self._time_in_batches(self._coarse_sizes(), self._active, budget_s, self._fewer_if_slow)

    def _time_predicted(self) -> None:
        """Time the kernels that are expected to be fast at some M there, with those that were fast at M nearby, unless
        they were timed there."""
        expected: dict[int, list[str]] = {}
        for name, kernel in self._measurements.pool.items():
            for m in kernel.predicted_for - self._measurements.times[name].keys():
                expected.setdefault(m, []).append(name)
        layouts = [self._measurements.curves(packing) for packing in self._measurements.layouts()]
        wanted = {}
        for m in sorted(expected):
            near = (name for curves in layouts for name in self._measurements.names_near(curves, m))
            wanted[m] = list(dict.fromkeys((*near, *expected[m])))
        budget_s = _PREDICTED_SHARE * max(0.0, self._end - time.perf_counter())
        for m, names in list(wanted.items()):
            fewer = self._fewer_if_slow(m, names, budget_s / len(expected))
            if fewer is not None:
                del wanted[m]
                wanted |= {m: fewer} if set(fewer) & set(expected[m]) else {}
        for start in range(0, len(wanted), BATCH):
            sizes = list(wanted)[start : start + BATCH]
            self._time({m: wanted[m] for m in sizes}, len(sizes) / len(wanted) * budget_s)

    def _time_under_load(self, seconds: float) -> None:
        """Time the kernels that may serve many rows under load, where that changes a device's clock, unless it takes a
        large part of ``seconds``. The time for other M is not shortened."""
        load_s, started = devices.get(self._target.device).profile.load_s, time.perf_counter()
        sizes = self._measurements.sizes_for_load() if load_s else []
        budget_s = _UNDER_LOAD * load_s * len(sizes)
        if sizes and budget_s <= _MOST_LOAD * seconds:
            layouts = [self._measurements.curves(packing) for packing in self._measurements.layouts()]
            near = {m: [name for curves in layouts for name in self._measurements.names_near(curves, m)] for m in sizes}
            wanted = {m: list(dict.fromkeys(names)) for m, names in near.items()}
            self._time(wanted, budget_s, load_s)
        self._end += time.perf_counter() - started

    def _scan_plain(self, seconds: float) -> None:
        """Time ATen's plain op at many M (``plain_scan``), where it may be the fastest, in about ``seconds`` at most,
        the smallest M first. The time for other M is not shortened."""
        started, ranges = time.perf_counter(), self._measurements.ranges_to_scan()
        self._name_algorithms(ranges)
        sizes = plain_scan.sizes_to_scan(ranges, self._measurements.algorithms)
        sizes = [m for m in sizes if m not in self._measurements.scan]
        for start in range(0, len(sizes), _SCANNED_AT_ONCE):
            if time.perf_counter() - started > seconds:
                break
            timed = self._worker_times(
                dict.fromkeys(sizes[start : start + _SCANNED_AT_ONCE], self._measurements.plain_names), 0.0
            )
            self._measurements.record_scan(timed.times)
        self._end += time.perf_counter() - started

    def _name_algorithms(self, ranges: Sequence[plain_scan.Range]) -> None:
        """Ask which algorithms the library of ATen's plain op chooses in some ranges of M."""
        sizes = {m for first, last in ranges for m in sizes_to_ask(first, last)}
        for name in self._measurements.plain_names:
            while missing := sorted(sizes - self._measurements.algorithms.names.keys()):
                names = self._worker.library_algorithms(self._items[name], missing)
                self._measurements.algorithms = LibraryAlgorithms({**self._measurements.algorithms.names, **names})
                sizes = set(self._measurements.algorithms.unclear) if names else set()

    def _add_chosen_by_library(self) -> bool:
        """Add kernels that the library of ATen's plain op chooses at M where it is faster than at others. Return
        whether there are any."""
        curves = self._measurements.curves("").without(self._measurements.out)
        without = {*self._measurements.pool, *self._faulty}
        kernels = kernels_chosen_by_library(self._problem, self._target, self._decisions, curves, self._sizes, without)
        self._add(kernels)
        return bool(kernels)

    def _active(self, m: int) -> list[str]:
        """Return the kernels to time at M: ATen's plain op, those that are expected to be fast within a factor of
        ``_NEAR_EXPECTED``, and of each layout those from Decisions at the nearest M that are not far behind at a
        smaller M, not below their Decision's.

        Layouts are compared over the whole range, so that each of them needs a kernel at every M.
        """
        pool, behind = self._measurements.pool, self._measurements.far_behind(m)
        near = {packing: nearest_sizes(fast_at, m) for packing, fast_at in self._measurements.fast_at().items()}
        return [
            name
            for name, kernel in pool.items()
            if kernel.is_plain
            or any(max(m, size) <= _NEAR_EXPECTED * min(m, size) for size in kernel.predicted_for)
            or (kernel.fast_at & near[kernel.packing] and name not in behind)
        ]

    def _fewer_if_slow(self, m: int, names: Sequence[str], seconds: float) -> list[str] | None:
        """Return the kernels of ``names`` to time at M where all of them would take more than ``seconds``: those that
        were the fastest at smaller M. None where they would not, or where calls are short.

        Nine kernels took 12 s at the last M of fp32 4096x11008 (one thread of an EPYC, 0.42 to 0.57 s a call), of 8 s
        for all M; six of them were within 4% of one another (a script that was not kept).
        """
        usable = (name for name in names if name not in self._measurements.out)
        calls_s = {name: self._measurements.expected_s(name, m) for name in usable}
        if max(calls_s.values(), default=0.0) < _SLOW_CALL_S or _LEAST_CALLS * sum(calls_s.values()) <= seconds:
            return None
        return self._measurements.fastest(calls_s, seconds / _LEAST_CALLS)

    def _refine(self) -> str:
        """Measure where a measurement may change the choice most, until nothing is urgent or the time is over. Return
        why it ended."""
        while (remaining_s := self._end - time.perf_counter()) > 0.0:
            wanted: dict[int, list[str]] = {}
            for packing in self._measurements.layouts():
                for m, names in self._measurements.next_measurements(packing).items():
                    wanted.setdefault(m, []).extend(name for name in names if name not in wanted.get(m, ()))
            if not wanted:
                return "no other M was worth a measurement"
            wanted = self._affordable(wanted, remaining_s)
            if not wanted:
                break
            self._time(wanted, min(remaining_s, max(0.1 * remaining_s, 0.05 * (self._end - self._started))))
        return "the time for other M was over"

    def _time_thin_margins(self) -> None:
        """Time ATen's plain op and the kernel that serves where the latter is expected to be little faster
        (``gaps.thin_margins``). Not limited by the time for other M: it must not serve where it is slower."""
        for _ in range(_MARGIN_ROUNDS):  # other kernels may serve after the first
            wanted = self._measurements.thin_margins(_MOST_THIN)
            sizes = sorted(wanted)
            for start in range(0, len(sizes), BATCH):
                batch = {m: wanted[m] for m in sizes[start : start + BATCH]}
                once_s = sum(self._measurements.expected_s(name, m) for m, names in batch.items() for name in names)
                self._time(batch, _MARGIN_CALLS * once_s)

    def _time_slow_sizes(self) -> None:
        """Time again the M at which the machine was slower than at others, in ``_SLOW_SIZES_S``, whatever time is left:
        another kernel may be the fastest while it is not."""
        end = time.perf_counter() + _SLOW_SIZES_S
        for m, names in self._measurements.sizes_timed_too_slow().items():
            left_s = end - time.perf_counter()
            if left_s <= 0.0:
                break
            self._time_again(m, names, left_s)

    def _time_excluding_sizes(self) -> None:
        """Time kernels at the few M that exclude a packed layout (``Measurements.sizes_that_exclude``). Not limited by
        the time for other M: one of them keeps the layout from serving all M (bfloat16 4096x4096 on an EPYC looked 3%
        to 4% slower at M = 512, and was served by ATen's op in one run of two; every-m-20261129-020426, -025919)."""
        for packing, _ in itertools.product(self._measurements.layouts(), range(_EXCLUDING_ROUNDS)):
            for m, names in self._measurements.sizes_that_exclude(packing, _MOST_EXCLUDING).items():
                self._time_again(m, names, _EXCLUDING_S)

    def _time_again(self, m: int, names: Sequence[str], seconds: float) -> None:
        """Time kernels at one M again in about ``seconds`` at most, fewer of them where calls are slow."""
        names = self._fewer_if_slow(m, names, seconds) or names
        once_s = sum(self._measurements.expected_s(name, m) for name in names)
        self._time({m: names}, min(_MARGIN_CALLS * once_s, seconds))

    def _affordable(self, wanted: Mapping[int, list[str]], seconds: float) -> dict[int, list[str]]:
        """Return the first of the wanted M that can be timed in some seconds, with their kernels."""
        affordable: dict[int, list[str]] = {}
        for m, names in wanted.items():
            seconds -= _LEAST_CALLS * sum(self._measurements.expected_s(name, m) for name in names)
            if seconds < 0.0:
                break
            affordable[m] = names
        return affordable

    # --- the choice

    def _verified_choice(self) -> dict[str, tuple[PlanInterval, ...]]:
        """Return the intervals of the raw layout and of the best packed one that has right kernels, all of which were
        verified. A kernel that fails is left out, and kernels are chosen anew."""
        chosen: dict[str, tuple[PlanInterval, ...]] = {}
        for packing in self._measurements.layouts():
            if packing and chosen:  # a weight is packed once, and the best layout comes first
                continue
            for _ in range(_MAX_CHECKS):
                curves = self._measurements.curves(packing).without(self._measurements.out)
                if not curves.sizes:
                    break
                plan_intervals = intervals.intervals(curves, self._measurements.serving(curves))
                if self._verify(plan_intervals):
                    chosen[packing] = plan_intervals
                    break
        return chosen
