"""Compare what serves batched products at random batches with PyTorch, and with what tuning each batch finds.

    python benchmarks/every_batch.py                                   a GPU where there is one, else the CPU
    python benchmarks/every_batch.py --shapes 16x512x128 --sizes 12    M x N x K of each matrix; random batches
    python benchmarks/every_batch.py --device cpu --dtype float32

Each shape is tuned for all batches up to --last (``gemmtune.tune(problem, batch=range(1, last + 1))``) in a store of
its own. Then batches are drawn at random, half of them evenly over the logarithm. At each, ``torch.bmm``, the kernel
that the plan serves and, at --regret of them, the kernel that a tuning of this batch alone found are timed in rounds,
in random order, on operands in rotation (a GPU: one CUDA graph of all sets each). A ratio is paired by round. Where the
plan serves PyTorch's own op, or the kernel is the one that tuning alone found, their ratio is 1. Raw data is written to
benchmarks/results/ (or $OUT).
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from fused import time_calls
from harness import Entrant, card_name, interleave, paired_ratios, save_results
from torch import Tensor

import gemmtune
from gemmtune.backends.base import Kernel
from gemmtune.core.problem import Problem
from gemmtune.core.workloads import bmm_problem
from gemmtune.dispatch import current_target
from gemmtune.dispatch.runtime import RUNTIME
from gemmtune.store import MemoryStore
from gemmtune.store.base import Store

SHAPES = {"cuda": "16x512x128,1x2048x128,128x128x1024,64x1408x2048", "cpu": "16x96x64,1x512x128,64x128x64"}
LAST = {"cuda": 512, "cpu": 128}
CACHE_BYTES = {"cpu": 96 << 20, "cuda": 200 << 20}  # of the operands of all sets
MAX_SETS = 24
Row = dict[str, Any]


class Graph:
    """A CUDA graph of calls on all operand sets."""

    def __init__(self, run: Callable[[int], None], sets: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for index in range(sets):
                run(index)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for index in range(sets):
                    run(index)
        self.call = graph.replay
        self.call()
        torch.cuda.synchronize()


def served(problem: Problem, store: Store, device: str) -> Kernel | None:
    """Return the kernel that a store has serve a Problem; None for PyTorch's own op."""
    RUNTIME.refresh(store)
    return RUNTIME.kernel_for(problem, None, torch.device(device))


