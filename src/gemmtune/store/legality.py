"""Checks that the kernels which stored Decisions would serve are legal: a store may have been edited or imported.

Dispatch checks this before it loads a kernel. The functions here report it without the machine of the record's Target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .. import backends
from ..backends.base import Backend
from ..core.candidate import Candidate
from ..core.decision import Decision, Evidence
from ..core.problem import Problem
from ..core.target import Target
from .schema import DAMAGE


@dataclass(slots=True)
class Review:
    """Findings about one Decision, one line per candidate.

    illegal: candidates that would be served although they are not legal for the Problem and the Target, or although
    they take their weight in another layout than recorded. unchecked: candidates that this installation cannot check.
    """

    illegal: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def review(target: Target, decision: Decision) -> Review:
    """Check all candidates that an undamaged Decision may serve, against the backends of this installation."""
    findings = Review()
    problem = Problem.from_dict(decision.problem)
    tested = {layout.candidate for layout in decision.layouts.values()}
    served = {*decision.alternatives.values(), *tested, decision.chosen}
    for row in decision.evidence:
        if row.id in served:
            illegal, unchecked = _check(target, problem, row)
            where = f"decision {decision.problem_key}: {row.id}"
            findings.illegal += [f"{where} {illegal}"] if illegal else []
            findings.unchecked += [f"{where} {unchecked}"] if unchecked else []
    return findings


def legal_only(
    pairs: Iterable[tuple[Target, Decision]], report: Callable[[str], None]
) -> list[tuple[Target, Decision]]:
    """Return the Decisions that serve legal kernels only; ``report`` is called with one line for each other one."""
    accepted = []
    for target, decision in pairs:
        illegal = review(target, decision).illegal
        if illegal:
            report("; ".join(illegal))
        else:
            accepted.append((target, decision))
    return accepted


def _check(target: Target, problem: Problem, row: Evidence) -> tuple[str, str]:
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
