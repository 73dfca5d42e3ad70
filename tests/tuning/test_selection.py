"""Which rows are checked fully and which ones race, by their screening times."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gemmtune.core.candidate import Candidate
from gemmtune.tuning.ledger import Row
from gemmtune.tuning.selection import (
    best_of_each_packing_first,
    entrants,
    grouped_by_packing,
    promising,
    raw_pair,
    within,
)


def row(name: str, seconds: float, packing: str | None = None) -> Row:
    """Return a timed row. A name that begins with ``aten`` is one of ATen's."""
    candidate = Candidate.make("aten" if name.startswith("aten") else "native", name)
    return Row(candidate, packing=packing, times_s=(seconds,))


def names(rows: Sequence[Row]) -> list[str]:
    return [item.candidate.template for item in rows]


def test_rows_within_a_factor_of_the_first_include_the_limit() -> None:
    rows = [row("a", 1.0), row("b", 2.0), row("c", 2.001)]
    assert names(within(rows, 2.0)) == ["a", "b"]
    assert names(within(rows[1:], 2.0)) == ["b", "c"]
    assert within([], 2.0) == []


# --- what is checked fully ---------------------------------------------------------------------------------------


def test_close_baselines_and_close_candidates_are_promising() -> None:
    rows = [
        row("a", 1.0), row("b", 1.3), row("c", 1.31), row("aten1", 2.0), row("aten2", 3.0), row("aten3", 3.01),
    ]  # fmt: skip
    assert names(promising(rows, (), 16)) == ["aten1", "aten2", "a", "b"]


def test_at_most_four_baselines_and_max_raced_others_are_promising() -> None:
    rows = [row(f"aten{i}", 1.0 + i / 100) for i in range(5)] + [row(f"x{i}", 2.0 + i / 100) for i in range(5)]
    assert names(promising(rows, (), 3)) == ["aten0", "aten1", "aten2", "aten3", "x0", "x1", "x2"]


def test_fastest_baseline_on_the_raw_weight_is_promising_however_slow_it_is() -> None:
    rows = [row("aten1", 1.0, "p"), row("aten2", 40.0), row("aten3", 41.0)]
    assert names(promising(rows, (), 16)) == ["aten1", "aten2"]


def test_best_of_four_packings_within_five_times_the_best_is_promising() -> None:
    rows = [row("a", 1.0, "p1"), row("b", 2.0, "p2"), row("c", 2.5, "p2"), row("d", 3.0, "p3"), row("e", 4.9, "p4")]
    assert names(promising(rows, (), 16)) == ["a", "b", "d", "e"]
    late = [*rows[:-1], row("e", 5.01, "p4")]
    assert names(promising([*rows[:-1], row("e", 5.0, "p4")], (), 16)) == ["a", "b", "d", "e"]
    assert names(promising(late, (), 16)) == ["a", "b", "d"]
    five = [*rows, row("f", 5.0, "p5")]
    assert names(promising(five, (), 16)) == ["a", "b", "d", "e"]


def test_best_of_a_layout_that_other_m_use_is_promising() -> None:
    rows = [row(f"x{i}", 1.0 + i, f"p{i}") for i in range(5)]
    assert names(promising(rows, ("other", "p4"), 1)) == ["x0", "x1", "x2", "x3", "x4"]
    assert names(promising(rows, ("other",), 1)) == ["x0", "x1", "x2", "x3"]


# --- what races --------------------------------------------------------------------------------------------------


def test_race_has_the_best_baseline_then_the_others_then_more_baselines() -> None:
    rows = [
        row("a", 1.0, "p"), row("b", 1.5, "p"), row("c", 1.51, "p"), row("aten1", 2.0, "p"), row("aten2", 3.0, "p"),
        row("aten3", 3.01, "p"),
    ]  # fmt: skip
    rows[-1].reason = "already told"
    assert names(entrants(rows, (), 16, 1e9)) == ["aten1", "a", "b", "aten2"]
    assert [item.reason for item in rows] == [
        "", "", "1.51x the best screening time: not raced", "", "", "already told"
    ]  # fmt: skip


def test_reason_counts_from_the_best_time_of_all() -> None:
    rows = [row("aten1", 0.5), row("a", 2.0, "p"), row("b", 4.0, "p")]
    entrants(rows, (), 16, 1e9)
    assert rows[2].reason == "8.00x the best screening time: not raced"


@pytest.mark.parametrize(
    ("max_raced", "budget_s", "count"),
    [(16, 1e9, 6), (5, 1e9, 5), (4, 1e9, 4), (1, 1e9, 3), (16, 100.0, 5), (16, 99.9, 4), (16, 0.0, 3)],
)
def test_number_of_entrants_has_a_limit_and_takes_twenty_calls_each(
    max_raced: int, budget_s: float, count: int
) -> None:
    rows = [row(f"x{i}", 1.0 + i / 100, "p") for i in range(6)] + [row("aten1", 2.0)]
    raced = entrants(rows, (), max_raced, budget_s)
    assert names(raced) == ["aten1", *(f"x{i}" for i in range(count))]
    assert [bool(item.reason) for item in rows] == [i >= count for i in range(6)] + [False]


