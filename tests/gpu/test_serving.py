"""On the card: every op against float64, untuned and tuned, in CUDA graphs, on side streams, from several threads."""

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
def toys() -> None:
    register()
    TOY_RUNS.clear()


def teach(store: MemoryStore, problem: Problem, candidate: Candidate) -> None:
    """Make a candidate the winner on this GPU."""
    target = current_target("cuda")
    decision = decide(problem, evidence(candidate, 1e-4, 0.5), chosen=candidate)
    store.put(target, msgspec.structs.replace(decision, target_key=target.key))
    RUNTIME.refresh(store)


def close(got: Tensor, wanted: Tensor, *, k: int = 512) -> None:
    """Within a few roundings of the output and of sums of k."""
    assert got.device == GPU
    assert got.shape == wanted.shape
    narrow = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}[got.dtype]
    scale = float(wanted.abs().max()) + 1e-6
    assert float((got.double() - wanted.double()).abs().max()) <= narrow * scale * max(1.0, (k / 512) ** 0.5)


def view(rows: int, cols: int, dtype: torch.dtype, form: str) -> Tensor:
    if form == "transposed":
        return torch.randn(cols, rows, device=GPU).to(dtype).t()
    if form == "strided":
        return torch.randn(rows, 2 * cols + 1, device=GPU).to(dtype)[:, 1::2]
    if form == "offset":
        return torch.randn(rows * cols + 3, device=GPU).to(dtype)[3:].view(rows, cols)
    return torch.randn(rows, cols, device=GPU).to(dtype)


FORMS = ("dense", "transposed", "strided", "offset")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_floats(m: int, n: int, k: int, dtype: torch.dtype, form: str) -> None:
    a, b, bias = view(m, k, dtype, form), view(k, n, dtype, form), torch.randn(n, device=GPU).to(dtype)
    addend = torch.randn(m, n, device=GPU).to(dtype)
    product = a.double() @ b.double()
    for _ in range(2):
        close(gemmtune.mm(a, b), product)
        close(gemmtune.linear(a, b.t(), bias), product + bias.double())
        close(gemmtune.linear(a[None], b.t()), product[None])
        close(gemmtune.addmm(addend, a, b, beta=0.5, alpha=2), 0.5 * addend.double() + 2 * product)
        close(gemmtune.bmm(a[None], b[None]), product[None])
    got = gemmtune.mm(a, b, out_dtype=torch.float32, epilogue=[fuse.bias(bias), fuse.relu()])
    close(got, (product + bias.double()).relu())
    out = torch.empty(m, n, dtype=dtype, device=GPU)
    assert gemmtune.mm(a, b, out=out) is out
    close(out, product)


def test_a_call_shows_in_the_profiler_with_the_kernels_it_launches() -> None:
    x, weight = view(4, 512, torch.bfloat16, "dense"), view(256, 512, torch.bfloat16, "dense")
    pairs = torch.randint(0, 256, (256, 256), dtype=torch.uint8, device=GPU)
    packed = gemmtune.pack(pairs, scale=torch.rand(4, 256, device=GPU).bfloat16(), bits=4, group_size=128)
    calls = {
        "linear": lambda: gemmtune.linear(x, weight),
        "mixed_mm": lambda: gemmtune.mixed_mm(x, packed, bits=4, group_size=128),
    }
    for name, call in calls.items():
        for _ in range(2):  # the first call, and one that finds what was prepared
            with torch.profiler.profile(record_shapes=True, acc_events=True) as profiled:
                call()
                torch.cuda.synchronize()
            rows = [row for row in profiled.key_averages() if row.key == f"gemmtune::{name}"]
            assert sum(row.count for row in rows if row.device_type == torch.autograd.DeviceType.CPU) == 1
            assert any(row.device_time_total > 0 for row in rows)


