"""Checks of weights that are tuned as functions of M: their regret, damaged stores, and processes that tune at once."""

from __future__ import annotations

import random
import sqlite3
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from unittest import mock

from torch import Tensor

from gemmtune.core.decision import Verdict
from gemmtune.core.events import silent
from gemmtune.core.problem import Problem
from gemmtune.core.tuned_plan import PlanInterval, PlanKernel, TunedPlan
from gemmtune.core.workloads import linear_problem
from gemmtune.dispatch import RUNTIME, current_target
from gemmtune.store import MemoryStore, SqliteStore
from gemmtune.tuning import plan_session, weight_session
from gemmtune.tuning.plan_session import PlanSession
from gemmtune.tuning.sizes import SizeRange
from helpers import plans
from helpers.plans import FakeTime, FakeWorker, Model, SimulatedKernel, decisions_at, staircase
from helpers.serving import TOY_RUNS, decide, evidence, register, toy
from helpers.undisturbed import undisturbed

from . import every_m_children as tuning
from . import store_children as children
from .checks import Outcome, check, findings_text

# Regret over M

_LAST, _TUNED = 512, (1, 8, 48, 192)  # the range of M on a CPU, and the M that are tuned by themselves
_NOISE = 0.005  # of a timing, as a share
_FAR = 0.1  # a regret that is counted


@check(
    "regret over M: weights with 2 to 8 kernels (tiles of 1 to 128 rows, times that rise in steps), tuned for M = 1 to "
    "512 on a simulated clock, 0.5% noise; at every M, the true time of what serves over that of the fastest kernel",
    "mean <= 0.5%; above 10% at <= 0.5% of the M",
)
def regret_over_m(full: bool) -> Outcome:
    rows = [_regrets(seed) for seed in range(300 if full else 10)]
    every = [regret for row in rows for regret in row]
    mean, far = statistics.mean(every), sum(regret > _FAR for regret in every) / len(every)
    means = [statistics.mean(row) for row in rows]
    return Outcome(
        f"mean {mean:.2%}, above 10% at {far:.2%} of the M of {len(rows)} weights; the worst weight {max(means):.1%} "
        f"in the mean, the worst M {max(every):.0%}",
        mean <= 0.005 and far <= 0.005,
        {"mean_by_weight": means, "worst_by_weight": [max(row) for row in rows]},
    )


def _regrets(seed: int) -> list[float]:
    """Tune a weight of simulated kernels for a range of M. Return the regret at each M."""
    rng, clock = random.Random(seed), FakeTime()
    plain, kernels = _population(rng)

    def noisy(seconds: Model) -> Model:
        return lambda m: seconds(m) * rng.lognormvariate(0.0, _NOISE)

    timed = [SimulatedKernel(kernel.candidate, noisy(kernel.seconds)) for kernel in kernels]
    worker = FakeWorker(clock, timed, noisy(plain), timing_s=2e-2)
    decisions, sizes = decisions_at(kernels, _TUNED, plans.PROBLEM, plain), SizeRange(1, _LAST, _TUNED)
    with (
        mock.patch.object(plan_session, "time", clock),
        mock.patch.object(weight_session, "time", clock),
        mock.patch.object(weight_session, "SERVING_S", 0.0),
    ):
        plan = PlanSession(
            plans.PROBLEM, current_target(), MemoryStore(), worker, decisions, sizes, silent, seed, counts={}
        ).run(6.0)  # fmt: skip
    models = {kernel.id: kernel.seconds for kernel in kernels} | {plans.PLAIN.id: plain}
    serving = [None if plan is None else plan.serving(m) for m in range(1, _LAST + 1)]
    return [
        (plain if kernel is None else models[kernel.id])(m) / min(model(m) for model in models.values()) - 1.0
        for m, kernel in enumerate(serving, 1)
    ]


def _population(rng: random.Random) -> tuple[Model, list[SimulatedKernel]]:
    """Return the time of the plain op, and kernels: those with large tiles take less time for a row of many."""
    plain = staircase(rng.uniform(5.0, 20.0), rng.uniform(0.05, 0.4), rng.choice((1, 4, 16)))
    kernels = []
    for index in range(rng.randint(2, 8)):
        rows = rng.choice((1, 4, 8, 16, 32, 64, 128))
        step = rng.uniform(0.04, 0.4) * (rows + 8)
        kernels.append(plans.simulated(f"k{index}", staircase(rng.uniform(2.0, 12.0), step, rows), rows=rows))
    return plain, kernels


# Stores that lost records

_LAYOUT = "toy:plain"
_LOSSES = (("decisions",), ("plans",), ("decisions", "plans"))


@check(
    "Plans after a store lost a random half of its decisions, of its plans, or of both: raw and packed weights served "
    "at M in and outside of their range, then a weight tuned again",
    "0 wrong, 0 exceptions; what remains still serves; tuned again, the plan covers its range",
)
def lost_records(full: bool) -> Outcome:
    wrong: list[str] = []
    calls = by_kernel = 0
    for seed, tables in enumerate(_LOSSES * (20 if full else 1)):
        own_calls, own_kernels, faults = _serve_after_loss(tables, seed, weights=24 if full else 6)
        wrong += [f"lost {' and '.join(tables)}: {fault}" for fault in faults]
        calls, by_kernel = calls + own_calls, by_kernel + own_kernels
    repairs = _LOSSES * 3 if full else _LOSSES[1:2]
    for seed, tables in enumerate(repairs):
        wrong += [f"lost {' and '.join(tables)}, tuned again: {fault}" for fault in _repair(tables, seed)]
    return Outcome(
        f"{len(wrong)} faults in {calls} products ({by_kernel} by kernels) and {len(repairs)} tunings"
        + findings_text(wrong),
        not wrong and 0 < by_kernel < calls,
        {"wrong": wrong, "calls": calls, "by_kernel": by_kernel},
    )


