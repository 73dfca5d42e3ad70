"""Draws: operands with the answer, made once for a Problem and shared by all its candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

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
    turns,
)
from .inputs import CPU, Inputs, allocate, epilogue_tensors, fenced, logical_shape, make_inputs, shifted_weight
from .oracle import INTEGERS, UNIT, Oracle, finish, is_large, products

DrawKind = Literal["uniform", "adversarial"]

_WORDS = 512
_PLAIN_ROWS = 12  # ordinary rows of A in a bank: adversarial draws repeat them between special ones
_FEW_BYTES = 1 << 20  # a weight up to here is drawn once more for its special columns
_VARIANT_ROWS = 4  # of a draw that is there for a tensor of one element
_TINY_PRODUCTS = 1 << 26  # with denormals, on a CPU: an Intel core takes 100 times as long for one
_STRIDE = 7  # between neighbours in a draw of other M: rows that follow one another differ


@dataclass(frozen=True, slots=True)
class Draw:
    """Operands with the answer: the Oracle's value, and what |out - value| may be, the output's rounding included.

    tolerance: float32, the shape of value; infinite where anything goes. rows: what is special about each row of A
    (empty for nothing). columns: the special columns. plain: which columns are not, [N]; None when all are. offset:
    elements that the output starts behind a boundary. bank: what draws of other M are made of; None for none. marks:
    checksums of the operands' memory as it was drawn, and of the oracle's, by name.
    """

    inputs: Inputs
    value: Tensor
    tolerance: Tensor
    kind: DrawKind
    rows: tuple[str, ...] = ()
    columns: Columns = field(default_factory=Columns)
    plain: Tensor | None = None
    offset: int = 0
    bank: Bank | None = None
    marks: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def m(self) -> int:
        """Rows of A, which may be others than the Problem's."""
        return self.inputs.a.shape[-2]

    def touched(self, weight: bool = True) -> str:
        """What is no longer as it was drawn, guards included: operands, the oracle's memory; empty when all is well.

        weight: whether B is looked at too, which draws share.
        """
        memories = self._memories()
        names = [name for name in self.marks if weight or not name.startswith("B")]
        now, before = [_checksums(memories[name]) for name in names], [self.marks[name] for name in names]
        if not names or torch.equal(torch.cat(now), torch.cat(before)):  # one wait for a device, not one each
            return ""
        return ", ".join(name for name, x, y in zip(names, now, before, strict=True) if not torch.equal(x, y))

    def marked(self, known: dict[int, Tensor], weight: bool = True) -> Draw:
        """The draw with its marks. known: those of memory that draws share, by the tensor's id. weight: B's too."""
        marks = {}
        for name, memory in self._memories().items():
            if name.startswith("B") and not weight:
                continue
            mark = known.get(id(memory))
            marks[name] = known[id(memory)] = _checksums(memory) if mark is None else mark
        return replace(self, marks=marks)

    def _memories(self) -> dict[str, Tensor]:
        """What a kernel may read, and must not write; and what it should not even find."""
        inputs, named = self.inputs, {"A": self.inputs.a}
        if isinstance(inputs.b, QuantWeight):
            named |= {"B": inputs.b.data, "B's scales": inputs.b.scale}
            if inputs.b.zero_point is not None:
                named["B's zero points"] = inputs.b.zero_point
        else:
            named["B"] = inputs.b
        named |= {f"the epilogue's tensor {i}": t for i, t in enumerate(inputs.aux)}
        return named | {"the oracle's values": self.value, "the oracle's tolerances": self.tolerance}


