"""Compare decode steps of a Llama-3-8B decoder on a GPU: eager PyTorch, torch.compile, max-autotune, and gemmtune.

    python benchmarks/e2e_gpu.py                              8 layers; bf16, int8 and int4 weights, fp8; batches
    python benchmarks/e2e_gpu.py --cases bf16:1,int8:16 --layers 32
    python benchmarks/e2e_gpu.py --cases bf16:1x2048          a prefill of 2,048 tokens
    python benchmarks/e2e_gpu.py --cases bf16:2+16+64         one graph for all batch sizes, timed at these

A step is one call of the model with a static cache of keys and values, captured in a CUDA graph: every contestant has a
model of its own, with equal weights. The rounds replay each graph once, in random order, after the L2 has been flushed.
"floor" is the time to read all weights once at the card's read bandwidth, which is measured in the same run. The
results of every contestant are compared with a float32 evaluation of the same weights. Raw data is written to
benchmarks/results/ (or $OUT) after every case.
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("GEMMTUNE_STORE", str(Path(".gemmtune") / "e2e.db"))

import torch
import torch.nn.functional as F
from harness import Spread, card_name, paired_ratios, save_results
from quantized_linears import Fp8Linear, Int4Linear, Int8Linear
from torch import Tensor, nn

import gemmtune

CASES = "bf16:1,bf16:16,bf16:64,int8:1,int8:16,int8:64,int4:1,int4:16,fp8:16,bf16:1x2048"
PEERS = "eager,compile,max-autotune,gemmtune"
OURS = "gemmtune"
# The backend with other options: without programmatic dependent launch of Inductor's kernels, without several of them
# in one launch, and with Inductor's search for their configurations (coordinate descent).
VARIANTS: dict[str, dict[str, Any]] = {
    OURS: {},
    "gemmtune-no-pdl": {"triton.enable_pdl": False},
    "gemmtune-no-combo": {"combo_kernels": False},
    "gemmtune-descent": {"coordinate_descent_tuning": True},
    "gemmtune-plain": {"triton.enable_pdl": False, "combo_kernels": False},
}
HIDDEN, INNER, HEADS, KV_HEADS, VOCAB, EPS = 4096, 14336, 32, 8, 128256, 1e-5
CACHE = 256  # positions of the cache of keys and values, beyond those of a prefill
_ROUNDS_S, _LEAST_ROUNDS = 30.0, 5


LINEARS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "bf16": lambda x: x, "int8": Int8Linear, "int4": Int4Linear, "fp8": Fp8Linear,
}  # fmt: skip


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [B, H, S, D] rotated by the angles of its positions (cos, sin: [S, D / 2])."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return the attention [B, H, S, D] of queries to a cache [B, H / group, T, D]; mask: [1, 1, S, T], added.

    For one token, the queries that share a head of the cache are rows of one product, so that no key is repeated. For a
    prefill, which fills the cache, the mask is causal.
    """
    batch, heads, steps, width = q.shape
    if steps == 1:
        rows = q.reshape(batch, keys.shape[1], -1, width)
        return F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask).view(batch, heads, 1, width)
    keys, values = (t.repeat_interleave(heads // t.shape[1], 1) for t in (keys, values))
    return F.scaled_dot_product_attention(q, keys, values, is_causal=True)


class Layer(nn.Module):
    """One decoder layer with its static cache."""

    def __init__(self, batch: int, positions: int) -> None:
        super().__init__()
        head = HIDDEN // HEADS
        self.before_attention, self.before_mlp = RMSNorm(), RMSNorm()
        shapes = {
            "q": (HIDDEN, HIDDEN), "k": (HIDDEN, KV_HEADS * head), "v": (HIDDEN, KV_HEADS * head),
            "o": (HIDDEN, HIDDEN), "gate": (HIDDEN, INNER), "up": (HIDDEN, INNER), "down": (INNER, HIDDEN),
        }  # fmt: skip
        for name, (k, n) in shapes.items():
            setattr(self, name, nn.Linear(k, n, bias=False))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, KV_HEADS, positions, head), persistent=False)

    def forward(self, x: Tensor, at: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, steps, _ = x.shape
        h = self.before_attention(x)
        q, k, v = (
            p(h).view(batch, steps, heads, -1).transpose(1, 2)
            for p, heads in ((self.q, HEADS), (self.k, KV_HEADS), (self.v, KV_HEADS))
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        rows = torch.arange(batch, device=x.device)[:, None]
        self.keys[rows, :, at] = k.transpose(1, 2)
        self.values[rows, :, at] = v.transpose(1, 2)
        y = attend(q, self.keys[:batch], self.values[:batch], mask)
        x = x + self.o(y.transpose(1, 2).reshape(batch, steps, -1))
        h = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """The decoder. forward: tokens [B, S] at positions ``at`` [S] to logits [B, 1, VOCAB] of the last token."""

    def __init__(self, layers: int, batch: int, steps: int) -> None:
        super().__init__()
        positions = CACHE if steps == 1 else steps
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(batch, positions) for _ in range(layers))
        self.norm, self.head = RMSNorm(), nn.Linear(HIDDEN, VOCAB, bias=False)
        angles = torch.arange(positions)[:, None] / 500000 ** (torch.arange(0, 128, 2) / 128)[None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("mask", torch.zeros(positions, positions), persistent=False)

    def forward(self, tokens: Tensor, at: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin, mask = self.cos[at], self.sin[at], self.mask[None, None, at]
        for layer in self.layers:
            x = layer(x, at, mask, cos, sin)
        return self.head(self.norm(x[:, -1:]))


def build(variant: str, layers: int, batch: int, steps: int, device: str) -> Decoder:
    """Return the decoder with random weights, its linears replaced as the variant says."""
    with torch.device("meta"):
        model = Decoder(layers, batch, steps)
    model = model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    positions = CACHE if steps == 1 else steps
    angles = torch.arange(positions)[:, None] / 500000 ** (torch.arange(0, 128, 2) / 128)[None]
    model.cos, model.sin = angles.cos().to(device), angles.sin().to(device)
    model.mask = torch.full((positions, positions), -torch.inf, device=device).triu(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                scale = 1.0 if "embedding" in name else parameter.shape[1] ** -0.5
                parameter.normal_(0, scale, generator=generator)
        for layer in model.layers:
            layer.keys.normal_(generator=generator)
            layer.values.normal_(generator=generator)
    model = model.to(torch.bfloat16).eval()
    model.cos, model.sin = angles.cos().to(device), angles.sin().to(device)
    with torch.no_grad():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, LINEARS[variant](child))
    return model.requires_grad_(False)


def contestant(name: str, model: Decoder) -> Callable[..., Tensor]:
    """Return what a contestant calls."""
    torch._dynamo.reset()
    if name == "eager":
        return model
    if name == "compile":
        return torch.compile(model)
    if name == "max-autotune":
        return torch.compile(model, mode="max-autotune-no-cudagraphs")
    return gemmtune.compile(model, mode="max-autotune-no-cudagraphs", options=VARIANTS[name])


class Contestant:
    """A compiled model. seconds: of its compilation, which the first steps of each batch size take."""

    def __init__(self, name: str, model: Decoder) -> None:
        self.name, self.seconds = name, 0.0
        self._run = contestant(name, model)

    def step(self, tokens: Tensor, at: Tensor) -> Step:
        """Return a step for these tokens, compiled if that is necessary."""
        start = time.perf_counter()
        if tokens.device.type == "cpu":
            self._run(tokens, at)
        else:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())  # which may still be filling the weights and the tokens
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self._run(tokens, at)
                torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start
        return Step(self.name, lambda: self._run(tokens, at), tokens.device.type)


class Step:
    """One contestant's step, captured in a CUDA graph (called as it is on a CPU)."""

    def __init__(self, name: str, run: Callable[[], Tensor], device: str) -> None:
        self.name = name
        self._run = run  # it keeps the model: a graph holds addresses, not tensors
        self._graph: torch.cuda.CUDAGraph | None = None
        if device == "cpu":
            self.call: Callable[[], object] = run
            self.result = run()
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=stream):
                self.result = run()
        self.call = self._graph.replay
        self.call()
        torch.cuda.synchronize()


def time_steps(steps: list[Step], rounds: int, device: str) -> dict[str, list[float]]:
    """Return the microseconds of a step by contestant, one value for each round: ``rounds``, or fewer where they take
    longer than ``_ROUNDS_S`` (a step of 2,048 tokens with int8 weights takes 10 s under torch.compile)."""
    times: dict[str, list[float]] = {step.name: [] for step in steps}
    rng = random.Random(0)
    flush = torch.ones(64 << 20 if device == "cuda" else 1, dtype=torch.int32, device=device)
    deadline = time.perf_counter() + _ROUNDS_S
    for completed in range(rounds):
        if completed >= _LEAST_ROUNDS and time.perf_counter() > deadline:
            break
        for step in rng.sample(steps, len(steps)):
            if device == "cpu":
                start = time.perf_counter()
                step.call()
                times[step.name].append(1e6 * (time.perf_counter() - start))
                continue
            flush.max()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(100_000)
            first.record()
            step.call()
            last.record()
            torch.cuda.synchronize()
            times[step.name].append(1e3 * first.elapsed_time(last))
    return times


def read_bandwidth(device: str) -> float:
    """Return the bytes per second of a read of 4 GB (64 MB on a CPU)."""
    data = torch.ones(1 << 30 if device == "cuda" else 1 << 24, dtype=torch.int32, device=device)
    best = float("inf")
    for _ in range(6):
        if device == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            data.max()
            last.record()
            torch.cuda.synchronize()
            best = min(best, first.elapsed_time(last) / 1e3)
        else:
            start = time.perf_counter()
            data.max()
            best = min(best, time.perf_counter() - start)
    return data.nbytes / best


def error_of(result: Tensor, reference: Tensor) -> float:
    """Return the Frobenius norm of the difference, relative to the reference's."""
    return float((result.float() - reference).norm() / reference.norm())


def measure(case: str, options: argparse.Namespace, bandwidth: float) -> list[dict[str, Any]]:
    """Run all contestants of a case and return its rows, one for each batch size."""
    variant, _, size = case.partition(":")
    batches, _, length = size.partition("x")
    sizes = [int(batch) for batch in batches.split("+")]
    steps, device = int(length or 1), options.device
    base = build(variant, options.layers, max(sizes), steps, device)
    at = torch.tensor([CACHE // 2], device=device) if steps == 1 else torch.arange(steps, device=device)
    weights = sum(t.nbytes for name, t in base.state_dict().items() if "embedding" not in name)
    inputs = {batch: torch.randint(0, VOCAB, (batch, steps), device=device) for batch in sizes}
    if len(sizes) > 1:
        for tokens in inputs.values():
            torch._dynamo.mark_dynamic(tokens, 0)
    steps_of: dict[int, list[Step]] = {batch: [] for batch in sizes}
    errors: dict[int, dict[str, float]] = {batch: {} for batch in sizes}
    contestants = []
    with torch.inference_mode(False), torch.no_grad():
        for name in options.peers.split(","):
            model = Contestant(name, base if name == "eager" else copy.deepcopy(base))
            contestants.append(model)
            for batch, tokens in inputs.items():
                step = model.step(tokens, at)
                step.call()
                steps_of[batch].append(step)
                reference = steps_of[batch][0].result.float()
                errors[batch][name] = error_of(step.result.clone(), reference)
            print(f"  {case} {name}: ready after {model.seconds:.0f} s", flush=True)
        rows = []
        for batch in sizes:
            times = time_steps(steps_of[batch], options.rounds, device)
            row = {
                "case": f"{variant}:{batch}" + (f"x{length}" if length else ""), "layers": options.layers,
                "compiled_for": sizes, "weights_bytes": weights, "floor_us": 1e6 * weights / bandwidth,
                "times_us": times, "errors": errors[batch], "compile_s": {c.name: c.seconds for c in contestants},
            }  # fmt: skip
            print(summarize(row), flush=True)
            rows.append(row)
    return rows


def summarize(row: dict[str, Any]) -> str:
    """Return the line of a row; write the best peer and the ratio of its time to gemmtune's into the row."""
    spreads = {name: Spread.of(values) for name, values in row["times_us"].items()}
    peers = [name for name in spreads if name not in VARIANTS]
    best = min(peers, key=lambda name: spreads[name].median, default=None)
    cells = [f"{name} {spreads[name].median:.0f}" for name in spreads]
    line = f"{row['case']:>10}  floor {row['floor_us']:.0f}  " + "  ".join(cells)
    if best is not None and OURS in spreads:
        ratio = paired_ratios(row["times_us"][best], row["times_us"][OURS])
        row["best_peer"], row["ratio"] = best, (ratio.median, ratio.low, ratio.high)
        line += f"  {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}) of {best}"
        line += f"  {100 * row['floor_us'] / spreads[OURS].median:.0f}% of the floor"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases",
        default=CASES,
        help=f"variant:batch or variant:batchxtokens; 2+16+64 as batch: one graph for all [{CASES}]",
    )
    parser.add_argument("--peers", default=PEERS, help=f"[{PEERS}]")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after this time")
    parser.add_argument("--log", action="store_true", help="log every decision")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("gemmtune").setLevel(logging.DEBUG if options.log else logging.INFO)
    Path(os.environ["GEMMTUNE_STORE"]).parent.mkdir(parents=True, exist_ok=True)
    bandwidth, start, rows = read_bandwidth(options.device), time.perf_counter(), []
    made = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    print(f"gemmtune {gemmtune.__version__}, torch {torch.__version__}, read bandwidth {bandwidth / 1e12:.2f} TB/s")
    path = None
    for case in options.cases.split(","):
        if time.perf_counter() - start > options.seconds:
            print(f"{case}: not run, the time is over")
            continue
        rows += measure(case, options, bandwidth)
        path = save_results(
            "e2e-gpu", rows, made=made, bandwidth=bandwidth, command=vars(options), card=card_name(options.device)
        )
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    for row in rows:
        worst = max(row["errors"].values())
        print(
            row["case"], "compile s", {k: round(v) for k, v in row["compile_s"].items()}, f"largest error {worst:.4f}"
        )
    print(f"raw data: {path}")


if __name__ == "__main__":
    main()
