"""Simulated kernels whose time depends on M, the Decisions that name them, and a fake worker that times them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from gemmtune.backends.aten import AtenBackend
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision, Evidence, Sample, Verdict
from gemmtune.core.problem import Dim, Problem
from gemmtune.core.tuned_plan import PlanInterval, PlanKernel, TunedPlan
from gemmtune.core.workloads import linear_problem
from gemmtune.timing.size_sweep import SizesTimed
from gemmtune.tuning import keyed_plan, plan_session, weight_session
from gemmtune.workers.contract import WorkerLost
from gemmtune.workers.protocol import SizedCandidate, SizesVerified
from helpers.serving import decide

PROBLEM = linear_problem(8, 64, 96, "float32")
PLAIN = AtenBackend().default_candidate(PROBLEM)

Model = Callable[[int], float]


def never(m: int) -> bool:
    return False


@dataclass(frozen=True)
class SimulatedKernel:
    """A kernel that takes ``seconds(m)`` per call, and its faults by M: ``wrong_at``, ``crashes_at`` (the process
    dies), ``raises_at``. unpackable: every worker that loads it dies."""

    candidate: Candidate
    seconds: Model
    packing: str | None = None
    wrong_at: Callable[[int], bool] = never
    crashes_at: Callable[[int], bool] = never
    raises_at: Callable[[int], bool] = never
    unpackable: bool = False
    under_load: float = 1.0  # a factor on its times under load

    @property
    def id(self) -> str:
        return self.candidate.id


def simulated(
    name: str, seconds: Model, *, rows: int = 1, packing: str | None = None, **faults: Any
) -> SimulatedKernel:
    """Return a kernel of the backend ``simulated``. rows: of its output tile."""
    return SimulatedKernel(Candidate.make("simulated", name, bm=rows), seconds, packing, **faults)


def staircase(base: float, step: float, rows: int = 1) -> Model:
    """Return the time of a kernel that takes ``step`` microseconds for each row of tiles, which have ``rows`` rows."""
    return lambda m: 1e-6 * (base + step * -(-m // rows))


PLAIN_S = staircase(10.0, 0.1)
# A Problem that converting its operands solves in 0.2 of the time of PyTorch's operator, as on CPUs without AVX-512.
HALF = linear_problem(8, 64, 96, "bfloat16")
COMPOSITE = SimulatedKernel(Candidate.make("aten", "composite"), lambda m: 0.2 * PLAIN_S(m))
SMALL = simulated("small", staircase(3.0, 2.0, 16), rows=16)  # the fastest up to M = 64 or so
LARGE = simulated("large", staircase(6.0, 4.0, 128), rows=128)


def decisions_at(
    kernels: Sequence[SimulatedKernel],
    sizes: Sequence[int],
    problem: Problem = PROBLEM,
    plain: Model = PLAIN_S,
    dim: Dim = "m",
) -> list[Decision]:
    """Return a Decision for each M (or batch), in which all kernels were raced against ATen's plain op and were
    right."""
    decisions = []
    for m in sizes:
        rows = []
        for kernel in kernels:
            seconds, ratio = kernel.seconds(m), kernel.seconds(m) / plain(m)
            sample = Sample(seconds, seconds, seconds, 50, ratio, ratio * 0.99, ratio * 1.01)
            verdict = Verdict("within_bound")
            rows.append(
                Evidence(kernel.candidate.to_dict(), kernel.id, "finalist", kernel.packing, "", verdict, sample)
            )
        decisions.append(decide(problem.with_size(dim, m), *rows, aten_s=plain(m)))
    return decisions


class FakeTime:
    """Fake of the module ``time`` that only the fake worker advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def use_fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """Have the sessions that make plans read a fake time. Return it."""
    fake_time = FakeTime()
    for module in (weight_session, plan_session, keyed_plan):
        monkeypatch.setattr(module, "time", fake_time)
    return fake_time


