"""Tests of the CUDA C++ kernels on a GPU: random problems and many configs against the oracle, at every M."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from gemmtune import backends
from gemmtune.backends.cuda import CudaBackend
from gemmtune.backends.gpu import driver
from gemmtune.backends.gpu.kernel import GpuKernel
from gemmtune.core.candidate import Candidate
from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.target import current_cuda
from gemmtune.core.weights import QuantWeight
from gemmtune.core.workloads import bmm_problem, build, fp8_problem, int_problem, weight_only_problem
from gemmtune.verify.inputs import Inputs, make_inputs
from gemmtune.verify.verify import make_reference_cases, verify
from helpers.gpu_kernels import build_all, check_random_problems, check_repeats, first_candidate, load_kernel, run_into

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_artifacts")]

NORM = Step("rms_norm", "inner", "bfloat16", value=1e-5)
LAYER_NORM = (Step("layer_norm", "inner", "bfloat16", value=1e-5), Step("norm_bias", "inner", "bfloat16"))
PROBLEMS = {
    "bf16": build(3, 1100, 2080, "bf16"),
    "fp16": build(16, 200, 1032, "fp16"),
    "epilogue": replace(
        build(9, 1100, 2048, "bf16"),
        epilogue=(Step("bias", "col", "bfloat16"), Step("gelu"), Step("add", "full", "bfloat16", value=0.5)),
    ),
    "bmm": replace(bmm_problem(5, 7, 136, 512, "bfloat16"), b=Operand("bfloat16", Layout("col"))),
    "int8": int_problem(16, 1100, 2064),
    "fp8": fp8_problem(5, 1100, 2048),
    "int8wo": weight_only_problem(1, 1100, 2064),
    "int8wo fp16": weight_only_problem(16, 1100, 2048, dtype="float16"),
    "int8wo groups": weight_only_problem(8, 1100, 2048, group=128, zero_point=True),
    "int4wo": weight_only_problem(16, 1100, 2048, bits=4, group=128),
    "int4wo zero points": weight_only_problem(5, 1100, 2048, bits=4, group=256, zero_point=True),
    "int4wo fp16": weight_only_problem(32, 1100, 2048, bits=4, dtype="float16"),
    "norm": replace(build(1, 1100, 2080, "bf16"), epilogue=(NORM,)),
    "norm, epilogue": replace(
        build(12, 1100, 2048, "bf16"), epilogue=(NORM, Step("silu"), Step("mul", "full", "bfloat16"))
    ),
    "norm int8wo": replace(weight_only_problem(5, 1100, 2064), epilogue=(NORM,)),
    "layer norm": replace(build(1, 1100, 2080, "bf16"), epilogue=LAYER_NORM),
    "layer norm, epilogue": replace(
        build(12, 1100, 2048, "bf16"), epilogue=(*LAYER_NORM, Step("gelu"), Step("mul", "full", "bfloat16"))
    ),
    "layer norm, no bias": replace(build(27, 1100, 2080, "bf16"), epilogue=LAYER_NORM[:1]),
    "layer norm int8wo": replace(weight_only_problem(5, 1100, 2064), epilogue=(*LAYER_NORM, Step("swiglu"))),
    "layer norm int4wo": replace(weight_only_problem(16, 1100, 2048, bits=4, group=128), epilogue=LAYER_NORM),
    "gate": replace(build(3, 1100, 2080, "bf16"), epilogue=(Step("swiglu"),)),
    "norm, gate int8wo": replace(weight_only_problem(9, 1100, 2064), epilogue=(NORM, Step("swiglu"))),
    "gate fp8": replace(fp8_problem(5, 1100, 2048), epilogue=(*fp8_problem(5, 1100, 2048).epilogue, Step("geglu"))),
    "norm int4wo": replace(weight_only_problem(16, 1100, 2048, bits=4, group=128), epilogue=(NORM,)),
    "slab bf16": replace(build(64, 1100, 2080, "bf16"), epilogue=(Step("bias", "col", "bfloat16"), Step("silu"))),
    "slab fp16": replace(build(100, 1100, 1032, "fp16"), epilogue=(Step("add", "full", "float16"),)),
    "slab int8": int_problem(60, 2200, 2064),
    "slab int8 requantised": replace(
        int_problem(130, 1100, 2064),
        epilogue=(Step("scale", "row", "float32"), Step("scale", "col", "float32")),
        out_dtype="bfloat16",
    ),
    "slab fp8": fp8_problem(33, 2200, 2064),
    "slab bf16, few rows": replace(build(5, 1101, 2080, "bf16"), epilogue=(Step("bias", "col", "bfloat16"),)),
    "slab fp8, few rows": fp8_problem(9, 2200, 2064),
    "slab gate": replace(build(64, 1104, 2080, "bf16"), epilogue=(Step("swiglu"),)),
    "slab gate bias": replace(build(70, 2200, 1032, "fp16"), epilogue=(Step("bias", "col", "float16"), Step("geglu"))),
    "slab gate fp8": replace(
        fp8_problem(150, 2200, 2064), epilogue=(*fp8_problem(150, 2200, 2064).epilogue, Step("swiglu"))
    ),
    "slab norm": replace(build(30, 1100, 2080, "bf16"), epilogue=(NORM,)),
    "slab norm, gate": replace(build(16, 2208, 2072, "bf16"), epilogue=(NORM, Step("swiglu"))),
    "mixed int8": replace(
        weight_only_problem(70, 1100, 2064), epilogue=(Step("bias", "col", "bfloat16"), Step("mul", "full", "bfloat16"))
    ),
    "mixed int8 fp16": weight_only_problem(200, 1100, 1040, dtype="float16"),
    "mixed int8 groups": weight_only_problem(100, 1100, 2048, group=256),
    "mixed int4": weight_only_problem(50, 1100, 2048, bits=4, group=128),
    "mixed int4 fp16": weight_only_problem(260, 1100, 1024, bits=4, dtype="float16"),
}


_LAYER_NORMS = ("layer norm", "layer norm, epilogue", "layer norm int8wo", "layer norm int4wo")
_SLABS = ("slab bf16", "slab int8", "slab fp8", "slab bf16, few rows", "slab fp8, few rows")


def every_third_candidate(problem: Problem) -> list[Candidate]:
    """Return every third legal candidate, the first one included."""
    listed = CudaBackend().candidates(problem, current_cuda({}))
    return [item for item in listed if isinstance(item, Candidate)][::3]


@pytest.fixture(scope="module")
def built_candidates(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Build every third candidate of every problem, in parallel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEMMTUNE_STORE", str(tmp_path_factory.getbasetemp() / "store.db"))
        errors = build_all(
            [(problem, candidate) for problem in PROBLEMS.values() for candidate in every_third_candidate(problem)]
        )
    assert not [error for error in errors if error and "spill" not in error]


def test_random_problems_are_correct() -> None:
    check_random_problems(CudaBackend())


@pytest.mark.usefixtures("built_candidates")
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_third_candidate_is_correct(name: str) -> None:
    problem = PROBLEMS[name]
    test_cases = make_reference_cases(problem, 0, device=torch.device("cuda"))
    checked = 0
    for candidate in every_third_candidate(problem):
        if CudaBackend().artifact(problem, candidate, current_cuda({})) is None:
            continue
        kernel = load_kernel(problem, candidate)
        checked += 1

        def run_candidate(inputs: Inputs, out: torch.Tensor, kernel=kernel) -> None:  # type: ignore[no-untyped-def]
            run_into(kernel, inputs, out)

        verdict = verify(run_candidate, problem, test_cases, time_limit_s=0.0)
        assert verdict.ok, f"{candidate.id}: {verdict.kind}: {verdict.detail}"
    assert checked > len(every_third_candidate(problem)) / 2


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("name", ["slab gate", "slab gate bias", "slab gate fp8", "slab norm", "slab norm, gate"])
def test_slabs_with_norms_and_gates_are_correct_and_repeatable_at_every_m(name: str, cluster: int) -> None:
    problem = PROBLEMS[name]
    check_any_m(problem, load_kernel(problem, first_candidate(problem, "slab", "cuda", cluster=cluster)))


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize(
    "name", ["bf16", "int8", "fp8", "int8wo", "int4wo", "norm", "norm, gate int8wo", *_LAYER_NORMS]
)
def test_skinny_kernels_are_correct_and_repeatable_at_every_m(name: str, split: int) -> None:
    """More rows than the tuned M take more tiles."""
    problem = PROBLEMS[name]
    kernel = load_kernel(problem, first_candidate(problem, "skinny", "cuda", split=split))
    check_any_m(problem, kernel)


@pytest.mark.parametrize("blocks", [{"cluster": 1, "split": 1}, {"cluster": 2}, {"split": 2}, {"split": 3}])
@pytest.mark.parametrize("name", _SLABS)
def test_slab_kernels_are_correct_and_repeatable_at_every_m(name: str, blocks: dict[str, int]) -> None:
    problem = PROBLEMS[name]
    check_any_m(problem, load_kernel(problem, first_candidate(problem, "slab", "cuda", **blocks)))


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("name", ["mixed int8", "mixed int8 groups", "mixed int4"])
def test_mixed_kernels_are_correct_and_repeatable_at_every_m(name: str, split: int) -> None:
    problem = PROBLEMS[name]
    check_any_m(problem, load_kernel(problem, first_candidate(problem, "mixed", "cuda", split=split)))


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        *((f"mixed {name}", ("bn", "split")) for name in ("int8", "int8 groups", "int4", "int4 fp16")),
        *((f"slab {name}", ("bm", "cluster")) for name in ("bf16", "fp16", "int8", "int8 requantised", "gate")),
        *((f"slab {name}", ("bm", "pieces")) for name in ("fp8", "gate fp8")),
    ],
)
def test_kernels_whose_tiles_are_fitted_are_correct_and_repeatable_at_every_m(name: str, axes: tuple[str, ...]) -> None:
    problem = PROBLEMS[name].with_m(300)
    backend, target = CudaBackend(), current_cuda({})
    candidates = {tuple(c[axis] for axis in axes): c for c in backend.plan_candidates(problem, target)}
    assert len(candidates) >= 4
    for candidate in candidates.values():
        kernel, path = load_kernel(problem, candidate), backend.code_paths(problem, candidate, target)
        assert path is not None
        check_any_m(problem, kernel)
        for m in {path(m): m for m in range(1, 2000)}.values():
            other = problem.with_m(m)
            test_cases = make_reference_cases(other, m, device=torch.device("cuda"))
            verdict = verify(lambda i, out, k=kernel: run_into(k, i, out), other, test_cases[:1], time_limit_s=0.0)
            assert verdict.ok, f"{candidate.id}, {m} rows: {verdict.kind}: {verdict.detail}"


def test_kernels_that_reallocate_registers_among_warps_are_correct() -> None:
    """Their accumulators need more registers than a thread starts with: 256x128, or 128x256 and half as much again."""
    problem = weight_only_problem(250, 1100, 2064)
    check_any_m(problem, load_kernel(problem, first_candidate(problem, "mixed", "cuda", bm=256, bn=128)))
    problem = fp8_problem(250, 4096, 2064)
    check_any_m(problem, load_kernel(problem, first_candidate(problem, "slab", "cuda", bm=128, bn=256, pieces=2)))


def check_any_m(problem: Problem, kernel) -> None:  # type: ignore[no-untyped-def]
    """Assert that the kernel is correct and repeatable at M from 1 to 300."""
    for m in (1, 2, 7, 16, 17, 64, 100, 300):
        other = problem.with_m(m)
        test_cases = make_reference_cases(other, m, device=torch.device("cuda"))
        verdict = verify(lambda inputs, out: run_into(kernel, inputs, out), other, test_cases[:2], time_limit_s=0.0)
        assert verdict.ok, f"{m} rows: {verdict.kind}: {verdict.detail}"
        check_repeats(kernel, other, m)


def test_cuda_and_triton_kernels_share_the_layout_of_int4_weights() -> None:
    """All kernels read one packed weight, each in its range of M."""
    problem = PROBLEMS["int4wo"]
    many = problem.with_m(40)
    kernels = (
        load_kernel(problem, first_candidate(problem, "skinny", "cuda")),
        load_kernel(problem, first_candidate(problem, bk=128)),
        load_kernel(many, first_candidate(many, "mixed", "cuda")),
    )
    inputs = make_inputs(problem, 0, device=torch.device("cuda"))
    packed = kernels[0].pack(inputs.b)
    outs = []
    for kernel in kernels:
        assert kernel.packing == packed.layout
        outs.append(torch.empty(problem.m, problem.n, dtype=torch.bfloat16, device="cuda"))
        kernel.run(inputs.a, packed, inputs.aux, outs[-1])
        torch.testing.assert_close(outs[-1], outs[0])
    assert torch.equal(backends.get("triton").unpack(packed).data, inputs.b.data)


def test_slab_kernels_with_more_tiles_than_clusters_and_with_equal_operands_are_correct() -> None:
    """The product of a matrix with itself has two tensor maps of one address."""
    problem = build(200, 40000, 512, "bf16")
    kernel = load_kernel(problem, first_candidate(problem, "slab", "cuda", bn=64, cluster=2))
    test_cases = make_reference_cases(problem, 0, device=torch.device("cuda"))
    verdict = verify(lambda inputs, out: run_into(kernel, inputs, out), problem, test_cases[:2], time_limit_s=0.0)
    assert verdict.ok, f"{verdict.kind}: {verdict.detail}"
    square = build(200, 200, 512, "bf16")
    kernel = load_kernel(square, first_candidate(square, "slab", "cuda", bn=64))
    x = torch.randn(200, 512, device="cuda").bfloat16()
    out = torch.empty(200, 200, dtype=torch.bfloat16, device="cuda")
    kernel.run(x, x.t(), (), out)
    torch.testing.assert_close(out, x @ x.t(), rtol=2e-2, atol=0.2)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("m", [1025, 2500, 4100])
@pytest.mark.parametrize("name", ["bf16", "int8", "fp8", "int8wo", "int4wo"])
def test_kernels_whose_tiles_are_in_bands_of_rows_are_correct(name: str, m: int, cluster: int) -> None:
    """With this K a band has 1024 rows, or 2048, and the last one of these M has fewer."""
    k = 16384 if name in ("int8", "fp8") else 8192
    problem = {
        "bf16": build(m, 520, k, "bf16"), "int8": int_problem(m, 520, k), "fp8": fp8_problem(m, 520, k),
        "int8wo": weight_only_problem(m, 520, k), "int4wo": weight_only_problem(m, 520, k, bits=4, group=128),
    }[name]  # fmt: skip
    if problem.family == "mixed_mm":
        few = problem.with_m(min(m, 4096))
        kernel = load_kernel(few, first_candidate(few, "mixed", "cuda", bn=128, split=cluster))
    else:
        kernel = load_kernel(problem, first_candidate(problem, "slab", "cuda", bm=128, bn=128, cluster=cluster))
    test_cases = make_reference_cases(problem, m, device=torch.device("cuda"))
    verdict = verify(lambda inputs, out: run_into(kernel, inputs, out), problem, test_cases[:1], time_limit_s=0.0)
    assert verdict.ok, f"{verdict.kind}: {verdict.detail}"


@pytest.mark.parametrize("template", ["skinny", "slab"])
def test_misaligned_operands_and_outputs_are_correct(template: str) -> None:
    problem = build({"skinny": 4, "slab": 40}[template], 1100, 512, "bf16")
    kernel = load_kernel(problem, first_candidate(problem, template, "cuda"))
    inputs = make_inputs(problem, 0, device=torch.device("cuda"))
    m = problem.m
    expected = torch.empty(m, 1100, dtype=torch.bfloat16, device="cuda")
    run_into(kernel, inputs, expected)
    misaligned = torch.empty(m * 512 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(m, 512).copy_(inputs.a)
    out = torch.empty(m * 1100 + 3, dtype=torch.bfloat16, device="cuda")[3:].view(m, 1100)
    kernel.run(misaligned, inputs.b, (), out)
    assert torch.equal(out, expected)


class KernelChain:
    """Chain of 40 square products, each of the output of the one before, by kernels of all templates.

    ``outs`` has the outputs. Each kernel has a weight of its own in ``weights``. Where ``overwritten`` is true, another
    kernel copies the next weight from ``sources`` within the graph.
    """

    M, N = 48, 2048

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        m48, m16, m8 = (build(m, self.N, self.N, "bf16") for m in (self.M, 16, 8))
        weight_only = weight_only_problem(self.M, self.N, self.N)
        jobs = [
            *((m16, first_candidate(m16, "skinny", "cuda", split=split)) for split in (1, 2)),
            # 768 thread blocks: the next kernel begins late.
            (
                m8,
                first_candidate(m8, "skinny", "cuda", bn=16, warps=4, split=1),
            ),
            # Three tiles of rows, whose thread blocks begin together.
            (m16, first_candidate(m16, "slab", "cuda", split=1)),
            *(
                (m48, first_candidate(m48, "slab", "cuda", **blocks))
                for blocks in ({"split": 1}, {"cluster": 2}, {"split": 2})
            ),
            *((weight_only, first_candidate(weight_only, "mixed", "cuda", split=split)) for split in (1, 2)),
        ]
        assert not [error for error in build_all(jobs) if error]
        self.kernels = [load_kernel(*rng.choice(jobs)) for _ in range(40)]
        self.overwritten = [rng.random() < 0.2 for _ in self.kernels]
        self.x = torch.empty(self.M, self.N, dtype=torch.bfloat16, device="cuda")
        self.outs = [torch.empty_like(self.x) for _ in self.kernels]
        self.sources = [self.random_weight(kernel) for kernel in self.kernels]
        self.weights = [self.random_weight(kernel) for kernel in self.kernels]

    def random_weight(self, kernel: GpuKernel) -> Any:
        """Return a random weight for a kernel, of a scale that keeps the chain's values in range."""
        b = make_inputs(kernel.problem, 0, device=torch.device("cuda")).b
        if isinstance(b, QuantWeight):
            return replace(b, scale=torch.full_like(b.scale, 1 / 128 / self.N**0.5))
        return b

    def randomize(self, seed: int) -> None:
        """Fill the first input, the weights and their sources with random values."""
        generator = torch.Generator("cuda").manual_seed(seed)
        self.x.normal_(generator=generator)
        for weight, source in zip(self.weights, self.sources, strict=True):
            for b in (weight, source):
                if isinstance(b, QuantWeight):
                    b.data.random_(-127, 128, generator=generator)
                else:
                    b.normal_(0, self.N**-0.5, generator=generator)

    def run(self, alone: bool = False) -> None:
        """Run the chain. ``alone``: each kernel starts when the one before it has ended."""
        a = self.x
        for i, (kernel, out) in enumerate(zip(self.kernels, self.outs, strict=True)):
            if self.overwritten[i] and i + 1 < len(self.weights):  # the next kernel may read its weight early
                target, source = (getattr(b[i + 1], "data", b[i + 1]) for b in (self.weights, self.sources))
                target.sum()  # puts the former values into the L1 caches
                torch.add(source, 0, out=target)
            if alone:
                torch.cuda.synchronize()
            kernel.run(a, self.weights[i], (), out)
            a = out