def prepare(problem: Problem, seed: int, *, device: torch.device = CPU) -> tuple[Draw, ...]:
    """Draw operands on ``device`` and compute their oracles there, once for all candidates.

    The first draw is uniform and lies on boundaries. The others are adversarial (``adversarial`` says how): special
    rows of A between ordinary ones, as many draws as it takes until each kind had a row, special columns of B and of
    the epilogue's tensors, and all memory, the output's too, one element off a boundary where the Problem allows it. A
    batch's matrices have gaps between them. A large constant B is shared by all draws, so that its special columns are
    in the first one too; a small one, and one that changes, is drawn again. Tensors of one element get a small draw for
    each kind.
    """
    generator = torch.Generator(device).manual_seed(seed + 1)
    first = make_inputs(problem, seed, device=device)
    count, shared = turns(problem), problem.b.constant and problem.weight_bytes > _FEW_BYTES
    if shared and count == 1:
        columns = choose_columns(problem, generator)
        spoil_weight(problem, first.b, columns, generator)
        shifted = replace(
            first, b=shifted_weight(problem, first.b) if problem.b.align == 0 else first.b, source=first.b
        )
        base, banks = _shared(problem, first, shifted, columns, generator)
    else:
        base = _uniform(problem, first, Columns(), *products(problem, first.a, first.b))
        banks = [_separate(problem, seed + 2 + turn, turn, generator, device) for turn in range(count)]
    draws = [base]
    for bank in banks:
        draws += bank.covering()
        draws += bank.variants(generator)
    known: dict[int, Tensor] = {}
    return tuple(draw.marked(known) for draw in draws)


def at_rows(problem: Problem, draws: Sequence[Draw], m: int) -> Draw | None:
    """A draw of ``m`` rows, its answer taken from what is known: adversarial rows in another order, some repeated.

    None where a Problem's A cannot have so many rows, or nothing is known.
    """
    bank = next((draw.bank for draw in draws if draw.bank is not None), None)
    if bank is None or not rows_fit(problem, m):
        return None
    return bank.draw(bank.places(m), offset=m % 2).marked({}, weight=False)


def rows_fit(problem: Problem, m: int) -> bool:
    """Whether A of ``m`` rows can have the Problem's layout."""
    layout = problem.a.layout
    return layout.order != "col" or layout.ld is None or m <= layout.ld


