"""Check what Plans serve: random products of random M, each compared with an oracle in float64.

    python benchmarks/every_m_products.py                                300 products, on a GPU where there is one
    python benchmarks/every_m_products.py --device cpu --count 5000      --busy where other processes use the cores
    python benchmarks/every_m_products.py --device cuda --count 2000
    python benchmarks/every_m_products.py --seed 0 --store .gemmtune/every-m-products.db --only 17      product 17 again

A few small weights of each family are tuned for a range of M (``gemmtune.tune(problems, m=range(...))``): K and N from
16 to 1024, odd ones too, row-major and column-major, each with an epilogue. Each product then draws a weight, an M in
the range or up to four times its end, activations (dense, with gaps between rows, column-major, and at a misaligned
address), and whether the weight is packed. It is served by the public op, twice: the second call is served from the
dispatch cache. ``out=`` is filled with NaN at first, then with the largest number (integers: two different bytes),
between guards.

A result is right if every element, and the result as a whole, is within the error bound of gemmtune.verify; int32 is
exact. Where plain PyTorch serves, a result may also be within the bound of PyTorch's own expression, which converts
weights to the activations' dtype and rounds after each function. Raw data is written to benchmarks/results/ (or $OUT).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("GEMMTUNE_STORE", str(Path(".gemmtune") / "every-m-products.db"))

import torch
from harness import write_results
from torch import Tensor

import gemmtune
from gemmtune import fuse
from gemmtune.backends.aten.fusion import addmm_prefix
from gemmtune.backends.aten.quantized import dequantize
from gemmtune.backends.base import Kernel
from gemmtune.core.epilogue import Epilogue, Step
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.weights import PackedWeight, QuantWeight
from gemmtune.core.workloads import build, linear_problem, weight_only_problem
from gemmtune.dispatch import RUNTIME, current_target
from gemmtune.dispatch.runtime import Choice, Runtime
from gemmtune.store import open_store
from gemmtune.store.base import Store
from gemmtune.timing import devices
from gemmtune.tuning import worker_pool
from gemmtune.verify.compare import compare
from gemmtune.verify.inputs import GUARD, Inputs, make_inputs
from gemmtune.verify.oracle import reference
from gemmtune.verify.reference_cases import ReferenceCase, tolerance_of
from gemmtune.verify.verify import GUARD_BYTE, guarded, unwritten
from gemmtune.workers.local_worker import LocalWorker

Row = dict[str, Any]

FAMILIES = {"cpu": "fp32,bf16,fp16,int8,int8wo,int4wo", "cuda": "bf16,fp16,int8,int8wo,int4wo,fp8"}
LAST = {"cpu": (24, 160), "cuda": (64, 1024)}  # the range of M ends between these
_FLOATS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class TunedWeight:
    """A weight that was tuned for M from 1 to ``last``. problem: at M = 16. packed: None before all are
    tuned, and where no kernel takes a packed form of it."""

    family: str
    problem: Problem
    last: int
    b: Tensor | QuantWeight
    packed: PackedWeight | None
    has_plan: bool


def epilogues(family: str) -> list[tuple[Epilogue, str]]:
    """Return epilogues for products of a family, each with the dtype of the output."""
    if family == "int8":
        scales = (Step("scale", "col", "float32"), Step("scale", "row", "float32"))
        requantized = (Step("scale", "col", "float32"), Step("bias", "col", "float32"), Step("relu"))
        return [((), "int32"), ((Step("relu"),), "int32"), (scales, "bfloat16"), (requantized, "int8")]
    if family == "fp8":
        bias = Step("bias", "col", "bfloat16")
        by_row = (Step("scale", "row", "float32"), Step("scale", "col", "float32"))
        by_tensor = (Step("scale", "tensor", "float32"), Step("scale", "tensor", "float32"))
        return [(by_row, "bfloat16"), ((*by_row, bias), "bfloat16"), (by_tensor, "bfloat16")]
    dtype = _FLOATS.get(family, "bfloat16")
    bias, residual, gate = Step("bias", "col", dtype), Step("add", "full", dtype), Step("mul", "full", dtype)
    return [
        (steps, dtype)
        for steps in ((), (bias,), (bias, Step("gelu")), (residual,), (Step("silu"), gate), (Step("relu"),))
    ]


def draw_problem(family: str, rng: random.Random) -> Problem:
    """Return the Problem of a random weight of a family, at M = 16."""

    def size() -> int:
        drawn = round(16.0 * math.pow(64.0, rng.random()))
        return drawn if rng.random() < 0.5 and family != "fp8" else drawn - drawn % 16

    k, n = size(), size()
    k += k % 2 if family == "int4wo" else 0  # two values to a byte: pack() takes an even K
    problem = linear_problem(16, n, k, _FLOATS[family]) if family in _FLOATS else build(16, n, k, family)
    if family == "int4wo" and k <= 128:  # a single group is described as none
        problem = weight_only_problem(16, n, k, bits=4, zero_point=True)
    steps, out_dtype = rng.choice(epilogues(family))
    layout = Layout("col" if family == "fp8" or rng.random() < 0.6 else "row")
    return replace(problem, b=replace(problem.b, layout=layout), epilogue=steps, out_dtype=out_dtype)


def tune_weight(family: str, index: int, args: argparse.Namespace, store: Store) -> TunedWeight:
    """Draw a weight, and tune it unless the store has a plan for it."""
    rng, device = random.Random(f"{args.seed} {family} {index}"), torch.device(args.device)
    problem, last = draw_problem(family, rng), rng.randint(*LAST[args.device])
    target = current_target(device)
    if store.get_plan(target, problem.plan_key) is None and args.only is None:
        gemmtune.tune([problem], m=range(1, last + 1), budget=args.budget, store=store, device=device)
    b = make_inputs(problem, rng.randrange(1 << 30), device=device).b
    has_plan = store.get_plan(target, problem.plan_key) is not None
    return TunedWeight(family, problem, last, b, None, has_plan)


def pack(problem: Problem, b: Tensor | QuantWeight) -> PackedWeight | None:
    """Return the weight in the layout that its plan ranks first; None where it has none."""
    if problem.family == "scaled_mm":
        return None
    try:
        if isinstance(b, Tensor):
            return gemmtune.pack(b.t(), m=[problem])
        bits = 4 if b.dtype == "int4" else 8
        return gemmtune.pack(
            b.data.t(), scale=b.scale, zero_point=b.zero_point, bits=bits, group_size=b.quant.group, m=[problem]
        )
    except gemmtune.UnsupportedError:
        return None


@dataclass(frozen=True)
class Product:
    """A product to serve: a Problem whose A has the layout of the activations, with operands that ``inputs`` draws.

    offset: elements from an aligned address to the operands and the output.
    """

    weight: TunedWeight
    problem: Problem
    packed: bool
    offset: int
    seed: int

    @classmethod
    def draw(cls, weights: Sequence[TunedWeight], rng: random.Random) -> Product:
        weight = rng.choice(weights)
        m = rng.randint(1, weight.last) if rng.random() < 0.75 else rng.randint(weight.last + 1, 4 * weight.last)
        layouts = (Layout(), Layout("row", weight.problem.k + rng.randint(1, 9)), Layout("col"))
        (layout,) = rng.choices(layouts, (0.6, 0.2, 0.2))
        if weight.family == "fp8":  # what cuBLASLt's fp8 products take
            layout = Layout()
        problem = replace(weight.problem, m=m, a=replace(weight.problem.a, layout=layout))
        packed = weight.packed is not None and rng.random() < 0.6
        return cls(weight, problem, packed, rng.choice((0, 0, 1)), rng.randrange(1 << 30))

    def inputs(self, device: torch.device) -> Inputs:
        return make_inputs(self.problem, self.seed, device=device, b=self.weight.b, offset=self.offset)

    def serve(self, inputs: Inputs, out: Tensor) -> Tensor:
        """Call the public op. It writes ``out``, except for scaled_mm, which has no such argument."""
        problem, a = self.problem, inputs.a
        b: Any = self.weight.packed if self.packed else inputs.b
        dtype = getattr(torch, problem.out_dtype)
        if problem.family == "scaled_mm":
            scale_a, scale_b, *rest = inputs.aux
            if problem.epilogue[0].axis == "row":
                scale_a, scale_b = scale_a.view(-1, 1), scale_b.view(1, -1)
            return gemmtune.scaled_mm(a, b, scale_a, scale_b, rest[0] if rest else None, out_dtype=dtype)
        tensors = iter(inputs.aux)
        steps = [
            fuse.BoundStep(step, next(tensors), step.axis) if step.takes_tensor else fuse.BoundStep(step)
            for step in problem.epilogue
        ]
        if problem.family == "int_mm":
            return gemmtune.int_mm(a, b, out_dtype=dtype, epilogue=steps, out=out)
        if problem.family == "mm":
            return gemmtune.mm(a, b, epilogue=steps, out=out)
        bits = 4 if problem.b.dtype == "int4" else 8
        if isinstance(b, QuantWeight):
            options: Row = {"bits": bits, "group_size": b.quant.group}
            return gemmtune.mixed_mm(a, b.data, b.scale, b.zero_point, **options, epilogue=steps, out=out)
        return gemmtune.mixed_mm(a, b, bits=bits, epilogue=steps, out=out)


class Witness:
    """Notes what dispatch chooses for calls that its cache does not serve. chosen: the last kernel; None: PyTorch."""

    def __init__(self) -> None:
        self.chosen: Kernel | None = None
        self.calls = 0
        choose, of_size = Runtime.choose, Runtime.kernel_of_size

        def choose_and_note(runtime: Runtime, *args: Any, **options: Any) -> Choice:
            self.calls += 1
            choice = choose(runtime, *args, **options)
            self.chosen = choice.kernel
            return choice

        def note_kernel(runtime: Runtime, *args: Any) -> Kernel | None:
            self.calls += 1
            self.chosen = of_size(runtime, *args)
            return self.chosen

        Runtime.choose, Runtime.kernel_of_size = choose_and_note, note_kernel  # type: ignore[method-assign]


def torch_form(problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
    """Return PyTorch's expression of a product (``dispatch.fallback``) as a Problem: the weight is converted to the
    activations' dtype, and every function's result is rounded to it."""
    b, dtype = inputs.b, problem.a.dtype
    cast, steps, aux = Step("cast", dtype=dtype), problem.epilogue, inputs.aux
    if isinstance(b, QuantWeight) and b.dtype == "int8" and b.quant.group is None and b.zero_point is None:
        steps, aux = (Step("scale", "col", b.quant.scale_dtype), cast, *steps), (b.scale, *aux)
        b = b.data.to(getattr(torch, dtype))
    elif isinstance(b, QuantWeight):
        b = dequantize(b, getattr(torch, dtype))
    fused = addmm_prefix(problem).steps if problem.family == "mm" else 0
    steps = (cast, *steps[:fused], cast, *steps[fused:])
    form = replace(problem, family="mm", b=Operand(dtype, problem.b.layout), epilogue=steps)
    return form, replace(inputs, b=b, aux=aux)


def references(problem: Problem, inputs: Inputs, by_torch: bool) -> list[tuple[Problem, ReferenceCase]]:
    """Return the expected result, and for what plain PyTorch serves also that of PyTorch's own expression."""
    forms = [(problem, inputs)]
    if by_torch and problem.family in ("mm", "mixed_mm"):
        forms.append(torch_form(problem, inputs))
    oracles = [reference(form, operands.a, operands.b, operands.aux) for form, operands in forms]
    return [
        (form, ReferenceCase(operands, oracle.value, tolerance_of(form, oracle), "uniform"))
        for (form, operands), oracle in zip(forms, oracles, strict=True)
    ]


