"""Building in a pool of processes sized to the machine.

A call of ``Builders`` blocks until every build is done and every process that built is gone, so that what is timed
afterwards has the machine to itself: on the CPU builds never overlap timing. Where timing is a GPU's own affair,
``ahead`` meanwhile builds what later problems will want, on the processors that are left. Builds are pure and leave
their artifacts on disk under the hash of all that went into them; the worker that tries a candidate later calls
``Backend.build`` itself and finds it there. What is there already costs no process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from .. import backends
from ..backends.base import Artifact, Backend
from ..backends.location import artifacts_in
from ..core.candidate import Candidate
from ..core.decision import Verdict
from ..core.errors import WorkerError
from ..core.problem import Problem
from ..core.target import Target
from ..timing.machine import allowed_cpus
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

    artifacts: the directory for what is built; None: that of the default store.

    The process that builders are forked from is started at the first build that is needed, and kept.
    """

    def __init__(self, limits: BuildLimits | None = None, artifacts: Path | None = None) -> None:
        self._limits, self._artifacts = limits or BuildLimits(), artifacts
        self._count = self._limits.builders or len(allowed_cpus())
        self._slots = _Slots(self._count)
        self._host: Host | None = None
        self._background: ThreadPoolExecutor | None = None
        self._early: dict[tuple[str, str], _Early] = {}

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
            made = _at_hand(problem, candidate, target, self._artifacts)
            if made is not None:
                done[candidate.id] = made
            else:
                compiled.append(candidate)
        if compiled:
            done |= self._build_all(problem, compiled, target)
        return {name: done[name] for name in chosen}

    def ahead(self, problem: Problem, candidates: Iterable[Candidate], target: Target) -> None:
        """Begin to build what a later call for this Problem will ask for, and return. One processor is left alone, and
        what a call waits for comes first. Only where this disturbs no timing; never raises."""
        wanted = {c.id: c for c in candidates if (problem.key, c.id) not in self._early}
        with contextlib.suppress(WorkerError, ValueError):  # a call that needs it will say so
            todo = [candidate for candidate in wanted.values() if self._is_missing(problem, candidate, target)]
            if not todo:
                return
            jobs = self._jobs(problem, todo, target)
            self._background = self._background or ThreadPoolExecutor(self._count, thread_name_prefix="gemmtune-ahead")
            for candidate in todo:
                claim = threading.Lock()
                done = self._background.submit(self._build_early, self._slots, jobs, candidate, claim)
                self._early[problem.key, candidate.id] = _Early(claim, done)

    def close(self) -> None:
        """End the process that builders are forked from, and with it what is being built. Idempotent."""
        self._slots.close()
        if self._host is not None:
            self._host.close()
        if self._background is not None:
            self._background.shutdown(cancel_futures=True)
        self._host = self._background = None
        self._early.clear()
        self._slots = _Slots(self._count)

    def __enter__(self) -> Builders:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build_all(
        self, problem: Problem, candidates: list[Candidate], target: Target
    ) -> dict[str, Artifact | Verdict]:
        jobs = self._jobs(problem, candidates, target)
        slots, early = self._slots, self._early
        pool = ThreadPoolExecutor(self._count, thread_name_prefix="gemmtune-build")

        def build(candidate: Candidate) -> Artifact | Verdict:
            begun = early.pop((problem.key, candidate.id), None)
            if begun is not None and not begun.claim.acquire(blocking=False):
                with contextlib.suppress(WorkerError, CancelledError):  # then it is built here
                    return begun.done.result()
            with slots.taken(urgent=True):
                return jobs.build(candidate)

        finished = False
        try:
            found = list(pool.map(build, candidates))
            finished = True
        finally:  # Ctrl-C too: what is waiting is dropped, and what runs loses its host
            if not finished:
                self.close()
            pool.shutdown(cancel_futures=True)
        return {candidate.id: result for candidate, result in zip(candidates, found, strict=True)}

    @staticmethod
    def _build_early(slots: _Slots, jobs: _Jobs, candidate: Candidate, claim: threading.Lock) -> Artifact | Verdict:
        with slots.taken(urgent=False):
            if not claim.acquire(blocking=False):
                raise WorkerError("a call that could not wait builds it")
            return _at_hand(jobs.problem, candidate, jobs.target, jobs.artifacts) or jobs.build(candidate)

    def _is_missing(self, problem: Problem, candidate: Candidate, target: Target) -> bool:
        return _at_hand(problem, candidate, target, self._artifacts) is None

    def _jobs(self, problem: Problem, candidates: list[Candidate], target: Target) -> _Jobs:
        limits = self._limits
        share = int(_MEMORY_SHARE * psutil.virtual_memory().available) // min(self._count, len(candidates))
        host = self._ready_host({name for c in candidates for name in backends.get(c.backend).preload})
        return _Jobs(host, problem, target, limits, limits.memory or share, self._artifacts)

    def _ready_host(self, preload: set[str]) -> Host:
        if self._host is not None and not self._host.alive:
            self.close()
        self._host = self._host or Host(preload=sorted(preload))
        return self._host


