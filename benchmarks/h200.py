"""Kernels that gemmtune chose on a GPU against PyTorch's, interleaved in CUDA graphs over operands beyond the L2.

    python benchmarks/h200.py                              five families, M = 1 16 64 256 1024 4096, llama weights
    python benchmarks/h200.py --families bf16 --m 1,16     part of it
    python benchmarks/h200.py --inductor                   also torch.compile max-autotune (10 to 20 minutes a family)
    CUDA_VISIBLE_DEVICES=1 python benchmarks/h200.py --share DIR  beside another of the same DIR: they share the shapes

Decisions come from the store ($GEMMTUNE_STORE, default .gemmtune/gpu.db); what is missing is tuned first, and what that
took is reported. A turn is one replay of a graph of many calls, each on other operands; all entrants of a shape take
turns, in random order. Writes the raw rounds to benchmarks/results/ (or to $OUT), a file a family, also when it is
interrupted.
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
from harness import geomean, ratios, write
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
COLD = 16  # times the L2 that the operands of one graph come to
_TURN_S = 2e-3  # starting a graph takes some 8 us, which belongs to no call

OURS, ALONE = "gemmtune", "alone"  # as served, where a kernel may overlap the one before it; and where it may not
AUTOTUNED = "Inductor"

Call = Callable[[int], object]


@dataclass
class Sets:
    """Operand sets of one shape, as PyTorch's users hold them: x [M, K], w [N, K], scales."""

    family: str
    m: int
    n: int
    k: int
    x: list[Tensor]
    w: list[Tensor]
    x_scale: list[Tensor] = field(default_factory=list)
    w_scale: list[Tensor] = field(default_factory=list)


