"""The parent's side of isolation: hosts and the workers forked from them, both of which are certain to end.

A ``Host`` is one spawned interpreter with torch loaded. Each ``Process`` is a worker forked from it, behind pipes that
carry frames in both directions, with a deadline on every reply. See ``host`` for the child's side.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from ..core.decision import Verdict
from ..core.errors import WorkerError
from ..timing.machine import allowed_cpus
from ..timing.outcome import LeaderUpdate
from .heartbeat import Heartbeat
from .host_protocol import ENDED, EXPIRE, FORK, KILL, PRELOAD, SIZE, STARTED, pack, unpack
from .process_tags import VARIABLE, kill_tagged
from .protocol import Alive, FrameReader, Reply, Request, decode_reply, encode_frame

# The child's sys.path is the parent's, so that a worker can import every module that the parent can.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from gemmtune.workers.host import main; main(*map(int, sys.argv[2:]))"
)
_LOG_BYTES = 4000
_POLL_S = 0.2  # seconds between two checks that the process is alive (a grandchild may hold its pipe open)
_EXIT_S = 2.0  # seconds for an orderly end before it is forced
_SEND_S = 2.0
# Seconds for reading replies that arrived while this process itself was stopped or starved beyond the deadline.
_LAST_CALL_S = 0.5

Progress = Callable[[LeaderUpdate], None]


class Lost(Exception):
    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.detail)
        self.verdict = verdict


class HostSettings(NamedTuple):
    """What a host has from this process: the modules that it imports first, the environment, ``sys.path``, the current
    directory (empty if it was removed) and the processors."""

    preload: tuple[str, ...]
    environment: frozenset[tuple[str, str]]
    path: tuple[str, ...]
    directory: str
    processors: tuple[int, ...]

    @classmethod
    def now(cls, preload: Sequence[str]) -> HostSettings:
        """Return those of a host that is started now."""
        directory = ""
        with contextlib.suppress(OSError):
            directory = os.getcwd()
        path = tuple(os.path.abspath(entry) for entry in sys.path) if directory else tuple(sys.path)
        return cls(tuple(preload), frozenset(os.environ.items()), path, directory, tuple(sorted(allowed_cpus())))


class Host:
    """A spawned process that forks workers; several threads may have workers of one host. The constructor raises
    WorkerError when the process cannot be spawned.

    preload: modules that the host imports first, so that every worker has them at once. settings: what it has from
    this process.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self.settings = HostSettings.now(preload)
        self.tag, self._owner = secrets.token_hex(8), os.getpid()
        self._lock = threading.Lock()
        self._pending_forks: deque[Process] = deque()
        self._started: set[int] = set()  # process ids of workers
        self._ended: dict[int, int] = {}
        self._log = bytearray()
        self._control, theirs = socket.socketpair()
        path = json.dumps(self.settings.path)
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _BOOT, path, str(theirs.fileno()), str(self._owner)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, VARIABLE: self.tag, PRELOAD: ",".join(preload)},
            )
        except OSError as error:
            self._control.close()
            raise WorkerError(f"cannot start a worker process: {error}") from error
        finally:
            theirs.close()
        self._control.setblocking(False)
        assert self._popen.stdout is not None  # stdout=PIPE
        os.set_blocking(self._popen.stdout.fileno(), False)

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def fork(self, process: Process, fds: list[int]) -> None:
        """Request a worker with these file descriptors. When the host is gone, ``ended`` reports it."""
        with self._lock, contextlib.suppress(OSError):
            self._pending_forks.append(process)
            socket.send_fds(self._control, [pack(FORK)], fds)

    def end_unless_used(self, seconds: float) -> bool:
        """Have the host end after some seconds, unless ``fork`` is called before. Return whether it will: only a host
        that has forked workers, so that it has loaded torch, and all of whose workers have ended."""
        with self._lock:
            self._receive()
            running = self._started - self._ended.keys()
            if self._owner != os.getpid() or not self._started or running or self._pending_forks or not self.alive:
                return False
            try:
                self._control.send(pack(EXPIRE, math.ceil(seconds)))
            except OSError:
                return False
            return True

    def ended(self, process: Process) -> str | None:
        """Return how a worker ended, in words; None while it is alive, or is yet to be forked."""
        with self._lock:
            self._receive()
            if process.pid == 0:
                return "no worker could be forked: too many processes, or too little memory"
            if process.pid in self._ended:
                return _describe_exit(self._ended[process.pid])
            return None if self.alive else self._describe_host_end()

    def _describe_host_end(self) -> str:
        printed = self._read_log()
        text = f"its host is gone: {_describe_exit(self._popen.wait())}"
        return f"{text}; it printed: {printed}" if printed else text

    def _receive(self) -> None:
        """Process the host's messages and output received so far. The caller must hold the lock."""
        with contextlib.suppress(OSError):
            while len(data := self._control.recv(SIZE)) == SIZE:
                message, pid, status = unpack(data)
                if message == STARTED and self._pending_forks:
                    self._ended.pop(pid, None)  # process ids are reused
                    self._started |= {pid} - {0}
                    self._pending_forks.popleft().pid = pid
                elif message == ENDED:
                    self._ended[pid] = status
        self._read_log()

    def _read_log(self) -> str:
        assert self._popen.stdout is not None  # stdout=PIPE
        while not self._popen.stdout.closed and (data := _read(self._popen.stdout.fileno())):
            self._log = (self._log + data)[-_LOG_BYTES:]
        return self._log.decode(errors="replace").strip()[-1000:]

    def end(self, process: Process) -> None:
        """Kill a worker and its orphans. Returns when they are gone, or when the whole host has been closed instead.

        Does nothing in a fork of the parent.
        """
        if self._owner != os.getpid():
            return
        deadline = time.monotonic() + _EXIT_S
        kill_sent = False
        while self.ended(process) is None and time.monotonic() < deadline:
            if process.pid and not kill_sent:
                with self._lock, contextlib.suppress(OSError):
                    self._control.send(pack(KILL, process.pid))
                kill_sent = True
            if process.pid is None and not self._started:  # the host is still loading torch: no worker to wait for
                break
            time.sleep(0.001)
        if self.ended(process) is None or not self.alive:
            self.close()

    def close(self) -> None:
        """End the host, its workers and every process that they started. Idempotent; does nothing in a fork of the
        parent."""
        if self._owner == os.getpid():
            self._control.close()  # the host ends when its socket closes
            if self.alive and not self._exits():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._popen.pid, signal.SIGKILL)
                # Uninterruptible in the kernel: it dies when it wakes.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._popen.wait(_EXIT_S)
            kill_tagged(self.tag)
        with self._lock:  # other threads may be reading
            if self._popen.stdout is not None:
                self._popen.stdout.close()

    def _exits(self) -> bool:
        try:
            # Before its first fork the host is loading torch and reads no requests: it may be killed at once.
            self._popen.wait(0.0 if self._pending_forks else _EXIT_S)
        except subprocess.TimeoutExpired:
            return False
        return True


