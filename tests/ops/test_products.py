"""Which calls of PyTorch's functions are products by a weight, with their operands; which operators transpose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gemmtune.ops.products import FUNCTIONS, OPERATORS, is_transpose, product_of

ATEN = torch.ops.aten
X, STACK, VECTOR = torch.ones(2, 4), torch.ones(3, 2, 4), torch.ones(4)
WEIGHT, MATRIX, BIAS, ADDEND = torch.ones(5, 4), torch.ones(4, 5), torch.ones(5), torch.ones(2, 5)


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "product"),
    [
        (F.linear, (X, WEIGHT), {}, (X, WEIGHT, None, False)),
        (F.linear, (STACK,), {"weight": WEIGHT, "bias": BIAS}, (STACK, WEIGHT, BIAS, False)),
        (torch.matmul, (VECTOR,), {"other": MATRIX}, (VECTOR, MATRIX, None, True)),
        (Tensor.matmul, (STACK, MATRIX), {}, (STACK, MATRIX, None, True)),
        (Tensor.__matmul__, (X, MATRIX), {}, (X, MATRIX, None, True)),
        (torch.mm, (X,), {"mat2": MATRIX}, (X, MATRIX, None, True)),
        (Tensor.mm, (X, MATRIX), {}, (X, MATRIX, None, True)),
        (torch.addmm, (BIAS, X, MATRIX), {}, (X, MATRIX, BIAS, True)),
        (Tensor.addmm, (ADDEND, X, MATRIX), {"beta": 1, "alpha": 1}, (X, MATRIX, ADDEND, True)),
    ],
)
def test_product_has_the_operands_of_the_call(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], product: tuple[Any, ...]
) -> None:
    result = product_of(FUNCTIONS, func, args, kwargs)
    assert result is not None
    assert all(given is expected for given, expected in zip(result, product, strict=True))


def test_operators_are_looked_up_in_their_own_table() -> None:
    result = product_of(OPERATORS, ATEN.mm.default, (X, MATRIX), {})
    assert result is not None
    assert result.weight is MATRIX
    assert product_of(FUNCTIONS, ATEN.mm.default, (X, MATRIX), {}) is None


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (torch.bmm, (STACK, STACK.mT), {}),
        (F.linear, (X,), {}),
        (F.linear, ([1.0], WEIGHT), {}),
        (F.linear, (X, VECTOR), {}),
        (torch.matmul, (X, [[1.0]]), {}),
        (torch.matmul, (STACK, STACK.mT), {}),
        (torch.matmul, (torch.ones(()), MATRIX), {}),
        (torch.matmul, (X.to_sparse(), MATRIX), {}),
        (torch.mm, (X, MATRIX), {"out": ADDEND}),
        (torch.mm, (STACK, MATRIX), {}),
        (torch.mm, ([[1.0]], MATRIX), {}),
        (torch.addmm, (BIAS, X, MATRIX), {"beta": 2}),
        (torch.addmm, (BIAS, X, MATRIX), {"alpha": 2}),
        (torch.addmm, (BIAS, STACK, MATRIX), {}),
        (torch.addmm, (torch.ones(1, 2, 5), X, MATRIX), {}),
    ],
)
def test_other_calls_are_no_products(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert product_of(FUNCTIONS, func, args, kwargs) is None


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (ATEN.t.default, ()),
        (ATEN.mT.default, ()),
        (ATEN.transpose.int, (0, 1)),
        (ATEN.transpose.int, (1, 0)),
        (ATEN.transpose.int, (-2, -1)),
        (ATEN.swapaxes.default, (-1, 0)),
        (ATEN.permute.default, ([1, 0],)),
        (ATEN.permute.default, ((-1, -2),)),
    ],
)
def test_operator_that_transposes_a_matrix_is_recognised(func: Any, args: tuple[Any, ...]) -> None:
    assert torch.equal(func(X, *args), X.t())
    assert is_transpose(func, (X, *args)) is True


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (ATEN.detach.default, ()),
        (ATEN.view.default, ([4, 2],)),
        (ATEN.transpose.int, (0, 0)),
        (ATEN.transpose.int, (1, -1)),
        (ATEN.permute.default, ([0, 1],)),
        (ATEN.permute.default, ([0, -1],)),
    ],
)
def test_other_operators_are_no_transposes(func: Any, args: tuple[Any, ...]) -> None:
    assert is_transpose(func, (X, *args)) is False


def test_permutation_given_by_keyword_is_no_transpose() -> None:
    assert is_transpose(ATEN.permute.default, (X,)) is False
