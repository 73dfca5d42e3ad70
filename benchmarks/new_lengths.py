"""Measure what a sequence of a new length costs a model that is compiled for all lengths: host time, in milliseconds.

    python benchmarks/new_lengths.py                              the CPU, one thread; on a GPU where there is one
    python benchmarks/new_lengths.py --device cpu --layers 4 --width 512 --count 100

A transformer in bfloat16 (RMS norms, attention, SwiGLU) is compiled with ``dynamic=True`` by Inductor and by
``backend="gemmtune"``, which tunes its products first. Then each of ``--count`` random lengths is run three times: the
first call less the third is what a new length costs. Each way, and eager PyTorch, has a process of its own: cuBLAS and
oneDNN remember products of a process, so that in one process the first to run a length would pay for all. On a GPU the
stream is idle before each call. Raw data is written to benchmarks/results/ (or to $OUT).
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("GEMMTUNE_STORE", str(Path(".gemmtune") / "new-lengths.db"))

import torch
import torch.nn.functional as F
from harness import write_results
from torch import Tensor, nn

import gemmtune
from gemmtune.dispatch import current_target

HEADS = 4
WAYS = ("eager", "torch.compile", "backend=gemmtune")


class Block(nn.Module):
    """A layer of a transformer: attention, then SwiGLU, each behind an RMS norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        parts = [linear(normed).view(1, -1, HEADS, x.shape[-1] // HEADS) for linear in (self.q, self.k, self.v)]
        q, k, v = (part.transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(x.shape))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def build(width: int, layers: int, device: torch.device) -> nn.Module:
    """Return a transformer with random weights in bfloat16."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(width) for _ in range(layers)])
    return model.to(device, torch.bfloat16).eval().requires_grad_(False)


def milliseconds(run: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return the milliseconds for which the calling thread is busy with a call."""
    if x.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    run(x)
    return 1e3 * (time.perf_counter() - start)


def measure(way: str, arguments: argparse.Namespace) -> list[list[float]]:
    """Return the milliseconds of three calls with each length, by one of ``WAYS``."""
    device, last = torch.device(arguments.device), 4000 if arguments.device == "cuda" else 400
    if device.type == "cpu":
        torch.set_num_threads(1)

    def tokens(length: int) -> Tensor:
        return torch.randn(1, length, arguments.width).to(device, torch.bfloat16)

    options = {} if arguments.budget is None else {"budget": arguments.budget}
    model: Callable[[Tensor], Tensor] = build(arguments.width, arguments.layers, device)
    if way == "torch.compile":
        model = torch.compile(model, dynamic=True)
    elif way == "backend=gemmtune":
        model = gemmtune.compile(model, dynamic=True, options=options)
    with torch.no_grad():
        start = time.perf_counter()
        for length in (17, 33, 40, 50, 60):
            model(tokens(length))
        compiled_s, used = time.perf_counter() - start, other_memory(device)
        gc.disable()
        lengths = random.Random(5).sample(range(70, last + 1), arguments.count)
        times = [[milliseconds(model, x) for _ in range(3)] for x in map(tokens, lengths)]
        used_later = other_memory(device)
        print(
            f"{way}: compiled in {compiled_s:.1f} s; {used:.0f} MB of code and contexts, {used_later:.0f} MB at the end"
        )
        return times


def other_memory(device: torch.device) -> float:
    """Return the megabytes of a GPU's memory that are in use, without those of PyTorch's allocator: contexts and the
    code of kernels, of other processes too."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, help="of the model [GPU: 2048, CPU: 256]")
    parser.add_argument("--count", type=int, default=60, help="random lengths from 70 to 400 (GPU: 4000) [60]")
    parser.add_argument("--budget", type=float, help="seconds to tune a problem that is not in the store")
    args = parser.parse_args()
    args.width = args.width or (2048 if args.device == "cuda" else 256)
    times: dict[str, list[list[float]]] = {}
    for way in WAYS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            times[way] = pool.apply(measure, (way, args))
    print(f"{'':<18}{'new length':>12}{'quartiles':>18}{'later call':>12}   ms")
    for name, rows in times.items():
        low, middle, high = statistics.quantiles([first - third for first, _, third in rows], n=4)
        later = statistics.median(third for *_, third in rows)
        print(f"{name:<18}{middle:>12.2f}{low:>10.2f}{high:>8.2f}{later:>12.2f}")
    target = current_target(torch.device(args.device)).to_dict()
    write_results("new-lengths", times, target=target, arguments=vars(args), width=args.width)


if __name__ == "__main__":
    main()
