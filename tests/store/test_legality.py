"""Legality of the kernels in a store: legal, illegal, or impossible to check with this installation."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from gemmtune import backends
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.core.tuned_plan import PlanKernel, TunedPlan
from gemmtune.core.workloads import build
from gemmtune.store.legality import legal_only, review
from helpers.factories import make_evidence, make_legal_decision, make_legal_plan, make_plan, make_target

PROBLEM = build(16, 64, 64, "fp32")
TARGET = replace(make_target(), sources=(("aten", backends.get("aten").source_digest()),))
LEGAL = make_legal_decision(PROBLEM, TARGET)


def decision_of(candidate: Candidate, packing: str | None = None) -> Decision:
    row = make_evidence(candidate, "winner", 2e-3, packing=packing)
    return msgspec.structs.replace(
        LEGAL, chosen=candidate.id, evidence=(row,), alternatives={packing or "": candidate.id}
    )


def findings(decision: Decision | TunedPlan, target: Target = TARGET) -> tuple[list[str], list[str]]:
    result = review(target, decision)
    return result.illegal, result.unchecked


def test_legal_kernel_has_no_finding() -> None:
    assert findings(LEGAL) == ([], [])


def test_kernel_of_an_absent_backend_is_unchecked() -> None:
    illegal, unchecked = findings(decision_of(Candidate.make("absent", "mm")))
    assert illegal == []
    assert [line.partition(": ")[2] for line in unchecked] == [
        "absent/mm is not checked: there is no backend 'absent' here"
    ]


def test_kernel_that_its_backend_refuses_is_illegal() -> None:
    illegal, unchecked = findings(decision_of(Candidate.make("aten", "bmm")))
    assert unchecked == []
    assert len(illegal) == 1
    assert "aten/bmm is not legal for it on Test CPU <x>: " in illegal[0]


def test_kernel_of_another_version_of_its_backend_is_unchecked() -> None:
    illegal, unchecked = findings(decision_of(Candidate.make("aten", "bmm")), replace(TARGET, sources=(("aten", "x"),)))
    assert illegal == []
    assert len(unchecked) == 1
    assert "is not checked: another version of its backend made it" in unchecked[0]


def test_layout_that_the_kernel_does_not_take_is_illegal() -> None:
    candidate = Candidate.from_dict(LEGAL.evidence[0].candidate)
    illegal, _ = findings(decision_of(candidate, packing="native:k1/float32/nr48"))
    assert len(illegal) == 1
    assert "wants its weight as it is, and the record says packed as 'native:k1/float32/nr48'" in illegal[0]


def test_decisions_with_an_illegal_kernel_are_reported_and_excluded() -> None:
    reports: list[str] = []
    illegal = decision_of(Candidate.make("aten", "bmm"))
    assert legal_only([(TARGET, LEGAL), (TARGET, illegal)], reports.append) == [(TARGET, LEGAL)]
    assert len(reports) == 1
    assert "aten/bmm is not legal" in reports[0]


LEGAL_PLAN = make_legal_plan(PROBLEM, TARGET)
ILLEGAL_PLAN = make_plan(PROBLEM, TARGET, Candidate.make("aten", "bmm"))


def test_plan_of_a_legal_kernel_has_no_finding() -> None:
    assert findings(LEGAL_PLAN) == ([], [])


def test_serving_kernel_of_a_plan_that_its_backend_refuses_is_illegal() -> None:
    (line,), unchecked = findings(ILLEGAL_PLAN)
    assert unchecked == []
    assert line.startswith(f"plan {PROBLEM.plan_key}: aten/bmm is not legal for it on Test CPU <x>: ")


def test_kernel_of_a_plan_that_does_not_serve_is_not_checked() -> None:
    other = PlanKernel(Candidate.make("aten", "bmm").to_dict(), "aten/bmm", 16)
    plan = msgspec.structs.replace(LEGAL_PLAN, kernels=(*LEGAL_PLAN.kernels, other))
    assert findings(plan) == ([], [])


def test_layout_that_the_kernel_of_a_plan_does_not_take_is_illegal() -> None:
    candidate = Candidate.from_dict(LEGAL_PLAN.kernels[0].candidate)
    (line,), _ = findings(make_plan(PROBLEM, TARGET, candidate, packing="native:k1/float32/nr48"))
    assert "wants its weight as it is, and the record says packed as 'native:k1/float32/nr48'" in line


def test_kernel_of_a_plan_is_judged_at_the_m_it_was_tuned_at(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[int] = []
    aten = backends.get("aten")
    original = aten.why_illegal

    def why_illegal(problem: Problem, candidate: Candidate, target: Target) -> str | None:
        judged.append(problem.m)
        return original(problem, candidate, target)

    monkeypatch.setattr(aten, "why_illegal", why_illegal)
    kernel = msgspec.structs.replace(LEGAL_PLAN.kernels[0], tuned_m=48)
    assert findings(msgspec.structs.replace(LEGAL_PLAN, kernels=(kernel,))) == ([], [])
    assert judged == [48]


def test_plans_with_an_illegal_kernel_are_reported_and_excluded() -> None:
    reports: list[str] = []
    assert legal_only([(TARGET, ILLEGAL_PLAN), (TARGET, LEGAL_PLAN)], reports.append) == [(TARGET, LEGAL_PLAN)]
    assert len(reports) == 1
    assert "aten/bmm is not legal" in reports[0]
