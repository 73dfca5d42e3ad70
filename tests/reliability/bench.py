"""Real kernels on rotated operands, and paired timings of them, for the checks that time real work."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gemmtune import backends
from gemmtune.backends.base import Kernel
from gemmtune.core.candidate import Candidate
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.timing.flush import last_level_cache
from gemmtune.timing.race_operands import empty_output
from gemmtune.timing.stats import Interval, ratio_interval
from gemmtune.verify.inputs import Inputs, operand_bytes, timing_sets

Call = Callable[[int], object]


@dataclass(frozen=True)
class Bench:
    """Operand sets of one problem that calls use in turn, each with an output. Kernels of one layout share the packed
    copies.

    The sets together are six times the last-level cache, and ``flush`` reads four times its size. A cache with random
    replacement retains part of a smaller set; then a layout that many kernels share looks faster than in a model.
    """

    problem: Problem
    target: Target
    sets: list[Inputs]
    outputs: list[torch.Tensor]
    _packed: dict[str | None, list[Any]] = field(default_factory=dict)
    _flush_buffer: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, problem: Problem, target: Target, max_sets: int = 64) -> Bench:
        """Return a bench with at most ``max_sets`` operand sets."""
        count = -(-6 * last_level_cache(target) // max(1, operand_bytes(problem)))
        sets = timing_sets(problem, max(1, min(max_sets, count)), seed=7)
        return cls(problem, target, sets, [empty_output(problem) for _ in sets])

    def flush(self) -> None:
        """Evict the operands from the data caches and the TLB."""
        if not self._flush_buffer:
            self._flush_buffer.append(torch.ones(last_level_cache(self.target), dtype=torch.int32))
        self._flush_buffer[0].max()

    def load(self, candidate: Candidate) -> Kernel:
        """Build and load a candidate for the problem."""
        backend = backends.get(candidate.backend)
        return backend.load(backend.build(self.problem, candidate, self.target), self.problem)

    def call(self, candidate: Candidate) -> Call:
        """Return a function that runs the candidate on set ``i``, whose constant operand is packed already."""
        kernel = self.load(candidate)
        packed = self._packed.get(kernel.packing)
        if packed is None:
            packed = [item.b if kernel.packing is None else kernel.pack(item.b) for item in self.sets]
            self._packed[kernel.packing] = packed

        def run(i: int) -> None:
            index = i % len(self.sets)
            item = self.sets[index]
            kernel.run(item.a, packed[index], item.aux, self.outputs[index])

        return run


def paired_times(
    calls: Sequence[Call],
    seconds: float,
    min_rounds: int = 20,
    max_rounds: int = 2000,
    seed: int = 0,
    before: Callable[[], None] = lambda: None,
) -> list[list[float]]:
    """Return for each of ``calls`` its seconds a call in every round.

    A round times every call once, in random order, each repeated for half a millisecond at least. ``before`` runs
    before each timing and is not timed.
    """
    rng, iteration = random.Random(seed), 0
    repeats = []
    for call in calls:
        call(0)
        start = time.perf_counter()
        call(1)
        repeats.append(max(1, min(1000, round(0.5e-3 / max(time.perf_counter() - start, 1e-7)))))
    # Similar calls get equal repeats: the first call of a timing differs from the later ones.
    repeats = [max(count, min(max(repeats), 2 * count)) for count in repeats]
    times: list[list[float]] = [[] for _ in calls]
    deadline = time.perf_counter() + seconds
    gc.collect()
    while len(times[0]) < min_rounds or (time.perf_counter() < deadline and len(times[0]) < max_rounds):
        for index in rng.sample(range(len(calls)), len(calls)):
            before()
            start = time.perf_counter()
            for _ in range(repeats[index]):
                calls[index](iteration)
                iteration += 1
            times[index].append((time.perf_counter() - start) / repeats[index])
    return times


def ratio(times: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Return the paired ratio of times to those of a baseline, with its 95% interval."""
    return ratio_interval(times, baseline, 0.05)
