"""The parent's side of a worker: a process that may crash or hang, and costs only the candidate it had in hand.

``Worker`` and ``LocalWorker`` answer the same calls; the second does the work in this process (tests, debugging),
where a crash is a crash.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from ..backends.base import Candidate
from ..decision import Verdict
from ..errors import WorkerError
from ..problem import Problem
from ..target import Target
from .inputs import operand_bytes
from .protocol import (
    Attempt,
    Attempted,
    Confirm,
    Confirmed,
    Failed,
    FrameReader,
    Leading,
    Open,
    Race,
    Raced,
    Ready,
    Reply,
    Request,
    Setup,
    decode_reply,
    write_frame,
)

# The child's sys.path is the parent's: what the parent can import, a worker can.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from gemmtune.measure.worker_main import main; main(*map(int, sys.argv[2:]))"
)
_LOG_KEPT = 4000
_POLL_S = 0.2  # how often to look whether the process still lives (a grandchild may hold its pipe open)

Progress = Callable[[Leading], None]
R = TypeVar("R")


def ignore(leading: Leading) -> None:
    """The progress that nobody watches."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a worker may take, in seconds, and what it may allocate.

    start_s: from spawning to being ready. open_s: making operands and oracle. try_s: one candidate's build, load,
    packing, checking and rough timing. race_slack_s: beyond twice a race's budget. memory: bytes beyond what a fresh
    worker has; 0 chooses 16 times the operands plus 4 GiB (candidates that dequantise up front are legal).
    """

    start_s: float = 60.0
    open_s: float = 120.0
    try_s: float = 20.0
    race_slack_s: float = 10.0
    memory: int = 0


class WorkerLost(WorkerError):
    """The worker died or was killed over a deadline. ``candidate_id``: the one it had in hand, if any."""

    def __init__(self, verdict: Verdict, candidate_id: str | None) -> None:
        super().__init__(f"the worker was lost: {verdict.kind}: {verdict.detail}")
        self.verdict, self.candidate_id = verdict, candidate_id


class WorkerStartError(WorkerError):
    """No worker can be started here: the environment's fault, not a candidate's or a problem's."""


class Hands(Protocol):
    """Who does the work for a tuner."""

    def open(self, problem: Problem, seed: int) -> None: ...

    def attempt(self, candidate: Candidate, deadline_s: float | None = None) -> Attempted: ...

    def confirm(self, candidate: Candidate, deadline_s: float | None = None) -> Confirmed: ...

    def race(
        self, candidates: Sequence[Candidate], budget_s: float, seed: int, progress: Progress = ignore
    ) -> Raced: ...

    def close(self) -> None: ...


class LocalWorker:
    """The same work in this process, without any protection. Leaves torch's thread count as it found it."""

    def __init__(self, target: Target, *, rooms: Mapping[str, str] | None = None) -> None:
        import torch

        from .job import Desk

        self._progress: Progress = ignore
        self._threads = torch.get_num_threads()
        self._desk = Desk(lambda leading: self._progress(leading))
        self._desk.answer(Setup(target.to_dict(), dict(rooms or {})))

    def open(self, problem: Problem, seed: int) -> None:
        self._desk.answer(Open(problem.to_dict(), seed))

    def attempt(self, candidate: Candidate, deadline_s: float | None = None) -> Attempted:
        return _expect(self._desk.answer(Attempt(candidate.to_dict())), Attempted)

    def confirm(self, candidate: Candidate, deadline_s: float | None = None) -> Confirmed:
        return _expect(self._desk.answer(Confirm(candidate.to_dict())), Confirmed)

    def race(self, candidates: Sequence[Candidate], budget_s: float, seed: int, progress: Progress = ignore) -> Raced:
        self._progress = progress
        return _expect(self._desk.answer(Race([c.to_dict() for c in candidates], budget_s, seed)), Raced)

    def close(self) -> None:
        import torch

        torch.set_num_threads(self._threads)

    def __enter__(self) -> LocalWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Worker:
    """A spawned process in a session of its own, started at the first need and again after each loss.

    ``attempt`` and ``confirm`` turn a loss into a Verdict (``crashed`` or ``hung``); ``race`` raises WorkerLost naming
    the candidate that was running. Either way the next call starts a fresh worker and opens the problem again. rooms:
    backends beyond the registry's, as name -> ``module:Class``. Not for use by several threads at once.
    """

    def __init__(self, target: Target, *, limits: Limits | None = None, rooms: Mapping[str, str] | None = None) -> None:
        self._target, self._rooms, self._limits = target, dict(rooms or {}), limits or Limits()
        self._process: _Process | None = None
        self._problem: Open | None = None
        self._opened = self._ready_once = False
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """The worker's process id while there is one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start spawning, without waiting: importing torch takes seconds that the parent can use."""
        if self._process is None:
            self.starts += 1
            self._process = _Process()
            self._opened = self._ready_once = False
            with contextlib.suppress(OSError):  # a worker that is gone is found out by receiving
                self._process.send(Setup(self._target.to_dict(), self._rooms))

    def open(self, problem: Problem, seed: int) -> None:
        """Take up a problem. Raises WorkerError when its operands or oracle cannot be made."""
        memory = self._limits.memory or 16 * operand_bytes(problem) + (4 << 30)
        self._problem, self._opened = Open(problem.to_dict(), seed, memory), False
        try:
            self._ready()
        except WorkerLost as loss:
            raise WorkerError(f"the worker was lost while preparing {problem.key}: {loss.verdict.detail}") from loss

    def attempt(self, candidate: Candidate, deadline_s: float | None = None) -> Attempted:
        """See ``job.Job.attempt``. deadline_s: seconds it may take (default: the limits')."""
        try:
            return self._ask(Attempt(candidate.to_dict()), deadline_s or self._limits.try_s, Attempted)
        except WorkerLost as loss:
            return Attempted(loss.verdict)

    def confirm(self, candidate: Candidate, deadline_s: float | None = None) -> Confirmed:
        """See ``job.Job.confirm``. deadline_s: seconds it may take (default: the limits')."""
        try:
            return self._ask(Confirm(candidate.to_dict()), deadline_s or self._limits.try_s, Confirmed)
        except WorkerLost as loss:
            return Confirmed(loss.verdict)

    def race(self, candidates: Sequence[Candidate], budget_s: float, seed: int, progress: Progress = ignore) -> Raced:
        """Race confirmed candidates. Raises WorkerLost with the id of the one that was running when it died."""
        request = Race([candidate.to_dict() for candidate in candidates], budget_s, seed)
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
        if self._process is not None:
            self._process.kill()
        self._process, self._opened = None, False

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready(self) -> None:
        """A running worker with the problem open."""
        if self._process is not None and self._opened:
            return
        if self._problem is None:
            raise WorkerError("the worker has no problem to work on; call open() first")
        self.start()
        if not self._ready_once:
            self._await_start()
        self._exchange(self._problem, self._limits.open_s, Ready)
        self._opened = True

    def _await_start(self) -> None:
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
            return _expect(self._process.reply(limit_s, progress), kind)
        except _Lost as lost:
            place = self._process.marker()
            self.close()
            raise WorkerLost(lost.verdict, str(place) if place else None) from None
        except WorkerError:  # it answered, only not what was hoped for
            raise
        except BaseException:  # Ctrl-C, or a fault in whoever watches: never leave it running
            self.close()
            raise


