"""The tuning of one weight as a function of M, from its Decisions at a few M to a TunedPlan.

The kernels of the Decisions are timed against one another at more M: first at powers of two, then where a measurement
may change the choice most. The fewest kernels that keep the regret within a bound are chosen, verified at many M of
their intervals, and stored with the intervals.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Mapping, Sequence

from ..core.decision import Decision, Verdict
from ..core.errors import StoreError
from ..core.events import PlanProgress, Progress
from ..core.problem import Problem
from ..core.target import Target
from ..core.tuned_plan import PlanInterval, PlanKernel, TunedPlan
from ..core.verdict import FAULTS
from ..store.base import Store
from ..workers.contract import MeasurementWorker, WorkerLost
from ..workers.protocol import SizedCandidate
from . import intervals
from .intervals import Curves
from .plan_pool import PoolKernel, kernel_pool
from .sizes import SizeRange
from .verified_sizes import sizes_to_verify

log = logging.getLogger("gemmtune")

BOUND = 0.05  # the largest regret at a measured M
VERIFIED_M = 16  # the M of the Problem that is opened: verification at other M reuses its rows and results
# The share of the time for the first M, the loss below which a gap is not measured, and the M of one request.
_COARSE_SHARE, _LOSS, _BATCH = 0.5, 0.01, 6
_MAX_LAYOUTS = 2  # packed layouts that are still timed after the first M
_RETIMED = 2  # an M at which a kernel looks irregular is measured so often before the kernel is left out
_MAX_CHECKS = 4  # times that kernels are chosen anew because one failed verification


class PlanSession:
    """The tuning session of one weight over a range of M.

    problem: one of the weight's Problems. decisions: of Problems that differ from it in M only. sizes: the range.
    counts: recorded calls by M. hot: time with operands in the cache. The worker is not closed.
    """

    def __init__(
        self,
        problem: Problem,
        target: Target,
        store: Store,
        worker: MeasurementWorker,
        decisions: Sequence[Decision],
        sizes: SizeRange,
        progress: Progress,
        seed: int,
        *,
        counts: Mapping[int, int],
        hot: bool = False,
        bound: float = BOUND,
    ) -> None:
        self._problem, self._target, self._store, self._worker = problem.with_m(VERIFIED_M), target, store, worker
        self._sizes, self._counts, self._hot, self._bound = sizes, dict(counts), hot, bound
        self._progress, self._seed, self._rng = progress, seed, random.Random(seed)
        failed = self._remembered_failures()
        self._pool: dict[str, PoolKernel] = {kernel.id: kernel for kernel in kernel_pool(decisions, failed)}
        # Without those in which a worker was lost: it would load and pack them again.
        self._items = {name: SizedCandidate(k.candidate.to_dict(), k.tuned_m) for name, k in self._pool.items()}
        self._times: dict[str, dict[int, float]] = {name: {} for name in self._pool}
        self._noise: dict[int, float] = {}
        self._timed_often: dict[tuple[str, int], int] = {}
        self._out: dict[str, str] = {}  # kernels that cannot serve, with the reason
        self._verified: dict[str, dict[int, float]] = {name: {} for name in self._pool}
        self._started = self._end = 0.0

    def run(self, seconds: float) -> TunedPlan | None:
        """Return the TunedPlan, measured in about ``seconds``; None when no kernel but ATen's can serve anything.

        Raises WorkerError when the worker cannot open the Problem, or is lost again and again.
        """
        self._started = time.perf_counter()
        self._end = self._started + seconds
        self._worker.open(self._problem, self._seed)
        self._time_coarsely()
        stopped = self._refine()
        chosen = self._verified_choice()
        if not any(chosen.values()):
            return None
        return self._plan(chosen, stopped)

    # --- timing

    def _time_coarsely(self) -> None:
        """Time the kernels at the powers of two, their odd neighbors and the M of the Decisions, smallest M first."""
        first, last = self._sizes.first, self._sizes.last
        powers = [1 << exponent for exponent in range(last.bit_length() + 1)]
        wanted = {first, last, 3, *self._sizes.tuned, *powers, *(power + 1 for power in powers[4::2])}
        wanted |= set(sorted(self._counts, key=lambda m: -self._counts[m])[:_BATCH])
        sizes = sorted(m for m in wanted if first <= m <= last)
        total = sum(sizes) + 64 * len(sizes)  # a call with few rows takes as long as one with 64
        budget_s = _COARSE_SHARE * (self._end - self._started)
        for start in range(0, len(sizes), _BATCH):
            batch = sizes[start : start + _BATCH]
            share = (sum(batch) + 64 * len(batch)) / total
            self._time({m: self._active(m) for m in batch}, share * budget_s)

    def _active(self, m: int) -> list[str]:
        """Return the kernels to time at M: ATen's plain op, and those from Decisions at the nearest four M."""
        below = [size for size in self._sizes.tuned if size <= m][-2:]
        above = [size for size in self._sizes.tuned if size >= m][:2]
        near = {*below, *above}
        return [name for name, kernel in self._pool.items() if kernel.is_plain or kernel.found_at & near]

    def _time(self, wanted: Mapping[int, Sequence[str]], budget_s: float) -> None:
        """Time kernels at some M and record the times. Kernels that crash are left out."""
        while True:
            order = {name: position for position, name in enumerate(self._items)}
            sizes = {m: [order[name] for name in names if name not in self._out] for m, names in wanted.items()}
            items = list(self._items.values())
            try:
                timed = self._worker.time_sizes(items, sizes, self._sizes.last, budget_s, self._seed, self._hot)
                break
            except WorkerLost as loss:
                if loss.candidate_id not in self._items:
                    raise
                self._fail(loss.candidate_id, loss.verdict)
                del self._items[loss.candidate_id]
        for name, verdict in timed.faults.items():
            self._fail(name, verdict)
        self._out |= timed.excluded
        for m, names in wanted.items():
            for name in names:
                self._timed_often[name, m] = self._timed_often.get((name, m), 0) + 1
        for m, times in timed.times.items():
            self._noise[m] = timed.noise.get(m, 0.0)
            for name, seconds in times.items():
                self._times[name][m] = seconds
        self._progress(
            PlanProgress(self._problem.plan_key, len(self._noise), max(0.0, self._end - time.perf_counter()))
        )

    def _remembered_failures(self) -> dict[str, Verdict]:
        """Return the faults that hold for every M of the weight, by candidate: dispatch would not serve these kernels.
        The Decisions may be older."""
        try:
            return self._store.failures(self._target, self._problem.plan_key)
        except StoreError as error:
            log.debug("the failures are not read: %s", error)
            return {}

    def _fail(self, name: str, verdict: Verdict) -> None:
        """Leave a kernel out, and store its fault, which holds for every M of the weight."""
        self._out[name] = f"{verdict.kind}: {verdict.detail}"
        if verdict.kind in FAULTS and not self._pool[name].is_plain:
            try:
                self._store.remember_failure(self._target, self._problem.plan_key, name, verdict)
            except StoreError as error:
                log.debug("a failure is not remembered: %s", error)

    def _refine(self) -> str:
        """Measure where a measurement may change the choice most, until nothing is urgent or the time is over. Return
        why it ended."""
        while (remaining_s := self._end - time.perf_counter()) > 0.0:
            wanted: dict[int, list[str]] = {}
            for packing in self._layouts():
                for m, names in self._next_measurements(packing).items():
                    wanted.setdefault(m, []).extend(name for name in names if name not in wanted.get(m, ()))
            if not wanted:
                return "no other M was worth a measurement"
            self._time(wanted, min(remaining_s, max(0.1 * remaining_s, 0.05 * (self._end - self._started))))
        return "the time for other M was over"

    def _next_measurements(self, packing: str) -> dict[int, list[str]]:
        """Return the M to measure next for a layout, with the kernels to time there."""
        curves = self._curves(packing)
        suspicious = self._suspicious(curves)
        if suspicious:
            return {
                m: list(dict.fromkeys((*self._names_near(curves, m), *suspicious[m])))
                for m in sorted(suspicious)[:_BATCH]
            }
        curves = curves.without(self._out)
        if not curves.times or not curves.sizes:
            return {}
        points = self._serving(curves)
        unseen = self._unseen_parities(curves, intervals.intervals(curves, points))
        if unseen:
            return {m: list(dict.fromkeys((*self._names_near(curves, m), name))) for m, name in unseen[:_BATCH]}
        urgent = [gap for gap in intervals.gaps(curves, points) if gap.loss > _LOSS and gap.urgency > 0.0]
        sizes = [intervals.next_size(curves, gap, odd=index % 2 == 0) for index, gap in enumerate(urgent[:_BATCH])]
        return {m: self._names_near(curves, m) for m in sizes}

    def _suspicious(self, curves: Curves) -> dict[int, list[str]]:
        """Return the M to measure again because kernels looked irregular there, with these kernels. Those that looked
        so repeatedly are left out."""
        again: dict[int, list[str]] = {}
        for name in intervals.irregular(curves.without(self._out)):
            slow = [m for m in curves.times[name] if self._is_slow_at(curves.times[name], m)]
            if all(self._timed_often[name, m] >= _RETIMED for m in slow):
                self._out[name] = f"irregular: slower at M = {slow[0]} than at a larger M"
            else:
                for m in slow:
                    if self._timed_often[name, m] < _RETIMED:
                        again.setdefault(m, []).append(name)
        return again

    @staticmethod
    def _is_slow_at(times: Mapping[int, float], m: int) -> bool:
        return any(times[m] > intervals.IRREGULAR * seconds for size, seconds in times.items() if size > m)

    def _unseen_parities(self, curves: Curves, found: Sequence[PlanInterval]) -> list[tuple[int, str]]:
        """Return an M and a kernel for each interval whose kernel was not timed at an odd, or at an even, M of it."""
        sizes = []
        for interval in found:
            if interval.kernel == curves.plain or interval.last - interval.first < 2:
                continue
            seen = {m % 2 for m in intervals.measured_inside(curves, interval.kernel, interval)}
            for parity in {0, 1} - seen:
                middle = round(math.sqrt(interval.first * interval.last))
                m = middle if middle % 2 == parity else middle + 1 if middle < interval.last else middle - 1
                if self._timed_often.get((interval.kernel, m), 0) < _RETIMED:
                    sizes.append((m, interval.kernel))
        return sizes

    def _names_near(self, curves: Curves, m: int) -> list[str]:
        """Return the kernels that may be the fastest at M: those close to the fastest at the next measured M on either
        side, and ATen's plain op."""
        below = max((size for size in curves.sizes if size <= m), default=None)
        above = min((size for size in curves.sizes if size >= m), default=None)
        names = [name for name, kernel in self._pool.items() if kernel.is_plain]
        for size in (below, above):
            if size is not None:
                limit_s = (1.0 + intervals.CLOSE) * curves.best(size)
                names += [name for name, times in curves.times.items() if times.get(size, math.inf) <= limit_s]
        return list(dict.fromkeys(names))

    # --- the choice

    def _curves(self, packing: str) -> Curves:
        """Return the times of a layout's kernels."""
        names = [name for name, kernel in self._pool.items() if (kernel.packing or "") == packing]
        times = {name: self._times[name] for name in names if self._times[name]}
        plain = next((name for name in times if self._pool[name].is_plain), "")
        steps = {name: self._pool[name].tile_rows for name in names}
        return Curves(self._sizes.first, self._sizes.last, times, plain, steps, self._counts, self._noise)

    def _serving(self, curves: Curves) -> dict[int, str]:
        return intervals.serving(curves, intervals.choose_kernels(curves, self._bound), self._bound)

    def _layouts(self) -> list[str]:
        """Return the raw layout and the packed layouts with the least total times, the best first."""
        totals = {}
        for packing in {kernel.packing or "" for name, kernel in self._pool.items() if name not in self._out}:
            curves = self._curves(packing).without(self._out)
            weights = intervals.point_weights(curves)
            total, weight = 0.0, 0.0
            for m in curves.sizes:
                if curves.best(m) < math.inf:
                    total += weights[m] * curves.best(m) / self._best(m)
                    weight += weights[m]
            if weight > 0.0:
                totals[packing] = total / weight
        packed = sorted((packing for packing in totals if packing), key=lambda packing: totals[packing])
        return [*packed[:_MAX_LAYOUTS], *(packing for packing in totals if not packing)]

    def _best(self, m: int) -> float:
        return min(times[m] for times in self._times.values() if m in times)

    def _verified_choice(self) -> dict[str, tuple[PlanInterval, ...]]:
        """Return the intervals of each layout, whose kernels were verified. A kernel that fails is left out, and
        kernels are chosen anew."""
        chosen: dict[str, tuple[PlanInterval, ...]] = {}
        for packing in self._layouts():
            for _ in range(_MAX_CHECKS):
                curves = self._curves(packing).without(self._out)
                if not any(name != curves.plain for name in curves.times):
                    break
                found = intervals.intervals(curves, self._serving(curves))
                if self._verify(found):
                    chosen[packing] = found
                    break
        return chosen

    def _verify(self, found: Sequence[PlanInterval]) -> bool:
        """Verify the kernels of intervals at many M. Return whether all are right; those that are not are left out."""
        for name in dict.fromkeys(interval.kernel for interval in found):
            kernel = self._pool[name]
            spans = [(interval.first, interval.last) for interval in found if interval.kernel == name]
            sizes = [m for m in sizes_to_verify(spans, kernel.candidate, self._rng) if m not in self._verified[name]]
            if not sizes:
                continue
            result = self._worker.verify_sizes(self._items[name], sizes)
            if not result.verdict.ok:
                self._fail(name, result.verdict)
                return False
            self._verified[name] |= dict.fromkeys(sizes, result.verdict.worst)
        return True

    # --- the result

    def _plan(self, chosen: Mapping[str, tuple[PlanInterval, ...]], stopped: str) -> TunedPlan:
        return TunedPlan(
            plan_key=self._problem.plan_key,
            problem=self._problem.to_dict(),
            target_key=self._target.key,
            first=self._sizes.first,
            last=self._sizes.last,
            intervals=dict(chosen),
            kernels=tuple(self._plan_kernel(name) for name in self._pool if self._times[name]),
            noise=self._noise,
            bound=self._bound,
            counts=self._counts,
            stopped=stopped,
            seconds=time.perf_counter() - self._started,
            seed=self._seed,
            created=time.time(),
        )

    def _plan_kernel(self, name: str) -> PlanKernel:
        kernel, verified = self._pool[name], self._verified[name]
        verdict = Verdict("within_bound", worst=max(verified.values())) if verified and name not in self._out else None
        times = dict(sorted(self._times[name].items()))
        return PlanKernel(
            kernel.candidate.to_dict(), name, kernel.tuned_m, kernel.packing, kernel.overlap, times,
            tuple(sorted(verified)), verdict,
        )  # fmt: skip
