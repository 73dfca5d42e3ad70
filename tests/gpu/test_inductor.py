"""``torch.compile(model, backend="gemmtune")`` on a GPU: CUDA graphs of products between kernels of Inductor."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gemmtune
from gemmtune.backends.gpu import driver
from gemmtune.inductor import plan_graph
from gemmtune.store import MemoryStore

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_compiler")]

WIDTH, INNER, LAYERS = 1024, 2816, 3
GROUP = 128  # elements of K that share a scale of an int4 weight


class Int8Linear(nn.Module):
    """gpt-fast's weight-only linear."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(1) / 127
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scales", scale.to(linear.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype)) * self.scales


class Int4Linear(nn.Module):
    """gpt-fast's linear of ``_weight_int4pack_mm``. Float32 activations are multiplied by the dequantised weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        groups = linear.weight.detach().float().reshape(linear.out_features, -1, GROUP)
        low, high = groups.amin(2), groups.amax(2)
        scale = (high - low) / 15
        integers = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15).to(torch.uint8)
        self.register_buffer("integers", integers.reshape(linear.weight.shape))
        self.register_buffer("scales_and_zeros", torch.stack((scale, low + 8 * scale), 2).transpose(0, 1).contiguous())
        data = self.integers.cuda()
        self.register_buffer("packed", torch._convert_weight_to_int4pack((data[:, ::2] << 4) | data[:, 1::2], 8))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            scale, zero = (self.scales_and_zeros[..., index].t().repeat_interleave(GROUP, 1) for index in range(2))
            return F.linear(x, (self.integers.float() - 8) * scale + zero)
        return torch.ops.aten._weight_int4pack_mm(x, self.packed, GROUP, self.scales_and_zeros)


class Layer(nn.Module):
    def __init__(self, make: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        shapes = {"gate": (WIDTH, INNER), "up": (WIDTH, INNER), "down": (INNER, WIDTH)}
        for name, (k, n) in shapes.items():
            setattr(self, name, make(nn.Linear(k, n, bias=False)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def make_model(make: Callable[[nn.Linear], nn.Module] = lambda linear: linear) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(make) for _ in range(LAYERS))).bfloat16().cuda().eval().requires_grad_(False)


def capture(model: nn.Module, x: Tensor, budget: float | None = 1.0) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Compile a model, capture one call in a CUDA graph, and return the graph and its result. budget: seconds to tune a
    Problem; None: the default."""
    options = {"budget": budget, "store": MemoryStore()}
    compiled = gemmtune.compile(model, mode="max-autotune-no-cudagraphs", options=options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(2):
            compiled(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = compiled(x)
    return graph, result


def assert_replays_match(graph: torch.cuda.CUDAGraph, x: Tensor, result: Tensor, model: nn.Module) -> None:
    """Replay a graph on new activations, and compare with the model in float32."""
    wide = copy.deepcopy(model).float()
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        with torch.no_grad():
            expected = wide(x.float())
        error = (result.float() - expected).norm() / expected.norm()
        assert error < 2e-2, seed


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(
    "make", [lambda linear: linear, Int8Linear, Int4Linear], ids=["bf16", "int8 weights", "int4 weights"]
)
def test_replays_of_a_captured_graph(make: Callable[[nn.Linear], nn.Module], rows: int) -> None:
    model = make_model(make)
    x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
    graph, result = capture(model, x)
    assert_replays_match(graph, x, result, model)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # by which Inductor makes the graphs' memory
@pytest.mark.parametrize(
    "make", [lambda linear: linear, Int8Linear, Int4Linear], ids=["bf16", "int8 weights", "int4 weights"]
)
def test_cuda_graphs_of_inductor_own_no_weights(
    make: Callable[[nn.Linear], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor raises if memory that was allocated during warm-up, by merging or packing weights, is still in use."""
    monkeypatch.setattr(plan_graph, "assumed_s", lambda problem, device: 1.0)  # so that gate and up are merged
    model = make_model(make)
    wide = copy.deepcopy(model).float()
    compiled = gemmtune.compile(model, mode="reduce-overhead", options={"budget": 1.0, "store": MemoryStore()})
    with torch.no_grad():
        for seed in range(5):
            torch.manual_seed(seed)
            x = torch.randn(48, WIDTH, device="cuda", dtype=torch.bfloat16)
            expected = wide(x.float())
            error = (compiled(x).float() - expected).norm() / expected.norm()
            assert error < 2e-2, seed


@pytest.mark.parametrize("make", [lambda linear: linear, Int8Linear], ids=["bf16", "int8 weights"])
def test_one_graph_serves_all_rows(make: Callable[[nn.Linear], nn.Module]) -> None:
    """With norms and gates inside of products for few rows, and beside them for many."""
    model, graphs = make_model(make), torch._dynamo.utils.counters["stats"]
    wide, before = copy.deepcopy(model).float(), graphs["unique_graphs"]
    options = {"budget": 1.0, "store": MemoryStore()}
    compiled = gemmtune.compile(model, mode="max-autotune-no-cudagraphs", options=options)
    with torch.no_grad():
        for rows in (20, 2, 40, 300):
            x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
            torch._dynamo.mark_dynamic(x, 0)
            expected = wide(x.float())
            for _ in range(2):
                error = (compiled(x).float() - expected).norm() / expected.norm()
                assert error < 2e-2, rows
    assert graphs["unique_graphs"] == before + 1


@pytest.mark.parametrize("make", [lambda linear: linear, Int8Linear], ids=["bf16", "int8 weights"])
def test_products_that_compute_norms_and_gates(
    make: Callable[[nn.Linear], nn.Module], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("norm_s", "pointwise_s", "residual_s"):  # so that this form is chosen
        monkeypatch.setattr(plan_graph, name, lambda problem, device: 1.0)
    model = make_model(make)
    for layer in model:
        torch.nn.init.uniform_(layer.norm.weight, 0.5, 1.5)
    x = torch.randn(1, WIDTH, device="cuda", dtype=torch.bfloat16)
    with caplog.at_level("INFO", "gemmtune"):
        graph, result = capture(model, x, budget=None)
    summaries = [record.message for record in caplog.records if "serves" in record.message]
    assert summaries[-1].endswith(f"{2 * LAYERS} with the norm in front of them, {2 * LAYERS} in gates")
    assert_replays_match(graph, x, result, model)


def test_int4_weights_of_pytorchs_operator_are_served() -> None:
    """On GPUs the operator is far slower than gemmtune's kernels; writes to scales reach a captured graph's weights."""
    model = make_model(Int4Linear)
    x = torch.randn(4, WIDTH, device="cuda", dtype=torch.bfloat16)
    options = {"budget": 1.0, "store": MemoryStore()}
    compiled = gemmtune.compile(model, options=options)
    with torch.no_grad():
        wide = copy.deepcopy(model).float()(x.float())
        assert (compiled(x).float() - wide).norm() < 2e-2 * wide.norm()
        (report,) = gemmtune.inductor.explain(model, x, options=options)
    assert len(report.products) == 3 * LAYERS
    assert all(product.kernel for product in report.products), report.lines()


def test_products_begin_behind_kernels_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the CUDA backend are launched early where a kernel of Inductor's is in front of them."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no programmatic dependent launch")
    monkeypatch.setattr(plan_graph, "wide_forms", lambda *_: [])  # so that norms and gates stay Inductor's
    seen: list[bool] = []
    follows = driver._follows_inductor
    monkeypatch.setattr(driver, "_follows_inductor", lambda position: seen.append(follows(position)) or seen[-1])
    model = make_model(Int8Linear)
    x = torch.randn(1, WIDTH, device="cuda", dtype=torch.bfloat16)
    graph, result = capture(model, x)
    assert any(seen)
    assert_replays_match(graph, x, result, model)


def test_writes_to_merged_weights_reach_a_captured_graph() -> None:
    model = make_model()
    x = torch.randn(1, WIDTH, device="cuda", dtype=torch.bfloat16)
    graph, result = capture(model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    assert_replays_match(graph, x, result, model)
