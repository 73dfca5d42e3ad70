"""Compare gemmtune's kernels on a GPU with PyTorch's, interleaved in CUDA graphs on operands larger than the L2.

    python benchmarks/h200.py                              five families, M = 1 16 64 256 1024 4096, llama weights
    python benchmarks/h200.py --families bf16 --m 1,16     part of it
    python benchmarks/h200.py --inductor                   also torch.compile max-autotune (10 to 20 minutes a family)
    CUDA_VISIBLE_DEVICES=1 python benchmarks/h200.py --share DIR   processes with the same DIR divide the shapes

Decisions come from the store ($GEMMTUNE_STORE, default .gemmtune/gpu.db); problems without a decision are tuned first,
and the seconds of tuning are reported. Each round replays one graph of every entrant in random order; a graph has many
calls on different operands. The times of all rounds are written to benchmarks/results/ (or to $OUT), one file for each
family, also after an interruption.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("GEMMTUNE_STORE", str(Path(".gemmtune") / "gpu.db"))

import torch
import torch.nn.functional as F
from harness import geomean, paired_ratios, write_results
from torch import Tensor

import gemmtune
from gemmtune.backends.base import OVERLAP
from gemmtune.core.decision import Decision
from gemmtune.core.problem import Problem
from gemmtune.core.workloads import build, weight_only_problem
from gemmtune.dispatch import current_target

WEIGHTS = ((11008, 4096), (4096, 12288), (4096, 22016), (4096, 4096))  # K -> N
FAMILIES = ("bf16", "int8wo", "fp8", "int8", "int4wo")
ROWS = (1, 16, 64, 256, 1024, 4096)
_READ = 4.46e12  # bytes a second, REFERENCE.md
COLD = 16  # size of the operands of one graph, in multiples of the L2
_GRAPH_S = 2e-3  # the start of a graph takes about 8 us, which is not part of a call

OURS, ALONE = "gemmtune", "alone"  # as served: a kernel may overlap the previous one (PDL); "alone": it may not
AUTOTUNED = "Inductor"

Call = Callable[[int], object]


@dataclass
class Sets:
    """Operand sets of one shape in PyTorch's layout: x [M, K], w [N, K], scales."""

    family: str
    m: int
    n: int
    k: int
    x: list[Tensor]
    w: list[Tensor]
    x_scale: list[Tensor] = field(default_factory=list)
    w_scale: list[Tensor] = field(default_factory=list)


