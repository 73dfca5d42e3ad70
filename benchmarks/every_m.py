"""Measure tuning for every M: what a weight's Plan serves at random M, against PyTorch and against tuning that M.

    python benchmarks/every_m.py                                         a GPU where there is one, else the CPU
    python benchmarks/every_m.py --device cpu --quick                    one weight a family, few M
    python benchmarks/every_m.py --families bf16,int8 --weights 4096x4096,4096x12288 --inductor --seconds 560

Each weight is tuned for all M into an empty store (no compiled kernels either). Then, at M drawn uniformly from the
range (a weight that has no TunedPlan, because only ATen's kernels are best or all its Decisions were inconclusive, is
measured too, and its line says so):

plan      the kernel that serves there, in the layout that dispatch ranks first, over PyTorch's plain op on the raw
          weight ("ATen": what gemmtune calls where it has no kernel; a weight-only op converts its weight each time).
          Where the plain op serves, the ratio is 1 by identity. A ratio above the bar (1.02 on a GPU, 1.03 on a CPU) is
          measured again with more pairs, and the second measurement counts (in the means the first one does).
nearest   the kernel that the Decision at the nearest tuned M chose, over ATen: what served before Plans existed, in the
          layout that the Decisions choose.
alone     at some of the M: the kernel that a tuning of this M alone chooses; regret = plan / alone - 1.
Inductor  (--inductor) torch.compile(dynamic=True) over ATen; on a GPU with max-autotune-no-cudagraphs.

What is compared at one M is timed in the same rounds, in random order, on weights that are not in the cache (on a GPU
on operands that are not, and in CUDA graphs): ATen, plan and nearest together; plan with alone, in more pairs; Inductor
with ATen. Ratios are medians of paired ratios with 95% intervals. Means of ratios are geometric; that of the regret is
arithmetic. Raw data is written to benchmarks/results/ (or $OUT) after every weight.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("GEMMTUNE_STORE", str(Path(".gemmtune") / "every-m.db"))

import h200
import torch
import torch.nn.functional as F
from harness import geomean, save_results, write_results
from torch import Tensor

import gemmtune
from gemmtune import backends
from gemmtune.backends.base import OVERLAP, Kernel
from gemmtune.core import devices as kinds
from gemmtune.core.call import Call
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision
from gemmtune.core.events import Event, PlanProgress, ProblemDone, ProblemStarted
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.core.tuned_plan import TunedPlan
from gemmtune.core.weights import PackedWeight, QuantWeight
from gemmtune.core.workloads import build
from gemmtune.dispatch import RUNTIME, build_plan, choose_packing, current_target
from gemmtune.dispatch.fallback import specialize_fallback
from gemmtune.dispatch.plan import nearest
from gemmtune.dispatch.portfolio import TunedPoint
from gemmtune.store import MemoryStore, open_store
from gemmtune.store.base import Store
from gemmtune.timing import devices
from gemmtune.timing.clock import Clock, Run
from gemmtune.timing.eviction import Weight
from gemmtune.timing.stats import ratio_interval
from gemmtune.tuning import sizes as tuning_sizes
from gemmtune.verify.inputs import Inputs, operand_set_count, timing_sets

Row = dict[str, Any]
Times = dict[str, list[float]]  # seconds per call by round; contestants that are one and the same share a list
Ratio = tuple[float, float, float]  # the median of paired ratios and its 95% interval

FAMILIES = {"cuda": "bf16,fp8,int8,int8wo,int4wo", "cpu": "fp32,bf16,int8,int8wo"}
WEIGHTS = {  # K x N
    "cuda": "4096x4096,4096x12288,4096x22016,11008x4096,8192x1024,3072x5120",
    "cpu": "4096x4096,4096x11008,11008x4096,768x3072",
}
SIZES = {"cuda": (40, 6), "cpu": (24, 4)}  # random M of a weight, and how many of them are tuned alone
BARS = {"cuda": 1.02, "cpu": 1.03}
REGRET_BAR = 0.05  # TunedPlan.bound's default
ROUND_S = {"cuda": 1.0, "cpu": 4.0}  # the rounds at one M end after this time, or after --rounds
OVER_ALONE = "plan over alone"  # the ratio that the regret follows from
LEAST_ROUNDS = 7  # a 95% interval of paired ratios needs 6
HINTS = [64, 256, 4096]  # M for which Inductor chooses a kernel each, where it can
_INT_MM_ROWS = 17  # the least that torch._int_mm takes on a GPU


@dataclass(frozen=True)
class Served:
    """What runs at one M. kernel: None for the plain PyTorch op, which unpacks a weight that has a ``layout``."""

    kernel: Kernel | None
    layout: str | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for contestants that run the same code on the same weight."""
        kernel = self.kernel
        if kernel is None:
            return (self.layout,)
        return (self.layout, kernel.candidate.identity, kernel.problem.key, kernel.overlap)

    @property
    def words(self) -> str:
        name = "plain" if self.kernel is None else self.kernel.candidate.id
        return name if self.layout is None else f"{self.layout}: {name}"


