"""Comparison of an output with the oracle, for each element and in aggregate.

The elementwise test uses the Oracle's value and error (verify/oracle.py):

    |out - value| <= u_out * |value| + error       (integers: round(value - error) <= out <= round(value + error))

The aggregate test compares the output with the *rounded* value: d = out - round(value). For a correct kernel, d is
mostly 0 and has no preferred sign. So the slope sum(d * value) / sum(value**2) and the mean of d stay within six of
their own standard errors plus an allowance for the accumulator's rounding. A uniform factor of 1.002 changes the slope
by 0.002 at every K; the allowance is 0.00015 at K = 16384.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.devices import is_host
from ..core.problem import Problem
from .oracle import INTEGERS, UNIT, error_unit, is_integer, to_integer
from .reference_cases import ReferenceCase

# Elements compared at a time: they fit a core's L2; on other devices there are few launches.
_CHUNK, _DEVICE_CHUNK = 1 << 17, 1 << 25
_SIGMAS = 6.0


@dataclass(slots=True)
class _Sums:
    """The sums for the aggregate test over d = out - round(value) and ref = value, of finite elements only.

    ordinary_columns: mask [N] of the columns that are included; None for all. count: number of elements. d, ref: sums
    of d and of |ref|. d_2, ref_2: sums of squares. d_ref, d_ref_2: sums of d * ref and of its square.
    """

    ordinary_columns: Tensor | None = None
    count: int = 0
    d_ref: float = 0.0
    d_ref_2: float = 0.0
    ref_2: float = 0.0
    d: float = 0.0
    d_2: float = 0.0
    ref: float = 0.0

    def add(self, d: Tensor, ref: Tensor, mask: Tensor | None = None) -> None:
        """Add elements to the sums. d, ref: [rows, N]. ok: mask of the elements that are included; None for all."""
        if self.ordinary_columns is not None:
            d, ref, mask = (
                d[:, self.ordinary_columns],
                ref[:, self.ordinary_columns],
                None if mask is None else mask[:, self.ordinary_columns],
            )
        if mask is not None and not bool(mask.all()):
            d, ref = d[mask], ref[mask]
        d, ref = d.reshape(-1), ref.reshape(-1)
        product = d * ref
        sums = (product.sum(), product.dot(product), ref.dot(ref), d.sum(), d.dot(d), ref.abs().sum())
        d_ref, d_ref_2, ref_2, d_1, d_2, ref_1 = torch.stack(sums).tolist()  # one device synchronization, not six
        self.count += d.numel()
        self.d_ref += d_ref
        self.d_ref_2 += d_ref_2
        self.ref_2 += ref_2
        self.d += d_1
        self.d_2 += d_2
        self.ref += ref_1


def compare(problem: Problem, case: ReferenceCase, out: Tensor) -> tuple[float, str]:
    """Compare an output with the expected result. Returns (largest error over tolerance, what is wrong or "")."""
    if not out.numel():
        return 0.0, ""
    actual = out.reshape(-1, problem.columns)
    value, tolerance = case.value.reshape(actual.shape), case.tolerance.reshape(actual.shape)
    sums = _Sums(case.ordinary_columns) if case.kind == "uniform" else None
    worst, flat_index = 0.0, -1
    rows = max(1, (_CHUNK if is_host(actual.device.type) else _DEVICE_CHUNK) // problem.columns)
    for start in range(0, actual.shape[0], rows):
        part = slice(start, start + rows)
        ratio = check_elements(actual[part], value[part], tolerance[part], problem.out_dtype, sums).view(-1)
        top = int(ratio.argmax())
        if not float(ratio[top]) <= worst:
            worst, flat_index = float(ratio[top]), start * problem.columns + top
    if worst > 1.0:
        return worst, _describe(problem, case, actual.view(-1), flat_index, worst)
    return worst, "" if sums is None else _aggregate(problem, sums)


def check_elements(out: Tensor, value: Tensor, tolerance: Tensor, dtype: str, sums: _Sums | None = None) -> Tensor:
    """Return the error over tolerance of each element [rows, N]; above 1, an element is wrong.

    dtype: the output's dtype. sums: gets the elements for the aggregate test.
    """
    check = _check_integers if dtype in INTEGERS else _check_floats
    return check(out, value, tolerance, dtype, sums)


def _check_floats(out: Tensor, value: Tensor, tolerance: Tensor, dtype: str, sums: _Sums | None) -> Tensor:
    actual, ref, tol = out.double(), value.double(), tolerance.double()
    top = float(torch.finfo(out.dtype).max)
    ratio = (actual - ref).abs_().div_(tol)
    odd = ~(actual.isfinite() & ref.isfinite() & tol.isfinite())
    if bool(odd.any()):
        same = (actual.isnan() & ref.isnan()) | (actual == ref)
        # The expected value may overflow the output's dtype: an infinity or NaN is correct.
        over = (ref.abs() + tol > top) & ((actual == ref.sign() * math.inf) | actual.isnan())
        ratio = torch.where(odd, torch.where(same | over | tol.isinf(), 0.0, math.inf), ratio)
    saturated = (ref.abs() > top) & (actual == ref.sign() * top)
    ratio = ratio.masked_fill_(saturated, 0.0)
    if sums is not None:
        rounded = ref.to(out.dtype).double()
        sums.add(actual - rounded, ref, ~odd & rounded.isfinite())
    return ratio


def _check_integers(out: Tensor, value: Tensor, tolerance: Tensor, dtype: str, sums: _Sums | None) -> Tensor:
    if not value.is_floating_point() and out.dtype in (torch.int32, torch.int64):
        info = torch.iinfo(out.dtype)
        return torch.where(out.to(torch.int64) == value.clamp(info.min, info.max), 0.0, math.inf)
    actual, ref, tol = out.double(), value.double(), tolerance.double()
    low, high = (to_integer(ref + sign * tol, dtype) for sign in (-1.0, 1.0))
    inside = ((actual >= low) & (actual <= high)) | tol.isinf()
    nearest = to_integer(ref, dtype)
    if sums is not None:
        sums.add(actual - nearest, nearest)
    off = torch.where(actual == nearest, 0.0, 1.0)
    return torch.where(inside, off, 1.0 + (actual - nearest).abs())


def _describe(problem: Problem, case: ReferenceCase, actual: Tensor, flat_index: int, worst: float) -> str:
    indices = []
    rest = flat_index
    for size in (problem.columns, problem.m):
        indices.append(rest % size)
        rest //= size
    position = (rest, *reversed(indices)) if problem.is_batched else tuple(reversed(indices))
    value = case.value.reshape(-1)[flat_index].item()
    number = actual[flat_index].item()
    special = [case.rows[position[-2]] and f"a row of A that is {case.rows[position[-2]]}"] if case.rows else []
    halves = (0,) if problem.gate is None else (0, problem.columns)
    labels = [label for half in halves if (label := case.columns.label(position[-1] + half))]
    special += [f"a column with {label}" for label in labels]
    context = f", in {' and '.join(filter(None, special))}" if any(special) else ""
    if number != number and not math.isnan(float(value)):
        return f"out{list(position)} is NaN (or was never written) where {value:.6g} is expected{context}"
    by = f", {worst:.3g} times the bound" if math.isfinite(worst) else ""
    return f"out{list(position)} is {number:.9g}, expected {value:.9g}{by}{context}"


def _aggregate(problem: Problem, sums: _Sums) -> str:
    """Return what the slope and the mean of d = out - round(value) show to be wrong; empty for nothing.

    Slope and mean are each compared with six of their standard errors plus an allowance. The allowance has three terms.
    Float32 sums that round to nearest drift by some sqrt(k) roundings at most; sums of matrix units that truncate, by
    about one rounding every eight products. The distribution of the values accounts for one part in 2**16. A cast
    within the epilogue rounds values to a grid, which later steps may shift against the output's grid, so that the
    output's rounding has a preferred sign: its effect is at most the cast's own rounding.
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
    """Return the largest unit roundoff of float casts within the epilogue, and of a norm; 0.0 for none.

    A last cast to the output's dtype is not counted. A norm rounds the elements of A, whose errors all columns share:
    the slope's spread is that of their mean over a row.
    """
    steps = problem.epilogue
    inner = steps[:-1] if steps and steps[-1].dtype == problem.out_dtype else steps
    rounded = 0.0 if problem.norm is None else _SIGMAS * UNIT[problem.a.dtype] / math.sqrt(max(problem.k, 1))
    return rounded + max((UNIT[str(s.dtype)] for s in inner if s.kind == "cast" and s.dtype in UNIT), default=0.0)
