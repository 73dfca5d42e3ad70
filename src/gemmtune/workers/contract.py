"""What every measurement worker offers, and what it raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from ..core.candidate import Candidate
from ..core.decision import Verdict
from ..core.errors import WorkerError
from ..core.problem import Dim, Problem
from ..timing.outcome import LeaderUpdate, RaceResult
from ..timing.size_sweep import SizesTimed
from .protocol import Attempted, Confirmed, Failed, Reply, SizedCandidate, SizesVerified

Progress = Callable[[LeaderUpdate], None]
R = TypeVar("R")
OPERAND_MULTIPLE = 16  # of a problem's operands: what a worker may allocate for it, besides a fixed number of bytes


def path_or_none(path: Path | None) -> str | None:
    """Return a path as text for a message; None for None."""
    return None if path is None else str(path)


def ignore(leading: LeaderUpdate) -> None:
    """Ignore a progress message: the default callback."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits of a worker in seconds, and its memory limit in bytes.

    start_s: from spawning to being ready. open_s: preparing operands and oracle. try_s: one candidate's build, load,
    packing, checking and screening time. race_slack_s: added to twice a race's budget. silence_s: without a heartbeat
    before the worker is killed, even when it computes; a third of it for a worker that computes nothing, two seconds
    for one that is stopped. A native call may hold the interpreter's lock, and with it the heartbeat, for its whole
    run, which may be longer than any useful single call. memory: bytes beyond those of a fresh worker, on a GPU of
    device memory; 0 chooses 16 times the operands plus 4 GiB (a GPU: 16 GiB; candidates that dequantise up front are
    legal).
    """

    start_s: float = 60.0
    open_s: float = 120.0
    try_s: float = 20.0
    race_slack_s: float = 10.0
    silence_s: float = 30.0
    memory: int = 0


class WorkerLost(WorkerError):
    """The loss of a worker, which died or was killed over a deadline. ``candidate_id``: the candidate that it was
    working on, if any."""

    def __init__(self, verdict: Verdict, candidate_id: str | None) -> None:
        super().__init__(f"the worker was lost: {verdict.kind}: {verdict.detail}")
        self.verdict, self.candidate_id = verdict, candidate_id


class Declined(WorkerError):
    """The reply of a living worker that it cannot carry out the request."""


class UnexpectedReply(WorkerError):
    """A well-formed reply of the worker to another request."""


class WorkerStartError(WorkerError):
    """The failure to start any worker on this machine: a fault of the environment, not of a candidate or a problem."""


class MeasurementWorker(Protocol):
    """A measurement worker: it opens a problem, and attempts, confirms and races candidates for a tuner."""

    def start(self) -> None: ...

    def wait(self) -> None: ...

    def open(self, problem: Problem, seed: int) -> None: ...

    def pause(self) -> None: ...

    def resume(self, problem: Problem) -> None: ...

    def attempt(
        self, candidate: Candidate, deadline_s: float | None = None, cutoff_s: float | None = None
    ) -> Attempted: ...

    def confirm(self, candidate: Candidate, deadline_s: float | None = None) -> Confirmed: ...

    def race(
        self,
        candidates: Sequence[Candidate],
        budget_s: float,
        seed: int,
        progress: Progress = ignore,
        hot: bool = False,
        earlier_s: Mapping[str, float] = {},
    ) -> RaceResult: ...

    def time_sizes(
        self,
        candidates: Sequence[SizedCandidate],
        sizes: Mapping[int, Sequence[int]],
        last: int,
        budget_s: float,
        seed: int,
        hot: bool = False,
        load_s: float = 0.0,
        dim: Dim = "m",
    ) -> SizesTimed: ...

    def verify_sizes(self, item: SizedCandidate, sizes: Sequence[int], dim: Dim = "m") -> SizesVerified: ...

    def library_algorithms(self, item: SizedCandidate, sizes: Sequence[int]) -> dict[int, str]: ...

    def close(self) -> None: ...


def expect(reply: Reply, reply_type: type[R]) -> R:
    """Return the reply if it is of the given type.

    Raises Declined when the worker replied that it cannot carry out the request, UnexpectedReply for any other reply.
    """
    if isinstance(reply, reply_type):
        return reply
    if isinstance(reply, Failed):
        raise Declined(f"the worker could not do it: {reply.detail}")
    raise UnexpectedReply(f"the worker answered {type(reply).__name__} where {reply_type.__name__} was expected")
