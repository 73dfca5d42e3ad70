"""Which layouts a plan's measurements rank first."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gemmtune.core.candidate import Candidate
from gemmtune.tuning.plan_measurements import Measurements
from gemmtune.tuning.plan_pool import PoolKernel
from gemmtune.tuning.sizes import SizeRange
from helpers.curves import MOST

RANGE = SizeRange(1, 512, (1, 512))
PLAIN = PoolKernel.of(Candidate.make("aten", "mm"), 1, None, is_plain=True)


def packed(name: str) -> PoolKernel:
    return PoolKernel.of(Candidate.make("toy", name), 1, f"p:{name}")


def measured(*kernels: tuple[PoolKernel, Mapping[int, float]]) -> Measurements:
    """Return measurements of kernels in microseconds."""
    found = Measurements(RANGE, {}, 0.05, 0.0, {}, max_kernels=MOST)
    for kernel, times in kernels:
        found.add(kernel)
        found.record({m: [kernel.id] for m in times}, {m: {kernel.id: 1e-6 * us} for m, us in times.items()})
    return found


@pytest.mark.parametrize(("waves", "at_128", "wanted"), [(False, 8.0, {256}), (False, 9.6, set()), (True, 8.0, set())])
def test_fastest_kernel_at_its_last_m_is_timed_at_the_next_one(waves: bool, at_128: float, wanted: set[int]) -> None:
    """A kernel of a Decision for few rows may be faster for many than those of a Decision for many."""
    found = Measurements(RANGE, {}, 0.05, 0.0, {}, max_kernels=MOST, waves=waves)
    few, many = packed("few"), PoolKernel.of(Candidate.make("toy", "many"), 128, "p:few")
    times: list[tuple[PoolKernel, dict[int, float]]] = [
        (PLAIN, {1: 1.0, 128: 12.0, 256: 19.0, 512: 40.0}), (few, {1: 0.5, 128: at_128}),
        (many, {1: 0.8, 128: 10.0, 256: 18.0, 512: 36.0}),
    ]  # fmt: skip
    for kernel, by_m in times:
        found.add(kernel)
        found.record({m: [kernel.id] for m in by_m}, {m: {kernel.id: 1e-6 * us} for m, us in by_m.items()})
    curves = found.curves("p:few")
    holes = found._holes(curves, set(found.serving(curves).values()))
    assert holes.keys() == wanted
    assert all(names == [many.id, few.id] for names in holes.values())


def test_kernel_that_was_not_timed_where_its_layout_is_slow_is_timed_there_though_others_were_twice() -> None:
    few, many = packed("few"), PoolKernel.of(Candidate.make("toy", "many"), 128, "p:few")
    found = measured(
        (PLAIN, {1: 1.0, 128: 12.0, 512: 40.0}), (few, {1: 0.5, 128: 8.0}), (many, {1: 0.8, 128: 10.0, 512: 44.0})
    )
    found.timed_often[many.id, 512] = 2
    assert found.sizes_that_exclude("p:few", 3) == {512: [PLAIN.id, many.id, few.id]}
    found.record({512: [few.id]}, {512: {few.id: 42e-6}})
    assert found.sizes_that_exclude("p:few", 3).keys() == {512}  # it was timed once
    found.record({512: [few.id]}, {512: {few.id: 42e-6}})
    assert found.sizes_that_exclude("p:few", 3) == {}


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


@pytest.mark.parametrize(
    ("noise", "few_us", "first"), [(0.0, 0.7, "p:evenly"), (0.02, 0.7, "p:mostly"), (0.02, 1.58, "p:evenly")]
)
def test_layout_that_only_noise_lets_serve_comes_first_if_it_is_faster_by_more(
    noise: float, few_us: float, first: str
) -> None:
    """It is 3% slower than the plain op at one M, where kernels are timed in any case. With 1.58 us at the others it
    takes 1% less time than the other layout in the mean."""
    plain = dict.fromkeys((1, 16, 64, 512), 2.0)
    mostly, evenly = {1: few_us, 16: few_us, 64: few_us, 512: 2.06}, dict.fromkeys(plain, 1.8)
    found = measured((PLAIN, plain), (packed("mostly"), mostly), (packed("evenly"), evenly))
    found.noise[512] = noise
    assert found.layouts()[0] == first
    assert found.sizes_that_exclude("p:mostly", 1).keys() == {512}


def test_kernel_with_the_plain_ops_product_is_expected_between_measured_m_by_the_scan() -> None:
    like = PoolKernel.of(Candidate.make("aten", "upcast_converted"), 256, None)
    found = measured((PLAIN, {256: 10.0, 320: 12.0}), (like, {256: 8.0, 320: 9.6}))
    assert found.curves("").expected(like.id, 300) is None
    found.record_scan({m: {PLAIN.id: 1e-6 * us} for m, us in ((288, 14.0), (300, 11.0))})
    assert found.curves("").expected(like.id, 300) == pytest.approx(8.8e-6)
    assert found.curves("").expected(PLAIN.id, 300) is None


def test_measurements_are_where_a_kernel_is_expected_to_be_faster_and_where_nothing_is_known() -> None:
    """By the estimates, tiles of 56 rows are the fastest from M = 193 to 224, between two measured M."""

    def seconds(kernel: PoolKernel, m: int) -> float:
        return 1e-6 * (4.0 + kernel.tile_rows) * -(-m // (4 * kernel.tile_rows))

    small, large = (PoolKernel.of(Candidate.make("toy", "k", bm=rows), 1, None) for rows in (48, 56))
    found = Measurements(RANGE, {}, 0.05, 0.0, {}, max_kernels=MOST, waves=True, estimated_s=seconds)
    sizes = (1, 2, 64, 65, 128, 129, 180, 181, 190, 260, 261, 511, 512)
    for kernel in (small, large):
        found.add(kernel)
        found.record({m: [kernel.id] for m in sizes}, {m: {kernel.id: seconds(kernel, m)} for m in sizes})
    wanted = found.next_measurements("")
    assert any(193 <= m <= 224 and large.id in names for m, names in wanted.items())
    assert any(261 < m < 511 for m in wanted)
    assert not set(wanted) & set(sizes)


# --- load


def loaded(under_load: Mapping[int, Mapping[str, float]]) -> Measurements:
    """Return measurements of two kernels and the plain op, with times under load in microseconds."""
    at = (1, 64, 128, 512)
    kernels = [PoolKernel.of(Candidate.make("toy", name), 1, None) for name in ("hot", "cool")]
    found = measured(
        *((kernel, dict.fromkeys(at, us)) for kernel, us in zip((PLAIN, *kernels), (100, 90, 95), strict=True))
    )
    found.record_load({m: {name: 1e-6 * us for name, us in by_name.items()} for m, by_name in under_load.items()})
    return found


def test_times_are_multiplied_by_what_load_adds_beyond_the_plain_op() -> None:
    found = loaded({512: {"aten/mm": 110.0, "toy/hot": 118.8}})
    assert found.times["aten/mm"][512] == pytest.approx(100e-6)
    hot, cool = found.times["toy/hot"], found.times["toy/cool"]
    assert (hot[512], hot[128]) == pytest.approx((108e-6, 90e-6))  # 1.32 over 1.1
    assert (hot[64], hot[1]) == pytest.approx((90e-6, 90e-6))  # few rows
    assert cool[512] == pytest.approx(1.2 * 95e-6)  # as the median kernel
    found.record({300: ["toy/hot"]}, {300: {"toy/hot": 50e-6}})
    assert found.times["toy/hot"][300] == pytest.approx(60e-6)


def test_a_kernel_that_load_slows_less_than_the_plain_op_gains_nothing() -> None:
    found = loaded({512: {"aten/mm": 120.0, "toy/hot": 99.0}})
    assert found.times["toy/hot"][512] == pytest.approx(90e-6)


def test_load_at_the_nearest_size_counts() -> None:
    found = loaded(
        {128: {"aten/mm": 100.0, "toy/hot": 99.0, "toy/cool": 95.0}, 512: {"aten/mm": 100.0, "toy/hot": 90.0}}
    )
    hot, cool = found.times["toy/hot"], found.times["toy/cool"]
    assert (hot[64], hot[128], hot[512]) == pytest.approx((99e-6, 99e-6, 90e-6))
    assert (cool[64], cool[128], cool[512]) == pytest.approx((95e-6, 95e-6, 95e-6))


def test_load_of_the_plain_op_alone_changes_nothing() -> None:
    found = loaded({128: {"aten/mm": 120.0}, 512: {"aten/mm": 120.0}})
    assert {name: times[512] for name, times in found.times.items()} == pytest.approx(
        {"aten/mm": 100e-6, "toy/hot": 90e-6, "toy/cool": 95e-6}
    )
    found = loaded({128: {"aten/mm": 120.0, "toy/hot": 118.8}, 512: {"aten/mm": 120.0}})
    assert found.times["toy/cool"][512] == pytest.approx(1.1 * 95e-6)


def test_load_is_relative_to_the_median_kernel_without_a_plain_op() -> None:
    at = (1, 128, 512)
    found = measured(*((packed(name), dict.fromkeys(at, 100.0)) for name in ("a", "b", "c")))
    found.record_load({512: {"toy/a": 110e-6, "toy/b": 120e-6, "toy/c": 132e-6}})
    assert [found.times[f"toy/{name}"][512] for name in "abc"] == pytest.approx([100e-6 * 11 / 12, 100e-6, 110e-6])


def test_sizes_for_load_are_the_last_and_a_quarter_of_it_unless_calls_are_short() -> None:
    times = {1: 5.0, 64: 12.0, 128: 30.0, 512: 90.0}
    found = measured((PLAIN, times))
    assert found.sizes_for_load() == [128, 512]
    assert measured((PLAIN, {m: us / 4.0 for m, us in times.items()})).sizes_for_load() == [512]
    found.record_load({512: {"aten/mm": 100e-6}})
    assert found.sizes_for_load() == []
    assert Measurements(RANGE, {}, 0.05, 0.0, {}, max_kernels=MOST).sizes_for_load() == []


# --- slow calls


NAMES = ("best", "near", "other", "behind", "new")


@pytest.mark.parametrize(("seconds", "kept"), [
    (0.0, {"aten/mm", "toy/best", "toy/other", "toy/new"}),  # a leader of each layout, and what was not timed yet
    (4.4, {"aten/mm", "toy/best", "toy/other", "toy/new", "toy/near"}),
    (9.0, {"aten/mm", "toy/best", "toy/other", "toy/new", "toy/near", "toy/behind"}),
])  # fmt: skip
def test_fastest_are_the_plain_op_a_leader_of_each_layout_and_those_that_there_is_time_for(
    seconds: float, kept: set[str]
) -> None:
    layouts = {"best": "p", "near": "p", "other": "q", "behind": "r", "new": "p"}
    found = measured((PLAIN, {}), *((PoolKernel.of(Candidate.make("toy", n), 1, layouts[n]), {}) for n in NAMES))
    calls_s = {"aten/mm": 1.2, "toy/best": 1.0, "toy/near": 1.02, "toy/other": 1.1, "toy/behind": 2.0, "toy/new": 0.0}
    assert set(found.fastest(calls_s, seconds)) == kept


# --- times at one M from several requests


def record(found: Measurements, m: int, **microseconds: float) -> None:
    """Record one request for kernels of the backend "toy" and ATen's plain op (``mm``) at M."""
    ids = {name: next(full for full in found.pool if f"/{name}[" in f"{full}[") for name in microseconds}
    times = {ids[name]: 1e-6 * us for name, us in microseconds.items()}
    found.record({m: list(times)}, {m: times})


