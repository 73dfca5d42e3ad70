"""Are decisions on a GPU right? False winners among equals, and picks re-examined.

    python benchmarks/gpu_trust.py                        both
    python benchmarks/gpu_trust.py --aa 100 --picks 50
    python benchmarks/gpu_trust.py --aa 0 --picks 0 --inductor 20     max-autotune's picks, on the first shapes

aa: races of 2 to 16 copies of one real kernel; a winner is false. picks: random shapes (K, N 1024..14336,
M 1..2048, four families) tuned, then what was chosen against whatever came near it, of ATen's ways
and of the other kernels, in a duel ten times as long. (Hostile
kernels: GEMMTUNE_HOSTILE_ROUNDS=100 make test-gpu.) Writes raw data to benchmarks/results/.
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
import torch
from harness import write

from gemmtune import backends
from gemmtune.backends.base import OVERLAP, Candidate, Kernel
from gemmtune.decision import Decision
from gemmtune.dispatch import current_target
from gemmtune.measure.cuda import CudaClock, TorchGpu
from gemmtune.measure.inputs import rotations, timing_sets
from gemmtune.measure.race import Entrant, race
from gemmtune.measure.timing import Flush, empty_output
from gemmtune.problem import Problem
from gemmtune.store import MemoryStore
from gemmtune.target import Target
from gemmtune.tuner import Tuner
from gemmtune.workloads import build, label

DEVICE = torch.device("cuda")
FAMILIES = ("bf16", "int8wo", "fp8", "int8")
_NEAR = 1.05  # times what was chosen


def tune(problems: list[Problem], target: Target) -> list[Decision]:
    """Decide all of them with one worker, all backends in the race."""
    return Tuner(target, backends.names(target.device), MemoryStore()).tune([(problem, 1) for problem in problems])


def loaded(problem: Problem, candidate: Candidate, target: Target) -> Kernel:
    backend = backends.get(candidate.backend)
    return backend.load(backend.build(problem, candidate, target), problem)


def runner(kernel: Kernel, problem: Problem, target: Target) -> h200.Call:
    """Call i on operand set i, B packed as the kernel wants it."""
    sets = timing_sets(problem, rotations(problem, target), 3, DEVICE)
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
            Entrant(f"same{i}", lambda n, call=call: call(n), incumbent=i == 0, group="g")  # type: ignore[misc]
            for i in range(count)
        ]
        clock = CudaClock(TorchGpu(DEVICE), chill=Flush(problem, target))
        result = race(entrants, clock, 1.0, seed=seed)
        if result.outcome != "tie":
            false.append(
                {
                    "seed": seed,
                    "problem": label(problem),
                    "count": count,
                    "stopped": result.stopped,
                    "timed": [
                        row.sample.conditions.get("timed")
                        for row in result.standings.values()
                        if row.sample is not None
                    ],
                }
            )
    print(f"A/A: {len(false)} false winners in {sweeps} sweeps")
    return {"sweeps": sweeps, "false": false}


def held_out(count: int) -> list[Problem]:
    """Random shapes that nothing here was adjusted to."""
    rng = random.Random(11)

    def size(low: int, high: int, step: int) -> int:
        return max(step, round(low * (high / low) ** rng.random() / step) * step)

    return [
        build(size(1, 2048, 1), size(1024, 14336, 64), size(1024, 14336, 64), FAMILIES[i % len(FAMILIES)])
        for i in range(count)
    ]


def rivals(decision: Decision, calls: dict[str, h200.Call]) -> list[str]:
    """What could be faster than the one chosen: ATen's near it by a quick race, and the two others next to it."""
    chosen = str(decision.chosen)
    quick = {name: statistics.median(times) for name, times in h200.race(calls, 8, 5).items()}
    near = [name for name in calls if name != chosen and quick[name] < _NEAR * quick[chosen]]
    timed = {row.id: row.sample.ratio for row in decision.evidence if row.sample and row.verdict and row.verdict.ok}
    others = [name for name in sorted(timed, key=timed.__getitem__) if name not in calls]
    return near + [name for name in others if timed[name] < _NEAR * timed.get(chosen, 1.0)][:2]


