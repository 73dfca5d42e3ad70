"""Special rows of A, columns of B and elements of epilogue tensors that reveal errors which random values do not.

Each kind of value reveals one cause of errors:
  - ``large``, ``tiny``: a format too narrow for the values;
  - ``spike``: operands that are rounded before the product. One product dominates each sum, so that the error bound is
    small in comparison at every K;
  - ``cancel``: sums that lose the terms that cancel;
  - ``largest``, ``smallest``, ``extremes``: an accumulator that is too narrow;
  - ``single``, ``power of two``: exact ties in rounding;
  - NaN and infinities.
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
from .inputs import WIDE_INTEGERS, as_bytes, fill_random, logical_shape
from .oracle import INTEGERS
from .random_source import RandomSource

_LARGE_AND_TINY = {"float16": (2.0**12, 2.0**-8)}  # factors for large, tiny: results fit the dtype, but no narrower one
_DEFAULT_LARGE_AND_TINY = (2.0**20, 2.0**-30)
_SPIKE_EXPONENT = {"float16": 13}  # 10240 to 16384: sums of a few still fit the output
_DEFAULT_SPIKE_EXPONENT = 20
_HUGE_SCALE = {"float16": 2.0**11}
_TINY_SCALE = {"float16": 2.0**-10}
_DEFAULT_SCALE = 2.0**20

Kinds = Mapping[str, tuple[int, ...]]  # kind -> columns (or rows)


# --- rows of A ---------------------------------------------------------------------------------------------------


def row_kinds(problem: Problem) -> tuple[str, ...]:
    """Return the kinds of special rows for A; none when the Problem is empty."""
    if min(problem.m, problem.n, problem.k, problem.batch) == 0:
        return ()
    dtype = problem.a.dtype
    if dtype in INTEGERS:
        return ("largest", "extremes", "smallest", "single")
    if bits(dtype) == 8:
        return ("extremes", "largest", "NaN")
    return ("spike", "tiny", "NaN", "large", "cancel", "+inf", "denormal", "-inf")


def special_rows(problem: Problem, kinds: Sequence[str], source: RandomSource) -> Tensor:
    """Return one row of A for each kind (an empty kind: an ordinary row): [kinds, K], or [batch, kinds, K]; dense."""
    shape, dtype = logical_shape(problem, len(kinds), problem.k), problem.a.dtype
    rows = torch.empty(shape, dtype=getattr(torch, dtype), device=source.device)
    fill_random(rows, dtype, source)
    for i, kind in enumerate(kinds):
        row = rows[..., i, :]
        if not kind:
            continue
        if row.is_floating_point() and bits(dtype) > 8:
            _spoil_floats(row, kind, dtype, source)
        else:
            _spoil_bytes(row, kind, dtype, source)
    return rows


def _spoil_floats(vector: Tensor, kind: str, dtype: str, source: RandomSource) -> None:
    """Change normally distributed numbers [.., K] to values of a kind, in place."""
    k = vector.shape[-1]
    large, tiny = _LARGE_AND_TINY.get(dtype, _DEFAULT_LARGE_AND_TINY)
    index = source.index(k)
    if kind == "spike":
        mantissa = 1.25 + 0.75 * source.uniform((), torch.float64)
        vector[..., index] = (mantissa * 2.0 ** _SPIKE_EXPONENT.get(dtype, _DEFAULT_SPIKE_EXPONENT)).to(vector.dtype)
    elif kind in ("large", "tiny"):
        vector *= large if kind == "large" else tiny
    elif kind == "cancel":
        vector[..., k // 2 : 2 * (k // 2)] = vector[..., : k // 2]
    elif kind == "denormal":
        vector *= torch.finfo(vector.dtype).smallest_normal / 4
    elif kind == "NaN":
        vector[..., k - 1] = math.nan
    elif kind in ("+inf", "-inf"):
        vector[..., index] = float(kind)
    else:
        raise ValueError(f"no such kind of values: {kind!r}")


def _spoil_bytes(vector: Tensor, kind: str, dtype: str, source: RandomSource) -> None:
    """Change integers or fp8 numbers [.., K] to values of a kind, in place."""
    if kind == "extremes":
        drawn = torch.empty(vector.shape, dtype=vector.dtype, device=vector.device)
        fill_random(drawn, dtype, source, extremes=True)
        vector.copy_(drawn)
    elif kind in ("largest", "smallest") and dtype in ("int32", "int64"):
        vector.fill_(WIDE_INTEGERS if kind == "largest" else -WIDE_INTEGERS)
    elif kind in ("largest", "smallest"):
        low, high = _EXTREME_BYTES[dtype]
        vector.view(torch.uint8).fill_(high if kind == "largest" else low)
    elif kind == "single":
        index = source.index(vector.shape[-1])
        vector.zero_()
        vector[..., index] = 1
    elif kind == "NaN":
        vector.view(torch.uint8)[..., -1] = 0x7F
    else:
        raise ValueError(f"no such kind of values: {kind!r}")


_EXTREME_BYTES = {
    "int8": (0x80, 0x7F), "uint8": (0, 0xFF), "int4": (0, 0xFF), "float8_e4m3fn": (0xFE, 0x7E),
    "float8_e5m2": (0xFB, 0x7B),
}  # fmt: skip


# --- columns -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Columns:
    """The special columns of the output.

    weight: the special columns of B, by kind. aux: for each tensor of the epilogue, its special columns by kind; empty
    for tensors with another axis than ``col``.
    """

    weight: Kinds = field(default_factory=dict)
    aux: tuple[Kinds, ...] = ()

    def label(self, column: int) -> str:
        """Return what is special about a column, in words; empty for an ordinary column."""
        for kind, columns in self.weight.items():
            if column in columns:
                return f"{kind} in B"
        for i, kinds in enumerate(self.aux):
            for kind, columns in kinds.items():
                if column in columns:
                    return f"{kind} in the epilogue's tensor {i}"
        return ""

    def all_of_weight(self) -> list[int]:
        """Return B's special columns, including those that were changed because of a special scale."""
        kinds_that_change_b = ("power of two", "tiny")  # see spoil_weight
        aux = [column for kinds in self.aux for kind in kinds_that_change_b for column in kinds.get(kind, ())]
        return [column for columns in self.weight.values() for column in columns] + aux