@pytest.mark.parametrize("a_dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize(("m", "n", "k"), [*SHAPES, (16, 8, 8), (18, 20, 36), (0, 4, 8), (3, 4, 0)])
def test_integers_are_exact_in_every_size_and_layout(m: int, n: int, k: int, a_dtype: torch.dtype) -> None:
    info = torch.iinfo(a_dtype)
    wide_a = torch.randint(info.min, info.max + 1, (m, k), dtype=a_dtype, device=GPU)
    wide_b = torch.randint(-128, 128, (k, n), dtype=torch.int8, device=GPU)
    wanted = (wide_a.double() @ wide_b.double()).to(torch.int32)
    for a in (wide_a, wide_a.t().contiguous().t()):
        for b in (wide_b, wide_b.t().contiguous().t()):
            for _ in range(2):
                assert torch.equal(gemmtune.int_mm(a, b), wanted)
    scale = torch.rand(n, device=GPU)
    got = gemmtune.int_mm(wide_a, wide_b, out_dtype=torch.bfloat16, epilogue=[fuse.scale(scale, axis="col")])
    if got.numel():
        close(got, wanted.double() * scale.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 128), (3, 63, 96), (40, 256, 512)])
@pytest.mark.parametrize("group", [None, 32])
def test_weight_only(m: int, n: int, k: int, group: int | None, dtype: torch.dtype) -> None:
    x = torch.randn(m, k, device=GPU).to(dtype)
    q = torch.randint(-128, 128, (n, k), dtype=torch.int8, device=GPU)
    scale = (torch.rand(n, device=GPU) if group is None else torch.rand(k // group, n, device=GPU)).to(dtype)
    bias = torch.randn(n, device=GPU).to(dtype)
    wide = scale.double() if group is None else scale.double().repeat_interleave(group, 0)
    wanted = x.double() @ (q.t().double() * wide) + bias.double()
    for _ in range(2):
        got = gemmtune.mixed_mm(x, q.t(), scale, group_size=group, bias=bias)
        assert float((got.double() - wanted).norm()) <= 1e-2 * float(wanted.norm())


@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 128), (5, 33, 50), (16, 256, 512)])
@pytest.mark.parametrize("rows", [False, True])
def test_fp8_of_all_sizes(m: int, n: int, k: int, rows: bool) -> None:
    a = torch.randn(m, k, device=GPU).to(E4M3)
    b = torch.randn(n, k, device=GPU).to(E4M3).t()
    scale_a = torch.rand(m, 1, device=GPU) + 0.5 if rows else torch.tensor(0.5, device=GPU)
    scale_b = torch.rand(1, n, device=GPU) + 0.5 if rows else torch.tensor(2.0, device=GPU)
    bias = torch.randn(n, device=GPU).bfloat16()
    wanted = (a.double() @ b.double()) * scale_a.double() * scale_b.double()
    for right in (b, b.contiguous()):
        for _ in range(2):
            got = gemmtune.scaled_mm(a, right, scale_a, scale_b, out_dtype=torch.bfloat16)
            close(got, wanted)
            got = gemmtune.scaled_mm(a, right, scale_a, scale_b, bias, out_dtype=torch.bfloat16)
            close(got, wanted + bias.double())
            # Hopper's matrix units keep some 13 bits of a sum of fp8 products.
            close(gemmtune.scaled_mm(a, right, scale_a, scale_b, out_dtype=torch.float32), wanted, k=1 << 22)
    if not (k % 16 or n % 16):
        fast = gemmtune.scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)
        close(fast, wanted)


# --- ATen's candidates ---------------------------------------------------------------------------------------------


def there(value: Any) -> Any:
    """Operands on the card, with their strides."""
    if isinstance(value, QuantWeight):
        zero = None if value.zero_point is None else there(value.zero_point)
        return replace(value, data=there(value.data), scale=there(value.scale), zero_point=zero)
    moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)
    return moved.copy_(value)


def steps(problem: Problem, *more: Step) -> Problem:
    return replace(problem, epilogue=more)


