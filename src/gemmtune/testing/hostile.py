"""A correct kernel, and kernels with faults that real kernels have had, to test verification with.

``correct(problem)`` returns a kernel that computes with the oracle. ``FAULTY_KERNELS`` maps the name of a fault to a
function that takes a Problem and returns a kernel with this fault. All kernels have the signature that
``verify.verify`` calls: ``run(inputs, out)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..core.problem import Problem
from ..verify.inputs import Inputs
from ..verify.oracle import INTEGERS, reference, to_integer
from ..verify.verify import Run


def value(problem: Problem, inputs: Inputs) -> Tensor:
    """Return the exact output before rounding, as float64 or int64."""
    return reference(problem, inputs.a, inputs.b, inputs.aux).value


def store(problem: Problem, result: Tensor, out: Tensor) -> None:
    """Round ``result`` to the dtype of ``out`` and store it there. To integers: ties to even, saturating."""
    if problem.out_dtype in INTEGERS and result.is_floating_point():
        result = to_integer(result, problem.out_dtype)
    out.copy_(result)


def stateless(kernel: Callable[[Problem, Inputs, Tensor], None]) -> Callable[[Problem], Run]:
    """Return a maker of kernels that keep nothing between calls."""
    return lambda problem: functools.partial(kernel, problem)


@stateless
def correct(problem: Problem, inputs: Inputs, out: Tensor) -> None:
    """A correct but slow kernel."""
    store(problem, value(problem, inputs), out)


@stateless
def dropped_k_tail(problem: Problem, inputs: Inputs, out: Tensor) -> None:
    """A kernel that ignores the last element of K."""
    a = inputs.a.clone()
    a[..., -1] = 0
    store(problem, value(problem, replace(inputs, a=a)), out)


@stateless
def one_element(problem: Problem, inputs: Inputs, out: Tensor) -> None:
    """A kernel with the largest element of the output 10% too large (for integers: wrong by one)."""
    correct(problem)(inputs, out)
    flat = out.reshape(-1).double()
    flat_index = int(torch.nan_to_num(flat.abs(), 0.0, 0.0, 0.0).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat_index), out.shape))
    element = out[index]
    if problem.out_dtype in INTEGERS:
        out[index] = element - 1 if element > 0 else element + 1
    else:
        out[index] = element.double() * 1.1


@stateless
def block_off(problem: Problem, inputs: Inputs, out: Tensor) -> None:
    """A kernel with the last 8 x 8 block of the output 10% too large."""
    correct(problem)(inputs, out)
    block = out[..., -8:, -8:].double()
    store(problem, (block * 1.1), out[..., -8:, -8:])


@stateless
def scaled(problem: Problem, inputs: Inputs, out: Tensor) -> None:
    """A kernel whose whole output is 1.002 times the correct one."""
    exact = value(problem, inputs)
    result = exact.double() * 1.002
    store(problem, result.round() if problem.out_dtype in INTEGERS else result, out)


@stateless
def swapped_stride(problem: Problem, inputs: Inputs, out: Tensor) -> None:
    """A kernel that reads A as if its rows and columns were swapped in memory."""
    a = inputs.a.transpose(-1, -2).reshape(inputs.a.shape)
    b = inputs.b
    if problem.m == 1 and isinstance(b, Tensor):  # a single row has no stride to swap
        b = b.transpose(-1, -2).reshape(b.shape)
    store(problem, value(problem, replace(inputs, a=a, b=b)), out)


def no_write(problem: Problem) -> Run:
    """Return a kernel that does nothing."""
    return lambda inputs, out: None


@stateless
def partial_write(problem: Problem, inputs: Inputs, out: Tensor) -> None:
    """A kernel that does not write the last column."""
    full = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    store(problem, value(problem, inputs), full)
    out[..., :-1] = full[..., :-1]


@stateless
def write_past_the_end(problem: Problem, inputs: Inputs, out: Tensor) -> None:
    """A kernel with a correct result that also writes one element past the end of the output."""
    correct(problem)(inputs, out)
    distance = sum((n - 1) * s for n, s in zip(out.shape, out.stride(), strict=True)) + 1
    out.as_strided((1,), (1,), out.storage_offset() + distance).zero_()


def stale_buffer(problem: Problem) -> Run:
    """Return a kernel that writes the first call's result in every call."""
    first_result: list[Tensor] = []

    def run(inputs: Inputs, out: Tensor) -> None:
        if not first_result:
            correct(problem)(inputs, out)
            first_result.append(out.clone())
        out.copy_(first_result[0])

    return run


def reversed_epilogue(problem: Problem) -> Run:
    """Return a kernel that applies the epilogue's steps in reverse order."""
    reversed_problem = replace(problem, epilogue=problem.epilogue[::-1])

    def run(inputs: Inputs, out: Tensor) -> None:
        store(problem, value(reversed_problem, replace(inputs, aux=inputs.aux[::-1])), out)

    return run


@stateless
def nan_swallowed(problem: Problem, inputs: Inputs, out: Tensor) -> None:
    """A kernel that treats NaN in A as 0."""
    a = torch.where(inputs.a.isnan(), torch.zeros_like(inputs.a), inputs.a)
    store(problem, value(problem, replace(inputs, a=a)), out)


def racy(problem: Problem) -> Run:
    """Return a kernel that zeroes the last row in every second call, as a data race may."""
    calls = 0

    def run(inputs: Inputs, out: Tensor) -> None:
        nonlocal calls
        calls += 1
        correct(problem)(inputs, out)
        if calls % 2 == 0:
            out[..., -1, :] = 0

    return run


def rare_race(problem: Problem) -> Run:
    """Return a kernel that zeroes the last row in every fourth call, as a data race may.

    It caches its results, so that it is as fast as a real kernel.
    """
    calls = 0
    results: dict[int, tuple[Inputs, Tensor]] = {}

    def run(inputs: Inputs, out: Tensor) -> None:
        nonlocal calls
        calls += 1
        if id(inputs) not in results:
            correct(problem)(inputs, out)
            results[id(inputs)] = inputs, out.clone()
        out.copy_(results[id(inputs)][1])
        if calls % 4 == 0:
            out[..., -1, :] = 0

    return run


@stateless
def adds_to_the_output(problem: Problem, inputs: Inputs, out: Tensor) -> None:
    """A kernel that adds its result to the output, as if the output were an accumulator that is not cleared."""
    result = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    store(problem, value(problem, inputs), result)
    out.add_(result)


@stateless
def writes_into_a(problem: Problem, inputs: Inputs, out: Tensor) -> None:
    """A kernel with a correct result that also sets A's last element to 0."""
    correct(problem)(inputs, out)
    inputs.a[..., -1, -1] = 0


@stateless
def reads_past_the_end(problem: Problem, inputs: Inputs, out: Tensor) -> None:
    """A kernel that reads the element behind A's memory and adds it to the result, times 0 (integers: times 1).

    With floating point, the result is correct unless the element is NaN or infinite.
    """
    correct(problem)(inputs, out)
    distance = sum((n - 1) * s for n, s in zip(inputs.a.shape, inputs.a.stride(), strict=True)) + 1
    beyond = inputs.a.as_strided((1,), (1,), inputs.a.storage_offset() + distance)
    out[..., -1:, -1:] += (beyond if problem.a.dtype in INTEGERS else beyond.float() * 0).to(out.dtype)


FAULTY_KERNELS: dict[str, Callable[[Problem], Run]] = {
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
