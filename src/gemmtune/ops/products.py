"""PyTorch's functions that multiply by a matrix, described as ``F.linear`` by a weight [N, K] or by the transpose of
one.

``optimize`` counts these products on example inputs, and packed weights serve them. Both use the tables of this module,
so that they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_aten = torch.ops.aten


class Product(NamedTuple):
    """The operands of ``input @ weight.t() + bias`` with weight [N, K] or, if ``transposed``, of
    ``input @ weight + bias`` with weight [K, N].

    input: [.., K]. bias: [N], another tensor that broadcasts to the result, or None.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    transposed: bool


# The parameters have PyTorch's names, because callers may pass them by keyword. A call with other parameters (out=)
# raises TypeError here, and is no Product.


def _linear(input: Any, weight: Any, bias: Any = None) -> Product:
    return Product(input, weight, bias, False)


def _matmul(input: Any, other: Any) -> Product:
    return Product(input, other, None, True)


def _mm(input: Any, mat2: Any) -> Product | None:
    return Product(input, mat2, None, True) if _dim(input) == 2 else None


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Product | None:
    is_product = beta == 1 and alpha == 1 and _dim(mat1) == 2 and _dim(input) <= 2
    return Product(mat1, mat2, input, True) if is_product else None


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

# The operators that reach ``__torch_dispatch__``. linear and matmul do so in inference mode only; otherwise they are
# decomposed into mm and addmm.
OPERATORS: dict[Any, Callable[..., Product | None]] = {
    _aten.linear.default: _linear,
    _aten.matmul.default: _matmul,
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
}


def product_of(
    table: Mapping[Any, Callable[..., Product | None]], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Product | None:
    """Return the Product of a call of ``func``; None for a call that is none. table: FUNCTIONS or OPERATORS."""
    describe = table.get(func)
    if describe is None:
        return None
    try:
        product = describe(*args, **kwargs)
    except TypeError:
        return None
    if product is None or not isinstance(product.input, Tensor) or not isinstance(product.weight, Tensor):
        return None
    is_strided = product.input.layout is torch.strided
    return product if is_strided and product.weight.dim() == 2 and product.input.dim() else None


_TRANSPOSES = frozenset(
    {
        _aten.t.default, _aten.numpy_T.default, _aten.mT.default, _aten.mH.default, _aten.matrix_H.default,
        _aten.adjoint.default,
    }
)  # fmt: skip
_PERMUTES = frozenset({_aten.transpose.int, _aten.swapaxes.default, _aten.swapdims.default, _aten.permute.default})


def is_transpose(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator returns the transpose of its first argument, which is a matrix of a real dtype."""
    if func in _TRANSPOSES:
        return True
    if func not in _PERMUTES or len(args) < 2:
        return False
    dims = [dim % 2 for dim in (args[1] if isinstance(args[1], list | tuple) else args[1:])]
    return dims == [1, 0] or (dims == [0, 1] and func is not _aten.permute.default)
