"""Check decisions on a GPU: false winners among copies of one kernel, and served kernels among other kernels.

    python benchmarks/gpu_trust.py                                  both checks
    python benchmarks/gpu_trust.py --aa 0 --picks 50 --inductor 20  picks alone, 20 of them against max-autotune too

aa: races of 2 to 16 copies of one kernel; each winner is a false winner. picks: random shapes (K, N 1024..14336, M
1..3000, four families) are tuned; then the public op, on the raw and on the packed weight, is timed against PyTorch's
functions in every surrounding of ``surrounded.py``. (For hostile kernels: GEMMTUNE_HOSTILE_ROUNDS=100 make test-gpu.)
Raw data is written to benchmarks/results/. max-autotune compiles each problem for about 20 s. To compile in advance,
run several processes with --compile-only, one shared TRITON_CACHE_DIR and a TORCHINDUCTOR_CACHE_DIR each; the choice
among the compiled kernels is then made in the run on the idle machine.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GEMMTUNE_STORE", str(Path(".gemmtune") / "gpu-trust.db"))

import h200
import msgspec
import torch
from harness import write_results
from surrounded import SURROUNDINGS, time_in

import gemmtune
from gemmtune import backends
from gemmtune.backends.base import OVERLAP, Kernel
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.core.workloads import build, label
from gemmtune.dispatch import choose_packing, current_target
from gemmtune.store import MemoryStore
from gemmtune.timing.cuda_clock import CudaClock
from gemmtune.timing.flush import Flush
from gemmtune.timing.race import Entrant, race
from gemmtune.timing.race_operands import empty_output
from gemmtune.timing.torch_gpu import TorchGpu
from gemmtune.tuning.tuner import Tuner
from gemmtune.verify.inputs import operand_set_count, timing_sets

Row = dict[str, Any]

DEVICE = torch.device("cuda")
FAMILIES = ("bf16", "int8wo", "fp8", "int8")


def tune(problems: list[Problem], target: Target) -> list[Decision]:
    """Return the decisions of all backends' candidates, tuned by one worker."""
    return Tuner(target, backends.names(target.device), MemoryStore()).tune([(problem, 1) for problem in problems])


def load_kernel(problem: Problem, candidate: Candidate, target: Target) -> Kernel:
    """Build and load a candidate."""
    backend = backends.get(candidate.backend)
    return backend.load(backend.build(problem, candidate, target), problem)


def make_call(kernel: Kernel, problem: Problem, target: Target) -> h200.Call:
    """Return a function that runs the kernel on operand set i, with B in the kernel's layout."""
    sets = timing_sets(problem, operand_set_count(problem, target), 3, DEVICE)
    outs = [empty_output(problem, DEVICE) for _ in sets[:2]]  # alternating, as in the tuner
    weights: list[Any] = [item.b if kernel.packing is None else kernel.pack(item.b) for item in sets]

    def run(i: int) -> None:
        index = i % len(sets)
        kernel.run(sets[index].a, weights[index], sets[index].aux, outs[index % len(outs)])

    return run


def race_copies(sweeps: int, target: Target) -> dict[str, Any]:
    """Return the false winners of ``sweeps`` races among copies of one kernel."""
    problems = [build(16, 4096, 4096, "bf16"), build(64, 4096, 11008, "int8"), build(1, 12288, 4096, "int8wo")]
    races: list[tuple[Problem, h200.Call]] = []
    for problem, decision in zip(problems, tune(problems, target), strict=True):
        rows = {row.id: Candidate.from_dict(row.candidate) for row in decision.evidence}
        kernel = load_kernel(problem, rows[str(decision.chosen)], target)
        races.append((problem, make_call(kernel, problem, target)))
    kernel = load_kernel(problems[0], Candidate.make("aten", "mm"), target)
    races.append((problems[0], make_call(kernel, problems[0], target)))
    rng, false_winners = random.Random(4), []
    for seed in range(sweeps):
        problem, call = races[seed % len(races)]
        count = rng.choice((2, 4, 8, 16))
        # The clock captures one graph per callable, so each copy needs a callable of its own.
        entrants = [
            Entrant(f"same{i}", lambda n, call=call: call(n), is_baseline=i == 0, packing="g")  # type: ignore[misc]
            for i in range(count)
        ]
        clock = CudaClock(TorchGpu(DEVICE), flush=Flush(problem, target))
        result = race(entrants, clock, 1.0, seed=seed)
        if result.outcome != "tie":
            false_winners.append(
                {
                    "seed": seed,
                    "problem": label(problem),
                    "count": count,
                    "stopped": result.stopped,
                    "timed": [
                        row.sample.conditions.get("timed") for row in result.evidence.values() if row.sample is not None
                    ],
                }
            )
    print(f"A/A: {len(false_winners)} false winners in {sweeps} sweeps")
    return {"sweeps": sweeps, "false": false_winners}


