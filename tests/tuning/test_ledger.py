"""Ledger: the best candidates, alternatives, and the bounded evidence of a decision."""

from __future__ import annotations

import msgspec
import pytest

from gemmtune.core.candidate import Candidate, Illegal
from gemmtune.core.decision import Sample, Verdict
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


def test_best_row_is_among_the_asked_for_alone(ledger: Ledger) -> None:
    assert ledger.best(is_baseline=False) is ledger[FAST.id]
    ledger[ATEN.id].eligible = ledger[FAST.id].eligible = False
    assert ledger.best(eligible=True) is ledger[SLOW.id]
    assert ledger.best(is_baseline=True, eligible=True) is None
    assert ledger.best(is_baseline=True) is ledger[ATEN.id]


def test_rows_without_times_are_not_timed() -> None:
    ledger = Ledger([ATEN, FAST], [])
    ledger[FAST.id].times_s = (1.0,)
    assert ledger.timed() == [ledger[FAST.id]]
    assert ledger.rows() == [ledger[ATEN.id], ledger[FAST.id]]
    assert ledger[ATEN.id].screening_s == float("inf")
    assert (ledger[ATEN.id].is_baseline, ledger[FAST.id].is_baseline) == (True, False)


def test_reason_of_a_failure_may_be_another_than_the_verdicts(ledger: Ledger) -> None:
    ledger.fail(FAST.id, Verdict("wrong", "one element"), "not tried again")
    assert (ledger[FAST.id].reason, ledger[FAST.id].eligible) == ("not tried again", False)


def test_sample_of_a_race_is_kept_and_has_the_packing_time(ledger: Ledger) -> None:
    raced = Sample(0.5, 0.4, 0.6, 50, 0.25)
    ledger[FAST.id].sample, ledger[FAST.id].packing_s, ledger[SLOW.id].packing_s = raced, 0.125, 0.0625
    samples = {row.id: row.sample for row in ledger.evidence()}
    assert samples[FAST.id] == msgspec.structs.replace(raced, packing_s=0.125)
    assert samples[SLOW.id] is not None
    assert samples[SLOW.id].packing_s == 0.0625


def test_samples_of_the_best_baseline_have_a_ratio_of_one(ledger: Ledger) -> None:
    sample = next(row.sample for row in ledger.evidence() if row.id == ATEN.id)
    assert sample is not None
    assert (sample.ratio, sample.ratio_lo, sample.ratio_hi) == (1.0, 1.0, 1.0)
    alone = Ledger([FAST], [])
    alone[FAST.id].stage, alone[FAST.id].times_s = "screened", (1.0, 2.0)
    (row,) = alone.evidence()
    assert row.sample is not None
    assert (row.sample.ratio, row.sample.ratio_lo, row.sample.ratio_hi) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("verdict", "eligible", "expected"),
    [
        (Verdict("exact"), False, Verdict("exact", ONE_DRAW)),
        (Verdict("exact", "a detail"), False, Verdict("exact", "a detail")),
        (Verdict("exact"), True, Verdict("exact")),
        (Verdict("wrong"), False, Verdict("wrong")),
        (None, False, None),
    ],
)
def test_only_a_passed_check_that_was_not_completed_says_so(
    ledger: Ledger, verdict: Verdict | None, eligible: bool, expected: Verdict | None
) -> None:
    ledger[FAST.id].verdict, ledger[FAST.id].eligible = verdict, eligible
    assert next(row.verdict for row in ledger.evidence() if row.id == FAST.id) == expected


def test_illegal_candidates_of_one_id_are_listed_once_and_not_beside_a_legal_one() -> None:
    illegal = [Illegal(FAST, "no"), Illegal(FAST, "no way"), Illegal(ATEN, "never")]
    rows = Ledger([ATEN], illegal).evidence()
    assert [(row.id, row.stage, row.reason) for row in rows] == [
        (ATEN.id, "untried", ""), (FAST.id, "illegal", "no way")
    ]  # fmt: skip


def test_reasons_of_other_backends_and_other_words_are_kept_apart() -> None:
    illegal = [
        Illegal(Candidate.make(backend, word, i=i), f"{word} {i}")
        for backend in ("x", "y") for word in ("wide", "deep") for i in range(MAX_PER_REASON)
    ]  # fmt: skip
    rows = Ledger([], [*illegal, Illegal(Candidate.make("x", "deep", i=9), "deep 9")]).evidence()
    assert len(rows) == 4 * MAX_PER_REASON
    assert [row.reason for row in rows if "more like it" in row.reason] == ["deep 3 (and 1 more like it)"]


def test_untried_candidates_of_each_template_are_kept_apart() -> None:
    candidates = [
        Candidate.make(backend, template, i=i)
        for backend in ("x", "y") for template in ("s", "t") for i in range(MAX_UNTRIED)
    ]  # fmt: skip
    rows = Ledger(candidates, []).evidence()
    assert [row.id for row in rows] == [candidate.id for candidate in candidates]
    assert {row.reason for row in rows} == {""}
