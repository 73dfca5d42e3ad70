"""Tests of the Triton backend on a GPU: random problems, misaligned operands, streams, graphs, many M.

GEMMTUNE_GPU_PROBLEMS is the number of random problems (default 150; the issue requires 2,000).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gemmtune.backends.triton import TritonBackend
from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Problem
from gemmtune.core.workloads import build, fp8_problem, int_problem, weight_only_problem
from gemmtune.verify.inputs import Inputs, make_inputs
from gemmtune.verify.oracle import reference
from gemmtune.verify.verify import make_reference_cases, verify
from helpers.gpu_kernels import check_random_problems, check_repeats, first_candidate, load_kernel, run_into

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_artifacts")]


def test_random_problems_are_correct() -> None:
    check_random_problems(TritonBackend())


@pytest.mark.parametrize(
    "problem",
    [build(16, 4096, 1024, "bf16"), int_problem(33, 4096, 1024), fp8_problem(16, 4096, 1024),
     weight_only_problem(5, 4096, 1024), weight_only_problem(5, 4096, 1024, bits=4, group=128)],
    ids=["bf16", "int8", "fp8", "int8wo", "int4wo"],
)  # fmt: skip
def test_split_k_kernels_are_repeatable_bit_for_bit_at_many_m(problem: Problem) -> None:
    kernel = load_kernel(problem, first_candidate(problem, split=2))
    for m in (1, 2, 7, 16, 17, 64, 100, 257):
        check_repeats(kernel, problem.with_m(m), m)


@pytest.mark.parametrize(
    "problem",
    [build(1152, 4096, 1024, "bf16"), int_problem(1152, 4096, 1024), fp8_problem(1152, 4096, 1024),
     replace(build(1152, 4096, 1024, "fp16"), epilogue=(Step("bias", "col", "float16"), Step("gelu"))),
     weight_only_problem(1152, 4096, 1024)],
    ids=["bf16", "int8", "fp8", "epilogue", "int8wo"],
)  # fmt: skip
def test_stream_k_kernels_are_correct_and_repeatable_at_every_m(problem: Problem) -> None:
    kernel = load_kernel(problem, first_candidate(problem, "persistent", stream=1))
    for m in (1, 64, 100, 257, 1024, 1500):
        test_cases = make_reference_cases(problem.with_m(m), m, device=torch.device("cuda"))
        verdict = verify(
            lambda inputs, out: run_into(kernel, inputs, out), problem.with_m(m), test_cases[:2], time_limit_s=0.0
        )
        assert verdict.ok, f"{m} rows: {verdict.kind}: {verdict.detail}"
        check_repeats(kernel, problem.with_m(m), m)


@pytest.mark.parametrize(
    ("problem", "name", "config"),
    [(build(16, 4096, 4096, "bf16"), "triton/tiled", {"split": 4}),
     (build(256, 4096, 4096, "bf16"), "triton/persistent", {"stream": 1}),
     (weight_only_problem(300, 4096, 4096), "triton/converted", {}),
     (build(256, 4096, 4096, "bf16"), "cublaslt/ranked", {})],
    ids=["tiled", "persistent", "converted", "cublaslt"],
)  # fmt: skip
def test_concurrent_streams_and_graphs_share_no_workspace(problem: Problem, name: str, config: dict[str, int]) -> None:
    backend, _, template = name.partition("/")
    kernel = load_kernel(problem, first_candidate(problem, template, backend, **config))
    inputs = make_inputs(problem, 0, device=torch.device("cuda"))
    expected = torch.empty(problem.m, 4096, dtype=torch.bfloat16, device="cuda")
    run_into(kernel, inputs, expected)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    outs = [torch.empty_like(expected) for _ in streams]
    for _ in range(50):
        for stream, out in zip(streams, outs, strict=True):
            with torch.cuda.stream(stream):
                run_into(kernel, inputs, out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)
    graphs = [torch.cuda.CUDAGraph() for _ in streams]
    for graph, out in zip(graphs, outs, strict=True):  # all are captured on one stream
        with torch.cuda.graph(graph):
            for _ in range(3):
                run_into(kernel, inputs, out)
    for _ in range(10):
        for out in outs:
            out.zero_()
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        run_into(kernel, inputs, torch.empty_like(expected))
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.parametrize("m", [128, 300, 1024])
def test_consecutive_products_with_converted_weights_are_correct(m: int) -> None:
    """Two products on one stream: the converted weight of the second overwrites that of the first."""
    problem = weight_only_problem(m, 4096, 1040)
    kernel = load_kernel(problem, first_candidate(problem, "converted"))
    other = weight_only_problem(m, 8192, 512)
    second = load_kernel(other, first_candidate(other, "converted"))
    for seed in range(3):
        test_cases = [make_reference_cases(p, seed, device=torch.device("cuda")) for p in (problem, other)]

        def both(inputs: Inputs, out: torch.Tensor, test_cases=test_cases) -> None:  # type: ignore[no-untyped-def]
            run_into(kernel, inputs, out)
            other_inputs = test_cases[1][0].inputs
            run_into(second, other_inputs, torch.empty(m, 8192, dtype=torch.bfloat16, device="cuda"))

        assert verify(both, problem, test_cases[0], time_limit_s=0.0).ok


@pytest.mark.parametrize("template", ["tiled", "persistent"])
def test_misaligned_operands_and_outputs_are_correct(template: str) -> None:
    problem = build(200, 4096, 512, "bf16")
    kernel = load_kernel(problem, first_candidate(problem, template))
    inputs = make_inputs(problem, 0, device=torch.device("cuda"))
    expected = torch.empty(200, 4096, dtype=torch.bfloat16, device="cuda")
    run_into(kernel, inputs, expected)
    misaligned = torch.empty(200 * 512 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(200, 512)
    misaligned.copy_(inputs.a)
    out = torch.empty(200 * 4096 + 3, dtype=torch.bfloat16, device="cuda")[3:].view(200, 4096)
    kernel.run(misaligned, inputs.b, (), out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("backend", "template", "k"), [("triton", "tiled", 5), ("cuda", "slab", 8)])
def test_the_error_of_subnormal_float16_operands_is_within_the_bound(backend: str, template: str, k: int) -> None:
    """The error, as that of torch.mm, would be 1.17 times the bound if the bound counted subnormals exactly."""
    problem = replace(build(446, 552, k, "fp16"), out_dtype="float32")
    kernel = load_kernel(problem, first_candidate(problem, template, backend))
    generator = torch.Generator("cuda").manual_seed(3)
    a = (torch.randn(446, k, generator=generator, device="cuda") * 2.0**-16).half()
    b = torch.randn(552, k, generator=generator, device="cuda").half().t()
    out = torch.empty(446, 552, dtype=torch.float32, device="cuda")
    kernel.run(a, b, (), out)
    oracle = reference(problem, a, b)
    excess = (out.double() - oracle.value).abs() - 2.0**-24 * oracle.value.abs()
    assert bool((excess <= oracle.magnitude.double() * oracle.unit).all())
