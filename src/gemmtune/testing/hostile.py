"""Kernels that are right, and kernels that are wrong in ways that have been seen: each takes a Problem.

``correct(problem)`` computes through the oracle; ``WRONG`` maps a fault's name to a maker of kernels with that fault.
All have the signature ``verify.verify`` runs: ``run(inputs, out)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..core.problem import Problem
from ..verify.inputs import Inputs
from ..verify.oracle import INTEGERS, reference, to_integer
from ..verify.verify import Run


def value(problem: Problem, inputs: Inputs) -> Tensor:
    """The output before rounding: float64, or int64."""
    return reference(problem, inputs.a, inputs.b, inputs.aux).value


def store(problem: Problem, result: Tensor, out: Tensor) -> None:
    """Round into ``out`` (integers half to even, saturating)."""
    if problem.out_dtype in INTEGERS and result.is_floating_point():
        result = to_integer(result, problem.out_dtype)
    out.copy_(result)


def correct(problem: Problem) -> Run:
    """A right answer, slowly."""

    def run(inputs: Inputs, out: Tensor) -> None:
        store(problem, value(problem, inputs), out)

    return run


def dropped_k_tail(problem: Problem) -> Run:
    """Forgets the last element of K."""

    def run(inputs: Inputs, out: Tensor) -> None:
        a = inputs.a.clone()
        a[..., -1] = 0
        store(problem, value(problem, replace(inputs, a=a)), out)

    return run


def one_element(problem: Problem) -> Run:
    """The largest element of the output is 10% off (integers: by one)."""

    def spoil(out: Tensor) -> None:
        flat = out.reshape(-1).double()
        where = int(torch.nan_to_num(flat.abs(), 0.0, 0.0, 0.0).argmax())
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(where), out.shape))
        element = out[place]
        if problem.out_dtype in INTEGERS:
            out[place] = element - 1 if element > 0 else element + 1
        else:
            out[place] = element.double() * 1.1

    return _spoiled(problem, spoil)


def block_off(problem: Problem) -> Run:
    """The last 8 x 8 block of the output is 10% off."""

    def spoil(out: Tensor) -> None:
        block = out[..., -8:, -8:].double()
        store(problem, (block * 1.1), out[..., -8:, -8:])

    return _spoiled(problem, spoil)


def scaled(problem: Problem) -> Run:
    """Everything is 1.002 times what it should be."""

    def run(inputs: Inputs, out: Tensor) -> None:
        exact = value(problem, inputs)
        result = exact.double() * 1.002
        store(problem, result.round() if problem.out_dtype in INTEGERS else result, out)

    return run


def swapped_stride(problem: Problem) -> Run:
    """Reads A as if its rows and columns were swapped in memory."""

    def run(inputs: Inputs, out: Tensor) -> None:
        a = inputs.a.transpose(-1, -2).reshape(inputs.a.shape)
        b = inputs.b
        if problem.m == 1 and isinstance(b, Tensor):  # a single row has no stride to swap
            b = b.transpose(-1, -2).reshape(b.shape)
        store(problem, value(problem, replace(inputs, a=a, b=b)), out)

    return run


def no_write(problem: Problem) -> Run:
    """Returns at once."""
    return lambda inputs, out: None


def partial_write(problem: Problem) -> Run:
    """Leaves the last column as it found it."""

    def run(inputs: Inputs, out: Tensor) -> None:
        full = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        store(problem, value(problem, inputs), full)
        out[..., :-1] = full[..., :-1]

    return run


def write_past_the_end(problem: Problem) -> Run:
    """Right, but writes one element too many."""

    def run(inputs: Inputs, out: Tensor) -> None:
        correct(problem)(inputs, out)
        after = sum((n - 1) * s for n, s in zip(out.shape, out.stride(), strict=True)) + 1
        out.as_strided((1,), (1,), out.storage_offset() + after).zero_()

    return run


def stale_buffer(problem: Problem) -> Run:
    """Answers every call with the first call's result."""
    kept: list[Tensor] = []

    def run(inputs: Inputs, out: Tensor) -> None:
        if not kept:
            correct(problem)(inputs, out)
            kept.append(out.clone())
        out.copy_(kept[0])

    return run


