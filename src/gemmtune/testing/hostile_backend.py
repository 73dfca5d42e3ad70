"""A backend whose candidates misbehave in the ways that a worker must survive, and some that behave well.

backends.register("hostile", "gemmtune.testing.hostile_backend:HostileBackend")
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..backends.base import Artifact, Availability, Backend, Kernel
from ..core.candidate import Candidate, Illegal
from ..core.errors import KernelError, UnsupportedError
from ..core.problem import Problem
from ..core.target import Target
from ..core.weights import PackedWeight
from ..timing import race_operands

ENTRY_POINT = "gemmtune.testing.hostile_backend:HostileBackend"
PACKING = "hostile:row"


def _segv() -> None:
    ctypes.string_at(0)


def _hang() -> None:
    while True:
        time.sleep(1000)


def _hold_gil() -> None:
    """Sleep with the GIL held, so that the process sends no heartbeat."""
    ctypes.PyDLL(None).sleep(1000)


def _busy_loop() -> None:
    while True:
        pass


def _stop_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _start_sleeper(**popen_options: Any) -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], **popen_options)


def _orphan_and_exit() -> None:
    """Start a child process that inherits every pipe, then exit."""
    _start_sleeper(close_fds=False)
    os._exit(7)


_forked = False


def _fork() -> None:
    """Fork at the first call: both processes return."""
    global _forked
    if not _forked:
        _forked = True
        os.fork()


def _leave_child() -> None:
    """Fork a child that does not end, and return in the parent."""
    if os.fork() == 0:
        _hang()


def _leave_daemon() -> None:
    """Start a process that does not end, and return.

    The process has another parent, another session, an empty environment and none of this process's descriptors.
    """
    if (pid := os.fork()) == 0:
        os.setsid()
        _start_sleeper(env={}, close_fds=True, start_new_session=True)
        os._exit(0)
    os.waitpid(pid, 0)


def _daemon_segv() -> None:
    _leave_daemon()
    _segv()


def _kill_host() -> None:
    """Kill the process that this one was forked from, and hang until that ends this one, too."""
    os.kill(os.getppid(), signal.SIGKILL)
    _hang()


def _fill_memory() -> None:
    """Allocate memory until none is available."""
    allocations = []
    while True:
        allocations.append(torch.ones(64 << 20, dtype=torch.uint8))


_context_lost = False


def _lose_context() -> None:
    """Simulate the loss of the context after an illegal access on a device: every later call in this process raises."""
    global _context_lost
    _context_lost = True
    raise RuntimeError("illegal memory access (simulated)")


def _close_descriptors() -> None:
    """Close every file descriptor from 3 on."""
    os.closerange(3, 256)


def _flood_output() -> None:
    for _ in range(200):
        os.write(1, b"x" * 10_000)
        os.write(2, b"y" * 10_000)


def _write_nonsense() -> None:
    """Write an invalid message to every open file descriptor from 3 on, which include the reply pipe."""
    _write_to_all(b"\x08\x00\x00\x00not json")


def _write_to_all(data: bytes) -> None:
    for fd in range(3, 64):
        try:
            os.write(fd, data)
        except OSError:
            continue


def _send_partial_message() -> None:
    """Send the start of a message, then hang."""
    _write_to_all(b'\x40\x00\x00\x00{"type":')
    _hang()


def _send_unrequested() -> None:
    """Send a well-formed reply to a request that was not made."""
    body = b'{"type":"Ready","bytes":1}'
    _write_to_all(len(body).to_bytes(4, "little") + body)


def _raise(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


ACTS: dict[str, Callable[[], None]] = {
    "segv": _segv, "abort": os.abort, "exit": lambda: os._exit(0), "hang": _hang, "orphan": _orphan_and_exit,
    "babble": _write_nonsense, "raise": _raise(ValueError("not today")), "sys_exit": _raise(SystemExit(0)),
    "oom": _raise(RuntimeError("DefaultCPUAllocator: can't allocate memory")), "flood": _flood_output,
    "hold": _hold_gil, "spin": _busy_loop, "stop": _stop_process, "fork": _fork, "child": _leave_child,
    "daemon": _leave_daemon, "daemon_segv": _daemon_segv, "fill_memory": _fill_memory, "poison": _lose_context,
    "close": _close_descriptors, "garble": _send_partial_message, "unasked": _send_unrequested,
    "kill_host": _kill_host,
}  # fmt: skip
"""What a candidate of each kind does before it computes the correct result, if it still can."""


def is_racing() -> bool:
    """Whether the race calls the kernel: whether the caller of its ``run`` is in ``timing.race_operands``."""
    return bool(sys._getframe(2).f_globals["__name__"] == race_operands.__name__)


class HostileKernel(Kernel):
    """A kernel that does what its ``kind`` says (``ACTS``), then computes the product in float32.

    A kind ``late_...`` is correct while it is verified, and misbehaves when it races; it caches its results, so that it
    is fast. ``scribble`` clears A after the product. ``packed`` is correct and needs B packed. ``greedy`` is correct
    and declares a workspace of a terabyte. ``wrong`` writes zeros.
    """

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        self.problem, self.candidate = problem, candidate
        self.kind = str(candidate["kind"])
        self.packing = PACKING if self.kind == "packed" else None
        self.workspace_bytes = 1 << 40 if self.kind == "greedy" else 0
        self.results: dict[int, Tensor] = {}

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        if _context_lost:
            raise RuntimeError("the context was lost before (simulated)")
        action = ACTS.get(self.kind.removeprefix("late_"))
        if action is not None and (is_racing() or not self.kind.startswith("late_")):
            action()
        if isinstance(b, PackedWeight):
            (b,) = b.data
        if self.kind.startswith("late_"):
            if a.data_ptr() not in self.results:
                self.results[a.data_ptr()] = torch.mm(a, b)
            out.copy_(self.results[a.data_ptr()])
            return
        if self.kind == "wrong":  # and fast, so that the tuner goes on to verify it
            out.zero_()
            return
        out.copy_(torch.mm(a.float(), b.float()))
        if self.kind == "scribble":
            a.zero_()

    def pack(self, b: Any) -> PackedWeight:
        return PackedWeight(PACKING, (b.contiguous(),), self.problem.n, self.problem.k, self.problem.b.dtype)


class HostileBackend(Backend):
    """A backend that lists one candidate for each of ``kinds``, and ``illegal`` illegal ones."""

    name = "hostile"
    kinds: ClassVar[tuple[str, ...]] = ("good", "packed", "wrong", "raise")
    illegal: ClassVar[int] = 0

    def available(self, target: Target) -> Availability:
        return Availability(True)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        for kind in self.kinds:
            yield Candidate.make(self.name, kind, kind=kind)
        for index in range(self.illegal):
            yield Illegal(Candidate.make(self.name, "refused", number=index), f"{index} is no good")

    def build(self, problem: Problem, candidate: Candidate, target: Target) -> Artifact:
        if candidate["kind"] == "unbuildable":
            raise KernelError("does not compile")
        return Artifact(candidate, digest="")

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        if artifact.candidate["kind"] == "unsupported":
            raise UnsupportedError("not on this machine")
        return HostileKernel(problem, artifact.candidate)

    def source_digest(self) -> str:
        return "hostile"
