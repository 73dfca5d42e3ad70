"""Are decisions on a GPU right? False winners among equals, and what is served re-examined wherever users run it.

    python benchmarks/gpu_trust.py                                  both
    python benchmarks/gpu_trust.py --aa 0 --picks 50 --inductor 20  picks alone, max-autotune among the peers of 20

aa: races of 2 to 16 copies of one real kernel; a winner is false. picks: random shapes (K, N 1024..14336, M 1..3000,
four families) are tuned; then the public op on the raw and on the packed weight is timed beside torch's own ways in
every surrounding of ``surrounded.py``. (Hostile kernels: GEMMTUNE_HOSTILE_ROUNDS=100 make test-gpu.) Writes raw data
to benchmarks/results/. max-autotune compiles for some 20 s a problem: several processes with --compile-only, one
TRITON_CACHE_DIR and a TORCHINDUCTOR_CACHE_DIR each do that beforehand, and leave its choice to the quiet run.
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
from harness import write
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
    """Decide all of them with one worker, all backends in the race."""
    return Tuner(target, backends.names(target.device), MemoryStore()).tune([(problem, 1) for problem in problems])


def loaded(problem: Problem, candidate: Candidate, target: Target) -> Kernel:
    backend = backends.get(candidate.backend)
    return backend.load(backend.build(problem, candidate, target), problem)


def runner(kernel: Kernel, problem: Problem, target: Target) -> h200.Call:
    """Call i on operand set i, B packed as the kernel wants it."""
    sets = timing_sets(problem, operand_set_count(problem, target), 3, DEVICE)
    outs = [empty_output(problem, DEVICE) for _ in sets[:2]]  # by turns, as the tuner's
    weights: list[Any] = [item.b if kernel.packing is None else kernel.pack(item.b) for item in sets]

    def run(i: int) -> None:
        place = i % len(sets)
        kernel.run(sets[place].a, weights[place], sets[place].aux, outs[place % len(outs)])

    return run


def equals(sweeps: int, target: Target) -> dict[str, Any]:
    """False winners in races among copies of one kernel."""
    problems = [build(16, 4096, 4096, "bf16"), build(64, 4096, 11008, "int8"), build(1, 12288, 4096, "int8wo")]
    fields: list[tuple[Problem, h200.Call]] = []
    for problem, decision in zip(problems, tune(problems, target), strict=True):
        rows = {row.id: Candidate.from_dict(row.candidate) for row in decision.evidence}
        fields.append((problem, runner(loaded(problem, rows[str(decision.chosen)], target), problem, target)))
    fields.append((problems[0], runner(loaded(problems[0], Candidate.make("aten", "mm"), target), problems[0], target)))
    rng, false = random.Random(4), []
    for seed in range(sweeps):
        problem, call = fields[seed % len(fields)]
        count = rng.choice((2, 4, 8, 16))
        # Copies are told apart by their callable: each gets a graph of its own.
        entrants = [
            Entrant(f"same{i}", lambda n, call=call: call(n), is_baseline=i == 0, packing="g")  # type: ignore[misc]
            for i in range(count)
        ]
        clock = CudaClock(TorchGpu(DEVICE), flush=Flush(problem, target))
        result = race(entrants, clock, 1.0, seed=seed)
        if result.outcome != "tie":
            false.append(
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
    print(f"A/A: {len(false)} false winners in {sweeps} sweeps")
    return {"sweeps": sweeps, "false": false}


def held_out(count: int, rows: int = 3000) -> list[tuple[str, int, int, int]]:
    """Random shapes (family, M, N, K) that nothing here was adjusted to."""
    rng = random.Random(11)

    def size(low: int, high: int, step: int) -> int:
        return max(step, round(low * (high / low) ** rng.random() / step) * step)

    return [
        (FAMILIES[i % len(FAMILIES)], size(1, rows, 1), size(1024, 14336, 128), size(1024, 14336, 128))
        for i in range(count)
    ]


def served(sets: h200.Sets, decision: Decision) -> dict[str, h200.Call]:
    """The public op on the raw weight, and on the weight packed as its Plan wants it, where it wants that."""
    calls: dict[str, h200.Call] = {}
    if sets.family != "int4wo":
        calls["raw"] = h200.ours(sets, replace_packing(decision))
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


def replace_packing(decision: Decision) -> Decision:
    """The decision as ``h200.ours`` takes one whose weight stays as it lies."""
    return msgspec.structs.replace(decision, chosen=None)


def reexamine(shape: tuple[str, int, int, int], decision: Decision, args: argparse.Namespace, autotuned: bool) -> Row:
    """What is served, raw and packed, over the fastest of torch's ways and max-autotune, in every surrounding."""
    family, m, n, k = shape
    l2 = current_target("cuda").caches[2]
    sets = h200.draw(family, m, n, k, l2)
    own, peers, compiling = served(sets, decision), h200.plain(sets), 0.0
    if autotuned:
        more, compiling = h200.inductor(sets)
        peers |= more
    calls = {**own, **peers}
    with torch.inference_mode():
        for call in calls.values():
            call(0)
        once_s = min(h200._once(call, len(sets.x)) for call in calls.values())
    found: dict[str, dict[str, float]] = {}
    medians: dict[str, dict[str, float]] = {}
    for name in SURROUNDINGS:
        times = time_in(name, calls, sets.x, once_s, args.rounds, l2)
        medians[name] = {entrant: 1e6 * statistics.median(values) for entrant, values in times.items()}
        best = min(peers, key=lambda peer: medians[name][peer])
        found[name] = {
            entrant: statistics.median(a / b for a, b in zip(times[entrant], times[best], strict=True))
            for entrant in own
        }  # fmt: skip
    return {
        "problem": f"{family} {m}x{n}x{k}", "outcome": decision.outcome, "chosen": decision.chosen,
        "layouts": {name: msgspec.to_builtins(item) for name, item in decision.layouts.items()}, "ratios": found,
        "median_us": medians, "seconds": decision.seconds, "autotuned": autotuned, "compile_s": compiling,
        "worst": max(ratio for ratios in found.values() for ratio in ratios.values()),
    }  # fmt: skip