PLAIN = Served(None)


class Server:
    """Finds what serves one weight by the store in use. packers: a kernel that packs the weight, by layout."""

    def __init__(self, problem: Problem, device: torch.device, target: Target) -> None:
        self.device, self.target, self.packers = device, target, dict[str, Kernel]()
        self._raw = timing_sets(problem.with_m(1), 1, 3, device)[0].b
        self._packed: dict[str, PackedWeight] = {}

    def served(self, problem: Problem, layout: str | None, decisions: Iterable[Decision]) -> Served:
        """Return what serves a Problem whose weight is in ``layout``, one of the decisions' layouts."""
        packed = None if layout is None else self._pack(layout, decisions)
        return Served(RUNTIME.kernel_for(problem, packed, self.device), layout)

    def nearest(self, problem: Problem, points: Sequence[TunedPoint], decisions: Iterable[Decision]) -> Served:
        """Return what the Decision at the nearest tuned M chose, in the layout that the points of the Decisions choose:
        the rule by which dispatch served before it had TunedPlans."""
        layout = choose_packing(points)
        plan = build_plan(points, layout)
        if plan is None:
            return PLAIN
        entry = plan.entries[nearest(tuple(entry.m for entry in plan.entries), problem.m)]
        if entry.candidate is None:
            return PLAIN
        if layout is not None:
            self._pack(layout, decisions)
        kernel = self._load(problem.with_m(entry.m), entry.candidate)
        kernel.overlap = entry.overlap
        return Served(kernel, layout)

    def _pack(self, layout: str, decisions: Iterable[Decision]) -> PackedWeight:
        if layout not in self._packed:
            decision, row = next(
                (decision, row)
                for decision in decisions
                for row in decision.evidence
                if row.packing == layout and row.verdict is not None and row.verdict.ok
            )
            kernel = self._load(Problem.from_dict(decision.problem), Candidate.from_dict(row.candidate))
            self.packers[layout], self._packed[layout] = kernel, kernel.pack(self._raw)
        return self._packed[layout]

    def _load(self, problem: Problem, candidate: Candidate) -> Kernel:
        backend = backends.get(candidate.backend)
        with RUNTIME.artifacts():
            return backend.load(backend.build(problem, candidate, self.target), problem)


