"""Is this kernel right? Elementwise and in aggregate, on fresh data, into poisoned memory between guard bands.

Elementwise, with the Oracle's value and error (reference.py):

    |out - value| <= u_out * |value| + error       (integers: round(value - error) <= out <= round(value + error))

In aggregate, the output against the *rounded* value, d = out - round(value): a correct kernel's d is mostly 0 and has
no preferred sign, so the slope sum(d * value) / sum(value**2) and the mean of d stay within six of their own standard
errors plus an allowance for the accumulator's rounding. A uniform factor of 1.002 moves the slope by 0.002 at every K;
the allowance is 0.00015 at K = 16384.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decision import Verdict
from ..problem import Problem, bits
from ..reference import INTEGERS, UNIT, error_unit, is_integer, to_integer
from .draws import Draw, prepare
from .inputs import Inputs

__all__ = ["Draw", "Run", "prepare", "verify"]

Run = Callable[[Inputs, Tensor], None]

_GUARD = 4096  # bytes before and after the output; keeps torch's 64-byte alignment
_PATTERN = 0xA5
_INT_POISONS = (0x5B, 0xC4)  # two bytes that no element can both keep by chance
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 25}  # elements compared at a time: in a core's L2, or few launches
_SIGMAS = 6.0
_MOST_RUNS = 10  # races that show in one run of three are missed once in 40 times

DIFFERING = "repeated runs differ within the bound"


def verify(run: Run, problem: Problem, draws: Sequence[Draw], patience_s: float = 0.1) -> Verdict:
    """Run a kernel on every draw (``run(inputs, out)``) and say whether it is right.

    It runs twice on the first draw, up to ten times as far as ``patience_s`` goes, and twice on each where the output
    holds integers. Returns exact, within_bound, wrong or unstable. Whatever ``run`` raises passes through. ``detail``
    says where and by how much, or that repeated runs differ within the bound; it is empty when all repeated bit for
    bit. Draws may have other M than the Problem.
    """
    if not draws:
        raise ValueError("verify needs at least one draw; make them with prepare(problem, seed)")
    worst, repeated = 0.0, ""
    for index, draw in enumerate(draws):
        least = 2 if index == 0 or problem.out_dtype in INTEGERS else 1
        found = _judge(run, problem.with_m(draw.m), draw, least, patience_s if index == 0 else 0.0)
        worst = max(worst, found.worst)
        following = draws[index + 1] if index + 1 < len(draws) else None
        # The weight, the largest of what is summed up, is looked at after the last draw that has it.
        last = bool(found.finding) or following is None or following.inputs.b is not draw.inputs.b
        fault = found.fault or _written(draw, last)
        where = _at(problem, draw)
        if found.differs and found.finding and not fault:
            text = f"two runs on the same operands differ, and {found.finding} ({where})"
            return Verdict("unstable", text, _finite(found.worst))
        if fault or found.finding:
            return Verdict("wrong", f"{fault or found.finding} ({where})", _finite(worst))
        repeated = DIFFERING if found.differs else repeated
    if worst == 0.0 and problem.out_dtype in INTEGERS:
        return Verdict("exact", repeated, 0.0)
    return Verdict("within_bound", repeated, worst)


def _at(problem: Problem, draw: Draw) -> str:
    """Which draw it is, in words."""
    return f"{draw.kind} draw" if draw.m == problem.m else f"{draw.kind} draw of M = {draw.m}"


@dataclass(slots=True)
class _Found:
    """What runs on one draw showed. fault: what was written where it should not be; finding: what is wrong with the
    output; differs: whether two runs gave different bits."""

    worst: float = 0.0
    fault: str = ""
    finding: str = ""
    differs: bool = False


def _judge(run: Run, problem: Problem, draw: Draw, least: int, patience_s: float) -> _Found:
    """Run ``least`` times, and more while ``patience_s`` lasts and nothing is wrong.

    The first run does not count against it: that one sets things up.
    """
    found, start = _Found(), 0.0
    first = None
    for number in range(_MOST_RUNS):
        if number >= least and (found.fault or found.finding or time.perf_counter() - start >= patience_s):
            break
        out, fault = _execute(run, problem, draw, number % 2)
        found.fault = found.fault or fault
        if first is not None and _same_bits(first, out):
            continue
        gap, finding = _compare(problem, draw, out)
        found.worst, found.finding = max(found.worst, gap), found.finding or finding
        if first is not None:
            found.differs = True
            found.fault = found.fault or (_unwritten(problem, first, out) if number == 1 else "")
        else:
            first, start = out, time.perf_counter()
    return found


def _written(draw: Draw, weight: bool) -> str:
    """What the kernel wrote into (or beside) and must not, in words; empty for nothing, as it should be."""
    touched = draw.touched(weight)
    if "the oracle's" in touched:
        return f"it wrote far beyond its output, where verification keeps what it compares with: {touched}"
    return f"it wrote into its inputs, or just beside them: {touched}" if touched else ""


# --- running into guarded memory --------------------------------------------------------------------------------


def _execute(run: Run, problem: Problem, draw: Draw, poison: int) -> tuple[Tensor, str]:
    """Run once. Returns the output, which stays where it is, and what was written outside it, in words."""
    frame, out = guarded(problem, draw.inputs.a.device, poison, draw.offset)
    run(draw.inputs, out)
    return out, _trespass(problem, frame, draw.offset)


def guarded(problem: Problem, device: torch.device, poison: int, offset: int = 0) -> tuple[Tensor, Tensor]:
    """(frame, out): bytes filled with a pattern, and the output inside them, poisoned.

    poison: 0 for NaN (integers: a byte), 1 for the largest number (another byte): no element is right with both.
    offset: elements that the output starts behind a boundary.
    """
    size = bits(problem.out_dtype) // 8
    batch = problem.batch if problem.family == "bmm" else 1
    slow, fast = (problem.n, problem.m) if problem.out.order == "col" else (problem.m, problem.n)
    lead = problem.out.ld or max(fast, 1)
    length = 2 * _GUARD + (batch * slow * lead + offset) * size
    frame = torch.full((length,), _PATTERN, dtype=torch.uint8, device=device)
    body = _body(frame, offset * size).view(getattr(torch, problem.out_dtype))
    strides = (1, lead) if problem.out.order == "col" else (lead, 1)
    shape = (batch, problem.m, problem.n)
    out = body.as_strided(shape, (slow * lead, *strides), body.storage_offset())
    if problem.out_dtype in INTEGERS:
        body.view(torch.uint8).fill_(_INT_POISONS[poison])
    else:
        out.fill_(_poison(out, poison))
    if fast < lead:
        _gaps(problem, frame, offset).fill_(_PATTERN)
    return frame, out if problem.family == "bmm" else out[0]


def _body(frame: Tensor, skipped: int) -> Tensor:
    """The bytes between the guards, all but so many at the start."""
    return frame[_GUARD + skipped : frame.numel() - _GUARD]


def _gaps(problem: Problem, frame: Tensor, offset: int) -> Tensor:
    """The bytes between the rows (or columns) of the output: [rows, gap]."""
    size = bits(problem.out_dtype) // 8
    fast = problem.m if problem.out.order == "col" else problem.n
    lead = problem.out.ld or max(fast, 1)
    return _body(frame, offset * size).view(-1, lead * size)[:, fast * size :]


def _trespass(problem: Problem, frame: Tensor, offset: int) -> str:
    start = _GUARD + offset * bits(problem.out_dtype) // 8
    places = {"before": frame[:start], "after": frame[frame.numel() - _GUARD :]}
    if frame.numel() > start + _GUARD:
        places["between the rows of"] = _gaps(problem, frame, offset)
    for name, memory in places.items():
        changed = int((memory != _PATTERN).sum())
        if changed:
            return f"{changed} bytes {name} the output were overwritten"
    return ""


def _poison(out: Tensor, which: int) -> float:
    """What an output of floats is filled with."""
    return math.nan if which == 0 else float(torch.finfo(out.dtype).max)


def _unwritten(problem: Problem, first: Tensor, second: Tensor) -> str:
    """How many elements of an output still hold the poison of their run (the first, the second), in words."""
    if problem.out_dtype not in INTEGERS:
        kept = first.isnan() & (second == _poison(second, 1))
    else:
        kept = torch.ones_like(first, dtype=torch.bool)
        for out, byte in zip((first, second), _INT_POISONS, strict=True):
            kept &= out == torch.full((out.element_size(),), byte, dtype=torch.uint8, device=out.device).view(out.dtype)
    count = int(kept.sum())
    return f"{count} elements of the output were never written" if count else ""


def _same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal bit for bit, NaN payloads aside."""
    return torch.equal(x, y) or torch.equal(torch.nan_to_num(x.double()), torch.nan_to_num(y.double()))


def _finite(x: float) -> float:
    return x if math.isfinite(x) else 1e30


# --- comparing --------------------------------------------------------------------------------------------------


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


def _compare(problem: Problem, draw: Draw, out: Tensor) -> tuple[float, str]:
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
