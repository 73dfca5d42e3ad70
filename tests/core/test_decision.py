"""Decisions: the evidence of a candidate, the speedup, and the worst ratio of a layout."""

from __future__ import annotations

import pytest

from gemmtune.core.decision import BACK_TO_BACK, Decision, Evidence, LayoutDecision, Sample, Verdict
from helpers.factories import ATEN, NATIVE, make_decision


@pytest.mark.parametrize(
    ("surroundings", "worst"), [({}, 0.9), ({"alone": 0.8}, 0.9), ({"alone": 0.8, "behind a copy": 1.02}, 1.02)]
)
def test_worst_ratio_includes_all_surroundings(surroundings: dict[str, float], worst: float) -> None:
    assert LayoutDecision("winner", "a", "b", 0.9, 0.89, 0.91, surroundings).worst_ratio == worst


def test_evidence_is_found_by_the_candidates_id() -> None:
    decision = make_decision()
    rows = [decision.find(candidate.id) for candidate in (ATEN, NATIVE)]
    assert [row and row.id for row in rows] == [ATEN.id, NATIVE.id]
    assert decision.find("native/absent") is None
    assert decision.find(None) is None


@pytest.mark.parametrize(("outcome", "speedup"), [("winner", 2.0), ("tie", 1.0), ("none_valid", 1.0)])
def test_only_a_winner_has_a_speedup(outcome: str, speedup: float) -> None:
    assert make_decision(outcome=outcome).speedup == speedup


@pytest.mark.parametrize(("kind", "ok"), [("exact", True), ("within_bound", True), ("wrong", False), ("hung", False)])
def test_exact_results_and_those_within_the_bound_pass(kind: str, ok: bool) -> None:
    assert Verdict(kind).ok is ok  # type: ignore[arg-type]


def test_winner_among_other_work_has_its_speedup_there() -> None:
    surroundings = {"behind an elementwise kernel": 0.9, "before an elementwise kernel": 0.8, BACK_TO_BACK: 1.01}
    won = LayoutDecision("winner", "a", "b", 1.005, 1.0, 1.01, surroundings)
    assert won.worst_ratio == 0.9
    assert LayoutDecision("tie", "a", "b", 1.005, 1.0, 1.01, surroundings).worst_ratio == 1.01
    assert LayoutDecision("winner", "a", "b", 1.005, 1.0, 1.01).worst_ratio == 1.005
    row = Evidence({}, "a", "winner", sample=Sample(1.0, 1.0, 1.0, 50, 1.005, 1.0, 1.01))
    decision = Decision("k", {}, "t", "winner", "a", (row,), layouts={"": won})
    assert decision.speedup == pytest.approx(1 / 0.9)