def time_contestants(
    contestants: dict[str, Kernel | None], problem: Problem, device: str, seconds: float
) -> dict[str, list[float]]:
    """Return the microseconds of a call of each contestant by round. None stands for ``torch.bmm``."""
    dtype = getattr(torch, problem.a.dtype)
    count = max(2, min(MAX_SETS, -(-CACHE_BYTES[device] // problem.min_bytes)))
    shape = problem.batch, problem.m, problem.n
    sets = [
        (
            torch.randn(problem.batch, problem.m, problem.k, device=device).to(dtype),
            torch.randn(problem.batch, problem.k, problem.n, device=device).to(dtype),
            torch.empty(shape, dtype=dtype, device=device),
        )
        for _ in range(count)
    ]

    def runner(kernel: Kernel | None) -> Callable[[int], None]:
        def run(index: int) -> None:
            a, b, out = sets[index]
            if kernel is None:
                torch.bmm(a, b, out=out)
            else:
                kernel.run(a, b, (), out)

        return run

    reference: Tensor | None = None
    for name, kernel in contestants.items():
        sets[0][2].fill_(math.nan)
        runner(kernel)(0)
        result = sets[0][2].double()
        reference = result.clone() if reference is None else reference
        error = float((result - reference).norm() / reference.norm().clamp(min=1e-30))
        if not error < 2e-2:
            raise RuntimeError(f"{name} of {problem.key} is off by {error:.2g}")
    if device == "cpu":
        entrants = {name: Entrant(runner(kernel)) for name, kernel in contestants.items()}
        times = interleave(entrants, sets=count, seconds=seconds)
        return {name: [1e6 * t for t in values] for name, values in times.items()}
    graphs: dict[str, Any] = {name: Graph(runner(kernel), count) for name, kernel in contestants.items()}
    rounds = time_calls(graphs, 31, device)
    return {name: [t / count for t in values] for name, values in rounds.items()}


def measure(problem: Problem, store: Store, alone: Store | None, options: argparse.Namespace) -> Row:
    """Return the row of one batch. alone: a store with the Decision of this batch; None without."""
    kernels: dict[str, Kernel | None] = {"torch": None, "plan": served(problem, store, options.device)}
    if alone is not None:
        kernels["alone"] = served(problem, alone, options.device)
    ids = {name: None if kernel is None else kernel.candidate.id for name, kernel in kernels.items()}
    first = {kernel_id: name for name, kernel_id in reversed(ids.items())}
    contestants = {name: kernels[name] for name in kernels if first[ids[name]] == name}
    times = time_contestants(contestants, problem, options.device, options.seconds_each)

    def ratio(name: str, base: str) -> tuple[float, float, float]:
        one, other = first[ids[name]], first[ids[base]]
        spread = paired_ratios(times[one], times[other])
        return spread.median, spread.low, spread.high

    row: Row = {"batch": problem.batch, "kernels": ids, "times_us": times, "of_torch": ratio("plan", "torch")}
    if alone is not None:
        row["regret"] = ratio("plan", "alone")[0] - 1.0
    return row


def draw_batches(last: int, count: int, rng: random.Random) -> list[int]:
    """Return different batches from 1 to ``last``, half of them evenly over the logarithm."""
    batches: set[int] = set()
    while len(batches) < min(count, last):
        even = len(batches) % 2
        batches.add(rng.randint(1, last) if even else round(math.exp(rng.uniform(0.0, math.log(last)))))
    return sorted(batches)


def measure_shape(text: str, options: argparse.Namespace) -> Row:
    """Tune a shape for all batches, and return its row."""
    m, n, k = map(int, text.split("x"))
    problem, store = bmm_problem(8, m, n, k, options.dtype), MemoryStore()
    started = time.perf_counter()
    gemmtune.tune(problem, batch=range(1, options.last + 1), store=store, device=options.device)
    tuning_s = time.perf_counter() - started
    plan = store.get_plan(current_target(options.device), problem.plan_key_over("batch"))
    if plan is None:
        raise RuntimeError(f"no plan for {text}: the machine was too busy")
    rng = random.Random(f"{options.seed}|{text}")
    batches = draw_batches(options.last, options.sizes, rng)
    with_regret = set(rng.sample(batches, min(options.regret, len(batches))))
    rows = []
    for batch in batches:
        at_batch, alone = problem.with_size("batch", batch), None
        if batch in with_regret:
            alone = MemoryStore()
            gemmtune.tune(at_batch, store=alone, device=options.device)
        rows.append(measure(at_batch, store, alone, options))
        worst = rows[-1]
        print(
            f"  batch {batch:>4}: {worst['of_torch'][0]:.3f} of torch.bmm's time"
            + (f", regret {worst['regret']:.1%}" if "regret" in worst else "")
            + f"  {worst['kernels']['plan'] or 'torch.bmm'}",
            flush=True,
        )
    kernels = len({interval.kernel for spans in plan.intervals.values() for interval in spans})
    regrets = [row["regret"] for row in rows if "regret" in row]
    shares = [row["of_torch"][0] for row in rows]
    print(
        f"{text} {options.dtype}: tuned in {tuning_s:.1f} s, {kernels} kernels; of torch.bmm's time "
        f"{statistics.mean(shares):.3f} in the mean, {max(shares):.3f} at worst ({len(rows)} batches); regret "
        + (
            f"{statistics.mean(regrets):.1%} in the mean, {max(regrets):.1%} at worst ({len(regrets)})"
            if regrets
            else "-"
        ),
        flush=True,
    )
    return {"shape": text, "tuning_s": tuning_s, "kernels": kernels, "plan": plan.plan_key, "batches": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", help="M x N x K of each matrix, comma separated")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--last", type=int, help="the largest batch [GPU 512, CPU 128]")
    parser.add_argument("--sizes", type=int, default=12, help="random batches of a shape [12]")
    parser.add_argument("--regret", type=int, default=4, help="how many of them are tuned alone, too [4]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads on a CPU [1]")
    parser.add_argument("--seconds-each", type=float, default=1.0, help="of timing at a batch, on a CPU [1]")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no shape after this time")
    options = parser.parse_args()
    options.shapes, options.last = options.shapes or SHAPES[options.device], options.last or LAST[options.device]
    torch.set_num_threads(options.threads)
    started, rows = time.perf_counter(), list[Row]()
    made, path = time.strftime("%Y%m%d-%H%M%S", time.gmtime()), None
    arguments = {name: value for name, value in vars(options).items() if name != "seconds"}
    for text in options.shapes.split(","):
        if time.perf_counter() - started < options.seconds:
            rows.append(measure_shape(text, options))
            card = card_name(options.device)
            path = save_results("every-batch", rows, made=made, arguments=arguments, card=card)
    print(f"raw data: {path}")


if __name__ == "__main__":
    main()
