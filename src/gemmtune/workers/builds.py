"""Building in a pool of processes sized to the machine.

A call of ``Builders`` blocks until every build is done and every building process is gone, so that later timing has the
machine to itself: on the CPU builds never overlap timing. On a GPU, timing does not depend on the CPU, and ``ahead``
builds candidates of later problems on the processors that are free meanwhile. Builds are pure and leave their artifacts
on disk under the hash of all their inputs. The worker that tries a candidate later calls ``Backend.build`` itself and
reads the artifact from there. A candidate whose artifact exists costs no process.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import psutil

from .. import backends
from ..backends.base import Artifact
from ..backends.location import artifacts_in
from ..core import plugins
from ..core.candidate import Candidate
from ..core.decision import Verdict
from ..core.devices import is_host
from ..core.errors import WorkerError
from ..core.problem import Problem
from ..core.target import Target
from ..timing.machine import allowed_cpus
from .contract import WorkerStartError, expect, ignore, path_or_none
from .host_pool import HostPool
from .process import Host, Lost, Process
from .protocol import Build, Built, Ready, Setup

_MEMORY_SHARE = 0.75  # share of the free memory, for all builders together


@dataclass(frozen=True, slots=True)
class BuildLimits:
    """Time and memory limits of one build.

    start_s: seconds from spawning to the first builder being ready. build_s: seconds per candidate. builders: number at
    a time; 0: one for each processor that this process may use. memory: bytes per builder; 0: an equal share of the
    free memory.
    """

    start_s: float = 60.0
    build_s: float = 120.0
    builders: int = 0
    memory: int = 0


class Builders:
    """A pool that builds the candidates of one Problem after another; ``close`` it, or use it as a context manager.

    artifacts: the directory for built files; None: that of the default store. The process that builders are forked from
    is started at the first build, and kept running. hosts: where it comes from, and where ``close`` puts it back; None:
    it is a new one, which ends. A worker of the same ``hosts`` may share it.
    """

    def __init__(
        self, limits: BuildLimits | None = None, artifacts: Path | None = None, hosts: HostPool | None = None
    ) -> None:
        self._limits, self._artifacts = limits or BuildLimits(), artifacts
        self._hosts = HostPool(most=0) if hosts is None else hosts
        self._running = _Running()
        self._count = self._limits.builders or len(allowed_cpus())
        self._slots = _BuildSlots(self._count)
        self._host_lock = threading.Lock()
        self._host: Host | None = None
        self._ahead_lock = threading.Lock()
        self._background: dict[_Turn, ThreadPoolExecutor] = {}
        self._early_builds: dict[tuple[str, str], _EarlyBuild] = {}
        self._built: set[tuple[str, str]] = set()  # the key of the Problem and the id, for what compiles in calls

    def __call__(
        self, problem: Problem, candidates: Iterable[Candidate], target: Target
    ) -> dict[str, Artifact | Verdict]:
        """Build candidates in parallel and return the outcome of each, by its id, in the order given.

        Each is built in a process of its own, within time and memory limits. One that fails, crashes or hangs has a
        Verdict (build_failed, unsupported, out_of_memory, crashed, hung) and affects no other. Prebuilt backends (those
        that inherit ``Backend.build``) and existing artifacts need no process. Call it before any timing, and with all
        candidates at once. Raises WorkerStartError when no process can be started, ValueError for an unknown backend.
        """
        finished = False
        try:
            builds = self.begin(problem, candidates, target)
            results = {name: future.result() for name, future in builds.items()}
            finished = True
        finally:  # also on Ctrl-C: waiting builds are dropped, and running ones lose their host
            if not finished:
                self.close()
        return results

    def begin(
        self, problem: Problem, candidates: Iterable[Candidate], target: Target
    ) -> dict[str, Future[Artifact | Verdict]]:
        """Begin to build candidates in parallel, and return the future of each outcome by its id.

        The futures' results are those of a call, and raise what it raises.
        """
        futures: dict[str, Future[Artifact | Verdict]] = {}
        compiled: list[Candidate] = []
        for candidate in {candidate.id: candidate for candidate in candidates}.values():
            artifact = self._existing_artifact(problem, candidate, target)
            futures[candidate.id] = Future()
            if artifact is not None:
                futures[candidate.id].set_result(artifact)
            else:
                compiled.append(candidate)
        if not compiled:
            return futures
        jobs = self._jobs(problem, compiled, target)
        slots, early_builds = self._slots, self._early_builds
        pool = ThreadPoolExecutor(self._count, thread_name_prefix="gemmtune-build")

        def build(candidate: Candidate) -> Artifact | Verdict:
            early_build = early_builds.pop((problem.key, candidate.id), None)
            if early_build is not None and not early_build.claim.acquire(blocking=False):
                with contextlib.suppress(WorkerError, CancelledError):  # otherwise this thread builds it
                    return early_build.future.result()
            with slots.acquired(_Turn.NOW):
                return self._build(jobs, candidate, _Turn.NOW)

        futures |= {candidate.id: pool.submit(build, candidate) for candidate in compiled}
        pool.shutdown(wait=False)  # its threads end after their builds
        return futures

    def begin_each(
        self, wanted: Iterable[tuple[Problem, Candidate]], target: Target
    ) -> dict[str, Future[Artifact | Verdict]]:
        """Begin to build candidates of several Problems in parallel, as ``begin`` does those of one."""
        by_problem: dict[Problem, list[Candidate]] = {}
        for problem, candidate in wanted:
            by_problem.setdefault(problem, []).append(candidate)
        return {name: future for item in by_problem.items() for name, future in self.begin(*item, target).items()}

    def ahead(self, problem: Problem, candidates: Iterable[Candidate], target: Target, *, later: bool = False) -> None:
        """Begin to build candidates that a later call for this Problem will ask for, and return.

        One processor is left free, and builds that a call waits for come first; those that are needed ``later``, for
        another Problem than the one that is tuned now, come last. Use it only where this disturbs no timing. Several
        threads may call it; never raises.
        """
        # A later call that needs the build raises the error.
        with self._ahead_lock, contextlib.suppress(WorkerError, ValueError):
            requested = {c.id: c for c in candidates if (problem.key, c.id) not in self._early_builds}
            missing = [c for c in requested.values() if self._existing_artifact(problem, c, target) is None]
            if not missing:
                return
            jobs = self._jobs(problem, missing, target)
            turn = _Turn.LATER if later else _Turn.SOON
            if turn not in self._background:
                self._background[turn] = ThreadPoolExecutor(self._count, thread_name_prefix="gemmtune-ahead")
            for candidate in missing:
                claim = threading.Lock()
                future = self._background[turn].submit(self._build_early, self._slots, turn, jobs, candidate, claim)
                self._early_builds[problem.key, candidate.id] = _EarlyBuild(claim, future)

    def start(self, device: str) -> None:
        """Begin to start the process that builders are forked from, for a kind of device, and return. Raises
        WorkerError when it cannot be started."""
        self._ready_host(device)

    def close(self) -> None:
        """End the builds in progress, and the process that builders are forked from unless it is put back.
        Idempotent."""
        self._slots.close()
        self._running.end()
        for pool in self._background.values():
            pool.shutdown(cancel_futures=True)
        with self._host_lock:
            if self._host is not None:
                self._hosts.put_back(self._host)
            self._host = None
        self._running = _Running()
        self._background.clear()
        self._early_builds.clear()
        self._slots = _BuildSlots(self._count)

    def __enter__(self) -> Builders:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build_early(
        self, slots: _BuildSlots, turn: _Turn, jobs: _Jobs, candidate: Candidate, claim: threading.Lock
    ) -> Artifact | Verdict:
        with slots.acquired(turn):
            if not claim.acquire(blocking=False):
                raise WorkerError("a call that could not wait builds it")
            artifact = self._existing_artifact(jobs.problem, candidate, jobs.target)
            return artifact or self._build(jobs, candidate, turn)

    def _build(self, jobs: _Jobs, candidate: Candidate, turn: _Turn) -> Artifact | Verdict:
        outcome = jobs.build(candidate, turn)
        self._built.add((jobs.problem.key, candidate.id))
        if isinstance(outcome, Verdict) and backends.get(candidate.backend).is_prebuilt:
            # Its first call compiles what was to be compiled here.
            return self._existing_artifact(jobs.problem, candidate, jobs.target) or outcome
        return outcome

    def _existing_artifact(self, problem: Problem, candidate: Candidate, target: Target) -> Artifact | None:
        """Return the artifact of a candidate for which nothing has to be built, else None. Raises ValueError for an
        unknown backend."""
        backend = backends.get(candidate.backend)
        with artifacts_in(self._artifacts):
            artifact = backend.artifact(problem, candidate, target)
        if artifact is None or (problem.key, candidate.id) in self._built:
            return artifact
        return None if backend.compiles_in_calls(problem, candidate, target) else artifact

    def _jobs(self, problem: Problem, candidates: list[Candidate], target: Target) -> _Jobs:
        limits = self._limits
        share = int(_MEMORY_SHARE * psutil.virtual_memory().available) // min(self._count, len(candidates))
        ready_host = functools.partial(self._ready_host, target.device)
        ready_host()  # begin to start it now
        return _Jobs(ready_host, self._running, problem, target, limits, limits.memory or share, self._artifacts)

    def _ready_host(self, device: str) -> Host:
        """Return the process to fork builders from, which has imported what builds for a kind of device need. One that
        ended is replaced. Raises WorkerError when no process can be spawned."""
        with self._host_lock:
            if self._host is not None and not self._host.alive:
                self._hosts.put_back(self._host)
                self._host = None
            self._host = self._host or self._hosts.take(backends.preloaded_modules(device))
            return self._host


class _Running:
    """The processes of builds in progress."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: set[Process] = set()
        self.ended = False

    @contextlib.contextmanager
    def include(self, process: Process) -> Iterator[None]:
        """Return a context in which ``end`` ends a process. Raises WorkerStartError after ``end``."""
        with self._lock:
            if self.ended:
                raise WorkerStartError("building was ended")
            self._processes.add(process)
        try:
            yield
        finally:
            with self._lock:
                self._processes.discard(process)

    def end(self) -> None:
        """End all processes; the threads that wait for their replies raise Lost."""
        with self._lock:
            self.ended = True
            for process in self._processes:
                process.end()


