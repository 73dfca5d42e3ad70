"""Compare products with what surrounds them, each compiled alone: a bias and gelu, SwiGLU, a residual, an RMS norm in
front (``norm``), or a layer norm.

    python benchmarks/fused.py                         Llama's weights, decode sizes and one prefill
    python benchmarks/fused.py --forms norm --m 1,16 --peers compile,max-autotune,gemmtune

Peers are eager PyTorch, torch.compile, and max-autotune (on a CPU with frozen weights). A contestant is a module with
several blocks of one form, each with weights and inputs of its own, so that together they exceed the cache twice (four
times a GPU's). On a GPU a call is a replay of a CUDA graph. The rounds call each contestant once, in random order. The
ratio is the time of the best peer over gemmtune's. Raw data is written to benchmarks/results/ (or $OUT).
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("GEMMTUNE_STORE", str(Path(".gemmtune") / "fused.db"))

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from harness import Spread, card_name, geomean, paired_ratios, save_results
from torch import Tensor, nn

import gemmtune

WEIGHTS = {"cpu": "4096x4096,11008x4096", "cuda": "4096x4096,4096x14336,14336x4096"}
SIZES = {"cpu": "1,16,256", "cuda": "1,16,64,2048"}
CACHE_BYTES = {"cpu": 128 << 20, "cuda": 240 << 20}  # of the weights of one contestant
OURS = "gemmtune"


class Block(nn.Module):
    """One form of a product of x [M, K] by weights [N, K]."""

    def __init__(self, form: str, k: int, n: int) -> None:
        super().__init__()
        self.form = form
        count = 2 if form == "swiglu" else 1
        self.weights = nn.ParameterList(torch.randn(n, k) * k**-0.5 for _ in range(count))
        self.bias, self.gain = nn.Parameter(torch.randn(n)), nn.Parameter(torch.rand(k) + 0.5)
        self.shift = nn.Parameter(torch.randn(k))  # a layer norm's bias

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        if self.form == "norm":
            x = F.rms_norm(x, x.shape[-1:], self.gain, 1e-5)
        elif self.form == "layer-norm":
            x = F.layer_norm(x, x.shape[-1:], self.gain, self.shift, 1e-5)
        y = F.linear(x, self.weights[0], self.bias if self.form == "bias-gelu" else None)
        if self.form == "bias-gelu":
            return F.gelu(y)
        if self.form == "swiglu":
            return F.silu(y) * F.linear(x, self.weights[1])
        return y + residual if self.form == "residual" else y


FORMS = ("bias-gelu", "swiglu", "residual", "norm", "layer-norm")


class Blocks(nn.Module):
    """Several blocks, each with an input and a residual of its own."""

    def __init__(self, form: str, k: int, n: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(form, k, n) for _ in range(count))

    def forward(self, inputs: list[Tensor], residuals: list[Tensor]) -> list[Tensor]:
        return [block(x, r) for block, x, r in zip(self.blocks, inputs, residuals, strict=True)]


def contestant(name: str, model: nn.Module, budget: float | None, device: str) -> Callable[..., list[Tensor]]:
    torch._dynamo.reset()
    inductor_config.freezing = device == "cpu" and name != OURS
    if name == "eager":
        return model
    if name == "compile":
        return torch.compile(model, dynamic=False)
    if name == "max-autotune":
        return torch.compile(model, mode="max-autotune-no-cudagraphs", dynamic=False)
    options = {} if budget is None else {"budget": budget}
    return gemmtune.compile(model, mode="max-autotune-no-cudagraphs", options=options, dynamic=False)


class Call:
    """One contestant's call, captured in a CUDA graph on a GPU."""

    def __init__(self, run: Callable[..., list[Tensor]], operands: tuple[list[Tensor], list[Tensor]]) -> None:
        self._run, self._operands = run, operands
        self._graph: torch.cuda.CUDAGraph | None = None
        if not operands[0][0].is_cuda:
            self.result = run(*operands)
            self.call: Callable[[], Any] = lambda: run(*operands)
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # which may still be filling the weights and the inputs
        with torch.cuda.stream(stream):
            for _ in range(3):
                run(*operands)
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=stream):
                self.result = run(*operands)
        self.call = self._graph.replay
        self.call()
        torch.cuda.synchronize()


