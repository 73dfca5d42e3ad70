"""Ledger: the best candidates, alternatives, and the bounded evidence of a decision."""

from __future__ import annotations

import pytest

from gemmtune.core.candidate import Candidate, Illegal
from gemmtune.core.decision import Verdict
from gemmtune.tuning.ledger import MAX_ILLEGAL, MAX_PER_REASON, MAX_UNTRIED, ONE_DRAW, Ledger

ATEN = Candidate.make("aten", "mm")
FAST = Candidate.make("native", "gemm", mr=6)
SLOW = Candidate.make("native", "gemm", mr=1)


@pytest.fixture
def ledger() -> Ledger:
    new_ledger = Ledger([ATEN, FAST, SLOW], [])
    for candidate, times, packing in ((ATEN, (2.0, 2.2), None), (FAST, (1.0, 1.5), "p"), (SLOW, (3.0,), "p")):
        row = new_ledger[candidate.id]
        row.stage, row.times_s, row.packing = "screened", times, packing
        row.verdict, row.eligible = Verdict("within_bound"), True
    return new_ledger


def test_best_candidate_and_best_baseline(ledger: Ledger) -> None:
    assert ledger.best() is ledger[FAST.id]
    assert ledger.best(is_baseline=True) is ledger[ATEN.id]
    ledger[FAST.id].eligible = False
    assert ledger.best(is_baseline=False, eligible=True) is ledger[SLOW.id]


def test_alternatives_are_the_fastest_eligible_candidates_per_layout(ledger: Ledger) -> None:
    assert ledger.alternatives({}) == {"": ATEN.id, "p": FAST.id}
    assert ledger.alternatives({"p": SLOW.id}) == {"": ATEN.id, "p": SLOW.id}
    ledger.fail(SLOW.id, Verdict("crashed", "late"))
    assert ledger.alternatives({"p": SLOW.id}) == {"": ATEN.id, "p": FAST.id}


def test_screening_samples_have_their_condition(ledger: Ledger) -> None:
    rows = {row.id: row for row in ledger.evidence()}
    sample = rows[FAST.id].sample
    assert sample is not None
    assert (sample.median_s, sample.lo_s, sample.hi_s, sample.rounds) == (1.25, 1.0, 1.5, 2)
    assert (sample.ratio, sample.ratio_lo, sample.ratio_hi) == (0.5, 1.0 / 2.2, 0.75)
    assert "rough" in sample.conditions["timing"]


def test_verdict_of_a_partial_check_has_its_detail(ledger: Ledger) -> None:
    ledger[FAST.id].eligible = False
    row = next(row for row in ledger.evidence() if row.id == FAST.id)
    assert row.verdict is not None
    assert row.verdict.detail == ONE_DRAW


def test_failed_candidate_has_a_reason_and_no_sample(ledger: Ledger) -> None:
    ledger.fail(FAST.id, Verdict("wrong", "one element"))
    row = next(row for row in ledger.evidence() if row.id == FAST.id)
    assert (row.stage, row.reason, row.verdict) == ("failed", "one element", Verdict("wrong", "one element"))


def test_evidence_has_few_untried_and_illegal_candidates() -> None:
    candidates = [Candidate.make("native", "gemm", mr=i) for i in range(100)]
    illegal_candidates = [Illegal(Candidate.make("native", "gemm", nr=i), f"nr = {i} is too much") for i in range(50)]
    rows = Ledger([ATEN, *candidates], illegal_candidates).evidence()
    untried = [row for row in rows if row.stage == "untried" and row.candidate["backend"] == "native"]
    illegal = [row for row in rows if row.stage == "illegal"]
    assert len(untried) == MAX_UNTRIED
    assert untried[-1].reason == f"not tried (and {100 - MAX_UNTRIED} more like it)"
    assert len(illegal) == MAX_PER_REASON
    assert illegal[-1].reason == f"nr = 3 is too much (and {50 - MAX_PER_REASON} more like it)"


def test_number_of_illegal_candidates_in_the_evidence_is_bounded() -> None:
    illegal_candidates = [Illegal(Candidate.make("native", "gemm", i=i), "reason " + "x" * i) for i in range(500)]
    assert len(Ledger([], illegal_candidates).evidence()) == MAX_ILLEGAL