def reversed_epilogue(problem: Problem) -> Run:
    """Applies the epilogue's steps last to first."""
    backwards = replace(problem, epilogue=problem.epilogue[::-1])

    def run(inputs: Inputs, out: Tensor) -> None:
        store(problem, value(backwards, replace(inputs, aux=inputs.aux[::-1])), out)

    return run


def nan_swallowed(problem: Problem) -> Run:
    """Takes NaN for 0."""

    def run(inputs: Inputs, out: Tensor) -> None:
        a = torch.where(inputs.a.isnan(), torch.zeros_like(inputs.a), inputs.a)
        store(problem, value(problem, replace(inputs, a=a)), out)

    return run


def racy(problem: Problem) -> Run:
    """Right on every first call of two, one row wrong on the second: what a data race looks like."""
    calls = 0

    def run(inputs: Inputs, out: Tensor) -> None:
        nonlocal calls
        calls += 1
        correct(problem)(inputs, out)
        if calls % 2 == 0:
            out[..., -1, :] = 0

    return run


def rare_race(problem: Problem) -> Run:
    """A data race that shows in every fourth call. As fast as a real kernel: it remembers its answers."""
    calls = 0
    known: dict[int, tuple[Inputs, Tensor]] = {}

    def run(inputs: Inputs, out: Tensor) -> None:
        nonlocal calls
        calls += 1
        if id(inputs) not in known:
            correct(problem)(inputs, out)
            known[id(inputs)] = inputs, out.clone()
        out.copy_(known[id(inputs)][1])
        if calls % 4 == 0:
            out[..., -1, :] = 0

    return run


def adds_to_the_output(problem: Problem) -> Run:
    """Forgets to clear the accumulator, and keeps it in the output."""

    def run(inputs: Inputs, out: Tensor) -> None:
        result = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        store(problem, value(problem, inputs), result)
        out.add_(result)

    return run


def writes_into_a(problem: Problem) -> Run:
    """Right, but leaves A's last element at 0."""

    def run(inputs: Inputs, out: Tensor) -> None:
        correct(problem)(inputs, out)
        inputs.a[..., -1, -1] = 0

    return run


def reads_past_the_end(problem: Problem) -> Run:
    """Adds what lies behind A's memory, times zero: harmless unless that is a NaN. (Integers: times one.)"""

    def run(inputs: Inputs, out: Tensor) -> None:
        correct(problem)(inputs, out)
        after = sum((n - 1) * s for n, s in zip(inputs.a.shape, inputs.a.stride(), strict=True)) + 1
        beyond = inputs.a.as_strided((1,), (1,), inputs.a.storage_offset() + after)
        out[..., -1:, -1:] += (beyond if problem.a.dtype in INTEGERS else beyond.float() * 0).to(out.dtype)

    return run


def _spoiled(problem: Problem, spoil: Callable[[Tensor], object]) -> Run:
    def run(inputs: Inputs, out: Tensor) -> None:
        correct(problem)(inputs, out)
        spoil(out)

    return run


WRONG: dict[str, Callable[[Problem], Run]] = {
    "dropped K tail": dropped_k_tail,
    "one element": one_element,
    "8x8 block 10% off": block_off,
    "x1.002": scaled,
    "swapped stride": swapped_stride,
    "no write": no_write,
    "partial write": partial_write,
    "write past the end": write_past_the_end,
    "stale buffer": stale_buffer,
    "reversed epilogue": reversed_epilogue,
    "NaN swallowed": nan_swallowed,
    "race": racy,
    "rare race": rare_race,
    "adds to the output": adds_to_the_output,
    "writes into A": writes_into_a,
    "reads past the end": reads_past_the_end,
}
