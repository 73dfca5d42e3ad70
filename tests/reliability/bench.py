"""Real kernels in hand for the checks that time them: loaded, packed, on rotated operands, and long paired duels."""

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
    """One problem's rotated operand sets, with an output each. Kernels of one layout read the same packed copies.

    The sets together are six times the last-level cache, and ``flush`` reads four times as much: a cache that replaces
    lines at random keeps some of less, which makes the layout that many kernels share look faster than in a model.
    """

    problem: Problem
    target: Target
    sets: list[Inputs]
    outputs: list[torch.Tensor]
    _packed: dict[str | None, list[Any]] = field(default_factory=dict)
    _other: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, problem: Problem, target: Target, most: int = 64) -> Bench:
        wanted = -(-6 * last_level_cache(target) // max(1, operand_bytes(problem)))
        sets = timing_sets(problem, max(1, min(most, wanted)), seed=7)
        return cls(problem, target, sets, [empty_output(problem) for _ in sets])

    def flush(self) -> None:
        """Put everything else into the caches, and into those of page tables."""
        if not self._other:
            self._other.append(torch.ones(last_level_cache(self.target), dtype=torch.int32))
        self._other[0].max()

    def load(self, candidate: Candidate) -> Kernel:
        backend = backends.get(candidate.backend)
        return backend.load(backend.build(self.problem, candidate, self.target), self.problem)

    def call(self, candidate: Candidate) -> Call:
        """Call i runs the candidate on set i, its constant operand packed beforehand."""
        kernel = self.load(candidate)
        packed = self._packed.get(kernel.packing)
        if packed is None:
            packed = [item.b if kernel.packing is None else kernel.pack(item.b) for item in self.sets]
            self._packed[kernel.packing] = packed

        def run(i: int) -> None:
            place = i % len(self.sets)
            item = self.sets[place]
            kernel.run(item.a, packed[place], item.aux, self.outputs[place])

        return run


def paired(
    calls: Sequence[Call],
    seconds: float,
    least: int = 20,
    most: int = 2000,
    seed: int = 0,
    before: Callable[[], None] = lambda: None,
) -> list[list[float]]:
    """Seconds a call of each, by round, in random order within each; a turn lasts half a millisecond at least.

    before: called before each turn, off the clock.
    """
    rng, turn = random.Random(seed), 0
    repeats = []
    for call in calls:
        call(0)
        start = time.perf_counter()
        call(1)
        repeats.append(max(1, min(1000, round(0.5e-3 / max(time.perf_counter() - start, 1e-7)))))
    # As many calls a turn for all that are alike: the first call of a turn differs from the others.
    repeats = [max(own, min(max(repeats), 2 * own)) for own in repeats]
    times: list[list[float]] = [[] for _ in calls]
    deadline = time.perf_counter() + seconds
    gc.collect()
    while len(times[0]) < least or (time.perf_counter() < deadline and len(times[0]) < most):
        for place in rng.sample(range(len(calls)), len(calls)):
            before()
            start = time.perf_counter()
            for _ in range(repeats[place]):
                calls[place](turn)
                turn += 1
            times[place].append((time.perf_counter() - start) / repeats[place])
    return times


def ratio(mine: Sequence[float], base: Sequence[float]) -> Interval:
    """The paired ratio of times with its 95% interval."""
    return ratio_interval(mine, base, 0.05)
