"""Intervals from simulated times: the regret of the chosen kernels, where they serve, and what is measured next."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmtune.core.tuned_plan import PlanInterval
from gemmtune.tuning import intervals
from gemmtune.tuning.intervals import Curves, Gap

BOUND = 0.05
LAST = 512
PLAIN = "plain"
SIZES = (1, 3, 8, 17, 32, 65, 128, 257, 512)

Model = Callable[[int], float]


def staircase(base: float, step: float, rows: int = 1) -> Model:
    """Return the time of a kernel that takes ``step`` for each row of tiles, which have ``rows`` rows."""
    return lambda m: base + step * -(-m // rows)


def sample_curves(
    models: Mapping[str, Model],
    sizes: Sequence[int] = SIZES,
    *,
    plain: str = "",
    steps: Mapping[str, int] = {},
    counts: Mapping[int, int] = {},
) -> Curves:
    times = {name: {m: model(m) for m in sizes} for name, model in models.items()}
    return Curves(sizes[0], sizes[-1], times, plain, steps, counts)


def serve(curves: Curves) -> dict[int, str]:
    return intervals.serving(curves, intervals.choose_kernels(curves, BOUND), BOUND)


def serving_at(found: Sequence[PlanInterval], m: int) -> str:
    (name,) = (interval.kernel for interval in found if interval.first <= m <= interval.last)
    return name


def assert_cover(found: Sequence[PlanInterval], first: int, last: int) -> None:
    """Assert that intervals ascend from ``first`` to ``last`` without gaps, and that each is another kernel's than the
    one before."""
    assert [interval.first for interval in found] == [first, *(interval.last + 1 for interval in found[:-1])]
    assert found[-1].last == last
    assert all(interval.first <= interval.last for interval in found)
    assert all(a.kernel != b.kernel for a, b in itertools.pairwise(found))


@st.composite
def simulated_curves(draw: st.DrawFn) -> Curves:
    """Draw curves of up to six kernels, some with steps, with or without ATen's plain op, at some M."""
    seconds = st.floats(0.5, 20.0)
    models = {
        f"k{index}": (staircase(draw(seconds), draw(st.floats(0.0, 0.5)) * rows, rows), rows)
        for index, rows in enumerate(draw(st.lists(st.sampled_from((1, 8, 16, 64, 128)), min_size=1, max_size=6)))
    }
    if draw(st.booleans()):
        models[PLAIN] = staircase(draw(seconds), draw(st.floats(0.0, 0.5))), 1
    sizes = sorted({1, LAST, *draw(st.lists(st.integers(1, LAST), max_size=40))})
    counts = draw(st.dictionaries(st.integers(1, LAST), st.integers(1, 1000), max_size=3))
    return sample_curves(
        {name: model for name, (model, _) in models.items()}, sizes, plain=PLAIN if PLAIN in models else "",
        steps={name: rows for name, (_, rows) in models.items() if name != PLAIN}, counts=counts,
    )  # fmt: skip


