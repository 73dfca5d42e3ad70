"""Rows of A, columns of B and elements of the epilogue's tensors that show what ordinary random ones hide.

Each kind shows one cause of errors, whatever the kernel: values that a narrower format cannot hold (``large``,
``tiny``), operands that are rounded before they are multiplied (``spike``: one product dominates each sum, so that the
bound is small beside it at every K), sums that lose what cancels (``cancel``), accumulators that are too narrow
(``largest``, ``smallest``, ``extremes``), exact ties (``single``, ``power of two``), and NaN and infinities.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.epilogue import Step
from ..core.problem import Problem, bits
from ..core.weights import QuantWeight
from .inputs import WIDE_INTEGERS, fill_random, logical_shape
from .oracle import INTEGERS

_SCALED = {"float16": (2.0**12, 2.0**-8)}  # large, tiny: inside what the dtype holds, and outside narrower ones
_USUALLY_SCALED = (2.0**20, 2.0**-30)
_SPIKE_EXPONENT = {"float16": 13}  # 10240 to 16384: sums of a few still fit into the output
_USUAL_SPIKE = 20
_HUGE_SCALE = {"float16": 2.0**11}
_TINY_SCALE = {"float16": 2.0**-10}
_USUAL_SCALE = 2.0**20

Kinds = Mapping[str, tuple[int, ...]]  # kind -> columns (or rows)


# --- rows of A ---------------------------------------------------------------------------------------------------


def row_kinds(problem: Problem) -> tuple[str, ...]:
    """The kinds of rows that A may have; none where it is empty."""
    if min(problem.m, problem.n, problem.k, problem.batch) == 0:
        return ()
    dtype = problem.a.dtype
    if dtype in INTEGERS:
        return ("largest", "extremes", "smallest", "single")
    if bits(dtype) == 8:
        return ("extremes", "largest", "NaN")
    return ("spike", "tiny", "NaN", "large", "cancel", "+inf", "denormal", "-inf")


def special_rows(problem: Problem, kinds: Sequence[str], generator: torch.Generator) -> Tensor:
    """One row of A of each kind (empty for an ordinary one): [kinds, K], or [batch, kinds, K]; dense."""
    shape, dtype = logical_shape(problem, len(kinds), problem.k), problem.a.dtype
    rows = torch.empty(shape, dtype=getattr(torch, dtype), device=generator.device)
    fill_random(rows, dtype, generator)
    for place, kind in enumerate(kinds):
        row = rows[..., place, :]
        if not kind:
            continue
        if row.is_floating_point() and bits(dtype) > 8:
            _spoil_floats(row, kind, dtype, generator)
        else:
            _spoil_bytes(row, kind, dtype, generator)
    return rows


def _spoil_floats(vector: Tensor, kind: str, dtype: str, generator: torch.Generator) -> None:
    """Turn normal numbers along K [.., K] into those of a kind, in place."""
    k = vector.shape[-1]
    large, tiny = _SCALED.get(dtype, _USUALLY_SCALED)
    where = int(torch.randint(0, k, (), generator=generator, device=generator.device))
    if kind == "spike":
        mantissa = 1.25 + 0.75 * torch.rand((), generator=generator, dtype=torch.float64, device=generator.device)
        vector[..., where] = (mantissa * 2.0 ** _SPIKE_EXPONENT.get(dtype, _USUAL_SPIKE)).to(vector.dtype)
    elif kind in ("large", "tiny"):
        vector *= large if kind == "large" else tiny
    elif kind == "cancel":
        vector[..., k // 2 : 2 * (k // 2)] = vector[..., : k // 2]
    elif kind == "denormal":
        vector *= torch.finfo(vector.dtype).smallest_normal / 4
    elif kind == "NaN":
        vector[..., k - 1] = math.nan
    elif kind in ("+inf", "-inf"):
        vector[..., where] = float(kind)
    else:
        raise ValueError(f"no such kind of values: {kind!r}")


def _spoil_bytes(vector: Tensor, kind: str, dtype: str, generator: torch.Generator) -> None:
    """Turn integers or fp8 numbers along K into those of a kind, in place."""
    if kind == "extremes":
        drawn = torch.empty(vector.shape, dtype=vector.dtype, device=vector.device)
        fill_random(drawn, dtype, generator, extremes=True)
        vector.copy_(drawn)
    elif kind in ("largest", "smallest") and dtype in ("int32", "int64"):
        vector.fill_(WIDE_INTEGERS if kind == "largest" else -WIDE_INTEGERS)
    elif kind in ("largest", "smallest"):
        low, high = _RANGES[dtype]
        vector.view(torch.uint8).fill_(high if kind == "largest" else low)
    elif kind == "single":
        where = int(torch.randint(0, vector.shape[-1], (), generator=generator, device=generator.device))
        vector.zero_()
        vector[..., where] = 1
    elif kind == "NaN":
        vector.view(torch.uint8)[..., -1] = 0x7F
    elif kind == "cancel":
        half = vector.shape[-1] // 2
        vector[..., half : 2 * half] = -vector[..., :half].clamp(min=-127)
    else:
        raise ValueError(f"no such kind of values: {kind!r}")


_RANGES = {
    "int8": (0x80, 0x7F), "uint8": (0, 0xFF), "int4": (0, 0xFF), "float8_e4m3fn": (0xFE, 0x7E),
    "float8_e5m2": (0xFB, 0x7B),
}  # fmt: skip


# --- columns -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of the output are special, and why.

    weight: B's, by kind. aux: those of each of the epilogue's tensors, by kind; empty for tensors of other axes.
    """

    weight: Kinds = field(default_factory=dict)
    aux: tuple[Kinds, ...] = ()

    def label(self, column: int) -> str:
        """What is special about a column, in words; empty for nothing."""
        for kind, columns in self.weight.items():
            if column in columns:
                return f"{kind} in B"
        for place, kinds in enumerate(self.aux):
            for kind, columns in kinds.items():
                if column in columns:
                    return f"{kind} in the epilogue's tensor {place}"
        return ""

    def all_of_weight(self) -> list[int]:
        """B's special columns, those among them that a special scale needs."""
        changed = ("power of two", "tiny")  # see spoil_weight
        aux = [column for kinds in self.aux for kind in changed for column in kinds.get(kind, ())]
        return [column for columns in self.weight.values() for column in columns] + aux


