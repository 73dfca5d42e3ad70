"""A process that rewrites a store while other processes read it, and the decisions that it writes."""

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

PER_PROBLEM = 12  # how many decisions a problem has, each with another winner


def decisions_for(problems: Iterable[Problem], target: Target) -> list[Decision]:
    """Return decisions for each problem that have different winners, all of them correct."""
    rng = random.Random(1)
    decisions = []
    for problem in {problem.key: problem for problem in problems}.values():
        candidates, _ = enumerate_candidates(problem, target, backends.names())
        rng.shuffle(candidates)
        kernels = [kernel for candidate in candidates[: 4 * PER_PROBLEM] if (kernel := _load(candidate, problem))]
        decisions += [_decision(problem, kernel, target) for kernel in kernels[:PER_PROBLEM]]
    return decisions


def _load(candidate: Candidate, problem: Problem) -> Kernel | None:
    """Return the loaded kernel; None if it cannot be built or loaded."""
    backend = backends.get(candidate.backend)
    try:
        return backend.load(backend.build(problem, candidate, current_target()), problem)
    except KernelError:
        return None


def _decision(problem: Problem, kernel: Kernel, target: Target) -> Decision:
    """Return a decision that this kernel won against ATen's default candidate."""
    default = AtenBackend().default_candidate(problem)
    chosen = kernel.candidate
    rows = {default.id: _evidence(default, None, 2e-6, 1.0), chosen.id: _evidence(chosen, kernel.packing, 1e-6, 0.5)}
    return Decision(
        problem.key, problem.to_dict(), target.key, "winner", chosen.id, tuple(rows.values()),
        alternatives={kernel.packing or "": chosen.id}, created=1.0,
    )  # fmt: skip


def _evidence(candidate: Candidate, packing: str | None, seconds: float, ratio: float) -> Evidence:
    sample = Sample(seconds, seconds, seconds, 50, ratio, ratio, ratio)
    return Evidence(candidate.to_dict(), candidate.id, "finalist", packing, "", Verdict("exact"), sample)


class Rewriter:
    """Writer that changes the store at ``path`` by valid writes and by damage, as of crashes and full disks."""

    def __init__(self, path: Path, targets: Sequence[Target], decisions: Sequence[Sequence[Decision]]) -> None:
        self._path, self._temporary_path = path, path.with_name("aside.db")
        self._targets, self._decisions = targets, decisions
        self._rng = random.Random(2)
        self._valid_files = [self._valid_file() for _ in range(6)]

    def run(self, end: Any) -> None:
        """Change the store at random moments until ``end`` is set."""
        while not end.is_set():
            action = self._rng.choice(
                (self._put, self._put, self._replace_file, self._replace_file, self._unlink, self._damage_file)
            )
            with contextlib.suppress(OSError, StoreError):
                action()
            time.sleep(self._rng.uniform(0, 0.01))

    def _valid_file(self) -> bytes:
        """Return the file of a store with one decision for every problem and thread count."""
        store = open_store(self._temporary_path)
        for target, decisions in zip(self._targets, self._decisions, strict=True):
            choice = self._rng.sample(decisions, len(decisions))
            for decision in {decision.problem_key: decision for decision in choice}.values():
                store.put(target, decision)
        store.close()
        data = self._temporary_path.read_bytes()
        self._temporary_path.unlink()
        return data

    def _put(self) -> None:
        store = open_store(self._path)
        try:
            index = self._rng.randrange(len(self._targets))
            store.put(self._targets[index], self._rng.choice(self._decisions[index]))
        finally:
            store.close()

    def _unlink(self) -> None:
        self._path.unlink()

    def _replace_file(self) -> None:
        self._temporary_path.write_bytes(self._rng.choice(self._valid_files))
        os.replace(self._temporary_path, self._path)

    def _damage_file(self) -> None:
        if self._rng.random() < 0.3:
            self._temporary_path.write_bytes(self._rng.randbytes(self._rng.choice((0, 1, 100, 5000))))
            os.replace(self._temporary_path, self._path)
        else:
            _damage(self._path, self._rng, cut=self._rng.random() < 0.3)


def _rewrite(
    path: Path, targets: Sequence[Target], decisions: Sequence[Sequence[Decision]], started: Any, end: Any
) -> None:
    """Rewrite the store until ``end`` is set; the main function of the process."""
    logging.getLogger("gemmtune").setLevel(logging.CRITICAL)
    rewriter = Rewriter(path, targets, decisions)
    started.set()
    rewriter.run(end)


def _damage(path: Path, rng: random.Random, *, cut: bool) -> None:
    """Truncate a file or change bytes of it in place, while other processes may have it open."""
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
    """Run the process that rewrites the store during the block."""
    context = multiprocessing.get_context("spawn")
    started, end = context.Event(), context.Event()
    writer = context.Process(target=_rewrite, args=(path, targets, decisions, started, end), daemon=True)
    writer.start()
    try:
        assert started.wait(60), "the process that rewrites the store did not start"
        yield
    finally:
        end.set()
        writer.join(30)
        if writer.is_alive():
            writer.kill()
            writer.join()
