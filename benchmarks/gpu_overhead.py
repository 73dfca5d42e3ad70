"""Measure the host time of tuned calls on a GPU, and of problems that the store already has.

    python benchmarks/gpu_overhead.py

Host time is the time in which the calling thread is busy. The calls run in bursts that are short enough to keep the
device's queue from filling, interleaved over all entrants. "cheapest launch" is one ``cuLaunchKernelEx`` of a tiled
kernel with packed arguments; "Triton's launcher" launches an empty kernel with as many arguments. ``torch.empty_like``
is listed because every op allocates its result and the cheapest launch does not. The second part tunes four families
whose decisions are all in the store. Raw data is written to benchmarks/results/ (or to $OUT).
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["GEMMTUNE_STORE"] = str(Path(tempfile.mkdtemp(prefix="gemmtune-gpu-overhead-")) / "store.db")

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from harness import write_results

import gemmtune
from gemmtune import backends
from gemmtune.backends.gpu.driver import Function
from gemmtune.core.candidate import Candidate
from gemmtune.core.workloads import build
from gemmtune.dispatch import current_target

BURST, ROUNDS = 50, 200
M, N, K = 16, 512, 512
WIDE = 768  # N and K of a product that the CUDA backend may serve


@triton.jit
def empty_kernel(a, b, c, m, n, k, lda, ldb, ldc, BM: tl.constexpr):
    """Triton kernel that does nothing, with as many arguments as a tiled product without epilogue."""


def time_bursts(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Return the host microseconds per call by round: one burst of each in random order, on an idle device."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, rng = list(calls), random.Random(0)
    for call in calls.values():
        for _ in range(3):
            call()
    for _ in range(ROUNDS):
        rng.shuffle(order)
        for name in order:
            torch.cuda.synchronize()
            call = calls[name]
            start = time.perf_counter()
            for _ in range(BURST):
                call()
            times[name].append((time.perf_counter() - start) / BURST * 1e6)
    torch.cuda.synchronize()
    return times


def bare_launch(problem: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Callable[[], Any]:
    """Return one driver launch of a tiled kernel without epilogue, with all other work done in advance."""
    target, backend = current_target("cuda"), backends.get("triton")
    candidate = next(
        item
        for item in backend.candidates(problem, target)
        if isinstance(item, Candidate) and item.template == "tiled" and item["split"] == 1
    )
    kernel: Any = backend.load(backend.build(problem, candidate, target), problem)
    function: Function = kernel.function(0)
    kernel.run(a, b, (), out)  # which writes the arguments
    _, _, config, launch, _ = function.args.prepared
    config.stream = torch.cuda.current_stream().cuda_stream
    # No other launch of the function may come between. The kernel owns the memory that the driver reads.
    return lambda owner=kernel: launch()


def main() -> None:
    problems = [(build(M, N, K, dtype), 1) for dtype in ("bf16", "int8", "fp8", "int8wo")]
    gemmtune.tune(problems, device="cuda", backends=("triton", "aten"))
    (wide,) = gemmtune.tune([(build(M, WIDE, WIDE, "bf16"), 1)], device="cuda", backends=("cuda", "aten"))
    gemmtune.refresh()
    x_wide, w_wide = (torch.randn(rows, WIDE, device="cuda").bfloat16() for rows in (M, WIDE))
    x, w = torch.randn(M, K, device="cuda").bfloat16(), torch.randn(N, K, device="cuda").bfloat16()
    x8, w8 = (torch.randint(-128, 128, (rows, K), dtype=torch.int8, device="cuda") for rows in (M, N))
    xf, wf = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    one_m, one_n = torch.ones(M, 1, device="cuda"), torch.ones(1, N, device="cuda")
    scale = torch.ones(N, device="cuda").bfloat16()
    w8_t, wf_t = w8.t(), wf.t()  # views that the caller makes are not part of the op
    out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    with torch.inference_mode():
        times = time_bursts({
            "cheapest launch": bare_launch(problems[0][0], out, x, w.t()),
            "torch.empty_like": lambda: torch.empty_like(out),
            "Triton's launcher": lambda: empty_kernel[(8,)](x, w, out, M, N, K, K, K, N, BM=16),
            "F.linear": lambda: F.linear(x, w),
            "gemmtune.linear": lambda: gemmtune.linear(x, w),
            f"gemmtune.linear, {str(wide.chosen).partition('[')[0]}": lambda: gemmtune.linear(x_wide, w_wide),
            "torch._int_mm (M = 17)": (lambda padded: lambda: torch._int_mm(padded, w8_t))(x8.new_zeros(17, K)),
            "gemmtune.int_mm": lambda: gemmtune.int_mm(x8, w8_t),
            "torch._scaled_mm": lambda: torch._scaled_mm(xf, wf_t, one_m, one_n, out_dtype=torch.bfloat16),
            "gemmtune.scaled_mm": lambda: gemmtune.scaled_mm(xf, wf_t, one_m, one_n, out_dtype=torch.bfloat16),
            "gemmtune.mixed_mm": lambda: gemmtune.mixed_mm(x, w8_t, scale),
        })  # fmt: skip
    base_us = statistics.median(times["cheapest launch"])
    for name, values in times.items():
        median = statistics.median(values)
        low, _, high = statistics.quantiles(values, n=4)
        print(f"{name:<28} {median:6.2f} us ({low:.2f}..{high:.2f})  {median - base_us:+6.2f} over the cheapest launch")
    start = time.perf_counter()
    decisions = gemmtune.tune(problems, device="cuda", backends=("triton", "aten"))
    store_hits_s = time.perf_counter() - start
    served = [decision.chosen for decision in decisions]
    print(f"asked again: {len(decisions)} problems in {store_hits_s * 1e3:.1f} ms; {served}")
    rows = {name: [round(value, 3) for value in values] for name, values in times.items()}
    write_results("gpu-overhead", rows, warm_s=store_hits_s, served=served, gpu=current_target("cuda").to_dict())


if __name__ == "__main__":
    main()
