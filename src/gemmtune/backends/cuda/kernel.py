"""Loaded CUDA C++ kernels."""

from __future__ import annotations

from typing import Any

import torch

from ..gpu.int4 import INT4_BLOCKS
from ..gpu.kernel import GridKernel, TmaKernel


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

    clips_boxes = True

    def _tile(self, config: dict[str, Any]) -> tuple[int, int, int]:
        self._split = int(config["split"])
        return int(config["bm"]), int(config["bn"]), INT4_BLOCKS[0]

    def _program_count(self, m: int, device: int) -> int:
        return -(-m // self._bm) * self._tiles_n * self._split


class Slab(TmaKernel):
    """The template ``slab``: clusters of blocks. Each block loops over slabs, or each block of a cluster computes a
    part of the K of one slab."""

    clips_boxes = True

    def _tile(self, config: dict[str, Any]) -> tuple[int, int, int]:
        self._cluster, self._split = int(config["cluster"]), int(config["split"])
        return int(config["bm"]), int(config["bn"]), 0

    def _program_count(self, m: int, device: int) -> int:
        groups = -(-m // self._bm) * -(-self._tiles_n // self._cluster)
        if self._split > 1:
            return groups * self._split
        clusters = torch.cuda.get_device_properties(device).multi_processor_count // self._cluster
        return int(self._cluster * max(1, min(groups, clusters)))
