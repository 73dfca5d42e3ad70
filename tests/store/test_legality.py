"""Legality of the kernels in a store: legal, illegal, or impossible to check with this installation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from gemmtune import backends
from gemmtune.backends.base import Artifact, Availability, Backend, Kernel
from gemmtune.core.candidate import Candidate, Illegal
from gemmtune.core.decision import Decision, LayoutDecision
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


def test_baseline_of_the_raw_layout_is_checked_since_it_may_serve() -> None:
    illegal = make_evidence(Candidate.make("aten", "bmm"), "finalist", 2e-3)
    test = LayoutDecision("tie", LEGAL.evidence[0].id, illegal.id, 1.0, 0.9, 1.1)
    decision = msgspec.structs.replace(LEGAL, evidence=(*LEGAL.evidence, illegal), layouts={"": test})
    assert "aten/bmm is not legal for it" in findings(decision)[0][0]


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


def test_only_kernels_that_may_be_served_are_checked() -> None:
    absent = Candidate.make("absent", "mm")
    row = make_evidence(absent, "finalist", 2e-3)
    seen = msgspec.structs.replace(LEGAL, evidence=(*LEGAL.evidence, row))
    assert findings(seen) == ([], [])
    tested = LayoutDecision("winner", absent.id, LEGAL.evidence[0].id, 0.5, 0.4, 0.6)
    for change in ({"chosen": absent.id}, {"alternatives": {"": absent.id}}, {"layouts": {"": tested}}):
        assert len(findings(msgspec.structs.replace(seen, **change))[1]) == 1


class Odd(Backend):
    """Backend whose methods fail in the way that ``fault`` says."""

    name = "odd"
    fault = ""

    def available(self, target: Target) -> Availability:
        return Availability(True)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        yield Candidate.make("odd", "mm")

    def why_illegal(self, problem: Problem, candidate: Candidate, target: Target) -> str:
        if self.fault == "raises":
            raise LookupError("no such entry")
        return "too wide" if self.fault == "illegal" else ""

    def packing_of(self, problem: Problem, candidate: Candidate) -> str | None:
        if self.fault == "loaded":
            raise NotImplementedError
        return "odd:p"

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        raise NotImplementedError

    def source_digest(self) -> str:
        if self.fault == "imports":
            raise ImportError("no module odd")
        return "odd1"


@pytest.mark.parametrize(
    ("fault", "digest", "illegal", "unchecked"),
    [
        ("", "odd1", "", ""),
        ("illegal", "odd1", "is not legal for it on Test CPU <x>: too wide", ""),
        ("illegal", "odd0", "", "is not checked: another version of its backend made it, and this one says that it is"),
        ("raises", "odd1", "cannot be judged (LookupError: no such entry)", ""),
        ("raises", "odd0", "", "is not checked: another version of its backend made it, and this one says that it can"),
        ("loaded", "odd1", "", "is not checked: only its loaded kernel tells which layout it wants its weight in"),
        ("imports", "odd1", "", "is not checked: its backend cannot be imported here (no module odd)"),
    ],
)
def test_kernel_of_a_plug_in_is_judged_by_its_backend(
    fault: str, digest: str, illegal: str, unchecked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends.register("odd", f"{__name__}:Odd")
    monkeypatch.setattr(Odd, "fault", fault)
    try:
        decision = decision_of(Candidate.make("odd", "mm"), packing="odd:p")
        result = findings(decision, replace(TARGET, sources=(("odd", digest),)))
    finally:
        backends._PLUGINS.pop("odd")
        backends.get.cache_clear()
    prefix = f"decision {PROBLEM.key}: odd/mm "
    for lines, text in zip(result, (illegal, unchecked), strict=True):
        assert len(lines) == bool(text)
        assert all(line.startswith(prefix + text) for line in lines)


def test_raw_weight_is_not_the_layout_that_a_packed_kernel_wants() -> None:
    backends.register("odd", f"{__name__}:Odd")
    try:
        illegal, _ = findings(decision_of(Candidate.make("odd", "mm")), replace(TARGET, sources=(("odd", "odd1"),)))
    finally:
        backends._PLUGINS.pop("odd")
        backends.get.cache_clear()
    assert illegal[0].endswith("wants its weight packed as 'odd:p', and the record says as it is")