BIAS = Step("bias", "col", "bfloat16")
PROBLEMS = [
    *(linear_problem(m, n, k, "bfloat16") for m, n, k in ((1, 64, 128), (16, 63, 127), (100, 256, 264))),
    steps(linear_problem(5, 64, 128, "bfloat16"), BIAS, Step("relu")),
    steps(linear_problem(5, 64, 128, "bfloat16"), BIAS, Step("silu"), Step("mul", "full", "bfloat16")),
    steps(linear_problem(5, 63, 127, "float16"), Step("gelu")),
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
    steps(fp8_problem(5, 64, 128), Step("scale", "row", "float32"), Step("scale", "tensor", "float32")),
    replace(fp8_problem(5, 64, 128), b=Operand("float8_e4m3fn", Layout("row"))),
]
# What may be refused by verification: bfloat16 weights, or an activation of what was rounded.
MAY_BE_WRONG = ("int4pack_cuda", "addmm_act")


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_atens_candidates_are_right(problem: Problem) -> None:
    inputs = make_inputs(problem, 7)
    oracle = reference.reference(problem, inputs.a, inputs.b, inputs.aux)
    a, b, aux = there(inputs.a), there(inputs.b), tuple(there(tensor) for tensor in inputs.aux)
    found = [one for one in ATEN.candidates(problem, current_target("cuda")) if isinstance(one, Candidate)]
    assert found
    wrong = []
    for candidate in found:
        kernel = ATEN.load(Artifact(candidate, ""), problem)
        weight = kernel.pack(b) if kernel.packing else b
        shape = (problem.batch, problem.m, problem.n) if problem.family == "bmm" else (problem.m, problem.n)
        out = torch.full(shape, 77, device=GPU).to(getattr(torch, problem.out_dtype))
        kernel.run(a, weight, aux, out)
        fresh = kernel.functional(a, weight, aux)  # type: ignore[attr-defined]
        assert fresh.device == GPU
        assert fresh.is_contiguous()
        for got in (out, fresh):
            unit = reference.UNIT.get(problem.out_dtype, 0.0)
            allowed = oracle.unit * oracle.magnitude.double() + 1.01 * unit * oracle.value.double().abs() + 1e-30
            if problem.out_dtype == "int32":
                allowed = torch.zeros_like(allowed)
            if not bool(((got.cpu().double() - oracle.value.double()).abs() <= allowed).all()):
                wrong.append(candidate.id)
        if kernel.packing:
            back = ATEN.unpack(weight)
            held, raw = (back.data, b.data) if isinstance(back, QuantWeight) else (back, b)
            assert torch.equal(held, raw)
    assert [name for name in wrong if not any(part in name for part in MAY_BE_WRONG)] == []


@pytest.mark.parametrize("m", [1, 9, 16, 23, 100])
def test_a_kernel_serves_every_m_and_operands_that_start_anywhere(m: int) -> None:
    for problem in (int_problem(8, 48, 64), int_problem(64, 48, 64), fp8_problem(16, 48, 64)):
        found = [one for one in ATEN.candidates(problem, current_target("cuda")) if isinstance(one, Candidate)]
        inputs = make_inputs(problem.with_m(m), 7)
        oracle = reference.reference(problem.with_m(m), inputs.a, inputs.b, inputs.aux)
        b, aux = there(inputs.b), tuple(there(tensor) for tensor in inputs.aux)
        shifted = torch.zeros(m * 64 + 3, dtype=torch.uint8, device=GPU)[3:].view(inputs.a.dtype).view(m, 64)
        shifted.copy_(inputs.a)
        for candidate in found:
            kernel = ATEN.load(Artifact(candidate, ""), problem)
            weight = kernel.pack(b) if kernel.packing else b
            for a in (there(inputs.a), shifted):
                out = torch.empty(m, 48, dtype=getattr(torch, problem.out_dtype), device=GPU)
                kernel.run(a, weight, aux, out)
                gap = (out.cpu().double() - oracle.value.double()).abs().max()
                assert float(gap) <= (0.0 if out.dtype == torch.int32 else 1e-2 * float(oracle.value.abs().max()))


# --- tuned, streams, graphs, threads --------------------------------------------------------------------------------


def cases() -> list[tuple[str, Callable[[], Tensor], Tensor]]:
    """(name, a call whose problem the toy kernel can be made to serve, its result in float64)."""
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


def right(got: Tensor, wanted: Tensor) -> None:
    assert got.device == GPU
    torch.testing.assert_close(got.double(), wanted, rtol=1e-2, atol=1e-2)


def learn(store: MemoryStore, call: Callable[[], Tensor]) -> None:
    with gemmtune.record() as recorded:
        call()
    assert recorded.devices == (GPU,)
    for problem, _ in recorded.problems:
        teach(store, problem, toy())


@pytest.mark.parametrize("place", range(7))
def test_tuned_ops_are_served_by_their_kernel(place: int, own_store: MemoryStore) -> None:
    name, call, wanted = cases()[place]
    learn(own_store, call)
    for count in (1, 2, 3):
        right(call(), wanted)
        assert len(TOY_RUNS) == count, name
    assert DISPATCH_CACHE
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = call()
    side.synchronize()
    right(got, wanted)


