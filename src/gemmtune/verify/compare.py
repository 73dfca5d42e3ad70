"""An output against the oracle: elementwise, and in aggregate.

Elementwise, with the Oracle's value and error (verify/oracle.py):

    |out - value| <= u_out * |value| + error       (integers: round(value - error) <= out <= round(value + error))

In aggregate, the output against the *rounded* value, d = out - round(value): a correct kernel's d is mostly 0 and has
no preferred sign, so the slope sum(d * value) / sum(value**2) and the mean of d stay within six of their own standard
errors plus an allowance for the accumulator's rounding. A uniform factor of 1.002 moves the slope by 0.002 at every K;
the allowance is 0.00015 at K = 16384.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.problem import Problem
from .draws import Draw
from .oracle import INTEGERS, UNIT, error_unit, is_integer, to_integer

_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 25}  # elements compared at a time: in a core's L2, or few launches
_SIGMAS = 6.0


@dataclass(slots=True)
class _Sums:
    """What the aggregate test needs, gathered while comparing (finite elements of the plain columns only)."""

    plain: Tensor | None = None
    count: int = 0
    d_ref: float = 0.0
    d_ref_2: float = 0.0
    ref_2: float = 0.0
    d: float = 0.0
    d_2: float = 0.0
    ref: float = 0.0

    def add(self, d: Tensor, ref: Tensor, ok: Tensor | None = None) -> None:
        """d, ref: [rows, N]. ok: which elements count; None for all."""
        if self.plain is not None:
            d, ref, ok = d[:, self.plain], ref[:, self.plain], None if ok is None else ok[:, self.plain]
        if ok is not None and not bool(ok.all()):
            d, ref = d[ok], ref[ok]
        d, ref = d.reshape(-1), ref.reshape(-1)
        product = d * ref
        sums = (product.sum(), product.dot(product), ref.dot(ref), d.sum(), d.dot(d), ref.abs().sum())
        d_ref, d_ref_2, ref_2, d_1, d_2, ref_1 = torch.stack(sums).tolist()  # one wait for a device, not six
        self.count += d.numel()
        self.d_ref += d_ref
        self.d_ref_2 += d_ref_2
        self.ref_2 += ref_2
        self.d += d_1
        self.d_2 += d_2
        self.ref += ref_1


def compare(problem: Problem, draw: Draw, out: Tensor) -> tuple[float, str]:
    """(largest error over tolerance, what is wrong or "") of one output."""
    if not out.numel():
        return 0.0, ""
    got = out.reshape(-1, problem.n)
    value, tolerance = draw.value.reshape(got.shape), draw.tolerance.reshape(got.shape)
    sums = _Sums(draw.plain) if draw.kind == "uniform" else None
    worst, where = 0.0, -1
    rows = max(1, _CHUNK[got.device.type] // problem.n)
    for start in range(0, got.shape[0], rows):
        part = slice(start, start + rows)
        ratio = check_elements(got[part], value[part], tolerance[part], problem.out_dtype, sums).view(-1)
        top = int(ratio.argmax())
        if not float(ratio[top]) <= worst:
            worst, where = float(ratio[top]), start * problem.n + top
    if worst > 1.0:
        return worst, _describe(problem, draw, got.view(-1), where, worst)
    return worst, "" if sums is None else _aggregate(problem, sums)


def check_elements(out: Tensor, value: Tensor, tolerance: Tensor, dtype: str, sums: _Sums | None = None) -> Tensor:
    """Error over tolerance of each element [rows, N]: wrong above 1. dtype: the output's. sums: gathers d and ref."""
    check = _check_integers if dtype in INTEGERS else _check_floats
    return check(out, value, tolerance, dtype, sums)


def _check_floats(out: Tensor, value: Tensor, tolerance: Tensor, dtype: str, sums: _Sums | None) -> Tensor:
    got, ref, tol = out.double(), value.double(), tolerance.double()
    top = float(torch.finfo(out.dtype).max)
    ratio = (got - ref).abs_().div_(tol)
    odd = ~(got.isfinite() & ref.isfinite() & tol.isfinite())
    if bool(odd.any()):
        same = (got.isnan() & ref.isnan()) | (got == ref)
        over = (ref.abs() + tol > top) & ((got == ref.sign() * math.inf) | got.isnan())  # beyond the output's range
        ratio = torch.where(odd, torch.where(same | over | tol.isinf(), 0.0, math.inf), ratio)
    saturated = (ref.abs() > top) & (got == ref.sign() * top)
    ratio = ratio.masked_fill_(saturated, 0.0)
    if sums is not None:
        rounded = ref.to(out.dtype).double()
        sums.add(got - rounded, ref, ~odd & rounded.isfinite())
    return ratio