def make_operands(family: str, m: int, n: int, k: int, l2: int) -> Sets:
    """Return random operands over the range of their types; at most 64 sets, COLD times the L2 together."""
    size = n * k * {"bf16": 2.0, "int4wo": 0.5}.get(family, 1.0) + m * k * 2 + m * n * 2
    count = max(2, min(64, int(COLD * l2 / size) + 1))
    sets = Sets(family, m, n, k, [], [])
    generator = torch.Generator("cuda").manual_seed(m * 31 + n)

    def random_int8(*shape: int) -> Tensor:
        return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda", generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    for _ in range(count):
        if family == "bf16":
            sets.x.append(normal(m, k).bfloat16())
            sets.w.append(normal(n, k).bfloat16())
        elif family == "int8":
            sets.x.append(random_int8(m, k))
            sets.w.append(random_int8(n, k))
        elif family == "fp8":
            sets.x.append(normal(m, k).to(torch.float8_e4m3fn))
            sets.w.append(normal(n, k).to(torch.float8_e4m3fn))
            sets.x_scale.append(normal(m, 1).abs() + 0.5)
            sets.w_scale.append(normal(1, n).abs() + 0.5)
        elif family == "int8wo":
            sets.x.append(normal(m, k).bfloat16())
            sets.w.append(random_int8(n, k))
            sets.w_scale.append((normal(n).abs() / 4096).bfloat16())
        else:
            sets.x.append(normal(m, k).bfloat16())
            sets.w.append(random_int8(n, k // 2).view(torch.uint8))
            sets.w_scale.append((normal(k // 128, n).abs() / 256).bfloat16())
    return sets


def gemmtune_call(s: Sets, decision: Decision) -> Call:
    """Return calls of the public op, served by the decision. int4 weights are packed in the layout of its kernel."""
    if s.family == "bf16":
        return lambda i: gemmtune.linear(s.x[i], s.w[i])
    if s.family == "int8":
        return lambda i: gemmtune.int_mm(s.x[i], s.w[i].t())
    if s.family == "fp8":
        return lambda i: gemmtune.scaled_mm(s.x[i], s.w[i].t(), s.x_scale[i], s.w_scale[i], out_dtype=torch.bfloat16)
    options: dict[str, Any] = {} if s.family == "int8wo" else {"bits": 4, "group_size": 128}
    chosen = next((row for row in decision.evidence if row.id == decision.chosen), None)
    layout = None if chosen is None else chosen.packing
    if layout is None:
        return lambda i: gemmtune.mixed_mm(s.x[i], s.w[i].t(), s.w_scale[i], **options)
    packed = [gemmtune.pack(w, scale=scale, layout=layout, **options) for w, scale in zip(s.w, s.w_scale, strict=True)]
    return lambda i: gemmtune.mixed_mm(s.x[i], packed[i])


def without_overlap(call: Call) -> Call:
    """Return the call without PDL: its kernels start after the previous kernel has ended."""

    def run(i: int) -> object:
        previous = os.environ.get(OVERLAP, "1")
        os.environ[OVERLAP] = "0"
        try:
            return call(i)
        finally:
            os.environ[OVERLAP] = previous

    return run


def torch_calls(s: Sets) -> dict[str, Call]:
    """Return PyTorch's eager functions for the family."""
    if s.family == "bf16":
        return {"ATen": lambda i: F.linear(s.x[i], s.w[i])}
    if s.family == "fp8":
        return {
            "ATen": lambda i: torch._scaled_mm(s.x[i], s.w[i].t(), s.x_scale[i], s.w_scale[i], out_dtype=torch.bfloat16)
        }
    if s.family == "int8":
        x = padded_rows(s)
        return {"ATen" if x is s.x else "ATen padded": lambda i: torch._int_mm(x[i], s.w[i].t())[: s.m]}
    if s.family == "int8wo":
        return {"ATen upcast": lambda i: F.linear(s.x[i], s.w[i].to(torch.bfloat16)) * s.w_scale[i]}
    return _int4(s)


def padded_rows(s: Sets) -> list[Tensor]:
    """Return the activations, padded to 17 rows for int8: torch._int_mm requires more than 16."""
    if s.family != "int8" or s.m > 16:
        return s.x
    return [torch.cat([x, x.new_zeros(17 - s.m, s.k)]) for x in s.x]


def _int4(s: Sets) -> dict[str, Call]:
    """Return ``_weight_int4pack_mm``, which torchao calls for bf16 activations, and gemlite if it is installed."""
    return {**_int4pack(s), **_gemlite(s)}


def _gemlite(s: Sets) -> dict[str, Call]:
    """Return Mobius Labs' Triton kernels with the configurations of their package."""
    if importlib.util.find_spec("gemlite") is None:
        return {}
    try:
        from gemlite.helper import A16Wn

        layers = []
        for w, scale in zip(s.w, s.w_scale, strict=True):
            codes = torch.stack((w & 15, w >> 4), dim=-1).reshape(s.n, s.k)
            scales = scale.t().contiguous()
            packer = A16Wn(device="cuda", dtype=torch.bfloat16)
            layers.append(packer.from_weights(codes, scales, torch.full_like(scales, 8), 4, 128))
        layers[0](s.x[0])
    except Exception as error:
        print(f"  gemlite does not run: {error}")
        return {}
    return {"gemlite": lambda i: layers[i](s.x[i])}


def _int4pack(s: Sets) -> dict[str, Call]:
    try:
        # ATen's packing expects the first element of a pair along K in the high nibble.
        swapped = [((w >> 4) | (w << 4)).contiguous() for w in s.w]
        packed = [torch._convert_weight_to_int4pack(w, 8) for w in swapped]
        pairs = [torch.stack((sc, torch.zeros_like(sc)), dim=-1).contiguous() for sc in s.w_scale]
        torch._weight_int4pack_mm(s.x[0], packed[0], 128, pairs[0])
    except Exception as error:
        print(f"  _weight_int4pack_mm does not run: {error}")
        return {}
    return {"int4pack": lambda i: torch._weight_int4pack_mm(s.x[i], packed[i], 128, pairs[i])}


def inductor_calls(s: Sets) -> tuple[dict[str, Call], float]:
    """Return torch.compile max-autotune with ATEN and TRITON, including persistent TMA kernels, and its compile
    seconds.

    The dictionary is empty for a product that Inductor cannot compute, and after a failure.
    """
    import torch._inductor.config as config

    functions: dict[str, Callable[..., Tensor]] = {
        "bf16": lambda x, w: F.linear(x, w),
        "int8": lambda x, w: torch._int_mm(x, w.t()),
        "fp8": lambda x, w, a, b: torch._scaled_mm(x, w.t(), a, b, out_dtype=torch.bfloat16),
        "int8wo": lambda x, w, b: F.linear(x, w.to(torch.bfloat16)) * b,
    }
    if s.family not in functions:
        return {}, 0.0
    scales = [list(group) for group in (s.x_scale, s.w_scale) if group]
    operands = list(zip(padded_rows(s), s.w, *scales, strict=True))
    settings = {
        "max_autotune": True, "max_autotune_gemm_backends": "ATEN,TRITON", "triton.enable_persistent_tma_matmul": True,
        "compile_threads": len(os.sched_getaffinity(0)), "autotune_num_choices_displayed": 0,
    }  # fmt: skip
    torch._dynamo.reset()
    start = time.perf_counter()
    try:
        # The races run under inference_mode: compiled under another mode, it would compile again without these
        # settings.
        with config.patch(settings), torch.inference_mode():
            compiled = torch.compile(functions[s.family], dynamic=False)
            compiled(*operands[0])
    except Exception as error:
        print(f"  Inductor fails: {str(error).splitlines()[0][:150]}")
        return {}, 0.0
    seconds = time.perf_counter() - start
    torch._dynamo.config.error_on_recompile = True
    print(f"  Inductor compiled {s.family} {s.m}x{s.n}x{s.k} in {seconds:.1f} s", flush=True)
    return {AUTOTUNED: lambda i: compiled(*operands[i])[: s.m]}, seconds


def time_graphs(calls: dict[str, Call], sets: int, rounds: int, seed: int = 0) -> dict[str, list[float]]:
    """Return the microseconds per call of every entrant by round. A busy wait before the replays hides their
    launches."""
    graphs, counts = {}, {}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode():
        for name, call in calls.items():
            for i in range(2):
                call(i % sets)
            torch.cuda.synchronize()
            counts[name] = max(sets, int(_GRAPH_S / time_call(call, sets)))
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name], stream=stream):
                for i in range(counts[name]):
                    call(i % sets)
            graphs[name].replay()
        torch.cuda.synchronize()
        times: dict[str, list[float]] = {name: [] for name in calls}
        order, rng = list(calls), random.Random(seed)
        # A read between the entrants evicts the L2, so that no entrant pays for the write-back of the previous one.
        flush = torch.ones(2 * current_target("cuda").caches[2] // 4, dtype=torch.int32, device="cuda")
        for _ in range(rounds):
            rng.shuffle(order)
            torch.cuda._sleep(200_000)
            events = []
            for name in order:
                flush.max()
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                graphs[name].replay()
                last.record()
                events.append((name, first, last))
            torch.cuda.synchronize()
            for name, first, last in events:
                times[name].append(1e3 * first.elapsed_time(last) / counts[name])
    return times


def time_call(call: Call, sets: int) -> float:
    """Return the approximate seconds of one call."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for i in range(5):
        call(i % sets)
    last.record()
    torch.cuda.synchronize()
    return max(1e-6, first.elapsed_time(last) / 5e3)


@dataclass(frozen=True)
class Row:
    """Result of one shape. kernel: the candidate that served it; speedups: over each peer (median, quartiles); floor:
    the time of all memory traffic at the card's bandwidth over gemmtune's time; inductor_s: seconds of compilation."""

    family: str
    m: int
    n: int
    k: int
    kernel: str | None
    speedup: float
    speedups: dict[str, tuple[float, float, float]]
    median_us: dict[str, float]
    floor: float
    inductor_s: float
    rounds_us: dict[str, list[float]] = field(repr=False)


def problem_of(family: str, m: int, n: int, k: int) -> Problem:
    """Return the Problem of the operands that ``make_operands`` returns."""
    return weight_only_problem(m, n, k, bits=4, group=128) if family == "int4wo" else build(m, n, k, family)


def measure(family: str, m: int, n: int, k: int, decision: Decision, args: argparse.Namespace) -> Row:
    """Time gemmtune and every peer on one shape."""
    sets = make_operands(family, m, n, k, current_target("cuda").caches[2])
    served = gemmtune_call(sets, decision)
    calls = {OURS: served, ALONE: without_overlap(served), **torch_calls(sets)}
    compile_s = 0.0
    if args.inductor:
        autotuned, compile_s = inductor_calls(sets)
        calls |= autotuned
    with torch.inference_mode():
        for call in calls.values():
            call(0)
    times = time_graphs(calls, len(sets.x), args.rounds)
    speedups = {name: paired_ratios(times[name], times[OURS]) for name in calls if name not in (OURS, ALONE)}
    medians = {name: statistics.median(values) for name, values in times.items()}
    floor = problem_of(family, m, n, k).min_bytes / _READ * 1e6 / medians[OURS]
    best = min((name for name in speedups), key=lambda name: medians[name], default=None)
    return Row(
        family, m, n, k, decision.chosen, speedups[best].median if best else float("nan"),
        {name: (s.median, s.low, s.high) for name, s in speedups.items()}, medians, floor, compile_s,
        {name: [round(x, 3) for x in values] for name, values in times.items()},
    )  # fmt: skip


def print_row(row: Row) -> None:
    others = "  ".join(f"{name} {us:.1f}" for name, us in row.median_us.items() if name != OURS)
    print(
        f"{row.family:<7} M {row.m:<5} {row.k:>5}->{row.n:<5}  {OURS} {row.median_us[OURS]:8.1f} us  {others}  "
        f"{row.speedup:5.2f}x  {row.floor:4.0%} of the floor  {row.kernel}",
        flush=True,
    )


def print_summary(rows: Sequence[Row]) -> None:
    """Print geometric means of the speed over the best peer by family."""
    for family in dict.fromkeys(row.family for row in rows):
        family_rows = [row for row in rows if row.family == family and row.speedup == row.speedup]
        small_m = [row.speedup for row in family_rows if row.m <= 64]
        large_weights = [row.floor for row in rows if row.family == family and row.m <= 16 and row.n * row.k >= 33e6]
        print(
            f"{family}: M <= 64 {geomean(small_m):.2f}x, all M {geomean([row.speedup for row in family_rows]):.2f}x, "
            f"worst {min((row.speedup for row in family_rows), default=float('nan')):.2f}x; "
            f"of the memory floor at M <= 16: {min(large_weights, default=float('nan')):.0%} at least"
        )


@contextlib.contextmanager
def claim(folder: Path | None, shape: str) -> Iterator[bool]:
    """Yield whether this process is to measure the shape, among the processes that share the folder."""
    if folder is None:
        yield True
        return
    folder.mkdir(parents=True, exist_ok=True)
    claim_file = folder / shape
    try:
        claim_file.touch(exist_ok=False)
    except FileExistsError:
        yield False
        return
    try:
        yield True
    except BaseException:
        claim_file.unlink()  # not measured: another process may measure it
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--m", default=",".join(map(str, ROWS)))
    parser.add_argument("--weights", default=",".join(f"{k}x{n}" for k, n in WEIGHTS), help="KxN,KxN")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--share", type=Path, help="folder: processes with this folder divide the shapes")
    parser.add_argument("--budget", type=float, default=None, help="seconds of tuning a problem")
    args = parser.parse_args()
    ms = [int(m) for m in args.m.split(",")]
    weights = [tuple(map(int, pair.split("x"))) for pair in args.weights.split(",")]
    rows: list[Row] = []
    for family in args.families.split(","):
        problems = [(problem_of(family, m, n, k), 1) for k, n in weights for m in ms]
        start = time.perf_counter()
        decisions = gemmtune.tune(problems, device="cuda", budget=args.budget)
        seconds = time.perf_counter() - start
        tried = [sum(row.verdict is not None or row.sample is not None for row in d.evidence) for d in decisions]
        tuning = {
            "seconds": seconds, "problems": len(decisions), "tried": tried, "each_s": [d.seconds for d in decisions],
        }  # fmt: skip
        winners = sum(d.outcome == "winner" for d in decisions)
        print(
            f"{family}: {len(decisions)} problems tuned in {seconds:.0f} s, {statistics.mean(tried):.0f} candidates "
            f"each, {winners} winners"
        )
        gemmtune.refresh()
        by_key = {Problem.from_dict(d.problem).key: d for d in decisions}
        family_rows: list[Row] = []
        try:
            for k, n in weights:
                for m in ms:
                    with claim(args.share, f"{family}-{m}x{n}x{k}") as is_claimed:
                        if is_claimed:
                            family_rows.append(measure(family, m, n, k, by_key[problem_of(family, m, n, k).key], args))
                            print_row(family_rows[-1])
                    gc.collect()
                    torch.cuda.empty_cache()
        finally:
            rows += family_rows
            gpu = current_target("cuda").to_dict()
            write_results("h200", [asdict(row) for row in family_rows], tuning={family: tuning}, gpu=gpu)
    print_summary(rows)


if __name__ == "__main__":
    main()
