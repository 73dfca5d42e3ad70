"""Integer products whose epilogues float32 would round, and integer outputs of NaN and of ties."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Problem
from gemmtune.core.workloads import int_problem
from gemmtune.verify.inputs import Inputs, make_inputs

_K = 2048  # 127 * 127 * K is beyond 2**24, where float32 has no odd numbers
EXACT_EPILOGUES: dict[str, tuple[Step, ...]] = {
    "relu": (Step("relu"),),
    "a bias and relu": (Step("bias", "col", "int32"), Step("relu")),
    "a bias twice": (Step("bias", "col", "int32", value=2.0), Step("add", "row", "int32", value=-3.0)),
    "a clamp at odd bounds": (Step("clamp", lo=-20_000_001.0, hi=20_000_001.0),),
    "a clamp at one odd bound": (Step("clamp", hi=20_000_001.0), Step("clamp", lo=-(2.0**31))),
    "a product": (Step("mul", "col", "int32"), Step("relu"), Step("add", "full", "int32")),
}


def exact_cases(m: int, n: int) -> Iterator[tuple[str, Problem, Inputs, Tensor]]:
    """Yield the epilogue's name, a Problem with an int32 output, its operands, and the exact result."""
    for name, steps in EXACT_EPILOGUES.items():
        problem = replace(int_problem(m, n, _K), epilogue=steps)
        inputs = make_inputs(problem, 0)
        inputs.a.fill_(127)
        inputs.b.fill_(127)
        inputs.a[:, -1] = torch.arange(m) % 100
        inputs.b[:, ::3] = -127
        for tensor in inputs.aux:
            tensor.copy_(torch.randint(-50, 50, tensor.shape, generator=torch.Generator().manual_seed(1)))
        yield name, problem, inputs, _result(problem, inputs)


def _result(problem: Problem, inputs: Inputs) -> Tensor:
    acc, operands = inputs.a.long() @ inputs.b.long(), iter(inputs.aux)
    for step in problem.epilogue:
        operand = torch.tensor(0)
        if step.takes_tensor:
            operand = next(operands).long() * int(step.value)
            operand = operand[:, None] if step.axis == "row" else operand
        if step.kind == "relu":
            acc = acc.clamp(min=0)
        elif step.kind == "clamp":
            acc = acc.clamp(
                None if math.isinf(step.lo) else int(step.lo), None if math.isinf(step.hi) else int(step.hi)
            )
        else:
            acc = acc * operand if step.kind == "mul" else acc + operand
    assert int(acc.abs().max()) > 2**24
    assert bool((acc.float().long() != acc).any()), "float32 would do as well"
    return acc.to(torch.int32)


def rounding_cases(m: int, n: int, k: int) -> Iterator[tuple[Problem, Inputs, Tensor]]:
    """Yield a Problem with an int8 or uint8 output, its operands, and the result.

    NaN becomes 0, and ties are rounded to even numbers.
    """
    for dtype, lowest, highest in (("int8", -128, 127), ("uint8", 0, 255)):
        steps = (Step("scale", "row", "float32"),)
        problem = replace(int_problem(m, n, k), epilogue=steps, out_dtype=dtype)
        inputs = make_inputs(problem, 0)
        inputs.a.fill_(1)
        inputs.b.zero_()
        inputs.b[0] = torch.arange(n) - n // 2
        (scale,) = inputs.aux
        numbers = (math.nan, math.inf, -math.inf, 0.5, -0.5, 1e30, -1e30, 64.0)
        scale.copy_(torch.tensor([numbers[row % len(numbers)] for row in range(m)]))
        exact = (inputs.b[0].double()[None, :] * scale.double()[:, None]).round()
        expected = torch.where(exact.isnan(), 0.0, exact).clamp(lowest, highest)
        yield problem, inputs, expected.to(getattr(torch, dtype))
