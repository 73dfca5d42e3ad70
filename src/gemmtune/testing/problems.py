"""Random Problems of every family, dtype, layout and epilogue step, in small sizes."""

from __future__ import annotations

import random
from dataclasses import replace

from ..core.epilogue import Axis, Epilogue, Step
from ..core.problem import FAMILIES, Layout, Operand, Order, Problem, Quant

_FLOATS = ("float32", "bfloat16", "float16")
_ACTIVATIONS = (Step("relu"), Step("gelu"), Step("gelu_tanh"), Step("silu"), Step("clamp", lo=-0.5, hi=1.5))


def random_problem(rng: random.Random, max_size: int = 200, family: str | None = None) -> Problem:
    """Return a random Problem with M, N and K from 1 to ``max_size``. Equal states of ``rng`` give equal Problems.

    In half of the Problems N and K are multiples of 8, in ``scaled_mm`` always multiples of 16. One Problem in four has
    a single row. family: the Problem's family; None: any.
    """
    chosen = rng.choice(FAMILIES) if family is None else family
    m = 1 if rng.random() < 0.25 else rng.randint(1, max_size)
    n, k = rng.randint(1, max_size), rng.randint(1, max_size)
    if rng.random() < 0.5:
        n, k = max(8, n - n % 8), max(8, k - k % 8)
    make = {"mm": _dense, "bmm": _batched, "int_mm": _integer, "mixed_mm": _weight_only, "scaled_mm": _scaled}[chosen]
    problem = make(rng, m, n, k)
    return replace(problem, out=Layout("row", problem.n + rng.randint(1, 9))) if rng.random() < 0.1 else problem


def random_epilogue(rng: random.Random, max_steps: int = 3) -> Epilogue:
    """Return an epilogue with up to ``max_steps`` steps. Half of all epilogues are empty."""
    return tuple(_random_step(rng) for _ in range(rng.choice((0,) * max_steps + tuple(range(1, max_steps + 1)))))


def _random_step(rng: random.Random) -> Step:
    dtype = rng.choice(_FLOATS)
    axis: Axis = rng.choice(("tensor", "row", "col", "full"))
    return rng.choice(
        (
            *_ACTIVATIONS,
            Step("scale", "tensor", None, rng.choice((0.5, -1.5))),
            Step("scale", rng.choice(("tensor", "row", "col")), dtype),
            Step("bias", "col", dtype),
            Step("add", axis, dtype, rng.choice((1.0, 0.25))),
            Step("mul", axis, dtype),
            Step("cast", dtype=dtype),
        )
    )


def _random_layout(rng: random.Random, rows: int, columns: int, strided: bool = False) -> Layout:
    minimum: dict[Order, int] = {"row": columns, "col": rows, "strided": 2 * columns}
    orders: tuple[Order, ...] = ("row", "col", "strided") if strided else ("row", "col")
    order = rng.choice(orders)
    padding = rng.randint(1, 9) if rng.random() < 0.3 else 0
    return Layout(order, minimum[order] + padding if padding or order == "strided" else None)


def _dense(rng: random.Random, m: int, n: int, k: int) -> Problem:
    dtype = rng.choice((*_FLOATS, "float64")) if rng.random() < 0.3 else rng.choice(_FLOATS)
    a = Operand(dtype, _random_layout(rng, m, k) if rng.random() < 0.5 else Layout(), align=rng.choice((0, 64)))
    constant = rng.random() < 0.6
    b = Operand(dtype, _random_layout(rng, k, n, strided=not constant), constant=constant)
    out = dtype if rng.random() < 0.7 or dtype == "float64" else "float32"
    epilogue = random_epilogue(rng)
    return Problem("mm", m, n, k, a, b, out, epilogue, acc="float64" if dtype == "float64" else "float32")


def _batched(rng: random.Random, m: int, n: int, k: int) -> Problem:
    dtype = rng.choice(_FLOATS)
    m, batch = max(1, m // 3), rng.randint(1, 4)
    epilogue = tuple(step for step in random_epilogue(rng, 2) if step.axis != "row")
    a, b = Operand(dtype, _random_layout(rng, m, k)), Operand(dtype, _random_layout(rng, k, n))
    return Problem("bmm", m, n, k, a, b, dtype, epilogue, batch=batch)


def _integer(rng: random.Random, m: int, n: int, k: int) -> Problem:
    a = Operand(rng.choice(("int8", "uint8")))
    b = Operand("int8", Layout(rng.choice(("row", "col"))), constant=rng.random() < 0.7)
    exact = Problem("int_mm", m, n, k, a, b, "int32", acc="int32")
    if rng.random() < 0.4:
        return exact
    scales = [Step("scale", "col", "float32")] + [Step("scale", "row", "float32")] * rng.randint(0, 1)
    optional = [Step("bias", "col", "float32")] * rng.randint(0, 1) + [Step("relu")] * rng.randint(0, 1)
    return replace(exact, out_dtype=rng.choice(("int8", "float32", "bfloat16")), epilogue=(*scales, *optional))


def _weight_only(rng: random.Random, m: int, n: int, k: int) -> Problem:
    dtype = rng.choice(_FLOATS)
    weight_dtype = rng.choice(("int8", "int8", "int4", "int4", "float8_e4m3fn"))
    zero_point = weight_dtype != "float8_e4m3fn" and rng.random() < 0.4
    quant = Quant(rng.choice((None, 32, 64)), rng.choice(("float32", dtype)), zero_point)
    b = Operand(weight_dtype, Layout("col"), constant=True, quant=quant)
    return Problem("mixed_mm", m, n, k, Operand(dtype), b, dtype, random_epilogue(rng, 2))


def _scaled(rng: random.Random, m: int, n: int, k: int) -> Problem:
    dtype = rng.choice(("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2"))
    n, k = max(16, n - n % 16), max(16, k - k % 16)
    axes: tuple[Axis, Axis] = rng.choice((("tensor", "tensor"), ("row", "col")))
    steps = [Step("scale", axis, "float32") for axis in axes]
    steps += [Step("bias", "col", "bfloat16")] * rng.randint(0, 1)
    a, b = Operand(dtype), Operand(dtype, Layout("col"))
    return Problem("scaled_mm", m, n, k, a, b, rng.choice(("bfloat16", "float32")), tuple(steps))
