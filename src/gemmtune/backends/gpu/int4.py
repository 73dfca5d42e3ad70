"""int4 weights packed once for our GPU kernels, in the Triton backend's layouts, which other backends read too."""

from __future__ import annotations

import torch

from ...core.errors import PackedWeightError
from ...core.problem import Problem
from ...core.weights import PackedWeight, QuantWeight

INT4_BLOCKS = (128, 256)


def int4_layout(block: int) -> str:
    """Return the name of the int4 layout with blocks of ``block`` elements of K."""
    return f"triton:int4/{block}"


def shuffle_int4(b: QuantWeight, problem: Problem, block: int) -> PackedWeight:
    """Pack int4 weights [K/2, N] (pairs along K) as [N, K/2]: byte j of a block contains its elements j and block / 2 +
    j.

    With this order the kernel reads A in contiguous runs. With pairs of neighbours it would need every second element
    of A.
    """
    low, high = b.data & 15, b.data >> 4
    codes = torch.stack((low, high), dim=1).reshape(2 * b.data.shape[0], -1)[: problem.k]  # [K, N]
    blocks = codes.t().reshape(problem.n, problem.k // block, 2, block // 2)
    data = (blocks[:, :, 0] | (blocks[:, :, 1] << 4)).reshape(problem.n, problem.k // 2).contiguous()
    extra = [b.scale.reshape(-1, problem.n).contiguous()]
    if b.zero_point is not None:
        extra.append(b.zero_point.to(b.scale.dtype).reshape(-1, problem.n).contiguous())
    order = "col" if b.data.stride(0) == 1 else "row"
    return PackedWeight(int4_layout(block), (data, *extra), problem.n, problem.k, "int4", b.quant, "", order)


def unshuffle_int4(packed: PackedWeight) -> QuantWeight:
    """Return the QuantWeight that ``shuffle_int4`` packed, bit for bit, in its original memory order. Raises
    PackedWeightError for another layout."""
    block = next((size for size in INT4_BLOCKS if packed.layout == int4_layout(size)), None)
    if block is None or packed.quant is None:
        raise PackedWeightError(f"layout {packed.layout!r} is not one of the Triton backend's")
    blocks = packed.data[0].reshape(packed.n, packed.k // block, block // 2)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=2).reshape(packed.n, packed.k // 2, 2)
    pairs = codes[..., 0] | (codes[..., 1] << 4)  # [N, K/2]
    data = pairs.contiguous().t() if packed.raw_order == "col" else pairs.t().contiguous()
    tensors = [t.reshape(packed.n) if packed.quant.group is None else t for t in packed.data[1:]]
    zero = tensors[1] if len(tensors) > 1 else None
    return QuantWeight(data, tensors[0], zero, packed.k, packed.quant, "int4")