def picks(count: int, target: Target, until: float, rounds: int = 500) -> dict[str, Any]:
    """Decisions re-examined: what was chosen over its rivals, by a duel of 500 rounds."""
    problems, rows, decisions, took = held_out(count), [], [], 0.0
    for first in range(0, count, 10):
        if time.perf_counter() > until:
            break
        start = time.perf_counter()
        decisions += tune(problems[first : first + 10], target)
        took += time.perf_counter() - start
    for problem, decision in zip(problems, decisions, strict=False):
        if time.perf_counter() > until:
            break
        right = {
            row.id: Candidate.from_dict(row.candidate) for row in decision.evidence if row.verdict and row.verdict.ok
        }
        chosen = str(decision.chosen)
        calls = {chosen: runner(loaded(problem, right[chosen], target), problem, target)}
        for name, candidate in right.items():
            if candidate.backend == "aten" and name != chosen:
                calls[name] = runner(loaded(problem, candidate, target), problem, target)
        near = {
            name: calls.get(name) or runner(loaded(problem, right[name], target), problem, target)
            for name in (chosen, *rivals(decision, calls))
        }
        times = h200.race(near, rotations(problem, target), rounds)
        ratios = {
            name: statistics.median(a / b for a, b in zip(times[chosen], times[name], strict=True))
            for name in near if name != chosen
        }  # fmt: skip
        worst = max(ratios.values(), default=1.0)
        rows.append({
            "problem": label(problem), "outcome": decision.outcome, "chosen": chosen, "of_best": worst,
            "ratios": ratios, "seconds": decision.seconds,
        })  # fmt: skip
        torch.cuda.empty_cache()
    if not rows:
        return {"rows": rows, "tuning_s": took}
    wrong = [row for row in rows if row["of_best"] > 1.02]
    won = sum(row["outcome"] == "winner" for row in rows)
    print(
        f"picks: {len(wrong)} of {len(rows)} more than 2% slower than another (worst "
        f"{max(row['of_best'] for row in rows):.3f}x); {won} winners; {took / len(decisions):.1f} s of tuning each"
    )
    for row in wrong:
        print(f"   {row}")
    return {"rows": rows, "tuning_s": took}


def inductor_picks(count: int, target: Target, until: float, share: Path | None, rounds: int = 300) -> dict[str, Any]:
    """What torch.compile's max-autotune serves on the first of the same shapes, over what users call without it."""
    rows: list[dict[str, Any]] = []
    for place, problem in enumerate(held_out(50)[:count]):
        if time.perf_counter() > until:
            break
        with h200.claimed(share, f"inductor-{place}") as mine:
            if not mine:
                continue
            sets = h200.draw(FAMILIES[place % len(FAMILIES)], problem.m, problem.n, problem.k, target.caches[2])
            compiled, took = h200.inductor(sets)
            if not compiled:
                continue
            calls = {**h200.plain(sets), **compiled}
            times = h200.race(calls, len(sets.x), rounds)
        aten = min((name for name in calls if name != h200.AUTOTUNED), key=lambda name: statistics.median(times[name]))
        ratio = statistics.median(a / b for a, b in zip(times[h200.AUTOTUNED], times[aten], strict=True))
        rows.append({"problem": label(problem), "of_aten": ratio, "compile_s": took})
        print(f"   {rows[-1]}", flush=True)
        torch.cuda.empty_cache()
    if not rows:
        return {"rows": rows}
    slower = [row for row in rows if row["of_aten"] > 1.02]
    print(
        f"Inductor max-autotune: {len(slower)} of {len(rows)} more than 2% slower than ATen (worst "
        f"{max(row['of_aten'] for row in rows):.2f}x); {statistics.mean(row['compile_s'] for row in rows):.1f} s each"
    )
    return {"rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aa", type=int, default=100)
    parser.add_argument("--picks", type=int, default=50)
    parser.add_argument("--inductor", type=int, default=0)
    parser.add_argument("--share", type=Path, help="a folder, as h200.py's: processes that share max-autotune's shapes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing more after so many")
    args = parser.parse_args()
    target = current_target("cuda")
    os.environ[OVERLAP] = "0"  # as decisions are made
    found: dict[str, Any] = {}
    until = time.perf_counter() + args.seconds
    if args.aa:
        found["aa"] = equals(args.aa, target)
    if args.picks:
        found["picks"] = picks(args.picks, target, until)
    if args.inductor:
        found["inductor"] = inductor_picks(args.inductor, target, until, args.share)
    write("gpu-trust", found, gpu=target.to_dict())


if __name__ == "__main__":
    main()
