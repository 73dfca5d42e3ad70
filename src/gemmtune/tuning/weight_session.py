"""What the sessions that make a TunedPlan share: the kernels of one weight, their times, their verification, and the
record."""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from .. import backends
from ..backends.base import Backend
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
from ..timing.size_sweep import SizesTimed
from ..workers.contract import MeasurementWorker, WorkerLost
from ..workers.protocol import SizedCandidate
from .plan_measurements import BATCH, Measurements
from .plan_pool import PoolKernel, surcharges_of
from .sizes import SizeRange
from .verified_sizes import batches_to_verify, plain_sizes_to_verify, sizes_to_verify

log = logging.getLogger("gemmtune")

BOUND = 0.05  # the largest regret at a measured M
VERIFIED_M = 16  # the M of the Problem that is opened: verification at other M reuses its rows and results


def _loaded_backend(kernel: PoolKernel) -> Backend | None:
    """Return the backend of a kernel; None for a plugin that this process has not loaded."""
    name = kernel.candidate.backend
    return backends.get(name) if name in backends.names() else None


class WeightSession:
    """A tuning session of one weight over a range of M. Subclasses choose the kernels, where each is timed, and their
    intervals.

    problem: one of the weight's Problems. decisions: of Problems that differ from it in M only. sizes: the range, which
    may be one of batches: what is called M in the sessions is then the batch. counts: recorded calls by M. hot: time
    with operands in the cache. bound: as for ``TunedPlan``. The worker is not closed.
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
        # The worker's memory is limited by this Problem's operands: those of few rows are mostly the weight.
        self._problem = sizes.at(problem, VERIFIED_M if sizes.dim == "m" else sizes.last)
        # Estimates of many kernels at each M ask for its Problem. Making one takes 5 us, an estimate 6 to 16 us.
        self._problem_at = functools.cache(lambda m: sizes.at(problem, m))
        self._plan_key = problem.plan_key_over(sizes.dim)
        self._target, self._store, self._worker = target, store, worker
        self._sizes, self._counts, self._hot, self._bound = sizes, dict(counts), hot, bound
        self._progress, self._seed, self._rng = progress, seed, random.Random(seed)
        self._decisions = decisions
        device = devices.get(target.device)
        is_host = device.is_host
        # On a GPU, kernels are timed for CUDA graphs, in which the host does nothing.
        self._overhead_s = SERVING_S if is_host else 0.0
        self._measurements = Measurements(
            sizes, self._counts, bound, self._overhead_s, surcharges_of(decisions, sizes.dim, falling=is_host),
            max_kernels=device.profile.max_kernels, waves=not is_host and sizes.dim == "m",
            estimated_s=self._estimated_s,
        )  # fmt: skip
        # Without those in which a worker was lost: it would load and pack them again.
        self._items: dict[str, SizedCandidate] = {}
        self._faulty = set(self._remembered_failures())
        self._verified: dict[str, dict[int, float]] = {}
        self._started = self._end = 0.0

    def _add(self, kernels: Iterable[PoolKernel]) -> None:
        for kernel in kernels:
            self._measurements.add(kernel)
            self._items[kernel.id] = SizedCandidate(kernel.candidate.to_dict(), kernel.tuned_m)
            self._verified[kernel.id] = {}

    # --- timing

    def _time_in_batches(
        self,
        sizes: Sequence[int],
        names: Callable[[int], Sequence[str]],
        budget_s: float,
        fewer: Callable[[int, Sequence[str], float], Sequence[str] | None] = lambda m, names, seconds: None,
    ) -> None:
        """Time the kernels ``names(m)`` at each of some M, in this order. Larger M have more of the time.

        fewer: called with an M, its kernels and the seconds for them; returns those of them to time there, in a request
        of its own, because all would take too long, or None.
        """
        total = sum(sizes) + 64 * len(sizes)  # a call with few rows takes as long as one with 64
        done = 0
        while done < len(sizes):
            wanted: dict[int, Sequence[str]] = {}
            batch_s = 0.0
            for m in sizes[done : done + BATCH]:
                all_names, seconds = names(m), budget_s * (m + 64) / total
                fewer_names = fewer(m, all_names, seconds)
                if fewer_names is None:
                    wanted[m] = all_names
                    batch_s += seconds
                    continue
                if not wanted:  # otherwise they are chosen anew when the M before were timed
                    wanted, batch_s = {m: fewer_names}, seconds
                break
            self._time(wanted, batch_s)
            done += len(wanted)

    def _time(self, wanted: Mapping[int, Sequence[str]], budget_s: float, load_s: float = 0.0) -> None:
        """Time kernels at some M and record the times. load_s: as for ``protocol.TimeSizes``; the times are then those
        under load."""
        timed = self._worker_times(wanted, budget_s, load_s)
        if load_s:
            self._measurements.record_load(timed.times)
        else:
            self._measurements.record(wanted, timed.times)
            self._measurements.noise |= timed.noise
        left_s = max(0.0, self._end - time.perf_counter())
        self._progress(PlanProgress(self._plan_key, len(self._measurements.noise), left_s, self._sizes.dim))

    def _worker_times(self, wanted: Mapping[int, Sequence[str]], budget_s: float, load_s: float = 0.0) -> SizesTimed:
        """Return the times of kernels at some M as the worker measures them. Kernels that crash are left out."""
        while True:
            order = {name: position for position, name in enumerate(self._items)}
            sizes = {
                m: [order[name] for name in names if name not in self._measurements.out] for m, names in wanted.items()
            }
            items = list(self._items.values())
            try:
                timed = self._worker.time_sizes(
                    items, sizes, self._sizes.last, budget_s, self._seed, self._hot, load_s, self._sizes.dim
                )
                break
            except WorkerLost as loss:
                if loss.candidate_id not in self._items:
                    raise
                self._fail(loss.candidate_id, loss.verdict)
                del self._items[loss.candidate_id]
        for name, verdict in timed.faults.items():
            self._fail(name, verdict)
        self._measurements.out |= timed.excluded
        return timed

    def _remembered_failures(self) -> dict[str, Verdict]:
        """Return the faults that hold for every M of the weight, by candidate: dispatch would not serve these kernels.
        The Decisions may be older."""
        try:
            return self._store.failures(self._target, self._plan_key)
        except StoreError as error:
            log.debug("the failures are not read: %s", error)
            return {}

    def _fail(self, name: str, verdict: Verdict) -> None:
        """Leave a kernel out, and store its fault, which holds for every M of the weight."""
        self._measurements.out[name] = f"{verdict.kind}: {verdict.detail}"
        if not self._measurements.pool[name].is_plain:
            self._faulty.add(name)
        if verdict.kind in FAULTS and not self._measurements.pool[name].is_plain:
            try:
                self._store.remember_failure(self._target, self._plan_key, name, verdict)
            except StoreError as error:
                log.debug("a failure is not remembered: %s", error)

    # --- verification

    def _verify(self, intervals: Sequence[PlanInterval]) -> bool:
        """Verify the kernels of intervals at many M. Return whether all are right; those that are not are left out."""
        for name in dict.fromkeys(interval.kernel for interval in intervals):
            kernel = self._measurements.pool[name]
            spans = [(interval.first, interval.last) for interval in intervals if interval.kernel == name]
            if self._sizes.dim == "batch":
                chosen = batches_to_verify(spans, self._rng)
            elif kernel.is_plain:
                chosen = plain_sizes_to_verify(spans, self._rng)
            else:
                path = self._code_paths(kernel)
                m, seconds = max(self._measurements.times[name].items(), default=(1, 0.0))
                chosen = sizes_to_verify(spans, kernel.candidate, self._rng, path, self._problem.columns, seconds / m)
            sizes = [m for m in chosen if m not in self._verified[name]]
            if not sizes:
                continue
            result = self._worker.verify_sizes(self._items[name], sizes, self._sizes.dim)
            if not result.verdict.ok:
                self._fail(name, result.verdict)
                return False
            self._verified[name] |= dict.fromkeys(sizes, result.verdict.worst)
        return True

    def _estimated_s(self, kernel: PoolKernel, m: int) -> float | None:
        """Return ``Backend.estimated_s`` of a kernel at M; None for a plugin's kernel that only the worker has
        loaded."""
        backend = _loaded_backend(kernel)
        if backend is None:
            return None
        return backend.estimated_s(self._problem_at(m), kernel.candidate, self._target)

    def _code_paths(self, kernel: PoolKernel) -> Callable[[int], Hashable] | None:
        """Return ``Backend.code_paths`` of a kernel; None for a plugin's kernel that only the worker has loaded."""
        backend = _loaded_backend(kernel)
        return None if backend is None else backend.code_paths(self._problem, kernel.candidate, self._target)

    # --- the result

    def _plan(self, chosen: Mapping[str, tuple[PlanInterval, ...]], stopped: str) -> TunedPlan | None:
        """Return the plan with the intervals of each layout; None, with a warning, without any interval."""
        if not any(chosen.values()):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._measurements.out.items())
            log.warning("no plan for %s, whose kernels cannot serve (%s)", self._plan_key, reasons)
            return None
        return TunedPlan(
            plan_key=self._plan_key,
            problem=self._problem.to_dict(),
            target_key=self._target.key,
            first=self._sizes.first,
            last=self._sizes.last,
            intervals=dict(chosen),
            kernels=tuple(
                self._plan_kernel(name)
                for name in self._measurements.pool
                if self._measurements.times[name] or name in self._measurements.out
            ),
            tuned=self._sizes.tuned,
            config_key=self._sizes.config_key,
            overhead_s=self._overhead_s,
            surcharges=self._measurements.surcharges,
            noise=self._measurements.noise,
            scan=self._measurements.scan,
            dim=self._sizes.dim,
            bound=self._bound,
            counts=self._counts,
            stopped=stopped,
            seconds=time.perf_counter() - self._started,
            seed=self._seed,
            created=time.time(),
        )

    def _plan_kernel(self, name: str) -> PlanKernel:
        kernel, verified = self._measurements.pool[name], self._verified[name]
        verdict = (
            Verdict("within_bound", worst=max(verified.values()))
            if verified and name not in self._measurements.out
            else None
        )
        times = dict(sorted(self._measurements.times[name].items()))
        return PlanKernel(
            kernel.candidate.to_dict(), name, kernel.tuned_m, kernel.packing, kernel.overlap, times,
            tuple(sorted(verified)), verdict, self._measurements.out.get(name, ""),
        )  # fmt: skip
