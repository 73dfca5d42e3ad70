"""The values of ``config_key``: the runs of M that each makes, the M that represent keys, and wrong values."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmtune.tuning.config_keys import MAX_RUNS, keyed, representatives, require_keyed_range
from gemmtune.tuning.sizes import KeyRun, SizeRange

RANGE = SizeRange(1, 20, (1, 8))


def thirds(m: int) -> int:
    return m % 30 // 10


def test_none_leaves_the_range() -> None:
    assert keyed(RANGE, None) is RANGE


def test_exact_has_the_tuned_m_and_no_runs() -> None:
    assert keyed(RANGE, "exact") == SizeRange(1, 20, (1, 8), (), "exact")


def test_power_of_2_is_the_next_power() -> None:
    sizes = keyed(RANGE, "power_of_2")
    assert sizes.runs == ((1, 1, 1), (2, 2, 2), (3, 4, 4), (5, 8, 8), (9, 16, 16), (17, 20, 32))
    assert sizes.tuned == (1, 2, 4, 8, 16, 20)
    assert sizes.config_key == "power_of_2"
    inside = keyed(SizeRange(5, 64, ()), "power_of_2")
    assert inside.runs[0] == (5, 8, 8)
    assert inside.tuned == (8, 16, 32, 64)


def test_runs_of_one_key_may_lie_apart() -> None:
    sizes = keyed(SizeRange(1, 65, ()), thirds)
    assert [run.key for run in sizes.runs] == [0, 1, 2, 0, 1, 2, 0]
    assert representatives(sizes.runs) == {0: 9, 1: 19, 2: 29}
    assert sizes.tuned == (9, 19, 29)
    assert sizes.config_key == f"{__name__}.thirds"


def test_key_in_a_later_run_represents_itself() -> None:
    runs = [KeyRun(1, 4, 12), KeyRun(5, 9, 7), KeyRun(10, 15, 12), KeyRun(16, 20, 99), KeyRun(21, 30, 99)]
    assert representatives(runs) == {12: 12, 7: 7, 99: 20}


def test_objects_that_can_be_called_are_named_by_their_type() -> None:
    assert keyed(RANGE, functools.partial(thirds)).config_key == "functools.partial"
    assert keyed(RANGE, lambda m: 1).config_key.endswith("<lambda>")


@pytest.mark.parametrize("key", [None, 1.0, "8", True])
def test_function_that_returns_no_int_raises_type_error(key: Any) -> None:
    with pytest.raises(TypeError, match="must return an int for each M; for M = 7 it returned") as error:
        keyed(RANGE, lambda m: key if m == 7 else 1)
    assert repr(key) in str(error.value)


def test_error_of_the_function_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        keyed(RANGE, lambda m: 1 // (m - 3))


def test_too_many_runs_raise_value_error() -> None:
    assert len(keyed(SizeRange(1, MAX_RUNS, ()), lambda m: m).runs) == MAX_RUNS
    with pytest.raises(ValueError, match=r"M from 1 to 512 into 512 runs of one key; 256 are the most: give more"):
        keyed(SizeRange(1, 512, ()), lambda m: m % 2)


@pytest.mark.parametrize("config_key", [None, "exact", "power_of_2", thirds])
def test_values_that_are_allowed(config_key: Any) -> None:
    require_keyed_range(config_key, "all")


@pytest.mark.parametrize(("config_key", "error"), [
    ("", ValueError), ("power_of_3", ValueError), (3, TypeError), ([64, 256], TypeError), (True, TypeError),
])  # fmt: skip
def test_other_values_are_refused(config_key: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="config_key must be None, 'exact', 'power_of_2' or a function of M"):
        require_keyed_range(config_key, "all")


def test_range_is_needed() -> None:
    require_keyed_range(None, None)
    with pytest.raises(ValueError, match="needs m, which is None"):
        require_keyed_range("exact", None)


@given(st.integers(1, 500), st.integers(0, 500), st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_runs_cover_the_range_by_keys(first: int, more: int, keys: list[int]) -> None:
    def key_of(m: int) -> int:
        return keys[m // 25 % len(keys)]

    sizes = keyed(SizeRange(first, first + more, ()), key_of)
    covered = [(m, run.key) for run in sizes.runs for m in range(run.first, run.last + 1)]
    assert covered == [(m, key_of(m)) for m in range(first, first + more + 1)]
    assert all(a.key != b.key for a, b in zip(sizes.runs, sizes.runs[1:], strict=False))
    tuned = representatives(sizes.runs)
    assert sizes.tuned == tuple(sorted(tuned.values()))
    assert all(key_of(m) == key for key, m in tuned.items())
