"""Compare gemmtune's kernels with PyTorch's on the llama-small shapes, paired and interleaved in one process.

    python benchmarks/cpu.py                      every family, one thread and all threads, M = 1 4 16 64 256
    python benchmarks/cpu.py --quick              one weight, M = 1 16, little time a shape
    python benchmarks/cpu.py --compile --m 1,16   also torch.compile with max-autotune and freezing (slow)

Decisions come from the store ($GEMMTUNE_STORE, default .gemmtune/bench.db); problems without a decision are tuned
first. The times of all rounds are written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("GEMMTUNE_STORE", str(Path(".gemmtune") / "bench.db"))

import peers
import torch
from harness import Entrant, Spread, geomean, interleave, operand_sets, paired_ratios, write_results
from torch import Tensor

import gemmtune
from gemmtune.core.decision import Decision
from gemmtune.core.workloads import build
from gemmtune.dispatch import choose_packing

WEIGHTS = ((4096, 4096), (11008, 4096), (4096, 11008))
FAMILIES = ("int8wo", "int8", "bf16", "fp32", "fp16", "int4wo")


@dataclass(frozen=True)
class Row:
    """Result of one shape: times of gemmtune and of each peer, and gemmtune's speed over each peer, paired by round
    (median, quartiles).

    kernel: the packing and the candidate that serve the shape. floor: for M = 1, the time of reading the weights in
    these rounds, scaled to all of the problem's traffic, over gemmtune's time. read_gb_s: the bandwidth of this read.
    """

    family: str
    threads: int
    m: int
    n: int
    k: int
    kernel: str
    best_peer: str
    speedup: float
    speedups: dict[str, tuple[float, float, float]]
    median_us: dict[str, float]
    floor: float | None
    read_gb_s: float | None
    rounds_us: dict[str, list[float]] = field(repr=False)


def gemmtune_entrant(x: Tensor, w: peers.Weights, layout: str | None) -> Entrant:
    """Return calls of the public op, on packed weights if ``layout`` is given, otherwise on raw weights."""
    quant = {"zero_point": w.zero, **_QUANT.get(w.family, {})}
    if layout is not None:
        packed: list[Any] = [gemmtune.pack(raw, scale=w.scale, layout=layout, **quant) for raw in w.raw]
        quant, scale = {}, None
    else:
        packed, scale = [raw if w.family in peers.FLOATS else raw.t() for raw in w.raw], w.scale
    if w.family == "int8":
        return Entrant(lambda i: gemmtune.int_mm(x, packed[i]))
    if w.scale is not None:
        return Entrant(lambda i: gemmtune.mixed_mm(x, packed[i], scale, **quant))
    return Entrant(lambda i: gemmtune.linear(x, packed[i]))


_QUANT: dict[str, dict[str, Any]] = {"int8wo": {"bits": 8}, "int4wo": {"bits": 4, "group_size": peers.GROUP}}


def weight_read_entrant(w: peers.Weights) -> Entrant:
    """Return an entrant that only reads the weights, one copy a run: the floor for M = 1."""
    int64_views = [raw.reshape(-1).view(torch.uint8).view(torch.int64) for raw in w.raw]
    return Entrant(lambda i: int64_views[i].sum())


def tune(family: str, k: int, n: int, ms: Sequence[int], budget: float | None) -> dict[int, Decision]:
    """Return the decisions for a weight by M, from the store or from tuning now."""
    decisions = gemmtune.tune([(build(m, n, k, family), 1) for m in ms], budget=budget)
    gemmtune.refresh()
    return {int(decision.problem["m"]): decision for decision in decisions}


def measure(x: Tensor, w: peers.Weights, decisions: dict[int, Decision], args: argparse.Namespace) -> Row:
    """Time gemmtune and every peer on one shape."""
    m, layout = x.shape[0], choose_packing(list(decisions.values()))
    peer_entrants = {**peers.eager_entrants(x, w), **(peers.compiled_entrants(x, w) if args.compile else {})}
    entrants = {"gemmtune": gemmtune_entrant(x, w, layout), **peer_entrants}
    if m == 1:
        entrants["read"] = weight_read_entrant(w)
    times = interleave(entrants, sets=len(w.raw), seconds=args.seconds)
    medians = {name: Spread.of(values).median for name, values in times.items()}
    speedups = {name: paired_ratios(times[name], times["gemmtune"]) for name in peer_entrants}
    best = min(peer_entrants, key=lambda name: medians[name])
    problem, size = build(m, w.n, w.k, w.family), w.raw[0].numel() * w.raw[0].element_size()
    floor = None
    if "read" in times:
        floor = paired_ratios(times["read"], times["gemmtune"]).median * problem.min_bytes / size
    return Row(
        family=w.family,
        threads=torch.get_num_threads(),
        m=m,
        n=w.n,
        k=w.k,
        kernel=f"{layout or 'raw weight'}: {decisions[m].chosen}",
        best_peer=best,
        speedup=speedups[best].median,
        speedups={name: (spread.median, spread.low, spread.high) for name, spread in speedups.items()},
        median_us={name: value * 1e6 for name, value in medians.items()},
        floor=floor,
        read_gb_s=size / medians["read"] / 1e9 if "read" in medians else None,
        rounds_us={name: [round(value * 1e6, 2) for value in values] for name, values in times.items()},
    )


def print_row(row: Row) -> None:
    low, high = row.speedups[row.best_peer][1:]
    floor = f"  {row.floor:4.0%} of the read floor at {row.read_gb_s:.1f} GB/s" if row.floor else ""
    others = "  ".join(f"{name} {value:.0f}" for name, value in row.median_us.items() if name in row.speedups)
    us = row.median_us["gemmtune"]
    print(
        f"{row.family:<7} {row.threads}t  M {row.m:<4} {row.k:>5}->{row.n:<5}  gemmtune {us:9.0f} us  {others} us  "
        f"{row.speedup:5.2f}x [{low:.2f}-{high:.2f}] of {row.best_peer}{floor}",
        flush=True,
    )


def speedup_limit(group: Sequence[Row]) -> float | None:
    """Return the geometric mean of the largest speed over the best peer that this machine allows; None without M = 1.

    A shape takes at least the time of its bytes at the bandwidth at which M = 1 read its weight, and at least the time
    of its FLOPs at the highest rate that any entrant reached in the group.
    """
    read = {(row.k, row.n): row.read_gb_s * 1e9 for row in group if row.read_gb_s}
    if any((row.k, row.n) not in read for row in group):
        return None
    problems = [build(row.m, row.n, row.k, row.family) for row in group]
    peak = max(p.flops / us for p, row in zip(problems, group, strict=True) for us in row.median_us.values()) * 1e6
    floors = [max(p.min_bytes / read[row.k, row.n], p.flops / peak) for p, row in zip(problems, group, strict=True)]
    return geomean(row.median_us[row.best_peer] / (1e6 * floor) for row, floor in zip(group, floors, strict=True))


def summarize(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return geometric means of the speedups by family and threads: over the best peer, over each peer, and the limit
    of the machine; with the worst shape and the read floor."""
    lines = []
    for family, threads in dict.fromkeys((row.family, row.threads) for row in rows):
        group = [row for row in rows if (row.family, row.threads) == (family, threads)]
        names = set.intersection(*(set(row.speedups) for row in group))
        floors = [row.floor for row in group if row.floor is not None]
        lines.append(
            {
                "family": family,
                "threads": threads,
                "shapes": len(group),
                "best_peer": geomean(row.speedup for row in group),
                "ceiling": speedup_limit(group),
                "worst": min(row.speedup for row in group),
                "by_peer": {name: geomean(row.speedups[name][0] for row in group) for name in sorted(names)},
                "read_floor": geomean(floors) if floors else None,
            }
        )
    return lines


