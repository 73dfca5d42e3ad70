"""Is this kernel right? On fresh data, into poisoned memory between guards, several times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.decision import Verdict
from ..core.problem import Problem, bits
from .compare import compare
from .draws import Draw, prepare
from .inputs import GUARD, Inputs
from .oracle import INTEGERS

__all__ = ["Draw", "Run", "prepare", "verify"]

Run = Callable[[Inputs, Tensor], None]

PATTERN = 0xA5
INT_POISONS = (0x5B, 0xC4)  # two bytes that no element can both keep by chance
_REPEATED_BYTES = 64 << 20  # of outputs that are compared together
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

    The first run does not count against it: that one sets things up. Runs beyond the second are compared together.
    """
    frame, first = _execute(run, problem, draw, 0)
    found = _Found(fault=_trespass(problem, frame, draw.offset))
    found.worst, found.finding = compare(problem, draw, first)
    done, start = 1, time.perf_counter()
    while done < least or (done < _MOST_RUNS and not (found.fault or found.finding)):
        spent_s = time.perf_counter() - start
        each_s = spent_s / max(done - 1, 1)
        count = 1 if done == 1 else min(int((patience_s - spent_s) / max(each_s, 1e-9)), _MOST_RUNS - done)
        if done >= least and (spent_s >= patience_s or count < 1):
            break
        count = max(1, min(count, _REPEATED_BYTES // frame.numel()))
        outputs = [_execute(run, problem, draw, number % 2) for number in range(done, done + count)]
        _add_repeated(problem, draw, (frame, first), outputs, found, done)
        done += count
    return found


def _add_repeated(
    problem: Problem,
    draw: Draw,
    first: tuple[Tensor, Tensor],
    outputs: Sequence[tuple[Tensor, Tensor]],
    found: _Found,
    done: int,
) -> None:
    """Add to ``found`` what outputs show beside the first one. done: runs before them."""
    frames = torch.stack([frame for frame, _ in outputs])
    if torch.equal(frames, first[0].expand_as(frames)):  # guards included, which were looked at
        return
    for number, (frame, out) in enumerate(outputs, done):
        found.fault = found.fault or _trespass(problem, frame, draw.offset)
        if same_bits(first[1], out):
            continue
        gap, finding = compare(problem, draw, out)
        found.worst, found.finding, found.differs = max(found.worst, gap), found.finding or finding, True
        found.fault = found.fault or (unwritten(problem, first[1], out) if number == 1 else "")


def _written(draw: Draw, weight: bool) -> str:
    """What the kernel wrote into (or beside) and must not, in words; empty for nothing, as it should be."""
    touched = draw.touched(weight)
    if "the oracle's" in touched:
        return f"it wrote far beyond its output, where verification keeps what it compares with: {touched}"
    return f"it wrote into its inputs, or just beside them: {touched}" if touched else ""


# --- running into guarded memory --------------------------------------------------------------------------------


def _execute(run: Run, problem: Problem, draw: Draw, poison: int) -> tuple[Tensor, Tensor]:
    """Run once. Returns the frame around the output (see ``guarded``), and the output in it."""
    frame, out = guarded(problem, draw.inputs.a.device, poison, draw.offset)
    run(draw.inputs, out)
    return frame, out


def guarded(problem: Problem, device: torch.device, poison: int, offset: int = 0) -> tuple[Tensor, Tensor]:
    """(frame, out): bytes filled with a pattern, and the output inside them, poisoned.

    poison: 0 for NaN (integers: a byte), 1 for the largest number (another byte): no element is right with both.
    offset: elements that the output starts behind a boundary.
    """
    size = bits(problem.out_dtype) // 8
    batch = problem.batch if problem.family == "bmm" else 1
    slow, fast = (problem.n, problem.m) if problem.out.order == "col" else (problem.m, problem.n)
    lead = problem.out.ld or max(fast, 1)
    length = 2 * GUARD + (batch * slow * lead + offset) * size
    frame = torch.full((length,), PATTERN, dtype=torch.uint8, device=device)
    body = _body(frame, offset * size).view(getattr(torch, problem.out_dtype))
    strides = (1, lead) if problem.out.order == "col" else (lead, 1)
    shape = (batch, problem.m, problem.n)
    out = body.as_strided(shape, (slow * lead, *strides), body.storage_offset())
    if problem.out_dtype in INTEGERS:
        body.view(torch.uint8).fill_(INT_POISONS[poison])
    else:
        out.fill_(poison_value(out, poison))
    if fast < lead:
        _gaps(problem, frame, offset).fill_(PATTERN)
    return frame, out if problem.family == "bmm" else out[0]


def _body(frame: Tensor, skipped: int) -> Tensor:
    """The bytes between the guards, all but so many at the start."""
    return frame[GUARD + skipped : frame.numel() - GUARD]


def _gaps(problem: Problem, frame: Tensor, offset: int) -> Tensor:
    """The bytes between the rows (or columns) of the output: [rows, gap]."""
    size = bits(problem.out_dtype) // 8
    fast = problem.m if problem.out.order == "col" else problem.n
    lead = problem.out.ld or max(fast, 1)
    return _body(frame, offset * size).view(-1, lead * size)[:, fast * size :]


def _trespass(problem: Problem, frame: Tensor, offset: int) -> str:
    start = GUARD + offset * bits(problem.out_dtype) // 8
    places = {"before": frame[:start], "after": frame[frame.numel() - GUARD :]}
    if frame.numel() > start + GUARD:
        places["between the rows of"] = _gaps(problem, frame, offset)
    if bool((torch.cat([memory.reshape(-1) for memory in places.values()]) == PATTERN).all()):
        return ""  # as it nearly always is: one wait for a device, not three
    for name, memory in places.items():
        changed = int((memory != PATTERN).sum())
        if changed:
            return f"{changed} bytes {name} the output were overwritten"
    return ""


def poison_value(out: Tensor, which: int) -> float:
    """What an output of floats is filled with."""
    return math.nan if which == 0 else float(torch.finfo(out.dtype).max)


def unwritten(problem: Problem, first: Tensor, second: Tensor) -> str:
    """How many elements of an output still hold the poison of their run (the first, the second), in words."""
    if problem.out_dtype not in INTEGERS:
        kept = first.isnan() & (second == poison_value(second, 1))
    else:
        kept = torch.ones_like(first, dtype=torch.bool)
        for out, byte in zip((first, second), INT_POISONS, strict=True):
            kept &= out == torch.full((out.element_size(),), byte, dtype=torch.uint8, device=out.device).view(out.dtype)
    count = int(kept.sum())
    return f"{count} elements of the output were never written" if count else ""


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal bit for bit, NaN payloads aside."""
    return torch.equal(x, y) or torch.equal(torch.nan_to_num(x.double()), torch.nan_to_num(y.double()))


def _finite(x: float) -> float:
    return x if math.isfinite(x) else 1e30
