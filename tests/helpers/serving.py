"""Toy backend whose kernels record their runs, and Decisions that make dispatch serve its kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from gemmtune import backends
from gemmtune.backends.aten import AtenBackend
from gemmtune.backends.aten.quantized import dequantize
from gemmtune.backends.aten.steps import apply_steps, dtype_of, round_to_dtype
from gemmtune.backends.base import Artifact, Availability, Backend, Kernel, Launch
from gemmtune.core.candidate import Candidate, Illegal
from gemmtune.core.decision import Decision, Evidence, Sample, Verdict
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.core.tuned_plan import PlanInterval, PlanKernel, TunedPlan
from gemmtune.core.weights import PackedWeight, QuantWeight
from gemmtune.dispatch import RUNTIME, current_target
from gemmtune.store.base import Store

# Each entry has the candidate's id, the M that the kernel was loaded for, and the number of rows of the call.
TOY_RUNS: list[tuple[str, int, int]] = []


class ToyKernel(Kernel):
    """Correct, slow kernel that multiplies in float64 and appends an entry to ``TOY_RUNS``."""

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        self.problem, self.candidate = problem, candidate
        layout = str(candidate["layout"])
        self.packing = f"toy:{layout}" if layout else None

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        TOY_RUNS.append((self.candidate.id, self.problem.m, a.shape[-2]))
        raw = ToyBackend().unpack(b) if isinstance(b, PackedWeight) else b
        weight = dequantize(raw, dtype_of("float64")) if isinstance(raw, QuantWeight) else raw.double()
        acc = a.double() @ weight
        if self.problem.family == "int_mm":
            acc = acc.to(dtype_of("int32"))
        out.copy_(round_to_dtype(apply_steps(acc, self.problem.epilogue, aux), out.dtype))

    def pack(self, b: Any) -> PackedWeight:
        p = self.problem
        data: tuple[Tensor, ...] = (b.clone(),) if isinstance(b, Tensor) else (b.data.clone(), b.scale.clone())
        if isinstance(b, QuantWeight) and b.zero_point is not None:
            data = (*data, b.zero_point.clone())
        return PackedWeight(self.packing or "", data, p.n, p.k, p.b.dtype, p.b.quant, "toy", p.b.layout.order)


def bind_toy(kernel: ToyKernel, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Launch | None:
    """Return a launch of the toy kernel that fixes shapes and strides, and accepts any view of the memory."""
    if not isinstance(b, Tensor | PackedWeight):
        return None
    shapes, a_layout, packed = [t.shape for t in aux], (a.shape, a.stride()), b if isinstance(b, PackedWeight) else None
    b_layout = () if packed is not None else (b.shape, b.stride())
    out_shape = (*a.shape[:-1], kernel.problem.n)

    def launch(out: Tensor, x: Tensor, raw: Tensor, *rest: Tensor) -> None:
        aux_views = [t.view(shape) for t, shape in zip(rest, shapes, strict=True)]
        kernel.run(
            x.as_strided(*a_layout),
            raw.as_strided(*b_layout) if packed is None else packed,
            aux_views,
            out.view(out_shape),
        )

    return launch


def bind_toy_any_m(kernel: ToyKernel, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Launch | None:
    """Return a launch of the toy kernel for dense operands with any M."""
    if not isinstance(b, Tensor | PackedWeight):
        return None
    axes = [step.axis for step in kernel.problem.epilogue if step.takes_tensor]

    def launch(out: Tensor, *operands: Tensor) -> None:
        m = out.numel() // kernel.problem.n
        sized = [
            tensor.new_empty(m, *tensor.shape[1:]) if axis in ("row", "full") else tensor
            for tensor, axis in zip(aux, axes, strict=True)
        ]  # fmt: skip
        bound = bind_toy(kernel, a.new_empty(m, a.shape[1]), b, sized)
        assert bound is not None
        bound(out, *operands)

    return launch


class ToyBackend(Backend):
    name = "toy"

    def available(self, target: Target) -> Availability:
        return Availability(True)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        for layout in ("plain", "other", ""):
            yield toy(layout)

    def why_illegal(self, problem: Problem, candidate: Candidate, target: Target) -> str:
        """Return "" for any integer tag: ``candidates`` cannot list them all."""
        legal = candidate.identity[:2] == ("toy", "slow") and set(dict(candidate.config)) == {"layout", "tag"}
        return "" if legal and type(candidate["tag"]) is int else "it is no toy"

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        return ToyKernel(problem, artifact.candidate)

    def source_digest(self) -> str:
        return "toy1"

    def why_unreadable(self, packed: PackedWeight) -> str:
        return "" if packed.machine == "toy" else f"it was packed for {packed.machine}"

    def unpack(self, packed: PackedWeight) -> Any:
        if packed.quant is None:
            return packed.data[0]
        zero = packed.data[2] if len(packed.data) > 2 else None
        return QuantWeight(packed.data[0], packed.data[1], zero, packed.k, packed.quant, packed.dtype)


def toy(layout: str = "", tag: int = 0) -> Candidate:
    """Return a toy candidate whose weight is packed in ``layout`` (empty: not packed)."""
    return Candidate.make("toy", "slow", layout=layout, tag=tag)


def plan_of_toys(problem: Problem) -> TunedPlan:
    """Return a plan in which two toy kernels serve M from 1 to 64 in turn (1 to 7, 8 to 14, 15 to 64), raw and packed
    as ``toy:plain``."""
    layouts = {"": (toy("", 1), toy("", 2)), "toy:plain": (toy("plain", 1), toy("plain", 2))}
    kernels = tuple(
        PlanKernel(
            k.to_dict(), k.id, 8, packing=layout or None, times={1: 1e-6, 64: 1e-5}, verified=(1,),
            verdict=Verdict("within_bound"),
        )
        for layout, pair in layouts.items() for k in pair
    )  # fmt: skip
    spans = [(1, 7, 0), (8, 14, 1), (15, 64, 0)]
    intervals = {
        layout: tuple(PlanInterval(first, last, pair[index].id) for first, last, index in spans)
        for layout, pair in layouts.items()
    }
    return TunedPlan(problem.plan_key, problem.to_dict(), current_target().key, 1, 64, intervals, kernels)


def register() -> None:
    """Register the backend ``toy`` in this process."""
    backends.register("toy", "helpers.serving:ToyBackend")


def evidence(candidate: Candidate, seconds: float, ratio: float = 0.5, *, ok: bool = True) -> Evidence:
    layout = dict(candidate.config).get("layout", "") if candidate.backend == "toy" else ""
    return Evidence(
        candidate.to_dict(), candidate.id, "finalist", packing=f"toy:{layout}" if layout else None,
        verdict=Verdict("within_bound" if ok else "wrong"),
        sample=Sample(seconds, seconds, seconds, 50, ratio, ratio * 0.98, ratio * 1.02),
    )  # fmt: skip


def decide(problem: Problem, *rows: Evidence, chosen: Candidate | None = None, aten_s: float = 1.0) -> Decision:
    """Return a Decision with ``rows`` and ATen's default candidate at ``aten_s`` as evidence.

    The fastest candidate of each layout is its alternative. ``chosen`` is the winner; without it, the outcome is a tie.
    """
    aten_row = evidence(AtenBackend().default_candidate(problem), aten_s, 1.0)
    all_rows = (*rows, aten_row)
    fastest_by_layout: dict[str, Evidence] = {}
    for row in all_rows:
        fastest = fastest_by_layout.get(row.packing or "")
        assert row.sample is not None
        if fastest is None or (fastest.sample is not None and row.sample.median_s < fastest.sample.median_s):
            fastest_by_layout[row.packing or ""] = row
    winner = chosen.id if chosen is not None else aten_row.id
    return Decision(
        problem.key, problem.to_dict(), current_target().key, "winner" if chosen else "tie", winner, all_rows,
        alternatives={layout: row.id for layout, row in fastest_by_layout.items()},
    )  # fmt: skip


def store_decision(store: Store, problem: Problem, *rows: Evidence, chosen: Candidate | None = None) -> None:
    """Store a Decision (see ``decide``) and make dispatch read the store."""
    store.put(current_target(), decide(problem, *rows, chosen=chosen))
    RUNTIME.refresh(store)