def draw(family: str, m: int, n: int, k: int, l2: int) -> Sets:
    """Random operands over their types' range; as many sets as exceed the L2 several times."""
    size = n * k * {"bf16": 2.0, "int4wo": 0.5}.get(family, 1.0) + m * k * 2 + m * n * 2
    count = max(2, min(64, int(COLD * l2 / size) + 1))
    made = Sets(family, m, n, k, [], [])
    generator = torch.Generator("cuda").manual_seed(m * 31 + n)

    def bytes_(*shape: int) -> Tensor:
        return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda", generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    for _ in range(count):
        if family == "bf16":
            made.x.append(normal(m, k).bfloat16())
            made.w.append(normal(n, k).bfloat16())
        elif family == "int8":
            made.x.append(bytes_(m, k))
            made.w.append(bytes_(n, k))
        elif family == "fp8":
            made.x.append(normal(m, k).to(torch.float8_e4m3fn))
            made.w.append(normal(n, k).to(torch.float8_e4m3fn))
            made.x_scale.append(normal(m, 1).abs() + 0.5)
            made.w_scale.append(normal(1, n).abs() + 0.5)
        elif family == "int8wo":
            made.x.append(normal(m, k).bfloat16())
            made.w.append(bytes_(n, k))
            made.w_scale.append((normal(n).abs() / 4096).bfloat16())
        else:
            made.x.append(normal(m, k).bfloat16())
            made.w.append(bytes_(n, k // 2).view(torch.uint8))
            made.w_scale.append((normal(k // 128, n).abs() / 256).bfloat16())
    return made


def ours(s: Sets, decision: Decision) -> Call:
    """The public op with the decision in force. int4 weights are packed as the decision's kernel wants them."""
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


def alone(call: Call) -> Call:
    """The call, captured so that it begins when the one before it has ended."""

    def apart(i: int) -> object:
        held = os.environ.get(OVERLAP, "1")
        os.environ[OVERLAP] = "0"
        try:
            return call(i)
        finally:
            os.environ[OVERLAP] = held

    return apart


def plain(s: Sets) -> dict[str, Call]:
    """What users call today."""
    if s.family == "bf16":
        return {"ATen": lambda i: F.linear(s.x[i], s.w[i])}
    if s.family == "fp8":
        return {
            "ATen": lambda i: torch._scaled_mm(s.x[i], s.w[i].t(), s.x_scale[i], s.w_scale[i], out_dtype=torch.bfloat16)
        }
    if s.family == "int8":
        x = padded(s)
        return {"ATen" if x is s.x else "ATen padded": lambda i: torch._int_mm(x[i], s.w[i].t())[: s.m]}
    if s.family == "int8wo":
        return {"ATen upcast": lambda i: F.linear(s.x[i], s.w[i].to(torch.bfloat16)) * s.w_scale[i]}
    return _int4(s)


def padded(s: Sets) -> list[Tensor]:
    """The rows that int8's users hand to torch._int_mm, which wants more than 16: fewer are padded."""
    if s.family != "int8" or s.m > 16:
        return s.x
    return [torch.cat([x, x.new_zeros(17 - s.m, s.k)]) for x in s.x]


def _int4(s: Sets) -> dict[str, Call]:
    """``_weight_int4pack_mm``, which is what torchao runs for bf16 activations, and gemlite where it is installed."""
    return {**_int4pack(s), **_gemlite(s)}


def _gemlite(s: Sets) -> dict[str, Call]:
    """Mobius Labs' Triton kernels, with the configurations that they come with."""
    if importlib.util.find_spec("gemlite") is None:
        return {}
    try:
        from gemlite.helper import A16Wn

        layers = []
        for w, scale in zip(s.w, s.w_scale, strict=True):
            codes = torch.stack((w & 15, w >> 4), dim=-1).reshape(s.n, s.k)
            scales = scale.t().contiguous()
            maker = A16Wn(device="cuda", dtype=torch.bfloat16)
            layers.append(maker.from_weights(codes, scales, torch.full_like(scales, 8), 4, 128))
        layers[0](s.x[0])
    except Exception as error:
        print(f"  gemlite does not run: {error}")
        return {}
    return {"gemlite": lambda i: layers[i](s.x[i])}


def _int4pack(s: Sets) -> dict[str, Call]:
    try:
        # Its packing reads pairs along K with the first element in the high half.
        swapped = [((w >> 4) | (w << 4)).contiguous() for w in s.w]
        blocks = [torch._convert_weight_to_int4pack(w, 8) for w in swapped]
        pairs = [torch.stack((sc, torch.zeros_like(sc)), dim=-1).contiguous() for sc in s.w_scale]
        torch._weight_int4pack_mm(s.x[0], blocks[0], 128, pairs[0])
    except Exception as error:
        print(f"  _weight_int4pack_mm does not run: {error}")
        return {}
    return {"int4pack": lambda i: torch._weight_int4pack_mm(s.x[i], blocks[i], 128, pairs[i])}


def inductor(s: Sets) -> tuple[dict[str, Call], float]:
    """torch.compile max-autotune with ATEN and TRITON, persistent TMA kernels allowed; and the seconds that it took.

    Nothing where it has no way to the product, or fails.
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
    operands = list(zip(padded(s), s.w, *scales, strict=True))
    settings = {
        "max_autotune": True, "max_autotune_gemm_backends": "ATEN,TRITON", "triton.enable_persistent_tma_matmul": True,
        "compile_threads": len(os.sched_getaffinity(0)), "autotune_num_choices_displayed": 0,
    }  # fmt: skip
    torch._dynamo.reset()
    start = time.perf_counter()
    try:
        # In the mode of the race, or it would compile again there, without these settings.
        with config.patch(settings), torch.inference_mode():
            compiled = torch.compile(functions[s.family], dynamic=False)
            compiled(*operands[0])
    except Exception as error:
        print(f"  Inductor fails: {str(error).splitlines()[0][:150]}")
        return {}, 0.0
    took = time.perf_counter() - start
    torch._dynamo.config.error_on_recompile = True
    print(f"  Inductor compiled {s.family} {s.m}x{s.n}x{s.k} in {took:.1f} s", flush=True)
    return {AUTOTUNED: lambda i: compiled(*operands[i])[: s.m]}, took


def race(calls: dict[str, Call], sets: int, rounds: int, seed: int = 0) -> dict[str, list[float]]:
    """Microseconds a call by round, each entrant's graph replayed once a round behind a wait that hides its launch."""
    graphs, counts = {}, {}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode():
        for name, call in calls.items():
            for i in range(2):
                call(i % sets)
            torch.cuda.synchronize()
            once = _once(call, sets)
            counts[name] = max(sets, int(_TURN_S / once))
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name], stream=stream):
                for i in range(counts[name]):
                    call(i % sets)
            graphs[name].replay()
        torch.cuda.synchronize()
        times: dict[str, list[float]] = {name: [] for name in calls}
        order, rng = list(calls), random.Random(seed)
        # Read between the entrants: what one leaves in the L2 to be written back is no cost of the next one's.
        between = torch.ones(2 * current_target("cuda").caches[2] // 4, dtype=torch.int32, device="cuda")
        for _ in range(rounds):
            rng.shuffle(order)
            torch.cuda._sleep(200_000)
            marks = []
            for name in order:
                between.max()
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                graphs[name].replay()
                last.record()
                marks.append((name, first, last))
            torch.cuda.synchronize()
            for name, first, last in marks:
                times[name].append(1e3 * first.elapsed_time(last) / counts[name])
    return times


def _once(call: Call, sets: int) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for i in range(5):
        call(i % sets)
    last.record()
    torch.cuda.synchronize()
    return max(1e-6, first.elapsed_time(last) / 5e3)


@dataclass(frozen=True)
class Row:
    """One shape: who served it, microseconds, speed over each peer (median, quartiles), share of the memory floor, the
    seconds of Inductor's compiling."""

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
    """The Problem that the public op makes of a set of ``draw``."""
    return weight_only_problem(m, n, k, bits=4, group=128) if family == "int4wo" else build(m, n, k, family)


def measure(family: str, m: int, n: int, k: int, decision: Decision, args: argparse.Namespace) -> Row:
    """Race what gemmtune serves against every peer on one shape."""
    sets = draw(family, m, n, k, current_target("cuda").caches[2])
    own = ours(sets, decision)
    calls = {OURS: own, ALONE: alone(own), **plain(sets)}
    compiling = 0.0
    if args.inductor:
        more, compiling = inductor(sets)
        calls |= more
    with torch.inference_mode():
        for call in calls.values():
            call(0)
    times = race(calls, len(sets.x), args.rounds)
    speedups = {name: ratios(times[name], times[OURS]) for name in calls if name not in (OURS, ALONE)}
    medians = {name: statistics.median(values) for name, values in times.items()}
    floor = problem_of(family, m, n, k).min_bytes / _READ * 1e6 / medians[OURS]
    best = min((name for name in speedups), key=lambda name: medians[name], default=None)
    return Row(
        family, m, n, k, decision.chosen, speedups[best].median if best else float("nan"),
        {name: (s.median, s.low, s.high) for name, s in speedups.items()}, medians, floor, compiling,
        {name: [round(x, 3) for x in values] for name, values in times.items()},
    )  # fmt: skip


def show(row: Row) -> None:
    others = "  ".join(f"{name} {us:.1f}" for name, us in row.median_us.items() if name != OURS)
    print(
        f"{row.family:<7} M {row.m:<5} {row.k:>5}->{row.n:<5}  {OURS} {row.median_us[OURS]:8.1f} us  {others}  "
        f"{row.speedup:5.2f}x  {row.floor:4.0%} of the floor  {row.kernel}",
        flush=True,
    )


def summary(rows: Sequence[Row]) -> None:
    """The bars' figures: geometric means of the speed over the best peer."""
    for family in dict.fromkeys(row.family for row in rows):
        own = [row for row in rows if row.family == family and row.speedup == row.speedup]
        few = [row.speedup for row in own if row.m <= 64]
        large = [row.floor for row in rows if row.family == family and row.m <= 16 and row.n * row.k >= 33e6]
        print(
            f"{family}: M <= 64 {geomean(few):.2f}x, all M {geomean([row.speedup for row in own]):.2f}x, "
            f"worst {min((row.speedup for row in own), default=float('nan')):.2f}x; "
            f"of the memory floor at M <= 16: {min(large, default=float('nan')):.0%} at least"
        )


@contextlib.contextmanager
def claimed(folder: Path | None, shape: str) -> Iterator[bool]:
    """Whether this process is the one to measure the shape, among those that share the folder."""
    if folder is None:
        yield True
        return
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / shape
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        yield False
        return
    try:
        yield True
    except BaseException:
        mark.unlink()  # not measured: another may
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--m", default=",".join(map(str, ROWS)))
    parser.add_argument("--weights", default=",".join(f"{k}x{n}" for k, n in WEIGHTS), help="KxN,KxN")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--share", type=Path, help="a folder: shapes that another process took there are left to it")
    parser.add_argument("--budget", type=float, default=None, help="seconds of tuning a problem")
    args = parser.parse_args()
    ms = [int(m) for m in args.m.split(",")]
    weights = [tuple(map(int, pair.split("x"))) for pair in args.weights.split(",")]
    rows: list[Row] = []
    for family in args.families.split(","):
        problems = [(problem_of(family, m, n, k), 1) for k, n in weights for m in ms]
        start = time.perf_counter()
        decisions = gemmtune.tune(problems, device="cuda", budget=args.budget)
        took = time.perf_counter() - start
        tried = [sum(row.verdict is not None or row.sample is not None for row in d.evidence) for d in decisions]
        spent = {
            "seconds": took, "problems": len(decisions), "tried": tried, "each_s": [d.seconds for d in decisions],
        }  # fmt: skip
        won = sum(d.outcome == "winner" for d in decisions)
        print(
            f"{family}: {len(decisions)} problems tuned in {took:.0f} s, {statistics.mean(tried):.0f} candidates each, "
            f"{won} winners"
        )
        gemmtune.refresh()
        by_key = {Problem.from_dict(d.problem).key: d for d in decisions}
        own: list[Row] = []
        try:
            for k, n in weights:
                for m in ms:
                    with claimed(args.share, f"{family}-{m}x{n}x{k}") as mine:
                        if mine:
                            own.append(measure(family, m, n, k, by_key[problem_of(family, m, n, k).key], args))
                            show(own[-1])
                    gc.collect()
                    torch.cuda.empty_cache()
        finally:
            rows += own
            gpu = current_target("cuda").to_dict()
            write("h200", [asdict(row) for row in own], tuning={family: spent}, gpu=gpu)
    summary(rows)


if __name__ == "__main__":
    main()
