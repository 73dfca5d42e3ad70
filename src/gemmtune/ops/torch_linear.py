"""``F.linear`` that takes a bias of several rows with every version of torch.

torch 2.9 adds such a bias to a product of matrices only. Newer versions add one that has more elements than a row of
the result to any product, in place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ..core.torch_compat import DisableTorchDispatch, DisableTorchFunction


def _takes_bias_of_rows() -> bool:
    """Whether ``F.linear`` of this torch adds a bias of several rows to a product with leading sizes.

    The operands are integers: a CPU's library for floating-point products would be initialized, which takes 10 ms.
    """
    with DisableTorchFunction(), DisableTorchDispatch():  # an active mode would answer for another device
        input = torch.ones(2, 2, 1, dtype=torch.int32, device="cpu")  # contiguous: torch 2.9 fails for such inputs only
        try:
            functional.linear(input, input[0], input.flatten(1))  # a bias of two rows
        except RuntimeError:
            return False
        return True


def _add_bias(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``F.linear``, for which the product is finished before a bias of several dimensions is added to it."""
    if bias is None or bias.dim() < 2 or input.dim() == 2:
        return functional.linear(input, weight, bias)
    return functional.linear(input, weight).add_(bias)


torch_linear: Callable[..., Tensor] = functional.linear if _takes_bias_of_rows() else _add_bias
