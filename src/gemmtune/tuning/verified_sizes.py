"""The values of M, or of the batch, at which a kernel of a Plan is verified, for the intervals that it serves."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Sequence

from ..core.candidate import Candidate
from ..verify.row_counts import tile_rows

RUN = 17  # consecutive M: they contain every remainder of a division by 17 or less
# A run whose calls would take longer than this is shorter, but as long as a tile has rows, and at least SHORT_RUN.
RUN_S, SHORT_RUN = 1.0, 8
RANDOM = 4  # of each interval
EDGES = 3  # multiples of the tile's rows, with both neighbors
PATHS = 1024  # M of a span, evenly spaced, at which it is asked which copy of its code a kernel runs
MAX_SIZES = 96
# The same for batches, each of which has operands and results of its own.
BATCH_RUN, MAX_BATCHES = 8, 24
MAX_ROWS = 4  # times the largest M: the rows of all M but the run and the ends
# Columns of a result from which on there are fewer of these rows, as many elements: verifying two kernels for 128,256
# columns took 5 and 6 s on an H100 (benchmarks/results/tuning-timeline-h100-20261128.txt).
WIDE = 16384
OTHERS_S = 0.8  # the same where a kernel's calls for these rows would take longer than this


def sizes_to_verify(
    spans: Sequence[tuple[int, int]],
    candidate: Candidate,
    rng: random.Random,
    path: Callable[[int], Hashable] | None = None,
    columns: int = 1,
    row_s: float = 0.0,
) -> list[int]:
    """Return the M at which to verify a kernel that serves ``spans`` (first and last M of each), in a random order.

    path: as ``Backend.code_paths`` returns it for the kernel. columns: of its result. row_s: the seconds of its calls
    for a row, where there are many.

    A kernel's control flow depends on M by the number of tiles and by the rows of the last one. So they are: the ends
    of each span and an odd M in it, some random M, multiples of the tile's rows and their neighbors, and a run of
    consecutive M, in which a kernel that is wrong at every seventh M, say, is seen; it is shorter where its calls would
    take longer than ``RUN_S``. A kernel that has copies of its
    code is verified in each that it runs, at one of the smallest such M. Long lists of spans are thinned to
    ``MAX_SIZES``: the run, the copies and the ends of the whole range stay, and the ends of spans and their odd M are
    preferred. The other M, without those for copies, have ``MAX_ROWS`` times the largest M together, fewer where the
    result has more columns than ``WIDE`` or their calls take longer than ``OTHERS_S``, but at least as many as the
    largest M.
    """
    lowest, highest = min(first for first, _ in spans), max(last for _, last in spans)
    run = _run(spans, rng, _run_length(min(tile_rows(candidate), RUN), row_s * _longest(spans)[0]))
    certain = {lowest, highest, *run, *_one_of_each(spans, path, rng)}
    ends = {m for first, last in spans for m in (first, last, min(first | 1, last))} - certain
    edges = {m for first, last in spans for m in _edges(first, last, tile_rows(candidate))} - certain - ends
    others: set[int] = set()
    for first, last in spans:
        others |= {rng.randint(first, last) for _ in range(RANDOM)} | {min(rng.randint(first, last) | 1, last)}
    others -= certain | ends | edges
    few, rows = list[int](), 0
    limit = max(highest, min(MAX_ROWS * min(1.0, WIDE / columns) * highest, OTHERS_S / row_s if row_s else math.inf))
    for m in (*rng.sample(sorted(edges), len(edges)), *rng.sample(sorted(others), len(others))):
        rows += m
        few += [m] if rows <= limit else []
    sizes = [*certain, *rng.sample(sorted(ends), len(ends)), *few][:MAX_SIZES]
    rng.shuffle(sizes)
    return sizes


def plain_sizes_to_verify(spans: Sequence[tuple[int, int]], rng: random.Random) -> list[int]:
    """Return the M at which to verify ATen's plain op, which is what PyTorch runs without gemmtune, in a random order.

    spans: first and last M of each interval that it serves. The M are the least and the largest of them, an odd one,
    where there is one in a random span, and two random ones.
    """
    lowest, highest = min(first for first, _ in spans), max(last for _, last in spans)
    (first, last), *random_spans = (rng.choice(spans) for _ in range(3))
    sizes = [*{lowest, highest, min(first | 1, last), *(rng.randint(*span) for span in random_spans)}]
    rng.shuffle(sizes)
    return sizes


def batches_to_verify(spans: Sequence[tuple[int, int]], rng: random.Random) -> list[int]:
    """Return the batches at which to verify a kernel that serves ``spans`` (first and last batch of each), in a random
    order.

    A kernel computes one matrix of a batch as it computes the others. Which matrices it reads and writes depends on its
    grid and on strides. So they are the ends of the spans, ``RANDOM`` batches of each, an odd one among them, and a run
    of ``BATCH_RUN`` consecutive ones. Long lists of spans are thinned to ``MAX_BATCHES``: the run and the ends of the
    whole range stay.
    """
    certain = {min(first for first, _ in spans), max(last for _, last in spans), *_run(spans, rng, BATCH_RUN)}
    ends = {batch for span in spans for batch in span}
    others = {rng.randint(first, last) for first, last in spans for _ in range(RANDOM - 1)}
    others |= {min(rng.randint(first, last) | 1, last) for first, last in spans}
    more = [*rng.sample(sorted(ends - certain), len(ends - certain))]
    more += rng.sample(sorted(others - certain - ends), len(others - certain - ends))
    batches = [*certain, *more][:MAX_BATCHES]
    rng.shuffle(batches)
    return batches


def _run_length(rows: int, call_s: float) -> int:
    """Return the number of consecutive M of a kernel whose tiles have ``rows`` rows, at most ``RUN``, and whose calls
    take ``call_s`` seconds there, 0.0 if that is not known."""
    affordable = int(min(RUN, RUN_S / call_s)) if call_s else RUN
    return max(SHORT_RUN, rows, affordable)


def _longest(spans: Sequence[tuple[int, int]], length: int = RUN) -> tuple[int, int]:
    """Return the first of the spans that have ``length`` sizes, or of the longest."""
    return max(spans, key=lambda span: min(span[1] - span[0], length))


def _run(spans: Sequence[tuple[int, int]], rng: random.Random, length: int) -> range:
    """Return consecutive M, ``length`` of them, of a long span, in its first rows, where they cost the least."""
    first, last = _longest(spans, length)
    start = rng.randint(first, max(first, min(first + length, last - length + 1)))
    return range(start, min(start + length, last + 1))


def _one_of_each(
    spans: Sequence[tuple[int, int]], path: Callable[[int], Hashable] | None, rng: random.Random
) -> list[int]:
    """Return an M for each path through a kernel's code, chosen among the smallest."""
    if path is None:
        return []
    by_path: dict[Hashable, list[int]] = {}
    for first, last in spans:
        for m in range(first, last + 1, -(-(last - first + 1) // PATHS)):
            by_path.setdefault(path(m), []).append(m)
    return [rng.choice(sizes[:RUN]) for sizes in by_path.values()]


def _edges(first: int, last: int, rows: int) -> list[int]:
    """Return multiples of a tile's rows between ``first`` and ``last``, the first few of them, with their neighbors."""
    multiples = [rows * (-(-first // rows) + index) for index in range(EDGES)] if rows > 1 else []
    return [m for edge in multiples for m in (edge - 1, edge, edge + 1) if first <= m <= last]
