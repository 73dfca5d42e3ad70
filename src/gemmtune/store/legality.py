"""Checks that the kernels which stored Decisions and plans would serve are legal: a store may be edited or imported.

Dispatch checks this before it loads a kernel. The functions here report it without the machine of the record's Target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from .. import backends
from ..backends.base import Backend
from ..core.candidate import Candidate
from ..core.decision import Decision, Evidence
from ..core.problem import Problem
from ..core.target import Target
from ..core.tuned_plan import PlanKernel, TunedPlan
from .schema import DAMAGE

Record = TypeVar("Record", Decision, TunedPlan)


@dataclass(slots=True)
class Review:
    """Findings about one Decision or TunedPlan, one line per candidate.

    illegal: candidates that would be served although they are not legal for the Problem and the Target, or although
    they take their weight in another layout than recorded. unchecked: candidates that this installation cannot check.
    """

    illegal: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def review(target: Target, record: Decision | TunedPlan) -> Review:
    """Check all candidates that an undamaged record may serve, against the backends of this installation.

    A plan's kernels are checked for the Problem with the M (or batch) that they were tuned at.
    """
    findings = Review()
    served: Iterator[tuple[Problem, Evidence | PlanKernel]]
    if isinstance(record, TunedPlan):
        name, served = f"plan {record.plan_key}", _served_by_plan(record)
    else:
        name, served = f"decision {record.problem_key}", _served_by_decision(record)
    for problem, row in served:
        illegal, unchecked = _check(target, problem, row)
        findings.illegal += [f"{name}: {row.id} {illegal}"] if illegal else []
        findings.unchecked += [f"{name}: {row.id} {unchecked}"] if unchecked else []
    return findings


def _served_by_decision(decision: Decision) -> Iterator[tuple[Problem, Evidence]]:
    problem = Problem.from_dict(decision.problem)
    tested = {layout.candidate for layout in decision.layouts.values()}
    if "" in decision.layouts:  # its baseline may serve the raw weight, too
        tested.add(decision.layouts[""].baseline)
    served = {*decision.alternatives.values(), *tested, decision.chosen}
    for row in decision.evidence:
        if row.id in served:
            yield problem, row


def _served_by_plan(plan: TunedPlan) -> Iterator[tuple[Problem, PlanKernel]]:
    problem = Problem.from_dict(plan.problem)
    served = {interval.kernel for intervals in plan.intervals.values() for interval in intervals}
    for kernel in plan.kernels:
        if kernel.id in served:
            yield problem.with_size(plan.dim, kernel.tuned_m), kernel


def legal_only(pairs: Iterable[tuple[Target, Record]], report: Callable[[str], None]) -> list[tuple[Target, Record]]:
    """Return the records that serve legal kernels only; ``report`` is called with one line for each other one."""
    accepted = []
    for target, record in pairs:
        illegal = review(target, record).illegal
        if illegal:
            report("; ".join(illegal))
        else:
            accepted.append((target, record))
    return accepted


def _check(target: Target, problem: Problem, row: Evidence | PlanKernel) -> tuple[str, str]:
    """Return (why a candidate is illegal, why it cannot be checked); both are empty when it may serve."""
    candidate = Candidate.from_dict(row.candidate)
    if candidate.backend not in backends.names():
        return "", f"is not checked: there is no backend {candidate.backend!r} here"
    try:
        backend = backends.get(candidate.backend)
        digest = backend.source_digest()
    except (ImportError, AttributeError) as error:
        return "", f"is not checked: its backend cannot be imported here ({error})"
    try:
        illegal, unchecked = _judge(backend, target, problem, candidate, row.packing)
    except (*DAMAGE, LookupError, ArithmeticError, RuntimeError) as error:
        illegal, unchecked = f"cannot be judged ({type(error).__name__}: {error})", ""
    if illegal and dict(target.sources).get(candidate.backend) != digest:
        return "", f"is not checked: another version of its backend made it, and this one says that it {illegal}"
    return illegal, unchecked


def _judge(
    backend: Backend, target: Target, problem: Problem, candidate: Candidate, packing: str | None
) -> tuple[str, str]:
    reason = backend.why_family_unsupported(problem) or backend.why_illegal(problem, candidate, target)
    if reason:
        return f"is not legal for it on {target.name}: {reason}", ""
    try:
        required = backend.packing_of(problem, candidate)
    except NotImplementedError:
        return "", "is not checked: only its loaded kernel tells which layout it wants its weight in"
    if required == packing:
        return "", ""
    return f"wants its weight {_describe_packing(required)}, and the record says {_describe_packing(packing)}", ""


def _describe_packing(packing: str | None) -> str:
    return "as it is" if packing is None else f"packed as {packing!r}"
