"""The forms of a user's M, and the SizeRange that each stands for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmtune.core.devices import TuningProfile
from gemmtune.core.problem import Problem
from gemmtune.core.workloads import bmm_problem
from gemmtune.tuning.sizes import SizeRange, parse_sizes

CPU = TuningProfile()
GPU = TuningProfile(last_m=8192, tuned_m=(1, 16, 64, 256, 1024, 4096))


@pytest.mark.parametrize(("profile", "m", "recorded", "expected"), [
    (CPU, "all", (), SizeRange(1, 512, (1, 8, 32, 128))),
    (GPU, "all", (), SizeRange(1, 8192, (1, 16, 64, 256, 1024, 4096))),
    (CPU, "all", (1000, 50), SizeRange(1, 1000, (1, 8, 50, 128, 1000))),
    (CPU, "all", (0, 8), SizeRange(1, 512, (1, 8, 32, 128))),
    (CPU, range(1, 33), (), SizeRange(1, 32, (1, 8, 32))),
    (CPU, range(1, 33), (32, 64), SizeRange(1, 32, (1, 8, 32))),
    (CPU, range(20, 30), (), SizeRange(20, 29, (20,))),
    (CPU, range(20, 30), (7, 25), SizeRange(20, 29, (25,))),
    (CPU, range(5, 6), (), SizeRange(5, 5, (5,))),
    (CPU, range(600, 700), (), SizeRange(600, 699, (600,))),
    (CPU, [64, 256, 64], (), SizeRange(1, 512, (64, 256))),
    (CPU, (4096,), (3,), SizeRange(1, 4096, (3, 4096))),
    (GPU, [5], (9000,), SizeRange(1, 9000, (5, 9000))),
])  # fmt: skip
def test_size_range_of_each_form(
    profile: TuningProfile, m: Any, recorded: tuple[int, ...], expected: SizeRange
) -> None:
    assert parse_sizes(m, profile, recorded) == expected


BATCHED = bmm_problem(4, 16, 64, 32, "float32")
GIANT = replace(BATCHED, n=4096, k=4096)  # a matrix takes 64 MB
HUGE = replace(BATCHED, n=8192, k=8192)  # a matrix takes more than the profile's limit


@pytest.mark.parametrize(("problem", "batch", "recorded", "expected"), [
    (BATCHED, "all", (), SizeRange(1, 128, (1, 8, 64), dim="batch")),
    (BATCHED, "all", (4, 200), SizeRange(1, 200, (1, 4, 64, 200), dim="batch")),
    (BATCHED, range(2, 9), (4,), SizeRange(2, 8, (4,), dim="batch")),
    (BATCHED, [32], (), SizeRange(1, 128, (32,), dim="batch")),
    (GIANT, "all", (), SizeRange(1, 1, (1,), dim="batch")),
    (GIANT, "all", (3,), SizeRange(1, 3, (1, 3), dim="batch")),
    (HUGE, "all", (), SizeRange(1, 1, (1,), dim="batch")),
    (HUGE, [2], (), SizeRange(1, 2, (2,), dim="batch")),
])  # fmt: skip
def test_range_of_batches(problem: Problem, batch: Any, recorded: tuple[int, ...], expected: SizeRange) -> None:
    assert parse_sizes(batch, CPU, recorded, problem, "batch") == expected


def test_range_of_m_of_a_batched_product_is_limited_by_its_operands() -> None:
    assert parse_sizes("all", CPU, (), BATCHED).last == 512
    wide = bmm_problem(64, 16, 4096, 64, "float32")  # B takes 67 MB, and each row of A and of the output a megabyte
    assert parse_sizes("all", CPU, (), wide).last == 1 + ((128 << 20) - 64 * 4 * (4096 * 64 + 4160)) // (64 * 4 * 4160)
    assert parse_sizes("all", CPU, (200,), wide).last == 200
    assert parse_sizes(range(1, 301), CPU, (), wide).last == 300


def test_errors_name_the_batch() -> None:
    with pytest.raises(TypeError, match="batch must be"):
        parse_sizes(64, CPU, (), BATCHED, "batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hints for batches"):
        parse_sizes([0], CPU, (), BATCHED, "batch")


@pytest.mark.parametrize("m", ["most", "", range(0, 5), range(-3, 5), range(5, 5), range(1, 9, 2), range(9, 1, -1)])
def test_invalid_strings_and_ranges_raise_value_error(m: Any) -> None:
    with pytest.raises(ValueError, match=r"must (be|have)") as error:
        parse_sizes(m, CPU)
    assert repr(m) in str(error.value)


@pytest.mark.parametrize("m", [[], [0], [64, -1]])
def test_hints_below_one_raise_value_error(m: Any) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        parse_sizes(m, CPU)


@pytest.mark.parametrize("m", [64, None, 1.5, [1.5], ["64"], [True], [None]])
def test_other_types_raise_type_error(m: Any) -> None:
    with pytest.raises(TypeError, match='must be "all", a range or a sequence of int'):
        parse_sizes(m, CPU)


sizes = st.integers(1, 10_000)
forms = st.one_of(
    st.just("all"),
    st.builds(lambda first, length: range(first, first + length), sizes, sizes),
    st.lists(sizes, min_size=1, max_size=6),
)


@given(forms, st.lists(st.integers(0, 10_000), max_size=6), st.sampled_from((CPU, GPU)))
def test_tuned_m_ascend_within_the_range(m: Any, recorded: list[int], profile: TuningProfile) -> None:
    first, last, tuned = parse_sizes(m, profile, recorded)[:3]
    assert 1 <= first <= last
    assert tuned
    assert list(tuned) == sorted(set(tuned))
    assert first <= tuned[0] <= tuned[-1] <= last
    assert {size for size in recorded if first <= size <= last} <= set(tuned)
    if isinstance(m, list):
        assert set(m) <= set(tuned)
    elif isinstance(m, range):
        assert (first, last) == (m[0], m[-1])
    if not isinstance(m, range):
        assert (first, last) == (1, max((profile.last_m, *(m if isinstance(m, list) else ()), *recorded)))
    if not isinstance(m, list):  # every M has one within a factor of two that is tuned, up to the profile's own
        assert tuned[0] <= 4.5 * first
        assert 4.5 * tuned[-1] >= last
