"""The kernels of a Plan in this process."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection

from ..backends.base import Kernel
from ..core.candidate import Candidate
from ..core.problem import Problem
from .plan import Plan, PlanEntry


class PlanKernels:
    """A Plan's kernels, each of which is loaded when it is first needed. Not thread-safe but for ``loaded``:
    ``Runtime`` locks.

    problem: of any size. load: loads a candidate for a Problem of the size that it was tuned for, or returns None.
    faulty: ids of candidates that PyTorch serves in place of. firsts, lasts: the first and the last sizes of the Plan's
    intervals, ascending.
    """

    def __init__(
        self, plan: Plan, problem: Problem, load: Callable[[Candidate, Problem], Kernel | None],
        faulty: Collection[str],
    ) -> None:  # fmt: skip
        self._plan, self._problem, self._load, self._faulty = plan, problem, load, faulty
        self.firsts = [interval.first for interval in plan.intervals]
        self.lasts = [interval.last for interval in plan.intervals]
        self._kernels: dict[int, Kernel] = {}  # those that serve, by the address of an entry, which the Plan keeps

    def is_plain(self, interval: int) -> bool:
        """Whether plain PyTorch serves an interval, by the Plan."""
        return self._plan.intervals[interval].entry.candidate is None

    def plain_sizes(self) -> list[int]:
        """Return ``Plan.plain_sizes``."""
        return self._plan.plain_sizes()

    def load_intervals(self, load: Callable[[Candidate, Problem], Kernel | None]) -> None:
        """Load the kernels that serve the Plan's intervals. load: as for the class; kernels for which it returns None
        are loaded when a size needs them."""
        kernels: dict[tuple[Candidate, int], Kernel | None] = {}  # a kernel serves several intervals
        for _, _, entry in self._plan.intervals:
            if entry.candidate is None or entry.candidate.id in self._faulty:
                continue
            key = entry.candidate, entry.m
            if key not in kernels:
                kernels[key] = load(entry.candidate, self._tuned_at(entry))
            kernel = kernels[key]
            if kernel is not None:
                self._kernels[id(entry)] = kernel

    def loaded(self, size: int) -> Kernel | None:
        """Return the kernel for an M, or a batch, if it is the best that the Plan has and is loaded; else None.
        Safe in any thread, without the lock."""
        position = bisect_right(self.firsts, size) - 1
        if position < 0:
            return None
        _, last, entry = self._plan.intervals[position]
        kernel = self._kernels.get(id(entry)) if size <= last else None
        if kernel is not None:
            kernel.overlap = entry.overlap
        return kernel

    def of_size(self, size: int) -> Kernel | None:
        """Return the kernel for an M, or a batch; None where PyTorch serves it. For a packed weight, which only kernels
        of its layout can serve: the next best where one cannot be loaded."""
        kernel = self.loaded(size)  # Plan.ranked yields this entry first, and takes longer
        if kernel is not None:
            return kernel
        for entry in self._plan.ranked(size):
            kernel = self._kernels.get(id(entry)) or self._loaded(entry)
            if kernel is not None and kernel.candidate.id in self._faulty:
                return None
            if kernel is not None:
                self._kernels[id(entry)], kernel.overlap = kernel, entry.overlap
                return kernel
        return None

    def _loaded(self, entry: PlanEntry) -> Kernel | None:
        if entry.candidate is None:
            return None
        return self._load(entry.candidate, self._tuned_at(entry))

    def _tuned_at(self, entry: PlanEntry) -> Problem:
        """Return the Problem of the size that an entry was tuned for."""
        return self._problem.with_size(self._plan.dim, entry.m)
