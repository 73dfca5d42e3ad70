"""Factories of synthetic Targets, Samples, Decisions and plans."""

from __future__ import annotations

from gemmtune.backends.aten import AtenBackend
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision, Evidence, Sample, Verdict
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.core.tuned_plan import PlanInterval, PlanKernel, TunedPlan
from gemmtune.core.workloads import build

ATEN = Candidate.make("aten", "linear")
NATIVE = Candidate.make("native", "gemm", isa="avx512", mr=6, nr=64)
SLOW = Candidate.make("native", "gemm", isa="avx2", mr=4, nr=16)
WRONG = Candidate.make("native", "gemm", isa="avx512", mr=1, nr=16)
ILLEGAL = Candidate.make("native", "gemm", isa="amx", mr=16, nr=32)


def make_target(threads: int = 2, name: str = "Test CPU <x>") -> Target:
    """Return the Target of a fictitious CPU. Its name needs escaping in HTML."""
    return Target(
        device="cpu",
        name=name,
        capability="x86_64",
        isa=("avx2", "avx512f"),
        caches=(32768, 1 << 20, 32 << 20),
        threads=threads,
        cores=2,
        memory=8 << 30,
        versions=(("torch", "2.13.0"),),
        sources=(("aten", "a1"), ("native", "b2")),
    )


def make_sample(median_s: float, ratio: float = 1.0) -> Sample:
    return Sample(
        median_s=median_s,
        lo_s=median_s * 0.98,
        hi_s=median_s * 1.03,
        rounds=50,
        ratio=ratio,
        ratio_lo=ratio * 0.98,
        ratio_hi=ratio * 1.02,
        times=(median_s,) * 3,
    )


def make_evidence(
    candidate: Candidate,
    stage: str,
    seconds: float | None = None,
    *,
    ratio: float = 1.0,
    reason: str = "",
    **more: object,
) -> Evidence:
    verdict = None if stage in ("illegal", "untried") else Verdict("within_bound", worst=0.2)
    fields = {
        "candidate": candidate.to_dict(),
        "id": candidate.id,
        "stage": stage,
        "reason": reason,
        "verdict": verdict,
        "sample": None if seconds is None else make_sample(seconds, ratio),
        **more,
    }
    return Evidence(**fields)  # type: ignore[arg-type]


def make_decision(
    problem: Problem | None = None, outcome: str = "winner", target: Target | None = None, aten_s: float = 2e-3
) -> Decision:
    """Return a Decision with the outcome winner, tie or none_valid. A winner is a native candidate with half of ATen's
    time."""
    problem = problem or build(16, 4096, 4096, "bf16")
    target = target or make_target()
    is_winner = outcome == "winner"
    wrong = Verdict("wrong", "element [3, <b>7</b>] is off by 12.5 times the bound", worst=12.5)
    if outcome == "none_valid":
        evidence = [make_evidence(candidate, "failed", verdict=wrong, reason="wrong") for candidate in (ATEN, WRONG)]
    else:
        evidence = [
            make_evidence(ATEN, "finalist" if is_winner else "winner", aten_s),
            make_evidence(
                NATIVE,
                "winner" if is_winner else "finalist",
                aten_s / 2 if is_winner else aten_s,
                ratio=0.5 if is_winner else 1.0,
            ),
            make_evidence(SLOW, "eliminated", aten_s * 2, ratio=2.0, reason="2.0x slower than the best after 3 rounds"),
            make_evidence(WRONG, "failed", verdict=wrong, reason="wrong"),
        ]
    evidence.append(make_evidence(ILLEGAL, "illegal", reason="this CPU has no AMX"))
    chosen = {"winner": NATIVE.id, "tie": ATEN.id, "none_valid": None}[outcome]
    return Decision(
        problem_key=problem.key,
        problem=problem.to_dict(),
        target_key=target.key,
        outcome=outcome,  # type: ignore[arg-type]
        chosen=chosen,
        evidence=tuple(evidence),
        alternatives={} if chosen is None else {"": ATEN.id},
        stopped="the duel was decided after 50 pairs",
        seconds=4.2,
        created=1_760_000_000.0,
    )


def make_legal_decision(problem: Problem, target: Target) -> Decision:
    """Return a Decision with the outcome tie, whose candidate the ATen backend lists for the problem."""
    candidate = _legal_candidate(problem, target)
    row = make_evidence(candidate, "winner", 2e-3)
    return Decision(
        problem.key,
        problem.to_dict(),
        target.key,
        "tie",
        candidate.id,
        (row,),
        {"": candidate.id},
        created=1_760_000_000.0,
    )


def make_legal_plan(problem: Problem, target: Target) -> TunedPlan:
    """Return a plan for M from 1 to 64, whose one kernel the ATen backend lists for the problem."""
    return make_plan(problem, target, _legal_candidate(problem, target))


def make_plan(problem: Problem, target: Target, candidate: Candidate, packing: str | None = None) -> TunedPlan:
    """Return a plan for M from 1 to 64 that one kernel serves in one layout; it was tuned at the problem's M."""
    times = {1: 1e-3, 64: 2e-3}
    kernel = PlanKernel(
        candidate.to_dict(), candidate.id, problem.m, packing, True, times, (1, 64), Verdict("within_bound", worst=0.2)
    )
    intervals = {packing or "": (PlanInterval(1, 64, candidate.id),)}
    return TunedPlan(
        problem.plan_key, problem.to_dict(), target.key, 1, 64, intervals, (kernel,), created=1_760_000_000.0
    )


def _legal_candidate(problem: Problem, target: Target) -> Candidate:
    """Return the first candidate that the ATen backend lists for the problem."""
    return next(item for item in AtenBackend().candidates(problem, target) if isinstance(item, Candidate))
