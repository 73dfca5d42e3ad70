"""Verification at other M: operands of several M one above the other, which a kernel is called on in turn.

A Plan serves every M by kernels that were raced at a few. One comparison with the oracle then checks the outputs of all
of those calls: on a GPU, comparing a small output takes longer than computing it (2.4 ms on an H200 for some fifty
launches and ten waits), and a candidate is checked at ten to twenty M.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.candidate import Candidate
from ..core.decision import Verdict
from ..core.problem import Problem
from .compare import compare
from .draws import Draw, at_rows, rows_fit, single_row
from .inputs import GUARD, Inputs, fill_guard
from .oracle import INTEGERS
from .row_counts import other_row_counts
from .verify import INT_POISONS, PATTERN, Run, poison_value, same_bits, unwritten, verify

_TOGETHER = {"cpu": 1 << 17, "cuda": 1 << 22}  # elements of the outputs that are compared at once
_BOUNDARY = 16  # rows: a part begins at a multiple of it, and so of 16 bytes whatever K is
_ALIGNMENT = 64  # bytes that an output begins at a multiple of, as torch's tensors do
_KEPT_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}  # of operands and answers that are kept for the next candidate


class Part(NamedTuple):
    """The rows of one M in operands that hold several: ``m`` of them, from ``start`` on."""

    start: int
    m: int


class Patience:
    """The time that calls may take. It runs from the first ``start``; before that it is never over."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._began = seconds, 0.0

    def start(self) -> None:
        """Begin, unless it has begun."""
        self._began = self._began or time.perf_counter()

    def over(self) -> bool:
        """Whether the time has passed."""
        return self._began > 0.0 and time.perf_counter() - self._began > self._seconds


def row_groups(problem: Problem, counts: Iterable[int], device: torch.device) -> list[tuple[int, ...]]:
    """The numbers of rows that are checked together: as many as one comparison is to hold, the first M first.

    Odd and even M are apart, since operands of odd M begin off a boundary (see ``draws.at_rows``). An M is alone where
    a part of a larger matrix would not have the Problem's layout: batches, columns, gaps between the output's rows.
    """
    most = _TOGETHER[device.type] // max(problem.n, 1)
    apart = problem.family == "bmm" or problem.a.layout.order == "col" or problem.out.order == "col"
    apart = apart or problem.out.ld not in (None, problem.n)
    groups: list[list[int]] = []
    for m in counts:
        if not rows_fit(problem, m):
            continue
        room = (group for group in groups if group[0] % 2 == m % 2 and sum(group) + m <= most)
        group = None if apart else next(room, None)
        if group is None:
            groups.append([m])
        else:
            group.append(m)
    return [tuple(group) for group in groups]


