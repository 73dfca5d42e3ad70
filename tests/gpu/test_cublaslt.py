"""Tests of cuBLASLt's ranked algorithms on a GPU."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

from gemmtune.backends import get
from gemmtune.backends.cublaslt.choice import chosen_algorithm, load_chosen_kernels
from gemmtune.core.epilogue import Step
from gemmtune.core.errors import UnsupportedError
from gemmtune.core.problem import Problem
from gemmtune.core.workloads import bmm_problem, build, fp8_problem, int_problem
from gemmtune.verify.verify import make_reference_cases, verify
from helpers.gpu_kernels import check_random_problems, check_repeats, first_candidate, load_kernel, run_into

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_artifacts")]

TENSORWISE = (Step("scale", "tensor", "float32"), Step("scale", "tensor", "float32"))
PROBLEMS = {
    "bf16": replace(build(64, 1104, 2080, "bf16"), epilogue=(Step("bias", "col", "bfloat16"), Step("relu"))),
    "fp16": build(100, 1100, 1032, "fp16"),
    "bmm": bmm_problem(5, 7, 136, 512, "bfloat16"),
    "int8": int_problem(60, 2208, 2064),
    "fp8": fp8_problem(33, 2208, 2064),
    "fp8, a scale a tensor": replace(
        fp8_problem(33, 2208, 2064), epilogue=(*TENSORWISE, Step("bias", "col", "bfloat16"))
    ),
}


def test_random_problems_are_correct() -> None:
    check_random_problems(get("cublaslt"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_kernel_is_correct_and_repeatable_at_every_m(name: str, rank: int) -> None:
    """An algorithm that does not support another M is replaced by one that does. Ranks 0 and 1 are tested."""
    problem = PROBLEMS[name]
    try:
        kernel = load_kernel(problem, first_candidate(problem, "ranked", "cublaslt", rank=rank))
    except UnsupportedError as why:
        assert rank > 0
        pytest.skip(str(why))  # cuBLASLt has one algorithm for fp8 with a scale for each row
    for m in (1, 2, 7, 16, 17, 64, 100, 300):
        check(problem.with_m(m), kernel)
        check_repeats(kernel, problem.with_m(m), m)


def check(problem: Problem, kernel) -> None:  # type: ignore[no-untyped-def]
    """Assert that verification accepts the kernel for this problem."""
    test_cases = make_reference_cases(problem, problem.m, device=torch.device("cuda"))
    verdict = verify(lambda inputs, out: run_into(kernel, inputs, out), problem, test_cases[:2], time_limit_s=0.0)
    assert verdict.ok, f"{problem.m} rows: {verdict.kind}: {verdict.detail}"


def test_a_kernel_can_be_captured_in_a_cuda_graph() -> None:
    problem = PROBLEMS["fp8"]
    kernel = load_kernel(problem, first_candidate(problem, "ranked", "cublaslt", rank=0))
    (test_case, *_) = make_reference_cases(problem, 0, device=torch.device("cuda"))
    inputs, out = test_case.inputs, torch.empty(33, 2208, dtype=torch.bfloat16, device="cuda")
    run_into(kernel, inputs, out)
    wanted = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_into(kernel, inputs, out)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)


def test_chosen_algorithms_are_the_first_of_the_ranking() -> None:
    """That PyTorch's op runs them is what ``benchmarks/library_algorithms.py`` shows."""
    problem = build(64, 1024, 8192, "bf16")
    chosen = {m: chosen_algorithm(problem, m) for m in range(520, 600)}
    assert "" not in chosen.values()
    assert 2 < len(set(chosen.values())) < 40
    assert chosen == {m: chosen_algorithm(problem.with_m(3), m) for m in chosen}
    assert chosen_algorithm(build(64, 1024, 8192, "int4wo"), 64) == ""


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_products_that_an_algorithm_or_its_workspace_does_not_fit_are_correct(name: str) -> None:
    """Algorithms are ranked for 256 rows; some of them need workspace, as many bytes more as there are more rows."""
    problem = {"bf16": build(256, 1024, 4096, "bf16"), "int8": int_problem(256, 1024, 1024)}[name]
    kernels = []
    for rank in range(8):
        with contextlib.suppress(UnsupportedError):
            kernels.append(load_kernel(problem, first_candidate(problem, "ranked", "cublaslt", rank=rank)))
    assert len(kernels) > 1
    for kernel in kernels:
        for m in (17, 300, 1000, 3000, 300):
            check(problem.with_m(m), kernel)


def test_kernels_that_cublas_chooses_are_loaded_once() -> None:
    problem, b = build(64, 1104, 2080, "bf16"), torch.randn(1104, 2080, device="cuda").bfloat16().t()
    before = b.clone()
    assert load_chosen_kernels(problem, range(1, 4000, 50), b) > 5
    assert load_chosen_kernels(problem, range(1, 4000, 50), b) == 0
    torch.cuda.synchronize()
    assert torch.equal(b, before)
