"""Time calls between other kernels, as in a user's model; independent of the tuner's own timing code.

A surrounding is a CUDA graph of many calls on operand sets larger than the L2, with other kernels between the calls.
The time of these other kernels alone is measured in the same rounds and subtracted.
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
_GRAPH_S, _BACK_TO_BACK_S, _MAX_CALLS = 1.5e-3, 6e-3, 256
_PAUSE_CYCLES = 20_000


def norm_in_place(x: Tensor) -> Callable[[], None]:
    """Return a function that applies an RMS norm to x [M, K] in place; for 8-bit x it flips the signs."""
    if x.dtype.itemsize == 1:
        bits = x.view(torch.uint8)
        return lambda: bits.bitwise_xor_(0x80)

    def norm() -> None:
        x.mul_(x.float().pow(2).mean(-1, keepdim=True).add_(1e-6).rsqrt_().to(x.dtype))

    return norm


def time_in(
    surrounding: str, calls: Mapping[str, Call], xs: Sequence[Tensor], call_s: float, rounds: int, l2: int
) -> dict[str, list[float]]:
    """Return the seconds per call of every entrant by round, in one surrounding.

    xs: the activations of each operand set. call_s: the approximate time of one call.
    """
    stream = torch.cuda.Stream()
    norms = [norm_in_place(x) for x in xs]
    with torch.cuda.stream(stream), torch.inference_mode():
        graphs = {}
        graph_s = _BACK_TO_BACK_S if surrounding == "back to back" else _GRAPH_S
        count = max(1, min(_MAX_CALLS, round(graph_s / call_s)))
        idle = {"idle": None} if surrounding in ("behind a norm", "before an activation", "alone") else {}
        sample = next(iter(calls.values()))(0)
        result = torch.empty_like(sample)
        for name, call in {**calls, **idle}.items():
            graphs[name] = _capture(surrounding, call, norms, sample, result, count, stream)
        flush = torch.ones(2 * l2 // 4, dtype=torch.int32, device="cuda") if surrounding.startswith("cold") else None
        times = _time_rounds(graphs, rounds, flush)
    other_kernels_s = statistics.median(times.pop("idle")) if "idle" in times else 0.0
    return {name: [(value - other_kernels_s) / count for value in values] for name, values in times.items()}


def _capture(
    surrounding: str, call: Call | None, norms: Sequence[Callable[[], None]], sample: Tensor, result: Tensor,
    count: int, stream: torch.cuda.Stream,
) -> torch.cuda.CUDAGraph:  # fmt: skip
    def work() -> None:
        for i in range(count):
            index = i % len(norms)
            if surrounding == "behind a norm":
                norms[index]()
            if surrounding == "alone":
                torch.cuda._sleep(_PAUSE_CYCLES)
            out = sample if call is None else call(index)
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


def _time_rounds(
    graphs: Mapping[str, torch.cuda.CUDAGraph], rounds: int, flush: Tensor | None
) -> dict[str, list[float]]:
    """Return the seconds of each graph by round, in random order. ``flush`` is read before each graph to evict the
    L2."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    order, rng = list(graphs), random.Random(0)
    for _ in range(rounds):
        rng.shuffle(order)
        events = []
        torch.cuda._sleep(100_000)
        for name in order:
            if flush is not None:
                flush.max()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            graphs[name].replay()
            last.record()
            events.append((name, first, last))
        torch.cuda.synchronize()
        for name, first, last in events:
            times[name].append(1e-3 * first.elapsed_time(last))
    return times
