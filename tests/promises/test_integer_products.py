"""Tests that integer products are exact with every epilogue, layout and number of rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gemmtune
from gemmtune import backends, fuse
from gemmtune.backends.base import Kernel
from gemmtune.core.candidate import Candidate
from gemmtune.core.problem import Layout, Operand, Problem, Quant
from gemmtune.dispatch import current_target
from gemmtune.verify.inputs import Inputs
from gemmtune.verify.verify import make_reference_cases, verify

K, N = 2048, 40
LARGE = torch.full((N,), 2**30, dtype=torch.int32)
EPILOGUES: dict[str, list[Any]] = {
    "relu": [fuse.relu()],
    "clamp": [fuse.clamp(-5, 33_032_189)],
    "clamp_open": [fuse.clamp(7, math.inf)],
    "bias": [fuse.bias(LARGE)],
    "bias_beyond_int32": [fuse.bias(LARGE), fuse.add(LARGE), fuse.add(-LARGE)],
    "mul_beyond_int32": [fuse.mul(LARGE)],
    "mul_beyond_int64": [fuse.mul(LARGE), fuse.mul(LARGE), fuse.mul(-LARGE)],
    "add_weighted": [fuse.add(LARGE, 3.0), fuse.relu()],
    "cast_and_add": [fuse.cast(torch.int8), fuse.add(LARGE)],
}


def exact(a: torch.Tensor, b: torch.Tensor, steps: list[Any], dtype: torch.dtype) -> torch.Tensor:
    """Return the result computed with Python integers."""
    info, rows = torch.iinfo(dtype), (a.long() @ b.long()).tolist()
    for bound in steps:
        step, tensor = bound.step, [0] * len(rows[0]) if bound.tensor is None else bound.tensor.tolist()
        cast = torch.iinfo(getattr(torch, step.dtype)) if step.kind == "cast" else None
        for row in rows:
            for i, v in enumerate(row):
                match step.kind:
                    case "relu":
                        row[i] = max(v, 0)
                    case "clamp":
                        row[i] = int(min(max(v, step.lo), step.hi))
                    case "bias" | "add":
                        row[i] = v + int(step.value) * tensor[i]
                    case "mul":
                        row[i] = v * tensor[i]
                    case "cast":
                        assert cast is not None
                        row[i] = min(max(v, cast.min), cast.max)
    return torch.tensor([[min(max(v, info.min), info.max) for v in row] for row in rows], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("packed", [True, False], ids=["native", "aten"])
def test_int_mm_with_an_epilogue_is_exact(packed: bool, name: str, dtype: torch.dtype) -> None:
    a, weight = torch.randint(-128, 128, (3, K), dtype=torch.int8), torch.full((N, K), 127, dtype=torch.int8)
    a[0] = 127  # the products of this row end where float32 represents even numbers only
    b: Any = gemmtune.pack(weight) if packed else weight.t()
    got = gemmtune.int_mm(a, b, epilogue=EPILOGUES[name], out_dtype=dtype)
    assert torch.equal(got, exact(a, weight.t(), EPILOGUES[name], dtype))


def native_kernels(problem: Problem) -> Iterator[Kernel]:
    """Yield one kernel of each native template for each instruction set."""
    backend, seen = backends.get("native"), set()
    for item in backend.candidates(problem, current_target()):
        if isinstance(item, Candidate) and (item.template, item["isa"]) not in seen:
            seen.add((item.template, item["isa"]))
            yield backend.load(backend.build(problem, item, current_target()), problem)


def run(kernel: Kernel, a: torch.Tensor, b: torch.Tensor, aux: tuple[torch.Tensor, ...], dtype: torch.dtype) -> Any:
    """Return the output of a kernel, for which ``b`` is packed if the kernel needs that."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=dtype)
    kernel.run(a, kernel.pack(b) if kernel.packing is not None else b, aux, out)
    return out