class _Lost(Exception):
    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.detail)
        self.verdict = verdict


class _Process:
    """One spawned process with its pipes: requests to it, replies from it, and what it prints, kept short."""

    def __init__(self) -> None:
        self._frames, self._log = FrameReader(), bytearray()
        self._marker = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._marker.truncate(4096)
        child_in, self._to = os.pipe()
        self._from, child_out = os.pipe()
        fds = (child_in, child_out, self._marker.fileno())
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _BOOT, path, *map(str, fds)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=fds,
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._to)
            os.close(self._from)
            raise WorkerError(f"cannot start a worker process: {error}") from error
        finally:
            os.close(child_in)
            os.close(child_out)
        assert self._popen.stdout is not None  # stdout=PIPE
        self._selector = selectors.DefaultSelector()
        for fd in (self._from, self._popen.stdout.fileno()):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, request: Request) -> None:
        write_frame(self._to, request)

    def marker(self) -> int:
        """The number of the kernel that ran last in a race; 0 for none."""
        return os.pread(self._marker.fileno(), 1, 0)[0]

    def reply(self, limit_s: float, progress: Progress) -> Reply:
        """The next reply that is not progress. Raises _Lost when the process dies, babbles or takes too long."""
        deadline = time.monotonic() + limit_s
        while True:
            body = self._next_frame(deadline, limit_s)
            try:
                message = decode_reply(body)
            except msgspec.MsgspecError as error:
                raise self._loss("crashed", f"it sent something that is not a message: {error}") from None
            if not isinstance(message, Leading):
                return message
            progress(message)

    def _next_frame(self, deadline: float, limit_s: float) -> bytes:
        while True:
            try:
                body = self._frames.next()
            except ValueError as error:
                raise self._loss("crashed", f"it sent something that is not a message: {error}") from None
            if body is not None:
                return body
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._loss("hung", f"no answer within {limit_s:.1f} s")
            dead = self._popen.poll() is not None  # looked at before reading: what it sent before it died still counts
            if not self._pump(0.0 if dead else min(left, _POLL_S)) and dead:
                raise self._loss("crashed", _how_it_ended(self._popen.returncode))

    def _pump(self, wait_s: float) -> bool:
        """Read what there is; whether the reply pipe gave anything."""
        got = False
        for key, _ in self._selector.select(wait_s):
            data = _read(key.fd)
            if data is None:
                continue
            if not data:
                self._selector.unregister(key.fd)
                if key.fd == self._from and self._popen.poll() is None:
                    self._await_end()
            elif key.fd == self._from:
                self._frames.feed(data)
                got = True
            else:
                self._log = (self._log + data)[-_LOG_KEPT:]
        return got

    def _await_end(self) -> None:
        """Its end of the reply pipe is closed: it is exiting, or will never answer again."""
        try:
            self._popen.wait(2.0)
        except subprocess.TimeoutExpired:
            self._kill_group()
            self._popen.wait()

    def _loss(self, kind: Any, text: str) -> _Lost:
        self._kill_group()
        self._popen.wait()
        with contextlib.suppress(OSError):
            while self._selector.get_map() and self._pump(0.0):
                pass
        printed = self._log.decode(errors="replace").strip()
        return _Lost(Verdict(kind, f"{text}; it printed: {printed[-1000:]}" if printed else text))

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)  # its own session: its children die with it

    def kill(self) -> None:
        """End it, reap it and close everything. Idempotent."""
        self._kill_group()
        self._popen.wait()
        self._selector.close()
        for fd in (self._to, self._from):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._to = self._from = -1
        if self._popen.stdout is not None:
            self._popen.stdout.close()
        self._marker.close()


def _read(fd: int) -> bytes | None:
    """What can be read now; None for nothing yet, empty at the end."""
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"the worker exited with status {status}"
    try:
        return f"the worker was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"the worker was killed by signal {-status}"


def _expect(reply: Reply, kind: type[R]) -> R:
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, Failed):
        raise WorkerError(f"the worker could not do it: {reply.detail}")
    raise WorkerError(f"the worker answered {type(reply).__name__} where {kind.__name__} was expected")
