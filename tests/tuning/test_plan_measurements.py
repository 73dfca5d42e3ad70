"""Which layouts a plan's measurements rank first."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gemmtune.core.candidate import Candidate
from gemmtune.tuning.plan_measurements import Measurements
from gemmtune.tuning.plan_pool import PoolKernel
from gemmtune.tuning.sizes import SizeRange

RANGE = SizeRange(1, 512, (1, 512))
PLAIN = PoolKernel.of(Candidate.make("aten", "mm"), 1, None, is_plain=True)


def packed(name: str) -> PoolKernel:
    return PoolKernel.of(Candidate.make("toy", name), 1, f"p:{name}")


def measured(*kernels: tuple[PoolKernel, Mapping[int, float]]) -> Measurements:
    """Return measurements of kernels in microseconds."""
    found = Measurements(RANGE, {}, 0.05, 0.0, {})
    for kernel, times in kernels:
        found.add(kernel)
        found.record({m: [kernel.id] for m in times}, {m: {kernel.id: 1e-6 * us} for m, us in times.items()})
    return found


MOSTLY_FASTER = {1: 1.1, 16: 1.0, 64: 1.0, 512: 1.0}
MOSTLY_SLOWER = {1: 1.0, 16: 3.0, 64: 3.0, 512: 3.0}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_layout_with_the_least_mean_time_comes_first_without_a_plain_op(order: tuple[int, ...]) -> None:
    """Both layouts are slower than the other one at some M."""
    kernels = [(packed("faster"), MOSTLY_FASTER), (packed("slower"), MOSTLY_SLOWER)]
    assert measured(*(kernels[i] for i in order)).layouts() == ["p:faster", "p:slower"]


def test_plain_op_serves_where_a_layout_is_slower() -> None:
    """The mean of "often", with the plain op's time where that is less, is smaller than that of "rarely"."""
    plain = dict.fromkeys((1, 16, 64, 512), 2.0)
    often = {1: 0.5, 16: 0.5, 64: 0.5, 512: 5.0}
    rarely = {1: 1.9, 16: 1.9, 64: 1.9, 512: 2.1}
    found = measured((PLAIN, plain), (packed("rarely"), rarely), (packed("often"), often))
    assert found.layouts() == ["p:often", "p:rarely", ""]


def test_layout_that_is_nowhere_slower_than_the_plain_op_comes_first() -> None:
    plain = dict.fromkeys((1, 16, 64, 512), 2.0)
    never = dict.fromkeys((1, 16, 64, 512), 1.8)
    often = {1: 0.5, 16: 0.5, 64: 0.5, 512: 5.0}
    found = measured((PLAIN, plain), (packed("often"), often), (packed("never"), never))
    assert found.layouts() == ["p:never", "p:often", ""]


def test_measurements_are_where_a_kernel_is_expected_to_be_faster_and_where_nothing_is_known() -> None:
    """By the estimates, tiles of 56 rows are the fastest from M = 193 to 224, between two measured M."""

    def seconds(kernel: PoolKernel, m: int) -> float:
        return 1e-6 * (4.0 + kernel.tile_rows) * -(-m // (4 * kernel.tile_rows))

    small, large = (PoolKernel.of(Candidate.make("toy", "k", bm=rows), 1, None) for rows in (48, 56))
    found = Measurements(RANGE, {}, 0.05, 0.0, {}, waves=True, estimated_s=seconds)
    sizes = (1, 2, 64, 65, 128, 129, 180, 181, 190, 260, 261, 511, 512)
    for kernel in (small, large):
        found.add(kernel)
        found.record({m: [kernel.id] for m in sizes}, {m: {kernel.id: seconds(kernel, m)} for m in sizes})
    wanted = found.next_measurements("")
    assert any(193 <= m <= 224 and large.id in names for m, names in wanted.items())
    assert any(261 < m < 511 for m in wanted)
    assert not set(wanted) & set(sizes)