def random_shapes(count: int, rows: int = 3000) -> list[tuple[str, int, int, int]]:
    """Return random shapes (family, M, N, K) that no constant of gemmtune was fitted to."""
    rng = random.Random(11)

    def size(low: int, high: int, step: int) -> int:
        return max(step, round(low * (high / low) ** rng.random() / step) * step)

    return [
        (FAMILIES[i % len(FAMILIES)], size(1, rows, 1), size(1024, 14336, 128), size(1024, 14336, 128))
        for i in range(count)
    ]


def served_calls(sets: h200.Sets, decision: Decision) -> dict[str, h200.Call]:
    """Return calls of the public op on the raw weight and, if the decision packs it, on the packed weight."""
    calls: dict[str, h200.Call] = {}
    if sets.family != "int4wo":
        calls["raw"] = h200.gemmtune_call(sets, without_packing(decision))
    layout = choose_packing([decision])
    if layout is None:
        return calls
    options: dict[str, Any] = {"bits": 4, "group_size": 128} if sets.family == "int4wo" else {}
    scales = sets.w_scale or [None] * len(sets.w)
    if sets.family in ("bf16", "int8"):
        packed = [gemmtune.pack(w, layout=layout) for w in sets.w]
        op = gemmtune.linear if sets.family == "bf16" else gemmtune.int_mm
        calls["packed"] = lambda i: op(sets.x[i], packed[i])
    elif sets.family in ("int8wo", "int4wo"):
        packed = [gemmtune.pack(w, scale=scale, layout=layout, **options)
                  for w, scale in zip(sets.w, scales, strict=True)]  # fmt: skip
        calls["packed"] = lambda i: gemmtune.mixed_mm(sets.x[i], packed[i], bits=options.get("bits", 8))
    return calls


def without_packing(decision: Decision) -> Decision:
    """Return a copy of the decision for which ``h200.gemmtune_call`` does not pack the weight."""
    return msgspec.structs.replace(decision, chosen=None)


def check_pick(shape: tuple[str, int, int, int], decision: Decision, args: argparse.Namespace, autotuned: bool) -> Row:
    """Return the times of the served calls over the fastest peer's in every surrounding.

    The peers are PyTorch's functions and, if ``autotuned``, max-autotune.
    """
    family, m, n, k = shape
    l2 = current_target("cuda").caches[2]
    sets = h200.make_operands(family, m, n, k, l2)
    gemmtune_calls, peers, compile_s = served_calls(sets, decision), h200.torch_calls(sets), 0.0
    if autotuned:
        more, compile_s = h200.inductor_calls(sets)
        peers |= more
    calls = {**gemmtune_calls, **peers}
    with torch.inference_mode():
        for call in calls.values():
            call(0)
        call_s = min(h200.time_call(call, len(sets.x)) for call in calls.values())
    results: dict[str, dict[str, float]] = {}
    medians: dict[str, dict[str, float]] = {}
    for name in SURROUNDINGS:
        times = time_in(name, calls, sets.x, call_s, args.rounds, l2)
        medians[name] = {entrant: 1e6 * statistics.median(values) for entrant, values in times.items()}
        best = min(peers, key=lambda peer: medians[name][peer])
        results[name] = {
            entrant: statistics.median(a / b for a, b in zip(times[entrant], times[best], strict=True))
            for entrant in gemmtune_calls
        }  # fmt: skip
    return {
        "problem": f"{family} {m}x{n}x{k}", "outcome": decision.outcome, "chosen": decision.chosen,
        "layouts": {name: msgspec.to_builtins(item) for name, item in decision.layouts.items()}, "ratios": results,
        "median_us": medians, "seconds": decision.seconds, "autotuned": autotuned, "compile_s": compile_s,
        "worst": max(ratio for ratios in results.values() for ratio in ratios.values()),
    }  # fmt: skip


