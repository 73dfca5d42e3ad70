"""int4 weights in the layout of ``_weight_int4pack_mm_for_cpu``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gemmtune.core.torch_compat import convert_weight_to_int4pack_for_cpu, weight_int4pack_mm_for_cpu

GROUP = 32


class Int4Weight(NamedTuple):
    """An int4 weight: its integers of 0 to 15 [N, K], the operator's layout of them, scales and zeros [groups, N, 2]
    in bfloat16, and its values in float64 [N, K]."""

    integers: Tensor
    packed: Tensor
    scales_and_zeros: Tensor
    values: Tensor


def int4_weight(n: int, k: int, *, group: int = GROUP, seed: int = 0) -> Int4Weight:
    """Return a random weight."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(0, 16, (n, k), dtype=torch.int32, generator=generator)
    scale = (torch.rand(k // group, n, generator=generator) + 0.5) / k**0.5 / 4
    scales_and_zeros = torch.stack((scale, scale * torch.randn(k // group, n, generator=generator)), 2).bfloat16()
    scale, zero = (scales_and_zeros[..., i].double().t().repeat_interleave(group, 1) for i in range(2))
    values = (integers.double() - 8) * scale + zero
    return Int4Weight(integers, convert_weight_to_int4pack_for_cpu(integers, 1), scales_and_zeros, values)


class Int4Linear(nn.Module):
    """Linear module with an int4 weight and without a bias, as gpt-fast has it."""

    packed: Tensor
    scales_and_zeros: Tensor

    def __init__(self, weight: Int4Weight, group: int = GROUP) -> None:
        super().__init__()
        self.group = group
        self.register_buffer("packed", weight.packed)
        self.register_buffer("scales_and_zeros", weight.scales_and_zeros)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        product: Tensor = weight_int4pack_mm_for_cpu(rows, self.packed, self.group, self.scales_and_zeros)
        return product.reshape(*x.shape[:-1], -1)
