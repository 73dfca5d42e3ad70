"""The elementwise work that a surrounding puts around a product, as a model does."""

from __future__ import annotations

import torch
from torch import Tensor

_SIGN = 0x80  # of an 8-bit float


def rewrite(activations: Tensor) -> None:
    """Change the sign of every element in place: the activations are written anew, as a norm in front of a product
    writes them, and keep their range. uint8: its bits are flipped."""
    if activations.dtype == torch.uint8:
        activations.bitwise_not_()
    elif activations.dtype.is_floating_point and activations.dtype.itemsize == 1:
        activations.view(torch.uint8).bitwise_xor_(_SIGN)
    else:
        activations.neg_()


def consume(output: Tensor, result: Tensor) -> None:
    """Read every element of a product's output and write as many of ``result``, as an activation function does."""
    result.copy_(output)


def result_for(output: Tensor) -> Tensor:
    """Memory for what ``consume`` writes."""
    return torch.empty_like(output)
