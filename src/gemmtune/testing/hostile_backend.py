"""A backend whose candidates misbehave in every way that a worker must survive, beside some that are honest.

backends.register("hostile", "gemmtune.testing.hostile_backend:HostileBackend")
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..backends.base import Artifact, Availability, Backend, Candidate, Illegal, Kernel, PackedWeight
from ..errors import KernelError, UnsupportedError
from ..problem import Problem
from ..target import Target

PLACE = "gemmtune.testing.hostile_backend:HostileBackend"
PACKING = "hostile:row"


def _segv() -> None:
    ctypes.string_at(0)


def _hang() -> None:
    while True:
        time.sleep(1000)


def _orphan() -> None:
    """Leave a child behind that holds every pipe, then die."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], close_fds=False)
    os._exit(7)


def _flood() -> None:
    for _ in range(200):
        os.write(1, b"x" * 10_000)
        os.write(2, b"y" * 10_000)


def _babble() -> None:
    """Write to every descriptor that is open: the reply pipe is one of them."""
    for fd in range(3, 64):
        try:
            os.write(fd, b"\x08\x00\x00\x00not json")
        except OSError:
            continue


def _raise(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


ACTS: dict[str, Callable[[], None]] = {
    "segv": _segv, "abort": os.abort, "exit": lambda: os._exit(0), "hang": _hang, "orphan": _orphan, "babble": _babble,
    "raise": _raise(ValueError("not today")), "sys_exit": _raise(SystemExit(0)),
    "oom": _raise(RuntimeError("DefaultCPUAllocator: can't allocate memory")), "flood": _flood,
}  # fmt: skip
"""What a candidate of that kind does before it computes the right answer, if it gets there."""


def _in_a_race() -> bool:
    """Whether the kernel that asks is being called by a race."""
    return str(sys._getframe(2).f_globals["__name__"]).endswith(".timing")


class HostileKernel(Kernel):
    """Does its ``kind`` of mischief, then the product in float32.

    ``late_...`` behaves while it is checked (and is fast: it remembers its answers), and turns bad when it races.
    ``packed``: honest, wants B packed. ``greedy``: honest, and says that it needs a terabyte.
    """

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        self.problem, self.candidate = problem, candidate
        self.kind = str(candidate["kind"])
        self.packing = PACKING if self.kind == "packed" else None
        self.workspace_bytes = 1 << 40 if self.kind == "greedy" else 0
        self.known: dict[int, Tensor] = {}

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
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
