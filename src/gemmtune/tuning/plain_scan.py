"""The scan of ATen's plain op: its times at many M, without other kernels beside it.

cuBLAS's time falls within each row of tiles, and jumps at the next and where cuBLAS chooses another algorithm. In fp8,
4096x4096 takes 137 us at M = 5120, 152 us at 5121 and 141 us at 5247, in bfloat16 8192x1024 37 us at M = 961 and 27 us
at 1024 (H100). Kernels of gemmtune have other rows of tiles. Whether one of them is faster between two measured M is
known only with the plain op's times there. These are cheap: 5 ms an M (fp8 8192x1024, int8 weights 4096x4096, H100, 24
M each; a script that was not kept). By a line between measured M, most of which are edges of tiles, the plain op served
fp8 4096x4096 at 1.10 of a kernel's time (M = 3511), and a kernel bfloat16 8192x1024 at 1.11 of the plain op's (M =
1016).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from .curves import Curves
from .plain_times import LibraryAlgorithms

TILE = 128  # cuBLAS's time jumps after each multiple of it, in bfloat16 after multiples of 64, too
# Each algorithm is timed at its first and its last M in blocks of so many rows, from some M on. In
# bfloat16 8192x1024 from M = 520 to 899 the least of the two was at most 3.3% above the op's time, the least of the two
# nearest of fixed M (three times as few) 33% above it (H200, ``benchmarks/library_algorithms.py``).
_BLOCKS = ((4097, 256), (1025, 128), (1, 64))  # (first M, rows)
# Where no algorithm is known, M of each block: the ends, since the op's time jumps there, and others between them.
_OFFSETS = (1, 33, 65, 97, TILE - 1, TILE)
_FIRST = 17  # with fewer rows, products take little longer than reading the weight
# M are scanned where the fastest kernel takes these shares of the plain op's time at one of the measured M beside them:
# between them that time may be a third above the line (fp8 4096x22016, M = 518), and a quarter below it (bfloat16
# 8192x1024, M = 1016).
_LEAST_SHARE, _MOST_SHARE = 0.75, 1.25

Range = tuple[int, int]  # first and last M


def ranges_to_scan(curves: Curves) -> list[Range]:
    """Return the ranges of M, ascending and apart, in which ATen's plain op's time decides which kernel is the
    fastest."""
    plain = curves.times.get(curves.plain, {})
    shares = {m: curves.least_of_kernels(m) / plain[m] for m in curves.sizes if m in plain}
    measured = [m for m, share in shares.items() if share < math.inf]
    ranges = list[Range]()
    for a, b in itertools.pairwise(measured):
        nearest, farthest = max(shares[a], shares[b]), min(shares[a], shares[b])
        if nearest >= _LEAST_SHARE and farthest <= _MOST_SHARE and b >= _FIRST:
            if ranges and ranges[-1][1] == a:
                ranges[-1] = ranges[-1][0], b
            else:
                ranges.append((max(a, _FIRST), b))
    return ranges


def sizes_to_scan(ranges: Sequence[Range], algorithms: LibraryAlgorithms) -> list[int]:
    """Return the M at which to time ATen's plain op, ascending."""
    return sorted(
        {m for first, last in ranges for block in _blocks(first, last) for m in _sizes_in(*block, algorithms)}
    )


def _blocks(first: int, last: int) -> Iterator[Range]:
    """Yield the blocks of rows from ``first`` to ``last``; the first and the last of them may be parts."""
    while first <= last:
        rows = next(rows for start, rows in _BLOCKS if first >= start)
        end = min(last, rows * -(-first // rows))
        yield first, end
        first = end + 1


def _sizes_in(first: int, last: int, algorithms: LibraryAlgorithms) -> set[int]:
    """Return the M at which to time the op in a block."""
    ends = dict[str, Range]()  # the first and the last M of each algorithm
    unknown = set[int]()
    for start, end, name in algorithms.runs(first, last):
        if name:
            ends[name] = ends.get(name, (start, end))[0], end
        else:
            unknown |= {m for m in range(start, end + 1) if (m % TILE or TILE) in _OFFSETS}
    return unknown.union(*ends.values())
