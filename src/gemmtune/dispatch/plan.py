"""A Plan: the candidate that serves each M, for Problems that differ in M only, or in the batch only.

In a Plan over the batch what is called M here is the batch. It has no decisions at single sizes: those serve in the
Plans over M.

Three rules, in this order:

1. A weight that was tuned for a range of M is served by the intervals of its ``core.tuned_plan.TunedPlan``.
2. An M that was tuned by itself is served by the kernel of its Decision.
3. Any other M is served by plain PyTorch, unless the measurements at other M imply that a kernel is faster. Two facts
   bound every time: fewer rows take no longer, and more rows take no longer than as many calls. A kernel serves if the
   upper bound of its time is below the lower bound of plain PyTorch's. A packed weight, which plain PyTorch cannot take
   as it is, is served by the kernel with the least upper bound.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple

from ..core.candidate import Candidate
from ..core.problem import Dim

# A kernel serves at an M that was not measured if its time is below plain PyTorch's by this share: what is measured at
# two M repeats to one or two percent, and times that should not rise with fewer rows do so by as much.
CONFIDENCE = 0.03

_SIZE = itemgetter(0)  # the first M of an Interval, and the M of a PlanEntry


class PlanEntry(NamedTuple):
    """The decision at one tuned M.

    candidate: None for the plain PyTorch op. overlap: as ``Kernel.overlap``. seconds: of a call of the candidate;
    infinite where unknown. plain_s: of a call of the plain PyTorch op; 0.0 where unknown.
    """

    m: int
    candidate: Candidate | None
    overlap: bool = True
    seconds: float = float("inf")
    plain_s: float = 0.0

    def at_most(self, m: int) -> float:
        """Return an upper bound of the candidate's seconds at another M."""
        return self.seconds if m <= self.m else self.seconds * -(-m // max(self.m, 1))

    def plain_at_least(self, m: int) -> float:
        """Return a lower bound of the plain op's seconds at another M."""
        return self.plain_s if m >= self.m else self.plain_s / -(-self.m // max(m, 1))


class Interval(NamedTuple):
    """The M from ``first`` to ``last``, and the entry that serves them; its M is the one that the kernel is loaded
    for."""

    first: int
    last: int
    entry: PlanEntry


class Plan(NamedTuple):
    """What serves each M. All candidates take the weight in one layout: ``packing`` (None: the raw weight).

    entries: the decisions at single M, ascending. intervals: those of a TunedPlan, ascending and disjoint; M between
    them are served as if there were none. dim: the dimension whose sizes are called M.
    """

    plan_key: str
    packing: str | None
    entries: tuple[PlanEntry, ...]
    intervals: tuple[Interval, ...] = ()
    dim: Dim = "m"

    def pick(self, m: int) -> PlanEntry:
        """Return the entry that serves M by the rules of this module. For the plain op, its candidate is None."""
        return (
            self._interval(m)
            or self._entry(m)
            or (self._safe(m) if self.packing is None else self._by_upper_bound(m)[0])
        )

    def ranked(self, m: int) -> Iterator[PlanEntry]:
        """Yield the entries that can serve M, the best first. ``pick`` gives the first. For the raw weight there is one
        only, as the plain op serves where it cannot be loaded."""
        if self.packing is None:
            yield self.pick(m)
            return
        first = self._interval(m) or self._entry(m)
        if first is not None:
            yield first
        for entry in dict.fromkeys([self._entry(m), *self._by_upper_bound(m)]):
            if entry is not None and entry != first:
                yield entry

    def _by_upper_bound(self, m: int) -> list[PlanEntry]:
        """Return all entries, that with the least upper bound of its time at M first."""
        entries = [interval.entry for interval in self.intervals] + list(self.entries)
        return sorted(entries, key=lambda entry: (entry.at_most(m), max(entry.m, m) / max(min(entry.m, m), 1)))

    def covers(self, m: int) -> bool:
        """Whether M was measured, or lies in an interval."""
        return self._interval(m) is not None or self._entry(m) is not None

    def plain_sizes(self) -> list[int]:
        """Return M that the plain op serves by intervals: the first of each such interval, and later ones that are 1.5%
        apart (below 128 all of them)."""
        sizes = []
        for first, last, entry in self.intervals:
            m = first if entry.candidate is None else last + 1
            while m <= last:
                sizes.append(m)
                m += max(1, m // 64)
        return sizes

    def _interval(self, m: int) -> PlanEntry | None:
        index = bisect_right(self.intervals, m, key=_SIZE) - 1
        return self.intervals[index].entry if index >= 0 and m <= self.intervals[index].last else None

    def _entry(self, m: int) -> PlanEntry | None:
        index = bisect_left(self.entries, m, key=_SIZE)
        return self.entries[index] if index < len(self.entries) and self.entries[index].m == m else None

    def _safe(self, m: int) -> PlanEntry:
        """Return the entry that is certainly faster than the plain op at an M that was not measured, or one for the
        plain op."""
        kernels = [entry for entry in self.entries if entry.candidate is not None]
        best = min(kernels, key=lambda entry: entry.at_most(m), default=None)
        plain_s = max((entry.plain_at_least(m) for entry in self.entries), default=0.0)
        if best is not None and best.at_most(m) <= (1.0 - CONFIDENCE) * plain_s:
            return best
        return PlanEntry(m, None)


def nearest(sizes: tuple[int, ...], m: int) -> int:
    """Return the index of the size in ``sizes`` (sorted, not empty) that is nearest to m by ratio."""
    after = bisect_left(sizes, m)
    if after == 0:
        return 0
    if after == len(sizes):
        return after - 1
    below, above = sizes[after - 1], sizes[after]
    # log m - log below <= log above - log m, without logarithms.
    return after - 1 if m * m <= below * above else after
