"""Measure how the kernel that one M was tuned for does at other M: row i, column j is its time at M_j over that of the
kernel that was tuned for M_j.

    python benchmarks/heat_map.py                                 64 M of 4096x4096, on a GPU where there is one
    python benchmarks/heat_map.py --families bf16 --m 64:4096:64 --plot heat.html
    python benchmarks/heat_map.py --device cpu --quick --plot heat.svg
    python benchmarks/heat_map.py --families fp8 --weights 4096x12288 --m 64,256,4096 --budget 2 --seconds 200

Each M is tuned by itself, as config_key tunes the M that represent its keys; with less time where there are many. All
kernels that were chosen are then timed at each M, in interleaved rounds, on operands that are not in the cache (on a
GPU in CUDA graphs), in the layout of the weight that dispatch chooses for these Decisions. A kernel that is far behind
at an M has fewer rounds there. The row "ATen" is PyTorch's plain op.

From the same times: the regret (time over that of the M's own kernel, less 1) of two ways to coarsen M. "power_of_2":
the kernel of the M that represents the key of config_key="power_of_2", among the M of the list; "nearest": that of the
nearest of 64, 256 and 4096 by ratio (the nearest M of the list stands for each). ATen does not take over where it is
faster, as it does in a plan. Raw data is written to benchmarks/results/ (or $OUT) after every weight.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h200
import heat_plot
import torch
from harness import geomean, save_results, write_results

from gemmtune import backends
from gemmtune.core import devices
from gemmtune.core.decision import Decision
from gemmtune.core.events import silent
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.core.workloads import build
from gemmtune.dispatch import choose_packing
from gemmtune.dispatch.plan import nearest
from gemmtune.store import MemoryStore
from gemmtune.tuning.api import tuning_target
from gemmtune.tuning.config_keys import keyed, representatives
from gemmtune.tuning.keyed_plan import KeyKernels
from gemmtune.tuning.plan_pool import served_pool
from gemmtune.tuning.sizes import KeyRun, SizeRange
from gemmtune.tuning.tuner import Budget, Tuner
from gemmtune.tuning.weight_session import WeightSession
from gemmtune.tuning.worker_pool import WorkerPool

Row = dict[str, Any]

FAMILIES = {"cuda": "bf16,int8,fp8", "cpu": "fp32,bf16,int8"}
WEIGHTS = {"cuda": "4096x4096", "cpu": "1024x1024"}  # K x N
SIZES = {"cuda": "64:4096:64", "cpu": "16:256:16"}
QUICK = {"weights": "256x256", "m": "4,16,64", "budget": 0.5, "seconds": 30.0}
SECONDS = 290.0  # of a weight
HINTS = (64, 256, 4096)
TUNING_SHARE = 0.65  # of a weight's time, after which no M is tuned any more
BUILDING = 2.0  # times the seconds of an M of a plan, with the builds
TOGETHER = 8  # M that are tuned in one call: kernels of the later ones are built meanwhile
ATEN = "ATen"


@dataclass(frozen=True)
class HeatMap:
    """The times of kernels at several M.

    sizes: the M, ascending. chosen: the kernel that each M was tuned for, by M. passes: of each pass over all M, the
    seconds by kernel id and M. plain: id of ATen's plain op; empty where it was not timed.
    """

    sizes: tuple[int, ...]
    chosen: Mapping[int, str]
    passes: Sequence[Mapping[str, Mapping[int, float]]]
    plain: str = ""

    def ratio(self, name: str, m: int) -> float | None:
        """Return the time of a kernel at M over that of the M's own kernel, the median over the passes; None where one
        of them was not timed."""
        own = self.chosen[m]
        if name == own:
            return 1.0
        timed = [times for times in self.passes if m in times.get(name, {}) and m in times.get(own, {})]
        return statistics.median(times[name][m] / times[own][m] for times in timed) if timed else None

    def row(self, name: str) -> list[float | None]:
        """Return the ratios of a kernel at all M."""
        return [self.ratio(name, m) for m in self.sizes]

    def rows(self) -> dict[str, list[float | None]]:
        """Return the ratios of each M's kernel, and of ATen's plain op, by label."""
        rows = {str(m): self.row(self.chosen[m]) for m in self.sizes}
        return rows | ({ATEN: self.row(self.plain)} if self.plain else {})

    def regrets(self, stands_for: Mapping[int, int]) -> dict[int, float]:
        """Return the regret at each M where the kernel of the M ``stands_for[m]`` serves it."""
        ratios = {m: self.ratio(self.chosen[stands_for[m]], m) for m in self.sizes}
        return {m: ratio - 1.0 for m, ratio in ratios.items() if ratio is not None}


def by_power_of_2(sizes: Sequence[int]) -> dict[int, int]:
    """Return the M that stands for each M of a list: the one that represents its key, or the largest of the list with
    this key."""
    runs = keyed(SizeRange(min(sizes), max(sizes), ()), "power_of_2").runs
    tuned = representatives(runs)
    stands_for: dict[int, int] = {}
    for run in runs:
        members = [m for m in sizes if run.first <= m <= run.last]
        stands_for |= {m: tuned[run.key] if tuned[run.key] in members else max(members) for m in members}
    return stands_for


def by_nearest(sizes: Sequence[int], hints: Sequence[int] = HINTS) -> dict[int, int]:
    """Return the M that stands for each M of a list: the nearest of the hints, which are themselves replaced by the
    nearest M of the list."""
    listed = tuple(sorted(sizes))
    kept = tuple(sorted({listed[nearest(listed, hint)] for hint in hints}))
    return {m: kept[nearest(kept, m)] for m in sizes}


COARSE: dict[str, Callable[[Sequence[int]], dict[int, int]]] = {"power_of_2": by_power_of_2, "nearest": by_nearest}


# --- measuring


class MatrixSession(WeightSession):
    """Times the kernels that all M were tuned for at all M."""

    def measure(self, layout: str | None, seconds: float, passes: int) -> HeatMap:
        """Return the times in a layout, measured in about some seconds; in one pass at least."""
        self._end = time.perf_counter() + seconds
        self._add(served_pool(self._decisions, self._faulty))
        kernels = KeyKernels([KeyRun(m, m, m) for m in self._sizes.tuned], self._measurements)
        plain = "".join(kernels.plain)
        chosen = dict.fromkeys(self._sizes.tuned, plain) | kernels.by_m(layout or "")
        sizes = tuple(m for m in self._sizes.tuned if chosen[m])
        names = list(dict.fromkeys([*kernels.plain, *(chosen[m] for m in sizes)]))
        self._worker.open(self._problem, self._seed)
        found: list[dict[str, dict[int, float]]] = []
        pass_s = 0.0
        while len(found) < passes and (not found or time.perf_counter() < self._end - pass_s):
            begun = time.perf_counter()
            self._time_in_batches(sizes, lambda m: names, max(self._end - begun, 0.0) / (passes - len(found)))
            pass_s = time.perf_counter() - begun
            found.append({name: dict(times) for name, times in self._measurements.times.items()})
        return HeatMap(sizes, chosen, found, plain)

    @property
    def noise(self) -> dict[int, float]:
        """By M, the noise of the times there."""
        return self._measurements.noise

    @property
    def failed(self) -> dict[str, str]:
        """Why kernels were not timed at some M, by id."""
        return self._measurements.out


@dataclass(frozen=True)
class Tuned:
    """What tuning the M of a weight found. late: whether time was over before all were tuned."""

    decisions: list[Decision]
    late: bool
    seconds: float

    @property
    def conclusive(self) -> list[Decision]:
        """The Decisions that say which kernels are fast, by M."""
        usable = [d for d in self.decisions if d.outcome not in ("inconclusive", "none_valid")]
        return sorted(usable, key=lambda decision: int(decision.problem["m"]))


def tune_each(tuner: Tuner, pool: WorkerPool, problem: Problem, sizes: Sequence[int], deadline: float) -> Tuned:
    """Tune each M by itself, in random order: a time limit leaves a random part."""
    started = time.perf_counter()
    order = random.Random(0).sample(list(sizes), len(sizes))
    decisions: list[Decision] = []
    for start in range(0, len(order), TOGETHER):
        if decisions and time.perf_counter() > deadline:
            break
        decisions += tuner.tune([(problem.with_m(m), 1) for m in order[start : start + TOGETHER]], pool)
    return Tuned(decisions, len(decisions) < len(sizes), time.perf_counter() - started)


def measure_weight(family: str, k: int, n: int, args: argparse.Namespace, seconds: float) -> tuple[HeatMap, Row]:
    """Return the heat map of one weight, made in about some seconds, and what the raw data says of it."""
    make = h200.problem_of if args.device == "cuda" else cpu_problem
    started, problem = time.perf_counter(), make(family, 1, n, k)
    target, store = tuning_target(args.device), MemoryStore()
    budget = budget_of(args, target, TUNING_SHARE * seconds)
    tuner = Tuner(target, backends.names(target.device), store, budget, silent)
    with closing(tuner.new_pool()) as pool:
        tuned = tune_each(tuner, pool, problem, args.m, started + TUNING_SHARE * seconds)
        if not tuned.conclusive:
            raise SystemExit(f"{family} {k}x{n}: the machine was too disturbed to decide any M")
        layout = choose_packing(tuned.conclusive)
        session = new_session(problem, target, store, pool, tuned.conclusive)
        heat_map = session.measure(layout, max(1.0, started + seconds - time.perf_counter()), args.passes)
    facts: Row = {
        "family": family, "k": k, "n": n, "layout": layout, "tuning_s": tuned.seconds, "late": tuned.late,
        "seconds": time.perf_counter() - started, "m": heat_map.sizes, "chosen": heat_map.chosen,
        "plain": heat_map.plain, "passes_s": heat_map.passes, "noise": session.noise, "failed": session.failed,
        "undecided": sorted(set(args.m) - set(heat_map.sizes)),
    }  # fmt: skip
    return heat_map, facts | {"regret": {name: heat_map.regrets(by(heat_map.sizes)) for name, by in COARSE.items()}}


def budget_of(args: argparse.Namespace, target: Target, seconds: float) -> Budget:
    """Return the budget of each M: the user's; else that of an M of a plan, unless all M would take longer than some
    seconds, builds included."""
    usual_s, share_s = devices.get(target.device).profile.tuned_m_s, seconds / len(args.m)
    if args.budget is None and usual_s is not None and share_s > BUILDING * usual_s:
        return Budget(default_s=usual_s)
    return Budget(seconds=share_s if args.budget is None else args.budget)


def new_session(
    problem: Problem, target: Target, store: MemoryStore, pool: WorkerPool, decisions: Sequence[Decision]
) -> MatrixSession:
    """Return the session that times the kernels of Decisions."""
    tuned = tuple(int(decision.problem["m"]) for decision in decisions)
    sizes = SizeRange(tuned[0], tuned[-1], tuned)
    return MatrixSession(problem, target, store, pool.worker(), decisions, sizes, silent, 0, counts={})


def cpu_problem(family: str, m: int, n: int, k: int) -> Problem:
    return build(m, n, k, family)


# --- the table


def print_map(heat_map: HeatMap, facts: Row) -> None:
    """Print the geometric mean and the worst ratio of each row, and the regret of coarser M."""
    print(f"{facts['family']} {facts['k']}x{facts['n']}, weight {facts['layout'] or 'unpacked'}:", flush=True)
    print(f"{'tuned M':>8}{'mean':>8}{'worst':>8}{'at M':>7}  kernel")
    for label, row in heat_map.rows().items():
        timed = [(ratio, m) for ratio, m in zip(row, heat_map.sizes, strict=True) if ratio is not None]
        worst, m = max(timed, default=(math.nan, 0))
        name = heat_map.plain if label == ATEN else heat_map.chosen[int(label)]
        missing = f"  (not timed at {len(row) - len(timed)} M)" if len(timed) < len(row) else ""
        print(f"{label:>8}{geomean(ratio for ratio, _ in timed):>8.3f}{worst:>8.3f}{m:>7}  {name}{missing}")
    for name, by in COARSE.items():
        stands_for = by(heat_map.sizes)
        regrets = heat_map.regrets(stands_for)
        m, worst = max(regrets.items(), key=lambda pair: pair[1])
        kernels = ", ".join(map(str, sorted(set(stands_for.values()))))
        print(
            f"regret of {name} (M {kernels}): {statistics.mean(regrets.values()):.1%} in the mean over "
            f"{len(regrets)} M, {worst:.1%} at most, at M = {m}"
        )
    undecided = f"; no decision at {len(facts['undecided'])} M" if facts["undecided"] else ""
    late = " (the time limit cut the tuning short)" if facts["late"] else ""
    noise = statistics.median(facts["noise"].values())
    print(
        f"{len(heat_map.passes)} passes, noise of one +-{noise:.1%} in the median over M; tuning took "
        f"{facts['tuning_s']:.0f} s, all {facts['seconds']:.0f} s{undecided}{late}",
        flush=True,
    )


# --- the command line


def parse_m(text: str) -> tuple[int, ...]:
    """Parse a list of M: ``64,256,4096``, or ``64:4096:64`` (first, last, step). Raises ValueError."""
    if ":" in text:
        first, last, step = map(int, text.split(":"))
        sizes = tuple(range(first, last + 1, step))
    else:
        sizes = tuple(sorted({int(part) for part in text.split(",")}))
    if not sizes or sizes[0] < 1:
        raise ValueError(f"every M must be 1 or more, and there must be one; got {text!r}")
    return sizes


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--families", help="comma separated; GPU: [{cuda}], CPU: [{cpu}]".format(**FAMILIES))
    parser.add_argument("--weights", help="KxN,KxN; GPU: [{cuda}], CPU: [{cpu}]".format(**WEIGHTS))
    parser.add_argument(
        "--m", type=parse_m, help="64,256,4096 or 64:4096:64; GPU: [{cuda}], CPU: [{cpu}]".format(**SIZES)
    )
    parser.add_argument("--budget", type=float, help="seconds of tuning for each M [as an M of a plan, or less]")
    parser.add_argument("--seconds", type=float, help=f"for the whole run [{SECONDS:.0f} for each weight]")
    parser.add_argument("--passes", type=int, default=5, help="most passes over all M; ratios are medians [5]")
    parser.add_argument("--threads", type=int, default=1, help="threads on a CPU [1]")
    parser.add_argument("--plot", type=Path, help="draw the heat maps: FILE.svg, or FILE.html (needs plotly)")
    parser.add_argument("--quick", action="store_true", help="the first family, a small weight, three M")
    args = parser.parse_args()
    if args.plot is not None and args.plot.suffix not in (".svg", ".html"):
        parser.error(f"--plot takes a file .svg or .html; got {args.plot}")
    quick: Row = QUICK if args.quick else {}
    args.families = (args.families or FAMILIES[args.device]).split(",")[
        : 1 if args.quick and not args.families else None
    ]
    weights = args.weights or quick.get("weights", WEIGHTS[args.device])
    args.weights = [(int(k), int(n)) for k, n in (pair.split("x") for pair in weights.split(","))]
    args.m = args.m or parse_m(quick.get("m", SIZES[args.device]))
    args.budget = args.budget or quick.get("budget")
    args.seconds = args.seconds or quick.get("seconds", SECONDS) * len(args.families) * len(args.weights)
    return args


def main() -> None:
    args, started = parse_arguments(), time.perf_counter()
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    run: Row = {"made": time.strftime("%Y%m%d-%H%M%S", time.gmtime()), "arguments": {**vars(args), "plot": None}}
    if args.device == "cuda":
        run["gpu"] = tuning_target("cuda").to_dict()
    weights = [(family, k, n) for family in args.families for k, n in args.weights]
    maps: dict[str, HeatMap] = {}
    rows: list[Row] = []
    for index, (family, k, n) in enumerate(weights):
        left_s = started + args.seconds - time.perf_counter()
        heat_map, facts = measure_weight(family, k, n, args, left_s / (len(weights) - index))
        maps[f"{family} {k}x{n}"] = heat_map
        rows.append(facts)
        print_map(heat_map, facts)
        save_results("heat-map", rows, **run)
        if args.plot is not None:
            tables = {title: (found.sizes, found.rows()) for title, found in maps.items()}
            heat_plot.save(args.plot, tables)
    write_results("heat-map", rows, **run)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
