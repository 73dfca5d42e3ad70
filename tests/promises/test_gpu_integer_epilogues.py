"""Tests that a GPU kernel computes an integer epilogue exactly, or is not listed for it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gemmtune import backends
from gemmtune.backends.gpu.rules import float_at, why_no_gpu_kernel
from gemmtune.core.epilogue import Step
from gemmtune.core.workloads import build, int_problem
from gemmtune.verify.oracle import _needs_float
from helpers.gpus import H200, illegal_reasons, legal_candidates

NUMBERS = (1.0, 2.0, -3.0, 0.0, 0.5, 2.0**31 - 1, -(2.0**31), 2.0**31, 1e10, -1e18, math.inf, -math.inf)
STEPS = [
    Step("relu"),
    *(Step(kind, "col", dtype, value=value)  # type: ignore[arg-type]
      for kind in ("bias", "add", "mul") for dtype in ("int32", "float32") for value in NUMBERS[:-2]),
    *(Step("clamp", lo=lo, hi=hi) for lo in NUMBERS for hi in NUMBERS if lo <= hi),
    *(Step("scale", "tensor", value=value) for value in NUMBERS[:-2]),
    *(Step("cast", dtype=dtype) for dtype in ("int8", "uint8", "int32", "float16", "bfloat16", "float32")),
    Step("gelu"),
]  # fmt: skip


@pytest.mark.parametrize("out_dtype", ["int32", "int8", "float32"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.key)
def test_kernels_compute_exactly_the_integer_steps_that_the_reference_computes_exactly(
    step: Step, out_dtype: str
) -> None:
    problem = replace(int_problem(4, 32, 64), epilogue=(step,), out_dtype=out_dtype)
    exact_in_kernels = float_at(problem) > 0
    representable = all(abs(x) < math.inf for x in ((step.value,) if step.kind != "clamp" else (0.0,)))
    exact_in_reference = representable and not _needs_float(step)
    has_empty_range = step.kind == "clamp" and (step.lo == math.inf or step.hi == -math.inf)
    if exact_in_reference and not exact_in_kernels and not has_empty_range and not why_no_gpu_kernel(problem):
        # Only a product with a value, which Step does not have, may differ.
        assert step.kind == "mul"
    if exact_in_kernels:
        assert exact_in_reference or step.kind == "mul"


@pytest.mark.parametrize("name", ["triton", "cuda", "cublaslt"])
def test_steps_with_values_outside_int32_are_refused_with_a_reason(name: str) -> None:
    for step in (Step("bias", "col", "int32", value=1e10), Step("clamp", lo=-1e10, hi=3e9)):
        problem = replace(int_problem(4, 32, 64), epilogue=(step,), out_dtype="int8")
        assert legal_candidates(backends.get(name), problem, H200) == []
        assert any("int32" in reason for reason in illegal_reasons(backends.get(name), problem, H200))


@pytest.mark.parametrize("name", ["triton", "cuda", "cublaslt"])
def test_float_products_with_int32_outputs_are_refused(name: str) -> None:
    problem = replace(build(4, 32, 64, "bf16"), out_dtype="int32")
    assert legal_candidates(backends.get(name), problem, H200) == []


def test_cublaslt_refuses_epilogues_of_integer_products() -> None:
    problem = replace(int_problem(32, 32, 64), epilogue=(Step("relu"),))
    assert legal_candidates(backends.get("cublaslt"), problem, H200) == []
    assert any("take no epilogue" in reason for reason in illegal_reasons(backends.get("cublaslt"), problem, H200))
