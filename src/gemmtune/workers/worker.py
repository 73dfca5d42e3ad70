"""The parent's side of a worker: a process that may crash or hang, and costs only the candidate it had in hand.

``Worker`` and ``LocalWorker`` answer the same calls; the second does the work in this process (tests, debugging),
where a crash is a crash.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from .. import backends
from ..core.candidate import Candidate
from ..core.decision import Verdict
from ..core.errors import WorkerError
from ..core.problem import Problem
from ..core.target import Target
from ..timing.clock import Latency
from ..timing.outcome import Leading, Raced
from ..verify.inputs import operand_bytes
from .process import Host, Lost, Process
from .protocol import Attempt, Attempted, Confirm, Confirmed, Failed, Open, Race, Ready, Reply, Request, Setup

Progress = Callable[[Leading], None]
R = TypeVar("R")
Judged = TypeVar("Judged", Attempted, Confirmed)

_OPERANDS, _SPARE, _GPU_SPARE = 16, 4 << 30, 16 << 30  # a GPU's oracle is float64 throughout, in large blocks
_DAMAGING = ("crashed", "out_of_memory")  # verdicts of candidates that may have taken the process with them


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def ignore(leading: Leading) -> None:
    """The progress that nobody watches."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a worker may take, in seconds, and what it may allocate.

    start_s: from spawning to being ready. open_s: making operands and oracle. try_s: one candidate's build, load,
    packing, checking and rough timing. race_slack_s: beyond twice a race's budget. silence_s: without a heartbeat
    before it is given up, however busy; a third of it for one that computes nothing, two seconds for one that is
    stopped. A native call may hold the interpreter's lock, and with it the heartbeat, for all of its run: longer than
    any single call is worth. memory: bytes beyond what a fresh worker has, on a GPU of its memory; 0 chooses 16 times
    the operands plus 4 GiB (a GPU: 16 GiB; candidates that dequantise up front are legal).
    """

    start_s: float = 60.0
    open_s: float = 120.0
    try_s: float = 20.0
    race_slack_s: float = 10.0
    silence_s: float = 30.0
    memory: int = 0


class WorkerLost(WorkerError):
    """The worker died or was killed over a deadline. ``candidate_id``: the one it had in hand, if any."""

    def __init__(self, verdict: Verdict, candidate_id: str | None) -> None:
        super().__init__(f"the worker was lost: {verdict.kind}: {verdict.detail}")
        self.verdict, self.candidate_id = verdict, candidate_id


class Declined(WorkerError):
    """The worker lives, and says that it cannot do what was asked."""


class OutOfTurn(WorkerError):
    """The worker sent a well-formed answer to something else."""


class WorkerStartError(WorkerError):
    """No worker can be started here: the environment's fault, not a candidate's or a problem's."""


class Hands(Protocol):
    """Who does the work for a tuner."""

    def start(self) -> None: ...

    def wait(self) -> None: ...

    def open(self, problem: Problem, seed: int) -> None: ...

    def attempt(
        self, candidate: Candidate, deadline_s: float | None = None, worth_s: float | None = None
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
    ) -> Raced: ...

    def close(self) -> None: ...


