"""Linear modules with quantised weights, as models that are not written for gemmtune have them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FP8_MAX = 448.0
GROUP = 128  # elements of K that share a scale of an int4 weight


class Int8Linear(nn.Module):
    """gpt-fast's weight-only linear: int8 weight [N, K] and a bf16 scale per output channel."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.float().abs().amax(1) / 127
        self.register_buffer("weight", (linear.weight.float() / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scales", scale.to(linear.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype)) * self.scales


class Int4Linear(nn.Module):
    """gpt-fast's linear of ``_weight_int4pack_mm``: int4 weight with a bf16 scale and a zero for each group of 128."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.float()
        groups = weight.reshape(weight.shape[0], -1, GROUP)
        low, high = groups.amin(2), groups.amax(2)
        scale = ((high - low) / 15).clamp(min=1e-6)
        integers = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15).reshape(weight.shape)
        scales_and_zeros = torch.stack((scale, low + 8 * scale), 2).transpose(0, 1)
        self.register_buffer("scales_and_zeros", scales_and_zeros.contiguous().bfloat16())
        if weight.is_cuda:
            data = integers.to(torch.uint8)
            packed = torch._convert_weight_to_int4pack((data[:, ::2] << 4) | data[:, 1::2], 8)
        else:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers.to(torch.int32), 1)
        self.register_buffer("packed", packed)

    def forward(self, x: Tensor) -> Tensor:
        multiply = torch.ops.aten._weight_int4pack_mm if x.is_cuda else torch.ops.aten._weight_int4pack_mm_for_cpu
        return multiply(x.reshape(-1, x.shape[-1]), self.packed, GROUP, self.scales_and_zeros).view(*x.shape[:-1], -1)


class Fp8Linear(nn.Module):
    """fp8 weight [N, K] with a scale per output channel; activations are quantised by row in every call."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.float().abs().amax(1) / FP8_MAX
        self.register_buffer("weight", (linear.weight.float() / scale[:, None]).to(torch.float8_e4m3fn))
        self.register_buffer("scales", scale[None].contiguous())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scale = flat.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / FP8_MAX
        quantised = (flat.float() / scale).to(torch.float8_e4m3fn)
        y = torch._scaled_mm(quantised, self.weight.t(), scale, self.scales, out_dtype=x.dtype)
        return y.view(*x.shape[:-1], -1)
