"""Where ATen's plain op is scanned."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmtune.tuning import plain_scan
from gemmtune.tuning.curves import Curves
from gemmtune.tuning.plain_scan import TILE
from gemmtune.tuning.plain_times import NO_ALGORITHMS, LibraryAlgorithms, PlainTimes, sizes_to_ask
from helpers.curves import PLAIN


def beside_plain(shares: dict[int, float]) -> Curves:
    """Return curves of the plain op and of a kernel that takes these shares of its time by M."""
    times = {PLAIN: dict.fromkeys(shares, 1e-4), "k": {m: 1e-4 * share for m, share in shares.items()}}
    return Curves(min(shares), max(shares), times, PLAIN, waves=True)


def sizes_without_algorithms(curves: Curves) -> list[int]:
    return plain_scan.sizes_to_scan(plain_scan.ranges_to_scan(curves), NO_ALGORITHMS)


def test_every_row_of_tiles_is_scanned_where_a_kernel_takes_about_as_long() -> None:
    sizes = sizes_without_algorithms(beside_plain({100: 0.9, 1000: 0.9}))
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (127, 993)
    assert {m for full in range(TILE, 1000, TILE) for m in (full - 1, full, full + 1)} <= set(sizes)
    assert max(b - a for a, b in itertools.pairwise(sizes)) <= 33


@pytest.mark.parametrize(("left", "right", "is_scanned"), [
    (0.9, 0.5, True), (0.5, 0.9, True), (0.5, 0.7, False), (1.3, 1.4, False), (1.3, 1.2, True), (0.5, 2.0, True),
])  # fmt: skip
def test_sizes_between_measured_ones_are_scanned_if_the_plain_op_may_be_the_fastest(
    left: float, right: float, is_scanned: bool
) -> None:
    expected = [(128, 256)] if is_scanned else []
    assert plain_scan.ranges_to_scan(beside_plain({128: left, 256: right})) == expected


def test_ranges_that_adjoin_are_one() -> None:
    curves = beside_plain({64: 0.9, 100: 0.9, 200: 0.5, 300: 0.5, 400: 0.9, 512: 0.9})
    assert plain_scan.ranges_to_scan(curves) == [(64, 200), (300, 512)]


def test_few_rows_and_sizes_without_a_kernel_are_not_scanned() -> None:
    assert plain_scan.ranges_to_scan(beside_plain({1: 1.0, 16: 1.0, 300: 1.0})) == [(17, 300)]
    curves = beside_plain({128: 1.0, 256: 1.0, 512: 1.0})
    without = replace(curves, times={**curves.times, "k": {128: 1e-4, 256: 1e-4}})
    assert plain_scan.ranges_to_scan(without) == [(128, 256)]
    assert plain_scan.ranges_to_scan(replace(curves, times={PLAIN: curves.times[PLAIN]})) == []


@given(st.integers(17, 1500), st.integers(0, 400), st.integers(1, 40), st.sampled_from([8, 16, 64]))
def test_every_m_has_a_scanned_one_of_its_algorithm_on_both_sides(
    first: int, count: int, kinds: int, rows: int
) -> None:
    last = first + count
    algorithms = LibraryAlgorithms({m: f"{m // rows % kinds} {m % 16}" for m in range(first, last + 1)})
    sizes = plain_scan.sizes_to_scan([(first, last)], algorithms)
    assert all(first <= m <= last for m in sizes)
    assert PlainTimes(dict.fromkeys(sizes, 1.0), algorithms).at_least(first, last) == 1.0
    block = 64 if first <= 1024 else 128
    assert {first, min(last, block * -(-first // block))} <= set(sizes)


def test_one_algorithm_is_timed_at_the_ends_of_blocks() -> None:
    algorithms = LibraryAlgorithms(dict.fromkeys(sizes_to_ask(900, 4400), "a"))
    sizes = plain_scan.sizes_to_scan([(900, 1000), (1050, 1300), (4000, 4400)], algorithms)
    assert sizes == [900, 960, 961, 1000, 1050, 1152, 1153, 1280, 1281, 1300, 4000, 4096, 4097, 4352, 4353, 4400]
