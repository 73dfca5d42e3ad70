"""Tests on a GPU of strides and alignments of operands, and of calls that run out of memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

import msgspec
import pytest
import torch

import gemmtune
from gemmtune.backends.gpu import kernel as gpu_kernel
from gemmtune.core.candidate import Candidate
from gemmtune.core.epilogue import Step
from gemmtune.core.errors import KernelError
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.workloads import bmm_problem, build, int_problem, weight_only_problem
from gemmtune.dispatch import RUNTIME, current_target
from gemmtune.store import MemoryStore
from gemmtune.verify.inputs import make_inputs
from helpers.batches import LAYOUTS
from helpers.gpu_kernels import first_candidate, load_kernel, run_into
from helpers.integers import exact_cases, rounding_cases
from helpers.serving import decide, evidence

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_artifacts")]

BATCHED = [("cuda", "skinny"), ("triton", "tiled"), ("cublaslt", "ranked")]


@pytest.mark.parametrize(("backend", "template"), BATCHED)
@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("k", [64, 256])
def test_batched_kernels_are_correct_for_every_batch_layout_of_torch_bmm(
    backend: str, template: str, rows: int, k: int
) -> None:
    problem = replace(bmm_problem(4, rows, 136, k, "bfloat16"), b=Operand("bfloat16", Layout("col")))
    kernel = load_kernel(problem, first_candidate(problem, template, backend))
    a = torch.randn(4, rows, k, device="cuda").bfloat16()
    b = torch.randn(4, 136, k, device="cuda").bfloat16()
    for a_name, make_a in LAYOUTS.items():
        for b_name, make_b in LAYOUTS.items():
            left, right = make_a(a), make_b(b).mT
            for offset in (0, 1):
                out = torch.empty(4 * rows * 136 + offset, dtype=torch.bfloat16, device="cuda")[offset:]
                out = out.view(4, rows, 136).fill_(float("nan"))
                kernel.run(left, right, (), out)
                wanted = torch.bmm(left.double(), right.double())
                torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=5e-2, msg=f"{a_name}, {b_name}")
    torch.cuda.synchronize()


@pytest.mark.parametrize(("backend", "template"), BATCHED)
def test_batched_kernels_are_correct_for_other_batches(backend: str, template: str) -> None:
    problem = replace(bmm_problem(4, 5, 136, 256, "bfloat16"), b=Operand("bfloat16", Layout("col")))
    kernel = load_kernel(problem, first_candidate(problem, template, backend))
    for batch in (4, 1, 33, 4, 300, 33):
        a = torch.randn(batch, 5, 256, device="cuda").bfloat16()
        b = torch.randn(batch, 136, 256, device="cuda").bfloat16().mT
        out = torch.full((batch, 5, 136), float("nan"), dtype=torch.bfloat16, device="cuda")
        kernel.run(a, b, (), out)
        torch.testing.assert_close(out.double(), torch.bmm(a.double(), b.double()), rtol=1e-2, atol=0.1)


def store_winner(store: MemoryStore, problem: Problem, candidate: Candidate) -> None:
    """Store a decision that makes a candidate serve a Problem on this GPU."""
    target = current_target("cuda")
    decision = decide(problem, evidence(candidate, 0.1), chosen=candidate)
    store.put(target, msgspec.structs.replace(decision, target_key=target.key))
    RUNTIME.refresh(store)


@pytest.mark.parametrize(("backend", "template"), BATCHED)
def test_bmm_serves_a_batch_stride_that_is_no_multiple_of_16_bytes(
    own_store: MemoryStore, backend: str, template: str
) -> None:
    m, k, n = 8, 512, 264
    a = torch.randn(4, m * k + 1, dtype=torch.bfloat16, device="cuda")[:, : m * k].view(4, m, k)
    b = torch.randn(4, n, k, dtype=torch.bfloat16, device="cuda").mT
    with gemmtune.record() as recorded:
        gemmtune.bmm(a, b)
    ((problem, _),) = recorded.problems
    store_winner(own_store, problem, first_candidate(problem, template, backend))
    assert RUNTIME.kernel_for(problem, None, a.device) is not None
    for _ in range(3):
        torch.testing.assert_close(gemmtune.bmm(a, b), torch.bmm(a, b), rtol=2e-2, atol=0.2)
    torch.cuda.synchronize()


def raising(error: Exception) -> Callable[..., NoReturn]:
    """Return a function that raises ``error``."""

    def fail(*_: object) -> NoReturn:
        raise error

    return fail


@pytest.mark.parametrize("fails", ["partial sums", "counters"])
def test_a_capture_continues_with_torchs_op_if_a_kernel_runs_out_of_memory(
    own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The captured graph is complete, and its replays are correct."""
    a = torch.randn(16, 4096, device="cuda").bfloat16()
    b = torch.randn(4096, 4096, device="cuda").bfloat16().t()
    with gemmtune.record() as recorded:
        gemmtune.mm(a, b)
    ((problem, _),) = recorded.problems
    store_winner(own_store, problem, first_candidate(problem, split=4))
    gemmtune.mm(a, b)
    if fails == "partial sums":
        monkeypatch.setattr(gpu_kernel, "empty_cuda", raising(torch.OutOfMemoryError("CUDA out of memory")))
    else:
        monkeypatch.setattr(gpu_kernel.Semaphores, "of", raising(KernelError("asking for memory: CUDA error 2")))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gemmtune.mm(a, b)
    for _ in range(3):
        a.normal_()
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out, torch.mm(a, b))
    torch.testing.assert_close(gemmtune.mm(a, b), torch.mm(a, b))