def check_product(product: Product, witness: Witness, seen: dict[Any, str], device: torch.device) -> Row:
    """Serve a product twice and compare both results. ``finding`` is empty where they are right."""
    problem, inputs, calls = product.problem, product.inputs(device), witness.calls
    frames = [guarded(problem, device, poison, product.offset) for poison in (0, 1)]
    results = [product.serve(inputs, out) for _, out in frames]
    key = (id(product.weight), product.packed, problem.m, problem.a.layout.key)
    if witness.calls > calls:
        seen[key] = "PyTorch" if witness.chosen is None else witness.chosen.candidate.id
    serves = seen.get(key, "PyTorch")
    cases = references(problem, inputs, serves == "PyTorch")
    worst, finding = 0.0, ""
    for result in results:
        worst, finding = max((worst, finding), min(compare(form, case, result) for form, case in cases))
    finding = finding or ("" if problem.family == "scaled_mm" else unwritten(problem, *results))
    start = GUARD + product.offset * results[0].element_size()
    for frame, _ in frames:
        around = torch.cat([frame[:start], frame[frame.numel() - GUARD :]])
        finding = finding or ("" if bool((around == GUARD_BYTE).all()) else "bytes beside the output were overwritten")
    return {
        "family": product.weight.family, "problem": problem.key, "in_range": problem.m <= product.weight.last,
        "packed": product.packed, "offset": product.offset, "serves": serves, "worst": min(worst, 1e30),
        "finding": finding,
    }  # fmt: skip


