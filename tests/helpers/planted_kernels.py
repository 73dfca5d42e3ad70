"""Backends of kernels that are faster than any product, and have a fault at some M, which a plan must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gemmtune.backends.base import Artifact, Availability, Backend, Kernel
from gemmtune.core.candidate import Candidate, Illegal
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.core.tuned_plan import TunedPlan
from gemmtune.core.weights import PackedWeight

ENTRY_POINT = "helpers.planted_kernels:PlantedBackend"
ROWS_ENTRY_POINT = "helpers.planted_kernels:FaultyRowsBackend"
RIGHT = 7
PACKING = "planted:right"
# The M at which each kernel of FaultyRowsBackend is wrong, or takes as long as three products.
WRONG_ROWS: dict[str, Callable[[int], bool]] = {
    "third of seven": lambda m: m % 7 == 3,
    "from 129": lambda m: m >= 129,
}
SLOW_ROWS: dict[str, Callable[[int], bool]] = {"odd": lambda m: m % 2 == 1}
BATCHES_ENTRY_POINT = "helpers.planted_kernels:FaultyBatchesBackend"
# The batches at which each kernel of FaultyBatchesBackend is wrong.
WRONG_BATCHES: dict[str, Callable[[int], bool]] = {
    "third of seven": lambda batch: batch % 7 == 3,
    "from 17": lambda batch: batch >= 17,
}


def planted(remainder: int) -> Candidate:
    """Return the candidate that is wrong at the M with this remainder of a division by 7; ``RIGHT`` is right."""
    return Candidate.make("planted", "kernel", wrong_at=remainder)


def faulty_rows(fault: str) -> Candidate:
    """Return the candidate with a fault of ``WRONG_ROWS`` or ``SLOW_ROWS``."""
    return Candidate.make("faulty_rows", "kernel", fault=fault)


def faulty_batches(fault: str) -> Candidate:
    """Return the candidate with a fault of ``WRONG_BATCHES``."""
    return Candidate.make("faulty_batches", "kernel", fault=fault)


def never(m: int) -> bool:
    return False


class PlantedKernel(Kernel):
    """Kernel that copies its result of an earlier call with the same operands.

    It keeps the operands, so that no others can have their addresses, and multiplies again when they were modified.
    While a CUDA graph is captured it only copies results that exist: others would exist only once the graph has run.

    wrong: whether it adds 1 to the last row at an M. slow: whether it computes three products at an M. packing: the
    layout of weights that it reads.
    """

    def __init__(
        self,
        problem: Problem,
        candidate: Candidate,
        wrong: Callable[[int], bool] = never,
        slow: Callable[[int], bool] = never,
        packing: str | None = None,
    ) -> None:
        self.problem, self.candidate, self.packing = problem, candidate, packing
        self.wrong, self.slow = wrong, slow
        self.results: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        if isinstance(b, PackedWeight):
            (b,) = b.data
        m = a.shape[0]
        key = m, a.data_ptr(), a._version, b.data_ptr(), b._version
        if key in self.results:
            out.copy_(self.results[key][2])
        else:
            self.multiply(a, b, out)
            if self.wrong(m):
                out[-1] += 1.0
            if not (out.is_cuda and torch.cuda.is_current_stream_capturing()):
                self.results[key] = a, b, out.clone()
        for _ in range(3 if self.slow(m) else 0):
            torch.mm(a, b)

    def multiply(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        torch.mm(a, b, out=out)

    def pack(self, b: Any) -> PackedWeight:
        assert self.packing is not None
        return PackedWeight(self.packing, (b.clone(),), self.problem.n, self.problem.k, self.problem.b.dtype)


class PlantedBatchesKernel(PlantedKernel):
    """``PlantedKernel`` of batched products, whose faults are at batches."""

    def multiply(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        torch.bmm(a, b, out=out)


class PlantedBackend(Backend):
    """Backend of three kernels: one is right, one is wrong at M = 3, 10, 17 and so on, one at M = 6, 13, 20.

    The latter are not among the M at which each candidate is checked when it is tuned for a single M. The right kernel
    has a layout of its own.
    """

    name = "planted"

    def available(self, target: Target) -> Availability:
        return Availability(True)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        for remainder in (RIGHT, 3, 6):
            yield planted(remainder)

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        remainder = int(str(artifact.candidate["wrong_at"]))
        packing = PACKING if remainder == RIGHT else None
        return PlantedKernel(problem, artifact.candidate, lambda m: m % 7 == remainder, packing=packing)

    def source_digest(self) -> str:
        return "planted"


class FaultyRowsBackend(Backend):
    """Backend of the kernels of ``WRONG_ROWS`` and ``SLOW_ROWS``, for CPUs and GPUs."""

    name = "faulty_rows"

    def available(self, target: Target) -> Availability:
        return Availability(True)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        for fault in (*WRONG_ROWS, *SLOW_ROWS):
            yield faulty_rows(fault)

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        fault = str(artifact.candidate["fault"])
        wrong, slow = WRONG_ROWS.get(fault, never), SLOW_ROWS.get(fault, never)
        return PlantedKernel(problem, artifact.candidate, wrong, slow)

    def source_digest(self) -> str:
        return "faulty rows"


class FaultyBatchesBackend(Backend):
    """Backend of the kernels of ``WRONG_BATCHES``, for CPUs and GPUs."""

    name = "faulty_batches"

    def available(self, target: Target) -> Availability:
        return Availability(True)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        for fault in WRONG_BATCHES if problem.is_batched else ():
            yield faulty_batches(fault)

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        fault = str(artifact.candidate["fault"])
        return PlantedBatchesKernel(problem, artifact.candidate, WRONG_BATCHES[fault])

    def source_digest(self) -> str:
        return "faulty batches"


def assert_no_fault_is_served(plan: TunedPlan) -> None:
    """Assert that no interval of a kernel of ``FaultyRowsBackend`` contains an M at which it is wrong or slow."""
    for interval in (interval for found in plan.intervals.values() for interval in found):
        for fault in (*WRONG_ROWS, *SLOW_ROWS):
            if interval.kernel == faulty_rows(fault).id:
                assert not rows_with_fault(fault, interval.first, interval.last), interval


def rows_with_fault(fault: str, first: int, last: int) -> list[int]:
    """Return the M from ``first`` to ``last`` at which the kernel with this fault is wrong or slow."""
    has_fault = WRONG_ROWS.get(fault) or SLOW_ROWS[fault]
    return [m for m in range(first, last + 1) if has_fault(m)]
