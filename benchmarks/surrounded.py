"""Calls timed in the surroundings that users have: graphs of their own, apart from what the tuner times with.

A surrounding is a CUDA graph of many calls over operand sets beyond the L2, with other kernels between the calls. What
these take by themselves is timed in the same rounds and subtracted.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Call = Callable[[int], Any]

SURROUNDINGS = ("cold, with the L2 emptied", "back to back", "behind a norm", "before an activation", "alone")
_TURN_S, _BUSY_S, _MOST = 1.5e-3, 6e-3, 256
_PAUSE_CYCLES = 20_000


def normed(x: Tensor) -> Callable[[], None]:
    """An RMS norm that writes x [M, K] in place, its rows scaled to one (of bytes: the signs turned)."""
    if x.dtype.itemsize == 1:
        bits = x.view(torch.uint8)
        return lambda: bits.bitwise_xor_(0x80)

    def norm() -> None:
        x.mul_(x.float().pow(2).mean(-1, keepdim=True).add_(1e-6).rsqrt_().to(x.dtype))

    return norm


def time_in(
    surrounding: str, calls: Mapping[str, Call], xs: Sequence[Tensor], once_s: float, rounds: int, l2: int
) -> dict[str, list[float]]:
    """Seconds a call by round of every call, in one surrounding. xs: the activations of each operand set; once_s: about
    what one call takes."""
    stream = torch.cuda.Stream()
    norms = [normed(x) for x in xs]
    with torch.cuda.stream(stream), torch.inference_mode():
        graphs = {}
        turn = _BUSY_S if surrounding == "back to back" else _TURN_S
        count = max(1, min(_MOST, round(turn / once_s)))
        idle = {"idle": None} if surrounding in ("behind a norm", "before an activation", "alone") else {}
        sample = next(iter(calls.values()))(0)
        result = torch.empty_like(sample)
        for name, call in {**calls, **idle}.items():
            graphs[name] = _captured(surrounding, call, norms, sample, result, count, stream)
        empty = torch.ones(2 * l2 // 4, dtype=torch.int32, device="cuda") if surrounding.startswith("cold") else None
        times = _rounds(graphs, rounds, empty)
    extra = statistics.median(times.pop("idle")) if "idle" in times else 0.0
    return {name: [(value - extra) / count for value in values] for name, values in times.items()}


def _captured(
    surrounding: str, call: Call | None, norms: Sequence[Callable[[], None]], sample: Tensor, result: Tensor,
    count: int, stream: torch.cuda.Stream,
) -> torch.cuda.CUDAGraph:  # fmt: skip
    def work() -> None:
        for i in range(count):
            place = i % len(norms)
            if surrounding == "behind a norm":
                norms[place]()
            if surrounding == "alone":
                torch.cuda._sleep(_PAUSE_CYCLES)
            out = sample if call is None else call(place)
            if surrounding == "before an activation":
                result.copy_(out)

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _rounds(graphs: Mapping[str, torch.cuda.CUDAGraph], rounds: int, empty: Tensor | None) -> dict[str, list[float]]:
    """Seconds of each graph by round, in random order; ``empty`` is read before each, to empty the L2."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    order, rng = list(graphs), random.Random(0)
    for _ in range(rounds):
        rng.shuffle(order)
        marks = []
        torch.cuda._sleep(100_000)
        for name in order:
            if empty is not None:
                empty.max()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            graphs[name].replay()
            last.record()
            marks.append((name, first, last))
        torch.cuda.synchronize()
        for name, first, last in marks:
            times[name].append(1e-3 * first.elapsed_time(last))
    return times
