"""The child's side of isolation: a process that loads torch once, forks workers, and kills every process that they
leave.

Replacing a lost worker costs a fork, some 30 ms, where a new interpreter with torch costs seconds. The host runs no
candidate and no thread of its own, so that forking it is safe. It adopts the orphans of a worker (daemons too) and
kills them before it reports the worker's end. The host ends when its parent does, however the parent ends.

Started by ``process.Host``; no other module imports it.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings

import psutil

from .host_protocol import ENDED, EXPIRE, FDS, FORK, KILL, PRELOAD, SIZE, STARTED, pack, unpack
from .prctl import adopt_orphans, die_with_parent

# The parent's own children may hold its end of the socket open, so the host also polls for its death.
_PARENT_POLL_S = 1.0
_ORPHANS_S = 1.5  # seconds for killing a worker's orphans; the parent's sweep handles the rest


def main(control_fd: int, parent: int) -> None:
    """Serve fork requests from ``control_fd`` until process ``parent`` closes its end or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    from . import job  # noqa: F401 - loads torch and everything that workers share

    for module in filter(None, os.environ.pop(PRELOAD, "").split(",")):
        with contextlib.suppress(ImportError):  # the code that needs it raises then
            importlib.import_module(module)
    _Host(socket.socket(fileno=control_fd), parent).serve()
    os._exit(0)


class _Host:
    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control, self._parent = control, parent
        self._workers: set[int] = set()
        self._ends_at = math.inf  # by time.monotonic()
        self._wake, self._waker = os.pipe()
        for fd in (self._wake, self._waker):
            os.set_blocking(fd, False)
        control.set_inheritable(False)
        adopt_orphans()
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Fork, kill and reap workers on request."""
        with contextlib.suppress(OSError):  # the parent's end of the socket broke: the parent is gone
            while os.getppid() == self._parent:
                ready, _, _ = select.select([self._control.fileno(), self._wake], [], [], _PARENT_POLL_S)
                if self._wake in ready:
                    os.read(self._wake, 4096)
                if self._control.fileno() in ready and not self._handle_request():
                    break
                self._reap()
                if time.monotonic() >= self._ends_at:
                    break
        for pid in self._workers:
            _kill_session(pid)
        self._workers.clear()
        self._kill_orphans()

    def _handle_request(self) -> bool:
        """Handle one request of the parent. Returns False at the end of its requests."""
        data, fds, _, _ = socket.recv_fds(self._control, SIZE, FDS)
        if not data:
            return False
        message, pid, _ = unpack(data)
        if message == FORK:
            self._ends_at = math.inf
            self._fork(fds)
        elif message == EXPIRE:
            self._ends_at = time.monotonic() + pid
        elif message == KILL and pid in self._workers:
            _kill_session(pid)
        return True

    def _fork(self, fds: list[int]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # 3.12 warns of threads: OpenBLAS's, which handle forks
                pid = os.fork()
        except OSError:  # no more processes: the parent is told that none was started
            pid = -1
        if pid == 0:
            self._become_worker(fds)
        for fd in fds:
            os.close(fd)
        if pid > 0:
            self._workers.add(pid)
        self._control.sendall(pack(STARTED, max(pid, 0)))

    def _become_worker(self, fds: list[int]) -> None:
        """Run the worker's main function. Never returns."""
        try:
            host = os.getppid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            die_with_parent(host)
            self._control.close()
            os.close(self._wake)
            os.close(self._waker)
            requests, replies, marker, log = fds
            for standard in (1, 2):
                os.dup2(log, standard)
            os.close(log)
            from .worker_main import main

            main(requests, replies, marker)
        except BaseException:  # after any error: this process is not the host, and must not continue as one
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)

    def _reap(self) -> None:
        """Report the workers that ended, after their orphans are killed."""
        ended = []
        with contextlib.suppress(ChildProcessError):
            while (child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if child.si_pid in self._workers:
                    _kill_session(child.si_pid)  # kills all its forks, before its pid can be reused
                    self._workers.discard(child.si_pid)
                    ended.append(os.waitpid(child.si_pid, 0))
                else:
                    os.waitpid(child.si_pid, 0)
        if ended:
            self._kill_orphans()
        for pid, status in ended:
            self._control.sendall(pack(ENDED, pid, os.waitstatus_to_exitcode(status)))

    def _kill_orphans(self) -> None:
        """Kill every child that is no worker. Their children become this process's as they die, and are killed next."""
        deadline = time.monotonic() + _ORPHANS_S
        while (orphans := self._orphans()) and time.monotonic() < deadline:
            for orphan in orphans:
                with contextlib.suppress(psutil.Error):
                    orphan.kill()
            for orphan in orphans:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(orphan.pid, os.WNOHANG)
            time.sleep(0.001)

    def _orphans(self) -> list[psutil.Process]:
        if not self._workers:
            try:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            # No children at all, which is the usual case: no need to look through all processes.
            except ChildProcessError:
                return []
        return [child for child in psutil.Process().children() if child.pid not in self._workers]


def _kill_session(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # it may be dying before it has a session of its own
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
