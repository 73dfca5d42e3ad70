"""Loaded CUDA C++ kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from ...core.candidate import Candidate
from ...core.problem import Problem
from ..gpu.artifact import Header
from ..gpu.driver import Function
from ..gpu.int4 import INT4_BLOCKS
from ..gpu.kernel import GridKernel, LoadedCubin, TmaKernel
from .fitted import SCANNED_ROWS, Copy, FittedTiles, is_fitted


class Skinny(GridKernel):
    """The template ``skinny``: a block, or a cluster of blocks, for each tile.

    int4 weights have the Triton backend's layout with its smallest blocks, so that one packed weight serves few rows
    and many.
    """

    aligns_batches = True

    def _tile(self, config: dict[str, Any]) -> tuple[int, int, int]:
        return int(config["bm"]), int(config["bn"]), INT4_BLOCKS[0]


class _FittableKernel(TmaKernel):
    """A kernel whose tiles may be fitted to M: it then has a cubin for each copy (``FittedTiles``)."""

    clips_boxes = True

    def __init__(self, problem: Problem, candidate: Candidate, parts: Sequence[tuple[Header, bytes]]) -> None:
        super().__init__(problem, candidate, parts)
        self._config = dict(candidate.config)
        self._cubins: dict[Copy, LoadedCubin] = {}
        self._tiles: dict[int, FittedTiles] = {}  # by device
        if is_fitted(self._config):
            self._cubins = {self._copy_of(part[0]): LoadedCubin(*part) for part in parts[:-1]}
            self._cubins[self._copy_of(self.header)] = self.function

    def _copy_of(self, header: Header) -> Copy:
        return Copy(header.split, self._size_of(header))

    @abstractmethod
    def _size_of(self, header: Header) -> int:
        """Return the size of a cubin's tiles along the axis that may be fitted."""

    def _tiles_on(self, device: int) -> FittedTiles:
        if device not in self._tiles:
            template, weight = self.candidate.template, (self.problem.n, self.problem.k)
            multiprocessors = self.function(device).multiprocessors
            self._tiles[device] = FittedTiles(template, self._config, *weight, multiprocessors, self._cubins)
        return self._tiles[device]

    def _by_copy(self, values_of: Callable[[LoadedCubin], Any], device: int) -> Callable[[int], Any] | None:
        if not self._cubins:
            return None
        tiles = self._tiles_on(device)
        of_copies = {copy: values_of(cubin) for copy, cubin in self._cubins.items()}
        # A first call with an M waits for this function, so that most M find their copy in a list.
        listed, rows, copy_at = [of_copies[copy] for copy in tiles.listed], tiles.rows_alike, tiles.copy_at
        return lambda m: (listed[(m - 1) // rows] if 0 < m <= SCANNED_ROWS else of_copies[copy_at(m)])(m)


class Mixed(_FittableKernel):
    """The template ``mixed``: a cluster of blocks for each tile. int4 weights have the layout of ``skinny``."""

    def _tile(self, config: dict[str, Any]) -> tuple[int, int, int]:
        return int(config["bm"]), int(config["bn"]), INT4_BLOCKS[0]

    def _size_of(self, header: Header) -> int:
        return header.descriptors["a_desc"].block[0]

    def _programs(self, function: Function) -> tuple[str, dict[str, int]]:
        split, size = self._copy_of(function.header)
        return "-(-m // size) * tiles", {"size": size, "tiles": self._tiles_n * split}


class Slab(_FittableKernel):
    """The template ``slab``: clusters of blocks. Each block loops over slabs, or each block of a cluster computes a
    part of the K of one slab."""

    def _tile(self, config: dict[str, Any]) -> tuple[int, int, int]:
        self._cluster, self._split = int(config["cluster"]), int(config["split"])
        return int(config["bm"]), int(config["bn"]), 0

    def _size_of(self, header: Header) -> int:
        return header.descriptors["b_desc"].block[0] * (2 if self.problem.gate is not None else 1)

    def _programs(self, function: Function) -> tuple[str, dict[str, int]]:
        width = self._size_of(function.header) * self._cluster
        numbers = {"bm": self._bm, "slabs": -(-self.problem.n // width), "split": self._split, "cluster": self._cluster}
        if self._split > 1:
            return "-(-m // bm) * slabs * split", numbers
        most = max(1, function.multiprocessors // self._cluster)
        return "cluster * min(-(-m // bm) * slabs, most)", {**numbers, "most": most}
