"""A process that rewrites a store under the eyes of those who read it, and the Decisions it puts there."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gemmtune import backends
from gemmtune.backends.aten import AtenBackend
from gemmtune.backends.base import Kernel
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision, Evidence, Sample, Verdict
from gemmtune.core.errors import KernelError, StoreError
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.dispatch import current_target
from gemmtune.store import open_store
from gemmtune.tuning.candidates import enumerate_candidates

PER_PROBLEM = 12  # candidates that take turns as the chosen one


def decisions_for(problems: Iterable[Problem], target: Target) -> list[Decision]:
    """For each problem, Decisions that choose different candidates: all of them right, so that any may serve."""
    rng = random.Random(1)
    made = []
    for problem in {problem.key: problem for problem in problems}.values():
        candidates, _ = enumerate_candidates(problem, target, backends.names())
        rng.shuffle(candidates)
        kernels = [kernel for candidate in candidates[: 4 * PER_PROBLEM] if (kernel := _load(candidate, problem))]
        made += [_decision(problem, kernel, target) for kernel in kernels[:PER_PROBLEM]]
    return made


def _load(candidate: Candidate, problem: Problem) -> Kernel | None:
    backend = backends.get(candidate.backend)
    try:
        return backend.load(backend.build(problem, candidate, current_target()), problem)
    except KernelError:
        return None


def _decision(problem: Problem, kernel: Kernel, target: Target) -> Decision:
    plain = AtenBackend().default_candidate(problem)
    chosen = kernel.candidate
    rows = {plain.id: _evidence(plain, None, 2e-6, 1.0), chosen.id: _evidence(chosen, kernel.packing, 1e-6, 0.5)}
    return Decision(
        problem.key, problem.to_dict(), target.key, "winner", chosen.id, tuple(rows.values()),
        alternatives={kernel.packing or "": chosen.id}, created=1.0,
    )  # fmt: skip


def _evidence(candidate: Candidate, packing: str | None, seconds: float, ratio: float) -> Evidence:
    sample = Sample(seconds, seconds, seconds, 50, ratio, ratio, ratio)
    return Evidence(candidate.to_dict(), candidate.id, "finalist", packing, "", Verdict("exact"), sample)


class Rewriter:
    """Changes the store at ``path``: sound ways, and what a crash, a full disk or a stranger would leave."""

    def __init__(self, path: Path, targets: Sequence[Target], decisions: Sequence[Sequence[Decision]]) -> None:
        self._path, self._aside = path, path.with_name("aside.db")
        self._targets, self._decisions = targets, decisions
        self._rng = random.Random(2)
        self._sound = [self._made() for _ in range(6)]

    def run(self, end: Any) -> None:
        """Until ``end`` is set."""
        while not end.is_set():
            action = self._rng.choice((self._put, self._put, self._renew, self._renew, self._unlink, self._spoil))
            with contextlib.suppress(OSError, StoreError):
                action()
            time.sleep(self._rng.uniform(0, 0.01))

    def _made(self) -> bytes:
        """A sound store with one choice of a kernel for every problem and thread count."""
        store = open_store(self._aside)
        for target, decisions in zip(self._targets, self._decisions, strict=True):
            choice = self._rng.sample(decisions, len(decisions))
            for decision in {decision.problem_key: decision for decision in choice}.values():
                store.put(target, decision)
        store.close()
        data = self._aside.read_bytes()
        self._aside.unlink()
        return data

    def _put(self) -> None:
        store = open_store(self._path)
        try:
            which = self._rng.randrange(len(self._targets))
            store.put(self._targets[which], self._rng.choice(self._decisions[which]))
        finally:
            store.close()

    def _unlink(self) -> None:
        self._path.unlink()

    def _renew(self) -> None:
        self._aside.write_bytes(self._rng.choice(self._sound))
        os.replace(self._aside, self._path)

    def _spoil(self) -> None:
        if self._rng.random() < 0.3:
            self._aside.write_bytes(self._rng.randbytes(self._rng.choice((0, 1, 100, 5000))))
            os.replace(self._aside, self._path)
        else:
            _damage(self._path, self._rng, cut=self._rng.random() < 0.3)


def _rewrite(
    path: Path, targets: Sequence[Target], decisions: Sequence[Sequence[Decision]], begun: Any, end: Any
) -> None:
    """The process that rewrites the store."""
    logging.getLogger("gemmtune").setLevel(logging.CRITICAL)
    rewriter = Rewriter(path, targets, decisions)
    begun.set()
    rewriter.run(end)


def _damage(path: Path, rng: random.Random, *, cut: bool) -> None:
    """In place, under the eyes of whoever has the file open."""
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if cut:
            file.truncate(rng.randrange(size + 1))
            return
        for _ in range(rng.choice((1, 8, 64))):
            file.seek(rng.randrange(max(1, size)))
            file.write(rng.randbytes(1))


@contextlib.contextmanager
def rewriting(path: Path, targets: Sequence[Target], decisions: Sequence[Sequence[Decision]]) -> Iterator[None]:
    """The process at work while the block runs."""
    context = multiprocessing.get_context("spawn")
    begun, end = context.Event(), context.Event()
    writer = context.Process(target=_rewrite, args=(path, targets, decisions, begun, end), daemon=True)
    writer.start()
    try:
        assert begun.wait(60), "the process that rewrites the store did not start"
        yield
    finally:
        end.set()
        writer.join(30)
        if writer.is_alive():
            writer.kill()
            writer.join()