def test_a_converted_weight_beyond_the_memory_limit_raises_out_of_memory(own_store: MemoryStore) -> None:
    """The converted copy of the weight exceeds this process's memory limit, and the context survives the error."""
    problem = weight_only_problem(256, 4096, 4096)
    kernel = load_kernel(problem, first_candidate(problem, "converted"))
    inputs = make_inputs(problem, 0, device=torch.device("cuda"))
    out = torch.empty(256, 4096, dtype=torch.bfloat16, device="cuda")
    run_into(kernel, inputs, out)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (4 << 20)) / total)
    filler: list[torch.Tensor] = []  # of free memory that other tests have left to torch's allocator
    try:
        with suppress(torch.OutOfMemoryError):
            while True:
                filler.append(torch.empty(2 * 4096 * 4096, dtype=torch.uint8, device="cuda"))
        with pytest.raises(torch.OutOfMemoryError):
            run_into(kernel, inputs, out)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        filler.clear()
    run_into(kernel, inputs, out)
    torch.cuda.synchronize()  # the context is intact


INTEGER_KERNELS = [("cuda", "skinny"), ("cuda", "slab"), ("triton", "tiled")]


@pytest.mark.parametrize(("backend", "template"), INTEGER_KERNELS)
def test_integer_epilogues_are_exact(backend: str, template: str) -> None:
    for name, problem, inputs, wanted in exact_cases(5, 264):
        kernel = load_kernel(problem, first_candidate(problem, template, backend))
        out = torch.empty_like(wanted, device="cuda")
        kernel.run(inputs.a.cuda(), inputs.b.t().cuda().t(), [t.cuda() for t in inputs.aux], out)
        assert torch.equal(out.cpu(), wanted), name


@pytest.mark.parametrize(("backend", "template"), INTEGER_KERNELS)
def test_integer_outputs_of_nan_are_zero_and_ties_round_to_even(backend: str, template: str) -> None:
    for problem, inputs, wanted in rounding_cases(8, 256, 512):
        kernel = load_kernel(problem, first_candidate(problem, template, backend))
        out = torch.full_like(wanted, 77, device="cuda")
        kernel.run(inputs.a.cuda(), inputs.b.t().cuda().t(), [t.cuda() for t in inputs.aux], out)
        assert torch.equal(out.cpu(), wanted), problem.out_dtype


def test_misaligned_epilogue_operands_are_correct() -> None:
    """Vectors and matrices of an epilogue need the alignment of their elements only."""
    steps = (Step("bias", "col", "bfloat16"), Step("add", "full", "bfloat16"))
    problem = replace(build(16, 512, 512, "bf16"), epilogue=steps)
    for backend, template in (("cuda", "skinny"), ("cuda", "slab"), ("triton", "tiled")):
        kernel = load_kernel(problem, first_candidate(problem, template, backend))
        inputs = make_inputs(problem, 0, device=torch.device("cuda"))
        expected, out = (torch.empty(16, 512, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        run_into(kernel, inputs, expected)
        bias, matrix = (torch.empty(t.numel() + 1, dtype=t.dtype, device="cuda")[1:].view(t.shape).copy_(t)
                        for t in inputs.aux)  # fmt: skip
        kernel.run(inputs.a, inputs.b, (bias, matrix), out)
        assert torch.equal(out, expected), (backend, template)


def test_misaligned_integer_operands_are_correct() -> None:
    problem = int_problem(16, 512, 512)
    for backend, template in INTEGER_KERNELS:
        kernel = load_kernel(problem, first_candidate(problem, template, backend))
        inputs = make_inputs(problem, 0, device=torch.device("cuda"))
        a = torch.empty(16 * 512 + 3, dtype=torch.int8, device="cuda")[3:].view(16, 512).copy_(inputs.a)
        b = torch.empty(512 * 512 + 5, dtype=torch.int8, device="cuda")[5:].view(512, 512).copy_(inputs.b.t()).t()
        out = torch.empty(16 * 512 + 1, dtype=torch.int32, device="cuda")[1:].view(16, 512)
        kernel.run(a, b, (), out)
        assert torch.equal(out.cpu().long(), inputs.a.cpu().long() @ inputs.b.cpu().long())
