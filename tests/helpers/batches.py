"""Layouts of batched operands that torch.bmm accepts: any batch stride and start address, expanded, overlapping."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MakeView = Callable[[Tensor], Tensor]


def _with_stride(t: Tensor, extra: int, start: int = 0) -> Tensor:
    """Return a copy of ``t`` with a batch stride longer by ``extra`` elements and a storage offset of ``start``."""
    count, outer, inner = t.shape
    stride = outer * inner + extra
    memory = torch.zeros(start + count * stride, dtype=t.dtype, device=t.device)
    return memory.as_strided(t.shape, (stride, inner, 1), start).copy_(t)


def _overlapping(t: Tensor) -> Tensor:
    """Return a view with the shape of ``t`` in which each matrix begins one element behind the previous one."""
    count, outer, inner = t.shape
    return t.flatten()[: outer * inner + count - 1].as_strided(t.shape, (1, inner, 1))


# Each function takes a contiguous tensor [batch, outer, inner] and returns one of equal shape.
LAYOUTS: dict[str, MakeView] = {
    "dense": lambda t: t,
    "odd batch stride": lambda t: _with_stride(t, 1),
    "batch stride of 8 bytes more": lambda t: _with_stride(t, 4),
    "odd start": lambda t: _with_stride(t, 0, start=1),
    "odd start and batch stride": lambda t: _with_stride(t, 3, start=5),
    "expanded": lambda t: t[:1].expand(t.shape),
    "expanded, odd start": lambda t: _with_stride(t[:1], 0, start=1).expand(t.shape),
    "overlapping": _overlapping,
    "wide batch stride": lambda t: _with_stride(t, 8 * t.shape[2]),
}
