"""A check of kernels after their race, in the process and along the path that they were raced in.

What verification finds right may not stay so: a kernel may keep results or packed copies by their address, fail at a
later call, or do nothing while it is timed. So the kernels that may be served are called again as the race called them,
with operands overwritten in place at the addresses that it used, into outputs that hold another result, and into
poisoned ones. Outputs are looked through for poison, and a sample of their rows and columns is compared with an exact
product (``reference``), the first and the last among them.
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
from ..core.problem import Problem, bits
from ..core.weights import PackedWeight, QuantWeight
from .adversarial import row_kinds, special_rows
from .compare import check_elements
from .draws import tolerance_of
from .inputs import Inputs, allocate, fill_random, logical_shape
from .oracle import INTEGERS, reference
from .row_counts import other_row_counts
from .row_stack import Part, Patience, part_of, parts_of, row_groups

CALLS = 30  # in a row, as far as the patience goes
PATIENCE_S = 60e-3  # for all kernels' calls
ROWS_PATIENCE_S = 30e-3  # for all their calls at other M
_GRAPH_CALLS = 6  # replays of a graph, each of them of many calls
_LEAST_CALLS = 3  # one that leaves a result, one into it on other operands, one into poison
_WINDOW = 4  # operand sets whose results are kept to compare with
_ROWS, _COLUMNS = 8, 32  # of an output, compared with the exact product
_MOST_OVERWRITTEN = 256 << 20  # bytes of a weight
_POISONS = (0x5B, 0xC4)  # bytes that an output of integers is filled with
_FINITE_KINDS = ("spike", "tiny", "large", "cancel", "largest", "smallest", "extremes")

Operands = tuple[Inputs, Any, Tensor]  # the raw operands, B as the kernel takes it, the output


@dataclass(slots=True)
class RacedKernel:
    """A kernel and the path that it was raced along.

    call(place): call it as the race did, on operand set ``place`` where the path can choose; returns the sets whose
    outputs hold their results now (on a GPU, where a graph of many calls is replayed: the last ones). sets: the operand
    sets.
    """

    kernel: Kernel
    call: Callable[[int], Sequence[int]]
    sets: Sequence[Operands]


def recheck(
    problem: Problem, raced: Iterable[RacedKernel], seed: int, patience_s: float = PATIENCE_S
) -> dict[str, Verdict]:
    """The Verdicts of kernels that are not right after the race, by candidate id; empty when all are."""
    faults = {}
    overwritten: set[int] = set()
    kernels = list(raced)
    for number, each in enumerate(kernels):
        if min(problem.m, problem.n, problem.k, problem.batch) == 0 or not each.sets:
            continue
        generator = torch.Generator(each.sets[0][0].a.device).manual_seed(seed + 7919 * (number + 1))
        found = _Recheck(problem, each, generator, len(kernels)).run(patience_s, overwritten)
        if found:
            detail = f"right before the race, wrong after it: {found}"
            faults[each.kernel.candidate.id] = Verdict("wrong", detail, 1e30)
    return faults


@dataclass(slots=True)
class _Sample:
    """Some rows and columns of an output with the answer; known: the whole output, once it was found right."""

    rows: Tensor
    columns: Tensor
    value: Tensor
    tolerance: Tensor
    known: Tensor | None = None


@dataclass(slots=True)
class _Recheck:
    """One kernel's check. share: of how many kernels that share the patience. samples: by operand set, of its present
    operands. called_s: what its calls took so far, comparing not counted: cheap kernels are called often on a busy
    machine, too."""

    problem: Problem
    raced: RacedKernel
    generator: torch.Generator
    share: int = 1
    samples: dict[int, _Sample] = field(default_factory=dict)
    called_s: float = 0.0

    def run(self, patience_s: float, overwritten: set[int]) -> str:
        """What is wrong, in words; empty for nothing. overwritten: operands whose B is another already, by identity."""
        window, fixed = list(range(min(_WINDOW, len(self.raced.sets)))), False
        if self.raced.sets[0][0].a.is_cuda:
            last = list(self.raced.call(0))
            fixed = last == list(self.raced.call(len(window) - 1))
            window = last if fixed else window  # a graph's last calls, whatever it is called with
        self._overwrite_weight(window[0], overwritten)
        calls, most = 0, _GRAPH_CALLS if fixed else CALLS
        while calls < _LEAST_CALLS or (calls < most and self.called_s < patience_s / self.share):
            visit, phase = divmod(calls, 3)
            place = window[visit % len(window)]
            written = window if fixed else [place]
            if phase == 1:  # the output holds what the kernel has just written for other values
                self._refresh(written)
            if found := self._call(place, written if phase == 2 else ()):
                return f"{found} (call {calls + 1} after it)"
            calls += 1
        return self._other_rows()

    # --- operands

    def _refresh(self, window: Sequence[int]) -> None:
        """Other values in A (and in a B that changes), at the same addresses; outputs keep what they hold."""
        for place in window:
            inputs = self.raced.sets[place][0]
            _refill(inputs.a, self.problem.a.dtype, self.generator)
            self._spoil_rows(inputs.a)
            if not self.problem.b.constant and isinstance(inputs.b, Tensor):
                _refill(inputs.b, self.problem.b.dtype, self.generator)
            self.samples.pop(place, None)

    def _spoil_rows(self, a: Tensor) -> None:
        """Some of A's rows of special kinds, all of them finite."""
        kinds = [kind for kind in row_kinds(self.problem) if kind in _FINITE_KINDS]
        first = self._random(len(kinds))
        chosen = (kinds + kinds)[first : first + max(1, min(len(kinds), self.problem.m // 4))]
        rows = special_rows(self.problem, chosen, self.generator)
        places = torch.randperm(self.problem.m, generator=self.generator, device=a.device)[: len(chosen)]
        _as_bytes(a)[..., places, :] = _as_bytes(rows)

    def _random(self, below: int) -> int:
        return int(torch.randint(0, below, (), generator=self.generator, device=self.generator.device))

    def _overwrite_weight(self, place: int, overwritten: set[int]) -> None:
        """Another set's values in a constant B and in its packed copy, at the same addresses."""
        sets = self.raced.sets
        if not self.problem.b.constant or len(sets) == 1 or self.problem.weight_bytes > _MOST_OVERWRITTEN:
            return
        (inputs, packed, _), (other, other_packed, _) = sets[place], sets[(place + 1) % len(sets)]
        matrix, *_ = _weight_tensors(inputs.b)
        if matrix.data_ptr() not in overwritten:
            overwritten.add(matrix.data_ptr())
            for old, new in zip(_weight_tensors(inputs.b), _weight_tensors(other.b), strict=True):
                old.copy_(new)
        if isinstance(packed, PackedWeight):
            for old, new in zip(packed.data, other_packed.data, strict=True):
                old.copy_(new)
        self.samples.pop(place, None)

    # --- calls

    def _call(self, place: int, poisoned: Sequence[int]) -> str:
        """Call it once along the raced path. Returns what is wrong with the results.

        poisoned: the sets whose outputs are filled with poison before.
        """
        for at in poisoned:
            _poison(self.raced.sets[at][2], _POISONS[0])
        began = time.perf_counter()
        written = self.raced.call(place)
        self.called_s += time.perf_counter() - began
        text = next(filter(None, (self._judge(at) for at in written)), "")
        return text if text or not poisoned else self._unwritten(place, written)

    def _unwritten(self, place: int, results: Sequence[int]) -> str:
        """Whether poison is left in the whole of an output. (Integers: what two poisons leave as they are.)"""
        outs = {at: self.raced.sets[at][2] for at in results}
        if self.problem.out_dtype not in INTEGERS:
            left = sum(int(out.isnan().sum()) for out in outs.values())
            return f"{left} elements of the output are NaN or were never written" if left else ""
        firsts = {at: out.clone() for at, out in outs.items()}
        for out in outs.values():
            _poison(out, _POISONS[1])
        self.raced.call(place)
        left = sum(
            int(((firsts[at] == _poisoned(out, 0)) & (out == _poisoned(out, 1))).sum()) for at, out in outs.items()
        )
        return f"{left} elements of the output were never written" if left else ""

    def _judge(self, place: int) -> str:
        """What is wrong with the output of an operand set: its sample against the answer; all of it against an earlier
        output of the same operands."""
        inputs, _, out = self.raced.sets[place]
        sample = self.samples.get(place)
        if sample is None:
            sample = self.samples[place] = self._sampled(self.problem, inputs, *self._choose(self.problem))
        if found := _compare(self.problem, sample, out):
            return found
        if sample.known is None:
            sample.known = out.clone()
        elif not torch.equal(sample.known, out):
            where = (sample.known != out).nonzero()[:_ROWS, -2:]
            rows, columns = torch.unique(where[:, 0]), torch.unique(where[:, 1])
            return _compare(self.problem, self._sampled(self.problem, inputs, rows, columns), out)
        return ""

    def _other_rows(self) -> str:
        """The kernel at other M, on rows of an operand set."""
        inputs, b, _ = self.raced.sets[0]
        patience = Patience(ROWS_PATIENCE_S / self.share)
        wanted = other_row_counts(self.problem, self.raced.kernel.candidate)
        for counts in row_groups(self.problem, wanted, inputs.a.device):
            if patience.over():
                break
            if found := self._at_rows(counts, inputs, b, patience):
                return found
        return ""

    def _at_rows(self, counts: Sequence[int], inputs: Inputs, b: Any, patience: Patience) -> str:
        """The kernel at each of these M as long as the patience lasts, on operands that hold the rows of all."""
        parts, device = parts_of(counts), inputs.a.device
        problem = self.problem.with_m(parts[-1].start + parts[-1].m)
        places = torch.arange(problem.m, device=device) % self.problem.m
        a = allocate(logical_shape(problem, problem.m, problem.k), problem.a.layout, problem.a.dtype, device=device)
        _as_bytes(a).copy_(_as_bytes(inputs.a).index_select(-2, places))
        steps = [step for step in problem.epilogue if step.takes_tensor]
        aux = tuple(
            t.index_select(0 if step.axis == "row" else -2, places) if step.axis in ("row", "full") else t
            for step, t in zip(steps, inputs.aux, strict=True)
        )
        out = allocate(logical_shape(problem, problem.m, problem.n), problem.out, problem.out_dtype, device=device)
        out.zero_()
        for part in parts:
            _poison(out.narrow(-2, part.start, part.m), _POISONS[0])
        given, kernel, done = replace(inputs, a=a, aux=aux), self.raced.kernel, 0
        for part in parts:
            if patience.over():
                break
            some = part_of(problem, given, part)
            packed = kernel.pack(inputs.b) if kernel.packing is not None and not problem.b.constant else b
            kernel.run(some.a, packed, some.aux, out.narrow(-2, part.start, part.m))
            patience.start()
            done += 1
        return self._judge_rows(problem, given, out, parts[:done]) if done else ""

    def _judge_rows(self, problem: Problem, inputs: Inputs, out: Tensor, parts: Sequence[Part]) -> str:
        """What is wrong with the outputs of these parts, some rows of each compared with the answer."""
        if problem.out_dtype not in INTEGERS:
            for part in parts if bool(out.narrow(-2, 0, parts[-1].start + parts[-1].m).isnan().any()) else ():
                if bool(out.narrow(-2, part.start, part.m).isnan().any()):
                    return f"elements of the output are NaN or were never written (M = {part.m})"
        chosen = [self._choose(self.problem.with_m(part.m)) for part in parts]
        rows = torch.cat([rows + part.start for (rows, _), part in zip(chosen, parts, strict=True)])
        return _compare(problem, self._sampled(problem, inputs, rows, chosen[0][1]), out, parts)

    # --- the answer

    def _choose(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """Rows and columns to compare: the first, the last, both sides of tiles' edges, and random ones."""
        device = self.generator.device

        def chosen(size: int, count: int) -> Tensor:
            edges = [at for at in (0, size - 1, 15, 16, 63, 64, 127, 128) if 0 <= at < size][: count // 2]
            more = torch.randint(0, size, (count - len(edges),), generator=self.generator, device=device)
            both = torch.cat([torch.tensor(edges, dtype=torch.int64, device=device), more])
            return both.sort().values  # one that is there twice does no harm

        return chosen(problem.m, _ROWS), chosen(problem.n, _COLUMNS)

    def _sampled(self, problem: Problem, inputs: Inputs, rows: Tensor, columns: Tensor) -> _Sample:
        """The answer for some rows and columns."""
        steps = [step for step in problem.epilogue if step.takes_tensor]
        aux = []
        for step, t in zip(steps, inputs.aux, strict=True):
            t = t.index_select(0 if step.axis == "row" else -2, rows) if step.axis in ("row", "full") else t
            aux.append(t.index_select(-1, columns) if step.axis in ("col", "full") else t)
        part = replace(problem, m=rows.numel(), n=columns.numel())
        oracle = reference(part, _select(inputs.a, -2, rows), _columns(inputs.b, columns), aux)
        return _Sample(rows, columns, oracle.value, tolerance_of(part, oracle))


def _compare(problem: Problem, sample: _Sample, out: Tensor, parts: Sequence[Part] = ()) -> str:
    """What is wrong with an output, in words; empty for nothing. parts: the rows of each M in it, if it has several."""
    got = _select(_select(out, -2, sample.rows), -1, sample.columns)
    value, tolerance = (t.reshape(-1, sample.columns.numel()) for t in (sample.value, sample.tolerance))
    ratio = check_elements(got.reshape(value.shape), value, tolerance, problem.out_dtype)
    worst, where = (float(x) for x in torch.stack([ratio.max().double(), ratio.argmax().double()]).tolist())
    if worst <= 1.0:
        return ""
    at = int(where)
    row = int(sample.rows[at // sample.columns.numel() % sample.rows.numel()])
    column = int(sample.columns[at % sample.columns.numel()])
    expected, found = float(sample.value.reshape(-1)[at]), float(got.reshape(-1)[at])
    part = next((part for part in reversed(parts) if part.start <= row), None)
    if part is not None:
        return f"out[.., {row - part.start}, {column}] is {found:.9g}, expected {expected:.9g} (M = {part.m})"
    return f"out[.., {row}, {column}] is {found:.9g}, expected {expected:.9g}"


def _refill(t: Tensor, dtype: str, generator: torch.Generator) -> None:
    """Other random values in the same memory."""
    drawn = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    fill_random(drawn, dtype, generator)
    _as_bytes(t).copy_(_as_bytes(drawn))


def _as_bytes(t: Tensor) -> Tensor:
    """fp8 as bytes, which every device can index; others as they are."""
    return t.view(torch.uint8) if t.is_floating_point() and t.element_size() == 1 else t


def _select(t: Tensor, dim: int, places: Tensor) -> Tensor:
    """Some rows or columns. (Along the first of two dimensions, which is fast where the last one is dense.)"""
    if dim == -1 and t.dim() > 1 and t.stride(-2) == 1:
        return _select(t.mT, -2, places).mT
    return _as_bytes(t).index_select(dim, places).view(t.dtype)


def _columns(b: Tensor | QuantWeight, columns: Tensor) -> Tensor | QuantWeight:
    if isinstance(b, Tensor):
        return _select(b, -1, columns)
    zero = None if b.zero_point is None else b.zero_point.index_select(-1, columns)
    return replace(b, data=_select(b.data, -1, columns), scale=b.scale.index_select(-1, columns), zero_point=zero)


def _weight_tensors(b: Tensor | QuantWeight) -> list[Tensor]:
    if isinstance(b, Tensor):
        return [b]
    return [b.data, b.scale] + ([] if b.zero_point is None else [b.zero_point])


def _poison(out: Tensor, byte: int) -> None:
    if out.is_floating_point() and bits(str(out.dtype).removeprefix("torch.")) >= 8:
        out.fill_(math.nan)
    else:
        out.copy_(_byte(out, byte).expand(out.shape))


def _poisoned(out: Tensor, which: int) -> Tensor:
    return _byte(out, _POISONS[which])


def _byte(out: Tensor, byte: int) -> Tensor:
    return torch.full((out.element_size(),), byte, dtype=torch.uint8, device=out.device).view(out.dtype)
