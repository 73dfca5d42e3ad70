"""Operands of Problems: layouts of matrices, constant weights, and activations that have to be copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemmtune
from gemmtune import fuse
from gemmtune.core.checks import DtypeError, ShapeError
from gemmtune.core.problem import Layout, Order
from gemmtune.dispatch.specialize import adapt_args
from gemmtune.ops import linear, mm
from gemmtune.ops.operands import (
    accumulator_of,
    b_operand,
    is_constant,
    is_torchs_alone,
    layout_of,
    matrix_call,
)


@pytest.mark.parametrize(
    ("shape", "strides", "prefer", "layout"),
    [
        ((3, 4), (4, 1), "row", Layout("row")),
        ((3, 4), (4, 1), "col", Layout("row")),
        ((3, 4), (1, 3), "row", Layout("col")),
        ((3, 4), (7, 1), "row", Layout("row", 7)),
        ((3, 4), (1, 5), "row", Layout("col", 5)),
        ((3, 4), (8, 2), "row", Layout("strided")),
        ((3, 4), (0, 1), "row", Layout("strided")),
        ((3, 4), (3, 1), "row", Layout("strided")),
        ((3, 4), (1, 2), "row", Layout("strided")),
        ((3, 4), (1, 1), "row", Layout("strided")),
        ((1, 4), (9, 1), "row", Layout("row")),
        ((1, 4), (9, 1), "col", Layout("col")),
        ((1, 4), (9, 2), "row", Layout("col", 2)),
        ((4, 1), (1, 9), "row", Layout("row")),
        ((4, 1), (1, 9), "col", Layout("col")),
        ((4, 1), (2, 9), "col", Layout("row", 2)),
        ((1, 1), (5, 7), "row", Layout("row")),
        ((1, 1), (5, 7), "col", Layout("col")),
        ((2, 3, 4), (99, 1, 3), "row", Layout("col")),
    ],
)
def test_layout_names_the_order_and_the_leading_dimension(
    shape: tuple[int, ...], strides: tuple[int, ...], prefer: Order, layout: Layout
) -> None:
    assert layout_of(torch.empty(200).as_strided(shape, strides), prefer) == layout


def test_products_are_summed_in_a_dtype_at_least_as_wide() -> None:
    sums = {name: accumulator_of(name) for name in ("float64", "float32", "bfloat16", "float16", "int8", "uint8")}
    assert sums == {
        "float64": "float64", "float32": "float32", "bfloat16": "float32", "float16": "float32", "int8": "int32",
        "uint8": "int32",
    }  # fmt: skip


def test_packed_weight_is_a_constant_operand_in_the_order_of_its_raw_weight() -> None:
    packed = gemmtune.pack(torch.randn(5, 4), layout="aten:row")
    operand = b_operand(packed, "row", False)
    assert (operand.dtype, operand.layout, operand.constant) == ("float32", Layout("col"), True)
    by_rows = type(packed)(packed.layout, packed.data, 5, 4, "float32", raw_order="row")
    assert b_operand(by_rows, "col", False).layout == Layout("row")


def test_parameters_and_their_views_are_constant() -> None:
    weight = nn.Parameter(torch.randn(5, 4))
    assert is_constant(weight) is True
    with torch.no_grad():
        assert is_constant(weight.t()) is True
        assert is_constant(weight + 1) is False
    assert is_constant(torch.randn(5, 4)) is False
    assert is_constant(torch.randn(5, 4).t()) is False


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_only_strided_activations_beside_a_constant_weight_are_copied(constant: bool, transposed: bool) -> None:
    a = torch.randn(4, 3).t() if transposed else torch.randn(3, 4)
    b = torch.randn(4, 5)
    call = mm.describe(a, b, constant=constant)
    assert call.copies_a == (constant and transposed)
    first, second, _ = adapt_args(call, (a, b))(a, b)
    assert second is b
    assert (first is a) != (constant and transposed)
    assert torch.equal(first, a)
    assert call.problem.a.layout == Layout("col" if transposed and not constant else "row")


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("int64", "int64"), True),
        (("bool", "bool"), True),
        (("int64", "int32"), False),
        (("float32", "float32"), False),
        (("float32", "int64"), False),
        (("int64", "float32"), False),
    ],
)
def test_operands_of_one_dtype_that_no_problem_has_are_pytorchs_alone(dtypes: tuple[str, ...], expected: bool) -> None:
    assert is_torchs_alone(*(torch.ones(2, 2).to(getattr(torch, name)) for name in dtypes)) is expected


def test_all_operands_are_pytorchs_alone_under_autocast() -> None:
    operands = torch.ones(2, 2), torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert is_torchs_alone(*operands) is True
        with torch.autocast("cpu", enabled=False):
            assert is_torchs_alone(*operands) is False


def test_argument_steps_come_before_the_epilogue() -> None:
    a, b, bias = torch.ones(3, 4), torch.ones(4, 5), torch.ones(5)
    call = matrix_call("mm", a, b, torch.float32, [fuse.relu()], arguments={"bias": fuse.bias(bias)})
    assert [(step.kind, step.axis) for step in call.problem.epilogue] == [("bias", "col"), ("relu", "full")]
    assert [tensor.data_ptr() for tensor in call.aux] == [bias.data_ptr()]
    assert matrix_call("mm", a, b, torch.float32).problem.epilogue == ()


@pytest.mark.parametrize(
    ("epilogue", "text"),
    [
        (fuse.relu(), r"mm\(\): epilogue must be a list .* got one step alone"),
        ([torch.relu], r"mm\(\): epilogue must hold steps .* got builtin_function_or_method"),
        ([fuse.relu(), "gelu"], r"mm\(\): epilogue must hold steps .* got str"),
    ],
)
def test_epilogue_that_is_no_list_of_steps_raises_type_error(epilogue: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        gemmtune.mm(torch.ones(2, 3), torch.ones(3, 4), epilogue=epilogue)


def test_tensor_of_an_argument_is_named_in_errors() -> None:
    a, b, short, elsewhere = torch.ones(3, 4), torch.ones(4, 5), torch.ones(2), torch.ones(5, device="meta")
    with pytest.raises(ShapeError, match=r"^linear\(\): bias for axis 'col' of a 3x5 output has 5 element"):
        matrix_call("linear", a, b, torch.float32, arguments={"bias": fuse.bias(short)}, family="mm")
    with pytest.raises(ShapeError, match=r"^fuse.bias\(\): a tensor for axis 'col'"):
        matrix_call("linear", a, b, torch.float32, [fuse.bias(short)], family="mm")
    arguments = {"bias": fuse.bias(elsewhere)}
    with pytest.raises(DtypeError, match="mat1 is on cpu and bias is on meta"):
        matrix_call("scaled_mm", a, b, torch.float32, arguments=arguments, names=("mat1", "mat2"))


def test_packed_weight_on_another_device_is_named() -> None:
    packed = gemmtune.pack(torch.randn(5, 4), layout="aten:row")
    moved = type(packed)(packed.layout, tuple(t.to("meta") for t in packed.data), 5, 4, "float32")
    with pytest.raises(DtypeError, match="the input is on cpu and the packed weight is on meta"):
        matrix_call("mm", torch.ones(2, 4), moved, torch.float32)
    assert matrix_call("mm", torch.ones(2, 4), packed, torch.float32).packed is packed
    assert matrix_call("mm", torch.ones(2, 4, device="meta"), packed, torch.float32).packed is packed


def test_linear_describes_a_vector_of_weights_as_its_columns() -> None:
    """Both orders describe a weight [1, K]; that of ``linear`` is preferred, so that every N has the same key."""
    weight: Tensor = torch.randn(1, 4)
    assert linear.describe(torch.randn(3, 4), weight).problem.b.layout == Layout("col")
    assert mm.describe(torch.randn(3, 4), weight.t()).problem.b.layout == Layout("row")
