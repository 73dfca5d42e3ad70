"""The values of M at which a kernel is verified, since a Plan serves every M with kernels that were timed at a few."""

from __future__ import annotations

from collections.abc import Iterator

from ..core.candidate import Candidate
from ..core.problem import Problem

_TILE_NAMES = ("bm", "mr", "mc", "block_m")
_COMMON_COUNTS = (1, 2, 3, 17, 31, 63, 65, 127, 129)
_MAX_ELEMENTS = 1 << 20  # of an output, unless the Problem's own is larger


def other_row_counts(problem: Problem, candidate: Candidate) -> Iterator[int]:
    """Yield values of M, other than the Problem's, at which to verify a candidate; the likeliest to fail come first.

    They are 1, the sizes of the candidate's tiles and their neighbors, odd numbers, and the Problem's M - 1 and M + 1.
    The largest is twice the Problem's M plus 1, or more when the output stays small.
    """
    if min(problem.m, problem.n, problem.k, problem.batch) == 0:
        return
    max_m = max(2 * problem.m + 1, min(130, _MAX_ELEMENTS // (problem.n * problem.batch)))
    tiles = _tiles(candidate)
    edges = [tile + side for side in (1, -1, 0) for tile in tiles]
    row_counts = [
        1,
        *edges[: len(tiles)],
        problem.m + 1,
        2,
        *edges[len(tiles) :],
        problem.m - 1,
        *_COMMON_COUNTS,
        2 * problem.m + 1,
    ]
    for m in dict.fromkeys(row_counts):
        if 1 <= m <= max_m and m != problem.m:
            yield m


def tile_rows(candidate: Candidate) -> int:
    """Return the rows of a candidate's output tile; 1 where its config does not say."""
    return max(_tiles(candidate)[:1], default=1)


def _tiles(candidate: Candidate) -> list[int]:
    return [value for name, value in candidate.config if name in _TILE_NAMES and isinstance(value, int) and value > 0]
