"""Intervals from simulated times: what serves between measured M."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmtune.core.tuned_plan import PlanInterval
from gemmtune.tuning import intervals, plain_scan
from gemmtune.tuning.curves import Curves
from gemmtune.tuning.plain_times import LibraryAlgorithms, sizes_to_ask
from helpers.curves import (
    LAST,
    PLAIN,
    Model,
    assert_cover,
    sample_curves,
    serve,
    serving_at,
    simulated_curves,
    staircase,
    wave_curves,
)

# --- by estimates


def test_kernel_serves_as_long_as_its_tiles_fill_one_wave() -> None:
    """Up to M = 192 a wave has all tiles of 48 rows, up to 224 those of 56 rows."""
    curves = wave_curves({"small": 48, "between": 56}, (190, 260))
    assert intervals.estimate(curves, "small", 200, 190, 260) == 104.0
    assert intervals.estimate(curves, "between", 200, 190, 260) == 60.0
    found = intervals.intervals(curves, {190: "between", 260: "small"})
    assert serving_at(found, 193) == serving_at(found, 224) == "between"
    assert serving_at(found, 225) == "small"


@given(st.data())
def test_intervals_by_estimates_ascend_and_serve_nothing_expected_to_be_slower(data: st.DataObject) -> None:
    rows = {f"k{index}": data.draw(st.sampled_from((16, 24, 40, 64, 72, 128))) for index in range(4)}
    sizes = sorted({1, 512, *data.draw(st.lists(st.integers(1, 512), min_size=3, max_size=30))})
    plain = data.draw(st.sampled_from((None, staircase(20.0, 0.5), staircase(60.0, 0.1))))
    curves = wave_curves(rows, sizes, plain=plain)
    points = serve(curves)
    found = intervals.intervals(curves, points)
    assert_cover(found, 1, 512)
    for a, b in itertools.pairwise(sorted(points)):
        assert serving_at(found, a) == points[a]
        for m in range(a + 1, b if not curves.plain and b <= 1.6 * (a + 1) else a + 1):
            serving_s = curves.expected(serving_at(found, m), m)
            options = [s for name in set(points.values()) if (s := curves.expected(name, m)) is not None]
            assert serving_s is not None
            assert serving_s <= 1.031 * min(options)


def test_kernel_serves_beside_the_plain_op_by_a_margin_of_its_least_time() -> None:
    """Between two measured M the plain op may take as little as at the faster one, 10."""
    curves = wave_curves({"k": 64}, (256, 300, 340, 512), plain=lambda m: 10.0 if m % 16 == 0 or m == 340 else 13.0)
    for seconds, serving in ((9.0, "k"), (9.69, "k"), (9.71, PLAIN), (12.0, PLAIN)):
        times = {**curves.times, "k": {256: seconds, 300: seconds, 340: seconds, 512: 60.0}}
        waves = replace(curves, times=times, steps={"k": 16}, estimated_s=lambda name, m: 1.0 if m < 330 else 3.0)
        found = intervals.intervals(waves, {256: PLAIN, 300: "k", 340: "k", 512: PLAIN})
        assert serving_at(found, 310) == serving


def scanned_curves(kernel_s: float, plain_s: float, scan: Mapping[int, float]) -> Curves:
    """Return curves of a kernel with estimates, and of a plain op that was scanned from M = 321 to 511."""
    sizes = (320, 512, 600)
    times = {"k": dict.fromkeys(sizes, kernel_s), PLAIN: {**dict.fromkeys(sizes, plain_s), 600: 20.0}}
    return Curves(
        320, 600, times, PLAIN, {"k": 64}, waves=True, scan=scan,
        estimated_s=lambda name, m: 1.0 if name == "k" else None,
    )  # fmt: skip


def test_kernel_serves_between_m_that_the_plain_op_serves_where_the_scan_is_slower() -> None:
    scan = {m: 9.0 if m % 128 == 0 else 12.0 if m < 384 else 9.5 for m in range(321, 512)}
    found = intervals.intervals(scanned_curves(10.0, 9.0, scan), {320: PLAIN, 512: PLAIN, 600: "k"})
    assert [(part.first, part.last, part.kernel) for part in found[:3]] == [
        (320, 320, PLAIN), (321, 383, "k"), (384, 599, PLAIN),
    ]  # fmt: skip


def test_plain_op_serves_between_m_that_a_kernel_serves_where_the_scan_is_faster() -> None:
    scan = {m: 9.0 if 400 <= m <= 410 else 12.0 for m in range(321, 512)}
    found = intervals.intervals(scanned_curves(10.0, 12.0, scan), {320: "k", 512: "k", 600: "k"})
    assert [part.kernel for part in found] == ["k", PLAIN, "k"]
    assert {serving_at(found, m) for m in range(399, 412)} == {PLAIN}
    assert found[1].last - found[1].first < 2 * intervals.GRID + 11


def test_kernel_without_estimates_serves_from_where_the_scan_is_slower_than_it() -> None:
    scan = {m: 9.0 if m <= 400 else 12.0 for m in range(257, 512)}
    times = {"k": dict.fromkeys((256, 512), 10.0), PLAIN: dict.fromkeys((256, 512), 12.0)}
    curves = Curves(256, 512, times, PLAIN, waves=True, scan=scan)
    found = intervals.intervals(curves, {256: "k", 512: "k"})
    assert [(part.first, part.last, part.kernel) for part in found] == [
        (256, 256, "k"), (257, 400, PLAIN), (401, 512, "k"),
    ]  # fmt: skip


def test_kernel_without_estimates_is_compared_with_a_scan_of_a_part() -> None:
    """The scan begins at M = 300: below it the times of the plain op at the ends count."""
    scan = {m: 9.0 if m <= 400 else 12.0 for m in range(300, 512)}
    times = {"k": dict.fromkeys((256, 512), 10.0), PLAIN: dict.fromkeys((256, 512), 12.0)}
    curves = Curves(256, 512, times, PLAIN, {"k": 64}, waves=True, scan=scan)
    assert intervals._first_not_slower(curves, "k", 256, 512, 320, 512) == 401
    assert intervals._first_not_slower(curves, "k", 256, 512, 401, 512) == 401
    assert intervals._first_not_slower(curves, "k", 256, 512, 320, 390) == 390
    assert intervals._first_not_slower(curves, "k", 256, 512, 257, 512) == 257


@pytest.mark.parametrize("slower", [1.0, 1.1])
def test_kernel_is_compared_with_the_scan_at_the_pace_of_the_scan(slower: float) -> None:
    """The kernel takes 0.95 of the plain op's time at each M at which both were timed; then the machine was slower."""
    scan = dict.fromkeys(range(321, 512), 10.0)
    curves = scanned_curves(9.5 * slower, 10.0 * slower, scan)
    found = intervals.intervals(replace(curves, scan={320: 10.0, **scan, 512: 10.0}), {320: "k", 512: "k", 600: "k"})
    assert {serving_at(found, m) for m in range(320, 513)} == {"k"}


