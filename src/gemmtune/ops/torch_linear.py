"""``F.linear`` that takes any bias which broadcasts to the result, with every version of torch.

torch 2.9 adds a bias of several dimensions to a product of matrices only; newer ones add it to any product, in place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ..core.torch_compat import DisableTorchDispatch, DisableTorchFunction


def _takes_any_bias() -> bool:
    """Whether ``F.linear`` of this torch adds a bias of several dimensions to a product with leading sizes.

    The operands are integers: a CPU's library for floating-point products would be initialized, which takes 10 ms.
    """
    with DisableTorchFunction(), DisableTorchDispatch():  # an active mode would answer for another device
        matrix = torch.ones(1, 1, dtype=torch.int32, device="cpu")
        try:
            functional.linear(matrix[None], matrix, matrix[None])
        except RuntimeError:
            return False
        return True


def _add_bias(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``F.linear``, whose product is finished before a bias of several dimensions is added to it."""
    if bias is None or bias.dim() < 2 or input.dim() == 2:
        return functional.linear(input, weight, bias)
    return functional.linear(input, weight).add_(bias)


torch_linear: Callable[..., Tensor] = functional.linear if _takes_any_bias() else _add_bias
