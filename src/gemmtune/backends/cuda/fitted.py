"""Kernels whose tiles are fitted to M: several kernels of one template (``mixed`` or ``slab``), the copies, that differ
in one size of their tiles and, for ``mixed``, in how many blocks share K. The host launches one of them by M, so that
blocks divide the output evenly."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, NamedTuple

from ...core.problem import Problem
from .block import RESERVED_SHARED, mixed_stages, slab_stages
from .source import MIXED, SLAB

# The size that is fitted: ``mixed`` reads A's rows along wgmma's second dimension, ``slab`` B's columns.
_AXES = {MIXED: "bm", SLAB: "bn"}
_STAGES = {MIXED: mixed_stages, SLAB: slab_stages}
# The values of ``fitted``: of ``slab``, and of ``mixed``, for which stores may have 1 to 3 from versions with other
# copies, with which those kernels were verified.
SIZE, SIZE_AND_SPLIT = 1, 4
_LEAST_STEP = 8  # all sizes of ``mixed`` are multiples of it
_STEP = 16  # between sizes; each is a kernel of its own, which takes the compiler half a second
# Where so many blocks share K, reading the weight takes most of the time. They do so in one round only: in a version
# with three blocks 4096x4096 took 82 us at M = 645 in more rounds, with two 44 (int4 weights, H100).
_MANY_BLOCKS, _STEP_OF_MANY = 3, 32
# The sizes of ``mixed`` that are multiples of 8 only: blocks that do not share K, whose rows are fewer than this and
# more than half of the largest size. 16 rows are over 8% of them.
_EIGHTS_BELOW = 192
_LEAST = 32  # rows of ``mixed``, columns of ``slab``
SPLITS = (1, 2, 4, 6)  # the numbers of blocks of ``mixed`` that share K
_NARROW = 64  # columns
# Stages with which a second block fits on a multiprocessor, if there are as many: the blocks of the next call then read
# their weights while these still run. A tile of 32 rows by int4 weights is 13% slower with 18 stages than one of 64
# rows with 5 (4096x4096, H100).
_LEAST_BESIDE = 5
SCANNED_ROWS = 4096  # copies of ``mixed`` are those that M up to here need; larger M need no others
# The time of a round, in rows of a tile that a block multiplies with K = 4096: what it takes besides (most of it the
# conversion of the weight), and for the exchange of sums where blocks share K, which does not grow with K. The choices
# between a round of one block and a round of two, and between two rounds and three, in 230 measured pairs (int8 and
# int4 weights, six shapes, every-M plans of H100s and H200s) lose 0.2% in the mean and 5.5% at most. With the exchange
# counted as an eighth of a round, whatever the tile and K, they lose 3.5% and 63%: with K = 11008 three rounds of two
# blocks take 0.7 to 1.0 of the time of two rounds of one, with K = 3072 mostly 1.1 to 1.4.
_BESIDE_ROWS, _EXCHANGE_ROWS = 110.0, 45.0
# How many clusters run at a time, by their blocks: one block on each of the 132 multiprocessors of an H200, and two
# (cudaOccupancyMaxActiveClusters). The blocks of a cluster run on one part of the GPU.
_CLUSTERS_OF_132 = {3: (39, 79), 4: (30, 62), 5: (22, 47), 6: (17, 39), 7: (15, 32), 8: (15, 30)}
MAX_STAGES = 24  # of a kernel, fitted or not


def is_fitted(config: dict[str, Any]) -> bool:
    """Whether a candidate's tiles are fitted to M."""
    return bool(config.get("fitted"))


class Copy(NamedTuple):
    """What tells the copies of a fitted kernel from one another. split: the blocks of a cluster that share K. size: of
    the tiles, along the axis that is fitted."""

    split: int
    size: int


