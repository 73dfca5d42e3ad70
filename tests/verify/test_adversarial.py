"""Special values of operands: their columns, rows and sizes."""

from __future__ import annotations

import pytest
import torch

from gemmtune.core.devices import CPU
from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem, Quant
from gemmtune.core.weights import QuantWeight
from gemmtune.verify.adversarial import (
    Columns,
    aux_kinds,
    choose_columns,
    special_rows,
    spoil_aux,
    spoil_weight,
    tensor_kinds,
    weight_kinds,
)
from gemmtune.verify.inputs import make_inputs
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
def test_full_tensor_has_every_special_value_in_an_ordinary_row(step: Step) -> None:
    problem = linear(4, 40, 32, epilogue=(step,))
    tensor = torch.ones(4, 40)
    spoil_aux(problem, (tensor,), Columns({}, ({},)), ["NaN", "", "", "large"], source())
    expected = {"add": ("isnan", "isposinf", "isneginf"), "mul": ("isnan",)}[step.kind]
    for name in expected:
        special = getattr(torch, name)(tensor)
        assert special[1].any()
        assert special[2].any()
        assert not special[[0, 3]].any()


@pytest.mark.parametrize("seed", range(4))
def test_spikes_are_in_the_upper_part_of_their_binade(seed: int) -> None:
    """They are no power of two, so that a spike that was rounded differs, and sums with them fit float16."""
    rows = special_rows(linear(4, 40, 32, "float16"), ["spike"], RandomSource(CPU, seed))
    assert 10240 <= float(rows.abs().max()) <= 16384


def test_special_columns_have_labels() -> None:
    columns = Columns({"NaN": [3]}, ({}, {"large": [5]}))
    assert [columns.label(column) for column in (3, 5, 7)] == ["NaN in B", "large in the epilogue's tensor 1", ""]


def test_one_element_tensors_have_a_case_for_each_kind() -> None:
    steps = (COL_SCALE, Step("add", "tensor", "float32"), Step("relu"), Step("scale", "tensor", "float32"))
    expected = [(1, kind) for kind in aux_kinds(steps[1])] + [(2, kind) for kind in aux_kinds(steps[3])]
    assert list(tensor_kinds(linear(4, 40, 32, epilogue=steps))) == expected


def quantized(dtype: str) -> tuple[Problem, QuantWeight]:
    """Return a problem and a weight [K, N] with groups of 16 and zero points."""
    weight = Operand(dtype, Layout("col"), constant=True, quant=Quant(16, "float32", True))
    problem = Problem("mixed_mm", 4, 40, 32, Operand("bfloat16"), weight, "bfloat16")
    operand = make_inputs(problem, 0).b
    assert isinstance(operand, QuantWeight)
    return problem, operand


@pytest.mark.parametrize(("dtype", "low", "high"), [("int8", 0x80, 0x7F), ("int4", 0x00, 0xFF)])
def test_special_column_of_a_quantized_weight_changes_in_one_part(dtype: str, low: int, high: int) -> None:
    problem, _ = quantized(dtype)
    kinds = weight_kinds(problem)
    for kind in kinds:
        _, before = quantized(dtype)
        _, after = quantized(dtype)
        spoil_weight(problem, after, Columns({kind: (3,)}), source())
        assert before.zero_point is not None
        assert after.zero_point is not None
        changed = [
            name
            for name, x, y in (
                ("data", before.data, after.data),
                ("scale", before.scale, after.scale),
                ("zero_point", before.zero_point, after.zero_point),
            )
            if not torch.equal(x[:, 3], y[:, 3])
        ]
        part = "data" if kind in ("largest", "smallest") else "zero_point" if kind.endswith(" zero") else "scale"
        assert changed == [part], kind
        if part == "data":
            assert after.data.view(torch.uint8)[:, 3].unique().tolist() == [high if kind == "largest" else low]
        others = [column for column in range(40) if column != 3]
        assert torch.equal(before.data[:, others], after.data[:, others])
        assert torch.equal(before.scale[:, others], after.scale[:, others])
    assert {"largest", "smallest", "NaN scale", "fractional zero", "scales that differ by group"} <= set(kinds)