def print_summary(lines: Sequence[dict[str, Any]]) -> None:
    print("\nspeed of gemmtune, geometric means (worst: slowest single shape against its best peer)")
    for line in lines:
        peers_text = "  ".join(f"{name} {value:.2f}x" for name, value in line["by_peer"].items())
        floor = f"  read floor at M = 1: {line['read_floor']:.0%}" if line["read_floor"] else ""
        limit = f" of {line['ceiling']:.2f}x possible here" if line["ceiling"] else ""
        print(
            f"{line['family']:<7} {line['threads']}t  best peer {line['best_peer']:.2f}x{limit}  "
            f"worst {line['worst']:.2f}x  | {peers_text}{floor}  ({line['shapes']} shapes)"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help=f"comma separated [{','.join(FAMILIES)}]")
    parser.add_argument("--threads", default=f"1,{torch.get_num_threads()}", help="comma separated [1 and all]")
    parser.add_argument("--m", default="1,4,16,64,256", help="numbers of rows [1,4,16,64,256]")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for the race of a shape [3]")
    parser.add_argument(
        "--budget", type=float, help="seconds to tune a problem not in the store [6, more where calls are slow]"
    )
    parser.add_argument("--compile", action="store_true", help="race torch.compile too")
    parser.add_argument("--quick", action="store_true", help="one weight, M = 1 and 16, one second a shape")
    args = parser.parse_args()
    if args.quick:
        args.m, args.seconds, args.budget = "1,16", 1.0, args.budget or 2.0
    args.families = args.families.split(",")
    unknown = set(args.families) - set(FAMILIES)
    if unknown:
        parser.error(f"unknown families: {', '.join(sorted(unknown))}; known: {', '.join(FAMILIES)}")
    args.threads = sorted({int(text) for text in args.threads.split(",")})
    args.m = [int(text) for text in args.m.split(",")]
    return args


def run(args: argparse.Namespace) -> list[Row]:
    rows = []
    for family in args.families:
        for k, n in WEIGHTS[:1] if args.quick else WEIGHTS:
            weights = peers.make_weights(family, k, n, operand_sets(build(1, n, k, family).weight_bytes))
            for threads in args.threads:
                torch.set_num_threads(threads)
                decisions = tune(family, k, n, args.m, args.budget)
                for m in args.m:
                    rows.append(measure(peers.make_activations(family, m, k), weights, decisions, args))
                    print_row(rows[-1])
    return rows


def main() -> None:
    args = parse_arguments()
    rows = run(args)
    lines = summarize(rows)
    print_summary(lines)
    write_results("cpu", [asdict(row) for row in rows], summary=lines)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