@pytest.mark.parametrize("place", range(7))
@pytest.mark.parametrize("tuned", [False, True])
def test_ops_in_a_cuda_graph(place: int, tuned: bool, own_store: MemoryStore) -> None:
    _, call, wanted = cases()[place]
    if tuned:
        learn(own_store, call)
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
    right(got, wanted)


def test_a_first_sight_within_a_capture_is_plain_and_forgotten(own_store: MemoryStore) -> None:
    x, w = torch.randn(3, 64, device=GPU), torch.randn(64, 48, device=GPU)
    torch.mm(x, w)  # cuBLAS's own workspace
    teach(own_store, linear_like(x, w), toy())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gemmtune.mm(x, w)
    assert TOY_RUNS == []
    assert not DISPATCH_CACHE
    graph.replay()
    right(got, x.double() @ w.double())
    right(gemmtune.mm(x, w), x.double() @ w.double())
    assert len(TOY_RUNS) == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wants two GPUs")
@pytest.mark.usefixtures("own_artifacts")
@pytest.mark.parametrize(
    ("backend", "template"), [("triton", "tiled"), ("triton", "persistent"), ("cuda", "skinny"), ("cuda", "slab")]
)
def test_operands_on_a_gpu_that_is_not_current(backend: str, template: str, own_store: MemoryStore) -> None:
    second, m = torch.device("cuda", 1), 1024 if template == "persistent" else 16
    x, w, bias = (torch.randn(*shape, device=second).bfloat16() for shape in ((m, 512), (1536, 512), (1536,)))
    with gemmtune.record() as recorded:
        gemmtune.linear(x, w, bias)
    ((problem, _),) = recorded.problems
    candidate = first_candidate(problem, template, backend)
    teach(own_store, problem, candidate)
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
@pytest.mark.filterwarnings("ignore")  # what Inductor warns of as it is imported and compiles
@pytest.mark.parametrize(
    ("backend", "template", "config"), [("triton", "tiled", {"split": 4}), ("cublaslt", "ranked", {})]
)
def test_inductors_graphs_own_what_launches_allocate(
    backend: str, template: str, config: dict[str, int], own_store: MemoryStore
) -> None:
    """They refuse what is allocated while they warm up and record, and stays."""
    x, w = torch.randn(16, 4096, device=GPU).bfloat16(), torch.randn(4096, 4096, device=GPU).bfloat16()
    with gemmtune.record() as recorded:
        gemmtune.linear(x, w)
    ((problem, _),) = recorded.problems
    teach(own_store, problem, first_candidate(problem, template, backend, **config))

    @torch.compile(mode="reduce-overhead")
    def twice(x: Tensor) -> Tensor:
        return gemmtune.linear(gemmtune.linear(x, w).relu(), w)

    wanted = F.linear(F.linear(x, w).relu(), w).double()
    with torch.inference_mode():
        for _ in range(4):
            torch.testing.assert_close(twice(x).double(), wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))


def linear_like(x: Tensor, w: Tensor) -> Problem:
    with gemmtune.record() as recorded:
        gemmtune.mm(x, w)
    return recorded.problems[0][0]


