"""Reference cases: the memory of a shared weight, the order of special rows, and variants of one-element tensors."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem, Quant
from gemmtune.verify.oracle import reference
from gemmtune.verify.reference_cases import ReferenceCase, case_for_rows, make_reference_cases

COL = Layout("col")


def linear(m: int, n: int, k: int, dtype: str = "float32", epilogue: tuple[Step, ...] = ()) -> Problem:
    return Problem("mm", m, n, k, Operand(dtype), Operand(dtype, COL, constant=True), dtype, epilogue)


@pytest.mark.parametrize(("align", "remainder"), [(0, 4), (64, 0)])
def test_shared_weight_begins_off_alignment_unless_the_problem_promises_it(align: int, remainder: int) -> None:
    problem = linear(4, 1024, 1024)
    problem = replace(problem, b=replace(problem.b, align=align))
    first, *others = make_reference_cases(problem, 0)
    assert isinstance(first.inputs.b, torch.Tensor)
    assert first.inputs.b.data_ptr() % 64 == 0
    for case in others:
        assert isinstance(case.inputs.b, torch.Tensor)
        assert case.inputs.b.data_ptr() % 64 == remainder


def test_special_rows_have_ordinary_rows_between_them() -> None:
    """A kernel that reads a neighbouring row by mistake then reads ordinary values, and the fault has one cause."""
    for case in make_reference_cases(linear(64, 96, 64), 0)[1:]:
        special = [row for row, kind in enumerate(case.rows) if kind]
        assert special[-1] == 63
        assert all(after - before >= 2 for before, after in itertools.pairwise(special))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 9])
def test_at_most_half_of_four_rows_or_more_are_special(m: int) -> None:
    cases = [case for case in make_reference_cases(linear(m, 96, 64), 0)[1:] if case.bank is not None]
    bank = cases[0].bank
    assert bank is not None
    kinds = {kind for kind in bank.rows if kind}
    assert {kind for case in cases for kind in case.rows if kind} == kinds
    most = max(sum(bool(kind) for kind in case.rows) for case in cases)
    assert most == (m if m < 4 else m // 2)
    # Few rows are all special: an ordinary row shows whether a kernel is right at all.
    assert any(not any(case.rows) for case in cases) == (m < 4)


def test_denormal_rows_are_in_one_of_eight_cases_of_another_m_once() -> None:
    """A CPU takes as long for one as for a hundred others."""
    bank = next(case.bank for case in make_reference_cases(linear(16, 96, 64), 0) if case.bank is not None)
    counts = {m: [bank.rows[row] for row in bank.row_indices(m)].count("denormal") for m in range(1, 257)}
    assert {m % 8 for m, count in counts.items() if count} == {1}
    assert all(count == 1 for m, count in counts.items() if m % 8 == 1 and m > len(bank.rows))
    assert all(set(bank.rows) - {"denormal"} <= {bank.rows[row] for row in bank.row_indices(m)} for m in (64, 65))


def test_rows_without_special_ones_make_one_case() -> None:
    bank = next(case.bank for case in make_reference_cases(linear(6, 96, 64), 0) if case.bank is not None)
    (case,) = replace(bank, rows=("",) * len(bank.rows)).covering()
    assert case.rows == ("",) * 6
    assert torch.equal(case.inputs.a, bank.inputs.a[[row % len(bank.rows) for row in range(6)]])


STEPS = (
    Step("bias", "col", "float32"),
    Step("scale", "tensor", "float32"),
    Step("add", "tensor", "float32"),
    Step("scale", "tensor", "float32"),
)


def variants(problem: Problem, which: int) -> dict[str, ReferenceCase]:
    """Return the cases for the kinds of values of the epilogue's tensor ``which``, by kind."""
    end = f" in the epilogue's tensor {which}"
    cases = [case for case in make_reference_cases(problem, 0) if case.rows and case.rows[0].endswith(end)]
    return {case.rows[0].removesuffix(end): case for case in cases if "added to" not in case.rows[0]}


@pytest.mark.parametrize(
    ("which", "kinds"),
    [
        (1, {"negative", "tiny", "power of two", "huge", "zero", "NaN"}),
        (2, {"NaN", "+inf", "-inf"}),
        (3, {"negative", "tiny", "power of two", "huge", "zero", "NaN"}),
    ],
)
def test_one_element_tensor_takes_each_kind_of_value_while_the_others_are_neutral(which: int, kinds: set[str]) -> None:
    problem = linear(8, 40, 32, epilogue=STEPS)
    cases = variants(problem, which)
    assert set(cases) == kinds
    for kind, case in cases.items():
        bias, *scalars = case.inputs.aux
        assert bias.unique().numel() > 2
        neutral = [1.0, 0.0, 1.0]
        for i, scalar in enumerate(scalars):
            assert (float(scalar) == neutral[i]) == (i != which - 1), kind
        expected = reference(problem.with_m(case.m), case.inputs.a, case.inputs.b, case.inputs.aux)
        torch.testing.assert_close(case.value, expected.value, rtol=1e-9, atol=1e-30, equal_nan=True)


def test_case_of_another_m_has_the_results_of_its_own_rows() -> None:
    problem = linear(4, 40, 32)
    case = case_for_rows(problem, make_reference_cases(problem, 0), 7)
    assert case is not None
    assert case.m == 7
    expected = reference(problem.with_m(7), case.inputs.a, case.inputs.b, case.inputs.aux)
    torch.testing.assert_close(case.value, expected.value, rtol=1e-9, atol=1e-30, equal_nan=True)


def test_there_is_no_case_where_a_columns_stride_is_below_m() -> None:
    problem = replace(linear(4, 40, 32), a=Operand("float32", Layout("col", 6)))
    cases = make_reference_cases(problem, 0)
    assert case_for_rows(problem, cases, 6) is not None
    assert case_for_rows(problem, cases, 7) is None


@pytest.mark.parametrize("zero_point", [False, True])
def test_writes_into_each_part_of_a_quantized_weight_are_named(zero_point: bool) -> None:
    weight = Operand("int8", COL, constant=True, quant=Quant(None, "float32", zero_point))
    problem = Problem("mixed_mm", 4, 40, 32, Operand("bfloat16"), weight, "bfloat16")
    case = make_reference_cases(problem, 0)[0]
    named = {"B": case.inputs.b.data, "B's scales": case.inputs.b.scale, "B's zero points": case.inputs.b.zero_point}
    for name, tensor in named.items():
        if tensor is not None:
            before = tensor.clone()
            tensor.zero_()
            assert case.modified_operand() == name
            tensor.copy_(before)
    assert case.modified_operand() == ""
