import pytest

from gemmtune.core.workloads import build
from gemmtune.report.rows import best_by_backend, sorted_decisions, summarize, time_text, timed_candidates
from helpers.factories import ATEN, NATIVE, make_decision


def test_summary_of_a_winner_has_the_speedup_over_the_best_aten_candidate() -> None:
    row = summarize(make_decision(aten_s=2e-3))
    assert (row.aten_s, row.best_s) == (2e-3, 1e-3)
    assert row.speedup == pytest.approx(2.0)
    assert row.lo < row.speedup < row.hi
    assert row.best_id == NATIVE.id
    assert (row.tried, row.illegal) == (4, 1)


def test_summary_of_a_tie_has_no_speedup() -> None:
    row = summarize(make_decision(outcome="tie"))
    assert (row.speedup, row.lo, row.hi) == (1.0, 1.0, 1.0)
    assert row.best_id == ATEN.id


def test_summary_of_none_valid_has_no_times() -> None:
    row = summarize(make_decision(outcome="none_valid"))
    assert row.aten_s is None
    assert row.best_s is None
    assert row.best_id == ""


def test_timed_candidates_are_valid() -> None:
    decision = make_decision()
    assert timed_candidates(decision)[0].id == NATIVE.id
    assert all(row.verdict is not None and row.verdict.ok for row in timed_candidates(decision))
    assert timed_candidates(make_decision(outcome="none_valid")) == []
    assert set(best_by_backend(decision)) == {"aten", "native"}


def test_decisions_are_sorted_by_dtype_shape_and_m() -> None:
    problems = [build(16, 8, 8, "fp32"), build(1, 8, 8, "fp32"), build(64, 8, 8, "bf16")]
    labels = [summarize(decision).label for decision in sorted_decisions(make_decision(p) for p in problems)]
    assert labels == ["64x8x8 bf16", "1x8x8 fp32", "16x8x8 fp32"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.5, "1.50 s"), (0.01234, "12.3 ms"), (0.000914, "914 us"), (2.5e-6, "2.50 us"), (3e-8, "0.03 us"), (None, "-")],
)
def test_time_text(seconds: float | None, text: str) -> None:
    assert time_text(seconds) == text
