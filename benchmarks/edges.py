"""Compare an odd N with the next multiple of 64, and packed with raw sizes of weights.

    python benchmarks/edges.py

The first part times gemmtune and F.linear on 512 x 768 x 3073 and on 512 x 768 x 3136 (bf16), interleaved. The second
part prints packed bytes over raw bytes for the weights of llama-small and for N = 3073, in every dtype. Problems
without a decision in the store ($GEMMTUNE_STORE, default .gemmtune/bench.db) are tuned first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("GEMMTUNE_STORE", str(Path(".gemmtune") / "bench.db"))

import peers
import torch
from harness import Entrant, Spread, interleave, operand_sets, paired_ratios, write_results
from torch.nn.functional import linear

import gemmtune
from gemmtune.core.workloads import build

M, K, ODD, ROUND = 512, 768, 3073, 3136
WEIGHTS = ((4096, 4096), (11008, 4096), (4096, 11008), (K, ODD))


def compare_n(threads: int) -> dict[str, Any]:
    """Return the seconds per call of gemmtune and F.linear for both N, and gemmtune's paired ratio odd / round."""
    torch.set_num_threads(threads)
    gemmtune.tune([(build(M, n, K, "bf16"), 1) for n in (ODD, ROUND)])
    gemmtune.refresh()
    x, sets = torch.randn(M, K).bfloat16(), operand_sets(2 * K * ODD)
    entrants: dict[str, Entrant] = {}
    for n in (ODD, ROUND):
        raw = [torch.randn(n, K).bfloat16() for _ in range(sets)]
        packed = [gemmtune.pack(w) for w in raw]
        entrants[f"gemmtune {n}"] = Entrant(lambda i, packed=packed: gemmtune.linear(x, packed[i]))
        entrants[f"F.linear {n}"] = Entrant(lambda i, raw=raw: linear(x, raw[i]))
    times = interleave(entrants, sets=sets, seconds=8.0)
    odd = paired_ratios(times[f"gemmtune {ODD}"], times[f"gemmtune {ROUND}"])
    for name, values in times.items():
        print(f"{threads}t  {name:<14} {Spread.of(values).median * 1e6:8.0f} us")
    print(f"{threads}t  N = {ODD} takes {odd.median:.3f}x [{odd.low:.3f}-{odd.high:.3f}] the time of N = {ROUND}")
    return {"threads": threads, "ratio": odd.median, "quartiles": [odd.low, odd.high], "rounds_s": times}


def packed_sizes() -> list[dict[str, Any]]:
    """Return packed over raw bytes of the default layouts; both count scales and zero points."""
    rows = []
    for family in ("fp32", "bf16", "fp16", "int8", "int8wo", "int4wo"):
        for k, n in WEIGHTS:
            w = peers.make_weights(family, k, n, 1)
            quant: dict[str, Any] = {"scale": w.scale, "zero_point": w.zero} if w.scale is not None else {}
            if family == "int4wo":
                quant |= {"bits": 4, "group_size": peers.GROUP}
            packed = gemmtune.pack(w.raw[0], **quant)
            rows.append({"family": family, "k": k, "n": n, "layout": packed.layout})
            rows[-1]["ratio"] = packed.nbytes / build(1, n, k, family).weight_bytes
    for row in rows:
        print(f"{row['family']:<7} {row['k']:>5}->{row['n']:<5}  {row['ratio']:.4f}x the raw weight  {row['layout']}")
    return rows


def main() -> None:
    all_threads = torch.get_num_threads()
    times = [compare_n(threads) for threads in sorted({1, all_threads})]
    write_results("edges", packed_sizes(), race=times)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
