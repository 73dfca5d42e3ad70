"""The scan of ATen's plain op: its times at many M, without other kernels beside it.

cuBLAS's time falls within each row of tiles, and jumps at the next. In fp8, 4096x4096 takes 137 us at M = 5120, 152 us
at 5121 and 141 us at 5247, in bfloat16 8192x1024 37 us at M = 961 and 27 us at 1024 (H100). Kernels of gemmtune have
other rows of tiles. Whether one of them is faster between two measured M is known only with the plain op's times there.
These are cheap: 5 ms an M (fp8 8192x1024, int8 weights 4096x4096, H100, 24 M each; a script that was not kept). By a
line between measured M, most of which are edges of tiles, the plain op served fp8 4096x4096 at 1.10 of a kernel's time
(M = 3511), and a kernel bfloat16 8192x1024 at 1.11 of the plain op's (M = 1016).
"""

from __future__ import annotations

import itertools
import math

from .curves import Curves

TILE = 128  # cuBLAS's time jumps after each multiple of it, in bfloat16 after multiples of 64, too
# M of each row of tiles: the first and the last two, since its time jumps there, and three between them.
_OFFSETS = (1, 33, 65, 97, TILE - 1, TILE)
_FIRST = 64  # with fewer rows, every kernel takes as long as reading the weight
# M are scanned where the fastest kernel takes these shares of the plain op's time at one of the measured M beside them:
# between them that time may be a third above the line (fp8 4096x22016, M = 518), and a quarter below it (bfloat16
# 8192x1024, M = 1016).
_LEAST_SHARE, _MOST_SHARE = 0.75, 1.25


def sizes_to_scan(curves: Curves) -> list[int]:
    """Return the M at which to time ATen's plain op, ascending: where its time decides which kernel is the fastest."""
    plain = curves.times.get(curves.plain, {})
    shares = {m: curves.least_of_kernels(m) / plain[m] for m in curves.sizes if m in plain}
    measured = [m for m, share in shares.items() if share < math.inf]
    sizes = set[int]()
    for a, b in itertools.pairwise(measured):
        nearest, farthest = max(shares[a], shares[b]), min(shares[a], shares[b])
        if nearest >= _LEAST_SHARE and farthest <= _MOST_SHARE:
            start = TILE * (a // TILE)
            sizes |= {
                row + offset for row in range(start, b + 1, TILE) for offset in _OFFSETS if a <= row + offset <= b
            }
    return sorted(m for m in sizes if m >= _FIRST)
