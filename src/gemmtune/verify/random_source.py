"""Random tensors on a device, reproducible by a seed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import devices


class RandomSource:
    """A source of random tensors on ``device``; equal seeds give equal tensors on devices of one kind.

    They are drawn by the device's own generator, or on the host where the kind of device has none.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self._generator = devices.get(device.type).generator(device).manual_seed(seed)
        self._drawn_on = self._generator.device

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return numbers of the standard normal distribution."""
        drawn = torch.randn(shape, generator=self._generator, dtype=dtype, device=self._drawn_on)
        return drawn.to(self.device)

    def fill_normal(self, out: Tensor) -> None:
        """Overwrite a float tensor with numbers of the standard normal distribution."""
        if self._drawn_on == out.device:
            out.normal_(generator=self._generator)
        else:
            out.copy_(self.normal(tuple(out.shape), out.dtype))

    def uniform(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return numbers that are uniform in [0, 1)."""
        return torch.rand(shape, generator=self._generator, dtype=dtype, device=self._drawn_on).to(self.device)

    def integers(self, low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
        """Return integers that are uniform in [low, high)."""
        drawn = torch.randint(low, high, shape, generator=self._generator, dtype=dtype, device=self._drawn_on)
        return drawn.to(self.device)

    def bytes(self, count: int) -> Tensor:
        """Return ``count`` random bytes (uint8)."""
        words = torch.empty(-(-count // 8), dtype=torch.int64, device=self._drawn_on)
        words.random_(-(2**63), None, generator=self._generator)
        return words.view(torch.uint8)[:count].to(self.device)

    def permutation(self, count: int) -> Tensor:
        """Return the integers below ``count`` (int64) in random order."""
        return torch.randperm(count, generator=self._generator, device=self._drawn_on).to(self.device)

    def index(self, below: int) -> int:
        """Return one integer below ``below``."""
        return int(torch.randint(0, below, (), generator=self._generator, device=self._drawn_on))