class Operands:
    """Operand sets of one weight for all M up to the last, larger together than the cache, with the weight in every
    layout that is asked for."""

    def __init__(
        self, problem: Problem, sizes: tuning_sizes.SizeRange, target: Target, packers: Mapping[str, Kernel]
    ) -> None:
        count = operand_set_count(problem.with_m(sizes.first), target)
        self.timing = devices.of(target)
        self.sets = timing_sets(problem.with_m(sizes.last), count, 3, self.timing.device)
        self._packers = packers
        self._weights: dict[str | None, list[Weight]] = {None: [s.b for s in self.sets]}
        self._turns: dict[str | None, int] = {}  # calls by layout
        self._taken: dict[str | None, int] = {}  # those of them that ``_take_used`` has returned

    def clock(self, problem: Problem) -> Clock:
        """Return a clock for calls with a Problem's M, which empties the cache where the sets do not fill it."""
        return self.timing.clock(devices.OperandSets(problem, len(self.sets), False, bytearray(1), self._take_used))

    def _take_used(self) -> list[Weight]:
        """Return the weights that were used since the last call of this method; all of a layout in the first one."""
        used, count = list[Weight](), len(self.sets)
        for layout, turn in self._turns.items():
            first = max(self._taken[layout], turn - count)
            used += [self._weights[layout][i % count] for i in range(first, turn)]
            self._taken[layout] = turn
        return used

    def inputs(self, problem: Problem) -> list[Inputs]:
        """Return the sets with the rows of a Problem's M."""
        tensor_steps = [step for step in problem.epilogue if step.takes_tensor]

        def rows(aux: Sequence[Tensor]) -> tuple[Tensor, ...]:
            pairs = zip(tensor_steps, aux, strict=True)
            return tuple(t[: problem.m] if step.axis in ("row", "full") else t for step, t in pairs)

        return [Inputs(item.a[: problem.m], item.b, rows(item.aux)) for item in self.sets]

    def call(self, problem: Problem, served: Served) -> Run:
        """Return calls of what serves. The kernels of one layout use its copies of the weight in turn."""
        layout, inputs = served.layout, self.inputs(problem)
        if layout is not None and layout not in self._weights:
            self._weights[layout] = [self._packers[layout].pack(item.b) for item in self.sets]
        arguments = [(item.a, b, item.aux) for item, b in zip(inputs, self._weights[layout], strict=True)]
        function: Callable[..., object]
        if served.kernel is not None:
            function = served.kernel.functional
        else:
            function = specialize_fallback(Call(problem, *arguments[0], problem.out_shape))
        return self.in_turn(layout, lambda i: function(*arguments[i]))

    def in_turn(self, layout: str | None, call: Callable[[int], object]) -> Run:
        """Return ``call`` with the number of the operand set to use: that of the call in a CUDA graph, otherwise the
        next of the layout."""
        count = len(self.sets)
        if self.timing.indexed:
            return lambda i: call(i % count)
        self._turns.setdefault(layout, 0)
        self._taken.setdefault(layout, -count)  # packing leaves all of them in the cache

        def run(_: int) -> object:
            turn = self._turns[layout]
            self._turns[layout] = turn + 1
            return call(turn % count)

        return run


# --- timing -----------------------------------------------------------------------------------------------------


def time_rounds(clock: Clock, runs: Mapping[str, Run], rounds: tuple[int, int], seconds: float) -> Times:
    """Return the times of all runs by round. Each round times every run once, in a new random order, with equally many
    calls. rounds: their least and greatest number; between them they end after ``seconds``."""
    calls = max(clock.calls_for(run, clock.paired_timing_s) for run in runs.values())
    times: Times = {name: [] for name in runs}
    order, rng, deadline = list(runs), random.Random(len(runs)), clock.now() + seconds
    for index in range(rounds[1]):
        if index >= rounds[0] and clock.now() > deadline:
            break
        rng.shuffle(order)
        for name, value in zip(order, clock.time_round([runs[n] for n in order], [calls] * len(order)), strict=True):
            times[name].append(value)
    for name, run in runs.items():
        how = clock.conditions(run, False).get("timed", "graph")
        if how != "graph":
            warn_once(f"        {name} was not timed in a CUDA graph: {how}")
    return times


@functools.cache
def warn_once(text: str) -> None:
    print(text, flush=True)


def duel(
    operands: Operands, problem: Problem, contestants: Mapping[str, Served], rounds: tuple[int, int], seconds: float
) -> Times:
    """Return the times of all contestants at one M. Those that are one and the same are timed once; nothing is timed
    where all are."""
    first: dict[tuple[object, ...], str] = {}
    for name, served in contestants.items():
        first.setdefault(served.key, name)
    runs = {name: operands.call(problem, contestants[name]) for name in first.values()}
    timed = (
        time_rounds(operands.clock(problem), runs, rounds, seconds) if len(runs) > 1 else {name: [] for name in runs}
    )
    return {name: timed[first[served.key]] for name, served in contestants.items()}


def ratio(times: Times, name: str, base: str) -> Ratio:
    """Return the paired ratio of a contestant's time to another's; exactly 1 where they are one and the same."""
    if times[name] is times[base]:
        return (1.0, 1.0, 1.0)
    interval = ratio_interval(times[name], times[base])
    return (interval.center, interval.lo, interval.hi)


# --- torch.compile ----------------------------------------------------------------------------------------------


