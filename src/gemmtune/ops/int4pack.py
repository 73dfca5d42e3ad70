"""int4 weights in the layouts of PyTorch's ``_weight_int4pack_mm`` operators, whose order only these operators know.

The operators compute ``a @ ((q - 8) * scale + zero)``, with scale and zero side by side in one tensor [groups, N, 2].
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.torch_compat import weight_int4pack_mm, weight_int4pack_mm_for_cpu

_ROWS = 1024  # rows of the identity in one product: all of them would take more memory than the weight


def multiply(a: Tensor, packed: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
    """Return the product [M, N] by PyTorch's operator for the layout.

    a: [M, K], dense. packed: the weight, uint8 for CPUs and int32 for GPUs. scales_and_zeros: [groups, N, 2].
    """
    operator = weight_int4pack_mm if packed.dtype == torch.int32 else weight_int4pack_mm_for_cpu
    product: Tensor = operator(a, packed, group, scales_and_zeros)
    return product


def unpacked_integers(packed: Tensor, group: int, scales_and_zeros: Tensor, k: int) -> Tensor:
    """Return the int8 integers [N, K], of -8 to 7, of a weight in the layout of ``_weight_int4pack_mm``.

    scales_and_zeros: [groups, N, 2]; only its shape and dtype count. The integers are the product of the identity by
    the weight, with scales of 1 and zeros of 0. Integers up to 8 are exact in each dtype that the operators take.
    """
    unit = torch.zeros_like(scales_and_zeros, memory_format=torch.contiguous_format)
    unit[..., 0] = 1
    values = packed.new_empty((scales_and_zeros.shape[1], k), dtype=torch.int8)
    for start in range(0, k, _ROWS):
        stop = min(start + _ROWS, k)
        rows = scales_and_zeros.new_zeros((stop - start, k))
        rows[:, start:stop].fill_diagonal_(1)
        values[:, start:stop] = multiply(rows, packed, group, unit).t()
    return values


def zero_points(scales_and_zeros: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return float32 scales and zero points [groups, N] with ``(q - zero point) * scale = (q - 8) * scale + zero``.
    None where a scale is 0: there are none. scales_and_zeros: [groups, N, 2]."""
    scale, zero = scales_and_zeros[..., 0].float(), scales_and_zeros[..., 1].float()
    if bool((scale == 0).any()):
        return None
    return scale.contiguous(), (8 - zero / scale).contiguous()


def nibbles(values: Tensor) -> Tensor:
    """Return int8 [N, K] of -8 to 7 as uint8 [N, K / 2]: 8 is added to each, and each byte has two along K, the low
    nibble first."""
    shifted = (values + 8).to(torch.uint8)
    return shifted[:, ::2] | (shifted[:, 1::2] << 4)


def signed(nibble_pairs: Tensor) -> Tensor:
    """Return int8 [N, K] of -8 to 7 from the uint8 [N, K / 2] that ``nibbles`` returns for it."""
    low, high = nibble_pairs & 15, nibble_pairs >> 4
    return torch.stack((low, high), 2).reshape(nibble_pairs.shape[0], -1).to(torch.int8) - 8
