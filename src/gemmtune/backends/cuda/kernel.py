"""Loaded CUDA C++ kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from ...core.candidate import Candidate
from ...core.problem import Problem
from ..gpu.artifact import Header
from ..gpu.int4 import INT4_BLOCKS
from ..gpu.kernel import GridKernel, LoadedCubin, TmaKernel
from .fitted import Copy, FittedTiles, is_fitted


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
        self._latest: tuple[tuple[int, int], Copy] | None = None  # the last M and device, and the copy for them
        if is_fitted(self._config):
            self._cubins = {self._copy_of(part[0]): LoadedCubin(*part) for part in parts[:-1]}
            self._cubins[self._copy_of(self.header)] = self.function

    def _copy_of(self, header: Header) -> Copy:
        return Copy(header.split, self._size_of(header))

    @abstractmethod
    def _size_of(self, header: Header) -> int:
        """Return the size of a cubin's tiles along the axis that may be fitted."""

    def _copy(self, m: int, device: int) -> Copy:
        """Return the copy for M rows; that of the only cubin where tiles are not fitted."""
        if not self._cubins:
            return self._copy_of(self.header)
        latest = self._latest  # making one launch asks for the copy three times
        if latest is None or latest[0] != (m, device):
            latest = self._latest = (m, device), self._tiles_on(device).copy_at(m)
        return latest[1]

    def _tiles_on(self, device: int) -> FittedTiles:
        if device not in self._tiles:
            weight = self.problem.n, self.problem.k
            self._tiles[device] = FittedTiles(
                self.candidate.template, self._config, *weight, self.function(device).multiprocessors, self._cubins
            )
        return self._tiles[device]

    def _cubin(self, m: int, device: int) -> LoadedCubin:
        return self._cubins[self._copy(m, device)] if self._cubins else self.function


class Mixed(_FittableKernel):
    """The template ``mixed``: a cluster of blocks for each tile. int4 weights have the layout of ``skinny``."""

    def _tile(self, config: dict[str, Any]) -> tuple[int, int, int]:
        return int(config["bm"]), int(config["bn"]), INT4_BLOCKS[0]

    def _size_of(self, header: Header) -> int:
        return header.descriptors["a_desc"].block[0]

    def _program_count(self, m: int, device: int) -> int:
        copy = self._copy(m, device)
        return -(-m // copy.size) * self._tiles_n * copy.split


class Slab(_FittableKernel):
    """The template ``slab``: clusters of blocks. Each block loops over slabs, or each block of a cluster computes a
    part of the K of one slab."""

    def _tile(self, config: dict[str, Any]) -> tuple[int, int, int]:
        self._cluster, self._split = int(config["cluster"]), int(config["split"])
        return int(config["bm"]), int(config["bn"]), 0

    def _size_of(self, header: Header) -> int:
        return header.descriptors["b_desc"].block[0] * (2 if self.problem.gate is not None else 1)

    def _program_count(self, m: int, device: int) -> int:
        groups = -(-m // self._bm) * -(-self.problem.n // (self._copy(m, device).size * self._cluster))
        if self._split > 1:
            return groups * self._split
        return int(self._cluster * max(1, min(groups, self.function(device).multiprocessors // self._cluster)))
