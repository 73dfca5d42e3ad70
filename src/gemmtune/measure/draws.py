"""Draws: operands with the answer, made once for a Problem and shared by all its candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ..backends.base import QuantWeight
from ..problem import Problem, bits
from ..reference import INTEGERS, UNIT, Oracle, finish, is_large, products
from .inputs import CPU, FILLS, Fill, Inputs, allocate, make_inputs

DrawKind = Literal["uniform", "cancel", "denormal", "spike", "nonfinite"]

_FEW_ROWS = 3  # with a NaN or an infinity in each of them, little else is left to see
_WORDS = 512


@dataclass(frozen=True, slots=True)
class Draw:
    """Operands with the answer: the Oracle's value, and what |out - value| may be, the output's rounding included.

    tolerance: float32, the shape of value; infinite where anything goes. marks: checksums of the operands' memory as
    it was drawn, by the operand's name.
    """

    inputs: Inputs
    value: Tensor
    tolerance: Tensor
    kind: DrawKind
    marks: Mapping[str, Tensor] = field(default_factory=dict)

    def touched(self) -> str:
        """The operands whose memory, guards included, is no longer as it was drawn; empty when all is well."""
        now = _memories(self.inputs)
        return ", ".join(name for name, mark in self.marks.items() if not torch.equal(_checksums(now[name]), mark))


def prepare(
    problem: Problem,
    seed: int,
    *,
    fills: Sequence[Fill] | None = None,
    b: Tensor | QuantWeight | None = None,
    device: torch.device = CPU,
) -> tuple[Draw, ...]:
    """Draw operands on ``device`` and compute their oracles there, once for all candidates.

    fills: one draw each; default: three or more, the first uniform, the second adversarial (which, the seed decides;
    with an A that starts off-alignment where the Problem allows it). A float A gets a draw with a NaN and infinities in
    at most three rows; the others, and those of a last uniform draw where there are few of them or A cannot hold a NaN,
    are the first draw's in another order: fresh data at every place, at no cost. A constant B (or the ``b`` given) is
    shared by all draws; otherwise the first two have their own. ``cancel`` needs its own B and is not chosen where
    that is shared.
    """
    shared = b
    plans: list[_Plan] = []
    for i, fill in enumerate(fills or _fills(problem, seed, shared is not None or problem.b.constant)):
        offset = 1 if i and problem.a.align == 0 else 0
        inputs = make_inputs(problem, seed + i, fill, b=shared, offset=offset, device=device)
        if problem.b.constant:
            shared = inputs.b
        plans.append(_Plan(inputs, fill))
    special = _special_rows(problem)
    if special:
        plans.append(_Plan(_nonfinite(problem, plans[0].inputs, seed), "nonfinite", special))
    if fills is None and problem.m <= _FEW_ROWS:
        again = make_inputs(problem, seed + 2, b=plans[0].inputs.b, device=device)
        plans.append(_Plan(replace(again, aux=plans[0].inputs.aux), "uniform"))
    elif fills is None and not special:
        plans.append(_Plan(replace(plans[0].inputs, a=_rolled(problem, plans[0].inputs.a)), "uniform", ()))
    return _with_oracles(problem, plans)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A draw without its answer. own: the rows that are not the first draw's, rolled; None when all are its own."""

    inputs: Inputs
    kind: DrawKind
    own: tuple[int, ...] | None = None


def _fills(problem: Problem, seed: int, shared: bool) -> tuple[Fill, Fill]:
    adversarial = [f for f in FILLS if f != "uniform" and not (f == "cancel" and shared)]
    if problem.a.dtype in INTEGERS or bits(problem.a.dtype) == 8:
        adversarial = ["spike"]  # their extremes
    return "uniform", adversarial[seed % len(adversarial)]


