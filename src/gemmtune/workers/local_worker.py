"""A measurement worker that does the work in this process."""

from __future__ import annotations

from pathlib import Path

from ..core.problem import Problem
from ..core.target import Target
from ..timing.clock import Latency
from .contract import Progress, R, expect, ignore, path_or_none
from .job import RequestHandler
from .protocol import Request, Setup
from .worker import Worker


class LocalWorker(Worker):
    """A measurement worker in this process, without any protection: time limits and the memory limit do not apply.
    ``close`` restores torch's thread count."""

    def __init__(self, target: Target, *, latency: Latency = "graph", artifacts: Path | None = None) -> None:
        import torch

        super().__init__(target, latency=latency, artifacts=artifacts)
        self._progress: Progress = ignore
        self._threads = torch.get_num_threads()
        self._handler = RequestHandler(lambda leading: self._progress(leading))
        self._handler.answer(Setup(target.to_dict(), latency=latency, artifacts=path_or_none(artifacts)))

    def start(self) -> None:
        """Do nothing: no process has to be started."""

    def wait(self) -> None:
        """Do nothing: this process is ready."""

    def close(self) -> None:
        import torch

        torch.set_num_threads(self._threads)

    def _memory_for(self, problem: Problem) -> int:
        return 0

    def _open_problem(self) -> None:
        if self._problem is not None and not self._opened:
            self._handler.answer(self._problem)
            self._opened = True

    def _ask(self, request: Request, limit_s: float, reply_type: type[R], progress: Progress = ignore) -> R:
        self._open_problem()
        self._progress = progress
        return expect(self._handler.answer(request), reply_type)