def eager_product(problem: Problem) -> Callable[..., Tensor] | None:
    """Return PyTorch's expression of the product, on the tensors of ``compiled_arguments``; None for int4 weights."""
    if problem.family == "mm":
        return lambda a, w: F.linear(a, w)
    if problem.family == "int_mm":
        return lambda a, w: torch._int_mm(a, w.t())
    if problem.family == "scaled_mm":
        dtype = getattr(torch, problem.out_dtype)
        return lambda a, w, scale_a, scale_b: torch._scaled_mm(a, w.t(), scale_a, scale_b, out_dtype=dtype)
    if problem.b.dtype == "int8":
        return lambda a, w, scale: F.linear(a, w.to(a.dtype)) * scale
    return None


def compiled_arguments(problem: Problem, item: Inputs) -> tuple[Tensor, ...]:
    """Return the arguments of ``eager_product``; only the activations and their scales have the Problem's M."""
    if isinstance(item.b, QuantWeight):
        return (item.a, item.b.data.t(), item.b.scale)
    if problem.family == "scaled_mm":
        return (item.a, item.b.t(), item.aux[0].reshape(-1, 1), item.aux[1].reshape(1, -1))
    return (item.a, item.b.t())


class Inductor:
    """torch.compile(dynamic=True) of one weight's product. seconds: of the first call, which compiles for any M; what
    a later call compiles is not counted. failure: why it has no times at one M or more; empty where it has all."""

    def __init__(self, problem: Problem, operands: Operands) -> None:
        self._operands, self.seconds, self.failure = operands, 0.0, ""
        self._compiled: Callable[..., Tensor] | None = None
        product, is_cuda = eager_product(problem), operands.timing.target.device == "cuda"
        if product is None:
            self.failure = "no expression that Inductor computes"
            return
        torch._dynamo.reset()
        options: dict[str, Any] = {"mode": "max-autotune-no-cudagraphs"} if is_cuda else {}
        self._compiled = torch.compile(product, dynamic=True, **options)
        start = time.perf_counter()
        if not self._succeeds(problem, lambda: self.call(problem)(0)):
            self._compiled = None
        self.seconds = time.perf_counter() - start

    def times(self, problem: Problem, rounds: tuple[int, int], seconds: float) -> Times:
        """Return its times and ATen's at one M; nothing where it fails."""
        times: Times = {}
        if self._compiled is not None:
            clock, plain = self._operands.clock(problem), self._operands.call(problem, PLAIN)

            def time_both() -> None:
                times.update(time_rounds(clock, {"Inductor": self.call(problem), "ATen": plain}, rounds, seconds))

            self._succeeds(problem, time_both)
        return times

    def _succeeds(self, problem: Problem, work: Callable[[], object]) -> bool:
        """Do the work; where it raises, keep the reason in ``failure``."""
        try:
            work()
        except Exception as error:  # whatever Inductor raises: there is no time of it
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            self.failure = f"M {problem.m}: {first_line[:150]}"
            return False
        return True

    def call(self, problem: Problem) -> Run:
        """Return calls of the compiled function."""
        least = _INT_MM_ROWS if problem.family == "int_mm" and self._operands.timing.target.device == "cuda" else 1
        m, padded = problem.m, problem.with_m(max(problem.m, least))
        arguments = [compiled_arguments(padded, item) for item in self._operands.inputs(padded)]
        for _, weight, *_scales in arguments:
            torch._dynamo.mark_static(weight)  # K and N are known: only M is dynamic
        compiled = self._compiled
        assert compiled is not None
        return self._operands.in_turn(None, lambda i: compiled(*arguments[i])[:m])


def use_hints(device: str) -> bool:
    """Let Inductor choose a kernel for each of a few M; returns whether it can."""
    import torch._inductor.config as config

    if device != "cuda" or not hasattr(config, "multi_kernel_hints"):
        return False
    config.multi_kernel_hints = HINTS
    return True


# --- one weight -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What holds for the whole run. deadline: the time of ``time.perf_counter`` after which nothing more is begun."""

    device: torch.device
    target: Target
    args: argparse.Namespace
    deadline: float

    @property
    def bar(self) -> float:
        return BARS[self.device.type]

    @property
    def is_late(self) -> bool:
        return time.perf_counter() > self.deadline

    @property
    def rounds(self) -> tuple[int, int]:
        return (min(LEAST_ROUNDS, self.args.rounds), self.args.rounds)

    @property
    def pairs(self) -> tuple[int, int]:
        return (self.args.pairs, self.args.pairs)


