"""Tests that GPU backends list no candidate beyond the limits of the GPU or of a launch, and name the limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmtune import backends
from gemmtune.backends.triton.compiler import make_spec
from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand
from gemmtune.core.workloads import bmm_problem, build, fp8_problem, weight_only_problem
from helpers.gpus import A100, H200, MI300X, illegal_reasons, legal_candidates

ADA = replace(A100, name="NVIDIA L40S", capability="8.9", cores=142)
GPU_BACKENDS = ("triton", "cuda", "cublaslt")


@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_no_fp8_below_compute_capability_8_9(name: str) -> None:
    backend, problem = backends.get(name), fp8_problem(16, 4096, 4096)
    assert legal_candidates(backend, problem, A100) == []
    assert any("8.9" in reason for reason in illegal_reasons(backend, problem, A100))


def test_triton_supports_fp8_operands_and_outputs_from_8_9_on() -> None:
    triton, writes_fp8 = backends.get("triton"), replace(build(16, 4096, 4096, "bf16"), out_dtype="float8_e4m3fn")
    assert legal_candidates(triton, fp8_problem(16, 4096, 4096), ADA)
    assert legal_candidates(triton, writes_fp8, ADA)
    assert legal_candidates(triton, writes_fp8, A100) == []
    assert legal_candidates(triton, writes_fp8, MI300X) == []


@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_more_batches_than_the_grid_limit_are_refused(name: str) -> None:
    at_limit = replace(bmm_problem(65_535, 4, 64, 64, "bfloat16"), b=Operand("bfloat16", Layout("col")))
    backend = backends.get(name)
    assert legal_candidates(backend, at_limit, H200)
    above_limit = replace(at_limit, batch=65_536)
    assert legal_candidates(backend, above_limit, H200) == []
    assert any("65535 batches" in reason for reason in illegal_reasons(backend, above_limit, H200))
    assert legal_candidates(backend, replace(at_limit, batch=0), H200) == []


@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_sizes_beyond_32_bits_are_refused(name: str) -> None:
    problem = build(4, 64, 64, "bf16")
    for larger in (problem.with_m(2**31), replace(problem, n=2**31), replace(problem, k=2**31)):
        assert legal_candidates(backends.get(name), larger, H200) == []
        assert any("32 bits" in reason for reason in illegal_reasons(backends.get(name), larger, H200))


def test_more_scales_than_triton_kernels_can_count_are_refused() -> None:
    problem = weight_only_problem(4, 2**21, 2**16, group=64)
    assert [c for c in legal_candidates(backends.get("triton"), problem, H200) if c.template == "tiled"] == []
    assert any(
        "scales are more than 32 bits" in reason for reason in illegal_reasons(backends.get("triton"), problem, H200)
    )


def test_the_leading_dimension_of_an_epilogue_matrix_is_64_bits_wide() -> None:
    problem = replace(build(64, 4096, 4096, "bf16"), epilogue=(Step("add", "full", "bfloat16"),))
    for candidate in legal_candidates(backends.get("triton"), problem, H200)[:3]:
        assert make_spec(problem, candidate).signature["ld0"] == "i64"
