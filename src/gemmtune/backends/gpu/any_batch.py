"""Kernels of batched products that are loaded for one batch and serve any."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from ...core.problem import Problem
from ..base import Launch

if TYPE_CHECKING:
    from typing_extensions import Self

_MAX_BATCHES = 64  # other batches than its Problem's for which a kernel keeps launches


class AnyBatch:
    """Mixin of kernels whose launches depend on the batch of their Problem.

    _bound: the launches of the kernel, which a kernel for another batch has of its own.
    """

    problem: Problem
    _bound: dict[tuple[int, ...], Launch]

    def __init__(self) -> None:
        self._of_batches: dict[int, Self] = {}

    def of_batch(self, batch: int) -> Self:
        """Return this kernel for a batch: itself for its Problem's, else a copy of it that differs in the Problem's
        batch and in its launches."""
        if batch == self.problem.batch:
            return self
        kernel = self._of_batches.get(batch)
        if kernel is None:
            if len(self._of_batches) >= _MAX_BATCHES:
                self._of_batches.clear()
            kernel = self._of_batches[batch] = copy.copy(self)
            kernel.problem, kernel._bound = self.problem.with_size("batch", batch), {}
        return kernel