def check_picks(args: argparse.Namespace, target: Target, deadline: float) -> dict[str, Any]:
    """Tune random problems, then check the served kernels in every surrounding."""
    shapes = args.shapes or random_shapes(args.first + args.picks)[args.first :]
    rows: list[Row] = []
    tuning_s = tuned = 0.0
    for first in range(0, len(shapes), 10):
        if time.perf_counter() > deadline:
            break
        batch, start = shapes[first : first + 10], time.perf_counter()
        store = MemoryStore()
        problems = [(h200.problem_of(*shape), 1) for shape in batch]
        decisions = gemmtune.tune(problems, device="cuda", store=store)
        tuning_s, tuned = tuning_s + time.perf_counter() - start, tuned + len(batch)
        for index, (shape, decision) in enumerate(zip(batch, decisions, strict=True)):
            if time.perf_counter() > deadline:
                break
            rows.append(check_pick(shape, decision, args, autotuned=first + index < args.inductor))
            print_row(rows[-1])
            torch.cuda.empty_cache()
    print_summary(rows, tuning_s / max(tuned, 1))
    return {"rows": rows, "tuning_s": tuning_s, "tuned": tuned}


def print_row(row: Row) -> None:
    worst = {name: max(ratios.values()) for name, ratios in row["ratios"].items()}
    text = "  ".join(f"{name.split(',')[0]} {ratio:.3f}" for name, ratio in worst.items())
    mark = "SLOWER" if row["worst"] > 1.02 else ""
    print(f"{row['problem']:<24} {row['outcome']:<12} {row['seconds']:.1f} s  {text}  {mark}", flush=True)


def print_summary(rows: list[Row], each_s: float) -> None:
    if not rows:
        return
    for name in SURROUNDINGS:
        ratios = [ratio for row in rows for ratio in row["ratios"][name].values()]
        slower = sum(ratio > 1.02 for ratio in ratios)
        print(f"{name:<28} {slower} of {len(ratios)} more than 2% slower than torch's best, worst {max(ratios):.3f}x, "
              f"geometric mean {statistics.geometric_mean(ratios):.3f}x")  # fmt: skip
    slower_rows = [row for row in rows if row["worst"] > 1.02]
    winners = sum(row["outcome"] == "winner" for row in rows)
    autotuned = sum(row["autotuned"] for row in rows)
    print(
        f"picks: {len(slower_rows)} of {len(rows)} problems more than 2% slower somewhere ({autotuned} beside "
        f"max-autotune); {winners} winners; {each_s:.1f} s of tuning each"
    )


def parse_shapes(text: str) -> list[tuple[str, int, int, int]]:
    """Parse ``bf16:700x5120x3072``, (family, M, N, K), or several separated by commas. Raises ValueError."""
    pairs = [item.split(":") for item in text.split(",")]
    return [(family, *map(int, sizes.split("x"))) for family, sizes in pairs]  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aa", type=int, default=100)
    parser.add_argument("--picks", type=int, default=100)
    parser.add_argument("--shapes", type=parse_shapes, help="other shapes: bf16:700x5120x3072,int8wo:640x6400x5120")
    parser.add_argument("--first", type=int, default=0, help="skip this many shapes")
    parser.add_argument("--inductor", type=int, default=0, help="compare this many with max-autotune too")
    parser.add_argument(
        "--compile-only", action="store_true", help="only fill Triton's cache with max-autotune's kernels"
    )
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no shape after this time")
    args = parser.parse_args()
    target = current_target("cuda")
    results: dict[str, Any] = {}
    deadline = time.perf_counter() + args.seconds
    if args.compile_only:
        for shape in args.shapes or random_shapes(args.first + args.picks)[args.first :]:
            h200.inductor_calls(h200.make_operands(*shape, 1))
        return
    if args.aa:
        os.environ[OVERLAP] = "0"  # the tuner races without overlap too
        results["aa"] = race_copies(args.aa, target)
        del os.environ[OVERLAP]
    if args.picks:
        results["picks"] = check_picks(args, target, deadline)
    write_results("gpu-trust", results, gpu=target.to_dict())


if __name__ == "__main__":
    main()
