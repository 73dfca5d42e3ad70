"""Kernels that are right while they are verified and not when they are served, beside one that is honest.

``LAPSES`` maps a lapse's name to a maker of its behaviour. All of them multiply float matrices, and may ask for a
packed weight.
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

Behaviour = Callable[[Tensor, Tensor, Tensor], object]  # of a, b and out


def _honest() -> Behaviour:
    return lambda a, b, out: torch.matmul(a, b, out=out)


def _results_by_address() -> Behaviour:
    """Answers a second call on the same addresses with the first call's result."""
    known: dict[tuple[int, int], Tensor] = {}

    def compute(a: Tensor, b: Tensor, out: Tensor) -> None:
        key = a.data_ptr(), a.shape[-2]
        if key not in known:
            known[key] = torch.matmul(a, b)
        out.copy_(known[key])

    return compute


def _weights_by_address() -> Behaviour:
    """Keeps a copy of each weight, by its address."""
    known: dict[int, Tensor] = {}

    def compute(a: Tensor, b: Tensor, out: Tensor) -> None:
        torch.matmul(a, known.setdefault(b.data_ptr(), b.clone()), out=out)

    return compute


def _spoiled_if(when: Callable[[int, float], bool]) -> Callable[[], Behaviour]:
    """Leaves the last row at 0 in some calls. when: of the call's number and the seconds since the first."""

    def make() -> Behaviour:
        calls, began = 0, now()

        def compute(a: Tensor, b: Tensor, out: Tensor) -> None:
            nonlocal calls
            calls += 1
            torch.matmul(a, b, out=out)
            if when(calls, now() - began):
                out[..., -1, :] = 0

        return compute

    return make


def _idle_from(call: int) -> Callable[[], Behaviour]:
    """Does nothing from some call on."""

    def make() -> Behaviour:
        calls = 0

        def compute(a: Tensor, b: Tensor, out: Tensor) -> None:
            nonlocal calls
            calls += 1
            if calls < call:
                torch.matmul(a, b, out=out)

        return compute

    return make


def _idle_at_known_addresses() -> Behaviour:
    """Does nothing where it has been called with an operand and an output of these addresses."""
    known: set[tuple[int, int]] = set()

    def compute(a: Tensor, b: Tensor, out: Tensor) -> None:
        if (a.data_ptr(), out.data_ptr()) not in known:
            known.add((a.data_ptr(), out.data_ptr()))
            torch.matmul(a, b, out=out)

    return compute


def _idle_while_untouched() -> Behaviour:
    """Does nothing where its output still holds what it wrote there for an operand of that address."""
    known: dict[tuple[int, int], Tensor] = {}

    def compute(a: Tensor, b: Tensor, out: Tensor) -> None:
        key = a.data_ptr(), out.data_ptr()
        corner = out[..., -1:, -4:]
        if key not in known or not torch.equal(known[key], corner):
            torch.matmul(a, b, out=out)
            known[key] = corner.clone()

    return compute


LAPSES: dict[str, Callable[[], Behaviour]] = {
    "results kept by address": _results_by_address,
    "weights kept by address": _weights_by_address,
    "wrong from call 30 on": _spoiled_if(lambda call, _: call >= 30),
    "wrong every 13th call": _spoiled_if(lambda call, _: call % 13 == 0),
    "wrong after a second": _spoiled_if(lambda _, seconds: seconds > 1.0),
    "idle from call 40 on": _idle_from(40),
    "idle at known addresses": _idle_at_known_addresses,
    "idle while its output is untouched": _idle_while_untouched,
}


class LapsingKernel(Kernel):
    """A kernel with a lapse, or an honest one for an empty name. packed: it wants a copy of its weight."""

    def __init__(self, problem: Problem, lapse: str = "", packed: bool = False) -> None:
        self.problem = problem
        self.candidate = Candidate.make(NAME, lapse.replace(" ", "_") or "honest", packed=packed)
        self.packing = PACKING if packed else None
        self._compute = LAPSES[lapse]() if lapse else _honest()

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        self._compute(a, b.data[0] if isinstance(b, PackedWeight) else b, out)

    def pack(self, b: Any) -> PackedWeight:
        return PackedWeight(PACKING, (b.clone(),), self.problem.n, self.problem.k, self.problem.b.dtype)