@dataclass
class Contest:
    """A tuned weight, and the contestants of every M that is measured."""

    problem: Problem
    operands: Operands
    contestants: dict[int, dict[str, Served]]
    compiled: Inductor | None = None

    def measure(self, m: int, settings: Settings) -> Row:
        """Return the ratios at one M."""
        problem, contestants = self.problem.with_m(m), self.contestants[m]
        device, alone = settings.device.type, contestants.get("alone")
        times = duel(self.operands, problem, _without(contestants, "alone"), settings.rounds, ROUND_S[device])
        row: Row = {
            "m": m, "serves": {name: served.words for name, served in contestants.items()},
            "plain": contestants["plan"].key == PLAIN.key, "plan": ratio(times, "plan", "ATen"),
            "nearest": ratio(times, "nearest", "ATen"), "times_us": _rounded(times),
        }  # fmt: skip
        row["first"] = row["plan"]
        if row["plan"][0] > settings.bar:
            longer = duel(self.operands, problem, _without(contestants, "nearest", "alone"), settings.pairs, 0.0)
            row |= {"plan": ratio(longer, "plan", "ATen"), "again_us": _rounded(longer)}
        if alone is not None:
            pair, rounds = {"plan": contestants["plan"], "alone": alone}, (settings.rounds[0], settings.args.pairs)
            against = duel(self.operands, problem, pair, rounds, 3.0 * ROUND_S[device])
            row |= {OVER_ALONE: ratio(against, "plan", "alone"), "alone_us": _rounded(against)}
        if self.compiled is not None:
            compiled = self.compiled.times(problem, settings.rounds, ROUND_S[device])
            if compiled:
                row |= {"Inductor": ratio(compiled, "Inductor", "ATen"), "Inductor_us": _rounded(compiled)}
        return row


def _without(contestants: Mapping[str, Served], *names: str) -> dict[str, Served]:
    return {name: served for name, served in contestants.items() if name not in names}


def _rounded(times: Times) -> dict[str, list[float]]:
    """Return times in microseconds, without those of contestants that are another one under a second name."""
    seen: dict[int, str] = {}
    for name, values in times.items():
        if values:
            seen.setdefault(id(values), name)
    return {name: [round(1e6 * value, 3) for value in times[name]] for name in seen.values()}


def _tried(decision: Decision) -> dict[str, list[Any]]:
    """Return the stage that each tried candidate reached, its time over ATen's best, and why it ended there, by id."""
    return {
        row.id: [row.stage, None if row.sample is None else round(row.sample.ratio, 4), row.reason]
        for row in decision.evidence
        if row.stage not in ("illegal", "untried")
    }


@dataclass(frozen=True)
class Tuned:
    """What tuning a weight for all M found. decisions: also those that were inconclusive, which are not stored. plan:
    None where only ATen's kernels are best, or no Decision was conclusive. sizes: the range, and the M of the
    Decisions. timeline: seconds after which a phase of tuning began or ended, by its name."""

    decisions: list[Decision]
    plan: TunedPlan | None
    sizes: tuning_sizes.SizeRange
    seconds: float
    timeline: dict[str, float]

    def facts(self, layout: str | None) -> Row:
        """Return what the table and the raw data say of the tuning of a weight that serves in ``layout``; ``plan_us``
        are the times by which the plan was made."""
        intervals = () if self.plan is None else self.plan.intervals.get(layout or "", ())
        return {
            "tuning_s": self.seconds, "first": self.sizes.first, "last": self.sizes.last, "layout": layout,
            "has_plan": self.plan is not None, "intervals": len(intervals),
            "kernels": len({interval.kernel for interval in intervals}),
            "timed_kernels": 0 if self.plan is None else len(self.plan.kernels),
            "sweep_s": None if self.plan is None else self.plan.seconds,
            "timeline_s": self.timeline,
            "stopped": None if self.plan is None else self.plan.stopped,
            "outcomes": {int(decision.problem["m"]): decision.outcome for decision in self.decisions},
            "tried": {int(decision.problem["m"]): _tried(decision) for decision in self.decisions},
            "plan": [(interval.first, interval.last, interval.kernel) for interval in intervals],
            "plan_us": {} if self.plan is None else {
                kernel.id: {m: round(1e6 * seconds, 3) for m, seconds in kernel.times.items()}
                for kernel in self.plan.kernels
            },
            "noise": {} if self.plan is None else {m: round(noise, 4) for m, noise in self.plan.noise.items()},
            "scan_us": {} if self.plan is None else {m: round(1e6 * s, 3) for m, s in self.plan.scan.items()},
            "surcharges": {} if self.plan is None else self.plan.surcharges,
        }  # fmt: skip


