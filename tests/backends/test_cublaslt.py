"""cuBLASLt's ranked algorithms without a GPU: legality, descriptors of the product, and launches."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
from dataclasses import replace

import pytest
import torch

from gemmtune.backends.base import Artifact, Kernel
from gemmtune.backends.cublaslt import CublasLtBackend, choice, library
from gemmtune.backends.cublaslt.choice import chosen_algorithm, load_chosen_kernels
from gemmtune.backends.cublaslt.product import describe_product
from gemmtune.backends.gpu import any_batch
from gemmtune.core.candidate import Candidate
from gemmtune.core.epilogue import Step
from gemmtune.core.errors import KernelError, UnsupportedError
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.workloads import bmm_problem, build, fp8_problem, int_problem
from gemmtune.testing.problems import random_problem
from gemmtune.verify.inputs import Inputs
from gemmtune.verify.verify import make_reference_cases, verify
from helpers.batches import LAYOUTS
from helpers.blas import FakeBlas
from helpers.drivers import STREAM, install_fake_driver
from helpers.gpus import A100, H200, PROBLEM_OF_DTYPE, illegal_reasons, legal_candidates

BACKEND = CublasLtBackend()
BIAS = Step("bias", "col", "bfloat16")


@pytest.fixture
def blas(monkeypatch: pytest.MonkeyPatch) -> FakeBlas:
    install_fake_driver(monkeypatch)
    library_ = FakeBlas()
    monkeypatch.setattr(library, "library", lambda: library_)
    library.handle_of.cache_clear()
    return library_


def load(problem: Problem, rank: int = 0, m: int | None = None) -> Kernel:
    """Return the kernel of the algorithm at a rank for ``m`` rows, the problem's own M by default."""
    sizes = {dim: problem.size(dim) for dim in problem.dims}
    candidate = Candidate.make("cublaslt", "ranked", **{**sizes, "m": m or problem.m}, rank=rank)
    return BACKEND.load(Artifact(candidate, ""), problem)


def check(problem: Problem, kernel: Kernel, seed: int = 0) -> None:
    def run(inputs: Inputs, out: torch.Tensor) -> None:
        kernel.run(inputs.a, inputs.b, inputs.aux, out)

    verdict = verify(run, problem, make_reference_cases(problem, seed), time_limit_s=0.0)
    assert verdict.ok, f"{problem.key}: {verdict.kind}: {verdict.detail}"


# --- candidates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "int8", "fp8"])
def test_candidates_are_listed_in_the_order_of_their_ranks(dtype: str) -> None:
    problem = PROBLEM_OF_DTYPE[dtype].with_m(40)
    listed = [(candidate["m"], candidate["rank"]) for candidate in legal_candidates(BACKEND, problem)]
    assert listed == [(40, rank) for rank in range(8)]


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (PROBLEM_OF_DTYPE["int8wo"], "one kind of element"),
        (build(4, 16, 16, "fp32"), "without tf32"),
        (int_problem(4, 24, 64), "multiples of 16"),
        (replace(int_problem(4, 32, 64), b=Operand("int8", Layout("row"))), "column-major B of bytes"),
        (replace(build(4, 16, 16, "bf16"), out_dtype="int8"), "writes no int8"),
        (replace(build(4, 16, 16, "bf16"), epilogue=(Step("silu"),)), "a bias, then relu"),
        (replace(build(4, 16, 16, "bf16"), epilogue=(BIAS, Step("gelu_tanh"))), "a bias, then relu"),
        (replace(build(4, 16, 16, "bf16"), epilogue=(Step("relu"), BIAS)), "a bias, then relu"),
        (replace(build(4, 16, 16, "bf16"), epilogue=(Step("bias", "col", "float32"),)), "bias a column"),
        (replace(bmm_problem(2, 4, 16, 16, "bfloat16"), epilogue=(Step("relu"),)), "batched products"),
        (replace(fp8_problem(4, 16, 16), epilogue=(Step("scale", "row", "float32"),)), "one scale per operand"),
    ],
)
def test_unsupported_problems_have_a_reason_and_do_not_load(problem: Problem, reason: str) -> None:
    assert not legal_candidates(BACKEND, problem)
    assert reason in " | ".join(illegal_reasons(BACKEND, problem))
    with pytest.raises(KernelError, match="cannot run"):
        load(problem)


