"""The worker process of a tuning run, and the builders beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path

from ..backends.base import Artifact
from ..core.candidate import Candidate
from ..core.decision import Verdict
from ..core.problem import Problem
from ..core.target import Target
from ..timing.clock import Latency
from ..workers.builds import Builders
from ..workers.contract import Limits, MeasurementWorker
from ..workers.host_pool import HOST_POOL
from ..workers.local_worker import LocalWorker
from ..workers.worker import Worker

# Begins to build candidates, each for a Problem, and returns the futures of the outcomes by candidate id.
BeginBuilds = Callable[[Iterable[tuple[Problem, Candidate]], Target], Mapping[str, Future[Artifact | Verdict]]]


class WorkerPool:
    """The worker, which is started at the first problem that needs one, the builders, and how long problems took.

    artifacts: the directory for built files. durations_s: seconds that each tuned problem took. pending: all problems
    that the store has no decision for, in order. expected: problems that may follow them. built_early: the problems
    whose builds were begun early.
    """

    def __init__(
        self, target: Target, isolate: bool, limits: Limits | None, latency: Latency, artifacts: Path | None = None
    ) -> None:
        self._target, self._isolate, self._limits, self._latency = target, isolate, limits, latency
        self._artifacts = artifacts
        self._worker: MeasurementWorker | None = None
        self.builders = Builders(artifacts=artifacts, hosts=HOST_POOL)
        self.durations_s: list[float] = []
        self.pending: list[Problem] = []
        self.expected: list[Problem] = []
        self.built_early: set[Problem] = set()

    def worker(self) -> MeasurementWorker:
        """Return the worker, started if it was not."""
        if self._worker is None:
            self._worker = (
                Worker(
                    self._target,
                    limits=self._limits,
                    latency=self._latency,
                    artifacts=self._artifacts,
                    hosts=HOST_POOL,
                )
                if self._isolate
                else LocalWorker(self._target, latency=self._latency, artifacts=self._artifacts)
            )
            self._worker.start()
        return self._worker

    def start(self) -> None:
        """Begin to start the worker and the process that builders are forked from, without waiting."""
        self.worker()
        if self._isolate:
            self.builders.start(self._target.device)

    def expected_s(self, count: int) -> float | None:
        """Return the seconds that so many problems take if they take as long as the tuned ones; None when unknown."""
        if count == 0:
            return 0.0
        return count * sum(self.durations_s) / len(self.durations_s) if self.durations_s else None

    @property
    def begin_builds(self) -> BeginBuilds | None:
        """The function that begins to build candidates of several Problems; None without isolation: the worker builds
        them."""
        return self.builders.begin_each if self._isolate else None

    def close(self) -> None:
        """End the worker and the builders. The processes that they are forked from wait for another tuning for a
        while."""
        self.builders.close()
        if self._worker is not None:
            self._worker.close()