def tune(problem: Problem, store: Store, settings: Settings) -> Tuned:
    """Tune a weight for all M into the store, which dispatch reads from then on."""
    start, args, timeline = time.perf_counter(), settings.args, dict[str, float]()

    def note(event: Event) -> None:
        name = type(event).__name__
        if isinstance(event, ProblemStarted):
            name += f" M={event.problem.m}"
        elif isinstance(event, ProblemDone):
            name += f" M={event.decision.problem['m']}"
        elif isinstance(event, PlanProgress) and name in timeline:
            name += ", the last"
        timeline[name] = round(time.perf_counter() - start, 2)

    decisions = gemmtune.tune(
        [(problem, 1)], m=args.m, store=store, device=settings.device, budget=args.budget, progress=note
    )
    seconds = time.perf_counter() - start
    plan = next((plan for plan in store.plans(settings.target) if plan.plan_key == problem.plan_key), None)
    sizes = tuning_sizes.parse_sizes(args.m, kinds.get(settings.device.type).profile, [problem.m])
    return Tuned(decisions, plan, sizes, seconds, timeline)


def tune_alone(server: Server, problem: Problem, settings: Settings) -> Served | None:
    """Tune one M into a store of its own, and return what then serves; None where the machine was too disturbed to
    decide, twice. The store in use is another one afterwards."""
    for _ in range(2):
        decisions = gemmtune.tune([(problem, 1)], store=MemoryStore(), device=settings.device)
        if decisions[0].outcome != "inconclusive":  # such a decision is not stored, and the plain op would serve
            return server.served(problem, choose_packing(decisions), decisions)
    return None


def prepare(problem: Problem, store: Store, settings: Settings) -> tuple[Contest, Row]:
    """Tune a weight and find the contestants at each M; return them and the facts of the tuning."""
    tuned, server = tune(problem, store, settings), Server(problem, settings.device, settings.target)
    index = RUNTIME.index(settings.device)
    points, layout = index.points(problem.plan_key), index.layouts(problem.plan_key)[0]
    rng, span = (
        random.Random(f"{settings.args.seed} {problem.plan_key}"),
        range(tuned.sizes.first, tuned.sizes.last + 1),
    )
    sizes = rng.sample(span, min(settings.args.sizes, len(span)))  # in random order: a time limit leaves a random part
    contestants: dict[int, dict[str, Served]] = {}
    for m in sizes:
        at_m = problem.with_m(m)
        plan_serves = server.served(at_m, layout, tuned.decisions)
        contestants[m] = {"ATen": PLAIN, "plan": plan_serves, "nearest": server.nearest(at_m, points, tuned.decisions)}
    for m in sizes[: settings.args.regret]:
        alone = None if settings.is_late else tune_alone(server, problem.with_m(m), settings)
        if alone is not None:
            contestants[m]["alone"] = alone
    RUNTIME.refresh(store)
    operands = Operands(problem, tuned.sizes, settings.target, server.packers)
    return Contest(problem, operands, contestants), tuned.facts(layout)


def measure_weight(family: str, k: int, n: int, settings: Settings) -> Row:
    """Return the facts of tuning one weight, the rows of its M, and their summary."""
    make = h200.problem_of if settings.device.type == "cuda" else _cpu_problem
    with tempfile.TemporaryDirectory(prefix="gemmtune-every-m-") as folder:
        store = open_store(Path(folder) / "store.db")
        contest, facts = prepare(make(family, 1, n, k), store, settings)
        if settings.args.inductor:
            contest.compiled = Inductor(contest.problem.with_m(next(iter(contest.contestants))), contest.operands)
        rows: list[Row] = []
        for m in contest.contestants:
            if rows and settings.is_late:
                break
            rows.append(contest.measure(m, settings))
        store.close()
    if contest.compiled is not None:
        facts["Inductor"] = {"seconds": contest.compiled.seconds, "failure": contest.compiled.failure}
    facts["drawn"] = len(contest.contestants)
    weight = {"family": family, "k": k, "n": n, **facts, "sizes": sorted(rows, key=lambda row: int(row["m"]))}
    return {**weight, "summary": summarize(weight, settings.bar)}


