"""A spawned process behind pipes: frames in, frames out, a deadline on every answer, and an end that is certain."""

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
from collections.abc import Callable
from typing import Any

import msgspec

from ..decision import Verdict
from ..errors import WorkerError
from .protocol import FrameReader, Leading, Reply, Request, decode_reply, write_frame

# The child's sys.path is the parent's: what the parent can import, a worker can.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from gemmtune.measure.worker_main import main; main(*map(int, sys.argv[2:]))"
)
_LOG_KEPT = 4000
_POLL_S = 0.2  # how often to look whether the process still lives (a grandchild may hold its pipe open)

Progress = Callable[[Leading], None]


class Lost(Exception):
    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.detail)
        self.verdict = verdict


class Process:
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
        """The next reply that is not progress. Raises Lost when the process dies, babbles or takes too long."""
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

    def _loss(self, kind: Any, text: str) -> Lost:
        self._kill_group()
        self._popen.wait()
        with contextlib.suppress(OSError):
            while self._selector.get_map() and self._pump(0.0):
                pass
        printed = self._log.decode(errors="replace").strip()
        return Lost(Verdict(kind, f"{text}; it printed: {printed[-1000:]}" if printed else text))

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
