"""Draws: operands with the answer, made once for a Problem and shared by all its candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..backends.base import QuantWeight
from ..problem import Problem, bits
from ..reference import INTEGERS, UNIT, Oracle, finish, is_large, products
from .inputs import FILLS, Fill, Inputs, make_inputs

DrawKind = Literal["uniform", "cancel", "denormal", "spike", "nonfinite"]


@dataclass(frozen=True, slots=True)
class Draw:
    """Operands with the answer: the Oracle's value, and what |out - value| may be, the output's rounding included.

    tolerance: float32, the shape of value; infinite where anything goes.
    """

    inputs: Inputs
    value: Tensor
    tolerance: Tensor
    kind: DrawKind


def prepare(
    problem: Problem, seed: int, *, fills: Sequence[Fill] | None = None, b: Tensor | QuantWeight | None = None
) -> tuple[Draw, ...]:
    """Draw operands and compute their oracles, once for all candidates.

    fills: one draw each; default: a uniform one and an adversarial one (which, the seed decides; with an A that starts
    off-alignment where the Problem allows it). A float A gets one more draw with a NaN and infinities in at most three
    rows. A constant B (or the ``b`` given) is shared by all draws; otherwise each has its own, except that the
    non-finite draw shares the first's. ``cancel`` needs its own B and is not chosen where that is shared.
    """
    shared = b
    draws: list[tuple[Inputs, DrawKind]] = []
    for i, fill in enumerate(fills or _fills(problem, seed, shared is not None or problem.b.constant)):
        offset = 1 if i and problem.a.align == 0 else 0
        inputs = make_inputs(problem, seed + i, fill, b=shared, offset=offset)
        if problem.b.constant:
            shared = inputs.b
        draws.append((inputs, fill))
    if _special_rows(problem):
        draws.append((_nonfinite(problem, draws[0][0], seed), "nonfinite"))
    return _with_oracles(problem, draws)


def _fills(problem: Problem, seed: int, shared: bool) -> tuple[Fill, Fill]:
    adversarial = [f for f in FILLS if f != "uniform" and not (f == "cancel" and shared)]
    if problem.a.dtype in INTEGERS or bits(problem.a.dtype) == 8:
        adversarial = ["spike"]
    return "uniform", adversarial[seed % len(adversarial)]


def _special_rows(problem: Problem) -> tuple[int, ...]:
    """The rows of the non-finite draw that differ from the first draw's; none where A cannot hold a NaN or is empty."""
    if problem.a.dtype in INTEGERS or bits(problem.a.dtype) == 8 or min(problem.m, problem.n, problem.k) == 0:
        return ()
    return tuple(dict.fromkeys((problem.m // 2, problem.m - 1, 0)))


def _nonfinite(problem: Problem, plain: Inputs, seed: int) -> Inputs:
    """The plain draw with a NaN, +inf and -inf in one row each (as rows allow); the last K included."""
    a = torch.empty_strided(plain.a.shape, plain.a.stride(), dtype=plain.a.dtype)
    a.copy_(plain.a)
    places = (seed % problem.k, problem.k - 1, (seed * 7 + problem.k // 2) % problem.k)
    for row, place, value in zip(_special_rows(problem), places, (math.nan, math.inf, -math.inf), strict=False):
        a[..., row, place] = value
    return replace(plain, a=a)


def _with_oracles(problem: Problem, draws: Sequence[tuple[Inputs, DrawKind]]) -> tuple[Draw, ...]:
    """Oracles of all draws. Those that share a B are stacked, so that B is converted to float64 once.

    Large problems go draw by draw: there the copies of A would cost more memory than converting B costs time. Of the
    non-finite draw only the rows that are its own are multiplied.
    """
    own = list(_special_rows(problem))
    heights = [len(own) if kind == "nonfinite" else problem.m for _, kind in draws]
    groups: dict[int, list[int]] = {}
    for i, (inputs, _) in enumerate(draws):
        groups.setdefault(i if is_large(problem) else id(inputs.b), []).append(i)
    parts: dict[int, tuple[Tensor, Tensor]] = {}
    for members in groups.values():
        tops = [draws[i][0].a[..., own, :] if draws[i][1] == "nonfinite" else draws[i][0].a for i in members]
        stacked = torch.cat(tops, dim=-2) if len(tops) > 1 else tops[0]
        found = products(problem, stacked, draws[members[0]][0].b)
        splits = [torch.split(t, [heights[i] for i in members], dim=-2) for t in found]
        parts |= dict(zip(members, zip(*splits, strict=True), strict=True))
    for i, (_, kind) in enumerate(draws):
        if kind == "nonfinite":
            parts[i] = (_with_rows(parts[0][0], parts[i][0], own), _with_rows(parts[0][1], parts[i][1], own))
    done = []
    for i, (operands, kind) in enumerate(draws):
        oracle = finish(problem, *parts.pop(i), operands.aux)
        done.append(Draw(operands, oracle.value, _tolerance(problem, oracle), kind))
    return tuple(done)


def _with_rows(whole: Tensor, rows: Tensor, places: list[int]) -> Tensor:
    """A copy of ``whole`` with some of its rows replaced."""
    copy = whole.clone()
    copy[..., places, :] = rows
    return copy


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