class FittedTiles:
    """The tiles of a fitted kernel for a weight [K, N], on a device with a number of multiprocessors.

    copies: those that are built, ascending. rows_alike: the copy for M rows depends on how many
    blocks of so many rows they fill.
    """

    def __init__(
        self, template: str, config: dict[str, Any], n: int, k: int, multiprocessors: int, copies: Iterable[Copy] = ()
    ) -> None:
        self._template, self._n, self._bm, self._bn = template, n, int(config["bm"]), int(config["bn"])
        self._exchange_rows = _EXCHANGE_ROWS * 4096 / k
        self._columns = -(-n // self._bn)  # tiles of ``mixed`` along N
        self._cluster, self._multiprocessors = int(config.get("cluster", 1)), multiprocessors
        self._largest = int(config[_AXES[template]])
        self.rows_alike = _LEAST_STEP if template == MIXED else self._bm
        self._set_copies(copies or self._possible_copies(int(config["split"])))
        if not copies and template == MIXED:
            self._set_copies({*self._scan(), Copy(1, self._largest)})

    def _set_copies(self, copies: Iterable[Copy]) -> None:
        self.copies = tuple(sorted(copies))
        self._sizes: dict[int, list[int]] = {}  # by split, both ascending
        for copy in self.copies:
            self._sizes.setdefault(copy.split, []).append(copy.size)
        self._clusters_of = {split: self._clusters(split) for split in self._sizes}

    def _scan(self) -> list[Copy]:
        """Return the copies for M up to SCANNED_ROWS: one for each ``rows_alike`` M."""
        return [self.copy_at(m) for m in range(1, SCANNED_ROWS + 1, self.rows_alike)]

    @functools.cached_property
    def listed(self) -> list[Copy]:
        """The copies for M up to SCANNED_ROWS; that for M rows is at ``(M - 1) // rows_alike``."""
        return self._scan()

    def _possible_copies(self, most: int) -> list[Copy]:
        """Return the copies that may be the best for some M. most: blocks that share K.

        Of ``slab``, one row of tiles has the least columns if a round of blocks is enough for it; with more rounds
        tiles have more than half of the largest size.
        """
        if self._template == SLAB:
            least = min(self._n / (self._clusters(1) * self._cluster), self._largest / 2)
            sizes = [size for size in range(_LEAST, self._largest, _STEP) if size >= least]
            return [Copy(1, size) for size in (*sizes, self._largest)]
        splits = [split for split in SPLITS if split <= most]
        return [Copy(split, size) for split in splits for size in (*self._mixed_sizes(split), self._largest)]

    def _mixed_sizes(self, split: int) -> list[int]:
        """Return the sizes of tiles below the largest, ascending. Wide tiles have no fewer rows than a third of it: for
        few rows narrow ones are faster, and TMA loads no rows that A does not have."""
        least = _LEAST if self._bn == _NARROW else max(_LEAST, self._largest // 3)
        step = _STEP if split < _MANY_BLOCKS else _STEP_OF_MANY
        eights = range(self._largest // 2, _EIGHTS_BELOW) if split == 1 else range(0)
        return [
            size
            for size in range(least, self._largest)
            if size % step == 0 or (size % _LEAST_STEP == 0 and size in eights)
        ]

    def copy_at(self, m: int) -> Copy:
        """Return the copy for M rows: for each number of blocks that share K, tiles are the smallest with which there
        are no more rounds of blocks than with the largest; of these copies, that with which the rounds take the least
        time.

        A block's time has a part that does not depend on its tile's size, so that more rounds of smaller tiles take
        longer.
        """
        best, least_time = None, math.inf
        is_mixed = self._template == MIXED
        fixed, fitted, per_tile = (self._columns, m, 1) if is_mixed else (-(-m // self._bm), self._n, self._cluster)
        for split, sizes in self._sizes.items():
            clusters = self._clusters_of[split]
            rounds = -(-fixed * -(-fitted // (sizes[-1] * per_tile)) // clusters)
            most_tiles = rounds * clusters // fixed  # along the fitted axis
            size = sizes[bisect_left(sizes, -(-fitted // (most_tiles * per_tile)))]
            # In rows of a tile (``_BESIDE_ROWS``); of ``slab`` there is one split only.
            time = rounds * ((_BESIDE_ROWS + size) / split + (self._exchange_rows if split > 1 else 0.0))
            if best is None or (time < least_time and (split < _MANY_BLOCKS or rounds == 1)):
                best, least_time = Copy(split, size), time
        assert best is not None
        return best

    def _clusters(self, split: int) -> int:
        """Return about how many clusters run at a time."""
        return clusters_at_once(split * self._cluster, self._multiprocessors)


@functools.lru_cache(maxsize=256)
def _tiles(template: str, bm: int, bn: int, cluster: int, split: int, n: int, k: int, count: int, /) -> FittedTiles:
    return FittedTiles(template, {"bm": bm, "bn": bn, "cluster": cluster, "split": split}, n, k, count)


def fitted_tiles(template: str, config: dict[str, Any], problem: Problem, multiprocessors: int) -> FittedTiles:
    """Return the tiles of a fitted kernel with all its copies, from a cache: finding the copies takes 5 to 8 ms."""
    sizes = int(config["bm"]), int(config["bn"]), int(config.get("cluster", 1)), int(config["split"])
    return _tiles(template, *sizes, problem.n, problem.k, multiprocessors)


def clusters_at_once(blocks: int, multiprocessors: int, resident: int = 1) -> int:
    """Return about how many clusters of up to 8 blocks run at a time. resident: how many blocks fit on a
    multiprocessor."""
    if blocks not in _CLUSTERS_OF_132:
        return max(1, multiprocessors * resident // blocks)
    alone, beside = _CLUSTERS_OF_132[blocks]
    return max(1, multiprocessors * (2 * alone if resident == 1 else resident * beside) // 264)


def copy_config(problem: Problem, template: str, config: dict[str, Any], copy: Copy, shared: int) -> dict[str, Any]:
    """Return the config of a fitted kernel's copy, with as many stages as fit ``shared`` bytes of shared memory; of
    ``mixed`` as many as fit half of them, if those are enough."""
    result = {name: value for name, value in config.items() if name != "fitted"}
    result |= {"split": copy.split, _AXES[template]: copy.size}
    stages = _STAGES[template](problem, result, shared)
    if template == MIXED:
        beside = mixed_stages(problem, result, (shared + RESERVED_SHARED) // 2 - RESERVED_SHARED)
        stages = beside if beside >= _LEAST_BESIDE else stages
    return result | {"stages": min(MAX_STAGES, stages)}