def _cpu_problem(family: str, m: int, n: int, k: int) -> Problem:
    return build(m, n, k, family)


# --- the table --------------------------------------------------------------------------------------------------


def summarize(weight: Row, bar: float) -> Row:
    """Return a weight's line of the table; None for what was not measured."""
    rows = weight["sizes"]
    regrets = [row[OVER_ALONE][0] - 1.0 for row in rows if OVER_ALONE in row]
    return {
        "sizes": len(rows), "by_kernel": sum(not row["plain"] for row in rows) / len(rows),
        "worst": max(row["plan"][0] for row in rows),
        "above": [(row["m"], row["plan"]) for row in rows if row["plan"][0] > bar],
        "regrets": regrets, "regret": statistics.mean(regrets) if regrets else None,
        "worst_regret": max(regrets, default=None), **mean_times(rows),
    }  # fmt: skip


def mean_times(rows: Iterable[Row]) -> dict[str, float | None]:
    """Return the geometric mean of each contestant's times over ATen's; None where it was not timed.

    The Plan's are those of the first measurement, as the others': only what looked slow is measured again.
    """
    names = {"plan": "first", "nearest": "nearest", "Inductor": "Inductor"}
    ratios = {name: [row[key][0] for row in rows if key in row] for name, key in names.items()}
    return {name: geomean(values) if values else None for name, values in ratios.items()}


_COLUMNS = (
    ("family", 7), ("K x N", 12), ("tuning s", 9), ("kernels", 8), ("intervals", 10), ("M", 4), ("by kernel", 10),
    ("worst", 7), ("mean", 7), ("above", 6), ("regret", 8), ("worst", 7), ("nearest", 8), ("Inductor", 9),
)  # fmt: skip


def print_header() -> None:
    print("".join(f"{name:>{width}}" for name, width in _COLUMNS), flush=True)


def print_weight(weight: Row, bar: float) -> None:
    line = weight["summary"]
    cells = (
        weight["family"], f"{weight['k']}x{weight['n']}", f"{weight['tuning_s']:.1f}", weight["kernels"],
        weight["intervals"], line["sizes"], f"{line['by_kernel']:.0%}", f"{line['worst']:.3f}", f"{line['plan']:.3f}",
        len(line["above"]), _number(line["regret"], ".1%"), _number(line["worst_regret"], ".1%"),
        _number(line["nearest"], ".3f"), _number(line["Inductor"], ".3f"),
    )  # fmt: skip
    text = "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))
    above = "  ".join(f"M {m}: {center:.3f} [{lo:.3f}-{hi:.3f}]" for m, (center, lo, hi) in line["above"])
    print(text + (f"\n        above {bar}: {above}" if above else ""), flush=True)
    if line["sizes"] < weight["drawn"]:
        print(f"        cut short by the time limit: {line['sizes']} of {weight['drawn']} M", flush=True)
    if not weight["has_plan"]:
        outcomes = ", ".join(f"M {m}: {outcome}" for m, outcome in weight["outcomes"].items())
        print(f"        no TunedPlan; the Decisions: {outcomes}", flush=True)
    if weight.get("Inductor", {}).get("failure"):
        print(f"        Inductor: {weight['Inductor']['failure']}", flush=True)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def print_bars(weights: Sequence[Row], skipped: Sequence[str], bar: float) -> None:
    """Print the last lines: what was skipped, and all weights together beside the bars."""
    if skipped:
        print(f"skipped after the time limit: {', '.join(skipped)}")
    if not weights:
        return
    lines = [weight["summary"] for weight in weights]
    rows = [row for weight in weights for row in weight["sizes"]]
    regrets = [value for line in lines for value in line["regrets"]]
    # Where Inductor was timed, the means are over those M.
    means = mean_times([row for row in rows if "Inductor" in row] or rows)
    means_text = ", ".join(f"{name} {_number(value, '.3f')}" for name, value in means.items())
    seconds = [weight["tuning_s"] for weight in weights]
    mean_regret = _number(statistics.mean(regrets) if regrets else None, ".1%")
    print(
        f"bars: {sum(len(line['above']) for line in lines)} of {len(rows)} M above {bar} of ATen's time, worst "
        f"{max(line['worst'] for line in lines):.3f}; regret {mean_regret} in the mean, "
        f"{sum(value > REGRET_BAR for value in regrets)} of {len(regrets)} above {REGRET_BAR:.0%}; mean time over "
        f"ATen's: {means_text}; "
        f"tuning {statistics.mean(seconds):.0f} s a weight, at most {max(seconds):.0f}"
    )


