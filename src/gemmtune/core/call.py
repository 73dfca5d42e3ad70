"""``Call``: the description of one call of an op."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .problem import Problem
from .weights import PackedWeight, QuantWeight


class Call(NamedTuple):
    """The Problem and the operands of one call, in the shapes that kernels take. shape: the result's shape."""

    problem: Problem
    a: Tensor
    b: Tensor | QuantWeight | PackedWeight
    aux: tuple[Tensor, ...]
    shape: tuple[int, ...]

    @property
    def packed(self) -> PackedWeight | None:
        return self.b if isinstance(self.b, PackedWeight) else None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that the caller passed, without those of a PackedWeight."""
        if isinstance(self.b, Tensor):
            return (self.a, self.b, *self.aux)
        if isinstance(self.b, QuantWeight):
            zero = () if self.b.zero_point is None else (self.b.zero_point,)
            return (self.a, self.b.data, self.b.scale, *zero, *self.aux)
        return (self.a, *self.aux)