@pytest.mark.parametrize("step", [BIAS, Step("relu")])
def test_epilogue_is_illegal_where_rows_are_not_16_byte_aligned(step: Step) -> None:
    even = replace(build(4, 16, 16, "bf16"), epilogue=(step,))
    assert len(legal_candidates(BACKEND, even)) == 8
    for odd in (
        replace(even, a=replace(even.a, layout=Layout("row", 17))),
        replace(even, a=replace(even.a, layout=Layout("col"))),  # the row stride of K is M
        replace(even, b=replace(even.b, layout=Layout("col", 20))),
        replace(build(4, 12, 16, "bf16"), epilogue=(step,)),
    ):
        assert not legal_candidates(BACKEND, odd)
        assert "no bias and no relu where rows" in " | ".join(illegal_reasons(BACKEND, odd))
        assert len(legal_candidates(BACKEND, replace(odd, epilogue=()))) == 8


def test_fp8_needs_the_compute_capability() -> None:
    assert legal_candidates(BACKEND, PROBLEM_OF_DTYPE["bf16"], A100)
    assert "8.9" in " | ".join(illegal_reasons(BACKEND, PROBLEM_OF_DTYPE["fp8"], A100))
    ada = replace(A100, capability="8.9")
    assert "row and a column need compute capability 9.0" in " | ".join(
        illegal_reasons(BACKEND, PROBLEM_OF_DTYPE["fp8"], ada)
    )


def test_unavailable_backend_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UnsupportedError(library.MISSING)

    assert "this target is a cpu" in BACKEND.available(replace(H200, device="cpu")).reason
    assert "ROCm" in BACKEND.available(replace(H200, versions=(("hip", "7.0"),))).reason
    assert "8.0" in BACKEND.available(replace(H200, capability="7.5")).reason
    monkeypatch.setattr(library, "library", missing)
    assert "PyTorch's CUDA wheels" in BACKEND.available(H200).reason
    monkeypatch.setattr(library, "library", lambda: None)
    assert BACKEND.available(H200)


def test_cpu_build_of_pytorch_has_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    library.library.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UnsupportedError, match="was not found"):
        library.library()


def test_structures_have_the_sizes_of_the_header() -> None:
    """cublasLt.h has 64 bytes of algorithm, then 8 of workspace, a status, a float and 16 reserved bytes."""
    assert (ctypes.sizeof(library.Algorithm), ctypes.sizeof(library.Ranked)) == (64, 96)


# --- the product ----------------------------------------------------------------------------------------------------

