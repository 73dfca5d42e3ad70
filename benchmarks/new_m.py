"""Measure what the first call with an M costs, beyond a later call with it: host time, in microseconds.

    python benchmarks/new_m.py                                the CPU, one thread; on a GPU where there is one
    python benchmarks/new_m.py --device cpu --families bf16,int8wo --count 200

A small weight of each family is tuned for all M of a range. Then ``--count`` random M are called twice in the same
order, each time on new operands: by PyTorch's own op, by gemmtune's op with the weight raw and packed, and by the
product of a compiled graph (``inductor.CallSite``), each of which has M that are drawn anew. What the first call of an
M takes longer than its second, which comes after calls with all other M, is what a new M costs. Host time is the time
in which the calling thread is busy: a GPU's stream is idle before each call, and a CPU's kernel is part of both. There
is a line for each backend that serves some of the M. Where that is PyTorch's own op, a new M costs what it costs
PyTorch, too, unless the library remembers the M: on CPUs oneDNN makes a primitive for it, on GPUs cuBLAS chooses a
kernel. So PyTorch's op is called with the M of each of gemmtune's ways beforehand. Raw data is written to
benchmarks/results/ (or to $OUT).
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["GEMMTUNE_STORE"] = str(Path(tempfile.mkdtemp(prefix="gemmtune-new-m-")) / "store.db")

import torch
from every_m_products import pack
from harness import write_results
from torch import Tensor

import gemmtune
from gemmtune.backends.aten.quantized import dequantize
from gemmtune.core.problem import Problem
from gemmtune.core.weights import QuantWeight
from gemmtune.core.workloads import build
from gemmtune.dispatch import RUNTIME, current_target
from gemmtune.inductor.call_site import CallSite
from gemmtune.inductor.costs import layouts_of
from gemmtune.inductor.graph_call import GraphCall
from gemmtune.verify.inputs import Inputs, make_inputs

FAMILIES = {"cpu": "fp32,bf16,int8,int8wo", "cuda": "bf16,fp8,int8,int8wo,int4wo"}
LAST = {"cpu": 512, "cuda": 4096}
Call = Callable[[], Tensor]


def calls_of(problem: Problem, b: Tensor | QuantWeight) -> dict[str, Callable[[Inputs], Call]]:
    """Return the ways to compute the product; each is a function from operands to a call that takes no arguments."""
    packed = pack(problem, b)
    ways: dict[str, Callable[[Inputs], Call]] = {
        "PyTorch": lambda inputs: torch_call(problem, inputs.a, b, inputs.aux),
        "op": lambda inputs: op_call(problem, inputs.a, b, inputs.aux),
    }
    if packed is not None:
        ways["op, packed"] = lambda inputs: op_call(problem, inputs.a, packed, inputs.aux)
    if problem.family in ("mm", "mixed_mm"):
        form = "linear" if isinstance(b, Tensor) else "weight_only"
        constant = replace(problem, b=replace(problem.b, constant=True))
        site = CallSite(GraphCall(constant, form, (problem.n,)).to_json())
        weights = [b.t()] if isinstance(b, Tensor) else [b.data.t(), b.scale, b.zero_point]
        weights = [tensor for tensor in weights if tensor is not None]

        def compiled(inputs: Inputs) -> Call:
            a, aux = inputs.a, inputs.aux
            out = torch.empty(a.shape[0], problem.n, dtype=getattr(torch, problem.out_dtype), device=a.device)
            return lambda: site(a, *weights, *aux, out=out)

        ways["compiled graph"] = compiled
    return ways


def torch_call(problem: Problem, a: Tensor, b: Any, aux: Any) -> Call:
    """Return a call of PyTorch's own op; of a weight-only product, which has none, of an expression."""
    if problem.family == "scaled_mm":
        scale_a, scale_b, dtype = aux[0].view(-1, 1), aux[1].view(1, -1), getattr(torch, problem.out_dtype)
        return lambda: torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype)
    if problem.family == "int_mm":
        return lambda: torch._int_mm(a, b)
    if problem.family == "mm":
        weight = b.t()
        return lambda: torch.nn.functional.linear(a, weight)
    dense = dequantize(b, a.dtype)
    return lambda: torch.mm(a, dense)