def waves(tile: int) -> Model:
    """Return the time of a kernel that computes four tiles of ``tile`` rows at a time."""
    return lambda m: (4.0 + tile) * -(-m // (4 * tile))


def wave_curves(
    rows: Mapping[str, int], sizes: Sequence[int], *, plain: Model | None = None, scale: float = 1.0
) -> Curves:
    """Return the curves of kernels that compute four tiles at a time. Their times are ``scale`` times the estimates."""
    estimates = {name: waves(tile) for name, tile in rows.items()}
    times = {name: lambda m, model=model: scale * model(m) for name, model in estimates.items()}
    models: dict[str, Model] = times | ({} if plain is None else {PLAIN: plain})
    curves = sample_curves(models, sizes, plain="" if plain is None else PLAIN, steps=rows)
    return replace(curves, waves=True, estimated_s=lambda name, m: estimates[name](m) if name in estimates else None)


# --- times between measured M, by estimates


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


def test_plain_op_at_multiples_of_16_bounds_what_serves_beside_it() -> None:
    """The plain op takes 10 at multiples of 16, and 13 at the M around them."""
    curves = wave_curves({"k": 64}, (256, 300, 340, 512), plain=lambda m: 10.0 if m % 16 == 0 else 13.0)
    assert curves.plain_at_least(300) == 10.0
    assert curves.plain_at_least(256) == 10.0
    assert replace(curves, waves=False).plain_at_least(300) == 13.0
    assert curves.plain_at_least(301) == 10.0
    for seconds in (12.0, 9.0):
        times = {**curves.times, "k": {256: seconds, 300: seconds, 340: 30.0, 512: 60.0}}
        waves = replace(curves, times=times, steps={"k": 16}, estimated_s=lambda name, m: 1.0 if m < 330 else 3.0)
        found = intervals.intervals(waves, {256: PLAIN, 300: "k", 340: "k", 512: PLAIN})
        assert serving_at(found, 310) == ("k" if seconds < 10.0 else PLAIN)
        assert serving_at(found, 331) == PLAIN


def test_kernel_that_is_slower_than_the_plain_op_at_a_measured_m_is_not_safe_above_it() -> None:
    curves = wave_curves({"fast": 64, "slow": 64}, (260, 300, 340), plain=lambda m: 136.0 + m / 10)
    assert intervals._is_safe(curves, "fast", 260, 300, 261)
    times = {**curves.times, "slow": dict.fromkeys((260, 300, 340), 200.0)}
    assert not intervals._is_safe(replace(curves, times=times), "slow", 260, 300, 261)


def test_rows_that_are_fitted_to_m_are_not_as_fast_up_to_the_end_of_a_tile() -> None:
    """The estimate grows within a tile of 256 rows: the time at M = 300 is not that up to M = 512."""
    times = {"k": {300: 30.0, 450: 44.0}, PLAIN: {300: 40.0, 450: 42.0}}
    curves = Curves(300, 450, times, PLAIN, {"k": 256}, waves=True, estimated_s=lambda name, m: m / 10)
    assert not intervals._is_safe(curves, "k", 300, 450, 420)
    same = replace(curves, estimated_s=lambda name, m: 30.0)
    assert intervals._is_safe(same, "k", 300, 450, 420)


def test_m_are_found_at_which_another_kernel_is_expected_to_be_faster() -> None:
    curves = wave_curves({"small": 48, "between": 56}, (150, 190, 260))
    found = (PlanInterval(150, 260, "small"),)
    (m, name), *others = intervals.expected_losses(curves, found, lambda m: ["small", "between"], 0.01)
    assert not others
    assert name == "between"
    assert 193 <= m <= 224
    assert not intervals.expected_losses(curves, found, lambda m: ["small"], 0.01)
    assert not intervals.expected_losses(curves, found, lambda m: ["small", "between"], 0.8)


# --- the choice of kernels


@given(simulated_curves())
def test_regret_is_within_the_bound_at_measured_m(curves: Curves) -> None:
    for m, name in serve(curves).items():
        assert curves.regret(name, m) <= BOUND


@given(simulated_curves())
def test_kernels_that_serve_are_no_slower_than_plain(curves: Curves) -> None:
    if curves.plain:
        for m, name in serve(curves).items():
            plain_s = curves.times[PLAIN][m]
            assert name == PLAIN or curves.times[name][m] <= (1.0 - intervals.MARGIN) * plain_s


@given(simulated_curves())
def test_each_chosen_kernel_is_needed(curves: Curves) -> None:
    chosen = intervals.choose_kernels(curves, BOUND)
    assert len(chosen) == len(set(chosen)) <= intervals.MAX_KERNELS + 1
    assert (PLAIN in chosen) == bool(curves.plain)
    others = [name for name in chosen if name != PLAIN]
    assert others or curves.plain
    if len(others) > 1:  # without one of them, the bound or the mean regret is exceeded
        choice = intervals._Choice(curves, BOUND)
        score = choice.score(chosen)
        for name in others:
            without = choice.score([c for c in chosen if c != name])
            assert without.excess > max(score.excess, 0.0) or without.cost > score.cost


@pytest.mark.parametrize(("share", "chosen"), [(0.97, True), (0.985, True), (0.995, False), (1.0, False), (1.2, False)])
def test_kernel_must_be_faster_than_plain_by_the_margin(share: float, chosen: bool) -> None:
    plain = staircase(2.0, 0.01)
    curves = sample_curves({PLAIN: plain, "k": lambda m: share * plain(m)}, plain=PLAIN)
    assert ("k" in intervals.choose_kernels(curves, BOUND)) == chosen
    assert set(serve(curves).values()) == {"k" if chosen else PLAIN}


def test_kernel_that_later_ones_make_needless_is_dropped() -> None:
    """The all-rounder is chosen first: it exceeds the bound by the least."""
    low, high = staircase(1.0, 1e-3), staircase(1.5, 0.0)
    best = {m: min(low(m), high(m)) for m in SIZES}
    models = {
        "all": lambda m: 1.06 * best[m],
        "low": lambda m: best[m] if m < 64 else 3.0 * best[m],
        "high": lambda m: best[m] if m >= 64 else 3.0 * best[m],
    }
    curves = sample_curves(models)
    choice = intervals._Choice(curves, BOUND)
    first = min(models, key=lambda name: choice.score([name]))
    assert first == "all"
    assert sorted(intervals.choose_kernels(curves, BOUND)) == ["high", "low"]


def test_a_chosen_kernel_is_exchanged_where_that_saves_a_further_one() -> None:
    """Greedily, "middle" is the first, and needs "low" and "high" beside it; "middle" and "high" make way for two."""
    models = {
        "middle": lambda m: 1.0 if 8 <= m <= 128 else 1.1,
        "low": lambda m: 1.0 if m < 30 else 1.3,
        "high": lambda m: 1.0 if m > 30 else 1.3,
    }
    curves = sample_curves(models, (1, 3, 8, 17, 32, 65, 128, 257, 512))
    choice = intervals._Choice(curves, BOUND)
    assert min(models, key=lambda name: choice.score([name])) == "middle"
    assert choice.exchange(["middle", "low"], choice.score(["middle", "low"]))[0] == ["low", "high"]
    assert sorted(intervals.choose_kernels(curves, BOUND)) == ["high", "low"]


def test_one_kernel_serves_what_it_can_within_the_bound() -> None:
    models = {f"k{index}": lambda m, i=index: 1.0 + 0.002 * ((m + i) % 5) for index in range(5)}
    curves = sample_curves(models)
    assert len(intervals.choose_kernels(curves, BOUND)) == 1


def test_number_of_kernels_is_limited() -> None:
    sizes = [1 << exponent for exponent in range(intervals.MAX_KERNELS + 2)]
    models = {f"k{m}": lambda m, own=m: 1.0 if m == own else 3.0 for m in sizes}
    curves = Curves(1, sizes[-1], {name: {m: model(m) for m in sizes} for name, model in models.items()})
    assert len(intervals.choose_kernels(curves, BOUND)) == intervals.MAX_KERNELS


def test_limited_kernels_serve_where_most_calls_are() -> None:
    sizes = [1 << exponent for exponent in range(intervals.MAX_KERNELS + 2)]
    times = {f"k{own}": {m: 1.0 if m == own else 1.3 for m in sizes} for own in sizes}
    counts = dict.fromkeys(sizes[2:], 100)
    chosen = intervals.choose_kernels(Curves(1, sizes[-1], times, counts=counts), BOUND)
    assert set(chosen) == {f"k{m}" for m in sizes[2:]}


def test_slow_kernel_does_not_serve_one_m_between_two_that_it_serves() -> None:
    """Few changes from M to M count less than the bound, even where the weight of one M is small."""
    sizes = (*SIZES[:-1], 399, 400, 401, 512)
    models = {"a": lambda m: 1.08 if m == 400 else 1.0, "b": lambda m: 1.0 if m == 400 else 1.2}
    curves = sample_curves(models, sizes)
    assert intervals.point_weights(curves)[400] < 0.1 * intervals.point_weights(curves)[1]
    assert {m for m, name in serve(curves).items() if name == "b"} == {400}


def test_small_gain_does_not_change_the_kernel() -> None:
    sizes = (*SIZES[:-1], 399, 400, 401, 512)
    models = {"a": lambda m: 1.02 if m == 400 else 1.0, "b": lambda m: 1.0 if m in (1, 400) else 1.2}
    curves = sample_curves({**models, "c": lambda m: 0.5 if m == 1 else 3.0}, sizes)
    assert intervals.serving(curves, ["a", "b", "c"], BOUND)[400] == "a"


def test_m_where_only_plain_was_timed_are_no_evidence_for_it() -> None:
    times = {PLAIN: dict.fromkeys((8, 16, 32, 64), 2.0), "k": {8: 1.0, 64: 1.0}, "out": {16: 0.5, 64: 0.5}}
    curves = Curves(8, 64, times, PLAIN).without({"out"})
    assert curves.sizes == [8, 64]
    assert intervals.intervals(curves, serve(curves)) == (PlanInterval(8, 64, "k"),)
    assert Curves(8, 64, times, PLAIN).without({"out", "k"}).sizes == [8, 16, 32, 64]
    assert Curves(8, 64, times, PLAIN).without({PLAIN}).plain == ""


def test_plain_serves_above_the_m_at_which_kernels_were_timed() -> None:
    times = {PLAIN: dict.fromkeys((1, 8, 64, 512), 2.0), "k": {8: 1.0, 64: 1.0}}
    curves = Curves(1, 512, times, PLAIN).without(())
    assert curves.sizes == [1, 8, 64, 512]
    assert intervals.intervals(curves, serve(curves)) == (PlanInterval(1, 64, "k"), PlanInterval(65, 512, PLAIN))


@pytest.mark.parametrize(("seconds", "served"), [(1.9, "k"), (2.1, PLAIN)])
def test_kernel_that_was_not_timed_at_an_m_takes_no_longer_there_than_at_a_larger_one(
    seconds: float, served: str
) -> None:
    """PyTorch's op served M = 483 in twice the time of a chosen kernel that had been timed at 456 and 512 only."""
    times = {PLAIN: {1: 1.0, 456: 2.0, 483: 2.0, 512: 4.0}, "k": {456: 1.0, 512: seconds}, "a": {483: 1.8}}
    curves = Curves(1, 512, times, PLAIN)
    assert curves.usable("k", 483) == (seconds if served == "k" else math.inf)
    assert intervals.serving(curves, [PLAIN, "k"], BOUND) == {1: PLAIN, 456: "k", 483: served, 512: "k"}
    assert curves.at_most("a", 512) == math.inf


# --- weights


@given(simulated_curves())
def test_weights_of_all_m_add_up_to_one(curves: Curves) -> None:
    outside = sum(n for m, n in curves.counts.items() if not curves.first <= m <= curves.last)
    assert outside == 0
    assert curves.weight()(curves.first, curves.last) == pytest.approx(1.0)
    weights = intervals.point_weights(curves)
    assert list(weights) == curves.sizes
    assert sum(weights.values()) == pytest.approx(1.0)
    assert min(weights.values()) > 0.0


def test_recorded_calls_weigh_half() -> None:
    weights = intervals.point_weights(sample_curves({"k": staircase(1.0, 0.1)}, counts={128: 7}))
    assert weights[128] >= 0.5
    assert weights[512] > 0.05


# --- irregular kernels


@pytest.mark.parametrize("slow_s", [1.2, 3.0])
def test_kernel_slow_at_odd_m_is_irregular(slow_s: float) -> None:
    regular = staircase(2.0, 0.5, 64)
    models = {"odd": lambda m: regular(m) * (slow_s if m % 2 else 1.0), "k": regular, PLAIN: staircase(1.0, 0.2)}
    found = intervals.irregular(sample_curves(models, (1, 2, 3, 4, 16, 17, 32), plain=PLAIN))
    assert found == ({"odd": {17: 32}} if slow_s > intervals.IRREGULAR else {})


def test_only_the_range_in_which_a_kernel_may_serve_is_judged() -> None:
    models = {"large": lambda m: 9.0 if m < 8 else 5.0 if m == 8 else 2.0, "k": lambda m: 1.0 if m < 16 else 3.0}
    curves = sample_curves(models, (1, 2, 4, 8, 16, 32))
    assert intervals.irregular(curves) == {}
    assert intervals.irregular(curves, 1) == {"large": {8: 32}}
    assert intervals.irregular(curves, 2) == {"large": {8: 32, 4: 32}}


@pytest.mark.parametrize(("noise", "is_irregular"), [(0.02, True), (0.3, False)])
def test_kernels_are_not_irregular_within_the_noise(noise: float, is_irregular: bool) -> None:
    models = {"k": lambda m: 1.5 if m == 8 else 1.0}
    curves = replace(sample_curves(models, (4, 8, 16)), noise={8: noise, 16: noise})
    assert intervals.irregular(curves) == ({"k": {8: 16}} if is_irregular else {})


@pytest.mark.parametrize(("reference", "is_irregular"), [({8: 4.0, 16: 4.4}, True), ({8: 6.0, 16: 4.0}, False)])
def test_a_slow_machine_makes_no_kernel_irregular(reference: dict[int, float], is_irregular: bool) -> None:
    curves = sample_curves({"k": lambda m: 1.5 if m == 8 else 1.0}, (4, 8, 16))
    assert intervals.irregular(curves, 0, reference) == ({"k": {8: 16}} if is_irregular else {})


@given(simulated_curves())
def test_kernels_whose_time_grows_with_m_are_regular(curves: Curves) -> None:
    assert intervals.irregular(curves) == {}


# --- intervals


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
    assert served(times, {1000: "k", 1400: "k"}, rows=1) == [(1000, "k")]  # its tiles are not known
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


# --- what is measured next


def test_crossing_is_more_urgent_than_a_flat_part() -> None:
    curves = sample_curves(
        {"a": staircase(1.0, 0.0), "b": lambda m: 0.5 if m <= 100 else 2.0}, (1, 64, 128, 256, 512),
        steps={"a": 64, "b": 512},
    )  # fmt: skip
    found = intervals.gaps(curves, serve(curves))
    assert (found[0].a, found[0].b) == (64, 128)
    assert found[0].loss > 0.3
    assert {(gap.a, gap.b): gap.loss for gap in found[1:]} == {(1, 64): 0.0, (128, 256): 0.0, (256, 512): 0.0}


@pytest.mark.parametrize(("counts", "first"), [({20: 9}, (17, 32)), ({300: 9}, (257, 512))])
def test_gap_with_recorded_calls_is_the_most_urgent(counts: Mapping[int, int], first: tuple[int, int]) -> None:
    models = {"a": lambda m: 1.5 if 20 < m < 400 else 1.0, "b": lambda m: 1.0 if 20 < m < 400 else 1.5}
    curves = sample_curves(models, steps=dict.fromkeys(models, 512), counts=counts)
    found = intervals.gaps(curves, serve(curves))
    assert (found[0].a, found[0].b) == first
    assert [gap.loss for gap in found[:3]] == pytest.approx([0.5, 0.5, 0.0])


def test_step_between_two_m_may_lose_time() -> None:
    """With steps of one row the time is on a line between two M; with steps of 64 rows it may be far off."""
    losses = {}
    for rows in (1, 64):
        curves = sample_curves({"k": staircase(1.0, rows / 64, rows)}, (64, 192), steps={"k": rows})
        (gap,) = intervals.gaps(curves, serve(curves))
        losses[rows] = gap.loss
    assert losses[1] < 0.05 < losses[64]


@given(simulated_curves())
def test_gaps_are_ranked_and_contain_other_m(curves: Curves) -> None:
    found = intervals.gaps(curves, serve(curves))
    assert all(gap.b - gap.a > 1 for gap in found)
    assert [gap.urgency for gap in found] == sorted((gap.urgency for gap in found), reverse=True)
    assert all(math.isfinite(gap.loss) and gap.loss >= 0.0 for gap in found)


@given(simulated_curves(), st.booleans())
def test_next_size_is_inside_the_gap(curves: Curves, odd: bool) -> None:
    for gap in intervals.gaps(curves, serve(curves)):
        assert gap.a < intervals.next_size(curves, gap, odd) < gap.b


@pytest.mark.parametrize(
    ("rows", "gap", "expected"),
    [
        (64, (64, 256), 129),
        (16, (64, 100), 81),
        (64, (1, 60), 9),
        (64, (65, 257), 128),  # the gap begins and ends with the first M after a step
        (64, (65, 256), 129),
        (64, (100, 300), 193),
        (64, (129, 300), 192),
    ],
)
def test_next_size_is_beside_a_step_of_the_tile_if_the_gap_has_one(
    rows: int, gap: tuple[int, int], expected: int
) -> None:
    curves = sample_curves({"k": staircase(1.0, 1.0, rows)}, gap, steps={"k": rows})
    assert intervals.next_size(curves, Gap(*gap, 1.0, 1.0)) == expected


def test_next_size_is_the_first_after_a_full_row_of_tiles_that_the_plain_op_serves() -> None:
    for a, is_plain, expected in ((128, True, 129), (128, False, 257), (130, True, 256), (192, True, 193)):
        curves = sample_curves({"k": staircase(1.0, 1.0, 64)}, (a, 400), steps={"k": 64})
        assert intervals.next_size(curves, Gap(a, 400, 1.0, 1.0, is_plain)) == expected


def test_gaps_tell_whether_the_plain_op_serves_them() -> None:
    times = {"k": {64: 1.0, 128: 2.0, 192: 2.0, 400: 4.0}, "p": {64: 3.0, 128: 2.0, 192: 3.0, 400: 5.0}}
    curves = Curves(1, 400, times, "p")
    found = {gap.a: gap.is_plain for gap in intervals.gaps(curves, serve(curves))}
    assert found == {64: False, 128: True, 192: False}


def test_next_size_is_odd_where_asked() -> None:
    curves = sample_curves({"k": staircase(1.0, 1.0)}, (64, 256))
    gap = Gap(64, 256, 1.0, 1.0)
    assert [intervals.next_size(curves, gap, odd) for odd in (True, False)] == [129, 128]
    assert intervals.next_size(curves, Gap(63, 65, 1.0, 1.0)) == 64