def test_two_threads(own_store: MemoryStore) -> None:
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
    crowd = [threading.Thread(target=work, args=(torch.cuda.Stream(),)) for _ in range(2)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    assert failures == []


def test_gradients() -> None:
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


def test_packed_weights_stay_on_their_device(own_store: MemoryStore) -> None:
    w, x = torch.randn(24, 40, device=GPU).bfloat16(), torch.randn(3, 40, device=GPU).bfloat16()
    packed = gemmtune.pack(w, layout="aten:row")
    assert packed.device == GPU
    assert torch.equal(gemmtune.unpack(packed), w)
    close(gemmtune.linear(x, packed), x.double() @ w.t().double())
    with pytest.raises(DtypeError, match=r"same device, but the input is on cpu and the packed weight is on cuda:0"):
        gemmtune.linear(x.cpu(), packed)
    there_packed = gemmtune.pack(w.cpu(), layout="aten:row")
    with pytest.raises(DtypeError, match="the packed weight is on cpu"):
        gemmtune.linear(x, there_packed)
    odd = gemmtune.pack(torch.randn(23, 41, device=GPU).bfloat16(), layout="aten:pad16")
    assert gemmtune.linear(torch.randn(2, 41, device=GPU).bfloat16(), odd).shape == (2, 23)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    fresh = gemmtune.pack(torch.randn(24, 40, device=GPU).bfloat16(), layout="aten:row")
    with torch.cuda.graph(graph):
        got = gemmtune.linear(x[:2], fresh)  # first sight of M = 2
    graph.replay()
    close(got, x[:2].double() @ gemmtune.unpack(fresh).t().double())  # type: ignore[union-attr]


def test_int4_weights_are_packed_and_served_without_having_been_tuned(own_store: MemoryStore) -> None:
    raw = torch.randint(0, 256, (384, 512), dtype=torch.uint8, device=GPU)  # [N, K / 2]
    scale = torch.rand(8, 384, device=GPU).bfloat16()
    packed = gemmtune.pack(raw, scale=scale, bits=4, group_size=128)
    codes = torch.stack((raw & 15, raw >> 4), dim=-1).reshape(384, 1024).double() - 8.0
    weight = codes * scale.double().repeat_interleave(128, dim=0).t()
    for m in (1, 16, 200):
        x = torch.randn(m, 1024, device=GPU).bfloat16()
        close(gemmtune.mixed_mm(x, packed), x.double() @ weight.t())


class Int8Linear(nn.Module):
    weight: Tensor
    scales: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (48, 64), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(48).bfloat16() * 0.01)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype)) * self.scales


def test_optimize_keeps_raw_weights_where_a_kernel_takes_them(own_store: MemoryStore) -> None:
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


def test_optimize_packs_for_the_card(own_store: MemoryStore) -> None:
    model = nn.Sequential(nn.Linear(64, 48)).to(GPU).eval().requires_grad_(False)
    x = torch.randn(3, 64, device=GPU)
    wanted = model(x)
    with gemmtune.record() as recorded:
        model(x)
    teach(own_store, recorded.problems[0][0], toy("plain"))
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
def test_tuning_from_end_to_end(latency: Any, own_store: MemoryStore) -> None:
    problems = [
        linear_problem(16, 256, 512, "bfloat16"), int_problem(1, 256, 512), weight_only_problem(1, 256, 512),
        fp8_problem(16, 256, 512),
    ]  # fmt: skip
    decisions = gemmtune.tune(problems, budget=2.0, store=own_store, device="cuda", latency=latency)
    assert [decision.outcome in ("winner", "tie") for decision in decisions] == [True] * 4
    assert own_store.get(current_target("cuda"), problems[0].key) is not None
    x, w = torch.randn(16, 512, device=GPU).bfloat16(), torch.randn(256, 512, device=GPU).bfloat16()
    for _ in range(2):
        close(gemmtune.linear(x, w), x.double() @ w.t().double())
    q, scale = torch.randint(-128, 128, (256, 512), dtype=torch.int8, device=GPU), torch.rand(256, device=GPU)
    got = gemmtune.mixed_mm(x[:1], q.t(), scale.bfloat16())
    close(got, (x[:1].double() @ q.t().double()) * scale.bfloat16().double())


def test_the_hot_path_allocates_where_the_operands_are() -> None:
    x, w = torch.randn(3, 8, device=GPU), torch.randn(8, 5, device=GPU)
    gemmtune.mm(x, w)
    gemmtune.mm(x.cpu(), w.cpu())
    assert gemmtune.mm(x, w).device == GPU
    assert gemmtune.mm(x.cpu(), w.cpu()).device.type == "cpu"


def test_aten_candidates_sum_in_float32_on_a_gpu() -> None:
    """cuBLAS may add the parts of a split K in bfloat16 when PyTorch lets it (the default): far outside the bound."""
    problem = linear_problem(256, 12288, 4096, "bfloat16")
    kernel = ATEN.load(Artifact(Candidate.make("aten", "mm"), ""), problem)
    draws = make_reference_cases(problem, 0, device=GPU)
    matmul = torch.backends.cuda.matmul
    assert matmul.allow_bf16_reduced_precision_reduction
    assert verify(lambda inputs, out: kernel.run(inputs.a, inputs.b, (), out), problem, draws).ok
    assert matmul.allow_bf16_reduced_precision_reduction
