"""PyTorch's functions that multiply by a matrix, as ``F.linear`` by a weight [N, K] or by the transpose of one.

What ``optimize`` counts on example inputs and what packed weights serve are both decided here, so that they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_aten = torch.ops.aten


class Product(NamedTuple):
    """``input @ weight.t() + bias`` with weight [N, K] or, if ``transposed``, ``input @ weight + bias`` with weight
    [K, N]; input [.., K], bias [N], what broadcasts to the result, or None."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    transposed: bool


# The parameters have PyTorch's names, because callers may pass them by keyword. A call with others (out=) is a
# TypeError here, and no Product.


def _linear(input: Any, weight: Any, bias: Any = None) -> Product:
    return Product(input, weight, bias, False)


def _matmul(input: Any, other: Any) -> Product:
    return Product(input, other, None, True)


def _mm(input: Any, mat2: Any) -> Product | None:
    return Product(input, mat2, None, True) if _dim(input) == 2 else None


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Product | None:
    plain = beta == 1 and alpha == 1 and _dim(mat1) == 2 and _dim(input) <= 2
    return Product(mat1, mat2, input, True) if plain else None


def _dim(value: Any) -> int:
    return value.dim() if isinstance(value, Tensor) else 3


FUNCTIONS: dict[Any, Callable[..., Product | None]] = {
    functional.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
}

# What arrives at ``__torch_dispatch__``: linear and matmul in inference mode only, otherwise as mm and addmm.
OPERATORS: dict[Any, Callable[..., Product | None]] = {
    _aten.linear.default: _linear,
    _aten.matmul.default: _matmul,
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
}


def product_of(
    known: Mapping[Any, Callable[..., Product | None]], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Product | None:
    """What a call of ``func`` multiplies, by FUNCTIONS or OPERATORS; None for any other call."""
    read = known.get(func)
    if read is None:
        return None
    try:
        product = read(*args, **kwargs)
    except TypeError:
        return None
    if product is None or not isinstance(product.input, Tensor) or not isinstance(product.weight, Tensor):
        return None
    dense = product.input.layout is torch.strided
    return product if dense and product.weight.dim() == 2 and product.input.dim() else None


_TURNS = frozenset(
    {
        _aten.t.default, _aten.numpy_T.default, _aten.mT.default, _aten.mH.default, _aten.matrix_H.default,
        _aten.adjoint.default,
    }
)  # fmt: skip
_PERMUTES = frozenset({_aten.transpose.int, _aten.swapaxes.default, _aten.swapdims.default, _aten.permute.default})


def transposes(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator gives the transpose of its first argument, a matrix of a real dtype."""
    if func in _TURNS:
        return True
    if func not in _PERMUTES or len(args) < 2:
        return False
    dims = [dim % 2 for dim in (args[1] if isinstance(args[1], list | tuple) else args[1:])]
    return dims == [1, 0] or (dims == [0, 1] and func is not _aten.permute.default)