@pytest.mark.parametrize("name", EPILOGUES)
def test_native_kernels_of_every_instruction_set_are_exact(name: str) -> None:
    a, b = torch.full((3, K), 127, dtype=torch.int8), torch.full((N, K), 127, dtype=torch.int8).t()
    bounds = EPILOGUES[name]
    steps = tuple(bound.step for bound in bounds)
    aux = tuple(bound.tensor for bound in bounds if bound.tensor is not None)
    weight = Operand("int8", Layout("col"), constant=True)
    resolved, _ = fuse.resolve(bounds, 3, N)
    assert [step.kind for step in resolved] == [step.kind for step in steps]
    problem = Problem("int_mm", 3, N, K, Operand("int8"), weight, "int32", resolved, acc="int32")
    for kernel in native_kernels(problem):
        assert torch.equal(run(kernel, a, b, aux, torch.int32), exact(a, b, bounds, torch.int32)), kernel.candidate.id


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.uint8], ids=str)
def test_nan_becomes_zero_and_infinities_saturate_in_integer_outputs(dtype: torch.dtype) -> None:
    a, weight = torch.ones(1, 16, dtype=torch.int8), torch.ones(3, 16, dtype=torch.int8)
    scale = torch.tensor([math.nan, math.inf, -math.inf])
    info = torch.iinfo(dtype)
    for b in (weight.t(), gemmtune.pack(weight)):
        got = gemmtune.int_mm(a, b, epilogue=[fuse.scale(scale)], out_dtype=dtype)
        assert got.tolist() == [[0, info.max, info.min]]


# Layouts that ``torch._int_mm`` of torch 2.13 misreads on a CPU.

STRIDES = ["row", "column", "expanded rows", "expanded columns", "one element", "overlapping", "sliding", "every other"]


def matrix_with_strides(name: str, rows: int, cols: int) -> torch.Tensor:
    """Return a random int8 matrix with strides of ``STRIDES``."""
    values = torch.randint(-128, 128, (4 * rows * cols + 16,), dtype=torch.int8)
    strides = {
        "row": (cols, 1), "column": (1, rows), "expanded rows": (0, 1), "expanded columns": (1, 0),
        "one element": (0, 0), "overlapping": (max(cols // 2, 1), 1), "sliding": (1, 1), "every other": (2 * cols, 2),
    }[name]  # fmt: skip
    return values.as_strided((rows, cols), strides)


@pytest.mark.filterwarnings("ignore:int_mm_out_cpu failed")
@pytest.mark.parametrize("left", STRIDES)
@pytest.mark.parametrize("right", STRIDES)
def test_int_mm_is_exact_for_operands_of_any_strides(left: str, right: str) -> None:
    for m, n, k in itertools.product((1, 3, 17), (1, 5, 32), (1, 2, 33)):
        a, b = matrix_with_strides(left, m, k), matrix_with_strides(right, k, n)
        expected = (a.double() @ b.double()).int()
        assert torch.equal(gemmtune.int_mm(a, b), expected), (m, n, k)
        assert torch.equal(
            gemmtune.int_mm(a, b, epilogue=[fuse.add(-1 * torch.ones(n, dtype=torch.int32))]), expected - 1
        )


# ATen's templates at an M other than the tuned one.


def small_problems() -> Iterator[Problem]:
    """Yield integer, float and weight-only problems with one row and small N and K."""
    for n, k, order in itertools.product((1, 16, 33), (1, 64), ("row", "col")):
        for constant in (False, True):
            weight = Operand("int8", Layout(order), constant=constant)  # type: ignore[arg-type]
            yield Problem("int_mm", 1, n, k, Operand("int8"), weight, "int32", acc="int32")
            for dtype in ("float32", "bfloat16"):
                weight = Operand(dtype, Layout(order), constant=constant)  # type: ignore[arg-type]
                yield Problem("mm", 1, n, k, Operand(dtype), weight, dtype)
    for n, k in itertools.product((16, 33), (64, 128)):
        weight = Operand("int8", Layout("col"), constant=True, quant=Quant(None, "bfloat16"))
        yield Problem("mixed_mm", 1, n, k, Operand("bfloat16"), weight, "bfloat16")


@pytest.mark.filterwarnings("ignore:int_mm_out_cpu failed")
def test_aten_templates_tuned_at_one_row_are_right_at_other_m() -> None:
    """``aten/int_mm_t`` tuned at 1x1x64 was wrong at M = 63."""
    backend = backends.get("aten")
    for problem in small_problems():
        others = [problem.with_m(m) for m in (1, 2, 17, 63, 70)]
        cases = [make_reference_cases(other, 0) for other in others]
        for candidate in backend.candidates(problem, current_target()):
            if not isinstance(candidate, Candidate):
                continue
            kernel = backend.load(backend.build(problem, candidate, current_target()), problem)

            def run_kernel(inputs: Inputs, out: torch.Tensor, kernel: Kernel = kernel) -> None:
                b = inputs.b if kernel.packing is None else kernel.pack(inputs.b)
                kernel.run(inputs.a, b, inputs.aux, out)

            for other, cases_of_other in zip(others, cases, strict=True):
                verdict = verify(run_kernel, other, cases_of_other, 0.0)
                assert verdict.ok, (candidate.id, other.key, verdict)
