"""Times over M: what is expected of a kernel, the weights of M, and irregular kernels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmtune.tuning.curves import IRREGULAR, Curves, irregular, point_weights
from gemmtune.tuning.plain_times import LibraryAlgorithms, sizes_to_ask
from helpers.curves import PLAIN, sample_curves, simulated_curves, staircase, wave_curves, waves


@given(st.integers(1, 1024), st.integers(8, 128), st.floats(0.5, 2.0))
def test_times_that_are_multiples_of_estimates_are_expected_exactly(m: int, tile: int, scale: float) -> None:
    curves = wave_curves({"k": tile}, (1, 100, 150, 230, 350, 500, 750, 1024), scale=scale)
    expected = curves.expected("k", m)
    if m > 62 or m == 1:
        assert expected == pytest.approx(scale * waves(tile)(m))
    else:  # the next larger M at which it was timed is too far away
        assert expected is None


def test_nothing_is_expected_without_an_estimate_and_above_the_measured_m() -> None:
    curves = wave_curves({"k": 16}, (100, 128), plain=staircase(9.0, 0.0))
    assert curves.expected("k", 129) is None
    assert curves.expected(PLAIN, 110) is None
    assert curves.expected(PLAIN, 100) == 9.0


def test_kernel_with_as_many_waves_as_at_a_neighbor_takes_as_long_as_there() -> None:
    curves = replace(wave_curves({"k": 16}, (100, 140)), times={"k": {100: 20.0, 140: 50.0}})
    assert curves.expected("k", 128) == 20.0
    assert curves.expected("k", 129) == 50.0


# --- the plain op's scan


def test_times_of_the_plain_op_are_the_least_of_those_that_were_measured_and_scanned() -> None:
    curves = Curves(1, 512, {PLAIN: {100: 5.0, 120: 4.0}}, PLAIN, scan={100: 7.0, 120: 3.5})
    assert (curves.plain_times.at_least(100, 100), curves.plain_times.at_least(120, 120)) == (5.0, 3.5)
    assert curves.without([PLAIN]).plain_times.at_least(120, 120) is None  # it cannot serve
    assert replace(curves, scan={}).plain_times.at_least(120, 120) is None  # it was not scanned
    chosen = replace(curves, algorithms=LibraryAlgorithms(dict.fromkeys(sizes_to_ask(96, 120), "a")))
    assert chosen.plain_times.at_least(110, 110) == 3.5


def test_times_are_divided_by_the_pace_of_the_machine_beside_the_scan() -> None:
    """From M = 300 on the machine is slower by 10% than in the scan; single ratios are noisy."""
    sizes = range(100, 500, 20)
    scan = {m: 1.0 + m / 100 for m in range(100, 500, 10)}
    slower = {m: 1.1 if m >= 300 else 1.0 for m in sizes} | {200: 1.3, 380: 1.3, 420: 1.05, 140: 0.8}
    times = {
        PLAIN: {m: scan[m] * slower[m] for m in sizes},
        "k": {m: 0.9 * scan[m] * slower[m] for m in (200, 380, 420)},
    }
    curves = Curves(1, 512, times, PLAIN, scan=scan)
    at_pace = curves.at_scan_pace
    assert at_pace.times["k"] == pytest.approx(
        {200: 0.9 * scan[200] * 1.3, 380: 0.9 * scan[380] * 1.3 / 1.1, 420: 0.9 * scan[420]}
    )
    assert at_pace.times[PLAIN][400] == pytest.approx(scan[400])
    assert at_pace.times[PLAIN][140] == times[PLAIN][140]  # never made longer
    for m in (200, 380, 420):
        assert at_pace.times["k"][m] / at_pace.times[PLAIN][m] == pytest.approx(0.9)
    assert replace(curves, scan={}).at_scan_pace.times == times
    assert replace(curves, scan={m: scan[m] for m in (100, 110)}).at_scan_pace.times["k"] == times["k"]


def test_kernel_without_an_estimate_takes_at_most_as_long_as_at_the_next_larger_m() -> None:
    curves = wave_curves({"k": 16}, (100, 128))
    assert curves.expected_or_most("k", 110) == curves.expected("k", 110)
    without = replace(curves, estimated_s=lambda name, m: None)
    assert without.expected_or_most("k", 110) == curves.times["k"][128]
    assert without.expected_or_most("k", 129) == math.inf
    assert replace(without, times={"k": {100: 9.0, 128: 8.0}}).expected_or_most("k", 110) == 9.0  # it is irregular


def test_kernel_with_the_plain_ops_product_takes_a_share_of_its_time_that_changes_steadily() -> None:
    times = {PLAIN: {100: 5.0, 170: 5.0}, "like": {100: 4.0, 170: 4.5}, "other": {100: 4.0, 170: 4.5}}
    scan = {100: 5.0, 120: 6.0, 140: 4.0, 170: 5.0}
    curves = Curves(1, 512, times, PLAIN, scan=scan, with_plain_product={"like"})
    assert curves.expected("like", 120) == pytest.approx(6.0 * 0.8 ** (5 / 7) * 0.9 ** (2 / 7))
    assert curves.expected("like", 135) == pytest.approx(4.5 * 0.8**0.5 * 0.9**0.5)  # between two M of the scan
    assert curves.expected("other", 120) is None
    sparse = replace(curves, scan={100: 5.0, 120: 6.0})
    assert sparse.expected("like", 120) == curves.expected("like", 120)
    assert sparse.expected("like", 140) is None
    assert replace(curves, scan={}).expected("like", 120) is None
    assert curves.expected("like", 171) is None


def test_least_time_of_kernels_is_without_the_plain_op() -> None:
    curves = sample_curves(
        {PLAIN: staircase(1.0, 0.0), "a": staircase(3.0, 0.0), "b": staircase(2.0, 0.0)}, plain=PLAIN
    )
    assert curves.least_of_kernels(8) == 2.0
    assert curves.least_of_kernels(9) == math.inf


# --- weights


@given(simulated_curves())
def test_weights_of_all_m_add_up_to_one(curves: Curves) -> None:
    outside = sum(n for m, n in curves.counts.items() if not curves.first <= m <= curves.last)
    assert outside == 0
    assert curves.weight()(curves.first, curves.last) == pytest.approx(1.0)
    weights = point_weights(curves)
    assert list(weights) == curves.sizes
    assert sum(weights.values()) == pytest.approx(1.0)
    assert min(weights.values()) > 0.0


def test_recorded_calls_weigh_half() -> None:
    weights = point_weights(sample_curves({"k": staircase(1.0, 0.1)}, counts={128: 7}))
    assert weights[128] >= 0.5
    assert weights[512] > 0.05


# --- irregular kernels


@pytest.mark.parametrize("slow_s", [1.2, 3.0])
def test_kernel_slow_at_odd_m_is_irregular(slow_s: float) -> None:
    regular = staircase(2.0, 0.5, 64)
    models = {"odd": lambda m: regular(m) * (slow_s if m % 2 else 1.0), "k": regular, PLAIN: staircase(1.0, 0.2)}
    found = irregular(sample_curves(models, (1, 2, 3, 4, 16, 17, 32), plain=PLAIN))
    assert found == ({"odd": {17: 32}} if slow_s > IRREGULAR else {})


def test_only_the_range_in_which_a_kernel_may_serve_is_judged() -> None:
    models = {"large": lambda m: 9.0 if m < 8 else 5.0 if m == 8 else 2.0, "k": lambda m: 1.0 if m < 16 else 3.0}
    curves = sample_curves(models, (1, 2, 4, 8, 16, 32))
    assert irregular(curves) == {}
    assert irregular(curves, 1) == {"large": {8: 32}}
    assert irregular(curves, 2) == {"large": {8: 32, 4: 32}}


@pytest.mark.parametrize(("noise", "is_irregular"), [(0.02, True), (0.3, False)])
def test_kernels_are_not_irregular_within_the_noise(noise: float, is_irregular: bool) -> None:
    models = {"k": lambda m: 1.5 if m == 8 else 1.0}
    curves = replace(sample_curves(models, (4, 8, 16)), noise={8: noise, 16: noise})
    assert irregular(curves) == ({"k": {8: 16}} if is_irregular else {})


@pytest.mark.parametrize(("reference", "is_irregular"), [({8: 4.0, 16: 4.4}, True), ({8: 6.0, 16: 4.0}, False)])
def test_a_slow_machine_makes_no_kernel_irregular(reference: dict[int, float], is_irregular: bool) -> None:
    curves = sample_curves({"k": lambda m: 1.5 if m == 8 else 1.0}, (4, 8, 16))
    assert irregular(curves, 0, reference) == ({"k": {8: 16}} if is_irregular else {})


@given(simulated_curves())
def test_kernels_whose_time_grows_with_m_are_regular(curves: Curves) -> None:
    assert irregular(curves) == {}
