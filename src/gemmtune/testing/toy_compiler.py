"""A backend with a build step. Its builds succeed, take time, fail, crash or hang, according to the candidate.

backends.register("toy", "gemmtune.testing.toy_compiler:ToyCompiler")
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..backends.artifacts import artifacts_directory
from ..backends.base import Artifact, Availability, Backend, Kernel
from ..core.artifacts import Artifacts
from ..core.candidate import Candidate, Illegal
from ..core.errors import KernelError, UnsupportedError
from ..core.problem import Problem
from ..core.target import Target

ENTRY_POINT = "gemmtune.testing.toy_compiler:ToyCompiler"
KINDS = ("good", "slow", "fails", "unsupported", "segv", "exit", "hang", "greedy")


class ToyKernel(Kernel):
    """A kernel that computes the product in float32 with ATen."""

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        self.problem, self.candidate = problem, candidate
        self.workspace_bytes = 4 * (problem.m + problem.n) * (problem.k + problem.m)

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(torch.mm(a.float(), b.float()))


class ToyCompiler(Backend):
    """A backend that lists a candidate of each of ``KINDS`` for float32 products without a batch.

    The build of a ``slow`` candidate sleeps for its config's ``seconds``. The build of a ``meets`` candidate, which is
    not listed, waits until the build of another one is running: its config has its own name ``me`` and that of the
    ``other``. The build of a ``nice`` one, which is not listed either, writes its process's niceness into a file that
    is called ``me`` in its config.
    """

    name = "toy"

    def available(self, target: Target) -> Availability:
        return Availability(True)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        reason = "takes plain float32 products" if _is_unsupported(problem) else ""
        for kind in KINDS:
            candidate = Candidate.make(self.name, kind, kind=kind)
            yield Illegal(candidate, reason) if reason else candidate

    def build(self, problem: Problem, candidate: Candidate, target: Target) -> Artifact:
        """Write an artifact under the hash of its inputs, unless it exists."""
        folder = artifacts_directory()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _misbehave(str(candidate["kind"]), candidate, folder)
        digest = hashlib.sha256(f"{problem.plan_key}|{candidate.id}|{self.source_digest()}".encode()).hexdigest()
        artifacts = Artifacts(folder)
        return Artifact(candidate, digest, artifacts.get(digest) or artifacts.put(digest, candidate.id.encode()))

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        if _is_unsupported(problem) or artifact.path is None or artifact.path.read_text() != artifact.candidate.id:
            raise KernelError(f"{artifact.candidate.id} was not built for {problem.key}")
        return ToyKernel(problem, artifact.candidate)

    def source_digest(self) -> str:
        return "toy"


def _is_unsupported(problem: Problem) -> bool:
    return problem.family != "mm" or {problem.a.dtype, problem.b.dtype, problem.out_dtype} != {"float32"}


def _misbehave(kind: str, candidate: Candidate, folder: Path) -> None:
    """Do what a build of this kind does before it succeeds, if it succeeds."""
    match kind:
        case "slow":
            time.sleep(float(dict(candidate.config).get("seconds", 0.1)))
        case "meets":  # the other build waits for this one too
            (folder / str(candidate["me"])).touch()
            while not (folder / str(candidate["other"])).exists():
                time.sleep(0.01)
        case "nice":
            (folder / str(candidate["me"])).write_text(str(os.nice(0)), encoding="ascii")
        case "fails":
            raise KernelError("does not compile")
        case "unsupported":
            raise UnsupportedError("needs a newer compiler")
        case "segv":
            ctypes.string_at(0)
        case "exit":
            os._exit(0)
        case "hang":
            time.sleep(1000)
        case "greedy":
            bytearray(1 << 40)