class _Turn(IntEnum):
    """When a build is needed. Those of a smaller turn go first."""

    NOW = 0  # a call waits for it
    SOON = 1
    LATER = 2


# On GPUs, where candidates are timed while others are built. Beside two busy processes for each processor Python code
# takes two to three times as long, 1.0 to 1.2 times where these have a niceness of 10
# (benchmarks/results/build-niceness-h200-20261130.txt).
_NICENESS = {_Turn.NOW: 5, _Turn.SOON: 10, _Turn.LATER: 15}


class _BuildSlots:
    """A limit on concurrent builds. Those of an earlier turn go first; all but those of ``_Turn.NOW`` leave one of
    several slots free."""

    def __init__(self, count: int) -> None:
        self._free, self._reserved, self._closed = count, min(1, count - 1), False
        self._waiting = dict.fromkeys(_Turn, 0)
        self._changed = threading.Condition()

    def close(self) -> None:
        """Raise WorkerStartError in every thread that waits or arrives later."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def acquired(self, turn: _Turn) -> Iterator[None]:
        with self._changed:
            self._waiting[turn] += 1
            try:
                self._changed.wait_for(lambda: self._closed or self._is_available(turn))
            finally:
                self._waiting[turn] -= 1
            if self._closed:
                raise WorkerStartError("building was ended")
            self._free -= 1
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()

    def _is_available(self, turn: _Turn) -> bool:
        reserved = 0 if turn is _Turn.NOW else self._reserved
        return self._free > reserved and not any(self._waiting[earlier] for earlier in _Turn if earlier < turn)


@dataclass(frozen=True, slots=True)
class _EarlyBuild:
    """A build that was begun before a call asked for it. claim: acquired by the thread that builds it."""

    claim: threading.Lock
    future: Future[Artifact | Verdict]


@dataclass(frozen=True, slots=True)
class _Jobs:
    """The common inputs of the builds of one Problem. ready_host: returns the process to fork builders from. running:
    has the processes of builds in progress. memory: bytes per builder; artifacts: as in ``Builders``."""

    ready_host: Callable[[], Host]
    running: _Running
    problem: Problem
    target: Target
    limits: BuildLimits
    memory: int
    artifacts: Path | None

    def build(self, candidate: Candidate, turn: _Turn) -> Artifact | Verdict:
        """Build one candidate in a process of its own, whose priority follows from when the build is needed. Raises
        WorkerStartError when no process can be started.

        A build whose host ended is repeated once, in a new one: another process of the host may have caused it.
        """
        host = self.ready_host()
        try:
            built = self._build_in(host, candidate, turn)
            if not isinstance(built, Verdict) or built.kind != "crashed" or host.alive or self.running.ended:
                return built
        except WorkerStartError:
            if host.alive or self.running.ended:
                raise
        return self._build_in(self.ready_host(), candidate, turn)

    def _build_in(self, host: Host, candidate: Candidate, turn: _Turn) -> Artifact | Verdict:
        with contextlib.closing(Process(host, self.limits.build_s)) as process, self.running.include(process):
            try:
                guests, modules, artifacts = backends.plugins(), plugins.modules(), path_or_none(self.artifacts)
                process.send(Setup(self.target.to_dict(), guests, modules, artifacts=artifacts))
                expect(process.reply(self.limits.start_s, ignore), Ready)
            except (Lost, WorkerError) as error:
                raise WorkerStartError(f"no process to build in could be started: {error}") from error
            try:
                niceness = 0 if is_host(self.target.device) else _NICENESS[turn]
                process.send(Build(self.problem.to_dict(), candidate.to_dict(), self.memory, niceness))
                built = expect(process.reply(self.limits.build_s, ignore), Built)
            except Lost as lost:
                return lost.verdict
            except WorkerError as error:  # it declined, or sent another reply
                return Verdict("build_failed", str(error))
        if built.verdict is not None:
            return built.verdict
        return Artifact(candidate, built.digest, None if built.path is None else Path(built.path))
