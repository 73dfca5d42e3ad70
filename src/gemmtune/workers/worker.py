"""The parent's side of a worker: a process that may crash or hang, at the cost of only the candidate that it was
working on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from .. import backends
from ..core import plugins
from ..core.candidate import Candidate
from ..core.decision import Verdict
from ..core.devices import is_host
from ..core.errors import WorkerError
from ..core.problem import Dim, Problem
from ..core.target import Target
from ..timing.clock import Latency
from ..timing.outcome import RaceResult
from ..timing.size_sweep import SizesTimed
from ..verify.inputs import operand_bytes
from .contract import (
    OPERAND_MULTIPLE,
    Declined,
    Limits,
    Progress,
    R,
    UnexpectedReply,
    WorkerLost,
    WorkerStartError,
    expect,
    ignore,
    path_or_none,
)  # fmt: skip
from .host_pool import HostPool
from .process import Host, Lost, Process
from .protocol import (
    AlgorithmsNamed,
    Attempt,
    Attempted,
    Confirm,
    Confirmed,
    NameAlgorithms,
    Open,
    Race,
    Ready,
    Request,
    Setup,
    SizedCandidate,
    SizesVerified,
    TimeSizes,
    VerifySizes,
)  # fmt: skip

log = logging.getLogger("gemmtune")

Judged = TypeVar("Judged", Attempted, Confirmed)

# A GPU's oracle is float64 throughout, in large blocks.
_SPARE_BYTES, _SPARE_BYTES_GPU = 4 << 30, 16 << 30
_DAMAGING = ("crashed", "out_of_memory")  # verdicts of candidates that may have damaged the process


class Worker:
    """A measurement worker in a process with its own session, forked from a spawned host when first needed and after
    each loss.

    ``attempt`` and ``confirm`` turn a loss into a Verdict (``crashed`` or ``hung``); ``race`` raises WorkerLost naming
    the candidate that was running. In both cases the next call starts a fresh worker and opens the problem again.
    Backends added by ``backends.register`` exist in the worker too. Not thread-safe.

    A candidate that fails after another crashed in the same process may be a victim of that crash (a lost device
    context, a damaged heap). Unless a candidate that passed before still passes, the failed one is tried again in a
    fresh worker, and that verdict counts. (A worker that finds its own device context lost ends itself.)

    latency: how a GPU's calls are timed; see ``cuda_clock.CudaClock``. artifacts: the directory for built files; None:
    that of the default store. hosts: where the host comes from, and where ``close`` puts it back; None: it is a
    new one, which ends.
    """

    def __init__(
        self,
        target: Target,
        *,
        limits: Limits | None = None,
        latency: Latency = "graph",
        artifacts: Path | None = None,
        hosts: HostPool | None = None,
    ) -> None:
        self._hosts = HostPool(most=0) if hosts is None else hosts
        self._target, self._limits = target, limits or Limits()
        self._setup = Setup(
            target.to_dict(), backends.plugins(), warm=True, latency=latency, artifacts=path_or_none(artifacts)
        )
        self._host: Host | None = None
        self._process: Process | None = None
        self._problem: Open | None = None
        self._paused: dict[str, Open] = {}  # by the key of the problem
        self._opened = self._ready_once = False
        self._suspect = False  # a failure may have damaged this process
        self._sound: Candidate | None = None  # a candidate that was right on this problem
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """The worker's process id; None while no worker runs."""
        return None if self._process is None else self._process.pid

    @property
    def tag(self) -> str | None:
        """The mark in the environment of all processes that descend from this worker (see ``tags``); None without a
        host."""
        return None if self._host is None else self._host.tag

    def start(self) -> None:
        """Begin to spawn a worker, without waiting: importing torch takes seconds that the parent can use."""
        if self._process is not None:
            return
        if self._host is not None and not self._host.alive:
            self._hosts.put_back(self._host)
            self._host = None
        if self._host is None:
            self._host = self._hosts.take(backends.preloaded_modules(self._target.device))
        self.starts += 1
        self._process = Process(self._host, self._limits.silence_s)
        self._opened = self._ready_once = self._suspect = False
        self._setup.guests, self._setup.modules = backends.plugins(), plugins.modules()
        self._process.send(self._setup)

    def open(self, problem: Problem, seed: int) -> None:
        """Set the problem to work on. Raises WorkerError when its operands or oracle cannot be prepared."""
        self._problem = Open(problem.to_dict(), seed, self._memory_for(problem), list(self._paused))
        self._opened, self._sound = False, None
        try:
            self._open_problem()
        except WorkerLost as loss:
            raise WorkerError(f"the worker was lost while preparing {problem.key}: {loss.verdict.detail}") from loss

    def pause(self) -> None:
        """Keep the session of the problem that is open in memory while others are opened, until ``resume``."""
        if self._problem is not None:
            self._paused[Problem.from_dict(self._problem.problem).key] = self._problem

    def resume(self, problem: Problem) -> None:
        """Go on with a problem that was left by ``pause``. The next request opens it, from the start if the worker was
        lost meanwhile. Raises KeyError for another problem."""
        request = self._paused.pop(problem.key)
        if request is not self._problem:
            self._problem = msgspec.structs.replace(request, resumes=True, keep=list(self._paused))
            self._opened, self._sound = False, None

    def _memory_for(self, problem: Problem) -> int:
        spare = _SPARE_BYTES if is_host(self._target.device) else _SPARE_BYTES_GPU
        return self._limits.memory or OPERAND_MULTIPLE * operand_bytes(problem) + spare

    def attempt(
        self, candidate: Candidate, deadline_s: float | None = None, cutoff_s: float | None = None
    ) -> Attempted:
        """Screen a candidate; see ``job.ProblemSession.attempt``. deadline_s: the seconds allowed (default:
        ``Limits.try_s``)."""

        def once() -> Attempted:
            try:
                return self._ask(Attempt(candidate.to_dict(), cutoff_s), deadline_s or self._limits.try_s, Attempted)
            except WorkerLost as loss:
                return Attempted(loss.verdict)

        return self._attempt_fairly(candidate, once)

    def confirm(self, candidate: Candidate, deadline_s: float | None = None) -> Confirmed:
        """Check a candidate fully; see ``job.ProblemSession.confirm``. deadline_s: the seconds allowed, where that is
        more than the limits'.

        The time that the candidate took before is no guide: some operands take a CPU a hundred times as long.
        """
        limit_s = max(deadline_s or 0.0, self._limits.try_s)

        def once() -> Confirmed:
            try:
                return self._ask(Confirm(candidate.to_dict()), limit_s, Confirmed)
            except WorkerLost as loss:
                return Confirmed(loss.verdict)

        return self._attempt_fairly(candidate, once)

    def race(
        self,
        candidates: Sequence[Candidate],
        budget_s: float,
        seed: int,
        progress: Progress = ignore,
        hot: bool = False,
        earlier_s: Mapping[str, float] = {},
    ) -> RaceResult:
        """Race confirmed candidates, on operands in the cache if ``hot``. earlier_s: seconds per call measured before,
        by id.

        Raises WorkerLost with the id of the candidate that was running when the worker died.
        """
        request = Race([candidate.to_dict() for candidate in candidates], budget_s, seed, hot, dict(earlier_s))
        try:
            return self._ask(request, 2.0 * budget_s + self._limits.race_slack_s, RaceResult, progress)
        except WorkerLost as loss:
            raise _naming_culprit(loss, [candidate.id for candidate in candidates]) from loss

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
    ) -> SizesTimed:
        """Time candidates at several M, or batches; see ``protocol.TimeSizes``.

        Raises WorkerLost with the id of the candidate that was running when the worker died.
        """
        wanted = {m: list(positions) for m, positions in sizes.items()}
        request = TimeSizes(list(candidates), wanted, last, budget_s, seed, hot, load_s, dim)
        try:
            return self._ask(request, 2.0 * budget_s + self._limits.open_s, SizesTimed)
        except WorkerLost as loss:
            names = [Candidate.from_dict(item.candidate).id for item in candidates]
            raise _naming_culprit(loss, names) from loss

    def verify_sizes(self, item: SizedCandidate, sizes: Sequence[int], dim: Dim = "m") -> SizesVerified:
        """Verify a candidate at several M, or batches; a loss of the worker becomes the verdict. See
        ``protocol.VerifySizes``."""
        try:
            return self._ask(VerifySizes(item, list(sizes), dim), self._limits.open_s, SizesVerified)
        except WorkerLost as loss:
            return SizesVerified(loss.verdict)

    def library_algorithms(self, item: SizedCandidate, sizes: Sequence[int]) -> dict[int, str]:
        """Return the names of the algorithms that a library chooses for a candidate, by M, without those that are not
        known; none where the worker is lost, or the kernel raises an error. See ``Kernel.library_algorithm``."""
        try:
            named = self._ask(NameAlgorithms(item, list(sizes)), self._limits.open_s, AlgorithmsNamed)
        except (WorkerLost, Declined) as error:
            log.debug("the algorithms of a library are not known: %s", error)
            return {}
        return {m: name for m, name in zip(sizes, named.names, strict=True) if name}

    def close(self) -> None:
        """End the worker and every process that it started; the host, too, unless it is put back. Idempotent."""
        self._end_process()
        if self._host is not None:
            self._hosts.put_back(self._host)
        self._host = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_process(self) -> None:
        """End this process; the next request starts another."""
        if self._process is not None:
            self._process.close()
        self._process, self._opened, self._suspect = None, False, False

    def _attempt_fairly(self, candidate: Candidate, once: Callable[[], Judged]) -> Judged:
        """Return the result of ``once`` for a candidate, repeated in a fresh worker if this worker may be to blame for
        a failure."""
        was_suspect = self._suspect
        result = once()
        verdict = result.verdict
        if was_suspect and verdict is not None and not verdict.ok and not self._recheck_sound_candidate():
            self._end_process()
            result = once()
            verdict = result.verdict
        if verdict is not None and verdict.ok:
            self._suspect, self._sound = False, candidate
        elif verdict is not None and self._process is not None:
            self._suspect = self._suspect or verdict.kind in _DAMAGING
        return result

    def _recheck_sound_candidate(self) -> bool:
        """Whether a candidate that was right before is still right in this process."""
        if self._process is None or self._sound is None:
            return False
        try:
            request = Attempt(self._sound.to_dict())
            verdict = self._ask(request, self._limits.try_s, Attempted).verdict
        except WorkerError:
            return False
        self._suspect = verdict is None or not verdict.ok
        return not self._suspect

    def _open_problem(self) -> None:
        """Ensure that a worker runs and has the problem open."""
        if self._process is not None and self._opened:
            return
        if self._problem is None:
            raise WorkerError("the worker has no problem to work on; call open() first")
        self.wait()
        self._exchange_or_replace(self._problem, self._limits.open_s, Ready)
        self._opened = True

    def wait(self) -> None:
        """Start a worker if none runs, and wait until it is ready. Raises WorkerStartError when it does not become
        ready."""
        self.start()
        if self._ready_once:
            return
        try:
            self._receive(self._limits.start_s, Ready, ignore)
        except WorkerError as error:
            if self._host is not None:
                self._host.close()  # others may use it, too: nobody takes it again
            self.close()
            raise WorkerStartError(f"the worker process could not be started: {error}") from error
        self._ready_once = True

    def _ask(self, request: Request, limit_s: float, reply_type: type[R], progress: Progress = ignore) -> R:
        try:
            self._open_problem()
        except WorkerLost as loss:  # the loss happened while reopening: not the candidate's fault
            raise WorkerError(f"the worker was lost while reopening the problem: {loss.verdict.detail}") from loss
        return self._exchange_or_replace(request, limit_s, reply_type, progress)

    def _exchange_or_replace(
        self, request: Request, limit_s: float, reply_type: type[R], progress: Progress = ignore
    ) -> R:
        """Return the reply to a request.

        A worker that declines after something crashed in it is replaced, and the request is sent again. So is a worker
        whose host ended: another process of the host may have caused it.
        """
        try:
            return self._exchange(request, limit_s, reply_type, progress)
        except Declined:
            if not self._suspect:
                raise
        except WorkerLost as loss:
            if loss.verdict.kind != "crashed" or self._host is None or self._host.alive:
                raise
        self._end_process()
        if request is self._problem:
            self.wait()
        else:
            self._open_problem()
        return self._exchange(request, limit_s, reply_type, progress)

    def _exchange(self, request: Request, limit_s: float, reply_type: type[R], progress: Progress = ignore) -> R:
        assert self._process is not None  # after _open_problem() or start()
        self._process.send(request)
        return self._receive(limit_s, reply_type, progress)

    def _receive(self, limit_s: float, reply_type: type[R], progress: Progress) -> R:
        """Return the reply, after passing on the progress messages before it. Ends the worker when no proper reply
        arrives."""
        assert self._process is not None  # after start()
        try:
            return expect(self._process.reply(limit_s, progress), reply_type)
        except Lost as lost:
            marker = self._process.marker()
            self._end_process()
            raise WorkerLost(lost.verdict, str(marker) if marker else None) from None
        except UnexpectedReply as error:  # its later messages cannot be told apart from replies to later requests
            self._end_process()
            raise WorkerLost(Verdict("crashed", str(error)), None) from None
        except Declined:
            raise
        except BaseException:  # Ctrl-C, or an error in the progress callback: never leave the worker running
            self.close()
            raise


def _naming_culprit(loss: WorkerLost, names: Sequence[str]) -> WorkerLost:
    """Return the loss with the name of the candidate that ran, whose number the worker had noted; ``names`` are in the
    order of the numbers."""
    if loss.candidate_id is None:
        return loss
    index = int(loss.candidate_id) - 1
    return WorkerLost(loss.verdict, names[index] if 0 <= index < len(names) else None)
