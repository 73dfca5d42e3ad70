"""The tuning of one weight with a ``config_key``, from the Decisions at the M that represent the keys to a TunedPlan.

Each interval is a run of M with one key. The kernel that the key's Decision has serve a layout is timed beside ATen's
plain op at the first and the last M of the run and at the M that represents the key. Where it is not faster at all of
them, the plain op serves the run of the raw layout.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from ..core.tuned_plan import PlanInterval, TunedPlan
from .config_keys import representatives
from .curves import Curves
from .plan_measurements import Measurements
from .plan_pool import PoolKernel, served_pool
from .sizes import KeyRun
from .weight_session import WeightSession

_FIRST_SHARE = 0.75  # of the time, for the first timing of all M


class KeyedSession(WeightSession):
    """The tuning session of one weight over a range of M that keys divide: ``sizes.runs``."""

    def run(self, seconds: float) -> TunedPlan | None:
        """Return the TunedPlan, measured in about ``seconds``; None when no kernel can serve anything.

        Raises WorkerError when the worker cannot open the Problem, or is lost again and again.
        """
        self._started = time.perf_counter()
        self._end = self._started + seconds
        self._add(served_pool(self._decisions, self._faulty, self._sizes.dim))
        kernels = KeyKernels(self._sizes.runs, self._measurements)
        self._worker.open(self._problem, self._seed)
        self._time_runs(kernels)
        chosen: dict[str, tuple[PlanInterval, ...]] = {}
        for packing in self._measurements.layouts():
            if packing and chosen:  # a weight is packed once, and the best layout comes first
                continue
            if intervals := self._verified_intervals(kernels, packing):
                chosen[packing] = intervals
        return self._plan(chosen, "each key was timed")

    def _time_runs(self, kernels: KeyKernels) -> None:
        """Time the kernels at the M of the runs; then again those of packed layouts that looked slower than ATen's
        plain op: one such M keeps the layout from serving."""
        wanted = kernels.wanted()
        self._time_in_batches(sorted(wanted), lambda m: wanted[m], _FIRST_SHARE * (self._end - time.perf_counter()))
        again: dict[int, list[str]] = {}
        for packing in filter(None, self._measurements.layouts()):
            for m, names in self._measurements.slower_than_plain(kernels.by_m(packing)).items():
                again.setdefault(m, list(kernels.plain)).extend(names)
        self._time_in_batches(sorted(again), lambda m: again[m], max(0.0, self._end - time.perf_counter()))

    def _verified_intervals(self, kernels: KeyKernels, packing: str) -> tuple[PlanInterval, ...]:
        """Return the intervals of a layout, all of whose kernels were verified; empty where it cannot serve. ATen's
        plain op takes the place of a kernel of the raw layout that fails."""
        while intervals := kernels.intervals(packing):
            if self._verify(intervals):
                break
        return intervals


class KeyKernels:
    """The kernels of each run of M with one key, by what was measured so far.

    runs: ascending, without gaps. measurements: the pool of ``served_pool``, and its times.
    """

    def __init__(self, runs: Sequence[KeyRun], measurements: Measurements) -> None:
        self._runs, self._measurements = runs, measurements
        self._tuned_m = representatives(runs)
        self._layouts = {kernel.packing or "" for kernel in measurements.pool.values() if not kernel.is_plain}
        self.plain = [name for name, kernel in measurements.pool.items() if kernel.is_plain]

    def wanted(self) -> dict[int, list[str]]:
        """Return the M at which kernels are timed, with these kernels: ATen's plain op and those of the run."""
        wanted: dict[int, list[str]] = {}
        for run in self._runs:
            names = [*self.plain, *filter(None, (self._kernel(run, packing) for packing in sorted(self._layouts)))]
            wanted |= dict.fromkeys(self._sizes(run), names)
        return wanted

    def by_m(self, packing: str) -> dict[int, str]:
        """Return the kernel of a layout at each M at which it is timed."""
        return {m: name for run in self._runs if (name := self._kernel(run, packing)) for m in self._sizes(run)}

    def intervals(self, packing: str) -> tuple[PlanInterval, ...]:
        """Return an interval for each run; none where a run has no kernel that may serve it."""
        curves = self._measurements.curves(packing)
        names = [self._serving(curves, run, packing) for run in self._runs]
        if not all(names):
            return ()
        return tuple(PlanInterval(run.first, run.last, name) for run, name in zip(self._runs, names, strict=True))

    def _sizes(self, run: KeyRun) -> list[int]:
        """Return the M of a run at which kernels are timed."""
        tuned_m = self._tuned_m[run.key]
        return sorted({run.first, run.last, *([tuned_m] if run.first <= tuned_m <= run.last else [])})

    def _kernel(self, run: KeyRun, packing: str) -> str:
        """Return the id of a key's kernel in a layout, as its Decision has it; empty where that has none.

        A packed weight needs a kernel at every M: without one of its own, the key has that of the nearest one.
        """
        m = self._tuned_m[run.key]
        kernels = [k for k in self._measurements.pool.values() if (k.packing or "") == packing and not k.is_plain]
        own = next((kernel.id for kernel in kernels if m in kernel.fast_at), "")
        if own or not packing:
            return own
        return min(kernels, key=lambda kernel: _distance(kernel, m)).id if kernels else ""

    def _serving(self, curves: Curves, run: KeyRun, packing: str) -> str:
        """Return the id of the kernel that serves a run; empty where none does.

        In the raw layout it must be faster than ATen's plain op at each measured M, which serves otherwise. A packed
        layout's was timed at each of them; whether the layout is fast enough is decided for all M together
        (``dispatch/plan_layouts.py``).
        """
        name, out = self._kernel(run, packing), self._measurements.out
        is_right = name in curves.times and name not in out
        if is_right and all(curves.usable(name, m) < math.inf for m in self._sizes(run)):
            return name
        return curves.plain if curves.plain not in out else ""


def _distance(kernel: PoolKernel, m: int) -> float:
    """Return the least ratio of an M and the M of the Decisions that a kernel comes from."""
    return min(max(m, size) / min(m, size) for size in kernel.fast_at)