def parts_of(counts: Sequence[int]) -> tuple[Part, ...]:
    """Where the rows of each M are in operands that hold them all: from a boundary on, with other rows between."""
    parts, start = [], 0
    for m in counts:
        parts.append(Part(start, m))
        start += (m // _BOUNDARY + 1) * _BOUNDARY
    return tuple(parts)


def part_of(problem: Problem, inputs: Inputs, part: Part) -> Inputs:
    """The operands of one M: views of those that hold several."""
    dims = _row_dims(problem)
    aux = (t if dim is None else t.narrow(dim, part.start, part.m) for dim, t in zip(dims, inputs.aux, strict=True))
    return replace(inputs, a=inputs.a.narrow(-2, part.start, part.m), aux=tuple(aux))


def _row_dims(problem: Problem) -> list[int | None]:
    """The dimension of each of the epilogue's tensors that is M; None where there is none."""
    dims = {"row": 0, "full": -2}
    return [dims.get(step.axis) for step in problem.epilogue if step.takes_tensor]


def _guard_parts(problem: Problem, inputs: Inputs, parts: Sequence[Part]) -> None:
    """Fill what is between parts with the poison of guards: a kernel that uses rows beyond its M is to meet it."""
    held = [(-2, inputs.a), *zip(_row_dims(problem), inputs.aux, strict=True)]
    for before, after in pairwise(parts):
        start = before.start + before.m
        for dim, t in held:
            if dim is not None:
                fill_guard(t.narrow(dim, start, after.start - start))


@dataclass(frozen=True, slots=True)
class RowStack:
    """Operands of several M with the answers, and guarded memory for the outputs of all of them.

    draw: ``value`` and ``tolerance`` hold the rows of one part after those of another, without what is between them in
    A. spans: where each output lies in a frame, first and last byte. frames: bytes with a pattern, and the outputs in
    them poisoned: by NaN in the first, by the largest number in the second (integers: by two bytes).
    """

    problem: Problem
    parts: tuple[Part, ...]
    draw: Draw
    spans: tuple[tuple[int, int], ...]
    frames: tuple[Tensor, Tensor]

    @classmethod
    def make(cls, problem: Problem, draws: Sequence[Draw], counts: Sequence[int]) -> RowStack | None:
        """Operands of these M, all odd or all even, from draws of the Problem. None where nothing is known of them."""
        bank = next((draw.bank for draw in draws if draw.bank is not None), None)
        if bank is None:
            return None
        parts, offset = parts_of(counts), counts[0] % 2
        places: list[int] = []
        for part in parts:
            places += [0] * (part.start - len(places)) + bank.places(part.m)
        draw = bank.draw(places, offset, [place for m in counts for place in bank.places(m)])
        _guard_parts(problem, draw.inputs, parts)
        draw = draw.marked({}, weight=False)
        size = getattr(torch, problem.out_dtype).itemsize
        spans, at = [], 0
        for m in counts:
            first = at + GUARD + offset * size
            spans.append((first, first + m * problem.n * size))
            at = -(-spans[-1][1] // _ALIGNMENT) * _ALIGNMENT
        frames = (_frame(problem, spans, at + GUARD, poison, draw.inputs.a.device) for poison in (0, 1))
        first_frame, second_frame = frames
        return cls(problem, parts, draw, tuple(spans), (first_frame, second_frame))

    @property
    def nbytes(self) -> int:
        """Bytes that it occupies, a shared B not counted."""
        draw = self.draw
        return sum(t.numel() * t.element_size() for t in (draw.inputs.a, draw.value, draw.tolerance, *self.frames))

    def check(self, run: Run, patience: Patience) -> tuple[float, str]:
        """Call a kernel twice at each M, as long as the patience lasts: (largest error over tolerance, what is wrong or
        "")."""
        frames, done = [frame.clone() for frame in self.frames], 0
        for part, span in zip(self.parts, self.spans, strict=True):
            if patience.over():
                break
            inputs = part_of(self.problem, self.draw.inputs, part)
            if self.draw.offset and self.problem.a.align == 0:
                inputs = replace(inputs, a=single_row(self.problem, inputs.a))
            for frame in frames:
                run(inputs, _output(self.problem, frame, span))
            patience.start()
            done += 1
        return self._judge(frames, done) if done else (0.0, "")

    def _judge(self, frames: Sequence[Tensor], done: int) -> tuple[float, str]:
        """What is wrong with the outputs of the first ``done`` parts."""
        for frame in frames:
            changed = int((self._guards(frame) != PATTERN).sum())
            if changed:
                return 0.0, f"{changed} bytes before or after the output were overwritten"
        rows = sum(part.m for part in self.parts[:done])
        first, second = (self._outputs(frame, done, rows) for frame in frames)
        problem = self.problem.with_m(rows)
        draw = replace(self.draw, value=self.draw.value[:rows], tolerance=self.draw.tolerance[:rows])
        worst, finding = compare(problem, draw, first)
        if not finding and not same_bits(first, second):
            again, finding = compare(problem, draw, second)
            worst, finding = max(worst, again), finding or unwritten(problem, first, second)
        return worst, finding or self.draw.touched(weight=False)

    def _guards(self, frame: Tensor) -> Tensor:
        """All bytes of a frame but those of outputs."""
        edges = [0, *(edge for span in self.spans for edge in span), frame.numel()]
        return torch.cat([frame[first:last] for first, last in zip(edges[::2], edges[1::2], strict=True)])

    def _outputs(self, frame: Tensor, done: int, rows: int) -> Tensor:
        """The outputs of the first ``done`` parts, one above the other: [rows, N]."""
        parts = [frame[first:last] for first, last in self.spans[:done]]
        return torch.cat(parts).view(getattr(torch, self.problem.out_dtype)).view(rows, self.problem.n)


def _frame(
    problem: Problem, spans: Sequence[tuple[int, int]], length: int, poison: int, device: torch.device
) -> Tensor:
    """Bytes filled with a pattern, and the outputs in them poisoned. poison: as of ``verify.guarded``."""
    frame = torch.full((length,), PATTERN, dtype=torch.uint8, device=device)
    for span in spans:
        out = _output(problem, frame, span)
        if problem.out_dtype in INTEGERS:
            frame[slice(*span)].fill_(INT_POISONS[poison])
        else:
            out.fill_(poison_value(out, poison))
    return frame


def _output(problem: Problem, frame: Tensor, span: tuple[int, int]) -> Tensor:
    """The output in some bytes of a frame: [m, N]."""
    return frame[slice(*span)].view(getattr(torch, problem.out_dtype)).view(-1, problem.n)


class OtherRows:
    """Verification of a Problem's candidates at other M. Operands that served for one candidate serve for the next."""

    def __init__(self, problem: Problem, draws: Sequence[Draw]) -> None:
        self._problem, self._draws = problem, draws
        self._device = draws[0].inputs.a.device
        self._kept: dict[tuple[int, ...], RowStack] = {}

    def verify(self, run: Run, candidate: Candidate, patience_s: float) -> Verdict:
        """The Verdict for a kernel at the M of ``other_row_counts``, the likeliest to show a fault first.

        patience_s: time for the calls and comparisons, beyond the first call. Whatever ``run`` raises passes through.
        """
        worst, patience = 0.0, Patience(patience_s)
        for counts in row_groups(self._problem, other_row_counts(self._problem, candidate), self._device):
            if patience.over():
                break
            stack = self._stack(counts) if len(counts) > 1 else None
            if stack is None:
                found = self._alone(run, counts)
                patience.start()
            else:
                found = self._together(run, stack, patience)
            if not found.ok:
                return found
            worst = max(worst, found.worst)
        return Verdict("within_bound", worst=worst)

    def touched(self) -> bool:
        """Whether a kernel has written into operands or answers of other M."""
        return any(stack.draw.touched(weight=False) for stack in self._kept.values())

    def _stack(self, counts: tuple[int, ...]) -> RowStack | None:
        stack = self._kept.get(counts) or RowStack.make(self._problem, self._draws, counts)
        if stack is None:
            return None
        self._kept[counts] = stack
        while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > _KEPT_BYTES[self._device.type]:
            self._kept.pop(next(iter(self._kept)))
        return stack

    def _together(self, run: Run, stack: RowStack, patience: Patience) -> Verdict:
        worst, finding = stack.check(run, patience)
        if not finding:
            return Verdict("within_bound", worst=worst)
        counts = [part.m for part in stack.parts]
        found = self._alone(run, counts)  # which says where it is
        if not found.ok:
            return found
        text = f"{finding} (M = {', '.join(map(str, counts))} one after another; not so when called again)"
        return Verdict("unstable", text, min(worst, 1e30))

    def _alone(self, run: Run, counts: Sequence[int]) -> Verdict:
        worst = 0.0
        for m in counts:
            draw = at_rows(self._problem, self._draws, m)
            if draw is None:
                continue
            found = verify(run, self._problem, (draw,), 0.0)
            if not found.ok:
                return found
            worst = max(worst, found.worst)
        return Verdict("within_bound", worst=worst)
