"""Test cases (``ReferenceCase``): operands with the expected result, computed once per Problem and used for all
candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ..backends.base import Rounding
from ..core.devices import CPU
from ..core.epilogue import Step
from ..core.problem import Layout, Problem
from ..core.weights import QuantWeight
from .adversarial import (
    Columns,
    choose_columns,
    row_kinds,
    special_rows,
    special_value,
    spoil_aux,
    spoil_weight,
    tensor_kinds,
    weight_rounds,
)
from .inputs import (
    Inputs,
    allocate,
    as_bytes,
    epilogue_tensors,
    guarded_copy,
    logical_shape,
    make_inputs,
    misaligned_weight,
)
from .oracle import INTEGERS, UNIT, Oracle, apply_epilogue, is_large, products, reference
from .random_source import RandomSource

CaseKind = Literal["uniform", "adversarial"]

_WORDS_PER_SUM = 512
_TOLERANCES = "the oracle's tolerances"
_ORDINARY_ROWS = 12  # ordinary rows of A in a bank: adversarial test cases repeat them between special rows
_SMALL_WEIGHT_BYTES = 1 << 20  # a weight up to this size is drawn a second time for its special columns
_VARIANT_ROWS = 4  # rows of a test case for a special value in a one-element tensor
_STRIDE = 7  # in the bank, between consecutive rows of a test case of another M, so that consecutive rows differ
_DENORMAL_EVERY = 8  # test cases of consecutive M


@dataclass(frozen=True, slots=True)
class ReferenceCase:
    """A test case: operands with the expected result.

    value: the Oracle's value. tolerance: the largest correct |out - value| including the output's rounding, float32, of
    value's shape; infinite where every result is accepted. rows: what is special about each row of A (empty for an
    ordinary row). columns: the special columns. ordinary_columns: mask [N] of the other columns; None when all are
    ordinary. offset: distance in elements of the output's start from an aligned address. bank: the rows from which test
    cases of other M are composed; None when there are none. checksums: initial checksums of the memory of the operands
    and of the oracle's results, by name.
    """

    inputs: Inputs
    value: Tensor
    tolerance: Tensor
    kind: CaseKind
    rows: tuple[str, ...] = ()
    columns: Columns = field(default_factory=Columns)
    ordinary_columns: Tensor | None = None
    offset: int = 0
    bank: RowBank | None = None
    checksums: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def m(self) -> int:
        """The number of rows of A, which may differ from the Problem's M."""
        return self.inputs.a.shape[-2]

    def modified_operand(self, weight: bool = True) -> str:
        """Return the names of operands and oracle results whose memory, guards included, changed; empty for none.

        weight: whether B, which test cases share, is checked, too.
        """
        tensors = self._guarded_tensors()
        names = [name for name in self.checksums if weight or not name.startswith("B")]
        now, before = [_checksums(tensors[name]) for name in names], [self.checksums[name] for name in names]
        # One comparison of all checksums needs one device synchronization instead of one per tensor.
        if not names or torch.equal(torch.cat(now), torch.cat(before)):
            return ""
        return ", ".join(name for name, x, y in zip(names, now, before, strict=True) if not torch.equal(x, y))

    def marked(self, cache: dict[int, Tensor], weight: bool = True) -> ReferenceCase:
        """Return this test case with checksums of its current memory.

        cache: checksums of tensors that test cases share, by the tensor's id; updated. weight: whether B is included.
        """
        checksums = {}
        for name, tensor in self._guarded_tensors().items():
            if name.startswith("B") and not weight:
                continue
            checksum = cache.get(id(tensor))
            checksums[name] = cache[id(tensor)] = _checksums(tensor) if checksum is None else checksum
        return replace(self, checksums=checksums)

    def with_rounding(self, problem: Problem, rounding: Rounding) -> ReferenceCase:
        """Return the test case with the tolerance of a kernel that has another rounding before the last one."""
        checksums = {name: checksum for name, checksum in self.checksums.items() if name != _TOLERANCES}
        if not problem.epilogue:
            tolerance = self.tolerance + UNIT[rounding.dtype] * self.value.abs().float()
        else:
            cast, inputs = with_cast(problem.with_m(self.m), rounding), self.inputs
            tolerance = tolerance_of(cast, reference(cast, inputs.a, inputs.b, inputs.aux))
        return replace(self, tolerance=tolerance, checksums=checksums)

    def _guarded_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a kernel must not write, by name: operands, and results that it must not access."""
        inputs, named = self.inputs, {"A": self.inputs.a}
        if isinstance(inputs.b, QuantWeight):
            named |= {"B": inputs.b.data, "B's scales": inputs.b.scale}
            if inputs.b.zero_point is not None:
                named["B's zero points"] = inputs.b.zero_point
        else:
            named["B"] = inputs.b
        named |= {f"the epilogue's tensor {i}": t for i, t in enumerate(inputs.aux)}
        return named | {"the oracle's values": self.value, _TOLERANCES: self.tolerance}


def with_cast(problem: Problem, rounding: Rounding) -> Problem:
    """Return the Problem with a rounding as a step. Its oracle has the same value and a larger tolerance."""
    steps = problem.epilogue
    cast = Step("cast", dtype=rounding.dtype)
    return replace(problem, epilogue=(*steps[: rounding.steps], cast, *steps[rounding.steps :]))


def make_reference_cases(problem: Problem, seed: int, *, device: torch.device = CPU) -> tuple[ReferenceCase, ...]:
    """Return a Problem's test cases, with operands and expected results on ``device``.

    The first test case has uniform operands at aligned addresses. The others are adversarial (see ``adversarial``):
    A has special rows between ordinary ones, and B and the epilogue's tensors have special columns. There are as many
    test cases as needed for one row of each kind. All of their memory, including the output's, begins one element after
    an aligned address where the Problem permits it, and the matrices of a batch have gaps between them.

    All test cases share a large constant B, so that the first one has its special columns, too. A small B, and one that
    is not constant, is drawn again. There is a small test case for each kind of value in a one-element tensor.
    """
    source = RandomSource(device, seed + 1)
    first = make_inputs(problem, seed, device=device)
    count, shared = weight_rounds(problem), problem.b.constant and problem.weight_bytes > _SMALL_WEIGHT_BYTES
    if shared and count == 1:
        columns = choose_columns(problem, source)
        spoil_weight(problem, first.b, columns, source)
        shifted = replace(
            first, b=misaligned_weight(problem, first.b) if problem.b.align == 0 else first.b, source=first.b
        )
        base, banks = _with_shared_weight(problem, first, shifted, columns, source)
    else:
        base = _uniform_case(problem, first, Columns(), *products(problem, first.a, first.b, first.aux))
        banks = [
            _bank_with_own_weight(problem, seed + 2 + round_index, round_index, source, device)
            for round_index in range(count)
        ]
    cases = [base]
    for bank in banks:
        cases += bank.covering()
        cases += bank.variants(source)
    cache: dict[int, Tensor] = {}
    return tuple(case.marked(cache) for case in cases)


def case_for_rows(problem: Problem, cases: Sequence[ReferenceCase], m: int) -> ReferenceCase | None:
    """Return a test case of ``m`` rows, composed of rows with known results in another order, some repeated.

    cases: the Problem's test cases. The memory is misaligned for odd ``m``. Returns None when A's layout does not
    permit ``m`` rows, or when no test case has a bank of rows.
    """
    bank = next((case.bank for case in cases if case.bank is not None), None)
    if bank is None or not rows_fit(problem, m):
        return None
    return bank.test_case(bank.row_indices(m), offset=m % 2).marked({}, weight=False)


def rows_fit(problem: Problem, m: int) -> bool:
    """Whether the layout of the Problem's A permits ``m`` rows."""
    layout = problem.a.layout
    return layout.order != "col" or layout.ld is None or m <= layout.ld


