"""Stand-ins for the operators of torchao's Int4TilePackedTo4dTensor, which only GPUs have."""

from __future__ import annotations

import torch
from torch import Tensor


def fake_convert(pairs: Tensor, inner_tiles: int) -> Tensor:
    """Replace ``_convert_weight_to_int4pack``, which CPUs do not have: pack uint8 [N, K / 2], the high nibble first,
    into int32 [N / 8, K / 128, 32, 4]. Its order is not that of the GPU's operator."""
    assert inner_tiles == 8
    values = torch.stack((pairs >> 4, pairs & 15), 2).reshape(-1, 8).flip(1).to(torch.int64)
    packed = (values << (4 * torch.arange(8))).sum(1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return packed.reshape(pairs.shape[0] // 8, pairs.shape[1] // 64, 32, 4)


def fake_int4pack_mm(rows: Tensor, packed: Tensor, group: int, pairs: Tensor) -> Tensor:
    """Replace ``_weight_int4pack_mm`` for weights of ``fake_convert``."""
    packed_values = packed.reshape(-1, 1).to(torch.int64) & 0xFFFFFFFF
    nibbles = ((packed_values >> (4 * torch.arange(8))) & 15).flip(1)
    values = nibbles.reshape(packed.shape[0] * 8, packed.shape[1] * 128) - 8.0
    scale, zero = (pairs[..., index].float().repeat_interleave(group, 0).t() for index in range(2))
    return (rows.float() @ (values * scale + zero).t()).to(rows.dtype)
