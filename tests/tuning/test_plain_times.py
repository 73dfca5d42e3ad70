"""The times of ATen's plain op between the M at which it was timed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmtune.tuning.plain_times import NO_ALGORITHMS, LibraryAlgorithms, PlainTimes, sizes_to_ask

# --- algorithms


@given(st.integers(1, 300), st.integers(0, 100))
def test_every_m_of_a_range_belongs_to_one_that_is_asked(first: int, count: int) -> None:
    asked = sizes_to_ask(first, first + count)
    assert asked == sorted(set(asked))
    assert min(asked) >= 1
    assert {m for m in range(first, first + count + 1) if m % 8 in (0, 1, 7)} <= set(asked)
    algorithms = LibraryAlgorithms(dict.fromkeys(asked, "a"))
    assert list(algorithms.runs(first, first + count)) == [(first, first + count, "a")]
    assert algorithms.unclear == []


def test_algorithm_between_two_m_asked_is_theirs_if_it_is_one() -> None:
    algorithms = LibraryAlgorithms({8: "a", 9: "b", 15: "b", 16: "b", 17: "c", 23: "d", 24: "d", 40: "d"})
    assert [algorithms.at(m) for m in (7, 8, 9, 12, 16, 17, 18, 22, 23, 24, 25, 40)] == [
        "", "a", "b", "b", "b", "c", "", "", "d", "d", "", "d",
    ]  # fmt: skip
    assert algorithms.unclear == [18, 19, 20, 21, 22]
    assert list(algorithms.runs(5, 23)) == [
        (5, 7, ""), (8, 8, "a"), (9, 16, "b"), (17, 17, "c"), (18, 22, ""), (23, 23, "d"),
    ]  # fmt: skip
    assert list(algorithms.runs(10, 12)) == [(10, 12, "b")]
    assert list(NO_ALGORITHMS.runs(3, 4)) == [(3, 4, "")]
    assert list(algorithms.runs(4, 3)) == []


@given(st.lists(st.sampled_from(["a", "b", ""]), min_size=1, max_size=40), st.integers(1, 90), st.integers(0, 90))
def test_runs_cover_a_range(blocks: list[str], first: int, count: int) -> None:
    asked = sizes_to_ask(8, 8 + 4 * len(blocks))
    algorithms = LibraryAlgorithms({m: name for m, name in zip(asked, blocks, strict=False) if name})
    runs = list(algorithms.runs(first, first + count))
    assert [name for start, end, name in runs for _ in range(start, end + 1)] == [
        algorithms.at(m) for m in range(first, first + count + 1)
    ]
    assert (runs[0][0], runs[-1][1]) == (first, first + count)


# --- times of one algorithm, or of any


def scanned(times: dict[int, float]) -> PlainTimes:
    return PlainTimes(times, NO_ALGORITHMS)


def test_least_time_counts_the_next_m_on_either_side() -> None:
    times = scanned({100: 5.0, 120: 3.0, 140: 6.0, 160: 7.0, 180: 2.0, 200: 4.0})
    assert times.at_least(140, 160) == 6.0
    assert times.at_least(141, 150) == 6.0
    assert times.at_least(139, 150) == 3.0  # 120 is next to it
    assert times.at_least(150, 161) == 2.0
    assert times.at_least(190, 200) == 2.0
    assert times.at_least(200, 200) == 4.0


def test_nothing_is_known_where_timed_m_are_far_apart_or_end() -> None:
    times = scanned({100: 5.0, 120: 3.0, 180: 2.0, 200: 4.0})
    assert times.at_least(130, 140) is None
    assert times.at_least(100, 180) is None
    assert times.at_least(185, 190) == 2.0
    assert times.at_least(190, 201) is None
    assert times.at_least(99, 100) is None
    assert scanned({}).at_least(100, 100) is None
    assert scanned({}).expected(100) is None


def test_expected_time_is_on_a_line() -> None:
    times = scanned({100: 5.0, 120: 6.0, 170: 5.0})
    assert times.expected(120) == 6.0
    assert times.expected(105) == pytest.approx(5.25)
    assert times.expected(150) is None  # too far
    assert times.expected(171) is None


# --- times of several algorithms


def test_time_is_that_of_the_same_algorithm_nearby() -> None:
    """Multiples of 8 have an algorithm of their own."""
    names = {m: "eights" if m % 8 == 0 else "others" for m in range(64, 129)}
    times = PlainTimes({65: 10.0, 127: 12.0, 64: 3.0, 128: 5.0, 100: 20.0}, LibraryAlgorithms(names))
    assert times.at_least(96, 96) == 3.0
    assert times.expected(96) == pytest.approx(4.0)
    assert times.at_least(73, 79) == 10.0
    assert times.at_least(101, 103) == 12.0  # 100 was timed with the same algorithm
    assert times.at_least(72, 79) == 3.0
    assert times.expected(101) == pytest.approx(20.0 - 8.0 / 27.0)
    assert times.at_least(64, 128) == 3.0


def test_algorithm_that_was_not_timed_on_both_sides_is_not_known() -> None:
    names = {m: "a" if m <= 80 or m > 96 else "b" for m in range(64, 129)}
    times = PlainTimes({64: 1.0, 80: 2.0, 97: 3.0, 128: 4.0}, LibraryAlgorithms(names))
    assert times.at_least(64, 80) == 1.0
    assert times.at_least(81, 96) is None
    assert times.at_least(72, 100) is None
    assert times.expected(90) is None
    assert times.at_least(97, 128) == 3.0


def test_one_algorithm_is_known_farther_than_where_the_library_may_choose_another() -> None:
    sizes = {100: 1.0, 200: 2.0}
    assert scanned(sizes).at_least(150, 150) is None
    one = LibraryAlgorithms(dict.fromkeys(range(96, 408), "a"))
    assert PlainTimes(sizes, one).at_least(150, 150) == 1.0
    assert PlainTimes({100: 1.0, 356: 2.0}, one).at_least(150, 150) == 1.0
    assert PlainTimes({100: 1.0, 357: 2.0}, one).at_least(150, 150) is None


@given(st.data())
def test_least_times_are_those_of_the_nearest_with_the_same_algorithm(data: st.DataObject) -> None:
    names = {m: data.draw(st.sampled_from("ab")) for m in range(8, 73)}
    algorithms = LibraryAlgorithms(names)
    times = data.draw(st.dictionaries(st.integers(8, 72), st.floats(1.0, 9.0), min_size=1, max_size=12))
    plain = PlainTimes(times, algorithms)
    for m in range(8, 73):
        same = sorted(size for size in times if algorithms.at(size) == algorithms.at(m))
        below, above = [size for size in same if size <= m], [size for size in same if size >= m]
        known = m in times or (below and above)
        near = [times[m]] if m in times else [times[below[-1]], times[above[0]]] if known else []
        assert plain.at_least(m, m) == (min(near) if known else None)
        assert (plain.expected(m) is not None) == bool(known)