def _check_integers(out: Tensor, value: Tensor, tolerance: Tensor, dtype: str, sums: _Sums | None) -> Tensor:
    if not value.is_floating_point() and out.dtype in (torch.int32, torch.int64):
        info = torch.iinfo(out.dtype)
        return torch.where(out.to(torch.int64) == value.clamp(info.min, info.max), 0.0, math.inf)
    got, ref, tol = out.double(), value.double(), tolerance.double()
    low, high = (to_integer(ref + sign * tol, dtype) for sign in (-1.0, 1.0))
    inside = ((got >= low) & (got <= high)) | tol.isinf()
    nearest = to_integer(ref, dtype)
    if sums is not None:
        sums.add(got - nearest, nearest)
    off = torch.where(got == nearest, 0.0, 1.0)
    return torch.where(inside, off, 1.0 + (got - nearest).abs())


def _describe(problem: Problem, draw: Draw, got: Tensor, where: int, worst: float) -> str:
    at = []
    rest = where
    for size in (problem.n, problem.m):
        at.append(rest % size)
        rest //= size
    place = (rest, *reversed(at)) if problem.family == "bmm" else tuple(reversed(at))
    value = draw.value.reshape(-1)[where].item()
    found = got[where].item()
    special = [draw.rows[place[-2]] and f"a row of A that is {draw.rows[place[-2]]}"] if draw.rows else []
    special += [f"a column with {label}"] if (label := draw.columns.label(place[-1])) else []
    seen = f", in {' and '.join(filter(None, special))}" if any(special) else ""
    if found != found and not math.isnan(float(value)):
        return f"out{list(place)} is NaN (or was never written) where {value:.6g} is expected{seen}"
    by = f", {worst:.3g} times the bound" if math.isfinite(worst) else ""
    return f"out{list(place)} is {found:.9g}, expected {value:.9g}{by}{seen}"


def _aggregate(problem: Problem, sums: _Sums) -> str:
    """Slope and mean of d = out - round(value), each against six of its standard errors and an allowance.

    Allowance: sums in float32 that round to nearest drift by some sqrt(k) roundings at most, those of matrix units
    that truncate by about one rounding every eight products; one part in 2**16 for the value's own distribution. A
    cast within the epilogue puts values on a grid, which what follows may shift against the output's, so that the
    output's rounding goes one way: by the cast's own rounding at most.
    """
    if sums.count < 2 or sums.ref_2 <= 0.0:
        return ""
    u = error_unit(problem) / max(4.0 * math.sqrt(max(problem.k, 1)), 1.0) if not is_integer(problem) else 2.0**-24
    drift = (4.0 * math.sqrt(problem.k) + problem.k / 8.0) * u + 2.0**-16 + _cast_unit(problem)
    slope = sums.d_ref / sums.ref_2
    slope_error = math.sqrt(sums.d_ref_2) / sums.ref_2
    if abs(slope) > drift + _SIGMAS * slope_error:
        return f"the whole output is scaled by {1.0 + slope:.6f} (standard error {slope_error:.1e})"
    mean, mean_error = sums.d / sums.count, math.sqrt(sums.d_2) / sums.count
    if abs(mean) > drift * sums.ref / sums.count + _SIGMAS * mean_error:
        return f"the output is off by {mean:.3g} on average (standard error {mean_error:.1e})"
    return ""


def _cast_unit(problem: Problem) -> float:
    """The coarsest rounding to a float dtype within the epilogue; 0.0 for none. The output's own does not count."""
    steps = problem.epilogue
    inner = steps[:-1] if steps and steps[-1].dtype == problem.out_dtype else steps
    return max((UNIT[str(s.dtype)] for s in inner if s.kind == "cast" and s.dtype in UNIT), default=0.0)
