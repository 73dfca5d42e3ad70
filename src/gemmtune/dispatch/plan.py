"""A Plan: the candidate that serves each M, for Problems that differ in M only."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from ..core.candidate import Candidate


class PlanEntry(NamedTuple):
    """The decision at one tuned M. candidate: None for the plain PyTorch op. overlap: as ``Kernel.overlap``."""

    m: int
    candidate: Candidate | None
    overlap: bool = True


class Plan(NamedTuple):
    """Entries sorted by M. All their candidates take the weight in one layout: ``packing`` (None: the raw weight)."""

    plan_key: str
    packing: str | None
    entries: tuple[PlanEntry, ...]

    def pick(self, m: int) -> PlanEntry:
        """Return the entry whose tuned M is nearest by log distance (the smaller M of two at one distance)."""
        return self.entries[nearest(tuple(entry.m for entry in self.entries), m)]

    def ranked(self, m: int) -> list[PlanEntry]:
        """Return the entries from the nearest to the farthest tuned M; ``pick`` gives the first."""
        rest, order = list(self.entries), []
        while rest:
            order.append(rest.pop(nearest(tuple(entry.m for entry in rest), m)))
        return order


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
