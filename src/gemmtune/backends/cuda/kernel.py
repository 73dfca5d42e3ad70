"""Loaded CUDA C++ kernels."""

from __future__ import annotations

from typing import Any

import torch

from ..gpu.int4 import INT4_BLOCKS
from ..gpu.kernel import GridKernel, LaunchPlan, TmaKernel
from .block import fitted_rows, rows_of_tiles
from .source import ROWS_ARGUMENT


class Skinny(GridKernel):
    """The template ``skinny``: a block, or a cluster of blocks, for each tile.

    int4 weights have the Triton backend's layout with its smallest blocks, so that one packed weight serves few rows
    and many.
    """

    aligns_batches = True

    def _tile(self, config: dict[str, Any]) -> tuple[int, int, int]:
        return int(config["bm"]), int(config["bn"]), INT4_BLOCKS[0]


class Mixed(TmaKernel):
    """The template ``mixed``: a cluster of blocks for each tile. int4 weights have the layout of ``skinny``."""

    def _tile(self, config: dict[str, Any]) -> tuple[int, int, int]:
        self._split, self._config = int(config["split"]), config
        # Where tiles are fitted to M, the fewest rows that one may have.
        return rows_of_tiles(config).start, int(config["bn"]), INT4_BLOCKS[0]

    def _rows(self, m: int, device: int) -> int:
        """Return the rows of each tile."""
        if not self._config["fitted"]:
            return self._bm
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        return fitted_rows(m, self.problem.n, multiprocessors, self._config)

    def _box_rows(self, m: int, device: int) -> int:
        return min(m, self._rows(m, device))

    def _program_count(self, m: int, device: int) -> int:
        return -(-m // self._rows(m, device)) * self._tiles_n * self._split

    def _launch_plan(self, m: int, device: int, sizes: dict[str, int]) -> LaunchPlan:
        return super()._launch_plan(m, device, {**sizes, ROWS_ARGUMENT: self._rows(m, device)})


class Slab(TmaKernel):
    """The template ``slab``: clusters of blocks. Each block loops over slabs, or each block of a cluster computes a
    part of the K of one slab."""

    def _tile(self, config: dict[str, Any]) -> tuple[int, int, int]:
        self._cluster, self._split = int(config["cluster"]), int(config["split"])
        return int(config["bm"]), int(config["bn"]), 0

    def _box_rows(self, m: int, device: int) -> int:
        return min(m, super()._box_rows(m, device))

    def _program_count(self, m: int, device: int) -> int:
        groups = -(-m // self._bm) * -(-self._tiles_n // self._cluster)
        if self._split > 1:
            return groups * self._split
        clusters = torch.cuda.get_device_properties(device).multi_processor_count // self._cluster
        return int(self._cluster * max(1, min(groups, clusters)))
