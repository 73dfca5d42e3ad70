"""Measure what the backend of torch.compile costs on a CPU: a product's call, and compiling again with warm caches.

    python benchmarks/compile_overhead.py               both
    python benchmarks/compile_overhead.py --rounds 9

"call": a graph of 16 products of 1x64 by 64x64, each with a tanh behind it, compiled by Inductor (an extern call of
``mm`` for each) and by gemmtune (a call site for each). The store is empty, and the backend is made to take every
product nevertheless, so that the call sites call ``mm``, too: the difference, divided by 16, is what one call site
costs.

"warm": the first call of the example decoder in a new process, when the caches of Inductor and the store are filled.
The processes of both backends take turns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import Spread, paired_ratios, write_results
from torch import Tensor, nn

PRODUCTS, CALLS = 16, 300


class Chain(nn.Module):
    """Products of one row, each of which reads the result of the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(PRODUCTS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def seconds_per_call(run: object, x: Tensor) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        run(x)  # type: ignore[operator]
    return (time.perf_counter() - start) / CALLS


def measure_calls(rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of a call of the chain by backend, one value for each round."""
    import gemmtune
    from gemmtune.inductor import plan_graph
    from gemmtune.inductor.costs import Cost

    plan_graph.cost_of = lambda problem, device: Cost(1e-9, True)
    options, x = {"policy": "cached"}, torch.randn(1, 64)
    (report,) = gemmtune.inductor.explain(Chain().eval(), x, options=options)
    assert not report.count("inductor")
    runs = {"inductor": torch.compile(Chain().eval()), "gemmtune": gemmtune.compile(Chain().eval(), options=options)}
    for run in runs.values():
        seconds_per_call(run, x)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(1e6 * seconds_per_call(run, x))
    return times


def first_call(backend: str) -> None:
    """Compile the example decoder and call it once; print the seconds that this takes."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    import llama

    import gemmtune

    model, _ = llama.factory("fp32", llama.Config(dim=256, hidden=512, vocab=1024))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    compiled = torch.compile(model) if backend == "inductor" else gemmtune.compile(model, options={"budget": 0.5})
    start = time.perf_counter()
    with torch.no_grad():
        compiled(tokens)
    print(time.perf_counter() - start)


def measure_warm(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of the first call with warm caches by backend, one value for each round."""
    times: dict[str, list[float]] = {"inductor": [], "gemmtune": []}
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "GEMMTUNE_STORE": f"{folder}/store.db",
        }  # fmt: skip
        for turn in range(rounds + 1):
            for backend, values in times.items():
                command = [sys.executable, __file__, "--first-call", backend]
                result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                if turn:  # the first turn fills the caches
                    values.append(float(result.stdout.split()[-1]))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--first-call", choices=("inductor", "gemmtune"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_call:
        first_call(options.first_call)
        return
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        os.environ["GEMMTUNE_STORE"] = f"{folder}/store.db"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        calls = measure_calls(options.rounds)
    warm = measure_warm(options.rounds)
    extra = [(g - i) / PRODUCTS for g, i in zip(calls["gemmtune"], calls["inductor"], strict=True)]
    print(f"a call site beside an extern call: {Spread.of(extra).median:+.2f} us (of {PRODUCTS} in a graph)")
    for title, times, unit in (("chain", calls, "us"), ("first call, warm", warm, "s")):
        ratio = paired_ratios(times["gemmtune"], times["inductor"])
        medians = [f"{name} {Spread.of(values).median:.2f} {unit}" for name, values in times.items()]
        print(f"{title}: {', '.join(medians)}: {ratio.median:.3f}x ({ratio.low:.3f} to {ratio.high:.3f})")
    write_results("compile-overhead", {"calls_us": calls, "warm_s": warm, "extra_us": extra}, rounds=options.rounds)


if __name__ == "__main__":
    main()
