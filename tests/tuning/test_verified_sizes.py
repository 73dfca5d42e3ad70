"""The M at which a kernel is verified: they are M that it serves, and include those where kernels fail."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmtune.core.candidate import Candidate
from gemmtune.tuning.verified_sizes import (
    BATCH_RUN,
    EDGES,
    MAX_BATCHES,
    MAX_ROWS,
    MAX_SIZES,
    OTHERS_S,
    PATHS,
    RANDOM,
    RUN,
    SHORT_RUN,
    WIDE,
    batches_to_verify,
    plain_sizes_to_verify,
    sizes_to_verify,
)

Spans = list[tuple[int, int]]


def candidate(rows: int) -> Candidate:
    return Candidate.make("x", "k", bm=rows)


@st.composite
def ascending_spans(draw: st.DrawFn, max_spans: int = 8) -> Spans:
    """Draw spans of M, ascending and apart."""
    spans, first = [], 1
    for _ in range(draw(st.integers(1, max_spans))):
        first += draw(st.integers(0, 600))
        last = first + draw(st.one_of(st.integers(0, 20), st.integers(0, 2000)))
        spans.append((first, last))
        first = last + 2
    return spans


@given(ascending_spans(), st.sampled_from((1, 16, 64, 128)), st.integers(0, 1000))
def test_sizes_are_different_m_of_the_spans(spans: Spans, rows: int, seed: int) -> None:
    sizes = sizes_to_verify(spans, candidate(rows), random.Random(seed))
    assert all(any(first <= m <= last for first, last in spans) for m in sizes)
    assert len(sizes) == len(set(sizes)) <= MAX_SIZES
    assert {spans[0][0], spans[-1][1]} <= set(sizes)


@given(ascending_spans(), st.sampled_from((1, 16, 64, 128)), st.integers(0, 1000))
def test_all_residues_up_to_16_are_verified(spans: Spans, rows: int, seed: int) -> None:
    """A kernel that is wrong at every seventh M, say, is called at one of them, where a span is long enough."""
    sizes = sizes_to_verify(spans, candidate(rows), random.Random(seed))
    longest = max(last - first + 1 for first, last in spans)
    for divisor in range(2, min(16, longest) + 1):
        assert {m % divisor for m in sizes} == set(range(divisor))


@given(ascending_spans(), st.sampled_from((1, 16, 128)), st.integers(0, 1000))
def test_ends_of_spans_are_verified_and_the_rows_of_others_limited(spans: Spans, rows: int, seed: int) -> None:
    sizes = sizes_to_verify(spans, candidate(rows), random.Random(seed))
    ends = {m for first, last in spans for m in (first, last, min(first | 1, last))}
    assert {m for span in spans for m in span} <= set(sizes)
    longest_run = RUN * (max(first for first, _ in spans) + 2 * RUN)
    assert sum(m for m in sizes if m not in ends) <= MAX_ROWS * spans[-1][1] + longest_run


@pytest.mark.parametrize(
    ("columns", "row_s", "share"),
    [
        (WIDE, 0.0, 1.0),
        (2 * WIDE, 0.0, 0.5),
        (128 * WIDE, 0.0, 1 / MAX_ROWS),
        (1, 1e-6, 1.0),
        (1, OTHERS_S / (MAX_ROWS * 4096), 0.5),
        (1, 1.0, 1 / MAX_ROWS),
    ],
)
def test_wide_results_and_slow_kernels_are_verified_at_fewer_rows(columns: int, row_s: float, share: float) -> None:
    spans = [(1, 100), (101, 4096), (4097, 8192)]
    for seed in range(20):
        sizes = sizes_to_verify(spans, candidate(128), random.Random(seed), None, columns, row_s)
        certain = {m for first, last in spans for m in (first, last, min(first | 1, last))}
        others = sum(m for m in sizes if m not in certain and m > 2 * RUN)
        assert 0 < others <= share * MAX_ROWS * 8192 + RUN * (101 + 2 * RUN)


@given(ascending_spans(), st.integers(0, 1000))
def test_kernels_are_verified_in_each_copy_of_their_code(spans: Spans, seed: int) -> None:
    def path(m: int) -> int:
        return 16 * -(-(m % 200) // 16)

    sizes = sizes_to_verify(spans, candidate(200), random.Random(seed), path)
    expected = {path(m) for first, last in spans for m in range(first, last + 1, -(-(last - first + 1) // PATHS))}
    assert expected <= {path(m) for m in sizes}
    assert len(sizes) <= MAX_SIZES


@given(ascending_spans(), st.integers(0, 1000))
def test_one_span_has_a_run_of_consecutive_m(spans: Spans, seed: int) -> None:
    sizes = set(sizes_to_verify(spans, candidate(1), random.Random(seed)))
    runs = [(first, last) for first, last in spans if last - first + 1 >= RUN]
    if runs:
        assert any(all(m + step in sizes for step in range(RUN)) for first, last in runs for m in range(first, last))
    else:
        first, last = max(spans, key=lambda span: span[1] - span[0])
        assert set(range(first, last + 1)) <= sizes


@given(ascending_spans(max_spans=4), st.integers(0, 1000))
def test_few_spans_have_their_ends_and_an_odd_m(spans: Spans, seed: int) -> None:
    sizes = set(sizes_to_verify(spans, candidate(1), random.Random(seed)))
    for first, last in spans:
        assert {first, last} <= sizes
        assert last == first or any(m % 2 for m in sizes if first <= m <= last)


@pytest.mark.parametrize("rows", [16, 64])
def test_edges_of_tiles_are_verified(rows: int) -> None:
    for seed in range(20):
        sizes = set(sizes_to_verify([(1, 1000)], candidate(rows), random.Random(seed)))
        assert {rows - 1, rows, rows + 1, 2 * rows - 1, 2 * rows, 2 * rows + 1} <= sizes


@given(ascending_spans(), st.integers(0, 1000))
def test_plain_op_is_verified_at_the_ends_and_at_few_other_m_of_the_spans(spans: Spans, seed: int) -> None:
    sizes = plain_sizes_to_verify(spans, random.Random(seed))
    assert all(any(first <= m <= last for first, last in spans) for m in sizes)
    assert len(sizes) == len(set(sizes)) <= 5
    assert {spans[0][0], spans[-1][1]} <= set(sizes)


@pytest.mark.parametrize("seed", range(20))
def test_plain_op_is_verified_at_an_odd_m(seed: int) -> None:
    assert any(m % 2 for m in plain_sizes_to_verify([(2, 40), (64, 512)], random.Random(seed)))


def test_sizes_are_in_a_random_order_of_the_seed() -> None:
    first, second, other = (sizes_to_verify([(1, 1000)], candidate(16), random.Random(seed)) for seed in (0, 0, 1))
    assert first == second
    assert first != sorted(first)
    assert first != other


def test_kernel_wrong_from_one_m_on_fails_at_the_largest() -> None:
    assert all(max(sizes_to_verify([(1, 512)], candidate(16), random.Random(seed))) == 512 for seed in range(50))


@given(ascending_spans(30), st.integers(0, 1000))
def test_batches_are_different_ones_of_the_spans(spans: Spans, seed: int) -> None:
    batches = batches_to_verify(spans, random.Random(seed))
    assert all(any(first <= batch <= last for first, last in spans) for batch in batches)
    assert len(batches) == len(set(batches)) <= MAX_BATCHES
    assert {spans[0][0], spans[-1][1]} <= set(batches)


@given(st.integers(1, 500), st.integers(BATCH_RUN, 500), st.integers(0, 1000))
def test_batches_have_every_remainder_of_small_divisors(first: int, count: int, seed: int) -> None:
    batches = batches_to_verify([(first, first + count - 1)], random.Random(seed))
    assert {batch % 7 for batch in batches} == set(range(7))


@pytest.mark.parametrize(
    ("rows", "row_s", "length"),
    [(6, 0.0, RUN), (6, 0.001, RUN), (6, 0.005, 10), (6, 0.1, SHORT_RUN), (12, 0.1, 12), (128, 0.1, RUN)],
)
def test_runs_of_slow_calls_are_shorter_but_have_each_remainder_of_the_rows(
    rows: int, row_s: float, length: int
) -> None:
    first, others = 20, 3 * EDGES + RANDOM + 1 + 3  # edges, random M and an odd one, ends and an odd M
    for seed in range(20):
        sizes = set(sizes_to_verify([(first, 4096)], candidate(rows), random.Random(seed), None, 1, row_s))
        assert any(all(m + step in sizes for step in range(length)) for m in sizes)
        assert len(sizes) <= length + others