class LocalWorker:
    """The same work in this process, without any protection. Leaves torch's thread count as it found it."""

    def __init__(self, target: Target, *, latency: Latency = "graph", artifacts: Path | None = None) -> None:
        import torch

        from .job import Desk

        self._progress: Progress = ignore
        self._threads = torch.get_num_threads()
        self._desk = Desk(lambda leading: self._progress(leading))
        self._desk.answer(Setup(target.to_dict(), latency=latency, artifacts=_text(artifacts)))

    def start(self) -> None:
        """There is nothing to start."""

    def wait(self) -> None:
        """There is nothing to wait for."""

    def open(self, problem: Problem, seed: int) -> None:
        self._desk.answer(Open(problem.to_dict(), seed))

    def attempt(self, candidate: Candidate, deadline_s: float | None = None, worth_s: float | None = None) -> Attempted:
        return expect(self._desk.answer(Attempt(candidate.to_dict(), worth_s)), Attempted)

    def confirm(self, candidate: Candidate, deadline_s: float | None = None) -> Confirmed:
        return expect(self._desk.answer(Confirm(candidate.to_dict())), Confirmed)

    def race(
        self,
        candidates: Sequence[Candidate],
        budget_s: float,
        seed: int,
        progress: Progress = ignore,
        hot: bool = False,
        earlier_s: Mapping[str, float] = {},
    ) -> Raced:
        self._progress = progress
        request = Race([c.to_dict() for c in candidates], budget_s, seed, hot, dict(earlier_s))
        return expect(self._desk.answer(request), Raced)

    def close(self) -> None:
        import torch

        torch.set_num_threads(self._threads)

    def __enter__(self) -> LocalWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Worker:
    """A process in a session of its own, forked from a spawned host at the first need and again after each loss.

    ``attempt`` and ``confirm`` turn a loss into a Verdict (``crashed`` or ``hung``); ``race`` raises WorkerLost naming
    the candidate that was running. Either way the next call starts a fresh worker and opens the problem again.
    Backends added by ``backends.register`` exist in the worker too. Not for use by several threads at once.

    A candidate that fails where another crashed before it, in the same process, may be that one's victim (a device
    context that is lost, a heap that is damaged): unless a candidate known to be right still is, it is tried again in
    a fresh worker, and that verdict counts. (A worker that finds its own device context lost ends itself.)

    latency: how a GPU's calls are timed; see ``cuda.CudaClock``. artifacts: the directory for what is built; None: that
    of the default store.
    """

    def __init__(
        self,
        target: Target,
        *,
        limits: Limits | None = None,
        latency: Latency = "graph",
        artifacts: Path | None = None,
    ) -> None:
        self._target, self._limits = target, limits or Limits()
        self._setup = Setup(
            target.to_dict(), backends.plugins(), warm=True, latency=latency, artifacts=_text(artifacts)
        )
        self._host: Host | None = None
        self._process: Process | None = None
        self._problem: Open | None = None
        self._opened = self._ready_once = False
        self._suspect = False  # something failed in this process in a way that may have damaged it
        self._sound: Candidate | None = None  # one that was right on this problem
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """The worker's process id while there is one."""
        return None if self._process is None else self._process.pid

    @property
    def tag(self) -> str | None:
        """What marks the environment of all processes that come of this worker (see ``tags``); None without a host."""
        return None if self._host is None else self._host.tag

    def start(self) -> None:
        """Start spawning, without waiting: importing torch takes seconds that the parent can use."""
        if self._process is not None:
            return
        if self._host is not None and not self._host.alive:
            self._host.close()
            self._host = None
        self._host = self._host or Host()
        self.starts += 1
        self._process = Process(self._host, self._limits.silence_s)
        self._opened = self._ready_once = self._suspect = False
        with contextlib.suppress(OSError):  # a worker that is gone is found out by receiving
            self._setup.guests = backends.plugins()
            self._process.send(self._setup)

    def open(self, problem: Problem, seed: int) -> None:
        """Take up a problem. Raises WorkerError when its operands or oracle cannot be made."""
        spare = _SPARE if self._target.device == "cpu" else _GPU_SPARE
        memory = self._limits.memory or _OPERANDS * operand_bytes(problem) + spare
        self._problem, self._opened, self._sound = Open(problem.to_dict(), seed, memory), False, None
        try:
            self._ready()
        except WorkerLost as loss:
            raise WorkerError(f"the worker was lost while preparing {problem.key}: {loss.verdict.detail}") from loss

    def attempt(self, candidate: Candidate, deadline_s: float | None = None, worth_s: float | None = None) -> Attempted:
        """See ``job.Job.attempt``. deadline_s: seconds it may take (default: the limits')."""

        def once() -> Attempted:
            try:
                return self._ask(Attempt(candidate.to_dict(), worth_s), deadline_s or self._limits.try_s, Attempted)
            except WorkerLost as loss:
                return Attempted(loss.verdict)

        return self._fairly(candidate, once)

    def confirm(self, candidate: Candidate, deadline_s: float | None = None) -> Confirmed:
        """See ``job.Job.confirm``. deadline_s: seconds it may take, where that is more than the limits'. What it took
        before says little: some operands take a CPU a hundred times as long."""
        limit_s = max(deadline_s or 0.0, self._limits.try_s)

        def once() -> Confirmed:
            try:
                return self._ask(Confirm(candidate.to_dict()), limit_s, Confirmed)
            except WorkerLost as loss:
                return Confirmed(loss.verdict)

        return self._fairly(candidate, once)

    def race(
        self,
        candidates: Sequence[Candidate],
        budget_s: float,
        seed: int,
        progress: Progress = ignore,
        hot: bool = False,
        earlier_s: Mapping[str, float] = {},
    ) -> Raced:
        """Race confirmed candidates, on operands in the cache if ``hot``. earlier_s: seconds per call before, by id.

        Raises WorkerLost with the id of the one that was running when it died.
        """
        request = Race([candidate.to_dict() for candidate in candidates], budget_s, seed, hot, dict(earlier_s))
        try:
            return self._ask(request, 2.0 * budget_s + self._limits.race_slack_s, Raced, progress)
        except WorkerLost as loss:
            if loss.candidate_id is not None:
                place = int(loss.candidate_id) - 1
                culprit = candidates[place].id if 0 <= place < len(candidates) else None
                raise WorkerLost(loss.verdict, culprit) from loss
            raise

    def close(self) -> None:
        """End the worker and everything it started. Idempotent."""
        self._drop()
        if self._host is not None:
            self._host.close()
        self._host = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drop(self) -> None:
        """End this process; the next need starts another."""
        if self._process is not None:
            self._process.close()
        self._process, self._opened, self._suspect = None, False, False

    def _fairly(self, candidate: Candidate, once: Callable[[], Judged]) -> Judged:
        """What ``once`` says of a candidate; said again by a fresh worker if this one may be to blame."""
        suspect = self._suspect
        result = once()
        verdict = result.verdict
        if suspect and verdict is not None and not verdict.ok and not self._still_works():
            self._drop()
            result = once()
            verdict = result.verdict
        if verdict is not None and verdict.ok:
            self._suspect, self._sound = False, candidate
        elif verdict is not None and self._process is not None:
            self._suspect = self._suspect or verdict.kind in _DAMAGING
        return result

    def _still_works(self) -> bool:
        """Whether a candidate that was right before is right in this process now."""
        if self._process is None or self._sound is None:
            return False
        try:
            request = Attempt(self._sound.to_dict())
            verdict = self._ask(request, self._limits.try_s, Attempted).verdict
        except WorkerError:
            return False
        self._suspect = verdict is None or not verdict.ok
        return not self._suspect

    def _ready(self) -> None:
        """A running worker with the problem open."""
        if self._process is not None and self._opened:
            return
        if self._problem is None:
            raise WorkerError("the worker has no problem to work on; call open() first")
        self.wait()
        self._soundly(self._problem, self._limits.open_s, Ready)
        self._opened = True

    def wait(self) -> None:
        """Start if need be, and wait until it is ready. Raises WorkerStartError when it does not get there."""
        self.start()
        if self._ready_once:
            return
        try:
            self._receive(self._limits.start_s, Ready, ignore)
        except WorkerError as error:
            self.close()
            raise WorkerStartError(f"the worker process could not be started: {error}") from error
        self._ready_once = True

    def _ask(self, request: Request, limit_s: float, kind: type[R], progress: Progress = ignore) -> R:
        try:
            self._ready()
        except WorkerLost as loss:  # reopening died: not this candidate's doing
            raise WorkerError(f"the worker was lost while reopening the problem: {loss.verdict.detail}") from loss
        return self._soundly(request, limit_s, kind, progress)

    def _soundly(self, request: Request, limit_s: float, kind: type[R], progress: Progress = ignore) -> R:
        """The reply; a worker that something crashed in before and that now declines is replaced, and asked again."""
        try:
            return self._exchange(request, limit_s, kind, progress)
        except Declined:
            if not self._suspect:
                raise
        self._drop()
        if request is self._problem:
            self.wait()
        else:
            self._ready()
        return self._exchange(request, limit_s, kind, progress)

    def _exchange(self, request: Request, limit_s: float, kind: type[R], progress: Progress = ignore) -> R:
        assert self._process is not None  # _ready() or start() came first
        with contextlib.suppress(OSError):  # a worker that is gone is found out by receiving
            self._process.send(request)
        return self._receive(limit_s, kind, progress)

    def _receive(self, limit_s: float, kind: type[R], progress: Progress) -> R:
        """The reply, once the progress before it has been passed on. Any way of not getting one ends the worker."""
        assert self._process is not None  # start() came first
        try:
            return expect(self._process.reply(limit_s, progress), kind)
        except Lost as lost:
            place = self._process.marker()
            self._drop()
            raise WorkerLost(lost.verdict, str(place) if place else None) from None
        except OutOfTurn as error:  # what else it says cannot be told from answers to what we ask next
            self._drop()
            raise WorkerLost(Verdict("crashed", str(error)), None) from None
        except Declined:
            raise
        except BaseException:  # Ctrl-C, or a fault in whoever watches: never leave it running
            self.close()
            raise


def expect(reply: Reply, kind: type[R]) -> R:
    """The reply if it is of that kind. Raises Declined when the worker says it cannot, OutOfTurn for anything else."""
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, Failed):
        raise Declined(f"the worker could not do it: {reply.detail}")
    raise OutOfTurn(f"the worker answered {type(reply).__name__} where {kind.__name__} was expected")
