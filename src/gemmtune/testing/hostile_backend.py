"""A backend whose candidates misbehave in every way that a worker must survive, beside some that are honest.

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

PLACE = "gemmtune.testing.hostile_backend:HostileBackend"
PACKING = "hostile:row"


def _segv() -> None:
    ctypes.string_at(0)


def _hang() -> None:
    while True:
        time.sleep(1000)


def _hold() -> None:
    """Sleep with the interpreter's lock held: no heartbeat leaves."""
    ctypes.PyDLL(None).sleep(1000)


def _spin() -> None:
    while True:
        pass


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleeper(**how: Any) -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], **how)


def _orphan() -> None:
    """Leave a child behind that holds every pipe, then die."""
    _sleeper(close_fds=False)
    os._exit(7)


_forked = False


def _fork() -> None:
    """Return twice, once."""
    global _forked
    if not _forked:
        _forked = True
        os.fork()


def _child() -> None:
    """Leave a child running, and go on."""
    if os.fork() == 0:
        _hang()


def _daemon() -> None:
    """Leave a process behind that has another parent, session, environment and no descriptor in common; go on."""
    if (pid := os.fork()) == 0:
        os.setsid()
        _sleeper(env={}, close_fds=True, start_new_session=True)
        os._exit(0)
    os.waitpid(pid, 0)


def _daemon_segv() -> None:
    _daemon()
    _segv()


def _fill_memory() -> None:
    """Take memory until there is none."""
    kept = []
    while True:
        kept.append(torch.ones(64 << 20, dtype=torch.uint8))


_poisoned = False


def _poison() -> None:
    """Lose the context, as after an illegal access on a device: nothing works in this process from now on."""
    global _poisoned
    _poisoned = True
    raise RuntimeError("illegal memory access (simulated)")


def _close() -> None:
    """Close every descriptor."""
    os.closerange(3, 256)


def _flood() -> None:
    for _ in range(200):
        os.write(1, b"x" * 10_000)
        os.write(2, b"y" * 10_000)


def _babble() -> None:
    """Write nonsense to every descriptor that is open: the reply pipe is one of them."""
    _to_all(b"\x08\x00\x00\x00not json")


def _to_all(data: bytes) -> None:
    for fd in range(3, 64):
        try:
            os.write(fd, data)
        except OSError:
            continue


def _garble() -> None:
    """Send the start of a message, and no more of it."""
    _to_all(b'\x40\x00\x00\x00{"type":')
    _hang()


def _unasked() -> None:
    """Send a well-formed answer to another question."""
    body = b'{"type":"Ready","bytes":1}'
    _to_all(len(body).to_bytes(4, "little") + body)


def _raise(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


ACTS: dict[str, Callable[[], None]] = {
    "segv": _segv, "abort": os.abort, "exit": lambda: os._exit(0), "hang": _hang, "orphan": _orphan, "babble": _babble,
    "raise": _raise(ValueError("not today")), "sys_exit": _raise(SystemExit(0)),
    "oom": _raise(RuntimeError("DefaultCPUAllocator: can't allocate memory")), "flood": _flood, "hold": _hold,
    "spin": _spin, "stop": _stop, "fork": _fork, "child": _child, "daemon": _daemon, "daemon_segv": _daemon_segv,
    "fill_memory": _fill_memory, "poison": _poison, "close": _close, "garble": _garble, "unasked": _unasked,
}  # fmt: skip
"""What a candidate of that kind does before it computes the right answer, if it gets there."""


def _in_a_race() -> bool:
    """Whether the kernel that asks is being called by a race."""
    return str(sys._getframe(2).f_globals["__name__"]).endswith(".timing")


class HostileKernel(Kernel):
    """Does its ``kind`` of mischief, then the product in float32.

    ``late_...`` behaves while it is checked (and is fast: it remembers its answers), and turns bad when it races.
    ``scribble`` clears A when it is done. ``packed``: honest, wants B packed. ``greedy``: honest, and says that it
    needs a terabyte.
    """

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        self.problem, self.candidate = problem, candidate
        self.kind = str(candidate["kind"])
        self.packing = PACKING if self.kind == "packed" else None
        self.workspace_bytes = 1 << 40 if self.kind == "greedy" else 0
        self.known: dict[int, Tensor] = {}

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        if _poisoned:
            raise RuntimeError("the context was lost before (simulated)")
        act = ACTS.get(self.kind.removeprefix("late_"))
        if act is not None and (_in_a_race() or not self.kind.startswith("late_")):
            act()
        if isinstance(b, PackedWeight):
            (b,) = b.data
        if self.kind.startswith("late_"):
            if a.data_ptr() not in self.known:
                self.known[a.data_ptr()] = torch.mm(a, b)
            out.copy_(self.known[a.data_ptr()])
            return
        if self.kind == "wrong":  # and fast: the kind that is worth checking
            out.zero_()
            return
        out.copy_(torch.mm(a.float(), b.float()))
        if self.kind == "scribble":
            a.zero_()

    def pack(self, b: Any) -> PackedWeight:
        return PackedWeight(PACKING, (b.contiguous(),), self.problem.n, self.problem.k, self.problem.b.dtype)


class HostileBackend(Backend):
    """Lists one candidate for each of ``kinds``; ``illegal``: how many refused ones it lists besides."""

    name = "hostile"
    kinds: ClassVar[tuple[str, ...]] = ("good", "packed", "wrong", "raise")
    illegal: ClassVar[int] = 0

    def available(self, target: Target) -> Availability:
        return Availability(True)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        for kind in self.kinds:
            yield Candidate.make(self.name, kind, kind=kind)
        for number in range(self.illegal):
            yield Illegal(Candidate.make(self.name, "refused", number=number), f"{number} is no good")

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