def test_kernels_launched_with_pdl_in_a_graph_compute_as_if_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph a kernel begins before the kernel whose output it reads has ended, and reads its weight at once, which
    an earlier kernel may have written. Results must equal those of separate launches bit for bit, on new operands."""
    chain = KernelChain(0)
    chain.randomize(0)
    chain.run()
    overlapped: list[bool] = []
    overlaps = driver.MemoryRange.overlaps
    monkeypatch.setattr(
        driver.MemoryRange,
        "overlaps",
        lambda first_range, other: overlapped.append(overlaps(first_range, other)) or overlapped[-1],
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run()
    # All kernels but those behind a kernel that overwrites a weight.
    assert overlapped == [False] * (len(chain.kernels) - 1 - sum(chain.overwritten[1:-1]))
    for seed in range(60):
        chain.randomize(seed)
        for out in chain.outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        graph_outs = [out.clone() for out in chain.outs]
        chain.randomize(seed)
        chain.run(alone=True)
        for i, (one, other) in enumerate(zip(graph_outs, chain.outs, strict=True)):
            assert torch.equal(one, other), f"{i}: {chain.kernels[i].candidate.id}"
    assert graph_outs[-1].isfinite().all()


@pytest.mark.parametrize("template", ["skinny", "slab"])
def test_a_kernel_does_not_read_early_a_weight_that_the_previous_kernel_writes(template: str) -> None:
    """Its result in a graph must equal that of a separate launch."""
    problem = build({"skinny": 16, "slab": 48}[template], 512, 2048, "bf16")
    kernel = load_kernel(problem, first_candidate(problem, template, "cuda"))
    producer_problem = build(512, 2048, 2048, "bf16")
    producer = load_kernel(producer_problem, first_candidate(producer_problem, "slab", "cuda", cluster=1, split=1))
    x, w = (
        make_inputs(producer_problem, 0, device=torch.device("cuda")).a,
        make_inputs(producer_problem, 0, device=torch.device("cuda")).b,
    )
    weight = torch.empty(512, 2048, dtype=torch.bfloat16, device="cuda")
    a = make_inputs(problem, 0, device=torch.device("cuda")).a
    out, alone = (torch.empty(problem.m, 512, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        producer.run(x, w, (), weight)
        kernel.run(a, weight.t(), (), out)
    for seed in range(100):
        x.normal_(0, 0.1, generator=torch.Generator("cuda").manual_seed(seed))
        weight.fill_(float("nan"))
        graph.replay()
        kernel.run(a, weight.t(), (), alone)
        assert torch.equal(out, alone)
