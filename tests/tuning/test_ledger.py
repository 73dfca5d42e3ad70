"""The ledger: what is offered has passed, what is recorded is small, and nothing is said that was not measured."""

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
    made = Ledger([ATEN, FAST, SLOW], [])
    for candidate, times, packing in ((ATEN, (2.0, 2.2), None), (FAST, (1.0, 1.5), "p"), (SLOW, (3.0,), "p")):
        row = made[candidate.id]
        row.stage, row.times_s, row.packing = "screened", times, packing
        row.verdict, row.eligible = Verdict("within_bound"), True
    return made


def test_best_of_each_side(ledger: Ledger) -> None:
    assert ledger.best() is ledger[FAST.id]
    assert ledger.best(is_baseline=True) is ledger[ATEN.id]
    ledger[FAST.id].eligible = False
    assert ledger.best(is_baseline=False, eligible=True) is ledger[SLOW.id]


def test_alternatives_are_the_fastest_eligible_per_packing(ledger: Ledger) -> None:
    assert ledger.alternatives({}) == {"": ATEN.id, "p": FAST.id}
    assert ledger.alternatives({"p": SLOW.id}) == {"": ATEN.id, "p": SLOW.id}
    ledger.fail(SLOW.id, Verdict("crashed", "late"))
    assert ledger.alternatives({"p": SLOW.id}) == {"": ATEN.id, "p": FAST.id}


def test_rough_samples_say_that_they_are_rough(ledger: Ledger) -> None:
    rows = {row.id: row for row in ledger.evidence()}
    sample = rows[FAST.id].sample
    assert sample is not None
    assert (sample.median_s, sample.lo_s, sample.hi_s, sample.rounds) == (1.25, 1.0, 1.5, 2)
    assert (sample.ratio, sample.ratio_lo, sample.ratio_hi) == (0.5, 1.0 / 2.2, 0.75)
    assert "rough" in sample.conditions["timing"]


def test_a_quick_check_is_not_passed_off_as_a_full_one(ledger: Ledger) -> None:
    ledger[FAST.id].eligible = False
    row = next(row for row in ledger.evidence() if row.id == FAST.id)
    assert row.verdict is not None
    assert row.verdict.detail == ONE_DRAW


def test_a_failure_has_its_reason_and_no_sample(ledger: Ledger) -> None:
    ledger.fail(FAST.id, Verdict("wrong", "one element"))
    row = next(row for row in ledger.evidence() if row.id == FAST.id)
    assert (row.stage, row.reason, row.verdict) == ("failed", "one element", Verdict("wrong", "one element"))


def test_untried_and_illegal_ones_are_thinned_out() -> None:
    many = [Candidate.make("native", "gemm", mr=i) for i in range(100)]
    refused = [Illegal(Candidate.make("native", "gemm", nr=i), f"nr = {i} is too much") for i in range(50)]
    rows = Ledger([ATEN, *many], refused).evidence()
    untried = [row for row in rows if row.stage == "untried" and row.candidate["backend"] == "native"]
    illegal = [row for row in rows if row.stage == "illegal"]
    assert len(untried) == MAX_UNTRIED
    assert untried[-1].reason == f"not tried (and {100 - MAX_UNTRIED} more like it)"
    assert len(illegal) == MAX_PER_REASON
    assert illegal[-1].reason == f"nr = 3 is too much (and {50 - MAX_PER_REASON} more like it)"


def test_many_reasons_are_bounded_too() -> None:
    refused = [Illegal(Candidate.make("native", "gemm", i=i), "reason " + "x" * i) for i in range(500)]
    assert len(Ledger([], refused).evidence()) == MAX_ILLEGAL
