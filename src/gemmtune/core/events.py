"""Progress events of the tuner, as plain data in chronological order, for the CLI and for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .decision import Decision, Verdict
    from .problem import Dim, Problem
    from .tuned_plan import TunedPlan


@dataclass(frozen=True, slots=True)
class ProblemStarted:
    """The start of tuning one Problem. index: counted from 0. cached: whether the store already has its decision."""

    index: int
    total: int
    problem: Problem
    cached: bool = False


@dataclass(frozen=True, slots=True)
class CandidateTried:
    """The end of one candidate's trial: it was built, timed and, unless it was too slow, verified.

    verdict: None for a candidate that was too slow. left: number of candidates still to try for this problem.
    """

    candidate_id: str
    verdict: Verdict | None
    median_s: float | None
    left: int


@dataclass(frozen=True, slots=True)
class BestSoFar:
    """The fastest candidate so far. ratio: the paired ratio of its time to ATen's (< 1 is faster)."""

    candidate_id: str
    median_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class ProblemDone:
    """The end of tuning one Problem, whose decision is stored.

    remaining_s: estimated seconds for the remaining Problems; None when unknown.
    """

    index: int
    total: int
    decision: Decision
    remaining_s: float | None


@dataclass(frozen=True, slots=True)
class DecisionsUnstored:
    """A change of the number of decisions for one Target that the store could not take. error: why, for the last."""

    target_key: str
    count: int
    error: str


@dataclass(frozen=True, slots=True)
class PlanProgress:
    """The progress of timing a weight's kernels at other M. measured: number of M. remaining_s: seconds that it may
    still take. dim: "batch" where these are batches."""

    plan_key: str
    measured: int
    remaining_s: float
    dim: Dim = "m"


@dataclass(frozen=True, slots=True)
class PlanDone:
    """The end of tuning one weight over a range of M. plan: stored; None when only ATen's kernels serve it. remaining:
    number of weights that are still to come."""

    plan_key: str
    plan: TunedPlan | None
    remaining: int


Event = ProblemStarted | CandidateTried | BestSoFar | ProblemDone | DecisionsUnstored | PlanProgress | PlanDone
Progress = Callable[[Event], None]


def silent(event: Event) -> None:
    """Ignore a progress event."""


class EventsInOrder:
    """The events of several Problems that are tuned in turns, passed on as if one were tuned after another: those of a
    Problem wait until the ones before it have ended. progress: what they are passed to."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._current = 0  # the first Problem that has not ended
        self._ended: set[int] = set()
        self._waiting: dict[int, list[Event]] = {}

    def of(self, index: int) -> Progress:
        """Return what the Problem at an index, counted from 0, reports to."""

        def report(event: Event) -> None:
            if index == self._current:
                self._progress(event)
            else:
                self._waiting.setdefault(index, []).append(event)

        return report

    def end(self, index: int) -> None:
        """Pass on what waited for the end of the Problem at an index."""
        self._ended.add(index)
        while self._current in self._ended:
            self._ended.discard(self._current)
            self._current += 1
            for event in self._waiting.pop(self._current, ()):
                self._progress(event)
