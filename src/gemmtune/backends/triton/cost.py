"""An estimate of the time of a tile configuration, which orders candidates before anything is timed. It decides nothing
else.

The model has two ceilings, the memory's and the matrix units', each distributed over the multiprocessors as evenly as
the number of programs allows. The constants are those of an H200; only ratios between configurations matter.
"""

from __future__ import annotations

from dataclasses import dataclass

_BANDWIDTH = 4.2e12  # bytes per second
_FLIGHT = 24e3  # bytes a multiprocessor must have in flight to reach half the bandwidth
_PEAK = 750e12  # 16-bit operations per second that large tiles reach
_START_S = 2.0e-6
_SPLIT_S, _PART_S = 2.0e-6, 0.15e-6  # seconds to add up the parts of a tile, besides the memory traffic
_LARGE_TILE = 128 * 256
# What a tile of half the area costs more, with TMA. Of int8 weights in ``converted`` a round of tiles has 804 TFLOPS
# with 128 x 256 and 8 warps (median of 43 plans), 759 with 128 x 128 and 4 warps (16), 696 with 8 warps (4), and 779
# with 64 x 256 and 4 warps (1): lines through the times over the rounds, from M = 1024 on (H100 and H200, the files
# every-m-2026112[5-8]*; a script that was not kept).
_SMALLER_TILE = 0.06
_MANY_WARPS = 0.92  # the speed of 8 warps for a tile that 4 warps can compute
_STREAM = 1.05  # factor on the time: sharing tiles must gain clearly to rank before the same tile without


@dataclass(frozen=True, slots=True)
class Work:
    """The sizes of a product and the device's limits.

    a_bytes, b_bytes: bytes of an element of A and of B. shared: bytes of shared memory of a program. convert: whether
    the weights are converted on their way to the matrix units.
    """

    m: int
    n: int
    k: int
    a_bytes: float
    b_bytes: float
    multiprocessors: int
    shared: int
    convert: bool = False


def shared_tiles(tiles: int, programs: int) -> int:
    """Return how many tiles the ``persistent`` programs share with ``stream``: those of the last round and of the round
    before it."""
    return tiles - max(tiles // programs - 1, 0) * programs


def seconds(
    work: Work, bm: int, bn: int, bk: int, split: int, stages: int, warps: int, swap: bool, tma: bool,
    stream: bool = False,
) -> float:  # fmt: skip
    """Return the estimated time of one call, in seconds."""
    tiles = -(-work.m // bm) * -(-work.n // bn)
    programs = tiles * split
    buffer = (bm * work.a_bytes + bn * work.b_bytes) * bk
    resident = max(1, min(int(work.shared // (buffer * stages)), 64 // warps // 2))
    if tma:
        resident = 1
    # Programs run in rounds of one per multiprocessor; the multiprocessor with the most programs ends last.
    busiest = -(-programs // work.multiprocessors)
    imbalance = busiest * work.multiprocessors / programs
    concurrent = min(resident, busiest)
    flight = concurrent * buffer * max(stages - 1, 1)
    rows = min(bm, work.m) if work.m < bm else bm
    traffic = tiles * (0.25 * rows * work.a_bytes + bn * work.b_bytes) * work.k + 8.0 * bm * bn * programs * (split > 1)
    extra = (_SPLIT_S + _PART_S * split) if split > 1 else 0.0
    if stream:
        imbalance = 1.0
        traffic += 8.0 * bm * bn * work.multiprocessors  # each writes a partial sum, which is read again
        extra += _SPLIT_S + _PART_S * (1.0 + work.multiprocessors / shared_tiles(tiles, work.multiprocessors))
    # Rows of tiles that run at the same time share B in the L2.
    shared_rows = min(-(-work.m // bm), 8)
    memory = traffic / shared_rows**0.9 / _BANDWIDTH * imbalance**0.25 * (1.0 + _FLIGHT / flight)
    compute = _compute(work, bm, bn, warps, swap, tma) * tiles * work.k / work.multiprocessors * imbalance
    least, most = min(memory, compute), max(memory, compute)
    # With TMA the loads go on beside the products: where one of the two takes much longer, it hides the other.
    total = most + 0.5 * least * (least / most if tma else 1.0) + extra + _START_S
    return float(total * (_STREAM if stream else 1.0))


def _compute(work: Work, bm: int, bn: int, warps: int, swap: bool, tma: bool) -> float:
    """Return the seconds that one multiprocessor takes for one element of K of one tile."""
    high, wide = (bn, bm) if swap else (bm, bn)
    area = max(high, 64) * max(wide, 16)
    rate = _PEAK / work.multiprocessors * (2.0 if work.a_bytes == 1 else 1.0)
    # Small tiles read their operands from shared memory so often that the matrix units wait for it.
    if tma:
        efficiency = min(1.0, 1.0 / (1.0 + _SMALLER_TILE * (_LARGE_TILE / area - 1.0)))
        efficiency *= _MANY_WARPS if warps == 8 and area <= _LARGE_TILE // 2 else 1.0
    else:
        efficiency = min(1.0, 0.35 + 0.65 * (area / _LARGE_TILE) ** 0.5)
        efficiency *= 0.9 if warps == 8 and area < _LARGE_TILE // 2 else 1.0
    time = 2.0 * area / (rate * efficiency)
    return float(time + (bn / (7e12 / work.multiprocessors) if work.convert else 0.0))
