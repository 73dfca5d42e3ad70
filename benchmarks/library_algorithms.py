"""Whether cuBLASLt's ranking tells where PyTorch's op runs another kernel, and how its time depends on M.

``python benchmarks/library_algorithms.py``. For each range of M: how many M cuBLASLt names another algorithm for than
for the M before, at how many PyTorch's op runs a kernel of another name (by the profiler), at how many both; the M that
are neither a multiple of 8 nor behind one at which the name changes; and by how much the least of the times at the
scanned M beside an M (``tuning.plain_scan``), with and without names of algorithms, exceeds the op's time there: in
the mean, and at most. The GPU's clock changes meanwhile, which is part of the latter.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from harness import card_name, write_results
from torch import Tensor

from gemmtune.backends.cublaslt.choice import chosen_algorithm
from gemmtune.core.problem import Problem
from gemmtune.core.workloads import fp8_problem, linear_problem
from gemmtune.tuning.plain_scan import sizes_to_scan
from gemmtune.tuning.plain_times import NO_ALGORITHMS, LibraryAlgorithms, PlainTimes, sizes_to_ask

WEIGHTS = 8  # so that a weight is not in the cache when it is used again
CALLS, REPLAYS = 12, 7
RANGES = (  # family, K, N, first and last M
    ("bf16", 8192, 1024, 520, 899), ("bf16", 4096, 4096, 1000, 1199), ("bf16", 8192, 1024, 3000, 3199),
    ("bf16", 4096, 12288, 300, 499), ("fp8", 8192, 1024, 600, 799), ("fp8", 4096, 4096, 1000, 1199),
)  # fmt: skip
Op = Callable[[int, int], Tensor]  # from M and the number of a weight


def op_of(family: str, k: int, n: int, last: int) -> tuple[Problem, Op]:
    """Return the Problem of PyTorch's op, and the op on random operands."""
    shape = (WEIGHTS, n, k)
    if family == "bf16":
        weights = 0.02 * torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        rows = torch.randn(last, k, device="cuda", dtype=torch.bfloat16)
        return linear_problem(64, n, k, "bfloat16"), lambda m, i: F.linear(rows[:m], weights[i])
    weights = torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)
    rows = torch.randn(last, k, device="cuda").to(torch.float8_e4m3fn)
    scale_a, scale_b = torch.rand(last, 1, device="cuda"), torch.rand(1, n, device="cuda")
    return fp8_problem(64, n, k), lambda m, i: torch._scaled_mm(
        rows[:m], weights[i].t(), scale_a[:m], scale_b, out_dtype=torch.bfloat16
    )


def microseconds(op: Op, m: int) -> float:
    """Return the median time of a call in a CUDA graph."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        op(m, 0)
        with torch.cuda.graph(graph, stream=stream):
            for call in range(CALLS):
                op(m, call % WEIGHTS)
        graph.replay()
        times = []
        for _ in range(REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end) / CALLS)
    return statistics.median(times)


def kernel_names(op: Op, sizes: Sequence[int]) -> list[str]:
    """Return the name of the kernel that multiplies, at each M."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for m in sizes:
            op(m, 0)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "kernel"]
    names = [str(event["name"]) for event in sorted(events, key=lambda event: event["ts"])]
    return [name for name in names if "splitKreduce" not in name]  # which follows some products


def changes(names: dict[int, str]) -> set[int]:
    """Return the M at which the name is another than at the M before."""
    return {m for m in names if m - 1 in names and names[m] != names[m - 1]}


def excess(times: dict[int, float], scanned: Sequence[int], algorithms: LibraryAlgorithms) -> list[float]:
    """Return by how much the least time that is known from a scan exceeds the time at each M, where it is known."""
    plain = PlainTimes({m: times[m] for m in scanned}, algorithms)
    return [least / seconds - 1.0 for m, seconds in times.items() if (least := plain.at_least(m, m)) is not None]


def main() -> None:
    rows = []
    print("family    K      N         M      algorithms; changes named, run, both, elsewhere | M scanned by name,")
    print("excess in the mean, at most | the same without names")
    for family, k, n, first, last in RANGES:
        problem, op = op_of(family, k, n, last)
        sizes = range(first, last + 1)
        named = {m: chosen_algorithm(problem, m) for m in sizes}
        run = dict(zip(sizes, kernel_names(op, sizes), strict=True))
        times = {m: microseconds(op, m) for m in sizes}
        algorithms = LibraryAlgorithms({m: name for m in sizes_to_ask(first, last) if (name := named.get(m, ""))})
        scans = {"named": algorithms, "unnamed": NO_ALGORITHMS}
        scanned = {kind: sizes_to_scan([(first, last)], scans[kind]) for kind in scans}
        more = {kind: excess(times, scanned[kind], scans[kind]) for kind in scans}
        elsewhere = sorted(m for m in changes(named) | changes(run) if m % 8 > 1)
        both = changes(named) & changes(run)
        rows.append({
            "family": family, "k": k, "n": n, "first": first, "last": last, "named": list(named.values()),
            "run": list(run.values()), "times_us": list(times.values()), "scanned": scanned,
        })  # fmt: skip
        counts = (set(named.values()), changes(named), changes(run), both, elsewhere)
        text = " ".join(f"{len(items):9}" for items in counts)
        for kind in scans:
            text += f" | {len(scanned[kind]):8} {statistics.mean(more[kind]):8.1%} {max(more[kind]):6.1%}"
        print(f"{family:5} {k:6} {n:6} {first:6} - {last:5} {text}")
    write_results("library-algorithms", rows, gpu=card_name("cuda"))


if __name__ == "__main__":
    main()
