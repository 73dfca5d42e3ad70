"""A measurement worker that does the work in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..core.candidate import Candidate
from ..core.problem import Problem
from ..core.target import Target
from ..timing.clock import Latency
from ..timing.outcome import RaceResult
from ..timing.size_sweep import SizesTimed
from .contract import Progress, expect, ignore, path_or_none
from .job import RequestHandler
from .protocol import (
    Attempt,
    Attempted,
    Confirm,
    Confirmed,
    Open,
    Race,
    Setup,
    SizedCandidate,
    SizesVerified,
    TimeSizes,
    VerifySizes,
)  # fmt: skip


class LocalWorker:
    """A measurement worker in this process, without any protection. ``close`` restores torch's thread count."""

    def __init__(self, target: Target, *, latency: Latency = "graph", artifacts: Path | None = None) -> None:
        import torch

        self._progress: Progress = ignore
        self._threads = torch.get_num_threads()
        self._handler = RequestHandler(lambda leading: self._progress(leading))
        self._handler.answer(Setup(target.to_dict(), latency=latency, artifacts=path_or_none(artifacts)))

    def start(self) -> None:
        """Do nothing: no process has to be started."""

    def wait(self) -> None:
        """Do nothing: this process is ready."""

    def open(self, problem: Problem, seed: int) -> None:
        self._handler.answer(Open(problem.to_dict(), seed))

    def attempt(
        self, candidate: Candidate, deadline_s: float | None = None, cutoff_s: float | None = None
    ) -> Attempted:
        return expect(self._handler.answer(Attempt(candidate.to_dict(), cutoff_s)), Attempted)

    def confirm(self, candidate: Candidate, deadline_s: float | None = None) -> Confirmed:
        return expect(self._handler.answer(Confirm(candidate.to_dict())), Confirmed)

    def race(
        self,
        candidates: Sequence[Candidate],
        budget_s: float,
        seed: int,
        progress: Progress = ignore,
        hot: bool = False,
        earlier_s: Mapping[str, float] = {},
    ) -> RaceResult:
        self._progress = progress
        request = Race([c.to_dict() for c in candidates], budget_s, seed, hot, dict(earlier_s))
        return expect(self._handler.answer(request), RaceResult)

    def time_sizes(
        self,
        candidates: Sequence[SizedCandidate],
        sizes: Mapping[int, Sequence[int]],
        last: int,
        budget_s: float,
        seed: int,
        hot: bool = False,
    ) -> SizesTimed:
        wanted = {m: list(positions) for m, positions in sizes.items()}
        return expect(self._handler.answer(TimeSizes(list(candidates), wanted, last, budget_s, seed, hot)), SizesTimed)

    def verify_sizes(self, item: SizedCandidate, sizes: Sequence[int]) -> SizesVerified:
        return expect(self._handler.answer(VerifySizes(item, list(sizes))), SizesVerified)

    def close(self) -> None:
        import torch

        torch.set_num_threads(self._threads)

    def __enter__(self) -> LocalWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