def op_call(problem: Problem, a: Tensor, b: Any, aux: Any) -> Call:
    """Return a call of the public op."""
    dtype = getattr(torch, problem.out_dtype)
    if problem.family == "scaled_mm":
        scale_a, scale_b = aux[0].view(-1, 1), aux[1].view(1, -1)
        return lambda: gemmtune.scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype)
    if problem.family == "int_mm":
        return lambda: gemmtune.int_mm(a, b)
    if problem.family == "mm":
        weight = b.t() if isinstance(b, Tensor) else b
        return lambda: gemmtune.linear(a, weight)
    bits = 4 if problem.b.dtype == "int4" else 8
    if isinstance(b, QuantWeight):
        data, scale, zero_point, group = b.data, b.scale, b.zero_point, b.quant.group
        return lambda: gemmtune.mixed_mm(a, data, scale, zero_point, bits=bits, group_size=group)
    return lambda: gemmtune.mixed_mm(a, b, bits=bits)


def backends_of(problem: Problem, b: Tensor | QuantWeight, way: str, sizes: list[int]) -> list[str]:
    """Return the name of the backend that serves each M, by the plan; "PyTorch" for its own op."""
    device = b.device if isinstance(b, Tensor) else b.data.device
    index, plan = RUNTIME.index(device), None
    if way == "op":
        plan, _ = index.raw_plan(problem)
    elif way != "PyTorch":
        constant = replace(problem, b=replace(problem.b, constant=True))
        layout = pack(problem, b).layout if way == "op, packed" else layouts_of(constant, device)[0]
        plan = index.raw_plan(constant)[0] if layout is None else index.plan(constant.plan_key, layout)
    candidates = [None if plan is None else plan.pick(m).candidate for m in sizes]
    return ["PyTorch" if candidate is None else candidate.backend for candidate in candidates]


def time_calls(problem: Problem, b: Any, sizes: list[int], way: Callable[[Inputs], Call]) -> list[float]:
    """Return the microseconds of a call with each M."""
    device, times = b.device if isinstance(b, Tensor) else b.data.device, []
    gc.disable()
    for m in sizes:
        call = way(make_inputs(problem.with_m(m), m, device=device, b=b))
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    gc.enable()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--families", help="comma separated; GPU: [{cuda}], CPU: [{cpu}]".format(**FAMILIES))
    parser.add_argument("--count", type=int, default=300, help="random M [300]")
    parser.add_argument("--size", type=int, help="K and N of the weights [GPU: 1024, CPU: 64]")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds of tuning for each tuned M [1.0]")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    device, rows = torch.device(args.device), []
    size, last = args.size or (1024 if device.type == "cuda" else 64), LAST[args.device]
    heads = f"{'M':>4}{'new M':>10}{'quartiles':>18}{'90%':>8}{'later call':>12}   us"
    print(f"{'family':<8}{'call':<16}{'served by':<10}{heads}")
    for family in (args.families or FAMILIES[args.device]).split(","):
        problem = build(16, size, size, family)
        gemmtune.tune([problem], m=range(1, last + 1), budget=args.budget, device=device)
        RUNTIME.refresh()
        b = make_inputs(problem, 0, device=device).b
        ways = calls_of(problem, b)
        for name, way in ways.items():
            first = 17 if family == "int8" else 2  # the least M that torch._int_mm takes on a GPU
            sizes = random.Random(f"{family} {name}").sample(range(first, last + 1), args.count + 20)
            if name != "PyTorch":
                with torch.inference_mode():
                    time_calls(problem, b, sizes, ways["PyTorch"])
            with torch.inference_mode(name != "compiled graph"):
                passes = [time_calls(problem, b, sizes, way)[20:] for _ in range(2)]  # the first ones load kernels
            served = backends_of(problem, b, name, sizes[20:])
            for backend in sorted(set(served)):
                pairs = [pair for pair, by in zip(zip(*passes, strict=True), served, strict=True) if by == backend]
                costs = sorted(first - second for first, second in pairs)
                low, middle, high = statistics.quantiles(costs, n=4) if len(costs) > 1 else costs * 3
                late, later = costs[int(0.9 * len(costs))], statistics.median(second for _, second in pairs)
                print(
                    f"{family:<8}{name:<16}{backend:<10}{len(pairs):>4}{middle:>10.1f}{low:>10.1f}{high:>8.1f}"
                    f"{late:>8.1f}{later:>12.1f}", flush=True,
                )  # fmt: skip
            rows.append(
                {"family": family, "call": name, "size": size, "m": sizes[20:], "us": passes, "backends": served}
            )
    write_results("new-m", rows, target=current_target(device).to_dict(), arguments=vars(args))


if __name__ == "__main__":
    main()