def weight_kinds(problem: Problem) -> tuple[str, ...]:
    """The kinds of columns that B may have."""
    b = problem.b
    if problem.k == 0:
        return ()
    if b.quant is not None:
        data = ("largest", "smallest")
        scales = ("negative scale", "tiny scale", "huge scale", "zero scale", "NaN scale")
        groups = ("scales that differ by group",) if b.quant.group is not None else ()
        return (*scales, *data, *groups, *(("fractional zero", "extreme zero") if b.quant.zero_point else ()))
    if b.dtype in INTEGERS:
        return ("largest", "smallest", "extremes")
    if bits(b.dtype) == 8:
        return ("largest", "extremes", "NaN")
    return ("tiny", "NaN", "large", "+inf", "spike", "cancel", "-inf")


def aux_kinds(step: Step) -> tuple[str, ...]:
    """The kinds of elements that an epilogue's tensor may have."""
    if step.dtype in INTEGERS or not step.takes_tensor:
        return ()
    if step.kind == "scale":
        return ("negative", "tiny", "power of two", "huge", "zero", "NaN")
    if step.kind == "mul":
        return ("NaN", "zero", "tiny", "huge")
    return ("NaN", "+inf", "-inf")  # no huge ones: a sum may begin with its addend, and then rounds at its size


