"""Loaded CUDA C++ kernels."""

from __future__ import annotations

from typing import Any

from ..gpu.int4 import INT4_BLOCKS
from ..gpu.kernel import GridKernel


class Skinny(GridKernel):
    """The template ``skinny``: a block, or a cluster of them, for each tile. int4 weights are the Triton backend's, in
    its smallest blocks, so that one packed weight serves few rows and many."""

    def _tile(self, config: dict[str, Any]) -> tuple[int, int, int]:
        return int(config["bm"]), int(config["bn"]), INT4_BLOCKS[0]