def microseconds(found: Measurements, m: int) -> dict[str, float]:
    return {name.split("/")[1]: round(1e6 * times[m], 6) for name, times in found.times.items() if m in times}


def kernels(*names: str) -> Measurements:
    return measured((PLAIN, {}), *((packed(name), {}) for name in names))


def test_times_of_a_faster_moment_replace_earlier_ones_and_correct_the_others() -> None:
    found = kernels("a", "b", "c")
    record(found, 8, mm=20.0, a=16.0, b=18.0)
    record(found, 8, mm=10.0, a=8.8, c=7.0)
    assert microseconds(found, 8) == {"mm": 10.0, "a": 8.8, "b": 18.0 * 0.55, "c": 7.0}  # 0.55 is nearer to 1 than 0.5


def test_times_of_a_slower_moment_replace_none() -> None:
    found = kernels("a", "b", "c")
    record(found, 8, mm=10.0, a=8.0, b=9.0)
    record(found, 8, mm=20.0, a=18.0, c=14.0)
    assert microseconds(found, 8) == {"mm": 10.0, "a": 8.0, "b": 9.0, "c": 7.0}


def test_stall_of_one_kernel_does_not_change_the_others() -> None:
    found = kernels("a", "b")
    record(found, 8, mm=10.0, a=40.0, b=9.0)
    record(found, 8, mm=10.0, a=8.0)
    assert microseconds(found, 8) == {"mm": 10.0, "a": 8.0, "b": 9.0}
    record(found, 8, a=24.0)  # alone: the later time counts, as before
    assert microseconds(found, 8) == {"mm": 10.0, "a": 24.0, "b": 9.0}


