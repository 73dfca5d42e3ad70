"""A second verification of kernels after timing, in the process and by the calls in which they were timed.

A kernel that passed verification may still be wrong: it may cache results or packed copies by address, fail at a later
call, or do nothing while it is timed. So the kernels that may be served are called again exactly as during timing. The
operands are overwritten in place at the addresses used during timing; the outputs contain another result, or poison.
Outputs are searched for poison. A sample of their rows and columns, including the first and the last, is compared with
an exact product (``reference``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..backends.base import Kernel
from ..core.decision import Verdict
from ..core.devices import is_host
from ..core.problem import Problem, bits
from ..core.weights import PackedWeight, QuantWeight
from .adversarial import row_kinds, special_rows
from .compare import check_elements
from .inputs import Inputs, allocate, as_bytes, fill_random, logical_shape
from .oracle import INTEGERS, reference
from .random_source import RandomSource
from .reference_cases import select_aux_rows, tolerance_of, with_cast
from .row_counts import other_row_counts
from .row_stack import Part, TimeLimit, part_of, parts_of, row_groups
from .verify import allowed_rounding

CALLS = 30  # largest number of calls of a kernel
TIME_LIMIT_S = 60e-3  # time limit for the calls of all kernels
ROWS_TIME_LIMIT_S = 30e-3  # time limit for the calls of all kernels at other M
_GRAPH_CALLS = 6  # largest number of replays of a CUDA graph that contains many calls
_MIN_CALLS = 3  # one that writes a result, one that overwrites it from other operands, one into poison
_MAX_SETS = 4  # operand sets that are used, and whose results are stored for comparison
_ROWS, _COLUMNS = 8, 32  # sampled rows and columns of an output
_MAX_OVERWRITTEN_BYTES = 256 << 20  # a larger weight is not overwritten
_POISONS = (0x5B, 0xC4)  # poison bytes of an integer output
_FINITE_KINDS = ("spike", "tiny", "large", "cancel", "largest", "smallest", "extremes")

Operands = tuple[Inputs, Any, Tensor]  # the raw operands, B as the kernel takes it, the output


@dataclass(slots=True)
class RacedKernel:
    """A kernel with the call and the operands of its timing.

    call: ``call(index)`` calls the kernel as during timing, on operand set ``index`` where the set can be chosen. It
    returns the indices of the sets whose outputs then contain results (on a GPU, where it replays a CUDA graph of many
    calls: the last ones). sets: the operand sets.
    """

    kernel: Kernel
    call: Callable[[int], Sequence[int]]
    sets: Sequence[Operands]


def recheck(
    problem: Problem, raced: Iterable[RacedKernel], seed: int, time_limit_s: float = TIME_LIMIT_S
) -> dict[str, Verdict]:
    """Return the Verdicts of the kernels that are wrong after timing, by candidate id; empty when all are correct."""
    faults = {}
    overwritten: set[int] = set()
    kernels = list(raced)
    for number, raced_kernel in enumerate(kernels):
        if min(problem.m, problem.n, problem.k, problem.batch) == 0 or not raced_kernel.sets:
            continue
        source = RandomSource(raced_kernel.sets[0][0].a.device, seed + 7919 * (number + 1))
        finding = _Recheck(problem, raced_kernel, source, len(kernels)).run(time_limit_s, overwritten)
        if finding:
            detail = f"right before the race, wrong after it: {finding}"
            faults[raced_kernel.kernel.candidate.id] = Verdict("wrong", detail, 1e30)
    return faults


@dataclass(slots=True)
class _OutputSample:
    """The expected result for some rows and columns of an output.

    rows, columns: their indices. verified_output: the whole output after its sample passed; None before.
    """

    rows: Tensor
    columns: Tensor
    value: Tensor
    tolerance: Tensor
    verified_output: Tensor | None = None


@dataclass(slots=True)
class _Recheck:
    """The check of one kernel.

    share: number of kernels that share the time limit. samples: by index of the operand set, for its current operands.
    call_time_s: duration of the calls so far, without comparisons, so that a fast kernel is called often on a busy
    machine, too.
    """

    problem: Problem
    raced: RacedKernel
    source: RandomSource
    share: int = 1
    samples: dict[int, _OutputSample] = field(default_factory=dict)
    call_time_s: float = 0.0

    def run(self, time_limit_s: float, overwritten: set[int]) -> str:
        """Run the check. Returns what is wrong, in words; empty for nothing.

        overwritten: addresses of the B matrices that were overwritten already; updated.
        """
        sets, is_graph = list(range(min(_MAX_SETS, len(self.raced.sets)))), False
        if not is_host(self.raced.sets[0][0].a.device.type):
            last = list(self.raced.call(0))
            is_graph = last == list(self.raced.call(len(sets) - 1))
            sets = last if is_graph else sets  # a graph always ends with the same operand sets
        self._overwrite_weight(sets[0], overwritten)
        calls, max_calls = 0, _GRAPH_CALLS if is_graph else CALLS
        while calls < _MIN_CALLS or (calls < max_calls and self.call_time_s < time_limit_s / self.share):
            visit, phase = divmod(calls, 3)
            index = sets[visit % len(sets)]
            written = sets if is_graph else [index]
            if phase == 1:  # the output contains the kernel's result for the former values
                self._overwrite_operands(written)
            if finding := self._call(index, written if phase == 2 else ()):
                return f"{finding} (call {calls + 1} after it)"
            calls += 1
        return self._other_rows()

    # --- operands

    def _overwrite_operands(self, sets: Sequence[int]) -> None:
        """Overwrite A, and a B that is not constant, with other values in place; the outputs are not changed."""
        for index in sets:
            inputs = self.raced.sets[index][0]
            fill_random(inputs.a, self.problem.a.dtype, self.source)
            self._insert_special_rows(inputs.a)
            if not self.problem.b.constant and isinstance(inputs.b, Tensor):
                fill_random(inputs.b, self.problem.b.dtype, self.source)
            self.samples.pop(index, None)

    def _insert_special_rows(self, a: Tensor) -> None:
        """Overwrite some rows of A with special rows that are finite."""
        kinds = [kind for kind in row_kinds(self.problem) if kind in _FINITE_KINDS]
        first = self.source.index(len(kinds))
        chosen_kinds = (kinds + kinds)[first : first + max(1, min(len(kinds), self.problem.m // 4))]
        rows = special_rows(self.problem, chosen_kinds, self.source)
        indices = self.source.permutation(self.problem.m)[: len(chosen_kinds)]
        as_bytes(a)[..., indices, :] = as_bytes(rows)

    def _overwrite_weight(self, index: int, overwritten: set[int]) -> None:
        """Overwrite a constant B and its packed copy in place with the values of another operand set."""
        sets = self.raced.sets
        if not self.problem.b.constant or len(sets) == 1 or self.problem.weight_bytes > _MAX_OVERWRITTEN_BYTES:
            return
        (inputs, packed, _), (other, other_packed, _) = sets[index], sets[(index + 1) % len(sets)]
        matrix, *_ = _weight_tensors(inputs.b)
        if matrix.data_ptr() not in overwritten:
            overwritten.add(matrix.data_ptr())
            for old, new in zip(_weight_tensors(inputs.b), _weight_tensors(other.b), strict=True):
                old.copy_(new)
        if isinstance(packed, PackedWeight):
            for old, new in zip(packed.data, other_packed.data, strict=True):
                old.copy_(new)
        self.samples.pop(index, None)

    # --- calls

    def _call(self, index: int, poisoned: Sequence[int]) -> str:
        """Call the kernel once as during timing. Returns what is wrong with the results; empty for nothing.

        poisoned: indices of the sets whose outputs are poisoned before the call.
        """
        for i in poisoned:
            _poison(self.raced.sets[i][2], _POISONS[0])
        start = time.perf_counter()
        written = self.raced.call(index)
        self.call_time_s += time.perf_counter() - start
        text = next(filter(None, (self._check_output(i) for i in written)), "")
        return text if text or not poisoned else self._unwritten(index, written)

    def _unwritten(self, index: int, results: Sequence[int]) -> str:
        """Return how many elements of the outputs still contain poison, in words; empty for none.

        For an integer output, the kernel is called a second time with another poison.
        """
        outs = {i: self.raced.sets[i][2] for i in results}
        if self.problem.out_dtype not in INTEGERS:
            count = sum(int(out.isnan().sum()) for out in outs.values())
            return f"{count} elements of the output are NaN or were never written" if count else ""
        firsts = {i: out.clone() for i, out in outs.items()}
        for out in outs.values():
            _poison(out, _POISONS[1])
        self.raced.call(index)
        first, second = _POISONS
        count = sum(
            int(((firsts[i] == _poison_element(out, first)) & (out == _poison_element(out, second))).sum())
            for i, out in outs.items()
        )
        return f"{count} elements of the output were never written" if count else ""

    def _check_output(self, index: int) -> str:
        """Return what is wrong with the output of an operand set; empty for nothing.

        A sample is compared with the expected result, and the whole output with an earlier output for equal operands.
        """
        inputs, _, out = self.raced.sets[index]
        sample = self.samples.get(index)
        if sample is None:
            sample = self.samples[index] = self._make_sample(self.problem, inputs, *self._choose_indices(self.problem))
        if finding := _compare(self.problem, sample, out):
            return finding
        if sample.verified_output is None:
            sample.verified_output = out.clone()
        elif not torch.equal(sample.verified_output, out):
            differing = (sample.verified_output != out).nonzero()[:_ROWS, -2:]
            rows, columns = torch.unique(differing[:, 0]), torch.unique(differing[:, 1])
            return _compare(self.problem, self._make_sample(self.problem, inputs, rows, columns), out)
        return ""

    def _other_rows(self) -> str:
        """Check the kernel at other M, on rows of an operand set. Returns what is wrong; empty for nothing."""
        inputs, b, _ = self.raced.sets[0]
        time_limit = TimeLimit(ROWS_TIME_LIMIT_S / self.share)
        row_counts = other_row_counts(self.problem, self.raced.kernel.candidate)
        for counts in row_groups(self.problem, row_counts, inputs.a.device):
            if time_limit.over():
                break
            if finding := self._at_rows(counts, inputs, b, time_limit):
                return finding
        return ""

    def _at_rows(self, counts: Sequence[int], inputs: Inputs, b: Any, time_limit: TimeLimit) -> str:
        """Check the kernel at each M until ``time_limit`` is over, on stacked operands. Returns what is wrong."""
        parts, device = parts_of(counts), inputs.a.device
        problem = self.problem.with_m(parts[-1].start + parts[-1].m)
        rows = torch.arange(problem.m, device=device) % self.problem.m
        a = allocate(logical_shape(problem, problem.m, problem.k), problem.a.layout, problem.a.dtype, device=device)
        as_bytes(a).copy_(as_bytes(inputs.a).index_select(-2, rows))
        steps = [step for step in problem.epilogue if step.takes_tensor]
        aux = tuple(select_aux_rows(step, t, rows) for step, t in zip(steps, inputs.aux, strict=True))
        out = allocate(
            logical_shape(problem, problem.m, problem.columns), problem.out, problem.out_dtype, device=device
        )
        out.zero_()
        for part in parts:
            _poison(out.narrow(-2, part.start, part.m), _POISONS[0])
        stacked, kernel, part_count = replace(inputs, a=a, aux=aux), self.raced.kernel, 0
        for part in parts:
            if time_limit.over():
                break
            operands = part_of(problem, stacked, part)
            packed = kernel.pack(inputs.b) if kernel.packing is not None and not problem.b.constant else b
            kernel.run(operands.a, packed, operands.aux, out.narrow(-2, part.start, part.m))
            time_limit.start()
            part_count += 1
        return self._check_rows(problem, stacked, out, parts[:part_count]) if part_count else ""

    def _check_rows(self, problem: Problem, inputs: Inputs, out: Tensor, parts: Sequence[Part]) -> str:
        """Compare some rows of each part's output with the expected result. Returns what is wrong or ""."""
        if problem.out_dtype not in INTEGERS:
            for part in parts if bool(out.narrow(-2, 0, parts[-1].start + parts[-1].m).isnan().any()) else ():
                if bool(out.narrow(-2, part.start, part.m).isnan().any()):
                    return f"elements of the output are NaN or were never written (M = {part.m})"
        chosen = [self._choose_indices(self.problem.with_m(part.m)) for part in parts]
        rows = torch.cat([rows + part.start for (rows, _), part in zip(chosen, parts, strict=True)])
        return _compare(problem, self._make_sample(problem, inputs, rows, chosen[0][1]), out, parts)

    # --- the expected result

    def _choose_indices(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """Choose rows and columns to compare: the first, the last, both sides of tiles' edges, and random ones."""
        device = self.source.device

        def indices(size: int, count: int) -> Tensor:
            edges = [i for i in (0, size - 1, 15, 16, 63, 64, 127, 128) if 0 <= i < size][: count // 2]
            more = self.source.integers(0, size, (count - len(edges),))
            both = torch.cat([torch.tensor(edges, dtype=torch.int64, device=device), more])
            return both.sort().values  # duplicates do no harm

        return indices(problem.m, _ROWS), indices(problem.columns, _COLUMNS)

    def _make_sample(self, problem: Problem, inputs: Inputs, rows: Tensor, columns: Tensor) -> _OutputSample:
        """Compute the expected result for some rows and columns."""
        steps = [step for step in problem.epilogue if step.takes_tensor]
        of_b = columns if problem.gate is None else torch.cat([columns, columns + problem.columns])
        aux = []
        for step, t in zip(steps, inputs.aux, strict=True):
            t = select_aux_rows(step, t, rows)
            aux.append(t.index_select(-1, of_b) if step.axis in ("col", "full") else t)
        part = replace(problem, m=rows.numel(), n=of_b.numel())
        rounding = allowed_rounding(self.raced.kernel)
        if rounding is not None:
            part = with_cast(part, rounding)
        oracle = reference(part, _select_indices(inputs.a, -2, rows), _select_columns(inputs.b, of_b), aux)
        return _OutputSample(rows, columns, oracle.value, tolerance_of(part, oracle))


def _compare(problem: Problem, sample: _OutputSample, out: Tensor, parts: Sequence[Part] = ()) -> str:
    """Compare a sample of an output. Returns what is wrong, in words; empty for nothing.

    parts: the rows of each M in the output when it has several.
    """
    actual = _select_indices(_select_indices(out, -2, sample.rows), -1, sample.columns)
    value, tolerance = (t.reshape(-1, sample.columns.numel()) for t in (sample.value, sample.tolerance))
    ratio = check_elements(actual.reshape(value.shape), value, tolerance, problem.out_dtype)
    worst, worst_index = (float(x) for x in torch.stack([ratio.max().double(), ratio.argmax().double()]).tolist())
    if worst <= 1.0:
        return ""
    flat_index = int(worst_index)
    row = int(sample.rows[flat_index // sample.columns.numel() % sample.rows.numel()])
    column = int(sample.columns[flat_index % sample.columns.numel()])
    expected, number = float(sample.value.reshape(-1)[flat_index]), float(actual.reshape(-1)[flat_index])
    part = next((part for part in reversed(parts) if part.start <= row), None)
    if part is not None:
        return f"out[.., {row - part.start}, {column}] is {number:.9g}, expected {expected:.9g} (M = {part.m})"
    return f"out[.., {row}, {column}] is {number:.9g}, expected {expected:.9g}"


def _select_indices(t: Tensor, dim: int, indices: Tensor) -> Tensor:
    """Return some rows or columns.

    For columns of a column-major tensor, the transposed tensor's rows are selected, which is faster.
    """
    if dim == -1 and t.dim() > 1 and t.stride(-2) == 1:
        return _select_indices(t.mT, -2, indices).mT
    return as_bytes(t).index_select(dim, indices).view(t.dtype)


def _select_columns(b: Tensor | QuantWeight, columns: Tensor) -> Tensor | QuantWeight:
    if isinstance(b, Tensor):
        return _select_indices(b, -1, columns)
    zero = None if b.zero_point is None else b.zero_point.index_select(-1, columns)
    return replace(
        b, data=_select_indices(b.data, -1, columns), scale=b.scale.index_select(-1, columns), zero_point=zero
    )


def _weight_tensors(b: Tensor | QuantWeight) -> list[Tensor]:
    if isinstance(b, Tensor):
        return [b]
    return [b.data, b.scale] + ([] if b.zero_point is None else [b.zero_point])


def _poison(out: Tensor, byte: int) -> None:
    if out.is_floating_point() and bits(str(out.dtype).removeprefix("torch.")) >= 8:
        out.fill_(math.nan)
    else:
        out.copy_(_poison_element(out, byte).expand(out.shape))


def _poison_element(out: Tensor, byte: int) -> Tensor:
    return torch.full((out.element_size(),), byte, dtype=torch.uint8, device=out.device).view(out.dtype)
