"""Loaded CUDA C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.candidate import Candidate
from ...core.problem import Problem
from ..gpu.artifact import Header
from ..gpu.int4 import INT4_BLOCKS
from ..gpu.kernel import GridKernel, LoadedCubin, TmaKernel
from .fitted import fitted_size, is_fitted, tile_sizes


class Skinny(GridKernel):
    """The template ``skinny``: a block, or a cluster of blocks, for each tile.

    int4 weights have the Triton backend's layout with its smallest blocks, so that one packed weight serves few rows
    and many.
    """

    aligns_batches = True

    def _tile(self, config: dict[str, Any]) -> tuple[int, int, int]:
        return int(config["bm"]), int(config["bn"]), INT4_BLOCKS[0]


class _MaybeFitted(TmaKernel):
    """A kernel whose tiles may be fitted to M: it then has a cubin for each size of its tiles."""

    clips_boxes = True

    def __init__(self, problem: Problem, candidate: Candidate, parts: Sequence[tuple[Header, bytes]]) -> None:
        super().__init__(problem, candidate, parts)
        self._config = dict(candidate.config)
        self._copies: dict[int, LoadedCubin] = {}
        if is_fitted(self._config):
            *sizes, largest = tile_sizes(candidate.template, self._config)
            self._copies = {size: LoadedCubin(*part) for size, part in zip(sizes, parts[:-1], strict=True)}
            self._copies[largest] = self.function

    def _size(self, m: int, device: int, fixed: int) -> int:
        """Return the size of the tiles that is fitted to M; ``fixed`` where none is."""
        if not self._copies:
            return fixed
        return fitted_size(self.candidate.template, m, self.problem.n, _multiprocessors(device), self._config)

    def _cubin(self, m: int, device: int) -> LoadedCubin:
        return self._copies[self._size(m, device, 0)] if self._copies else self.function


class Mixed(_MaybeFitted):
    """The template ``mixed``: a cluster of blocks for each tile. int4 weights have the layout of ``skinny``."""

    def _tile(self, config: dict[str, Any]) -> tuple[int, int, int]:
        self._split = int(config["split"])
        return int(config["bm"]), int(config["bn"]), INT4_BLOCKS[0]

    def _program_count(self, m: int, device: int) -> int:
        return -(-m // self._size(m, device, self._bm)) * self._tiles_n * self._split


class Slab(_MaybeFitted):
    """The template ``slab``: clusters of blocks. Each block loops over slabs, or each block of a cluster computes a
    part of the K of one slab."""

    def _tile(self, config: dict[str, Any]) -> tuple[int, int, int]:
        self._cluster, self._split = int(config["cluster"]), int(config["split"])
        return int(config["bm"]), int(config["bn"]), 0

    def _program_count(self, m: int, device: int) -> int:
        columns = self._size(m, device, self._bn)
        groups = -(-m // self._bm) * -(-self.problem.n // (columns * self._cluster))
        if self._split > 1:
            return groups * self._split
        return int(self._cluster * max(1, min(groups, _multiprocessors(device) // self._cluster)))


def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
