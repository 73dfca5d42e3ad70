"""Kernels that may compute correct results while they are verified and wrong ones later, and a correct kernel.

A lapse is a fault that depends on the history of calls: on their number, on time, or on addresses seen before.
``LAPSES`` maps the name of a lapse to a function that returns a new instance of its behaviour. All kernels multiply
float matrices, and may ask for a packed weight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.base import Kernel
from ..core.candidate import Candidate
from ..core.problem import Problem
from ..core.weights import PackedWeight

PACKING = "lapsing:copy"
NAME = "lapsing"

now = time.perf_counter

Behaviour = Callable[[Tensor, Tensor, Tensor], object]  # called with a, b and out


def _correct() -> Behaviour:
    return lambda a, b, out: torch.matmul(a, b, out=out)


def _results_by_address() -> Behaviour:
    """Return a kernel that caches its results by A's address and number of rows, and writes them in later calls."""
    results: dict[tuple[int, int], Tensor] = {}

    def compute(a: Tensor, b: Tensor, out: Tensor) -> None:
        key = a.data_ptr(), a.shape[-2]
        if key not in results:
            results[key] = torch.matmul(a, b)
        out.copy_(results[key])

    return compute


def _weights_by_address() -> Behaviour:
    """Return a kernel that caches a copy of each weight by its address."""
    weights: dict[int, Tensor] = {}

    def compute(a: Tensor, b: Tensor, out: Tensor) -> None:
        torch.matmul(a, weights.setdefault(b.data_ptr(), b.clone()), out=out)

    return compute


def _zero_row_if(when: Callable[[int, float], bool]) -> Callable[[], Behaviour]:
    """Return a maker of kernels that zero the last row of the output in some calls.

    when: whether to do so, from the number of the call (from 1) and the seconds since the kernel was made.
    """

    def make() -> Behaviour:
        calls, start = 0, now()

        def compute(a: Tensor, b: Tensor, out: Tensor) -> None:
            nonlocal calls
            calls += 1
            torch.matmul(a, b, out=out)
            if when(calls, now() - start):
                out[..., -1, :] = 0

        return compute

    return make


def _idle_from(call: int) -> Callable[[], Behaviour]:
    """Return a maker of kernels that do nothing from the call with this number on."""

    def make() -> Behaviour:
        calls = 0

        def compute(a: Tensor, b: Tensor, out: Tensor) -> None:
            nonlocal calls
            calls += 1
            if calls < call:
                torch.matmul(a, b, out=out)

        return compute

    return make


def _idle_at_seen_addresses() -> Behaviour:
    """Return a kernel that does nothing in a second call with the same addresses of A and the output."""
    seen: set[tuple[int, int]] = set()

    def compute(a: Tensor, b: Tensor, out: Tensor) -> None:
        if (a.data_ptr(), out.data_ptr()) not in seen:
            seen.add((a.data_ptr(), out.data_ptr()))
            torch.matmul(a, b, out=out)

    return compute


def _idle_while_output_unchanged() -> Behaviour:
    """Return a kernel that does nothing if the output's last elements are still those that it wrote there in an
    earlier call with the same addresses of A and the output."""
    last_corners: dict[tuple[int, int], Tensor] = {}

    def compute(a: Tensor, b: Tensor, out: Tensor) -> None:
        key = a.data_ptr(), out.data_ptr()
        corner = out[..., -1:, -4:]
        if key not in last_corners or not torch.equal(last_corners[key], corner):
            torch.matmul(a, b, out=out)
            last_corners[key] = corner.clone()

    return compute


LAPSES: dict[str, Callable[[], Behaviour]] = {
    "results kept by address": _results_by_address,
    "weights kept by address": _weights_by_address,
    "wrong from call 30 on": _zero_row_if(lambda call, _: call >= 30),
    "wrong every 13th call": _zero_row_if(lambda call, _: call % 13 == 0),
    "wrong after a second": _zero_row_if(lambda _, seconds: seconds > 1.0),
    "idle from call 40 on": _idle_from(40),
    "idle at known addresses": _idle_at_seen_addresses,
    "idle while its output is untouched": _idle_while_output_unchanged,
}


class LapsingKernel(Kernel):
    """A kernel with a lapse, or a correct one for an empty name. packed: whether its weight has to be packed."""

    def __init__(self, problem: Problem, lapse: str = "", packed: bool = False) -> None:
        self.problem = problem
        self.candidate = Candidate.make(NAME, lapse.replace(" ", "_") or "honest", packed=packed)
        self.packing = PACKING if packed else None
        self._compute = LAPSES[lapse]() if lapse else _correct()

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        self._compute(a, b.data[0] if isinstance(b, PackedWeight) else b, out)

    def pack(self, b: Any) -> PackedWeight:
        return PackedWeight(PACKING, (b.clone(),), self.problem.n, self.problem.k, self.problem.b.dtype)
