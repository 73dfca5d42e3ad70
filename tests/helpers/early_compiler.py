"""A prebuilt backend whose candidates' first calls compile something that a build can compile before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gemmtune.backends.base import Artifact, Availability, Backend, Kernel
from gemmtune.core.candidate import Candidate, Illegal
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target

ENTRY_POINT = f"{__name__}:EarlyCompiler"


class EarlyCompiler(Backend):
    """Candidates ``plain``, ``compiles``, ``raises`` and ``crashes``, as compiling them early does. Each compilation
    adds a line to the file that their ``log`` names."""

    name = "early"

    def available(self, target: Target) -> Availability:
        return Availability(True)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        yield from ()

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        raise NotImplementedError

    def source_digest(self) -> str:
        return "early"

    def compiles_in_calls(self, problem: Problem, candidate: Candidate, target: Target) -> bool:
        return candidate.template != "plain"

    def compile_early(self, problem: Problem, candidate: Candidate, target: Target) -> None:
        with Path(str(candidate["log"])).open("a") as log:
            log.write(f"{candidate.template} {problem.m} {os.getpid()}\n")
        if candidate.template == "raises":
            raise RuntimeError("it does not compile")
        if candidate.template == "crashes":
            os.abort()
