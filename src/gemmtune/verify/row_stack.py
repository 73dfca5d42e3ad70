"""Verification of a kernel at values of M other than the Problem's.

A Plan serves every M with kernels that were timed at a few M. So each candidate is called at ten to twenty other M. The
operands of several M are stacked in one tensor, and one comparison with the oracle checks the outputs of all calls. On
a GPU, comparing a small output takes longer than computing it (2.4 ms on an H200 for some fifty launches and ten
synchronizations).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.base import Rounding
from ..core.candidate import Candidate
from ..core.decision import Verdict
from ..core.devices import is_host
from ..core.problem import Problem
from .compare import compare
from .inputs import GUARD, Inputs, fill_guard
from .oracle import INTEGERS
from .reference_cases import ReferenceCase, case_for_rows, rows_fit, single_row
from .row_counts import other_row_counts
from .verify import GUARD_BYTE, INT_POISONS, Run, poison_value, same_bits, unwritten, verify

# Output elements that are compared at once: on the host, on other devices.
_MAX_ELEMENTS, _MAX_DEVICE_ELEMENTS = 1 << 17, 1 << 22
_ROW_ALIGNMENT = 16  # rows: each part begins at a multiple of it, and so at a multiple of 16 bytes for every K
_BYTE_ALIGNMENT = 64  # bytes: alignment of each output, equal to that of torch's tensors
# Limit of the stacks that are cached for the next candidate.
_CACHE_BYTES, _DEVICE_CACHE_BYTES = 32 << 20, 512 << 20


class Part(NamedTuple):
    """The rows of one M in stacked operands: ``m`` rows, of which ``start`` is the first."""

    start: int
    m: int


class TimeLimit:
    """A time limit for calls, in seconds after the first call of ``start``. Before that, it is never over."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._start_s = seconds, 0.0

    def start(self) -> None:
        """Start the clock unless it is running."""
        self._start_s = self._start_s or time.perf_counter()

    def over(self) -> bool:
        """Whether the time limit has passed."""
        return self._start_s > 0.0 and time.perf_counter() - self._start_s > self._seconds


def row_groups(problem: Problem, counts: Iterable[int], device: torch.device) -> list[tuple[int, ...]]:
    """Return the groups of M that are checked with one comparison, in the order of ``counts``.

    The outputs of a group have a limited number of elements. Odd and even M are in separate groups, since operands of
    odd M are misaligned (see ``reference_cases.case_for_rows``). An M forms a group of its own when a part of a larger
    matrix would not have the Problem's layout: with batches, column-major layouts, or gaps between the output's rows.
    An M that A's layout does not permit is skipped.
    """
    max_rows = (_MAX_ELEMENTS if is_host(device.type) else _MAX_DEVICE_ELEMENTS) // max(problem.columns, 1)
    single = not rows_are_views(problem)
    groups: list[list[int]] = []
    for m in counts:
        if not rows_fit(problem, m):
            continue
        candidates = (group for group in groups if group[0] % 2 == m % 2 and sum(group) + m <= max_rows)
        group = None if single else next(candidates, None)
        if group is None:
            groups.append([m])
        else:
            group.append(m)
    return [tuple(group) for group in groups]


def rows_are_views(problem: Problem) -> bool:
    """Whether some rows of a larger matrix A, and of a larger output, have the Problem's layout themselves."""
    return not (
        problem.is_batched
        or problem.a.layout.order == "col"
        or problem.out.order == "col"
        or problem.out.ld not in (None, problem.columns)
    )


