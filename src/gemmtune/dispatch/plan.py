"""A Plan: for one Problem with M left free, which candidate answers which M."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from ..core.candidate import Candidate


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """What was decided at one tuned M. candidate None: the plain PyTorch op. overlap: as ``Kernel.overlap``."""

    m: int
    candidate: Candidate | None
    overlap: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """Entries sorted by M, all of whose candidates take the weight in one ``packing`` (None: as it is)."""

    plan_key: str
    packing: str | None
    entries: tuple[PlanEntry, ...]

    def pick(self, m: int) -> PlanEntry:
        """The entry whose tuned M is nearest by log distance (the smaller one when two are as near)."""
        return self.entries[nearest(tuple(entry.m for entry in self.entries), m)]

    def ranked(self, m: int) -> list[PlanEntry]:
        """Return the entries from the nearest to the farthest tuned M; ``pick`` gives the first."""
        rest, order = list(self.entries), []
        while rest:
            order.append(rest.pop(nearest(tuple(entry.m for entry in rest), m)))
        return order

    @property
    def plain(self) -> bool:
        """Whether every M is best served by plain PyTorch."""
        return all(entry.candidate is None for entry in self.entries)


def nearest(sizes: tuple[int, ...], m: int) -> int:
    """Index of the size in ``sizes`` (sorted, not empty) nearest to m by ratio."""
    after = bisect_left(sizes, m)
    if after == 0:
        return 0
    if after == len(sizes):
        return after - 1
    below, above = sizes[after - 1], sizes[after]
    # log m - log below <= log above - log m, without logarithms.
    return after - 1 if m * m <= below * above else after