class FakeWorker:
    """Fake worker that times and verifies simulated kernels.

    timing_s: seconds that timing one kernel at one M takes. timed: the ids that were timed, by M, request by request.
    verified: the M at which each kernel was verified. dims: of all requests. stalls: what the next timing of a kernel
    at an M is multiplied with. algorithms: names an algorithm of a library at each M. asked: the M that the library was
    asked for.
    """

    def __init__(
        self,
        clock: FakeTime,
        kernels: Sequence[SimulatedKernel],
        plain: Model = PLAIN_S,
        timing_s: float = 1e-3,
    ) -> None:
        self.clock, self.timing_s = clock, timing_s
        self._kernels = {kernel.id: kernel for kernel in (*kernels, SimulatedKernel(PLAIN, plain))}
        self.opened: list[Problem] = []
        self.timed: list[dict[int, list[str]]] = []
        self.verified: dict[str, list[int]] = {}
        self.stalls: dict[tuple[str, int], float] = {}
        self.losses = 0
        self.dims: set[Dim] = set()
        self.algorithms: Callable[[int], str] = lambda m: ""
        self.asked: list[int] = []

    def open(self, problem: Problem, seed: int) -> None:
        self.opened.append(problem)

    def time_sizes(
        self,
        candidates: Sequence[SizedCandidate],
        sizes: Mapping[int, Sequence[int]],
        last: int,
        budget_s: float,
        seed: int,
        hot: bool = False,
        load_s: float = 0.0,
        dim: Dim = "m",
    ) -> SizesTimed:
        self.dims.add(dim)
        loaded = [self._kernels[Candidate.from_dict(item.candidate).id] for item in candidates]
        result = SizesTimed()
        self.timed.append({m: [loaded[position].id for position in positions] for m, positions in sizes.items()})
        for kernel in loaded:
            if kernel.unpackable:
                self._lose(kernel)
        for m in sorted(sizes):
            assert 1 <= m <= last
            result.times[m], result.noise[m] = {}, 0.005
            for position in sizes[m]:
                kernel = loaded[position]
                self.clock.now += self.timing_s
                if kernel.crashes_at(m):
                    self._lose(kernel)
                if kernel.raises_at(m):
                    result.faults[kernel.id] = Verdict("crashed", f"raised ValueError at M = {m}")
                elif kernel.id not in result.faults:
                    under_load = kernel.under_load if load_s else 1.0
                    result.times[m][kernel.id] = kernel.seconds(m) * under_load * self.stalls.pop((kernel.id, m), 1.0)
        return result

    def _lose(self, kernel: SimulatedKernel) -> None:
        self.losses += 1
        assert self.losses < 20, "the same kernel is sent again and again"
        raise WorkerLost(Verdict("crashed", "SIGSEGV"), kernel.id)

    def verify_sizes(self, item: SizedCandidate, sizes: Sequence[int], dim: Dim = "m") -> SizesVerified:
        self.dims.add(dim)
        kernel = self._kernels[Candidate.from_dict(item.candidate).id]
        self.clock.now += self.timing_s * len(sizes)
        for m in sizes:
            if kernel.crashes_at(m):
                return SizesVerified(Verdict("crashed", "SIGSEGV"))
            if kernel.raises_at(m) or kernel.wrong_at(m):
                return SizesVerified(Verdict("wrong", f"M = {m}: an element is off", 9.0), m)
            self.verified.setdefault(kernel.id, []).append(m)
        return SizesVerified(Verdict("within_bound", worst=0.25))

    def library_algorithms(self, item: SizedCandidate, sizes: Sequence[int]) -> dict[int, str]:
        assert Candidate.from_dict(item.candidate).id == PLAIN.id
        self.asked += sizes
        return {m: name for m in sizes if (name := self.algorithms(m))}


def serving_kernels(plan: TunedPlan) -> set[str]:
    """Return the ids of the kernels that serve in any layout."""
    return {interval.kernel for intervals in plan.intervals.values() for interval in intervals}


Intervals = Mapping[str, Sequence[tuple[int, int, SimulatedKernel]]]


def planted_plan(
    problem: Problem,
    kernels: Sequence[SimulatedKernel],
    intervals: Intervals,
    sizes: Sequence[int],
    *,
    target_key: str,
    plain: SimulatedKernel | None = None,
) -> TunedPlan:
    """Return a plan of kernels that were timed at ``sizes``.

    intervals: first M, last M and kernel, by layout. plain: ATen's plain op, which is timed too, with ``PLAIN_S`` by
    default. Kernels that serve were verified at all ``sizes`` and have a verdict, others not.
    """
    plain = plain or SimulatedKernel(AtenBackend().default_candidate(problem), PLAIN_S)
    serving = {kernel.id for rows in intervals.values() for _, _, kernel in rows}
    rows = tuple(
        PlanKernel(
            kernel.candidate.to_dict(), kernel.id, sizes[0], kernel.packing,
            times={m: kernel.seconds(m) for m in sizes},
            verified=tuple(sizes) if kernel.id in serving else (),
            verdict=Verdict("within_bound", worst=0.25) if kernel.id in serving else None,
        )
        for kernel in (*kernels, plain)
    )  # fmt: skip
    by_layout = {
        packing: tuple(PlanInterval(first, last, kernel.id) for first, last, kernel in spans)
        for packing, spans in intervals.items()
    }
    spans = [span for spans in by_layout.values() for span in spans]
    return TunedPlan(
        problem.plan_key, problem.to_dict(), target_key, min(span.first for span in spans),
        max(span.last for span in spans), by_layout, rows, noise=dict.fromkeys(sizes, 0.005), seconds=2.0,
        created=1_760_000_000.0,
    )  # fmt: skip