_COLUMNS = (
    "family", "weights", "with plan", "products", "packed", "beyond range", "by kernel", "by ATen", "worst", "wrong",
)  # fmt: skip


def print_table(weights: Sequence[TunedWeight], rows: Sequence[Row]) -> None:
    """Print a line a family. by ATen: plain PyTorch, and ATen's candidates. worst: the largest error over the bound."""
    print("".join(f"{name:>14}" for name in _COLUMNS))
    for family in [*dict.fromkeys(weight.family for weight in weights), "all"]:
        own = [row for row in rows if family in (row["family"], "all")]
        made = [weight for weight in weights if family in (weight.family, "all")]
        by_aten = sum(row["serves"].partition("/")[0] in ("PyTorch", "aten") for row in own)
        cells = (
            family, len(made), sum(weight.has_plan for weight in made), len(own), sum(row["packed"] for row in own),
            sum(not row["in_range"] for row in own), len(own) - by_aten, by_aten,
            f"{max((row['worst'] for row in own), default=math.nan):.3g}", sum(bool(row["finding"]) for row in own),
        )  # fmt: skip
        print("".join(f"{cell:>14}" for cell in cells))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=300, help="products [300]")
    parser.add_argument("--families", help="comma separated; GPU: [{cuda}], CPU: [{cpu}]".format(**FAMILIES))
    parser.add_argument("--weights", type=int, default=4, help="weights of a family [4]")
    parser.add_argument("--seed", type=int, default=0, help="of all random draws [0]")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds of tuning for each tuned M [0.3]")
    parser.add_argument("--threads", type=int, default=1, help="threads on a CPU [1]")
    parser.add_argument("--store", type=Path, help="tune into this store, and use what it has [a new one for the seed]")
    parser.add_argument("--only", type=int, help="check the product with this number alone, with the store's plans")
    parser.add_argument("--busy", action="store_true", help="decide although other processes use the cores")
    args = parser.parse_args()
    args.families = (args.families or FAMILIES[args.device]).split(",")
    return args


