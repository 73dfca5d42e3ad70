"""Special values of operands: their columns, rows and sizes."""

from __future__ import annotations

import pytest
import torch

from gemmtune.core.devices import CPU
from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.verify.adversarial import (
    Columns,
    aux_kinds,
    choose_columns,
    special_rows,
    spoil_aux,
    tensor_kinds,
    weight_kinds,
)
from gemmtune.verify.random_source import RandomSource

ROW_SCALE, COL_SCALE = Step("scale", "row", "float32"), Step("scale", "col", "float32")


def linear(m: int, n: int, k: int, dtype: str = "float32", epilogue: tuple[Step, ...] = ()) -> Problem:
    weight = Operand(dtype, Layout("col"), constant=True)
    return Problem("mm", m, n, k, Operand(dtype), weight, dtype, epilogue)


def source() -> RandomSource:
    return RandomSource(CPU, 5)


def test_only_tensors_along_the_columns_have_special_columns() -> None:
    columns = choose_columns(linear(4, 400, 32, epilogue=(ROW_SCALE, COL_SCALE)), source())
    assert columns.aux[0] == {}
    assert set(columns.aux[1]) == set(aux_kinds(COL_SCALE))
    assert set(columns.weight) == set(weight_kinds(linear(4, 400, 32)))


@pytest.mark.parametrize(("n", "per_kind"), [(27, 1), (28, 2), (400, 2)])
def test_each_kind_has_two_columns_where_a_quarter_of_the_columns_suffice_for_one(n: int, per_kind: int) -> None:
    """B has seven kinds of special columns."""
    columns = choose_columns(linear(4, n, 32), source())
    assert {len(indices) for indices in columns.weight.values()} == {per_kind}
    chosen = columns.all_of_weight()
    assert len(set(chosen)) == len(chosen) <= n // 2


@pytest.mark.parametrize(("dtype", "below"), [("float32", 2.0**-27), ("bfloat16", 2.0**-27), ("float16", 2.0**-5)])
def test_tiny_rows_are_below_the_range_of_a_narrower_format(dtype: str, below: float) -> None:
    row = special_rows(linear(1, 8, 64, dtype), ("tiny",), source())
    assert 0.0 < float(row.abs().max()) < below


@pytest.mark.parametrize("step", [Step("add", "full", "float32"), Step("mul", "full", "float32")])
def test_a_full_tensor_has_every_special_value_in_an_ordinary_row(step: Step) -> None:
    problem = linear(4, 40, 32, epilogue=(step,))
    tensor = torch.ones(4, 40)
    spoil_aux(problem, (tensor,), Columns({}, ({},)), ["NaN", "", "", "large"], source())
    expected = {"add": ("isnan", "isposinf", "isneginf"), "mul": ("isnan",)}[step.kind]
    for name in expected:
        special = getattr(torch, name)(tensor)
        assert special[1].any()
        assert special[2].any()
        assert not special[[0, 3]].any()


def test_one_element_tensors_have_a_case_for_each_kind() -> None:
    steps = (COL_SCALE, Step("add", "tensor", "float32"), Step("relu"), Step("scale", "tensor", "float32"))
    expected = [(1, kind) for kind in aux_kinds(steps[1])] + [(2, kind) for kind in aux_kinds(steps[3])]
    assert list(tensor_kinds(linear(4, 40, 32, epilogue=steps))) == expected
