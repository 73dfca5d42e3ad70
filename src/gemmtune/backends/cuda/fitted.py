"""Kernels whose tiles are fitted to M: several kernels of one template (``mixed`` or ``slab``), the copies, that differ
in one size of their tiles. The host launches one of them by M, so that blocks divide the output evenly."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ...core.problem import Problem
from .block import mixed_stages, slab_stages
from .source import MIXED, SLAB

# The size that is fitted: ``mixed`` reads A's rows along wgmma's second dimension, ``slab`` B's columns.
_AXES = {MIXED: "bm", SLAB: "bn"}
_STAGES = {MIXED: mixed_stages, SLAB: slab_stages}
_STEP = 16  # between sizes; each is a kernel of its own, which takes the compiler half a second
MAX_STAGES = 24  # of a kernel, fitted or not


def is_fitted(config: dict[str, Any]) -> bool:
    """Whether a candidate's tiles are fitted to M."""
    return bool(config.get("fitted"))


class FittedTiles:
    """The tiles of a fitted kernel whose output has N columns, on a device with a number of multiprocessors.

    sizes: those that are built, along the axis that is fitted (rows of ``mixed``, columns of ``slab``), ascending.
    """

    def __init__(
        self, template: str, config: dict[str, Any], n: int, multiprocessors: int, sizes: Iterable[int] = ()
    ) -> None:
        self._template, self._n, self._bm, self._bn = template, n, int(config["bm"]), int(config["bn"])
        self._cluster = int(config.get("cluster", 1))  # blocks side by side along N
        self._clusters = max(1, multiprocessors // (self._cluster * int(config["split"])))
        self.sizes = tuple(sizes) or self._useful_sizes(int(config[_AXES[template]]))

    def _useful_sizes(self, most: int) -> tuple[int, ...]:
        """Return ``most`` and the multiples of ``_STEP`` below it that may be the least for some M.

        Of ``slab``, one row of tiles has the least columns if a round of blocks is enough for it; with more rounds
        tiles have more than half of ``most``. Tiles of ``mixed`` have no fewer than a third: TMA loads no rows that A
        does not have.
        """
        least = most / 3
        if self._template == SLAB:
            least = min(self._n / (self._clusters * self._cluster), most / 2)
        return (*range(max(2, math.ceil(least / _STEP)) * _STEP, most, _STEP), most)

    def size_at(self, m: int) -> int:
        """Return the size of the tiles for M rows: the least with which the blocks need no more rounds than with the
        largest.

        A block's time has a part that does not depend on its tile's size, so that more rounds of smaller tiles take
        longer.
        """
        fewest = self._rounds(m, self.sizes[-1])
        return next(size for size in self.sizes if self._rounds(m, size) <= fewest)

    def _rounds(self, m: int, size: int) -> int:
        rows, columns = (size, self._bn) if self._template == MIXED else (self._bm, size)
        return -(-(-(-m // rows) * -(-self._n // (columns * self._cluster))) // self._clusters)


def copy_at(problem: Problem, template: str, config: dict[str, Any], size: int, shared: int) -> dict[str, Any]:
    """Return the config of a fitted kernel's copy with tiles of one size, with as many stages as fit ``shared`` bytes
    of shared memory."""
    copy = {name: value for name, value in config.items() if name != "fitted"} | {_AXES[template]: size}
    return copy | {"stages": min(MAX_STAGES, _STAGES[template](problem, copy, shared))}