# --- banks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Bank:
    """Rows of A and of the epilogue's tensors with the answers, of which draws of any M are made.

    inputs: as many rows as ``rows`` names. value, tolerance: [.., rows, N]. acc, magnitude: before the epilogue; None
    where there are no tensors of one element.
    """

    problem: Problem
    inputs: Inputs
    value: Tensor
    tolerance: Tensor
    rows: tuple[str, ...]
    columns: Columns
    acc: Tensor | None = None
    magnitude: Tensor | None = None

    def draw(self, places: Sequence[int], offset: int = 1, answers: Sequence[int] | None = None) -> Draw:
        """The rows at ``places`` as a draw. offset: elements that its memory starts behind a boundary. answers: the
        rows that value and tolerance are of; None for the same."""
        problem = self.problem
        shift = offset if problem.a.align == 0 else 0
        inputs = replace(
            self.inputs,
            a=_laid_out(problem, _rows_of(self.inputs.a, places), shift),
            aux=tuple(
                fenced(_aux_rows(step.axis, t, places), offset)
                for step, t in zip(_tensor_steps(problem), self.inputs.aux, strict=True)
            ),
        )
        answers = places if answers is None else answers
        index = torch.tensor(list(answers), dtype=torch.int64, device=self.value.device)
        value, tolerance = (t.index_select(-2, index) for t in (self.value, self.tolerance))
        rows = tuple(self.rows[place] for place in answers)
        return Draw(inputs, value, tolerance, "adversarial", rows, self.columns, None, offset, self)

    def places(self, m: int) -> list[int]:
        """Which of the bank's rows a draw of ``m`` rows consists of: each of them in turn, in an order of its own."""
        count = len(self.rows)
        if math.gcd(count, _STRIDE) > 1:
            count -= 1
        return [(_STRIDE * place + m) % count for place in range(m)]

    def covering(self) -> list[Draw]:
        """Draws of the Problem's M in which every special row occurs: they are half of the rows at most where there are
        four or more."""
        m, special = self.problem.m, [place for place, kind in enumerate(self.rows) if kind]
        plain = [place for place, kind in enumerate(self.rows) if not kind]
        each = m if m < 4 else m // 2
        if not special:
            return [self.draw([plain[place % len(plain)] for place in range(m)])] if plain else []
        groups = [special[start : start + each] for start in range(0, len(special), each)]
        if m < 4:
            groups.append([])
        return [self.draw(self._spread(group, plain, len(groups) == 1)) for group in groups]

    def _spread(self, special: Sequence[int], plain: Sequence[int], alone: bool) -> list[int]:
        """M places: special rows evenly between plain ones, the last one special; repeated where there is room."""
        m = self.problem.m
        often = [place for place in special if self.rows[place] != "denormal"]
        repeats = [often[i % len(often)] for i in range(m // 3 - len(special))] if alone and often else []
        rows = [*special, *repeats]
        places = [plain[place % len(plain)] for place in range(m)]
        step = m / len(rows) if rows else 1.0
        for number, place in enumerate(rows):
            places[m - 1 - int(number * step)] = place
        return places

    def variants(self, generator: torch.Generator) -> list[Draw]:
        """A small draw for each kind that a tensor of one element may have."""
        drawn = []
        for which, kind in tensor_kinds(self.problem):
            places = [place for place, name in enumerate(self.rows) if name in ("", "single", "largest")][
                -_VARIANT_ROWS:
            ]
            drawn.append(self._variant(which, kind, places[-self.problem.m :] if self.problem.m < 4 else places))
        return drawn

    def _variant(self, which: int, kind: str, places: Sequence[int]) -> Draw:
        draw, step = self.draw(places), _tensor_steps(self.problem)[which]
        aux = list(draw.inputs.aux)
        aux[which] = fenced(special_value(self.problem, step, kind, aux[which]), 1)
        for place, other in enumerate(_tensor_steps(self.problem)):
            if other.axis == "tensor" and place != which:  # neither hides the other
                aux[place] = fenced(_neutral(other, aux[place]), 1)
        assert self.acc is not None
        assert self.magnitude is not None
        index = torch.tensor(list(places), dtype=torch.int64, device=self.acc.device)
        acc, magnitude = self.acc.index_select(-2, index), self.magnitude.index_select(-2, index)
        oracle = finish(self.problem, acc, magnitude, aux)
        tolerance = tolerance_of(self.problem, oracle)
        rows = tuple(f"{self.rows[place]} {kind} in the epilogue's tensor {which}".strip() for place in places)
        return replace(draw, inputs=replace(draw.inputs, aux=tuple(aux)), value=oracle.value, tolerance=tolerance,
                       rows=rows)  # fmt: skip


def _neutral(step: Step, t: Tensor) -> Tensor:
    return torch.ones_like(t) if step.kind in ("scale", "mul") else torch.zeros_like(t)


def _uniform(problem: Problem, inputs: Inputs, columns: Columns, acc: Tensor, magnitude: Tensor) -> Draw:
    """The first draw. columns: B's special ones, which the aggregate test leaves out."""
    oracle = finish(problem, acc.contiguous(), magnitude.contiguous(), inputs.aux)
    plain = None
    if columns.all_of_weight():
        plain = torch.ones(problem.n, dtype=torch.bool, device=inputs.a.device)
        plain[columns.all_of_weight()] = False
    value, tolerance = oracle.value, tolerance_of(problem, oracle)
    return Draw(inputs, value, tolerance, "uniform", (), Columns(columns.weight), plain)


def _shared(
    problem: Problem, first: Inputs, shifted: Inputs, columns: Columns, generator: torch.Generator
) -> tuple[Draw, list[Bank]]:
    """The first draw and the bank of a B that all share: B is converted to float64 once, unless the copies of A in one
    matrix would cost more memory than that costs time."""
    rows = _bank_rows(problem)
    a = special_rows(problem, rows, generator)
    if is_large(problem, first.a.device):
        parts, more = products(problem, first.a, first.b), products(problem, a, first.b)
    else:
        stacked = products(problem, _stacked([first.a, a]), first.b)
        parts, more = _halves(*stacked, problem.m, 0), _halves(*stacked, len(rows), problem.m)
    bank = _bank(problem, replace(shifted, a=a), rows, columns, *more, generator)
    return _uniform(problem, first, columns, *parts), [bank]


def _halves(value: Tensor, magnitude: Tensor, count: int, start: int) -> tuple[Tensor, Tensor]:
    """Some rows of both."""
    return value.narrow(-2, start, count), magnitude.narrow(-2, start, count)


def _bank_rows(problem: Problem) -> tuple[str, ...]:
    """What the rows of a bank are: ordinary ones, then one of each kind."""
    return ("",) * _PLAIN_ROWS + row_kinds(problem)


def _separate(problem: Problem, seed: int, turn: int, generator: torch.Generator, device: torch.device) -> Bank:
    """A bank with a B of its own."""
    inputs = make_inputs(problem, seed, offset=1 if problem.b.align == 0 else 0, gap=1, device=device)
    columns, rows = choose_columns(problem, generator, turn), _bank_rows(problem)
    spoil_weight(problem, inputs.b, columns, generator)
    a = special_rows(problem, rows, generator)
    return _bank(problem, replace(inputs, a=a), rows, columns, *products(problem, a, inputs.b), generator)


def _bank(
    problem: Problem,
    inputs: Inputs,
    rows: tuple[str, ...],
    columns: Columns,
    acc: Tensor,
    magnitude: Tensor,
    generator: torch.Generator,
) -> Bank:
    """A bank of the rows of A, with tensors of the epilogue of its own, and the product known."""
    aux, names = epilogue_tensors(replace(problem, m=len(rows)), generator), list(rows)
    spoil_aux(problem, aux, columns, names, generator)
    acc, magnitude = acc.contiguous(), magnitude.contiguous()
    kept = (acc.clone(), magnitude.clone()) if tensor_kinds(problem) else (None, None)
    oracle = finish(problem, acc, magnitude, aux)
    tolerance = tolerance_of(problem, oracle)
    return Bank(problem, replace(inputs, aux=aux), oracle.value, tolerance, tuple(names), columns, *kept)


def _tensor_steps(problem: Problem) -> list[Step]:
    return [step for step in problem.epilogue if step.takes_tensor]


def _rows_of(a: Tensor, places: Sequence[int]) -> Tensor:
    """Some rows of A; as bytes where they are fp8, which not every device can index."""
    if a.is_floating_point() and a.element_size() == 1:
        return _rows_of(a.view(torch.uint8), places).view(a.dtype)
    return a.index_select(-2, torch.tensor(list(places), dtype=torch.int64, device=a.device))


def _aux_rows(axis: str, t: Tensor, places: Sequence[int]) -> Tensor:
    """An epilogue's tensor for some of the rows."""
    if axis not in ("row", "full"):
        return t
    return t.index_select(0 if axis == "row" else -2, torch.tensor(list(places), dtype=torch.int64, device=t.device))


def _laid_out(problem: Problem, rows: Tensor, offset: int) -> Tensor:
    """A of these rows as the Problem lays it out, between guards.

    A single row may have any stride; one of 1 is what a transposed column has. (``int_mm`` gives such a row its usual
    one, and fp8 products refuse it.)
    """
    shape, layout = logical_shape(problem, rows.shape[-2], problem.k), problem.a.layout
    a = allocate(shape, layout, problem.a.dtype, offset, guard=True, device=rows.device, gap=offset)
    a.copy_(rows)
    return single_row(problem, a) if offset else a


def single_row(problem: Problem, a: Tensor) -> Tensor:
    """A single row with a stride of 1 where the Problem's A may have that; other A as they are."""
    if a.shape[-2] == 1 and problem.a.layout == Layout() and problem.family in ("mm", "mixed_mm"):
        return a.as_strided(a.shape, (1, 1), a.storage_offset())
    return a


def _stacked(parts: list[Tensor]) -> Tensor:
    """Matrices one above the other; as bytes where they are fp8, which not every device joins."""
    if parts[0].is_floating_point() and parts[0].element_size() == 1:
        return torch.cat([part.view(torch.uint8) for part in parts], dim=-2).view(parts[0].dtype)
    return torch.cat(parts, dim=-2)


def _checksums(t: Tensor) -> Tensor:
    """The sums of a tensor's whole memory (its guards and gaps included) as words, one for each 4 kB."""
    memory = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
    whole = memory.numel() // _WORDS // 8 * _WORDS * 8
    sums = memory[:whole].view(torch.int64).view(-1, _WORDS).sum(1)
    return torch.cat([sums, memory[whole:].sum(dtype=torch.int64).view(1)])


def tolerance_of(problem: Problem, oracle: Oracle) -> Tensor:
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
