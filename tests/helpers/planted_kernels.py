"""Backend of kernels that are faster than any product: two are wrong at every seventh M, and one is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gemmtune.backends.base import Artifact, Availability, Backend, Kernel
from gemmtune.core.candidate import Candidate, Illegal
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.core.weights import PackedWeight

ENTRY_POINT = "helpers.planted_kernels:PlantedBackend"
RIGHT = 7
PACKING = "planted:right"


def planted(remainder: int) -> Candidate:
    """Return the candidate that is wrong at the M with this remainder of a division by 7; ``RIGHT`` is right."""
    return Candidate.make("planted", "kernel", wrong_at=remainder)


class PlantedKernel(Kernel):
    """Kernel that copies its result of an earlier call with the same operands.

    It keeps the operands, so that no others can have their addresses, and multiplies again when they were modified. The
    right kernel has a layout of its own.
    """

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        self.problem, self.candidate = problem, candidate
        self.remainder = int(str(candidate["wrong_at"]))
        self.packing = PACKING if self.remainder == RIGHT else None
        self.results: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        if isinstance(b, PackedWeight):
            (b,) = b.data
        m = a.shape[0]
        key = m, a.data_ptr(), a._version, b.data_ptr(), b._version
        if key not in self.results:
            result = torch.mm(a, b)
            if m % 7 == self.remainder:
                result[-1] += 1.0
            self.results[key] = a, b, result
        out.copy_(self.results[key][2])

    def pack(self, b: Any) -> PackedWeight:
        return PackedWeight(PACKING, (b.clone(),), self.problem.n, self.problem.k, self.problem.b.dtype)


class PlantedBackend(Backend):
    """Backend of three kernels: one is right, one is wrong at M = 3, 10, 17 and so on, one at M = 6, 13, 20.

    The latter are not among the M at which each candidate is checked when it is tuned for a single M.
    """

    name = "planted"

    def available(self, target: Target) -> Availability:
        return Availability(True)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        for remainder in (RIGHT, 3, 6):
            yield planted(remainder)

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        return PlantedKernel(problem, artifact.candidate)

    def source_digest(self) -> str:
        return "planted"