# --- the command line -------------------------------------------------------------------------------------------


def parse_m(text: str) -> tuning_sizes.Sizes:
    """Parse ``all``, ``1-512`` (both included) or hints such as ``64,256,4096``. Raises ValueError."""
    if text == "all":
        return "all"
    if "-" in text:
        first, last = map(int, text.split("-"))
        return range(first, last + 1)
    return [int(part) for part in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--families", help="comma separated; GPU: [{cuda}], CPU: [{cpu}]".format(**FAMILIES))
    parser.add_argument("--weights", help="KxN,KxN; GPU: [{cuda}], CPU: [{cpu}]".format(**WEIGHTS))
    parser.add_argument("--m", type=parse_m, default="all", help="what to tune for: 1-512, hints 64,256,4096 [all]")
    parser.add_argument("--sizes", type=int, help="random M of a weight [GPU 40, CPU 24]")
    parser.add_argument("--regret", type=int, help="how many of them are tuned alone too [GPU 6, CPU 4]")
    parser.add_argument("--seed", type=int, default=0, help="of the random M [0]")
    parser.add_argument("--rounds", type=int, default=21, help="most rounds at one M [21]")
    parser.add_argument("--pairs", type=int, default=60, help="pairs of a second measurement [60]")
    parser.add_argument("--budget", type=float, help="seconds, passed to the tuning for all M [the library's default]")
    parser.add_argument("--threads", type=int, default=1, help="threads on a CPU [1]")
    parser.add_argument("--seconds", type=float, help="begin no weight and no M after this time [none]")
    parser.add_argument("--inductor", action="store_true", help="time torch.compile(dynamic=True) too")
    parser.add_argument("--no-overlap", action="store_true", help="kernels wait for the preceding one (no PDL)")
    parser.add_argument("--quick", action="store_true", help="the first weight, 6 random M, 1 of them tuned alone")
    args = parser.parse_args()
    default_sizes, default_regret = (6, 1) if args.quick else SIZES[args.device]
    args.sizes = default_sizes if args.sizes is None else args.sizes
    args.regret = default_regret if args.regret is None else args.regret
    if args.sizes < 1:
        parser.error(f"--sizes must be 1 or more; got {args.sizes}")
    args.families = (args.families or FAMILIES[args.device]).split(",")
    pairs = [pair.split("x") for pair in (args.weights or WEIGHTS[args.device]).split(",")]
    args.weights = [(int(k), int(n)) for k, n in (pairs[:1] if args.quick and not args.weights else pairs)]
    return args


def main() -> None:
    args, start = parse_arguments(), time.perf_counter()
    deadline = float("inf") if args.seconds is None else start + args.seconds
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    if args.no_overlap:
        os.environ[OVERLAP] = "0"
    settings = Settings(torch.device(args.device), current_target(args.device), args, deadline)
    run: Row = {"made": time.strftime("%Y%m%d-%H%M%S", time.gmtime()), "bar": settings.bar}
    run["arguments"] = {**vars(args), "m": str(args.m)}
    if args.inductor:
        run["Inductor chooses by M"] = use_hints(args.device)
    if args.device == "cuda":
        run["gpu"] = settings.target.to_dict()
    weights: list[Row] = []
    skipped: list[str] = []
    print_header()
    for family, (k, n) in itertools.product(args.families, args.weights):
        if settings.is_late:
            skipped.append(f"{family} {k}x{n}")
            continue
        weights.append(measure_weight(family, k, n, settings))
        print_weight(weights[-1], settings.bar)
        save_results("every-m", weights, skipped=skipped, **run)
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    print_bars(weights, skipped, settings.bar)
    write_results("every-m", weights, skipped=skipped, **run)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