def choose_columns(problem: Problem, generator: torch.Generator, round_index: int = 0) -> Columns:
    """Special columns at random, each of one kind, at most half of all. turn: where kinds are more than columns, from
    which on they are taken.
    """
    steps = [step for step in problem.epilogue if step.takes_tensor]
    slots: list[tuple[int, str]] = [(-1, kind) for kind in weight_kinds(problem)]
    slots += [(i, kind) for i, step in enumerate(steps) if step.axis == "col" for kind in aux_kinds(step)]
    if not slots or problem.n == 0:
        return Columns({}, tuple({} for _ in steps))
    each = 2 if problem.n >= 4 * len(slots) else 1
    count = max(1, min(problem.n // 2 // each, len(slots)))
    first = round_index * count % len(slots)
    slots = (slots + slots)[first : first + count]
    drawn: list[int] = torch.randperm(problem.n, generator=generator, device=generator.device).tolist()
    edges = (0, problem.n - 1)  # where faults are likeliest, and a NaN would hide them
    order = [column for column in drawn if column not in edges] + list(edges)
    chosen: list[dict[str, tuple[int, ...]]] = [{} for _ in range(len(steps) + 1)]
    for number, (target, kind) in enumerate(slots):
        chosen[target + 1][kind] = tuple(order[number * each : (number + 1) * each])
    return Columns(chosen[0], tuple(chosen[1:]))


def weight_rounds(problem: Problem) -> int:
    """How many weights it takes until every kind had its column: one, unless there are few columns (four at most)."""
    steps = [step for step in problem.epilogue if step.takes_tensor and step.axis == "col"]
    slots = len(weight_kinds(problem)) + sum(len(aux_kinds(step)) for step in steps)
    return min(4, max(1, math.ceil(slots / max(1, problem.n // 2))))


def spoil_weight(problem: Problem, b: Tensor | QuantWeight, columns: Columns, generator: torch.Generator) -> None:
    """Make B's special columns special, in place.

    Where an epilogue's tensor scales integers by a power of two, each of them gives a tie that goes to the even
    neighbour towards 0. Where one scales them by little, the sums are the largest that there are: a narrow accumulator
    shows in outputs that would saturate otherwise.
    """
    if problem.b.dtype == "int8" and isinstance(b, Tensor):
        for kinds in columns.aux:
            for place in kinds.get("tiny", ()):
                b[..., place] = 127
            for place in kinds.get("power of two", ()):
                b[..., place] = b[..., place].clamp(0, 124) // 4 * 4 + 1
    for kind, places in columns.weight.items():
        for place in places:
            if isinstance(b, QuantWeight):
                _spoil_quantized(b, kind, place, generator)
                continue
            column = b[..., place].clone()
            if bits(problem.b.dtype) > 8 and b.is_floating_point():
                _spoil_floats(column, kind, problem.b.dtype, generator)
                if kind == "cancel":
                    half = column.shape[-1] // 2
                    column[..., half : 2 * half] *= -(1 + 2.0**-6)
            else:
                _spoil_bytes(column, kind, problem.b.dtype, generator)
            _as_bytes(b)[..., place] = _as_bytes(column)


def _as_bytes(t: Tensor) -> Tensor:
    """fp8 as bytes, which every device can index; others as they are."""
    return t.view(torch.uint8) if t.is_floating_point() and t.element_size() == 1 else t


def _spoil_quantized(b: QuantWeight, kind: str, column: int, generator: torch.Generator) -> None:
    scale, name = b.scale[..., column], b.quant.scale_dtype
    if kind in ("largest", "smallest"):
        low, high = _RANGES[b.dtype]
        b.data.view(torch.uint8)[:, column] = high if kind == "largest" else low
    elif kind.endswith(" scale"):
        b.scale[..., column] = _special_scale(scale, kind.removesuffix(" scale"), name)
    elif kind == "scales that differ by group":
        kinds = ("negative", "tiny", "plain", "huge", "zero")
        for group in range(b.scale.shape[0]):
            b.scale[group, column] = _special_scale(b.scale[group, column], kinds[group % len(kinds)], name)
    elif b.zero_point is not None:
        shape = b.zero_point[..., column].shape
        drawn = torch.rand(shape, generator=generator, device=generator.device) - 0.5
        far = 25.0 if b.dtype == "int4" else 300.0
        zero = 7.0 * drawn + 3.5 if kind == "fractional zero" else far * drawn.sign() + drawn
        b.zero_point[..., column] = zero.to(b.zero_point.dtype)


def _special_scale(scale: Tensor, kind: str, dtype: str) -> Tensor:
    """A scale (or any of the epilogue's factors) of a kind."""
    match kind:
        case "negative":
            return -scale
        case "tiny":
            return scale * _TINY_SCALE.get(dtype, 1.0 / _USUAL_SCALE)
        case "huge":
            return scale * _HUGE_SCALE.get(dtype, _USUAL_SCALE)
        case "zero":
            return torch.zeros_like(scale)
        case "NaN":
            return torch.full_like(scale, math.nan)
        case "power of two":
            return torch.full_like(scale, 0.5)
    return scale


# --- the epilogue's tensors --------------------------------------------------------------------------------------


def special_value(problem: Problem, step: Step, kind: str, usual: Tensor) -> Tensor:
    """What an element of an epilogue's tensor is turned into.

    Scales to integers are tiny where the largest sum of all gives what an ordinary one gives otherwise: with smaller
    ones all outputs would be 0.
    """
    if kind == "tiny" and problem.out_dtype in INTEGERS:
        return usual * 2.0 ** -math.ceil(math.log2(3.0 * math.sqrt(problem.k)))
    if step.kind in ("scale", "mul"):
        return _special_scale(usual, kind, str(step.dtype))
    return torch.full_like(usual, float(kind))


def spoil_aux(
    problem: Problem,
    aux: Sequence[Tensor],
    columns: Columns,
    rows: list[str],
    generator: torch.Generator,
) -> None:
    """Make elements of the epilogue's tensors special, in place. rows: what is special about each row of A; ordinary
    ones that get a special element of a tensor are named there, too.

    Half of the elements of an addend are 0, those beside B's special columns among them: a large addend hides what
    comes to a small sum. Tensors of one element are left to ``tensor_kinds``.
    """
    steps = [step for step in problem.epilogue if step.takes_tensor]
    special = [row for row, name in enumerate(rows) if name]
    for place, (step, t) in enumerate(zip(steps, aux, strict=True)):
        if step.axis == "tensor" or t.numel() == 0:
            continue
        if step.kind in ("bias", "add"):
            _clear(t, step, columns, special, generator)
        if step.axis == "col":
            for kind, places in columns.aux[place].items():
                t[list(places)] = special_value(problem, step, kind, t[list(places)])
        elif step.axis == "row":
            if step.kind == "scale" and "single" in rows:
                t[rows.index("single")] = 1.0
                if not any(kinds.get("tiny") for kinds in columns.aux):
                    largest = rows.index("largest")
                    t[largest] = special_value(problem, step, "tiny", t[largest])
            plain = [row for row, name in enumerate(rows) if not name]
            for row, kind in zip(plain[1:], aux_kinds(step), strict=False):  # one stays as it is
                t[row] = special_value(problem, step, kind, t[row])
                rows[row] = f"multiplied or added to {kind} of the epilogue's tensor {place}"
        else:
            _spoil_full(problem, step, t, columns, rows, generator)


def _spoil_full(
    problem: Problem, step: Step, t: Tensor, columns: Columns, rows: Sequence[str], generator: torch.Generator
) -> None:
    """Special elements in a tensor of the output's size: in ordinary columns of the first ordinary row and the last, so
    that nothing else hides what they do."""
    drawn: list[int] = torch.randperm(problem.n, generator=generator, device=generator.device).tolist()
    free = [column for column in drawn if not columns.label(column)]
    plain = [row for row, name in enumerate(rows) if not name]
    kinds = aux_kinds(step)
    for number, kind in enumerate(kinds):
        places = free[number :: len(kinds)][:2]
        for row in {plain[0], plain[-1]} if places else ():
            t[..., row, places] = special_value(problem, step, kind, t[..., row, places])


def _clear(t: Tensor, step: Step, columns: Columns, special: list[int], generator: torch.Generator) -> None:
    """0 in half of an addend's elements, in its special columns and rows."""
    t.masked_fill_(torch.rand(t.shape, generator=generator, device=generator.device) < 0.5, 0)
    bare = [*columns.all_of_weight(), *(c for kinds in columns.aux for places in kinds.values() for c in places)]
    if bare and step.axis in ("col", "full"):
        t[..., bare] = 0
    if special and step.axis == "row":
        t[special] = 0


def tensor_kinds(problem: Problem) -> tuple[tuple[int, str], ...]:
    """(which of the epilogue's tensors, kind) for each kind that a tensor of one element may have."""
    steps = [step for step in problem.epilogue if step.takes_tensor]
    return tuple((i, kind) for i, step in enumerate(steps) if step.axis == "tensor" for kind in aux_kinds(step))