# --- banks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class RowBank:
    """Rows of A and of the epilogue's tensors with their expected results, from which test cases of any M are composed.

    rows: what is special about each row (empty for an ordinary row). inputs: operands with these rows. value,
    tolerance: [.., rows, N], as in ``ReferenceCase``. acc, magnitude: the product and its error before the epilogue;
    None when the epilogue has no one-element tensors.
    """

    problem: Problem
    inputs: Inputs
    value: Tensor
    tolerance: Tensor
    rows: tuple[str, ...]
    columns: Columns
    acc: Tensor | None = None
    magnitude: Tensor | None = None

    def test_case(
        self, indices: Sequence[int], offset: int = 1, expected: Sequence[int] | None = None
    ) -> ReferenceCase:
        """Return a test case with the rows ``indices`` of the bank.

        offset: distance in elements of its memory from an aligned address. expected: indices of the rows of ``value``
        and ``tolerance``; None: equal to ``indices``.
        """
        problem = self.problem
        shift = offset if problem.a.align == 0 else 0
        chosen = _as_index(indices, self.value.device)
        inputs = replace(
            self.inputs,
            a=_allocate_a(problem, as_bytes(self.inputs.a).index_select(-2, chosen).view(self.inputs.a.dtype), shift),
            aux=tuple(
                guarded_copy(select_aux_rows(step, t, chosen), offset)
                for step, t in zip(_tensor_steps(problem), self.inputs.aux, strict=True)
            ),
        )
        expected = indices if expected is None else expected
        index = _as_index(expected, self.value.device)
        value, tolerance = (t.index_select(-2, index) for t in (self.value, self.tolerance))
        rows = tuple(self.rows[row] for row in expected)
        return ReferenceCase(inputs, value, tolerance, "adversarial", rows, self.columns, None, offset, self)

    def row_indices(self, m: int) -> list[int]:
        """Return the indices of the bank's rows in a test case of ``m`` rows: a cyclic order that depends on ``m``.

        A row of denormal numbers is in one of eight test cases, and there once; the bank's first other row has its
        other turns. CPUs take 125 times as long for it (float32 on an Intel Xeon), which would be most of the time of a
        verification.
        """
        count = len(self.rows)
        if math.gcd(count, _STRIDE) > 1:
            count -= 1
        indices = [(_STRIDE * row + m) % count for row in range(m)]
        other = next((row for row in range(count) if self.rows[row] != "denormal"), 0)
        turns = [position for position, row in enumerate(indices) if self.rows[row] == "denormal"]
        for position in turns[1 if m % _DENORMAL_EVERY == 1 else 0 :]:
            indices[position] = other
        return indices

    def covering(self) -> list[ReferenceCase]:
        """Return test cases of the Problem's M that together contain every special row.

        When M is 4 or more, at most half of a test case's rows are special.
        """
        m, special = self.problem.m, [row for row, kind in enumerate(self.rows) if kind]
        ordinary = [row for row, kind in enumerate(self.rows) if not kind]
        per_case = m if m < 4 else m // 2
        if not special:
            return [self.test_case([ordinary[row % len(ordinary)] for row in range(m)])] if ordinary else []
        groups = [special[start : start + per_case] for start in range(0, len(special), per_case)]
        if m < 4:
            groups.append([])
        return [self.test_case(self._interleave(group, ordinary, len(groups) == 1)) for group in groups]

    def _interleave(self, special: Sequence[int], ordinary: Sequence[int], only_group: bool) -> list[int]:
        """Return M row indices: special rows at even distances between ordinary ones, and a special last row.

        only_group: whether no other test case is needed for the special rows; they are then repeated where M permits.
        """
        m = self.problem.m
        repeatable = [row for row in special if self.rows[row] != "denormal"]
        repeats = (
            [repeatable[i % len(repeatable)] for i in range(m // 3 - len(special))] if only_group and repeatable else []
        )
        chosen = [*special, *repeats]
        indices = [ordinary[row % len(ordinary)] for row in range(m)]
        step = m / len(chosen) if chosen else 1.0
        for number, row in enumerate(chosen):
            indices[m - 1 - int(number * step)] = row
        return indices

    def variants(self, source: RandomSource) -> list[ReferenceCase]:
        """Return a small test case for each kind of value that a one-element tensor can have."""
        cases = []
        for which, kind in tensor_kinds(self.problem):
            indices = [row for row, name in enumerate(self.rows) if name in ("", "single", "largest")][-_VARIANT_ROWS:]
            cases.append(self._variant(which, kind, indices[-self.problem.m :] if self.problem.m < 4 else indices))
        return cases

    def _variant(self, which: int, kind: str, indices: Sequence[int]) -> ReferenceCase:
        case, step = self.test_case(indices), _tensor_steps(self.problem)[which]
        aux = list(case.inputs.aux)
        aux[which] = guarded_copy(special_value(self.problem, step, kind, aux[which]), 1)
        for i, other in enumerate(_tensor_steps(self.problem)):
            if other.axis == "tensor" and i != which:  # so that its value does not hide the special one
                aux[i] = guarded_copy(_neutral(other, aux[i]), 1)
        assert self.acc is not None
        assert self.magnitude is not None
        index = _as_index(indices, self.acc.device)
        acc, magnitude = self.acc.index_select(-2, index), self.magnitude.index_select(-2, index)
        oracle = apply_epilogue(self.problem, acc, magnitude, aux)
        tolerance = tolerance_of(self.problem, oracle)
        rows = tuple(f"{self.rows[row]} {kind} in the epilogue's tensor {which}".strip() for row in indices)
        return replace(case, inputs=replace(case.inputs, aux=tuple(aux)), value=oracle.value, tolerance=tolerance,
                       rows=rows)  # fmt: skip


def _neutral(step: Step, t: Tensor) -> Tensor:
    return torch.ones_like(t) if step.kind in ("scale", "mul") else torch.zeros_like(t)


def _uniform_case(problem: Problem, inputs: Inputs, columns: Columns, acc: Tensor, magnitude: Tensor) -> ReferenceCase:
    """Return the first test case. columns: the special columns of B, which the aggregate test excludes."""
    oracle = apply_epilogue(problem, acc.contiguous(), magnitude.contiguous(), inputs.aux)
    ordinary_columns = None
    if columns.all_of_weight():
        ordinary_columns = torch.ones(problem.n, dtype=torch.bool, device=inputs.a.device)
        ordinary_columns[columns.all_of_weight()] = False
        if problem.gate is not None:
            ordinary_columns = ordinary_columns[: problem.columns] & ordinary_columns[problem.columns :]
    value, tolerance = oracle.value, tolerance_of(problem, oracle)
    return ReferenceCase(inputs, value, tolerance, "uniform", (), Columns(columns.weight), ordinary_columns)


def _with_shared_weight(
    problem: Problem, first: Inputs, shifted: Inputs, columns: Columns, source: RandomSource
) -> tuple[ReferenceCase, list[RowBank]]:
    """Return the first test case and the bank for a B that all test cases share.

    B is converted to float64 once, for both. Large problems are an exception: the memory for one matrix with both A
    would cost more than a second conversion.
    """
    rows = _bank_row_kinds(problem)
    a = special_rows(problem, rows, source)
    aux, kinds = _bank_aux(problem, rows, columns, source)
    if is_large(problem, first.a.device) or problem.norm is not None:  # the two have norms with different weights
        parts, more = products(problem, first.a, first.b, first.aux), products(problem, a, first.b, aux)
    else:
        stacked = products(problem, _stack_rows([first.a, a]), first.b)
        parts, more = _slice_rows(*stacked, problem.m, 0), _slice_rows(*stacked, len(rows), problem.m)
    bank = _make_bank(problem, replace(shifted, a=a, aux=aux), kinds, columns, *more)
    return _uniform_case(problem, first, columns, *parts), [bank]


def _slice_rows(value: Tensor, magnitude: Tensor, count: int, start: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` rows of both, from ``start`` on."""
    return value.narrow(-2, start, count), magnitude.narrow(-2, start, count)


def _bank_row_kinds(problem: Problem) -> tuple[str, ...]:
    """Return the kinds of a bank's rows: ordinary rows (empty), then one of each kind."""
    return ("",) * _ORDINARY_ROWS + row_kinds(problem)


def _bank_with_own_weight(
    problem: Problem, seed: int, round_index: int, source: RandomSource, device: torch.device
) -> RowBank:
    """Return a bank with a newly drawn B. round_index: selects the kinds of B's special columns."""
    inputs = make_inputs(problem, seed, offset=1 if problem.b.align == 0 else 0, gap=1, device=device)
    columns, rows = choose_columns(problem, source, round_index), _bank_row_kinds(problem)
    spoil_weight(problem, inputs.b, columns, source)
    a = special_rows(problem, rows, source)
    aux, kinds = _bank_aux(problem, rows, columns, source)
    product = products(problem, a, inputs.b, aux)
    return _make_bank(problem, replace(inputs, a=a, aux=aux), kinds, columns, *product)


def _bank_aux(
    problem: Problem, rows: tuple[str, ...], columns: Columns, source: RandomSource
) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """Return newly drawn epilogue tensors for a bank's rows, and what is special about each row with them."""
    aux, kinds = epilogue_tensors(replace(problem, m=len(rows)), source), list(rows)
    spoil_aux(problem, aux, columns, kinds, source)
    return aux, tuple(kinds)


def _make_bank(
    problem: Problem, inputs: Inputs, rows: tuple[str, ...], columns: Columns, acc: Tensor, magnitude: Tensor
) -> RowBank:
    """Return a bank of the rows of A and of the epilogue's tensors. acc, magnitude: the product and its error."""
    acc, magnitude = acc.contiguous(), magnitude.contiguous()
    before_epilogue = (acc.clone(), magnitude.clone()) if tensor_kinds(problem) else (None, None)
    oracle = apply_epilogue(problem, acc, magnitude, inputs.aux)
    tolerance = tolerance_of(problem, oracle)
    return RowBank(problem, inputs, oracle.value, tolerance, rows, columns, *before_epilogue)


def _as_index(rows: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(rows), dtype=torch.int64, device=device)


def _tensor_steps(problem: Problem) -> list[Step]:
    return [step for step in problem.epilogue if step.takes_tensor]


def select_aux_rows(step: Step, t: Tensor, rows: Tensor) -> Tensor:
    """Return a step's tensor for some rows (int64) of the output."""
    return t.index_select(0 if step.axis == "row" else -2, rows) if step.axis in ("row", "full") else t


def _allocate_a(problem: Problem, rows: Tensor, offset: int) -> Tensor:
    """Return a copy of A's rows in the Problem's layout between guards.

    A single row may have any row stride. With an offset it gets the stride 1 of a transposed column. (``int_mm``
    replaces this stride by the usual one, and fp8 products refuse it.)
    """
    shape, layout = logical_shape(problem, rows.shape[-2], problem.k), problem.a.layout
    a = allocate(shape, layout, problem.a.dtype, offset, guard=True, device=rows.device, gap=offset)
    a.copy_(rows)
    return single_row(problem, a) if offset else a


def single_row(problem: Problem, a: Tensor) -> Tensor:
    """Return a single-row A with a row stride of 1 where the Problem permits it; any other A unchanged."""
    if a.shape[-2] == 1 and problem.a.layout == Layout() and problem.family in ("mm", "mixed_mm"):
        return a.as_strided(a.shape, (1, 1), a.storage_offset())
    return a


def _stack_rows(parts: list[Tensor]) -> Tensor:
    """Concatenate the rows of matrices."""
    return torch.cat([as_bytes(part) for part in parts], dim=-2).view(parts[0].dtype)


def _checksums(t: Tensor) -> Tensor:
    """Return the sums of the 8-byte words of a tensor's storage, guards and gaps included: one per 4 kB."""
    memory = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
    whole = memory.numel() // _WORDS_PER_SUM // 8 * _WORDS_PER_SUM * 8
    sums = memory[:whole].view(torch.int64).view(-1, _WORDS_PER_SUM).sum(1)
    return torch.cat([sums, memory[whole:].sum(dtype=torch.int64).view(1)])


def tolerance_of(problem: Problem, oracle: Oracle) -> Tensor:
    """Return the tolerance in float32: the oracle's error plus, for a float output, its rounding.

    The rounding is at least half of the smallest subnormal. Overwrites ``oracle.magnitude`` to save memory.
    """
    allowed = oracle.magnitude.mul_(oracle.unit)
    if problem.out_dtype in INTEGERS:
        return allowed
    info = torch.finfo(getattr(torch, problem.out_dtype))
    sized = torch.nan_to_num(oracle.value.to(torch.float32, copy=True).abs_(), 0.0, 0.0, 0.0)
    allowed += sized.mul_(UNIT[problem.out_dtype]).clamp_(min=max(info.smallest_normal * info.eps / 2, 2.0**-149))
    return allowed.mul_(1.0 + 2.0**-20)  # float32's own roundings