def time_calls(calls: dict[str, Call], rounds: int, device: str) -> dict[str, list[float]]:
    """Return the microseconds of a call by contestant, one value for each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    rng = random.Random(0)
    for _ in range(rounds):
        for name in rng.sample(list(calls), len(calls)):
            if device == "cpu":
                start = time.perf_counter()
                calls[name].call()
                times[name].append(1e6 * (time.perf_counter() - start))
                continue
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(50_000)
            first.record()
            calls[name].call()
            last.record()
            torch.cuda.synchronize()
            times[name].append(1e3 * first.elapsed_time(last))
    return times


def measure(form: str, k: int, n: int, m: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run all contestants of a case and return its row; times are for one block."""
    device, weight_bytes = options.device, 2 * k * n * (2 if form == "swiglu" else 1)
    count = max(2, -(-CACHE_BYTES[device] // weight_bytes))
    torch.manual_seed(0)
    with torch.device(device):
        model = Blocks(form, k, n, count).bfloat16().eval().requires_grad_(False)
        operands = tuple([torch.randn(m, size).bfloat16() for _ in range(count)] for size in (k, n))
    calls: dict[str, Call] = {}
    for name in options.peers.split(","):
        run = contestant(name, copy.deepcopy(model), options.budget, device)
        calls[name] = Call(run, operands)
    expected = [y.float() for y in calls["eager"].result] if "eager" in calls else []
    errors = [
        float((y.float() - e).norm() / e.norm()) for y, e in zip(calls[OURS].result, expected, strict=False)
    ]  # fmt: skip
    times = {name: [t / count for t in values] for name, values in time_calls(calls, options.rounds, device).items()}
    spreads = {name: Spread.of(values) for name, values in times.items()}
    best = min((name for name in spreads if name != OURS), key=lambda name: spreads[name].median)
    ratio = paired_ratios(times[best], times[OURS])
    cells = "  ".join(f"{name} {spread.median:.1f}" for name, spread in spreads.items())
    print(
        f"{form:>10} {m}x{n}x{k}: {cells} us; {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}) of {best}",
        flush=True,
    )
    return {
        "form": form, "m": m, "n": n, "k": k, "blocks": count, "times_us": times, "best_peer": best,
        "ratio": (ratio.median, ratio.low, ratio.high), "error": max(errors, default=None),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--weights", help="K and N of each weight: 4096x14336,...")
    parser.add_argument("--m")
    parser.add_argument("--peers", default="eager,compile,gemmtune", help="eager,compile,max-autotune,gemmtune")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--budget", type=float, help="seconds to tune a Problem, builds included [gemmtune's default]")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after this time")
    options = parser.parse_args()
    Path(os.environ["GEMMTUNE_STORE"]).parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    made, start, path = time.strftime("%Y%m%d-%H%M%S", time.gmtime()), time.perf_counter(), None
    weights = [tuple(map(int, w.split("x"))) for w in (options.weights or WEIGHTS[options.device]).split(",")]
    sizes, forms = (options.m or SIZES[options.device]).split(","), options.forms.split(",")
    cases = [(form, k, n, int(m)) for m in sizes for k, n in weights for form in forms]
    for case in cases:
        if time.perf_counter() - start > options.seconds:
            print("the time is over")
            break
        with torch.no_grad():
            rows.append(measure(*case, options))
        path = save_results("fused", rows, made=made, command=vars(options), card=card_name(options.device))
        gc.collect()
    ratios = [row["ratio"][0] for row in rows]
    worst = min(rows, key=lambda row: row["ratio"][0])
    print(
        f"{len(rows)} cases: geometric mean {geomean(ratios):.3f}, {sum(r < 0.98 for r in ratios)} below 0.98, worst "
        f"{worst['ratio'][0]:.3f} ({worst['form']} {worst['m']}x{worst['n']}x{worst['k']})"
    )
    print(f"raw data: {path}")


if __name__ == "__main__":
    main()
