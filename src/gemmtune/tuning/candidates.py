"""The candidates of a Problem, listed by every backend: ATen's first, then the others in turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest

from .. import backends
from ..core.candidate import Candidate, Illegal
from ..core.problem import Problem
from ..core.target import Target

BASELINE_BACKEND = "aten"

# A longer list is cut off: a backend yields its most promising candidates first, and no budget reaches further.
MAX_PER_BACKEND = 5000


def enumerate_candidates(
    problem: Problem, target: Target, backend_names: Sequence[str]
) -> tuple[list[Candidate], list[Illegal]]:
    """Return every legal candidate, without duplicates, and the illegal ones with their reasons.

    All of ATen's candidates come first (they are the baselines that others have to beat), then those of the other
    backends round-robin, each backend's most promising first. A backend that is unavailable, or that fails while it
    lists, is one Illegal with template ``*``: it loses its own candidates only. Raises ValueError for an unknown
    backend name.
    """
    legal: dict[str, list[Candidate]] = {}
    illegal: list[Illegal] = []
    for name in dict.fromkeys(backend_names):
        legal[name], backend_illegal = _backend_candidates(name, problem, target)
        illegal += backend_illegal
    baselines = legal.pop(BASELINE_BACKEND, [])
    distinct = {candidate.id: candidate for candidate in chain(baselines, _round_robin(legal.values()))}
    return list(distinct.values()), illegal


def _backend_candidates(name: str, problem: Problem, target: Target) -> tuple[list[Candidate], list[Illegal]]:
    backend = backends.get(name)
    legal: list[Candidate] = []
    illegal: list[Illegal] = []
    try:
        available = backend.available(target)
        if not available:
            return [], [Illegal(Candidate.make(name, "*"), f"backend unavailable: {available.reason}")]
        if reason := backend.why_family_unsupported(problem):
            return [], [Illegal(Candidate.make(name, "*"), reason)]
        for item in backend.candidates(problem, target):
            if isinstance(item, Illegal):
                illegal.append(item)
            elif len(legal) < MAX_PER_BACKEND:
                legal.append(item)
    except Exception as error:  # a broken backend must not exclude the others
        reason = f"listing the candidates failed: {type(error).__name__}: {error}"
        illegal.append(Illegal(Candidate.make(name, "*"), reason))
    return legal, illegal


def _round_robin(lists: Iterable[list[Candidate]]) -> Iterator[Candidate]:
    for row in zip_longest(*lists):
        yield from (item for item in row if item is not None)
