"""Where ATen's plain op is scanned."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from gemmtune.tuning import plain_scan
from gemmtune.tuning.curves import Curves
from gemmtune.tuning.plain_scan import TILE
from helpers.curves import PLAIN


def beside_plain(shares: dict[int, float]) -> Curves:
    """Return curves of the plain op and of a kernel that takes these shares of its time by M."""
    times = {PLAIN: dict.fromkeys(shares, 1e-4), "k": {m: 1e-4 * share for m, share in shares.items()}}
    return Curves(min(shares), max(shares), times, PLAIN, waves=True)


def test_every_row_of_tiles_is_scanned_where_a_kernel_takes_about_as_long() -> None:
    sizes = plain_scan.sizes_to_scan(beside_plain({100: 0.9, 1000: 0.9}))
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
    assert bool(plain_scan.sizes_to_scan(beside_plain({128: left, 256: right}))) == is_scanned


def test_few_rows_and_sizes_without_a_kernel_are_not_scanned() -> None:
    assert min(plain_scan.sizes_to_scan(beside_plain({1: 1.0, 300: 1.0}))) == 65
    curves = beside_plain({128: 1.0, 256: 1.0, 512: 1.0})
    without = replace(curves, times={**curves.times, "k": {128: 1e-4, 256: 1e-4}})
    assert max(plain_scan.sizes_to_scan(without)) == 256
    assert plain_scan.sizes_to_scan(replace(curves, times={PLAIN: curves.times[PLAIN]})) == []