def algorithm_curves(kernel_s: float, eights_s: float, others_s: float) -> Curves:
    """Return curves of a kernel without estimates, and of a plain op that was scanned from M = 256 to 512, and whose
    library chooses an algorithm of its own at multiples of 8."""
    algorithms = LibraryAlgorithms({m: "eights" if m % 8 == 0 else "others" for m in sizes_to_ask(256, 512)})
    scan = {m: eights_s if m % 8 == 0 else others_s for m in plain_scan.sizes_to_scan([(256, 512)], algorithms)}
    sizes = (256, 512, 600)
    times = {"k": dict.fromkeys(sizes, kernel_s), PLAIN: {**dict.fromkeys(sizes, eights_s), 600: 20.0}}
    return Curves(256, 600, times, PLAIN, waves=True, scan=scan, algorithms=algorithms)


@pytest.mark.parametrize(("eights_s", "others_s", "at_eights", "at_others"), [
    (12.0, 13.0, "k", "k"),
    (9.0, 13.0, PLAIN, "k"),
    (13.0, 9.0, "k", PLAIN),
    (9.0, 9.5, PLAIN, PLAIN),
    (9.9, 10.2, PLAIN, PLAIN),  # not for 2%: a kernel would have intervals of a few M
])  # fmt: skip
def test_kernel_serves_where_the_library_chooses_a_slower_algorithm(
    eights_s: float, others_s: float, at_eights: str, at_others: str
) -> None:
    curves = algorithm_curves(10.0, eights_s, others_s)
    found = intervals.intervals(curves, {256: at_eights, 512: at_eights, 600: "k"})
    assert_cover(found, 256, 600)
    assert {serving_at(found, m) for m in range(257, 512) if m % 8 == 0} == {at_eights}
    assert {serving_at(found, m) for m in range(257, 512) if m % 8} == {at_others}