def picks(args: argparse.Namespace, target: Target, until: float) -> dict[str, Any]:
    """Random problems tuned, then what is served re-examined in every surrounding."""
    shapes = args.shapes or held_out(args.first + args.picks)[args.first :]
    rows: list[Row] = []
    took = tuned = 0.0
    for first in range(0, len(shapes), 10):
        if time.perf_counter() > until:
            break
        part, start = shapes[first : first + 10], time.perf_counter()
        store = MemoryStore()
        problems = [(h200.problem_of(*shape), 1) for shape in part]
        decisions = gemmtune.tune(problems, device="cuda", store=store)
        took, tuned = took + time.perf_counter() - start, tuned + len(part)
        for place, (shape, decision) in enumerate(zip(part, decisions, strict=True)):
            if time.perf_counter() > until:
                break
            rows.append(reexamine(shape, decision, args, autotuned=first + place < args.inductor))
            show(rows[-1])
            torch.cuda.empty_cache()
    summarise(rows, took / max(tuned, 1))
    return {"rows": rows, "tuning_s": took, "tuned": tuned}


def show(row: Row) -> None:
    worst = {name: max(ratios.values()) for name, ratios in row["ratios"].items()}
    words = "  ".join(f"{name.split(',')[0]} {ratio:.3f}" for name, ratio in worst.items())
    mark = "SLOWER" if row["worst"] > 1.02 else ""
    print(f"{row['problem']:<24} {row['outcome']:<12} {row['seconds']:.1f} s  {words}  {mark}", flush=True)


def summarise(rows: list[Row], each_s: float) -> None:
    if not rows:
        return
    for name in SURROUNDINGS:
        ratios = [ratio for row in rows for ratio in row["ratios"][name].values()]
        slower = sum(ratio > 1.02 for ratio in ratios)
        print(f"{name:<28} {slower} of {len(ratios)} more than 2% slower than torch's best, worst {max(ratios):.3f}x, "
              f"geometric mean {statistics.geometric_mean(ratios):.3f}x")  # fmt: skip
    wrong = [row for row in rows if row["worst"] > 1.02]
    won = sum(row["outcome"] == "winner" for row in rows)
    autotuned = sum(row["autotuned"] for row in rows)
    print(
        f"picks: {len(wrong)} of {len(rows)} problems more than 2% slower somewhere ({autotuned} beside max-autotune); "
        f"{won} winners; {each_s:.1f} s of tuning each"
    )


def shapes_of(text: str) -> list[tuple[str, int, int, int]]:
    """``bf16:700x5120x3072``: family, M, N, K; several with commas between. Raises ValueError."""
    pairs = [item.split(":") for item in text.split(",")]
    return [(family, *map(int, sizes.split("x"))) for family, sizes in pairs]  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aa", type=int, default=100)
    parser.add_argument("--picks", type=int, default=100)
    parser.add_argument("--shapes", type=shapes_of, help="these instead: bf16:700x5120x3072,int8wo:640x6400x5120")
    parser.add_argument("--first", type=int, default=0, help="leave out so many of the shapes")
    parser.add_argument("--inductor", type=int, default=0, help="on so many of them max-autotune is a peer, too")
    parser.add_argument(
        "--compile-only", action="store_true", help="only fill Triton's cache with max-autotune's kernels"
    )
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing more after so many")
    args = parser.parse_args()
    target = current_target("cuda")
    found: dict[str, Any] = {}
    until = time.perf_counter() + args.seconds
    if args.compile_only:
        for shape in args.shapes or held_out(args.first + args.picks)[args.first :]:
            h200.inductor(h200.draw(*shape, 1))
        return
    if args.aa:
        os.environ[OVERLAP] = "0"  # as decisions are made
        found["aa"] = equals(args.aa, target)
        del os.environ[OVERLAP]
    if args.picks:
        found["picks"] = picks(args, target, until)
    write("gpu-trust", found, gpu=target.to_dict())


if __name__ == "__main__":
    main()
