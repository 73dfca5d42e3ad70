"""Compare a decoder layer in one CUDA graph: PyTorch's linears, gemmtune's, and gemmtune's without overlap.

    python benchmarks/gpu_layer.py                         a Llama layer of 4096 and 11008, M = 1 16 64
    python benchmarks/gpu_layer.py --hidden 8192 --inner 28672

Norms, activations and residuals are PyTorch's in all of them; an elementwise op replaces attention, which has no GEMM
to tune. q, k and v are consecutive, and so are gate and up: their kernels may overlap (docs/notes/cuda.md). Successive
calls use the weights of different layers, so that no weight is in the L2. Decisions come from the store as in h200.py.
The times of all rounds are written to benchmarks/results/ (or to $OUT).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from h200 import ALONE, COLD, OURS, time_graphs, without_overlap
from harness import paired_ratios, write_results
from torch import Tensor

import gemmtune
from gemmtune.core.workloads import build
from gemmtune.dispatch import current_target

Linear = Callable[[Tensor, Tensor], Tensor]
Weights = dict[str, Tensor]


def make_weights(hidden: int, inner: int, l2: int) -> list[Weights]:
    """Return the weights [N, K] of enough layers to exceed the L2 COLD times."""
    shapes = dict.fromkeys("qkvo", (hidden, hidden))
    shapes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    size = 2 * sum(n * k for n, k in shapes.values())
    count = max(2, int(COLD * l2 / size) + 1)
    return [
        {name: torch.randn(n, k, device="cuda").bfloat16() / k**0.5 for name, (n, k) in shapes.items()}
        for _ in range(count)
    ]


def layer(x: Tensor, w: Weights, linear: Linear) -> Tensor:
    """Return the output of one layer. x: [M, hidden]."""
    size = x.shape[-1:]
    h = F.rms_norm(x, size)
    q, k, v = linear(h, w["q"]), linear(h, w["k"]), linear(h, w["v"])
    y = x + linear(torch.addcmul(v, q, k), w["o"])
    h = F.rms_norm(y, size)
    gate, up = linear(h, w["gate"]), linear(h, w["up"])
    return y + linear(F.silu(gate) * up, w["down"])


def measure(m: int, weights: list[Weights], rounds: int) -> dict[str, Any]:
    """Time the three forms of the layer with M rows; return one row of the results."""
    x = torch.randn(m, weights[0]["q"].shape[1], device="cuda").bfloat16()

    def gemmtune_layer(i: int) -> Tensor:
        return layer(x, weights[i], gemmtune.linear)

    def torch_layer(i: int) -> Tensor:
        return layer(x, weights[i], F.linear)

    calls = {OURS: gemmtune_layer, ALONE: without_overlap(gemmtune_layer), "ATen": torch_layer}
    with torch.inference_mode():
        torch.testing.assert_close(gemmtune_layer(0), calls["ATen"](0), rtol=0.05, atol=0.05)
    times = time_graphs(calls, len(weights), rounds)
    speedups = {name: paired_ratios(times[name], times[OURS]) for name in (ALONE, "ATen")}
    return {
        "m": m,
        "median_us": {name: statistics.median(values) for name, values in times.items()},
        "speedups": {name: (s.median, s.low, s.high) for name, s in speedups.items()},
        "rounds_us": {name: [round(us, 3) for us in values] for name, values in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=11008)
    parser.add_argument("--m", default="1,16,64")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    ms = [int(m) for m in args.m.split(",")]
    shapes = {(args.hidden, args.hidden), (args.inner, args.hidden), (args.hidden, args.inner)}
    start = time.perf_counter()
    gemmtune.tune([(build(m, n, k, "bf16"), 1) for m in ms for n, k in sorted(shapes)], device="cuda")
    gemmtune.refresh()
    print(f"tuned in {time.perf_counter() - start:.0f} s")
    weights = make_weights(args.hidden, args.inner, current_target("cuda").caches[2])
    rows = []
    for m in ms:
        rows.append(row := {"hidden": args.hidden, "inner": args.inner} | measure(m, weights, args.rounds))
        times = "  ".join(f"{name} {us:.1f}" for name, us in row["median_us"].items())
        speedups = ", ".join(f"{speedup[0]:.3f}x of {name}" for name, speedup in row["speedups"].items())
        print(f"M {m:<4} {times} us  {speedups}", flush=True)
    write_results("gpu-layer", rows, gpu=current_target("cuda").to_dict())


if __name__ == "__main__":
    main()