class Process:
    """One worker with its pipes: requests to the worker, replies from it, and the last part of its output.

    silence_s: see ``worker.Limits``.
    """

    def __init__(self, host: Host, silence_s: float) -> None:
        self.pid: int | None = None  # None until the host reports it; 0 when the host could not fork
        self._host, self._silence_s = host, silence_s
        self._heartbeat = Heartbeat(silence_s)
        self._frames, self._log = FrameReader(), bytearray()
        self._marker = tempfile.TemporaryFile()  # noqa: SIM115 - the file is needed as long as the process runs
        self._marker.truncate(4096)
        child_in, self._to = os.pipe()
        self._from, child_out = os.pipe()
        self._printed, child_log = os.pipe()
        try:
            host.fork(self, [child_in, child_out, self._marker.fileno(), child_log])
        finally:
            for fd in (child_in, child_out, child_log):
                os.close(fd)
        self._selector = selectors.DefaultSelector()
        for fd in (self._from, self._printed):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ)
        os.set_blocking(self._to, False)

    def send(self, request: Request) -> None:
        """Send a request. ``reply`` reports a worker that is gone, or that reads nothing for seconds."""
        data = memoryview(encode_frame(request))
        deadline = time.monotonic() + _SEND_S
        while data:
            try:
                data = data[os.write(self._to, data) :]
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return
                time.sleep(0.01)
            except OSError:
                return

    def marker(self) -> int:
        """Return the number of the kernel that ran last in a race; 0 for none."""
        return os.pread(self._marker.fileno(), 1, 0)[0]

    def reply(self, limit_s: float, progress: Progress) -> Reply:
        """Return the next reply that is not progress.

        Raises Lost when the process dies, sends malformed messages, takes too long or is stuck. A reply that arrived
        before the deadline counts, even if this process could not read it in time.
        """
        start = time.monotonic()
        deadline = start + limit_s
        if self._heartbeat.started:  # nobody read its heartbeats meanwhile
            self._heartbeat.beat(start)
        while True:
            body = self._next_frame(deadline, limit_s)
            try:
                message = decode_reply(body)
            except msgspec.MsgspecError as error:
                raise self._end_as_lost("crashed", f"it sent something that is not a message: {error}") from None
            now = time.monotonic()
            self._heartbeat.beat(now)
            if not isinstance(message, LeaderUpdate | Alive):
                return message
            if now > deadline + _LAST_CALL_S:
                raise self._end_as_lost("hung", f"no answer within {limit_s:.1f} s")
            if isinstance(message, LeaderUpdate):
                progress(message)

    def _next_frame(self, deadline: float, limit_s: float) -> bytes:
        while True:
            try:
                body = self._frames.next()
            except ValueError as error:
                raise self._end_as_lost("crashed", f"it sent something that is not a message: {error}") from None
            if body is not None:
                return body
            ended = self._host.ended(self)  # checked before reading: replies sent before the worker died still count
            remaining_s = deadline - time.monotonic()
            if self._pump(0.0 if ended else max(0.0, min(remaining_s, _POLL_S))):
                continue
            if ended:
                raise self._end_as_lost("crashed", ended)
            if remaining_s <= 0:
                raise self._end_as_lost("hung", f"no answer within {limit_s:.1f} s")
            if self.pid and (silence := self._heartbeat.fault(self.pid, time.monotonic())):
                raise self._end_as_lost("hung", silence)

    def _pump(self, wait_s: float) -> bool:
        """Read the available data. Returns whether the reply pipe delivered any."""
        received = False
        if not self._selector.get_map():  # both pipes are at their end: the worker is ending
            time.sleep(min(wait_s, 0.005))
            return False
        for key, _ in self._selector.select(wait_s):
            data = _read(key.fd)
            if data is None:
                continue
            if not data:
                self._selector.unregister(key.fd)
            elif key.fd == self._from:
                self._frames.feed(data)
                received = True
            else:
                self._log = (self._log + data)[-_LOG_BYTES:]
        return received

    def _end_as_lost(self, verdict_kind: Any, text: str) -> Lost:
        self._host.end(self)
        for _ in range(64):  # up to the capacity of the pipes
            if not self._selector.get_map() or not self._selector.select(0.0):
                break
            self._pump(0.0)
        printed = self._log.decode(errors="replace").strip()
        return Lost(Verdict(verdict_kind, f"{text}; it printed: {printed[-1000:]}" if printed else text))

    def end(self) -> None:
        """End the worker and its orphans. A thread that waits for a reply raises Lost."""
        self._host.end(self)

    def close(self) -> None:
        """End the worker and its orphans, and close all file descriptors. Idempotent."""
        if self._to < 0:
            return
        self._host.end(self)
        self._selector.close()
        for fd in (self._to, self._from, self._printed):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._to = self._from = self._printed = -1
        self._marker.close()


def _read(fd: int) -> bytes | None:
    """Return the data that can be read now; None when there is none yet, empty at the end of the file."""
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"the worker exited with status {status}"
    try:
        return f"the worker was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"the worker was killed by signal {-status}"
