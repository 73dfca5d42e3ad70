"""A guess at what a tile configuration takes, to order candidates before anything is timed. It decides nothing else.

Two ceilings, the memory's and the matrix units', each spread over the multiprocessors as evenly as the programs allow.
The constants are of an H200; only ratios between configurations matter.
"""

from __future__ import annotations

from dataclasses import dataclass

_BANDWIDTH = 4.2e12  # bytes a second
_FLIGHT = 24e3  # bytes a multiprocessor must have on their way to reach half the bandwidth
_PEAK = 750e12  # 16-bit operations a second that large tiles reach
_START_S = 2.0e-6
_SPLIT_S, _PART_S = 2.0e-6, 0.15e-6  # what adding up the parts of a tile takes, besides the traffic
_STREAM = 1.05  # not before the same tile without, but for a clear gain


@dataclass(frozen=True, slots=True)
class Work:
    """Sizes of a product, bytes of an element of A and of B, multiprocessors and shared memory of the device. convert:
    the weights are converted on their way to the matrix units."""

    m: int
    n: int
    k: int
    a_bytes: float
    b_bytes: float
    multiprocessors: int
    shared: int
    convert: bool = False


def shared_tiles(tiles: int, programs: int) -> int:
    """Tiles that ``persistent`` programs share with ``stream``: those of the last round and of the one before it."""
    return tiles - max(tiles // programs - 1, 0) * programs


def seconds(
    work: Work, bm: int, bn: int, bk: int, split: int, stages: int, warps: int, swap: bool, tma: bool,
    stream: bool = False,
) -> float:  # fmt: skip
    """A guess at the time of one call."""
    tiles = -(-work.m // bm) * -(-work.n // bn)
    programs = tiles * split
    buffer = (bm * work.a_bytes + bn * work.b_bytes) * bk
    resident = max(1, min(int(work.shared // (buffer * stages)), 64 // warps // 2))
    if tma:
        resident = 1
    # All programs run in rounds of so many; the multiprocessor with most of them ends last.
    busiest = -(-programs // work.multiprocessors)
    imbalance = busiest * work.multiprocessors / programs
    together = min(resident, busiest)
    flight = together * buffer * max(stages - 1, 1)
    rows = min(bm, work.m) if work.m < bm else bm
    traffic = tiles * (0.25 * rows * work.a_bytes + bn * work.b_bytes) * work.k + 8.0 * bm * bn * programs * (split > 1)
    extra = (_SPLIT_S + _PART_S * split) if split > 1 else 0.0
    if stream:
        imbalance = 1.0
        traffic += 8.0 * bm * bn * work.multiprocessors  # a sum each, written and read
        extra += _SPLIT_S + _PART_S * (1.0 + work.multiprocessors / shared_tiles(tiles, work.multiprocessors))
    # Rows of tiles that run at the same time share B in the L2.
    shared_rows = min(-(-work.m // bm), 8)
    memory = traffic / shared_rows**0.9 / _BANDWIDTH * imbalance**0.25 * (1.0 + _FLIGHT / flight)
    compute = _compute(work, bm, bn, warps, swap) * tiles * work.k / work.multiprocessors * imbalance
    taken = max(memory, compute) + 0.5 * min(memory, compute) + extra + _START_S
    return float(taken * (_STREAM if stream else 1.0))


def _compute(work: Work, bm: int, bn: int, warps: int, swap: bool) -> float:
    """Seconds that one multiprocessor takes for one element of K of one tile."""
    high, wide = (bn, bm) if swap else (bm, bn)
    area = max(high, 64) * max(wide, 16)
    rate = _PEAK / work.multiprocessors * (2.0 if work.a_bytes == 1 else 1.0)
    # Small tiles read their operands from shared memory more often than the matrix units can wait for.
    efficiency = min(1.0, 0.35 + 0.65 * (max(high, 64) * max(wide, 16) / (128 * 256)) ** 0.5)
    if warps == 8 and area < 128 * 128:
        efficiency *= 0.9
    time = 2.0 * area / (rate * efficiency)
    return float(time + (bn / (7e12 / work.multiprocessors) if work.convert else 0.0))