def decide_on_a_busy_host() -> None:
    """Tune in this process, and never call the machine disturbed: whether the decisions are the best is not checked
    here."""

    def make_worker(target: Any, *, limits: object, hosts: object, **options: Any) -> LocalWorker:
        return LocalWorker(target, **options)

    worker_pool.Worker = make_worker  # type: ignore[assignment,attr-defined]
    devices.HostTiming.machine = None  # type: ignore[assignment]


def main() -> None:
    args = parse_arguments()
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    if args.busy:
        decide_on_a_busy_host()
    path = args.store or Path(".gemmtune") / f"every-m-products-{args.seed}-{int(time.time())}.db"
    path.parent.mkdir(parents=True, exist_ok=True)
    store = open_store(path)
    RUNTIME.refresh(store)
    start, device = time.perf_counter(), torch.device(args.device)
    weights = [tune_weight(family, index, args, store) for family in args.families for index in range(args.weights)]
    RUNTIME.refresh(store)
    weights = [replace(weight, packed=pack(weight.problem, weight.b)) for weight in weights]  # by the plans of all
    print(f"{len(weights)} weights tuned in {time.perf_counter() - start:.0f} s into {path}", flush=True)
    witness, seen, rows = Witness(), dict[Any, str](), list[Row]()
    for number in range(args.count) if args.only is None else (args.only,):
        product = Product.draw(weights, random.Random(f"{args.seed} {number}"))
        rows.append({"number": number, **check_product(product, witness, seen, device)})
        if rows[-1]["finding"]:
            again = f"--device {args.device} --seed {args.seed} --weights {args.weights} --store {path} --only {number}"
            again += f" --families {','.join(args.families)} --threads {args.threads}"
            print(f"WRONG: {rows[-1]}\n    again: python benchmarks/every_m_products.py {again}", flush=True)
    print_table(weights, rows)
    kernels = dict(Counter(row["serves"] for row in rows))
    print(f"{len(kernels)} different kernels served; {time.perf_counter() - start:.0f} s")
    write_results("every-m-products", rows, arguments={**vars(args), "store": str(path)}, kernels=kernels)
    raise SystemExit(any(row["finding"] for row in rows))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
