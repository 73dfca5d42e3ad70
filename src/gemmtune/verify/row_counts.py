"""Which other M a kernel is verified at: a Plan serves every M by kernels that were raced at a few."""

from __future__ import annotations

from collections.abc import Iterator

from ..core.candidate import Candidate
from ..core.problem import Problem

_TILE_NAMES = ("bm", "mr", "mc", "block_m")
_USUAL = (1, 2, 3, 17, 31, 63, 65, 127, 129)
_MOST_ELEMENTS = 1 << 20  # of an output, unless the Problem's own is larger


def other_row_counts(problem: Problem, candidate: Candidate) -> Iterator[int]:
    """M to verify a candidate at besides the Problem's, the likeliest to show a fault first.

    One row, the edges of the candidate's tiles, odd numbers, and one row less and more than the Problem has; twice as
    many rows as the Problem at most, and more where the output stays small.
    """
    if min(problem.m, problem.n, problem.k, problem.batch) == 0:
        return
    most = max(2 * problem.m + 1, min(130, _MOST_ELEMENTS // (problem.n * problem.batch)))
    tiles = [value for name, value in candidate.config if name in _TILE_NAMES and isinstance(value, int) and value > 0]
    edges = [tile + side for side in (1, -1, 0) for tile in tiles]
    wanted = [
        1,
        *edges[: len(tiles)],
        problem.m + 1,
        2,
        *edges[len(tiles) :],
        problem.m - 1,
        *_USUAL,
        2 * problem.m + 1,
    ]
    for m in dict.fromkeys(wanted):
        if 1 <= m <= most and m != problem.m:
            yield m
