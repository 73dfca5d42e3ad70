"""Whether what a stored Decision would serve is legal: records may come from an edited or an imported store.

Dispatch checks the same before it loads a kernel. Here it is reported, without the machine that a record is for.
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
    """Findings on one Decision, a line each.

    illegal: candidates that would be served and are not legal for the Problem and the Target, or that want their
    weight in another layout than recorded. unchecked: candidates of which this installation cannot tell.
    """

    illegal: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def review(target: Target, decision: Decision) -> Review:
    """Check every candidate of a sound Decision that may be served, against the backends of this installation."""
    found = Review()
    problem = Problem.from_dict(decision.problem)
    duelled = {layout.candidate for layout in decision.layouts.values()}
    served = {*decision.alternatives.values(), *duelled, decision.chosen}
    for row in decision.evidence:
        if row.id in served:
            illegal, unchecked = _check(target, problem, row)
            where = f"decision {decision.problem_key}: {row.id}"
            found.illegal += [f"{where} {illegal}"] if illegal else []
            found.unchecked += [f"{where} {unchecked}"] if unchecked else []
    return found


def legal_only(
    pairs: Iterable[tuple[Target, Decision]], report: Callable[[str], None]
) -> list[tuple[Target, Decision]]:
    """Return the Decisions without those that would serve what is not legal, each of which is reported."""
    kept = []
    for target, decision in pairs:
        illegal = review(target, decision).illegal
        if illegal:
            report("; ".join(illegal))
        else:
            kept.append((target, decision))
    return kept


def _check(target: Target, problem: Problem, row: Evidence) -> tuple[str, str]:
    """(what is illegal, what cannot be checked) of one candidate; both empty when it may serve."""
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
    reason = backend.why_illegal(problem, candidate, target)
    if reason:
        return f"is not legal for it on {target.name}: {reason}", ""
    try:
        wanted = backend.packing_of(problem, candidate)
    except NotImplementedError:
        return "", "is not checked: only its loaded kernel tells which layout it wants its weight in"
    if wanted == packing:
        return "", ""
    return f"wants its weight {_words(wanted)}, and the record says {_words(packing)}", ""


def _words(packing: str | None) -> str:
    return "as it is" if packing is None else f"packed as {packing!r}"
