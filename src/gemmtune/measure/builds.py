"""Building in a pool of processes sized to the machine, before anything is timed.

``Builders`` block until every build is done and every process that built is gone, so that what is timed afterwards has
the machine to itself: on the CPU builds never overlap timing. Builds are pure and leave their artifacts on disk under
the hash of all that went into them; the worker that tries a candidate later calls ``Backend.build`` itself and finds it
there. What is there already costs no process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from .. import backends
from ..backends.base import Artifact, Backend, Candidate
from ..decision import Verdict
from ..errors import WorkerError
from ..problem import Problem
from ..target import Target
from .machine import allowed_cpus
from .process import Host, Lost, Process
from .protocol import Build, Built, Ready, Request, Setup
from .worker import WorkerStartError, expect, ignore

_MEMORY_SHARE = 0.75  # of what is free, for all builders together


@dataclass(frozen=True, slots=True)
class BuildLimits:
    """How long one build may take and what it may allocate.

    start_s: seconds from spawning to the first builder being ready. build_s: seconds a candidate. builders: at once;
    0: one for each processor this process may use. memory: bytes a builder; 0: an equal share of what is free.
    """

    start_s: float = 60.0
    build_s: float = 120.0
    builders: int = 0
    memory: int = 0


class Builders:
    """Builds the candidates of one Problem after another; ``close`` it, or use it as a context manager.

    The process that builders are forked from is started at the first build that is needed, and kept.
    """

    def __init__(self, limits: BuildLimits | None = None) -> None:
        self._limits = limits or BuildLimits()
        self._host: Host | None = None

    def __call__(
        self, problem: Problem, candidates: Iterable[Candidate], target: Target
    ) -> dict[str, Artifact | Verdict]:
        """Build candidates side by side; what became of each, by its id, in the order given.

        Each is built in a process of its own, within time and memory; one that fails, crashes or hangs has a Verdict
        (build_failed, unsupported, out_of_memory, crashed, hung) and costs no other. Prebuilt backends (those that
        inherit ``Backend.build``) and artifacts that are there need no process. Call it before any timing, and with all
        candidates at once. Raises WorkerStartError when no process can be started, ValueError for an unknown backend.
        """
        chosen = {candidate.id: candidate for candidate in candidates}
        done: dict[str, Artifact | Verdict] = {}
        compiled: list[Candidate] = []
        for candidate in chosen.values():
            backend = backends.get(candidate.backend)
            made = backend.artifact(problem, candidate, target)
            if made is not None:
                done[candidate.id] = made
            elif is_prebuilt(backend):
                done[candidate.id] = backend.build(problem, candidate, target)
            else:
                compiled.append(candidate)
        if compiled:
            done |= self._build_all(problem, compiled, target)
        return {name: done[name] for name in chosen}

    def close(self) -> None:
        """End the process that builders are forked from. Idempotent."""
        if self._host is not None:
            self._host.close()
        self._host = None

    def __enter__(self) -> Builders:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build_all(
        self, problem: Problem, candidates: list[Candidate], target: Target
    ) -> dict[str, Artifact | Verdict]:
        limits = self._limits
        count = min(limits.builders or len(allowed_cpus()), len(candidates))
        memory = limits.memory or int(_MEMORY_SHARE * psutil.virtual_memory().available) // count
        setup = Setup(target.to_dict(), backends.guests())
        host = self._ready_host({name for c in candidates for name in backends.get(c.backend).preload})
        pool = ThreadPoolExecutor(count, thread_name_prefix="gemmtune-build")

        def build(candidate: Candidate) -> Artifact | Verdict:
            return _build_one(host, setup, Build(problem.to_dict(), candidate.to_dict(), memory), candidate, limits)

        finished = False
        try:
            found = list(pool.map(build, candidates))
            finished = True
        finally:  # Ctrl-C too: what is waiting is dropped, and what runs loses its host
            if not finished:
                self.close()
            pool.shutdown(cancel_futures=True)
        return {candidate.id: result for candidate, result in zip(candidates, found, strict=True)}

    def _ready_host(self, preload: set[str]) -> Host:
        if self._host is not None and not self._host.alive:
            self.close()
        self._host = self._host or Host(preload=sorted(preload))
        return self._host


def prebuild(
    problem: Problem, candidates: Iterable[Candidate], target: Target, *, limits: BuildLimits | None = None
) -> dict[str, Artifact | Verdict]:
    """Build the candidates of one Problem; see ``Builders``."""
    with Builders(limits) as builders:
        return builders(problem, candidates, target)


def is_prebuilt(backend: Backend) -> bool:
    """Whether there is nothing to build: the backend's kernels came with it."""
    return type(backend).build is Backend.build


def _build_one(
    host: Host, setup: Setup, request: Build, candidate: Candidate, limits: BuildLimits
) -> Artifact | Verdict:
    with contextlib.closing(Process(host, limits.build_s)) as process:
        try:
            _send(process, setup)
            expect(process.reply(limits.start_s, ignore), Ready)
        except (Lost, WorkerError) as error:
            raise WorkerStartError(f"no process to build in could be started: {error}") from error
        try:
            _send(process, request)
            built = expect(process.reply(limits.build_s, ignore), Built)
        except Lost as lost:
            return lost.verdict
        except WorkerError as error:  # it declined, or babbled
            return Verdict("build_failed", str(error))
    if built.verdict is not None:
        return built.verdict
    return Artifact(candidate, built.digest, None if built.path is None else Path(built.path))


def _send(process: Process, request: Request) -> None:
    with contextlib.suppress(OSError):  # one that is gone is found out by its reply
        process.send(request)