def parts_of(counts: Sequence[int]) -> tuple[Part, ...]:
    """Return the Part of each M in stacked operands. Parts begin at aligned rows, with unused rows between them."""
    parts, start = [], 0
    for m in counts:
        parts.append(Part(start, m))
        start += (m // _ROW_ALIGNMENT + 1) * _ROW_ALIGNMENT
    return tuple(parts)


def part_of(problem: Problem, inputs: Inputs, part: Part) -> Inputs:
    """Return the operands of one M as views of stacked operands."""
    dims = _row_dims(problem)
    aux = (t if dim is None else t.narrow(dim, part.start, part.m) for dim, t in zip(dims, inputs.aux, strict=True))
    return replace(inputs, a=inputs.a.narrow(-2, part.start, part.m), aux=tuple(aux))


def _row_dims(problem: Problem) -> list[int | None]:
    """Return, for each tensor of the epilogue, the dimension that has M elements; None when there is none."""
    dims = {"row": 0, "full": -2}
    return [dims.get(step.axis) for step in problem.epilogue if step.takes_tensor]


def _poison_between_parts(problem: Problem, inputs: Inputs, parts: Sequence[Part]) -> None:
    """Fill the rows between parts with poison, so that a kernel which uses rows beyond its M gives a wrong result."""
    tensors = [(-2, inputs.a), *zip(_row_dims(problem), inputs.aux, strict=True)]
    for before, after in pairwise(parts):
        start = before.start + before.m
        for dim, t in tensors:
            if dim is not None:
                fill_guard(t.narrow(dim, start, after.start - start))


@dataclass(frozen=True, slots=True)
class RowStack:
    """The stacked operands of several M, the expected results, and guarded memory for the outputs.

    parts: the rows of each M in the operands. case: the test case of all rows. Its ``value`` and ``tolerance`` have the
    rows of all parts without the unused rows that A has between parts. spans: the bytes (start, end) of each output in
    a frame. frames: two byte tensors with a guard pattern, in which the outputs are poisoned: with NaN in the first,
    with the largest number in the second (integers: with two different bytes).
    """

    problem: Problem
    parts: tuple[Part, ...]
    case: ReferenceCase
    spans: tuple[tuple[int, int], ...]
    frames: tuple[Tensor, Tensor]

    @classmethod
    def make(cls, problem: Problem, cases: Sequence[ReferenceCase], counts: Sequence[int]) -> RowStack | None:
        """Stack operands for ``counts`` (all odd or all even M), with rows from the Problem's test cases.

        Returns None when no test case has a bank of rows.
        """
        bank = next((case.bank for case in cases if case.bank is not None), None)
        if bank is None:
            return None
        parts, offset = parts_of(counts), counts[0] % 2
        rows: list[int] = []
        for part in parts:
            rows += [0] * (part.start - len(rows)) + bank.row_indices(part.m)
        case = bank.test_case(rows, offset, [row for m in counts for row in bank.row_indices(m)])
        _poison_between_parts(problem, case.inputs, parts)
        case = case.marked({}, weight=False)
        size = getattr(torch, problem.out_dtype).itemsize
        spans, end = [], 0
        for m in counts:
            first = end + GUARD + offset * size
            spans.append((first, first + m * problem.columns * size))
            end = -(-spans[-1][1] // _BYTE_ALIGNMENT) * _BYTE_ALIGNMENT
        frames = (_frame(problem, spans, end + GUARD, poison, case.inputs.a.device) for poison in (0, 1))
        first_frame, second_frame = frames
        return cls(problem, parts, case, tuple(spans), (first_frame, second_frame))

    @property
    def nbytes(self) -> int:
        """The memory size in bytes, without B, which stacks share."""
        case = self.case
        return sum(t.numel() * t.element_size() for t in (case.inputs.a, case.value, case.tolerance, *self.frames))

    def check(self, run: Run, time_limit: TimeLimit) -> tuple[float, str]:
        """Call a kernel twice at each M until ``time_limit`` is over, and compare the outputs.

        Returns (largest error over tolerance, what is wrong or "").
        """
        frames, part_count = [frame.clone() for frame in self.frames], 0
        for part, span in zip(self.parts, self.spans, strict=True):
            if time_limit.over():
                break
            inputs = part_of(self.problem, self.case.inputs, part)
            if self.case.offset and self.problem.a.align == 0:
                inputs = replace(inputs, a=single_row(self.problem, inputs.a))
            for frame in frames:
                run(inputs, _output_view(self.problem, frame, span))
            time_limit.start()
            part_count += 1
        return self._compare_outputs(frames, part_count) if part_count else (0.0, "")

    def _compare_outputs(self, frames: Sequence[Tensor], part_count: int) -> tuple[float, str]:
        """Compare the outputs of the first ``part_count`` parts. Returns as ``check`` does."""
        for frame in frames:
            changed = int((self._guards(frame) != GUARD_BYTE).sum())
            if changed:
                return 0.0, f"{changed} bytes before or after the output were overwritten"
        rows = sum(part.m for part in self.parts[:part_count])
        first, second = (self._outputs(frame, part_count, rows) for frame in frames)
        problem = self.problem.with_m(rows)
        case = replace(self.case, value=self.case.value[:rows], tolerance=self.case.tolerance[:rows])
        worst, finding = compare(problem, case, first)
        if not finding and not same_bits(first, second):
            second_worst, finding = compare(problem, case, second)
            worst, finding = max(worst, second_worst), finding or unwritten(problem, first, second)
        return worst, finding or self.case.modified_operand(weight=False)

    def _guards(self, frame: Tensor) -> Tensor:
        """Return all bytes of a frame except those of outputs."""
        edges = [0, *(edge for span in self.spans for edge in span), frame.numel()]
        return torch.cat([frame[first:last] for first, last in zip(edges[::2], edges[1::2], strict=True)])

    def _outputs(self, frame: Tensor, part_count: int, rows: int) -> Tensor:
        """Return the concatenated outputs of the first ``part_count`` parts: [rows, N]."""
        parts = [frame[first:last] for first, last in self.spans[:part_count]]
        return torch.cat(parts).view(getattr(torch, self.problem.out_dtype)).view(rows, self.problem.columns)


def _frame(
    problem: Problem, spans: Sequence[tuple[int, int]], length: int, poison: int, device: torch.device
) -> Tensor:
    """Return ``length`` bytes of a guard pattern in which the outputs are poisoned. poison: see ``verify.guarded``."""
    frame = torch.full((length,), GUARD_BYTE, dtype=torch.uint8, device=device)
    for span in spans:
        out = _output_view(problem, frame, span)
        if problem.out_dtype in INTEGERS:
            frame[slice(*span)].fill_(INT_POISONS[poison])
        else:
            out.fill_(poison_value(out, poison))
    return frame


def _output_view(problem: Problem, frame: Tensor, span: tuple[int, int]) -> Tensor:
    """Return the output [m, N] in the bytes ``span`` of a frame."""
    return frame[slice(*span)].view(getattr(torch, problem.out_dtype)).view(-1, problem.columns)


class RowCountVerifier:
    """Verification of a Problem's candidates at other M. Candidates share the operands, which are cached."""

    def __init__(self, problem: Problem, cases: Sequence[ReferenceCase]) -> None:
        self._problem, self._cases = problem, cases
        self._device = cases[0].inputs.a.device
        self._kept: dict[tuple[int, ...], RowStack] = {}

    def verify(
        self, run: Run, candidate: Candidate, time_limit_s: float, *, rounding: Rounding | None = None
    ) -> Verdict:
        """Return the Verdict of a kernel at the M of ``other_row_counts``, which begin with the likeliest to fail.

        time_limit_s: seconds for the calls and comparisons after the first call. rounding: as ``verify``
        takes it. Exceptions of ``run`` are propagated.
        """
        worst, time_limit = 0.0, TimeLimit(time_limit_s)
        for counts in row_groups(self._problem, other_row_counts(self._problem, candidate), self._device):
            if time_limit.over():
                break
            stack = self._stack(counts) if len(counts) > 1 else None
            if stack is None or rounding is not None:  # at each M by itself: there are few such kernels
                verdict = self._verify_one_by_one(run, counts, rounding)
                time_limit.start()
            else:
                verdict = self._verify_stack(run, stack, time_limit)
            if not verdict.ok:
                return verdict
            worst = max(worst, verdict.worst)
        return Verdict("within_bound", worst=worst)

    def has_modified_operands(self) -> bool:
        """Whether a kernel has modified operands or expected results of other M."""
        return any(stack.case.modified_operand(weight=False) for stack in self._kept.values())

    def _stack(self, counts: tuple[int, ...]) -> RowStack | None:
        stack = self._kept.get(counts) or RowStack.make(self._problem, self._cases, counts)
        if stack is None:
            return None
        self._kept[counts] = stack
        limit = _CACHE_BYTES if is_host(self._device.type) else _DEVICE_CACHE_BYTES
        while len(self._kept) > 1 and sum(cached.nbytes for cached in self._kept.values()) > limit:
            self._kept.pop(next(iter(self._kept)))
        return stack

    def _verify_stack(self, run: Run, stack: RowStack, time_limit: TimeLimit) -> Verdict:
        worst, finding = stack.check(run, time_limit)
        if not finding:
            return Verdict("within_bound", worst=worst)
        counts = [part.m for part in stack.parts]
        verdict = self._verify_one_by_one(run, counts)  # whose Verdict names the element
        if not verdict.ok:
            return verdict
        text = f"{finding} (M = {', '.join(map(str, counts))} one after another; not so when called again)"
        return Verdict("unstable", text, min(worst, 1e30))

    def _verify_one_by_one(self, run: Run, counts: Sequence[int], rounding: Rounding | None = None) -> Verdict:
        worst = 0.0
        for m in counts:
            case = case_for_rows(self._problem, self._cases, m)
            if case is None:
                continue
            verdict = verify(run, self._problem, (case,), 0.0, rounding=rounding)
            if not verdict.ok:
                return verdict
            worst = max(worst, verdict.worst)
        return Verdict("within_bound", worst=worst)