def test_kernel_that_is_slower_than_the_plain_op_at_a_measured_m_is_not_safe_above_it() -> None:
    curves = wave_curves({"fast": 64, "slow": 64}, (260, 300, 340), plain=lambda m: 136.0 + m / 10)
    assert intervals._is_safe(curves, "fast", 260, 300, 261, 276)
    times = {**curves.times, "slow": dict.fromkeys((260, 300, 340), 200.0)}
    assert not intervals._is_safe(replace(curves, times=times), "slow", 260, 300, 261, 276)


def test_rows_that_are_fitted_to_m_are_not_as_fast_up_to_the_end_of_a_tile() -> None:
    """The estimate grows within a tile of 256 rows: the time at M = 300 is not that up to M = 512."""
    times = {"k": {300: 30.0, 450: 44.0}, PLAIN: {300: 40.0, 450: 42.0}}
    curves = Curves(300, 450, times, PLAIN, {"k": 256}, waves=True, estimated_s=lambda name, m: m / 10)
    assert not intervals._is_safe(curves, "k", 300, 450, 420, 435)
    same = replace(curves, estimated_s=lambda name, m: 30.0)
    assert intervals._is_safe(same, "k", 300, 450, 420, 435)


# --- by times


@given(simulated_curves())
def test_intervals_ascend_without_gaps(curves: Curves) -> None:
    points = serve(curves)
    assert list(points) == curves.sizes
    found = intervals.intervals(curves, points)
    assert_cover(found, 1, LAST)
    assert {m: serving_at(found, m) for m in points} == points


@given(simulated_curves())
def test_plain_serves_between_measured_m_where_one_neighbor_is_plain(curves: Curves) -> None:
    points = serve(curves)
    found = intervals.intervals(curves, points)
    for a, b in itertools.pairwise(points):
        if points[a] != points[b] and PLAIN in (points[a], points[b]):
            assert {serving_at(found, m) for m in range(a + 1, b)} <= {PLAIN}


@pytest.mark.parametrize(("left", "right", "boundary"), [
    (staircase(1.0, 0.02), staircase(2.0, 0.0), 51),
    (staircase(1.0, 0.02), staircase(1.65, 0.0), 33),
    (staircase(1.0, 0.02), staircase(2.27, 0.0), 64),
])  # fmt: skip
def test_boundary_is_where_estimated_times_cross(left: Model, right: Model, boundary: int) -> None:
    curves = sample_curves({"left": left, "right": right}, (32, 64))
    found = intervals.intervals(curves, {32: "left", 64: "right"})
    assert found == (PlanInterval(32, boundary - 1, "left"), PlanInterval(boundary, 64, "right"))


def test_boundary_is_at_a_step_of_the_tile() -> None:
    """The left kernel takes as long up to 128 as at 65, and twice as long from 129."""
    curves = sample_curves(
        {"left": staircase(0.0, 1.0, 64), "right": staircase(2.5, 0.0)}, (65, 192), steps={"left": 64}
    )
    assert intervals.intervals(curves, {65: "left", 192: "right"})[1].first == 129


def test_estimate_has_the_steps_of_the_tile() -> None:
    curves = sample_curves({"k": staircase(1.0, 1.0, 64)}, (60, 200), steps={"k": 64})
    times = [intervals.estimate(curves, "k", m, 60, 200) for m in (61, 64, 65, 128, 129, 192, 193)]
    assert times == pytest.approx([2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0])