class _Slots:
    """So many builds at once. Those that somebody waits for go first; the others leave one of several slots alone."""

    def __init__(self, count: int) -> None:
        self._free, self._spared, self._urgent, self._closed = count, min(1, count - 1), 0, False
        self._changed = threading.Condition()

    def close(self) -> None:
        """Raise WorkerStartError in whoever waits, and in whoever comes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def taken(self, *, urgent: bool) -> Iterator[None]:
        with self._changed:
            self._urgent += urgent
            try:
                self._changed.wait_for(lambda: self._closed or self._open(urgent))
            finally:
                self._urgent -= urgent
            if self._closed:
                raise WorkerStartError("building was ended")
            self._free -= 1
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()

    def _open(self, urgent: bool) -> bool:
        return self._free > 0 if urgent else self._free > self._spared and not self._urgent


@dataclass(frozen=True, slots=True)
class _Early:
    """A build begun ahead of its time. claim: taken by whoever builds it."""

    claim: threading.Lock
    done: Future[Artifact | Verdict]


@dataclass(frozen=True, slots=True)
class _Jobs:
    """What builds of one Problem have in common. memory: bytes a builder; artifacts: as ``Builders`` has it."""

    host: Host
    problem: Problem
    target: Target
    limits: BuildLimits
    memory: int
    artifacts: Path | None

    def build(self, candidate: Candidate) -> Artifact | Verdict:
        """Build one in a process of its own. Raises WorkerStartError when there can be none."""
        with contextlib.closing(Process(self.host, self.limits.build_s)) as process:
            try:
                artifacts = None if self.artifacts is None else str(self.artifacts)
                _send(process, Setup(self.target.to_dict(), backends.plugins(), artifacts=artifacts))
                expect(process.reply(self.limits.start_s, ignore), Ready)
            except (Lost, WorkerError) as error:
                raise WorkerStartError(f"no process to build in could be started: {error}") from error
            try:
                _send(process, Build(self.problem.to_dict(), candidate.to_dict(), self.memory))
                built = expect(process.reply(self.limits.build_s, ignore), Built)
            except Lost as lost:
                return lost.verdict
            except WorkerError as error:  # it declined, or babbled
                return Verdict("build_failed", str(error))
        if built.verdict is not None:
            return built.verdict
        return Artifact(candidate, built.digest, None if built.path is None else Path(built.path))


def prebuild(
    problem: Problem,
    candidates: Iterable[Candidate],
    target: Target,
    *,
    limits: BuildLimits | None = None,
    artifacts: Path | None = None,
) -> dict[str, Artifact | Verdict]:
    """Build the candidates of one Problem; see ``Builders``."""
    with Builders(limits, artifacts) as builders:
        return builders(problem, candidates, target)


def is_prebuilt(backend: Backend) -> bool:
    """Whether there is nothing to build: the backend's kernels came with it."""
    return type(backend).build is Backend.build


def _at_hand(problem: Problem, candidate: Candidate, target: Target, artifacts: Path | None) -> Artifact | None:
    """What needs no building. Raises ValueError for an unknown backend."""
    backend = backends.get(candidate.backend)
    with artifacts_in(artifacts):
        made = backend.artifact(problem, candidate, target)
    return backend.build(problem, candidate, target) if made is None and is_prebuilt(backend) else made


def _send(process: Process, request: Request) -> None:
    with contextlib.suppress(OSError):  # one that is gone is found out by its reply
        process.send(request)