# --- M to time again


def test_m_at_which_the_machine_was_slower_than_at_others_are_timed_again() -> None:
    plain = {1: 1.0, 16: 1.2, 64: 4.0, 128: 2.2, 256: 4.4, 512: 12.0}
    found = measured((PLAIN, plain), (packed("a"), {m: 0.9 * us for m, us in plain.items()}))
    names = {PLAIN.id, packed("a").id}
    assert {m: set(kernels) for m, kernels in found.sizes_timed_too_slow().items()} == {64: names, 512: names}
    assert list(found.sizes_timed_too_slow()) == [64, 512]
    for _ in range(2):
        record(found, 64, mm=4.0, a=3.6)
    assert list(found.sizes_timed_too_slow()) == [512]  # at M = 64 it was always so slow
    record(found, 512, mm=8.8, a=8.0)
    assert found.sizes_timed_too_slow() == {}


def test_steps_of_tiles_are_no_disturbance() -> None:
    assert measured((PLAIN, {16: 1.0, 17: 2.0, 32: 2.0, 33: 3.9})).sizes_timed_too_slow() == {}


def test_m_that_alone_keep_a_layout_from_serving_are_timed_again() -> None:
    plain = dict.fromkeys((1, 64, 256, 512), 2.0)
    times = {1: 1.0, 64: 1.5, 256: 1.9, 512: 2.1}
    found = measured((PLAIN, plain), (packed("a"), times))
    assert {m: set(names) for m, names in found.sizes_that_exclude("p:a", 1).items()} == {
        512: {PLAIN.id, packed("a").id}
    }
    assert found.sizes_that_exclude("", 1) == {}
    assert found.sizes_that_exclude("p:a", 0) == {}  # too many
    record(found, 512, mm=2.0, a=2.1)
    assert found.sizes_that_exclude("p:a", 1) == {}
    almost = measured((PLAIN, plain), (packed("a"), {**times, 512: 2.03}))
    assert almost.sizes_that_exclude("p:a", 1) == {}


@pytest.mark.parametrize(("waves", "names"), [(False, {"mm", "a", "b"}), (True, {"mm", "a"})])
def test_kernels_that_were_a_little_behind_are_timed_again_with_the_others_on_a_cpu(
    waves: bool, names: set[str]
) -> None:
    """A slow moment may have slowed one kernel more than another."""
    found = Measurements(RANGE, {}, 0.05, 0.0, {}, max_kernels=MOST, waves=waves)
    for kernel in (PLAIN, *(PoolKernel.of(Candidate.make("toy", name), 1, "p") for name in ("a", "b", "c"))):
        found.add(kernel)
    for m in (1, 64, 512):
        record(found, m, mm=2.0, a=1.5, b=1.2, c=1.8)
    record(found, 256, mm=2.0, a=2.2, b=3.0, c=4.5)
    again = found.sizes_that_exclude("p", 1)
    assert {m: {name.split("/")[1] for name in kernels} for m, kernels in again.items()} == {256: names}