def test_estimate_of_a_kernel_timed_at_the_larger_neighbor_is_its_time_there() -> None:
    curves = Curves(1, 64, {"k": {32: 3.0}, "other": {32: 1.0, 64: 1.0}})
    assert intervals.estimate(curves, "k", 20, 1, 32) == 3.0
    assert intervals.estimate(curves, "k", 50, 64, 512) == math.inf


def test_kernel_not_timed_at_the_larger_neighbor_serves_up_to_its_tile() -> None:
    """More rows of tiles may be a second wave on all multiprocessors, which takes twice as long."""
    curves = Curves(1, 64, {"k": {40: 3.0}, "other": {60: 3.1}}, steps={"k": 48, "other": 64})
    assert [intervals.estimate(curves, "k", m, 40, 60) for m in (41, 48)] == [3.0, 3.0]
    assert intervals.estimate(curves, "k", 49, 40, 60) > 10.0
    assert intervals.intervals(curves, {40: "k", 60: "other"})[1].first == 49


def served(
    times: Mapping[str, Mapping[int, float]], points: Mapping[int, str], rows: int = 128, waves: bool = True
) -> list[tuple[int, str]]:
    """Return the first M and the kernel of each interval, for the plain op and kernels whose tiles have so many
    rows."""
    curves = Curves(1000, 1400, times, PLAIN, {name: rows for name in times if name != PLAIN}, waves=waves)
    found = intervals.intervals(curves, points)
    assert [interval.last + 1 for interval in found[:-1]] == [interval.first for interval in found[1:]]
    assert found[-1].last == 1400
    return [(interval.first, interval.kernel) for interval in found]


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ({1000: 9.0, 1400: 11.5}, [(1000, "k"), (1025, PLAIN), (1300, "k")]),  # 10 + (1300 - 1000) / 400 * 2 = 11.5
        ({1000: 9.0, 1400: 10.1}, [(1000, "k")]),  # 10.1 from 1020 on, before the next row of tiles
        ({1000: 9.0, 1400: 9.9}, [(1000, "k")]),
        ({1000: 9.0, 1400: 12.0}, [(1000, "k"), (1025, PLAIN), (1400, "k")]),
    ],
)
def test_plain_op_serves_where_another_row_of_tiles_may_be_slower(
    kernel: Mapping[int, float], expected: Sequence[tuple[int, str]]
) -> None:
    times = {PLAIN: {1000: 10.0, 1400: 12.0}, "k": kernel}
    assert served(times, {1000: "k", 1400: "k"}) == expected


def test_plain_op_that_is_faster_with_more_rows_is_taken_for_as_fast_between_them() -> None:
    times = {PLAIN: {1000: 12.0, 1400: 10.0}, "k": {1000: 9.0, 1400: 9.8}}
    assert served(times, {1000: "k", 1400: "k"}) == [(1000, "k")]
    times = {PLAIN: {1000: 10.0, 1400: 12.0}, "k": {1000: 9.0, 1400: 11.5}}
    # Its tiles are not known: it may take as long as at 1400 from the next M on.
    assert served(times, {1000: "k", 1400: "k"}, rows=1) == [(1000, "k"), (1001, PLAIN), (1300, "k")]
    assert served(times, {1000: "k", 1400: "k"}, waves=False) == [(1000, "k")]


def test_plain_op_serves_between_two_kernels_that_may_be_slower() -> None:
    times = {PLAIN: {1000: 10.0, 1400: 12.0}, "j": {1000: 9.0, 1400: 11.9}, "k": {1000: 9.9, 1400: 11.0}}
    found = served(times, {1000: "j", 1400: "k"})
    assert [name for _, name in found] == ["j", PLAIN, "k"]
    assert found[-1][0] == 1200  # 10 + (1200 - 1000) / 400 * 2 = 11


def test_measured_m_of_an_interval_include_its_ends() -> None:
    curves = sample_curves({"k": staircase(1.0, 0.1)})
    assert intervals.measured_inside(curves, "k", PlanInterval(8, 65, "k")) == [8, 17, 32, 65]
    assert intervals.measured_inside(curves, "k", PlanInterval(9, 16, "k")) == []
