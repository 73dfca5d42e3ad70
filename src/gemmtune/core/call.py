"""``Call``: the description of one call of an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from .problem import Problem
from .weights import PackedWeight, QuantWeight


class Call(NamedTuple):
    """The Problem and the operands of one call, in the shapes that kernels take.

    shape: the result's shape. adapt_a: makes a of the op's first operand, also in later calls of operands like these;
    None where a is that operand. adapt_b: makes b of the op's other operands; None where b is the second one.
    """

    problem: Problem
    a: Tensor
    b: Tensor | QuantWeight | PackedWeight
    aux: tuple[Tensor, ...]
    shape: tuple[int, ...]
    adapt_a: Callable[[Tensor], Tensor] | None = None
    adapt_b: Callable[..., Any] | None = None

    @property
    def packed(self) -> PackedWeight | None:
        return self.b if isinstance(self.b, PackedWeight) else None

    @property
    def copies_a(self) -> bool:
        """Whether kernels get a dense copy of a: beside a constant B the Problem says that A is dense."""
        return self.problem.b.constant and not self.a.is_contiguous()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that the caller passed, without those of a PackedWeight."""
        if isinstance(self.b, Tensor):
            return (self.a, self.b, *self.aux)
        if isinstance(self.b, QuantWeight):
            zero = () if self.b.zero_point is None else (self.b.zero_point,)
            return (self.a, self.b.data, self.b.scale, *zero, *self.aux)
        return (self.a, *self.aux)