def test_slower_calls_leave_fewer_entrants() -> None:
    rows = [row(f"x{i}", 2.0 + i / 100, "p") for i in range(6)]
    assert names(entrants(rows, (), 16, 200.0)) == ["x0", "x1", "x2", "x3", "x4"]


def test_at_most_four_baselines_race() -> None:
    rows = [row(f"aten{i}", 1.0 + i / 100) for i in range(5)] + [row("a", 2.0, "p")]
    assert names(entrants(rows, (), 16, 1e9)) == ["aten0", "a", "aten1", "aten2", "aten3"]


def test_pair_on_the_raw_weight_races_early() -> None:
    rows = [
        row("a", 1.0, "p"), row("b", 1.1, "p"), row("aten1", 1.2, "q"), row("raw", 4.0), row("aten2", 5.0),
        row("slow", 6.0),
    ]  # fmt: skip
    assert names(entrants(rows, (), 16, 1e9)) == ["aten1", "a", "raw", "b", "aten2"]
    assert [bool(item.reason) for item in rows] == [False, False, False, False, False, True]


def test_raw_kernel_that_is_the_fastest_of_all_races_once() -> None:
    rows = [row("raw", 1.0), row("b", 1.1, "p"), row("aten1", 1.2)]
    assert names(entrants(rows, (), 16, 1e9)) == ["aten1", "raw", "b"]


def test_best_of_each_packing_races_before_the_second_of_another() -> None:
    rows = [row("a", 1.0, "p"), row("b", 1.1, "p"), row("c", 1.2, "q"), row("d", 1.3, "r"), row("aten1", 1.4, "s")]
    assert names(entrants(rows, (), 16, 1e9)) == ["aten1", "a", "c", "d", "b"]
    assert names(entrants(rows, ("r",), 16, 1e9)) == ["aten1", "a", "d", "c", "b"]


def test_nothing_races_without_rows() -> None:
    assert entrants([], (), 16, 1.0) == []


# --- the pair on the raw weight ----------------------------------------------------------------------------------


def test_raw_pair_is_the_fastest_of_each_side_on_the_raw_weight() -> None:
    rows = [
        row("a", 1.0, "p"),
        row("aten1", 2.0, "p"),
        row("b", 3.0),
        row("c", 3.1),
        row("aten2", 4.0),
        row("aten3", 5),
    ]
    assert names(raw_pair(rows)) == ["b", "aten2"]


@pytest.mark.parametrize("left_out", ["b", "aten2"])
def test_raw_pair_needs_both_sides(left_out: str) -> None:
    rows = [row("a", 1.0, "p"), row("aten1", 2.0, "p"), row("b", 3.0), row("aten2", 4.0)]
    assert raw_pair([item for item in rows if item.candidate.template != left_out]) == []


@pytest.mark.parametrize(
    ("best_s", "raw_s", "aten_s", "is_pair"),
    [
        (1.0, 1.3, 1.0, True),
        (1.0, 1.31, 1.0, False),
        (1.0, 8.0, 100.0, True),
        (1.0, 8.01, 100.0, False),
        (2.0, 16.0, 100.0, True),
        (2.0, 16.0, 12.0, False),
        (2.0, 2.6, 2.0, True),
    ],
)
def test_raw_pair_is_near_aten_and_not_far_behind_the_best(
    best_s: float, raw_s: float, aten_s: float, is_pair: bool
) -> None:
    rows = sorted(
        [row("best", best_s, "p"), row("raw", raw_s), row("aten1", aten_s)], key=lambda item: item.screening_s
    )
    assert names(raw_pair(rows)) == (["raw", "aten1"] if is_pair else [])


# --- order -------------------------------------------------------------------------------------------------------


def test_best_of_all_comes_first_then_the_best_of_each_packing() -> None:
    rows = [row("a", 1.0, "p"), row("b", 1.1, "p"), row("c", 1.2), row("d", 1.3, "r"), row("e", 1.4, "r")]
    assert names(best_of_each_packing_first(rows)) == ["a", "c", "d", "b", "e"]
    assert names(best_of_each_packing_first(rows, ("r", "p"))) == ["a", "d", "c", "b", "e"]
    assert best_of_each_packing_first([]) == []


def test_rows_of_one_packing_are_grouped_in_the_order_of_their_first() -> None:
    rows = [row("a", 1.0, "p"), row("b", 1.1), row("c", 1.2, "p"), row("d", 1.3)]
    assert names(grouped_by_packing(rows)) == ["a", "c", "b", "d"]