PROBLEMS = {
    "bf16": build(5, 24, 40, "bf16"),
    "bf16, rows of B": replace(build(5, 24, 40, "bf16"), b=Operand("bfloat16", Layout("row"))),
    "fp16, columns of A": replace(build(5, 24, 40, "fp16"), a=Operand("float16", Layout("col"))),
    "fp16, gaps": replace(
        build(5, 24, 40, "fp16"), a=Operand("float16", Layout("row", 48)), b=Operand("float16", Layout("col", 56))
    ),
    "bf16, unrounded": replace(build(7, 24, 40, "bf16"), out_dtype="float32"),
    "bf16, a bias": replace(build(7, 24, 40, "bf16"), epilogue=(BIAS,)),
    "bf16, relu": replace(build(7, 24, 40, "bf16"), epilogue=(Step("relu"),)),
    "bf16, a bias and relu": replace(build(7, 24, 40, "bf16"), epilogue=(BIAS, Step("relu"))),
    "bmm": bmm_problem(3, 5, 24, 40, "bfloat16"),
    "int8": int_problem(3, 32, 48),
    "fp8, rows and columns": fp8_problem(6, 32, 64),
    "fp8, a scale a tensor, a bias": replace(
        fp8_problem(6, 32, 64),
        epilogue=(Step("scale", "tensor", "float32"), Step("scale", "tensor", "float32"), BIAS),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_products_match_the_oracle(blas: FakeBlas, name: str) -> None:
    kernel = load(PROBLEMS[name], 2)
    check(PROBLEMS[name], kernel)
    assert set(blas.launches) == {(2, STREAM)}
    assert {workspace for _, workspace in blas.workspaces} == {512}
    assert kernel.workspace_bytes == 512


@pytest.mark.parametrize("family", ["mm", "bmm", "int_mm", "scaled_mm"])
def test_random_problems_match_the_oracle(blas: FakeBlas, family: str) -> None:
    rng, remaining = random.Random(family), 6
    while remaining:
        problem = random_problem(rng, 80)
        if problem.family == family and legal_candidates(BACKEND, problem):
            check(problem, load(problem), remaining)
            remaining -= 1


def test_describe_product_transposes_the_operands() -> None:
    """The product is C^T = B^T A^T in column-major order: B's rows of K are cuBLASLt's A, transposed."""
    product = describe_product(replace(build(5, 24, 40, "bf16"), epilogue=(BIAS, Step("relu"))), 5)
    assert (product.a.rows, product.a.columns, product.a.lead, product.turned) == (40, 24, 40, (True, False))
    assert (product.b.rows, product.b.columns, product.b.lead) == (40, 5, 40)
    assert (product.d.rows, product.d.columns, product.d.lead) == (24, 5, 24)
    assert (product.compute, product.scale, product.epilogue, product.d.dtype, product.pointers) == (68, 0, 6, 14, (8,))
    scaled = describe_product(fp8_problem(6, 32, 64), 6)
    assert (scaled.scaling, scaled.pointers, scaled.a.dtype) == (3, (18, 17), 28)


def test_heuristic_gets_the_workspace_and_alignment_preferences(blas: FakeBlas) -> None:
    """The preferences are 32 MB of workspace, operands aligned to 16 bytes, and split-K sums in float32."""
    load(PROBLEMS["bf16"])
    assert blas.preferences[0].attributes == {1: 32 << 20, 3: 2, 5: 16, 6: 16, 7: 16, 8: 16}


@pytest.mark.parametrize("name", ["bf16", "fp8, rows and columns", "int8"])
def test_chosen_algorithm_is_the_first_that_is_ranked_for_m(blas: FakeBlas, name: str) -> None:
    """The fake library's algorithms are its ranks, for the M that it was asked for."""
    choice._call_of.cache_clear()
    names = {m: chosen_algorithm(PROBLEMS[name], m) for m in (16, 17, 800)}
    assert names == {m: f"0-{m:x}-0-0-0-0-0-0" for m in names}
    assert chosen_algorithm(PROBLEMS[name].with_m(3), 17) == names[17]
    assert all(
        preference.attributes == {1: 32 << 20, 3: 2, 5: 16, 6: 16, 7: 16, 8: 16} for preference in blas.preferences
    )


def test_no_algorithm_is_chosen_where_the_library_has_none(blas: FakeBlas) -> None:
    choice._call_of.cache_clear()
    assert chosen_algorithm(build(16, 64, 96, "int4wo"), 16) == ""
    blas.statuses = [7]
    assert chosen_algorithm(PROBLEMS["bf16"], 16) == ""
    blas.count = 0
    assert chosen_algorithm(PROBLEMS["bf16"], 16) == ""


def test_no_algorithm_is_chosen_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UnsupportedError("cuBLASLt was not found")

    choice._call_of.cache_clear()
    monkeypatch.setattr(library, "library", missing)
    assert chosen_algorithm(PROBLEMS["bf16"], 16) == ""


def test_kernels_that_cublas_chooses_are_loaded_once(blas: FakeBlas) -> None:
    """The fake library's first algorithm for an M differs from that for another M. One product of 16 rows runs each."""
    choice._call_of.cache_clear()
    choice._LOADED.clear()
    problem, b = PROBLEMS["bf16"], torch.randn(24, 40).bfloat16().t()
    assert load_chosen_kernels(problem, [8, 17, 17, 800], b) == 3
    assert len(blas.launches) == 3
    assert {size for _, size in blas.workspaces} == {32 << 20}
    assert load_chosen_kernels(problem.with_m(3), [5], b) == 0
    assert len(blas.launches) == 3
    other = build(7, 16, 40, "bf16")
    blas.single_m_algorithms = {0}  # no algorithm supports 16 rows but that for them
    assert load_chosen_kernels(other, [16, 5, 6], torch.randn(16, 40).bfloat16().t()) == 3
    assert len(blas.launches) == 4
    with pytest.raises(ValueError, match="expected a product that torch"):
        load_chosen_kernels(PROBLEMS["bf16, a bias"], [5], b)


def test_no_kernels_are_loaded_where_the_library_has_none(blas: FakeBlas) -> None:
    choice._call_of.cache_clear()
    choice._LOADED.clear()
    blas.count = 0
    assert load_chosen_kernels(PROBLEMS["bf16"], [5, 6], torch.randn(24, 40).bfloat16().t()) == 0
    assert not blas.launches


# --- launching ------------------------------------------------------------------------------------------------------


def test_kernel_serves_other_m_with_a_supported_algorithm(blas: FakeBlas) -> None:
    """An algorithm serves another M if it supports it; otherwise the first algorithm for that M serves."""
    kernel = load(PROBLEMS["bf16"], 1)
    check(PROBLEMS["bf16"].with_m(9), kernel)
    assert {number for number, _ in blas.launches} == {1}
    blas.single_m_algorithms, blas.launches = {1}, []
    check(PROBLEMS["bf16"].with_m(10), kernel)
    assert {number for number, _ in blas.launches} == {0}
    check(PROBLEMS["bf16"], kernel)
    assert {number for number, _ in blas.launches} == {0, 1}


def test_kernel_has_the_workspace_that_an_m_requires(blas: FakeBlas) -> None:
    """The library runs a product with less workspace than it requires, and would write beyond it."""
    kernel = load(PROBLEMS["bf16"], 1)
    assert kernel.workspace_bytes == 256
    for m, size in ((9, 256), (200, 1024), (9, 256), (300, 1280), (200, 1024)):  # 256 bytes for each 64 rows
        blas.workspaces = []
        check(PROBLEMS["bf16"].with_m(m), kernel)
        assert {workspace for _, workspace in blas.workspaces} == {size}
    assert {number for number, _ in blas.launches} == {1}


def test_the_library_is_asked_for_the_m_of_the_candidate(blas: FakeBlas) -> None:
    """The algorithm that is ranked for 9 rows serves 9 rows, whatever the Problem's M is."""
    blas.single_m_algorithms = {1}
    kernel = load(PROBLEMS["bf16"], 1, m=9)
    check(PROBLEMS["bf16"].with_m(9), kernel)
    assert {number for number, _ in blas.launches} == {1}
    blas.launches = []
    check(PROBLEMS["bf16"], kernel)
    assert {number for number, _ in blas.launches} == {0}


def test_load_raises_errors_without_an_algorithm(blas: FakeBlas) -> None:
    with pytest.raises(UnsupportedError, match="ranks 3 algorithms for this product, and none 5"):
        load(PROBLEMS["bf16"], 5)
    blas.count = 0
    with pytest.raises(UnsupportedError, match="no algorithm"):
        load(PROBLEMS["bf16"])
    blas.statuses = [7]
    with pytest.raises(KernelError, match=r"asking cuBLASLt for its algorithms.*invalid value \(status 7\)"):
        load(PROBLEMS["bf16"])
    with pytest.raises(KernelError, match="no such template"):
        BACKEND.load(Artifact(Candidate.make("cublaslt", "other"), ""), PROBLEMS["bf16"])


def test_run_is_repeated_in_a_thread_without_a_context(blas: FakeBlas) -> None:
    kernel = load(PROBLEMS["bf16"])
    a, b, out = torch.ones(5, 40).bfloat16(), torch.ones(24, 40).bfloat16().t(), torch.empty(5, 24).bfloat16()
    blas.statuses = [1]
    kernel.run(a, b, (), out.fill_(0))
    assert torch.equal(out, torch.full_like(out, 40))
    assert blas.statuses == []
    blas.statuses = [1]
    assert load(PROBLEMS["bf16"], 1).workspace_bytes == 256
    assert blas.statuses == []
    blas.statuses = [13]
    with pytest.raises(KernelError, match="multiplying: cuBLASLt says execution failed"):
        kernel.run(a, b, (), out)


def test_misaligned_operands_are_copied(blas: FakeBlas) -> None:
    """Matrices and the epilogue's tensors are copied to 16-byte boundaries, since kernels load 16 bytes at a time."""
    problem = PROBLEMS["bf16, a bias"]
    kernel = load(problem)
    a, out = torch.randn(7 * 40 + 1).bfloat16()[1:].view(7, 40), torch.empty(7 * 24 + 1).bfloat16()[1:].view(7, 24)
    b, bias = torch.randn(24 * 40 + 1).bfloat16()[1:].view(24, 40).t(), torch.randn(25).bfloat16()[1:].view(1, 24)
    kernel.run(a, b, (bias,), out)
    torch.testing.assert_close(out, (a.double() @ b.double() + bias.double()).bfloat16())
    bias_addresses = [descriptor.attributes.get(8, 0) for descriptor in blas.descriptors.values()]
    assert any(bias_addresses)
    assert not any(address % 16 for address in bias_addresses)


def test_threads_have_their_own_descriptors(blas: FakeBlas) -> None:
    """A descriptor has the address of the bias: two threads must not share one."""
    problem = PROBLEMS["bf16, a bias"]
    kernel = load(problem)
    failures: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        a, b = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((7, 40), (24, 40)))
        for _ in range(50):
            bias, out = torch.randn(1, 24, generator=generator).bfloat16(), torch.empty(7, 24).bfloat16()
            kernel.run(a, b.t(), (bias,), out)
            if not torch.equal(out, (a.double() @ b.t().double() + bias.double()).bfloat16()):
                failures.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_descriptors_are_destroyed_with_their_kernel(blas: FakeBlas) -> None:
    kernel = load(PROBLEMS["bf16"])
    check(PROBLEMS["bf16"], kernel)
    del kernel
    gc.collect()  # a launch that may copy its operands refers to itself
    assert {descriptor.kind for descriptor in blas.descriptors.values()} == {"destroyed"}


def test_batched_products_name_the_batch_that_algorithms_are_ranked_for(blas: FakeBlas) -> None:
    problem = bmm_problem(3, 5, 24, 40, "bfloat16")
    first = legal_candidates(BACKEND, problem)[0]
    assert first.id == "cublaslt/ranked[batch=3,m=5,rank=0]"
    other = problem.with_size("batch", 8)
    assert BACKEND.why_illegal(other, first, H200)
    kernel = BACKEND.load(Artifact(first, ""), other)  # a plan over the batch
    check(other, kernel)


def test_kernel_serves_other_batches(blas: FakeBlas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(any_batch, "_MAX_BATCHES", 2)
    kernel = load(bmm_problem(3, 5, 24, 40, "bfloat16"))
    for batch in (3, 1, 6, 4, 6):
        a, b = torch.randn(batch, 5, 40).bfloat16(), torch.randn(batch, 40, 24).bfloat16()
        out = torch.full((batch, 5, 24), float("nan"), dtype=torch.bfloat16)
        kernel.run(a, b, (), out)
        assert torch.equal(out, torch.bmm(a.double(), b.double()).bfloat16())
    assert kernel.problem.batch == 3
    assert set(kernel._of_batches) == {4, 6}


@pytest.mark.parametrize("inner", [64, 20, 33])  # rows of multiples of 16 bytes, of 8, and odd ones
def test_batch_layouts_of_torch_bmm_match_torch(blas: FakeBlas, inner: int) -> None:
    problem = replace(bmm_problem(3, 5, 24, inner, "bfloat16"), b=Operand("bfloat16", Layout("col")))
    kernel = load(problem)
    a, b = torch.randn(3, 5, inner).bfloat16(), torch.randn(3, 24, inner).bfloat16()
    for a_name, make_a_view in LAYOUTS.items():
        for b_name, make_b_view in LAYOUTS.items():
            a_view, b_view = make_a_view(a), make_b_view(b).mT
            out = torch.full((3, 5, 24), float("nan"), dtype=torch.bfloat16)
            kernel.run(a_view, b_view, (), out)
            expected = torch.bmm(a_view.double(), b_view.double()).bfloat16()
            assert torch.equal(out, expected), (a_name, b_name)