def weight_kinds(problem: Problem) -> tuple[str, ...]:
    """Return the kinds of special columns for B."""
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
    """Return the kinds of special elements for an epilogue step's tensor."""
    if step.dtype in INTEGERS or not step.takes_tensor:
        return ()
    if step.kind == "scale":
        return ("negative", "tiny", "power of two", "huge", "zero", "NaN")
    if step.kind == "mul":
        return ("NaN", "zero", "tiny", "huge")
    return ("NaN", "+inf", "-inf")  # not huge: a kernel may add it first and then rounds every sum to its size


def choose_columns(problem: Problem, source: RandomSource, round_index: int = 0) -> Columns:
    """Choose special columns at random, each of one kind; at most half of all columns are special.

    round_index: which kinds to choose when there are more kinds than columns; see ``weight_rounds``.
    """
    steps = [step for step in problem.epilogue if step.takes_tensor]
    slots: list[tuple[int, str]] = [(-1, kind) for kind in weight_kinds(problem)]
    slots += [(i, kind) for i, step in enumerate(steps) if step.axis == "col" for kind in aux_kinds(step)]
    if not slots or problem.n == 0:
        return Columns({}, tuple({} for _ in steps))
    per_slot = 2 if problem.n >= 4 * len(slots) else 1
    count = max(1, min(problem.n // 2 // per_slot, len(slots)))
    first = round_index * count % len(slots)
    slots = (slots + slots)[first : first + count]
    drawn: list[int] = source.permutation(problem.n).tolist()
    edges = (0, problem.n - 1)  # chosen last: faults are likeliest there, and a NaN would hide them
    order = [column for column in drawn if column not in edges] + list(edges)
    chosen: list[dict[str, tuple[int, ...]]] = [{} for _ in range(len(steps) + 1)]
    for number, (tensor_index, kind) in enumerate(slots):
        chosen[tensor_index + 1][kind] = tuple(order[number * per_slot : (number + 1) * per_slot])
    return Columns(chosen[0], tuple(chosen[1:]))


def weight_rounds(problem: Problem) -> int:
    """Return the number of weights needed for a column of each kind: one unless N is small, and four at most."""
    steps = [step for step in problem.epilogue if step.takes_tensor and step.axis == "col"]
    slots = len(weight_kinds(problem)) + sum(len(aux_kinds(step)) for step in steps)
    return min(4, max(1, math.ceil(slots / max(1, problem.n // 2))))


def spoil_weight(problem: Problem, b: Tensor | QuantWeight, columns: Columns, source: RandomSource) -> None:
    """Change the special columns of B to values of their kinds, in place.

    A column of an int8 B is also changed when an epilogue tensor has a special scale for it. With a scale that is a
    power of two, each sum gives a rounding tie whose even neighbor is towards 0. With a tiny scale, the sums are the
    largest possible ones: this reveals a narrow accumulator in outputs that would otherwise saturate.
    """
    if problem.b.dtype == "int8" and isinstance(b, Tensor):
        for kinds in columns.aux:
            for index in kinds.get("tiny", ()):
                b[..., index] = 127
            for index in kinds.get("power of two", ()):
                b[..., index] = b[..., index].clamp(0, 124) // 4 * 4 + 1
    for kind, indices in columns.weight.items():
        for index in indices:
            if isinstance(b, QuantWeight):
                _spoil_quantized(b, kind, index, source)
                continue
            values = b[..., index].clone()
            if bits(problem.b.dtype) > 8 and b.is_floating_point():
                _spoil_floats(values, kind, problem.b.dtype, source)
                if kind == "cancel":
                    half = values.shape[-1] // 2
                    values[..., half : 2 * half] *= -(1 + 2.0**-6)
            else:
                _spoil_bytes(values, kind, problem.b.dtype, source)
            as_bytes(b)[..., index] = as_bytes(values)


def _spoil_quantized(b: QuantWeight, kind: str, column: int, source: RandomSource) -> None:
    scale, name = b.scale[..., column], b.quant.scale_dtype
    if kind in ("largest", "smallest"):
        low, high = _EXTREME_BYTES[b.dtype]
        b.data.view(torch.uint8)[:, column] = high if kind == "largest" else low
    elif kind.endswith(" scale"):
        b.scale[..., column] = _special_scale(scale, kind.removesuffix(" scale"), name)
    elif kind == "scales that differ by group":
        kinds = ("negative", "tiny", "plain", "huge", "zero")
        for group in range(b.scale.shape[0]):
            b.scale[group, column] = _special_scale(b.scale[group, column], kinds[group % len(kinds)], name)
    elif b.zero_point is not None:
        shape = b.zero_point[..., column].shape
        drawn = source.uniform(tuple(shape)) - 0.5
        far = 25.0 if b.dtype == "int4" else 300.0
        zero = 7.0 * drawn + 3.5 if kind == "fractional zero" else far * drawn.sign() + drawn
        b.zero_point[..., column] = zero.to(b.zero_point.dtype)


def _special_scale(scale: Tensor, kind: str, dtype: str) -> Tensor:
    """Return a scale (or another factor of the epilogue) changed to a kind."""
    match kind:
        case "negative":
            return -scale
        case "tiny":
            return scale * _TINY_SCALE.get(dtype, 1.0 / _DEFAULT_SCALE)
        case "huge":
            return scale * _HUGE_SCALE.get(dtype, _DEFAULT_SCALE)
        case "zero":
            return torch.zeros_like(scale)
        case "NaN":
            return torch.full_like(scale, math.nan)
        case "power of two":
            return torch.full_like(scale, 0.5)
    return scale


# --- the epilogue's tensors --------------------------------------------------------------------------------------


def special_value(problem: Problem, step: Step, kind: str, ordinary: Tensor) -> Tensor:
    """Return elements of an epilogue tensor changed to a kind. ordinary: the elements before the change.

    For an integer output, a tiny scale maps the largest possible sum to the output of an ordinary sum; a smaller scale
    would make all outputs 0.
    """
    if kind == "tiny" and problem.out_dtype in INTEGERS:
        return ordinary * 2.0 ** -math.ceil(math.log2(3.0 * math.sqrt(problem.k)))
    if step.kind in ("scale", "mul"):
        return _special_scale(ordinary, kind, str(step.dtype))
    return torch.full_like(ordinary, float(kind))


def spoil_aux(
    problem: Problem,
    aux: Sequence[Tensor],
    columns: Columns,
    rows: list[str],
    source: RandomSource,
) -> None:
    """Change elements of the epilogue's tensors to special values, in place.

    rows: what is special about each row of A; updated for ordinary rows whose element in a tensor becomes special. Half
    of an addend's elements are set to 0, including those in B's special columns: a large addend hides errors of a small
    sum. One-element tensors are not changed; ``tensor_kinds`` names their kinds. Nor is the weight of a norm.
    """
    steps = [step for step in problem.epilogue if step.takes_tensor]
    special = [row for row, name in enumerate(rows) if name]
    for i, (step, t) in enumerate(zip(steps, aux, strict=True)):
        if step.axis in ("tensor", "inner") or t.numel() == 0:
            continue
        if step.kind in ("bias", "add"):
            _clear_addend(t, step, columns, special, source)
        if step.axis == "col":
            for kind, indices in columns.aux[i].items():
                t[list(indices)] = special_value(problem, step, kind, t[list(indices)])
        elif step.axis == "row":
            if step.kind == "scale" and "single" in rows:
                t[rows.index("single")] = 1.0
                if not any(kinds.get("tiny") for kinds in columns.aux):
                    largest = rows.index("largest")
                    t[largest] = special_value(problem, step, "tiny", t[largest])
            ordinary = [row for row, name in enumerate(rows) if not name]
            for row, kind in zip(ordinary[1:], aux_kinds(step), strict=False):  # the first one stays ordinary
                t[row] = special_value(problem, step, kind, t[row])
                rows[row] = f"multiplied or added to {kind} of the epilogue's tensor {i}"
        else:
            _spoil_full(problem, step, t, columns, rows, source)


def _spoil_full(
    problem: Problem, step: Step, t: Tensor, columns: Columns, rows: Sequence[str], source: RandomSource
) -> None:
    """Change elements of an [M, N] tensor to special values, in place.

    The elements are in ordinary columns of the first and the last ordinary row, so that no other special value hides
    their effect.
    """
    drawn: list[int] = source.permutation(problem.n).tolist()
    free = [column for column in drawn if not columns.label(column)]
    ordinary = [row for row, name in enumerate(rows) if not name]
    kinds = aux_kinds(step)
    for number, kind in enumerate(kinds):
        indices = free[number :: len(kinds)][:2]
        for row in {ordinary[0], ordinary[-1]} if indices else ():
            t[..., row, indices] = special_value(problem, step, kind, t[..., row, indices])


def _clear_addend(t: Tensor, step: Step, columns: Columns, special: list[int], source: RandomSource) -> None:
    """Set half of an addend's elements, and all those in special columns and rows, to 0."""
    t.masked_fill_(source.uniform(tuple(t.shape)) < 0.5, 0)
    cleared = [*columns.all_of_weight(), *(c for kinds in columns.aux for indices in kinds.values() for c in indices)]
    if cleared and step.axis in ("col", "full"):
        t[..., cleared] = 0
    if special and step.axis == "row":
        t[special] = 0


def tensor_kinds(problem: Problem) -> tuple[tuple[int, str], ...]:
    """Return (index of the tensor, kind) for each kind of value of the epilogue's one-element tensors."""
    steps = [step for step in problem.epilogue if step.takes_tensor]
    return tuple((i, kind) for i, step in enumerate(steps) if step.axis == "tensor" for kind in aux_kinds(step))