def _special_rows(problem: Problem) -> tuple[int, ...]:
    """The rows of the non-finite draw that differ from the first draw's; none where A cannot hold a NaN or is empty."""
    if problem.a.dtype in INTEGERS or bits(problem.a.dtype) == 8 or min(problem.m, problem.n, problem.k) == 0:
        return ()
    return tuple(dict.fromkeys((problem.m // 2, problem.m - 1, 0)))


def _rolled(problem: Problem, a: Tensor) -> Tensor:
    """A with its rows moved down by one, the last to the top."""
    rolled = allocate(tuple(a.shape), problem.a.layout, problem.a.dtype, guard=True, device=a.device)
    rolled[..., 1:, :] = a[..., :-1, :]
    rolled[..., :1, :] = a[..., -1:, :]
    return rolled


def _nonfinite(problem: Problem, plain: Inputs, seed: int) -> Inputs:
    """The plain draw, rolled, with a NaN, +inf and -inf in one row each (as rows allow); the last K included."""
    a = _rolled(problem, plain.a)
    places = (seed % problem.k, problem.k - 1, (seed * 7 + problem.k // 2) % problem.k)
    for row, place, value in zip(_special_rows(problem), places, (math.nan, math.inf, -math.inf), strict=False):
        a[..., row, place] = value
    return replace(plain, a=a)


def _with_oracles(problem: Problem, plans: Sequence[_Plan]) -> tuple[Draw, ...]:
    """Oracles of all draws. Those that share a B are stacked, so that B is converted to float64 once.

    Large problems go draw by draw: there the copies of A would cost more memory than converting B costs time. Of a
    draw made of the first one's rows, only those that are its own are multiplied.
    """
    tops = [p.inputs.a if p.own is None else _picked(p.inputs.a, p.own) for p in plans]
    large = is_large(problem, plans[0].inputs.a.device)
    groups: dict[int, list[int]] = {}
    for i, plan in enumerate(plans):
        groups.setdefault(i if large else id(plan.inputs.b), []).append(i)
    parts: dict[int, tuple[Tensor, Tensor]] = {}
    for members in groups.values():
        stacked = _stacked([tops[i] for i in members])
        found = products(problem, stacked, plans[members[0]].inputs.b)
        splits = [torch.split(t, [tops[i].shape[-2] for i in members], dim=-2) for t in found]
        parts |= dict(zip(members, zip(*splits, strict=True), strict=True))
    for i, plan in enumerate(plans):
        if plan.own is not None:
            value, magnitude = (_with_rows(parts[0][j], parts[i][j], list(plan.own)) for j in (0, 1))
            parts[i] = (value, magnitude)
    known: dict[int, Tensor] = {}
    done = []
    for i, plan in enumerate(plans):
        oracle = finish(problem, *parts.pop(i), plan.inputs.aux)
        marks = {}
        for name, memory in _memories(plan.inputs).items():
            mark = known[id(memory)] if id(memory) in known else _checksums(memory)
            marks[name] = known[id(memory)] = mark
        done.append(Draw(plan.inputs, oracle.value, _tolerance(problem, oracle), plan.kind, marks))
    return tuple(done)


def _picked(a: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Some rows of A. (None of them by a slice: not every device indexes every dtype by a list.)"""
    return a[..., list(rows), :] if rows else a[..., :0, :]


def _stacked(parts: list[Tensor]) -> Tensor:
    """Matrices one above the other; as bytes where they are fp8, which not every device joins."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].is_floating_point() and parts[0].element_size() == 1:
        return torch.cat([part.view(torch.uint8) for part in parts], dim=-2).view(parts[0].dtype)
    return torch.cat(parts, dim=-2)


def _with_rows(whole: Tensor, rows: Tensor, places: list[int]) -> Tensor:
    """``whole`` with its rows moved down by one, as ``_rolled`` does, and some replaced."""
    copy = whole.roll(1, -2)
    copy[..., places, :] = rows
    return copy


def _memories(inputs: Inputs) -> dict[str, Tensor]:
    """The operands by name: what a kernel may read, and must not write."""
    named = {"A": inputs.a}
    if isinstance(inputs.b, QuantWeight):
        named |= {"B": inputs.b.data, "B's scales": inputs.b.scale}
        if inputs.b.zero_point is not None:
            named["B's zero points"] = inputs.b.zero_point
    else:
        named["B"] = inputs.b
    return named | {f"the epilogue's tensor {i}": t for i, t in enumerate(inputs.aux)}


def _checksums(t: Tensor) -> Tensor:
    """The sums of a tensor's whole memory (its guards and gaps included) as words, one for each 4 kB."""
    memory = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
    whole = memory.numel() // _WORDS // 8 * _WORDS * 8
    sums = memory[:whole].view(torch.int64).view(-1, _WORDS).sum(1)
    return torch.cat([sums, memory[whole:].sum(dtype=torch.int64).view(1)])


def _tolerance(problem: Problem, oracle: Oracle) -> Tensor:
    """float32: the oracle's error, plus the output's rounding when it is a float (half its last place at least).

    Takes the oracle's magnitude over: it is not needed again, and memory is bounded.
    """
    allowed = oracle.magnitude.mul_(oracle.unit)
    if problem.out_dtype in INTEGERS:
        return allowed
    info = torch.finfo(getattr(torch, problem.out_dtype))
    sized = torch.nan_to_num(oracle.value.to(torch.float32, copy=True).abs_(), 0.0, 0.0, 0.0)
    allowed += sized.mul_(UNIT[problem.out_dtype]).clamp_(min=max(info.smallest_normal * info.eps / 2, 2.0**-149))
    return allowed.mul_(1.0 + 2.0**-20)  # float32's own roundings
