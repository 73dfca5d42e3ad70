"""Tests of every op on a GPU against float64: untuned and tuned, in CUDA graphs, on side streams, in threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gemmtune
from gemmtune import fuse
from gemmtune.backends.aten import AtenBackend
from gemmtune.backends.base import Artifact
from gemmtune.core.candidate import Candidate
from gemmtune.core.checks import DtypeError
from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.weights import QuantWeight
from gemmtune.core.workloads import bmm_problem, fp8_problem, int_problem, linear_problem, weight_only_problem
from gemmtune.dispatch import RUNTIME, current_target
from gemmtune.dispatch.cache import DISPATCH_CACHE
from gemmtune.store import MemoryStore
from gemmtune.verify import oracle as reference
from gemmtune.verify.inputs import make_inputs
from gemmtune.verify.reference_cases import with_cast
from gemmtune.verify.verify import make_reference_cases, verify
from helpers.gpu_kernels import first_candidate
from helpers.serving import TOY_RUNS, decide, evidence, register, toy

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
ATEN = AtenBackend()
E4M3 = torch.float8_e4m3fn
SHAPES = [(1, 64, 128), (3, 65, 127), (16, 256, 512), (17, 24, 40), (33, 1, 7), (1, 1, 1), (128, 384, 264)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(autouse=True)
def toy_backend() -> None:
    register()
    TOY_RUNS.clear()


def store_winner(store: MemoryStore, problem: Problem, candidate: Candidate) -> None:
    """Store a decision that makes a candidate serve a Problem on this GPU."""
    target = current_target("cuda")
    decision = decide(problem, evidence(candidate, 1e-4, 0.5), chosen=candidate)
    store.put(target, msgspec.structs.replace(decision, target_key=target.key))
    RUNTIME.refresh(store)


def assert_close(got: Tensor, wanted: Tensor, *, k: int = 512) -> None:
    """Assert that a result on the GPU is within a few roundings of the output and of sums of k products."""
    assert got.device == GPU
    assert got.shape == wanted.shape
    narrow = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}[got.dtype]
    scale = float(wanted.abs().max()) + 1e-6
    assert float((got.double() - wanted.double()).abs().max()) <= narrow * scale * max(1.0, (k / 512) ** 0.5)


def random_matrix(rows: int, cols: int, dtype: torch.dtype, layout: str) -> Tensor:
    """Return a random matrix on the GPU in a layout of ``LAYOUTS``."""
    if layout == "transposed":
        return torch.randn(cols, rows, device=GPU).to(dtype).t()
    if layout == "strided":
        return torch.randn(rows, 2 * cols + 1, device=GPU).to(dtype)[:, 1::2]
    if layout == "offset":
        return torch.randn(rows * cols + 3, device=GPU).to(dtype)[3:].view(rows, cols)
    return torch.randn(rows, cols, device=GPU).to(dtype)


LAYOUTS = ("dense", "transposed", "strided", "offset")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float_ops_agree_with_float64(m: int, n: int, k: int, dtype: torch.dtype, layout: str) -> None:
    a, b, bias = (
        random_matrix(m, k, dtype, layout),
        random_matrix(k, n, dtype, layout),
        torch.randn(n, device=GPU).to(dtype),
    )
    addend = torch.randn(m, n, device=GPU).to(dtype)
    product = a.double() @ b.double()
    for _ in range(2):
        assert_close(gemmtune.mm(a, b), product)
        assert_close(gemmtune.linear(a, b.t(), bias), product + bias.double())
        assert_close(gemmtune.linear(a[None], b.t()), product[None])
        assert_close(gemmtune.addmm(addend, a, b, beta=0.5, alpha=2), 0.5 * addend.double() + 2 * product)
        assert_close(gemmtune.bmm(a[None], b[None]), product[None])
    got = gemmtune.mm(a, b, out_dtype=torch.float32, epilogue=[fuse.bias(bias), fuse.relu()])
    assert_close(got, (product + bias.double()).relu())
    out = torch.empty(m, n, dtype=dtype, device=GPU)
    assert gemmtune.mm(a, b, out=out) is out
    assert_close(out, product)


def test_a_profiled_call_is_one_event_with_device_time() -> None:
    x, weight = random_matrix(4, 512, torch.bfloat16, "dense"), random_matrix(256, 512, torch.bfloat16, "dense")
    pairs = torch.randint(0, 256, (256, 256), dtype=torch.uint8, device=GPU)
    packed = gemmtune.pack(pairs, scale=torch.rand(4, 256, device=GPU).bfloat16(), bits=4, group_size=128)
    calls = {
        "linear": lambda: gemmtune.linear(x, weight),
        "mixed_mm": lambda: gemmtune.mixed_mm(x, packed, bits=4, group_size=128),
    }
    for name, call in calls.items():
        for _ in range(2):  # a miss and a hit of the dispatch cache
            with torch.profiler.profile(record_shapes=True, acc_events=True) as profiled:
                call()
                torch.cuda.synchronize()
            rows = [row for row in profiled.key_averages() if row.key == f"gemmtune::{name}"]
            assert sum(row.count for row in rows if row.device_type == torch.autograd.DeviceType.CPU) == 1
            assert any(row.device_time_total > 0 for row in rows)


@pytest.mark.parametrize("a_dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize(("m", "n", "k"), [*SHAPES, (16, 8, 8), (18, 20, 36), (0, 4, 8), (3, 4, 0)])
def test_int_mm_is_exact_in_every_size_and_layout(m: int, n: int, k: int, a_dtype: torch.dtype) -> None:
    info = torch.iinfo(a_dtype)
    row_major_a = torch.randint(info.min, info.max + 1, (m, k), dtype=a_dtype, device=GPU)
    row_major_b = torch.randint(-128, 128, (k, n), dtype=torch.int8, device=GPU)
    wanted = (row_major_a.double() @ row_major_b.double()).to(torch.int32)
    for a in (row_major_a, row_major_a.t().contiguous().t()):
        for b in (row_major_b, row_major_b.t().contiguous().t()):
            for _ in range(2):
                assert torch.equal(gemmtune.int_mm(a, b), wanted)
    scale = torch.rand(n, device=GPU)
    got = gemmtune.int_mm(row_major_a, row_major_b, out_dtype=torch.bfloat16, epilogue=[fuse.scale(scale, axis="col")])
    if got.numel():
        assert_close(got, wanted.double() * scale.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 128), (3, 63, 96), (40, 256, 512)])
@pytest.mark.parametrize("group", [None, 32])
def test_mixed_mm_agrees_with_float64(m: int, n: int, k: int, group: int | None, dtype: torch.dtype) -> None:
    x = torch.randn(m, k, device=GPU).to(dtype)
    q = torch.randint(-128, 128, (n, k), dtype=torch.int8, device=GPU)
    scale = (torch.rand(n, device=GPU) if group is None else torch.rand(k // group, n, device=GPU)).to(dtype)
    bias = torch.randn(n, device=GPU).to(dtype)
    scale_of_k = scale.double() if group is None else scale.double().repeat_interleave(group, 0)
    wanted = x.double() @ (q.t().double() * scale_of_k) + bias.double()
    for _ in range(2):
        got = gemmtune.mixed_mm(x, q.t(), scale, group_size=group, bias=bias)
        assert float((got.double() - wanted).norm()) <= 1e-2 * float(wanted.norm())


@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 128), (5, 33, 50), (16, 256, 512)])
@pytest.mark.parametrize("rows", [False, True])
def test_scaled_mm_agrees_with_float64(m: int, n: int, k: int, rows: bool) -> None:
    a = torch.randn(m, k, device=GPU).to(E4M3)
    b = torch.randn(n, k, device=GPU).to(E4M3).t()
    scale_a = torch.rand(m, 1, device=GPU) + 0.5 if rows else torch.tensor(0.5, device=GPU)
    scale_b = torch.rand(1, n, device=GPU) + 0.5 if rows else torch.tensor(2.0, device=GPU)
    bias = torch.randn(n, device=GPU).bfloat16()
    wanted = (a.double() @ b.double()) * scale_a.double() * scale_b.double()
    for second in (b, b.contiguous()):
        for _ in range(2):
            got = gemmtune.scaled_mm(a, second, scale_a, scale_b, out_dtype=torch.bfloat16)
            assert_close(got, wanted)
            got = gemmtune.scaled_mm(a, second, scale_a, scale_b, bias, out_dtype=torch.bfloat16)
            assert_close(got, wanted + bias.double())
            # Hopper's matrix units keep some 13 bits of a sum of fp8 products.
            assert_close(gemmtune.scaled_mm(a, second, scale_a, scale_b, out_dtype=torch.float32), wanted, k=1 << 22)
    if not (k % 16 or n % 16):
        fast = gemmtune.scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)
        assert_close(fast, wanted)


# --- ATen's candidates ---------------------------------------------------------------------------------------------


def to_gpu(value: Any) -> Any:
    """Return an operand on the GPU, with its strides."""
    if isinstance(value, QuantWeight):
        zero = None if value.zero_point is None else to_gpu(value.zero_point)
        return replace(value, data=to_gpu(value.data), scale=to_gpu(value.scale), zero_point=zero)
    copy_on_gpu = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)
    return copy_on_gpu.copy_(value)


def with_epilogue(problem: Problem, *steps: Step) -> Problem:
    return replace(problem, epilogue=steps)


BIAS = Step("bias", "col", "bfloat16")


def with_steps_behind(problem: Problem, *steps: Step) -> Problem:
    return replace(problem, epilogue=(*problem.epilogue, *steps))


PROBLEMS = [
    *(linear_problem(m, n, k, "bfloat16") for m, n, k in ((1, 64, 128), (16, 63, 127), (100, 256, 264))),
    with_epilogue(linear_problem(5, 64, 128, "bfloat16"), BIAS, Step("relu")),
    with_epilogue(linear_problem(5, 64, 128, "bfloat16"), BIAS, Step("silu"), Step("mul", "full", "bfloat16")),
    with_epilogue(linear_problem(5, 63, 127, "float16"), Step("gelu")),
    replace(linear_problem(5, 64, 128, "bfloat16"), out_dtype="float32"),
    linear_problem(7, 65, 33, "float32", bias=True),
    linear_problem(7, 64, 64, "float64"),
    bmm_problem(3, 4, 40, 64, "bfloat16"),
    *(int_problem(m, n, k) for m, n, k in ((1, 64, 128), (8, 64, 128), (17, 63, 65), (64, 256, 512))),
    int_problem(5, 64, 128, a_dtype="uint8"),
    *(weight_only_problem(m, 64, 256) for m in (1, 16, 40)),
    weight_only_problem(3, 64, 256, bits=4),
    weight_only_problem(3, 64, 256, bits=4, group=128, zero_point=True),
    weight_only_problem(3, 64, 256, group=32, dtype="float16"),
    *(fp8_problem(m, n, k, rowwise=rows) for m, n, k in ((1, 64, 128), (5, 63, 50)) for rows in (False, True)),
    with_epilogue(fp8_problem(5, 64, 128), Step("scale", "row", "float32"), Step("scale", "tensor", "float32")),
    with_epilogue(linear_problem(5, 64, 128, "bfloat16"), Step("swiglu")),
    with_epilogue(linear_problem(300, 4096, 128, "bfloat16"), BIAS, Step("geglu_tanh")),
    with_epilogue(weight_only_problem(40, 64, 256), Step("silu"), Step("add", "full", "bfloat16")),
    with_epilogue(weight_only_problem(5, 64, 256), Step("swiglu")),
    with_steps_behind(fp8_problem(5, 64, 128), Step("swiglu")),
    with_steps_behind(fp8_problem(40, 64, 128), Step("add", "full", "bfloat16")),
    replace(fp8_problem(5, 64, 128), b=Operand("float8_e4m3fn", Layout("row"))),
]
# Verification may reject these: they round the weight to bfloat16, or the sum before an activation.
MAY_BE_WRONG = ("int4pack_cuda", "addmm_act")


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_aten_candidates_are_correct(problem: Problem) -> None:
    inputs = make_inputs(problem, 7)
    oracle = reference.reference(problem, inputs.a, inputs.b, inputs.aux)
    a, b, aux = to_gpu(inputs.a), to_gpu(inputs.b), tuple(to_gpu(tensor) for tensor in inputs.aux)
    candidates = [one for one in ATEN.candidates(problem, current_target("cuda")) if isinstance(one, Candidate)]
    assert candidates
    wrong = []
    for candidate in candidates:
        kernel = ATEN.load(Artifact(candidate, ""), problem)
        weight = kernel.pack(b) if kernel.packing else b
        bound = oracle
        if kernel.rounding is not None:
            bound = reference.reference(with_cast(problem, kernel.rounding), inputs.a, inputs.b, inputs.aux)
        shape = (problem.batch, problem.m, problem.n) if problem.family == "bmm" else (problem.m, problem.columns)
        out = torch.full(shape, 77, device=GPU).to(getattr(torch, problem.out_dtype))
        kernel.run(a, weight, aux, out)
        result = kernel.functional(a, weight, aux)  # type: ignore[attr-defined]
        assert result.device == GPU
        assert result.is_contiguous()
        for got in (out, result):
            unit = reference.UNIT.get(problem.out_dtype, 0.0)
            allowed = bound.unit * bound.magnitude.double() + 1.01 * unit * oracle.value.double().abs() + 1e-30
            if problem.out_dtype == "int32":
                allowed = torch.zeros_like(allowed)
            if not bool(((got.cpu().double() - oracle.value.double()).abs() <= allowed).all()):
                wrong.append(candidate.id)
        if kernel.packing:
            unpacked = ATEN.unpack(weight)
            unpacked_data, raw_data = (unpacked.data, b.data) if isinstance(unpacked, QuantWeight) else (unpacked, b)
            assert torch.equal(unpacked_data, raw_data)
    assert [name for name in wrong if not any(part in name for part in MAY_BE_WRONG)] == []


@pytest.mark.parametrize("m", [1, 9, 16, 23, 100])
def test_aten_candidates_are_correct_at_every_m_and_for_misaligned_operands(m: int) -> None:
    for problem in (int_problem(8, 48, 64), int_problem(64, 48, 64), fp8_problem(16, 48, 64)):
        candidates = [one for one in ATEN.candidates(problem, current_target("cuda")) if isinstance(one, Candidate)]
        inputs = make_inputs(problem.with_m(m), 7)
        oracle = reference.reference(problem.with_m(m), inputs.a, inputs.b, inputs.aux)
        b, aux = to_gpu(inputs.b), tuple(to_gpu(tensor) for tensor in inputs.aux)
        misaligned = torch.zeros(m * 64 + 3, dtype=torch.uint8, device=GPU)[3:].view(inputs.a.dtype).view(m, 64)
        misaligned.copy_(inputs.a)
        for candidate in candidates:
            kernel = ATEN.load(Artifact(candidate, ""), problem)
            weight = kernel.pack(b) if kernel.packing else b
            for a in (to_gpu(inputs.a), misaligned):
                out = torch.empty(m, 48, dtype=getattr(torch, problem.out_dtype), device=GPU)
                kernel.run(a, weight, aux, out)
                error = (out.cpu().double() - oracle.value.double()).abs().max()
                assert float(error) <= (0.0 if out.dtype == torch.int32 else 1e-2 * float(oracle.value.abs().max()))


# --- tuned, streams, graphs, threads --------------------------------------------------------------------------------


def cases() -> list[tuple[str, Callable[[], Tensor], Tensor]]:
    """Return for each op its name, a call that the toy kernel can serve, and the result in float64."""
    x, w = torch.randn(3, 64, device=GPU), torch.randn(48, 64, device=GPU)
    q = torch.randint(-128, 128, (48, 64), dtype=torch.int8, device=GPU)
    i = torch.randint(-128, 128, (3, 64), dtype=torch.int8, device=GPU)
    scale, bias = torch.rand(48, device=GPU), torch.randn(48, device=GPU)
    one = torch.tensor(0.5, device=GPU)
    fx, fw = x.to(E4M3), w.to(E4M3).t()
    product, quant = x.double() @ w.t().double(), (x.double() @ q.t().double()) * scale.double()
    return [
        ("mm", lambda: gemmtune.mm(x, w.t()), product),
        ("linear", lambda: gemmtune.linear(x, w, bias), product + bias.double()),
        ("bmm", lambda: gemmtune.bmm(x[None], w.t()[None]), product[None]),
        ("addmm", lambda: gemmtune.addmm(bias, x, w.t()), product + bias.double()),
        ("int_mm", lambda: gemmtune.int_mm(i, q.t()), i.double() @ q.t().double()),
        ("mixed_mm", lambda: gemmtune.mixed_mm(x, q.t(), scale), quant),
        (
            "scaled_mm",
            lambda: gemmtune.scaled_mm(fx, fw, one, one, out_dtype=torch.bfloat16),
            (fx.double() @ fw.double()) * 0.25,
        ),
    ]


def assert_near(got: Tensor, wanted: Tensor) -> None:
    """Assert that a result on the GPU is within 1% of the reference."""
    assert got.device == GPU
    torch.testing.assert_close(got.double(), wanted, rtol=1e-2, atol=1e-2)


def serve_with_toy_kernel(store: MemoryStore, call: Callable[[], Tensor]) -> None:
    """Store decisions that make the toy kernel serve a call."""
    with gemmtune.record() as recorded:
        call()
    assert recorded.devices == (GPU,)
    for problem, _ in recorded.problems:
        store_winner(store, problem, toy())


@pytest.mark.parametrize("index", range(7))
def test_a_tuned_op_is_served_by_its_kernel_on_every_stream(index: int, own_store: MemoryStore) -> None:
    name, call, wanted = cases()[index]
    serve_with_toy_kernel(own_store, call)
    for count in (1, 2, 3):
        assert_near(call(), wanted)
        assert len(TOY_RUNS) == count, name
    assert DISPATCH_CACHE
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = call()
    side.synchronize()
    assert_near(got, wanted)


@pytest.mark.parametrize("index", range(7))
@pytest.mark.parametrize("tuned", [False, True])
def test_a_captured_op_replays_correctly(index: int, tuned: bool, own_store: MemoryStore) -> None:
    _, call, wanted = cases()[index]
    if tuned:
        serve_with_toy_kernel(own_store, call)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    TOY_RUNS.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    assert len(TOY_RUNS) == tuned
    got.zero_()
    graph.replay()
    assert_near(got, wanted)


def test_a_miss_during_a_capture_is_served_by_torch_and_not_cached(own_store: MemoryStore) -> None:
    x, w = torch.randn(3, 64, device=GPU), torch.randn(64, 48, device=GPU)
    torch.mm(x, w)  # cuBLAS's own workspace
    store_winner(own_store, mm_problem(x, w), toy())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gemmtune.mm(x, w)
    assert TOY_RUNS == []
    assert not DISPATCH_CACHE
    graph.replay()
    assert_near(got, x.double() @ w.double())
    assert_near(gemmtune.mm(x, w), x.double() @ w.double())
    assert len(TOY_RUNS) == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wants two GPUs")
@pytest.mark.usefixtures("own_artifacts")
@pytest.mark.parametrize(
    ("backend", "template"), [("triton", "tiled"), ("triton", "persistent"), ("cuda", "skinny"), ("cuda", "slab")]
)
def test_operands_on_a_gpu_that_is_not_current_are_served(backend: str, template: str, own_store: MemoryStore) -> None:
    second, m = torch.device("cuda", 1), 1024 if template == "persistent" else 16
    x, w, bias = (torch.randn(*shape, device=second).bfloat16() for shape in ((m, 512), (1536, 512), (1536,)))
    with gemmtune.record() as recorded:
        gemmtune.linear(x, w, bias)
    ((problem, _),) = recorded.problems
    candidate = first_candidate(problem, template, backend)
    store_winner(own_store, problem, candidate)
    kernel = RUNTIME.kernel_for(problem, None, second)
    assert kernel is not None
    assert kernel.candidate == candidate
    wanted, out = x.double() @ w.double().t() + bias.double(), torch.empty_like(x @ w.t())
    for current in (0, 1, 0):
        with torch.cuda.device(current):
            for got in (gemmtune.linear(x, w, bias), gemmtune.linear(x, w, bias, out=out)):
                assert got.device == second
                torch.testing.assert_close(got.double(), wanted, rtol=1e-2, atol=0.2)
            assert torch.cuda.current_device() == current
            out.zero_()


@pytest.mark.usefixtures("own_artifacts")
@pytest.mark.filterwarnings("ignore")  # warnings of Inductor while it is imported and compiles
@pytest.mark.parametrize(
    ("backend", "template", "config"), [("triton", "tiled", {"split": 4}), ("cublaslt", "ranked", {})]
)
def test_cuda_graphs_of_inductor_own_the_memory_of_launches(
    backend: str, template: str, config: dict[str, int], own_store: MemoryStore
) -> None:
    """Inductor raises if memory that was allocated during warm-up and capture is still in use afterwards."""
    x, w = torch.randn(16, 4096, device=GPU).bfloat16(), torch.randn(4096, 4096, device=GPU).bfloat16()
    with gemmtune.record() as recorded:
        gemmtune.linear(x, w)
    ((problem, _),) = recorded.problems
    store_winner(own_store, problem, first_candidate(problem, template, backend, **config))

    @torch.compile(mode="reduce-overhead")
    def twice(x: Tensor) -> Tensor:
        return gemmtune.linear(gemmtune.linear(x, w).relu(), w)

    wanted = F.linear(F.linear(x, w).relu(), w).double()
    with torch.inference_mode():
        for _ in range(4):
            torch.testing.assert_close(twice(x).double(), wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))


def mm_problem(x: Tensor, w: Tensor) -> Problem:
    """Return the problem of ``gemmtune.mm(x, w)``."""
    with gemmtune.record() as recorded:
        gemmtune.mm(x, w)
    return recorded.problems[0][0]


def test_tuned_ops_are_correct_in_two_threads(own_store: MemoryStore) -> None:
    calls = cases()
    for _, call, _ in calls:
        with gemmtune.record() as recorded:
            call()
        target = current_target("cuda")
        for problem, _ in recorded.problems:
            decision = decide(problem, evidence(toy(), 1e-4, 0.5), chosen=toy())
            own_store.put(target, msgspec.structs.replace(decision, target_key=target.key))
    RUNTIME.refresh(own_store)
    failures: list[str] = []

    def work(stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            for _ in range(30):
                for name, call, wanted in calls:
                    got = call().double()
                    if not torch.allclose(got, wanted, rtol=1e-2, atol=1e-2):
                        failures.append(name)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(torch.cuda.Stream(),)) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert failures == []


def test_gradients_of_linear_agree_with_torch() -> None:
    x = torch.randn(4, 32, device=GPU, requires_grad=True)
    w = torch.randn(16, 32, device=GPU, requires_grad=True)
    gemmtune.linear(x, w).square().sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    got = x.grad.clone(), w.grad.clone()
    x.grad = w.grad = None
    F.linear(x, w).square().sum().backward()
    torch.testing.assert_close(got[0], x.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[1], w.grad, rtol=1e-4, atol=1e-4)


# --- weights, models, tuning ----------------------------------------------------------------------------------------


def test_a_packed_weight_is_served_on_its_device_only(own_store: MemoryStore) -> None:
    w, x = torch.randn(24, 40, device=GPU).bfloat16(), torch.randn(3, 40, device=GPU).bfloat16()
    packed = gemmtune.pack(w, layout="aten:row")
    assert packed.device == GPU
    assert torch.equal(gemmtune.unpack(packed), w)
    assert_close(gemmtune.linear(x, packed), x.double() @ w.t().double())
    with pytest.raises(DtypeError, match=r"same device, but the input is on cpu and the packed weight is on cuda:0"):
        gemmtune.linear(x.cpu(), packed)
    packed_on_cpu = gemmtune.pack(w.cpu(), layout="aten:row")
    with pytest.raises(DtypeError, match="the packed weight is on cpu"):
        gemmtune.linear(x, packed_on_cpu)
    padded = gemmtune.pack(torch.randn(23, 41, device=GPU).bfloat16(), layout="aten:pad16")
    assert gemmtune.linear(torch.randn(2, 41, device=GPU).bfloat16(), padded).shape == (2, 23)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    other = gemmtune.pack(torch.randn(24, 40, device=GPU).bfloat16(), layout="aten:row")
    with torch.cuda.graph(graph):
        got = gemmtune.linear(x[:2], other)  # the first call with M = 2
    graph.replay()
    assert_close(got, x[:2].double() @ gemmtune.unpack(other).t().double())  # type: ignore[union-attr]


def test_untuned_packed_int4_weights_are_served(own_store: MemoryStore) -> None:
    raw = torch.randint(0, 256, (384, 512), dtype=torch.uint8, device=GPU)  # [N, K / 2]
    scale = torch.rand(8, 384, device=GPU).bfloat16()
    packed = gemmtune.pack(raw, scale=scale, bits=4, group_size=128)
    codes = torch.stack((raw & 15, raw >> 4), dim=-1).reshape(384, 1024).double() - 8.0
    weight = codes * scale.double().repeat_interleave(128, dim=0).t()
    for m in (1, 16, 200):
        x = torch.randn(m, 1024, device=GPU).bfloat16()
        assert_close(gemmtune.mixed_mm(x, packed), x.double() @ weight.t())


class Int8Linear(nn.Module):
    weight: Tensor
    scales: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (48, 64), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(48).bfloat16() * 0.01)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype)) * self.scales


def test_optimize_does_not_pack_weights_that_are_tuned_for_raw_kernels(own_store: MemoryStore) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), Int8Linear()).to(GPU, torch.bfloat16).eval()
    x = torch.randn(3, 64, device=GPU).bfloat16()
    with torch.no_grad():
        wanted = model(x)
        with gemmtune.record() as recorded:
            model(x)
        for problem, _ in recorded.problems:
            target = current_target("cuda")
            decision = decide(problem, evidence(toy(), 1e-4, 0.5), chosen=toy())
            own_store.put(target, msgspec.structs.replace(decision, target_key=target.key))
        RUNTIME.refresh(own_store)
        state = set(model.state_dict())
        handle = gemmtune.optimize(model, x, tune=False)
        assert handle.swapped == {"0": "raw", "2": "raw"}
        assert set(model.state_dict()) == state
        TOY_RUNS.clear()
        torch.testing.assert_close(model(x), wanted, rtol=2e-2, atol=2e-2)
        assert len(TOY_RUNS) == 2
        handle.restore()
        assert torch.equal(model(x), wanted)


def test_optimize_packs_weights_on_the_gpu(own_store: MemoryStore) -> None:
    model = nn.Sequential(nn.Linear(64, 48)).to(GPU).eval().requires_grad_(False)
    x = torch.randn(3, 64, device=GPU)
    wanted = model(x)
    with gemmtune.record() as recorded:
        model(x)
    store_winner(own_store, recorded.problems[0][0], toy("plain"))
    handle = gemmtune.optimize(model, x, tune=False)
    assert handle.swapped == {"0": "toy:plain"}
    torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-4)
    moved = copy.deepcopy(model).cpu()
    assert type(moved[0].weight) is nn.Parameter
    torch.testing.assert_close(moved(x.cpu()).to(GPU), wanted, rtol=1e-4, atol=1e-4)
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-4)
    handle.restore()
    assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("latency", ["graph", "eager"])
def test_tune_decides_and_the_decisions_serve(latency: Any, own_store: MemoryStore) -> None:
    problems = [
        linear_problem(16, 256, 512, "bfloat16"), int_problem(1, 256, 512), weight_only_problem(1, 256, 512),
        fp8_problem(16, 256, 512),
    ]  # fmt: skip
    decisions = gemmtune.tune(problems, budget=2.0, store=own_store, device="cuda", latency=latency)
    # The host's clock times eager calls: on a busy host such a problem may stay undecided, and is not stored then.
    undecided = ("inconclusive",) if latency == "eager" else ()
    assert {decision.outcome for decision in decisions} <= {"winner", "tie", *undecided}
    decided = {problem.key for problem, decision in zip(problems, decisions, strict=True)
               if decision.outcome != "inconclusive"}  # fmt: skip
    assert decided
    assert {decision.problem_key for decision in own_store.decisions(current_target("cuda"))} == decided
    x, w = torch.randn(16, 512, device=GPU).bfloat16(), torch.randn(256, 512, device=GPU).bfloat16()
    for _ in range(2):
        assert_close(gemmtune.linear(x, w), x.double() @ w.t().double())
    q, scale = torch.randint(-128, 128, (256, 512), dtype=torch.int8, device=GPU), torch.rand(256, device=GPU)
    got = gemmtune.mixed_mm(x[:1], q.t(), scale.bfloat16())
    assert_close(got, (x[:1].double() @ q.t().double()) * scale.bfloat16().double())


def test_a_cached_call_allocates_on_the_device_of_its_operands() -> None:
    x, w = torch.randn(3, 8, device=GPU), torch.randn(8, 5, device=GPU)
    gemmtune.mm(x, w)
    gemmtune.mm(x.cpu(), w.cpu())
    assert gemmtune.mm(x, w).device == GPU
    assert gemmtune.mm(x.cpu(), w.cpu()).device.type == "cpu"


def test_aten_candidates_sum_in_float32_on_a_gpu() -> None:
    """By default PyTorch allows cuBLAS to add split-K partial sums in bfloat16, which is far outside the bound."""
    problem = linear_problem(256, 12288, 4096, "bfloat16")
    kernel = ATEN.load(Artifact(Candidate.make("aten", "mm"), ""), problem)
    test_cases = make_reference_cases(problem, 0, device=GPU)
    matmul = torch.backends.cuda.matmul
    assert matmul.allow_bf16_reduced_precision_reduction
    assert verify(lambda inputs, out: kernel.run(inputs.a, inputs.b, (), out), problem, test_cases).ok
    assert matmul.allow_bf16_reduced_precision_reduction