def _lose_half(path: Path, tables: Sequence[str], rng: random.Random) -> None:
    """Delete a random half of the rows of tables, one at least."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for table in tables:
            rows = [row for (row,) in connection.execute(f"SELECT rowid FROM {table}")]
            lost = rng.sample(rows, -(-len(rows) // 2))
            connection.executemany(f"DELETE FROM {table} WHERE rowid = ?", [(row,) for row in lost])


def _serve_after_loss(tables: Sequence[str], seed: int, weights: int) -> tuple[int, int, list[str]]:
    """Return the number of products, how many of them kernels served, and what was wrong."""
    register()
    rng, wrong = random.Random(seed), list[str]()
    calls = 0
    with tempfile.TemporaryDirectory() as folder, closing(SqliteStore(Path(folder) / "store.db")) as store:
        problems = [linear_problem(8, 5 + index, 9 + index, "float32") for index in range(weights)]
        for problem in problems:
            store.put_plan(current_target(), _toy_plan(problem))
            for m in (1, 8, 80):
                rows = (evidence(toy(tag=1), 0.1), evidence(toy("plain", 3), 0.1))
                store.put(current_target(), decide(problem.with_m(m), *rows, chosen=toy(tag=1)))
        _lose_half(store.path, tables, rng)
        RUNTIME.refresh(store)
        TOY_RUNS.clear()
        for problem in problems:
            sizes = [1, 8, 80, *rng.sample(range(1, 200), 12)]
            weight: Tensor = tuning.small_integers(problem.n, problem.k)
            before = len(TOY_RUNS)
            wrong += tuning.faults_of_serving(weight, [_LAYOUT], sizes)
            calls += 2 * len(sizes)
            plan = store.get_plan(current_target(), problem.plan_key)
            inside = len(sizes) if plan is None else len(sizes) + sum(plan.first <= m <= plan.last for m in sizes)
            if len(TOY_RUNS) - before < inside:  # packed weights always, raw ones where an interval is left
                wrong.append(f"kernels served {len(TOY_RUNS) - before} times, {inside} were expected")
        wrong += store.verify()
    RUNTIME.refresh(MemoryStore())
    return calls, len(TOY_RUNS), wrong


def _toy_plan(problem: Problem) -> TunedPlan:
    """Return a plan of toy kernels for M from 1 to 64: two serve the raw weight, one the packed weight."""
    first, second, packed = toy(tag=1), toy(tag=2), toy("plain", 3)
    kernels = tuple(
        PlanKernel(
            candidate.to_dict(), candidate.id, 8, _LAYOUT if candidate is packed else None, times={8: 1e-6},
            verified=(1, 64), verdict=Verdict("within_bound"),
        )
        for candidate in (first, second, packed)
    )  # fmt: skip
    raw = (PlanInterval(1, 20, first.id), PlanInterval(21, 64, second.id))
    intervals = {"": raw, _LAYOUT: (PlanInterval(1, 64, packed.id),)}
    return TunedPlan(problem.plan_key, problem.to_dict(), current_target().key, 1, 64, intervals, kernels)


def _repair(tables: Sequence[str], seed: int) -> list[str]:
    """Tune a weight, delete half of the records, and tune it again. Return what is wrong then."""
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(SqliteStore(Path(folder) / "store.db")) as store,
        undisturbed(),
    ):
        tuning.tune_range(store, 1, 24)
        plan = tuning.stored_plan(store)
        layouts = [] if plan is None else [layout for layout in plan.intervals if layout]
        _lose_half(store.path, tables, random.Random(seed))
        RUNTIME.refresh(store)
        weight = tuning.small_integers(tuning.PROBLEM.n, tuning.PROBLEM.k)
        wrong = [f"before: {fault}" for fault in tuning.faults_of_serving(weight, layouts, range(1, 33))]
        tuning.tune_range(store, 1, 24)
        return wrong + tuning.faults_of_plan(store, 1, 24)


# Processes that tune ranges of one weight


@check(
    "2 or 3 processes that tune overlapping ranges of M of one weight at once, in one store",
    "one plan that covers all ranges, of legal kernels; every M served right; 0 errors",
)
def overlapping_ranges(full: bool) -> Outcome:
    rounds: list[list[tuple[int, int]]] = [[(1, 24), (12, 40)]]
    if full:
        rounds += [[(1, 96), (24, 48)], [(40, 128), (1, 64)], [(1, 40), (20, 80), (60, 128)], [(1, 64), (1, 64)]]
    wrong: list[str] = []
    for ranges in rounds * (3 if full else 1):
        wrong += [f"{ranges}: {fault}" for fault in _tune_at_once(ranges)]
    count = len(rounds) * (3 if full else 1)
    return Outcome(f"{len(wrong)} faults in {count} stores" + findings_text(wrong), not wrong, {"wrong": wrong})


def _tune_at_once(ranges: Sequence[tuple[int, int]]) -> list[str]:
    """Tune ranges in a process each, all at once. Return what is wrong with the store and with what serves."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store.db")
        with children.ready_processes([(tuning.tune_range_when_told, path, *span) for span in ranges]) as processes:
            children.start_work(processes)
            _, wrong = children.collect(processes)
        first, last = min(first for first, _ in ranges), max(last for _, last in ranges)
        # In a process like theirs: the backends that others have registered are part of this one's Target.
        return wrong + children.finish(children.start(tuning.report_faults, path, first, last))
