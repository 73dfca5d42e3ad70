"""The candidates of a Problem: asked of every backend, ATen's first, then the others in turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest

from .. import backends
from ..core.candidate import Candidate, Illegal
from ..core.problem import Problem
from ..core.target import Target

BASELINE_BACKEND = "aten"

# A backend that lists more is cut there: it yields the most promising first, and no budget reaches further.
MAX_PER_BACKEND = 5000


def enumerate_candidates(
    problem: Problem, target: Target, backend_names: Sequence[str]
) -> tuple[list[Candidate], list[Illegal]]:
    """Every legal candidate, without duplicates, and the illegal ones with their reasons.

    ATen's come first, all of them (they are what everything else has to beat); then the others' round-robin, each
    backend's most promising first. A backend that is unavailable, or that fails while it lists, is one Illegal with
    template ``*``: it costs its own candidates only. Raises ValueError for an unknown backend name.
    """
    legal: dict[str, list[Candidate]] = {}
    illegal: list[Illegal] = []
    for name in dict.fromkeys(backend_names):
        legal[name], refused = _of_backend(name, problem, target)
        illegal += refused
    first = legal.pop(BASELINE_BACKEND, [])
    return list(_distinct(chain(first, _round_robin(legal.values())))), illegal


def _of_backend(name: str, problem: Problem, target: Target) -> tuple[list[Candidate], list[Illegal]]:
    backend = backends.get(name)
    legal: list[Candidate] = []
    illegal: list[Illegal] = []
    try:
        available = backend.available(target)
        if not available:
            return [], [Illegal(Candidate.make(name, "*"), f"backend unavailable: {available.reason}")]
        for item in backend.candidates(problem, target):
            if isinstance(item, Illegal):
                illegal.append(item)
            elif len(legal) < MAX_PER_BACKEND:
                legal.append(item)
    except Exception as error:  # a broken backend must not cost the others their turn
        reason = f"listing the candidates failed: {type(error).__name__}: {error}"
        illegal.append(Illegal(Candidate.make(name, "*"), reason))
    return legal, illegal


def _round_robin(lists: Iterable[list[Candidate]]) -> Iterator[Candidate]:
    for row in zip_longest(*lists):
        yield from (item for item in row if item is not None)


def _distinct(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    return iter({candidate.id: candidate for candidate in candidates}.values())
