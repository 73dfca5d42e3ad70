"""The tuning of one weight as a function of M, from its Decisions at a few M to a TunedPlan.

The kernels of the Decisions, and those that backends expect to be fast between their M, are timed against one another
at more M: first at powers of two, then where kernels are expected to be fast, then where a measurement may change the
choice most. The fewest kernels that keep the regret within a bound are chosen, verified at many M of their intervals,
and stored with the intervals.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable, Mapping, Sequence

from ..core import devices
from ..core.decision import Decision, Verdict
from ..core.errors import StoreError
from ..core.events import PlanProgress, Progress
from ..core.problem import Problem
from ..core.target import Target
from ..core.tuned_plan import PlanInterval, PlanKernel, TunedPlan
from ..core.verdict import FAULTS
from ..dispatch.portfolio import SERVING_S
from ..store.base import Store
from ..workers.contract import MeasurementWorker, WorkerLost
from ..workers.protocol import SizedCandidate
from . import intervals
from .plan_measurements import BATCH, Measurements
from .plan_pool import PoolKernel, add_surcharges, kernel_pool, nearest_sizes
from .predicted_kernels import expected_kernels
from .sizes import SizeRange
from .verified_sizes import sizes_to_verify
from .worker_pool import BuildKernels

log = logging.getLogger("gemmtune")

BOUND = 0.05  # the largest regret at a measured M
VERIFIED_M = 16  # the M of the Problem that is opened: verification at other M reuses its rows and results
_STEPS_UP_TO = 16  # the M after a power of two is timed up to this part of the range: calls take long at its end
_COARSE_SHARE = 0.5  # of the time, for the first M
_PREDICTED_SHARE = 0.5  # of the time that remains, for the M at which kernels are expected to be fast
_NEAR_EXPECTED = 1.6
_LEAST_CALLS = 3  # of a kernel that is timed at an M
_AGAIN_SHARE = 0.5  # of the time, for kernels that are added because another failed
_MAX_CHECKS = 4  # times that kernels are chosen anew because one failed verification


class PlanSession:
    """The tuning session of one weight over a range of M.

    problem: one of the weight's Problems. decisions: of Problems that differ from it in M only. sizes: the range.
    counts: recorded calls by M. hot: time with operands in the cache. build: builds kernels that no Decision has, and
    returns the outcome of each by its id; None: the worker builds them. The worker is not closed.
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
        build: BuildKernels | None = None,
    ) -> None:
        self._problem, self._target, self._store, self._worker = problem.with_m(VERIFIED_M), target, store, worker
        self._sizes, self._counts, self._hot, self._bound = sizes, dict(counts), hot, bound
        self._progress, self._seed, self._rng = progress, seed, random.Random(seed)
        self._decisions, self._build = decisions, build
        # On a GPU, kernels are timed for CUDA graphs, in which the host does nothing.
        self._overhead_s = SERVING_S if devices.get(target.device).is_host else 0.0
        self._found = Measurements(sizes, self._counts, bound, self._overhead_s)
        # Without those in which a worker was lost: it would load and pack them again.
        self._items: dict[str, SizedCandidate] = {}
        self._faulty = set(self._remembered_failures())
        self._verified: dict[str, dict[int, float]] = {}
        self._started = self._end = 0.0
        self._extend_pool()

    def run(self, seconds: float) -> TunedPlan | None:
        """Return the TunedPlan, measured in about ``seconds``; None when no kernel can serve anything.

        When a kernel fails, those that it kept out of the pool by its speed are measured, too, in up to half of the
        time again. Raises WorkerError when the worker cannot open the Problem, or is lost again and again.
        """
        self._started = time.perf_counter()
        self._add_predicted()
        self._end = time.perf_counter() + seconds
        self._worker.open(self._problem, self._seed)
        while True:
            self._time_coarsely()
            self._time_predicted()
            stopped = self._refine()
            chosen = self._verified_choice()
            if not self._extend_pool():
                break
            self._end = max(self._end, time.perf_counter() + _AGAIN_SHARE * seconds)
        if not any(chosen.values()):
            return None
        return self._plan(chosen, stopped)

    def _extend_pool(self) -> bool:
        """Add the kernels that the pool lacks, without the faulty ones. Return whether there are any."""
        new = [k for k in kernel_pool(self._decisions, self._faulty) if k.id not in self._found.pool]
        self._add(new)
        return bool(new)

    def _add(self, kernels: Iterable[PoolKernel]) -> None:
        for kernel in kernels:
            self._found.add(kernel)
            self._items[kernel.id] = SizedCandidate(kernel.candidate.to_dict(), kernel.tuned_m)
            self._verified[kernel.id] = {}

    def _add_predicted(self) -> None:
        """Add kernels that no Decision has, and that are expected to be fast at other M. They are built first."""
        pool = list(self._found.pool.values())
        kernels = expected_kernels(
            self._problem, self._target, self._decisions, self._sizes, self._counts, self._faulty
        )
        if kernels and self._build is not None:
            builds = self._build([(self._problem.with_m(k.tuned_m), k.candidate) for k in kernels], self._target)
            kernels = [kernel for kernel in kernels if not isinstance(builds[kernel.id], Verdict)]
        add_surcharges(kernels, pool)
        self._add(kernels)

    # --- timing

    def _time_coarsely(self) -> None:
        """Time the kernels at the powers of two, some odd neighbors and the M of the Decisions, smallest M first."""
        first, last = self._sizes.first, self._sizes.last
        powers = [1 << exponent for exponent in range(last.bit_length() + 1)]
        steps = {power + 1 for power in powers[4::2] if _STEPS_UP_TO * power <= last}
        wanted = {first, last, 3, *self._sizes.tuned, *powers, *steps}
        wanted |= set(sorted(self._counts, key=lambda m: -self._counts[m])[:BATCH])
        sizes = sorted(m for m in wanted if first <= m <= last)
        total = sum(sizes) + 64 * len(sizes)  # a call with few rows takes as long as one with 64
        budget_s = _COARSE_SHARE * max(0.0, self._end - time.perf_counter())
        for start in range(0, len(sizes), BATCH):
            batch = sizes[start : start + BATCH]
            share = (sum(batch) + 64 * len(batch)) / total
            self._time({m: self._active(m) for m in batch}, share * budget_s)

    def _time_predicted(self) -> None:
        """Time the kernels that are expected to be fast at some M there, with those that were fast at M nearby."""
        expected: dict[int, list[str]] = {}
        for name, kernel in self._found.pool.items():
            for m in kernel.predicted_for:
                expected.setdefault(m, []).append(name)
        layouts = [self._found.curves(packing) for packing in self._found.layouts()]
        wanted = {}
        for m in sorted(expected):
            near = (name for curves in layouts for name in self._found.names_near(curves, m))
            wanted[m] = list(dict.fromkeys((*near, *expected[m])))
        budget_s = _PREDICTED_SHARE * max(0.0, self._end - time.perf_counter())
        for start in range(0, len(wanted), BATCH):
            sizes = list(wanted)[start : start + BATCH]
            self._time({m: wanted[m] for m in sizes}, len(sizes) / len(wanted) * budget_s)

    def _active(self, m: int) -> list[str]:
        """Return the kernels to time at M: ATen's plain op, those that are expected to be fast within a factor of
        ``_NEAR_EXPECTED``, and of each layout those from Decisions at the nearest M that are not far behind at the next
        smaller M.

        Layouts are compared over the whole range, so that each of them needs a kernel at every M.
        """
        pool, behind = self._found.pool, self._found.far_behind(m)
        near = {packing: nearest_sizes(found_at, m) for packing, found_at in self._found.found_at().items()}
        return [
            name
            for name, kernel in pool.items()
            if kernel.is_plain
            or any(max(m, size) <= _NEAR_EXPECTED * min(m, size) for size in kernel.predicted_for)
            or (kernel.found_at & near[kernel.packing] and not (name in behind and max(kernel.found_at) < m))
        ]

    def _time(self, wanted: Mapping[int, Sequence[str]], budget_s: float) -> None:
        """Time kernels at some M and record the times. Kernels that crash are left out."""
        while True:
            order = {name: position for position, name in enumerate(self._items)}
            sizes = {m: [order[name] for name in names if name not in self._found.out] for m, names in wanted.items()}
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
        self._found.out |= timed.excluded
        self._found.record(wanted, timed.times)
        self._found.noise |= timed.noise
        left_s = max(0.0, self._end - time.perf_counter())
        self._progress(PlanProgress(self._problem.plan_key, len(self._found.noise), left_s))

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
        self._found.out[name] = f"{verdict.kind}: {verdict.detail}"
        if not self._found.pool[name].is_plain:
            self._faulty.add(name)
        if verdict.kind in FAULTS and not self._found.pool[name].is_plain:
            try:
                self._store.remember_failure(self._target, self._problem.plan_key, name, verdict)
            except StoreError as error:
                log.debug("a failure is not remembered: %s", error)

    def _refine(self) -> str:
        """Measure where a measurement may change the choice most, until nothing is urgent or the time is over. Return
        why it ended."""
        while (remaining_s := self._end - time.perf_counter()) > 0.0:
            wanted: dict[int, list[str]] = {}
            for packing in self._found.layouts():
                for m, names in self._found.next_measurements(packing).items():
                    wanted.setdefault(m, []).extend(name for name in names if name not in wanted.get(m, ()))
            if not wanted:
                return "no other M was worth a measurement"
            wanted = self._affordable(wanted, remaining_s)
            if not wanted:
                break
            self._time(wanted, min(remaining_s, max(0.1 * remaining_s, 0.05 * (self._end - self._started))))
        return "the time for other M was over"

    def _affordable(self, wanted: Mapping[int, list[str]], seconds: float) -> dict[int, list[str]]:
        """Return the first of the wanted M that can be timed in some seconds, with their kernels."""
        affordable: dict[int, list[str]] = {}
        for m, names in wanted.items():
            seconds -= _LEAST_CALLS * sum(self._found.expected_s(name, m) for name in names)
            if seconds < 0.0:
                break
            affordable[m] = names
        return affordable

    # --- the choice

    def _verified_choice(self) -> dict[str, tuple[PlanInterval, ...]]:
        """Return the intervals of the raw layout and of the best packed one that has right kernels, all of which were
        verified. A kernel that fails is left out, and kernels are chosen anew."""
        chosen: dict[str, tuple[PlanInterval, ...]] = {}
        for packing in self._found.layouts():
            if packing and chosen:  # a weight is packed once, and the best layout comes first
                continue
            for _ in range(_MAX_CHECKS):
                curves = self._found.curves(packing).without(self._found.out)
                if not curves.sizes:
                    break
                found = intervals.intervals(curves, self._found.serving(curves))
                if self._verify(found):
                    chosen[packing] = found
                    break
        return chosen

    def _verify(self, found: Sequence[PlanInterval]) -> bool:
        """Verify the kernels of intervals at many M. Return whether all are right; those that are not are left out."""
        for name in dict.fromkeys(interval.kernel for interval in found):
            kernel = self._found.pool[name]
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
            kernels=tuple(
                self._plan_kernel(name)
                for name in self._found.pool
                if self._found.times[name] or name in self._found.out
            ),
            tuned=self._sizes.tuned,
            overhead_s=self._overhead_s,
            noise=self._found.noise,
            bound=self._bound,
            counts=self._counts,
            stopped=stopped,
            seconds=time.perf_counter() - self._started,
            seed=self._seed,
            created=time.time(),
        )

    def _plan_kernel(self, name: str) -> PlanKernel:
        kernel, verified = self._found.pool[name], self._verified[name]
        verdict = (
            Verdict("within_bound", worst=max(verified.values())) if verified and name not in self._found.out else None
        )
        times = dict(sorted(self._found.times[name].items()))
        return PlanKernel(
            kernel.candidate.to_dict(), name, kernel.tuned_m, kernel.packing, kernel.overlap, times,
            tuple(sorted(verified)), verdict, self._found.out.get(name, ""), kernel.surcharge,
        )  # fmt: skip
