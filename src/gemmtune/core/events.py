"""What the tuner tells whoever is watching (CLI progress, tests). Plain data, in the order it happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .decision import Decision, Verdict
    from .problem import Problem


@dataclass(frozen=True, slots=True)
class ProblemStarted:
    """Tuning of one Problem begins. index counts from 0; cached: the store already had the answer."""

    index: int
    total: int
    problem: Problem
    cached: bool = False


@dataclass(frozen=True, slots=True)
class CandidateTried:
    """One candidate was built, timed and, unless it was too slow to be worth it (verdict None), checked.

    left: candidates still to try for this problem.
    """

    candidate_id: str
    verdict: Verdict | None
    median_s: float | None
    left: int


@dataclass(frozen=True, slots=True)
class BestSoFar:
    """The leader of the race, its time in seconds and its paired time ratio over ATen's (< 1 is faster)."""

    candidate_id: str
    median_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class ProblemDone:
    """One Problem is decided (and stored). remaining_s: estimate for the rest of the run, None when unknown."""

    index: int
    total: int
    decision: Decision
    remaining_s: float | None


Event = ProblemStarted | CandidateTried | BestSoFar | ProblemDone
Progress = Callable[[Event], None]


def silent(event: Event) -> None:
    """The progress that shows nothing."""
