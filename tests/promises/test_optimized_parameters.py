"""Tests that ``optimize`` packs every weight of a product or names the reason: Conv1D, projections, any Parameter."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import gemmtune
from gemmtune.core.checks import GradError
from gemmtune.core.errors import PackedWeightError
from gemmtune.dispatch import RUNTIME
from gemmtune.nn import PackedTensor
from gemmtune.nn.observe import observe
from gemmtune.nn.sites import find_sites
from gemmtune.store import MemoryStore
from helpers.serving import TOY_RUNS
from helpers.tuned_models import prepare_model, store_toy_decisions

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")

K, N, HEADS = 16, 24, 2


def assert_close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


class Conv1D(nn.Module):
    """Linear module of transformers with a weight [K, N]."""

    def __init__(self, n: int = N, k: int = K) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(k, n)), nn.Parameter(torch.randn(n))

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.shape[:-1], self.bias.shape[0])
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


class ParameterProduct(nn.Module):
    """Module whose forward is ``product(x, weight, bias)``. The weight is [K, N] if ``transposed``, else [N, K]."""

    def __init__(self, product: Callable[[Tensor, Tensor, Tensor], Tensor], transposed: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(K, N) if transposed else torch.randn(N, K))
        self.shift = nn.Parameter(torch.randn(N))
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.table, self.shift)


PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], bool]] = {
    "x @ w": (lambda x, w, b: x @ w, True),
    "matmul": (lambda x, w, b: torch.matmul(x, w), True),
    "x.matmul, not contiguous": (lambda x, w, b: x.transpose(0, 1).matmul(w).transpose(0, 1), True),
    "mm": (lambda x, w, b: torch.mm(x[0], w)[None], True),
    "x.mm": (lambda x, w, b: x[0].mm(w)[None], True),
    "addmm": (lambda x, w, b: torch.addmm(b, x[0], w)[None], True),
    "addmm of a matrix": (lambda x, w, b: torch.addmm(x[0].sum(1, keepdim=True) + b, x[0], w)[None], True),
    "linear of w.t()": (lambda x, w, b: F.linear(x, w.t(), b), True),
    "linear": (lambda x, w, b: F.linear(x, w, b), False),
    "linear of w.to(dtype)": (lambda x, w, b: F.linear(x, w.to(x.dtype), b), False),
    "x @ w.t()": (lambda x, w, b: x @ w.t(), False),
    "x @ w.T": (lambda x, w, b: x @ w.T, False),
    "x @ w.mT": (lambda x, w, b: x @ w.mT, False),
    "addmm of w.transpose": (lambda x, w, b: torch.addmm(b, x[0], w.transpose(-1, -2))[None], False),
    "matmul of w.permute": (lambda x, w, b: torch.matmul(x, w.permute(1, 0)), False),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("memory", [1.25, 4])
def test_a_parameter_of_a_product_is_packed_and_served(product: str, memory: float, own_store: MemoryStore) -> None:
    x = torch.randn(1, 3, K)
    model = prepare_model(nn.Sequential(ParameterProduct(*PRODUCTS[product])), x, own_store)
    wanted, stride = model(x), model[0].table.stride()  # type: ignore[index]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    handle = gemmtune.optimize(model, x, tune=False, memory=memory)
    assert handle.swapped == {"0.table": "toy:plain"}
    weight = model[0].table  # type: ignore[index]
    assert isinstance(weight, PackedTensor)
    assert weight.stride() == stride
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            TOY_RUNS.clear()
            assert_close(model(x), wanted)
            assert len(TOY_RUNS) == 1
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    handle.restore()
    assert torch.equal(weight, values["0.table"])
    assert torch.equal(model(x), wanted)


class Conv1DModel(nn.Module):
    """Model of the two linears of a GPT-2 block."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(N, K), Conv1D(K, N)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


@pytest.fixture
def optimized(own_store: MemoryStore) -> tuple[nn.Module, nn.Module, Any]:
    """Return an optimized model of Conv1Ds, its copy that is not optimized, and the handle."""
    x = torch.randn(2, 3, K)
    model = prepare_model(Conv1DModel(), x, own_store)
    plain = copy.deepcopy(model)
    return model, plain, gemmtune.optimize(model, x, tune=False)


def test_conv1d_is_served_loaded_copied_saved_and_restored(optimized: tuple[nn.Module, nn.Module, Any]) -> None:
    model, plain, handle = optimized
    assert handle.swapped == {"c_fc": "toy:plain", "c_proj": "toy:plain"}
    assert handle.left == {}
    x = torch.randn(2, 3, K)
    TOY_RUNS.clear()
    assert_close(model(x), plain(x))
    assert len(TOY_RUNS) == 2
    other = Conv1DModel().eval().requires_grad_(False)
    model.load_state_dict(other.state_dict())
    assert_close(model(x), other(x))
    assert_close(copy.deepcopy(model)(x), other(x))
    buffer = io.BytesIO()
    torch.save(model.c_fc.weight, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False), other.c_fc.weight)
    handle.restore()
    assert type(model.c_fc.weight) is nn.Parameter
    assert torch.equal(model(x), other(x))


def test_conv1d_computes_the_gradients_of_its_input_and_bias(optimized: tuple[nn.Module, nn.Module, Any]) -> None:
    model, plain, _ = optimized
    gradients = []
    for each in (plain, model):
        each.c_fc.bias.requires_grad_(True)
        leaf = torch.ones(2, 3, K, requires_grad=True)
        each(leaf).square().sum().backward()
        gradients.append((leaf.grad, each.c_fc.bias.grad))
    for wanted, got in zip(*gradients, strict=True):
        assert_close(got / wanted.abs().max(), wanted / wanted.abs().max())
    model.c_fc.weight.requires_grad_(True)
    with pytest.raises(GradError, match=r"no_grad\(\)"):
        model(torch.ones(2, 3, K))


TRACERS: dict[str, Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]]] = {
    "make_fx": lambda m, x: make_fx(lambda t: m(t))(x),
    "jit.trace": lambda m, x: torch.jit.trace(m, x),
    "functionalize": lambda m, _: torch.func.functionalize(m),
    "vmap": lambda m, _: torch.vmap(m),
    "compile": lambda m, _: torch.compile(m, fullgraph=True, backend="aot_eager"),
    "compile dynamic": lambda m, _: torch.compile(m, fullgraph=True, backend="aot_eager", dynamic=True),
    "export": lambda m, x: torch.export.export(m, (x,)).module(),
    "export strict": lambda m, x: torch.export.export(m, (x,), strict=True).module(),
}


def packed_linear_nodes(model: nn.Module, x: Tensor) -> list[str]:
    """Return the targets of the nodes of packed products in the graph that make_fx traces."""
    graph = make_fx(lambda t: model(t), tracing_mode="symbolic", _allow_non_fake_inputs=True)(x).graph
    return [str(node.target) for node in graph.nodes if "packed_linear" in str(node.target)]


@pytest.mark.usefixtures("fresh_compiler")  # Dynamo of torch 2.9 compiles the modules of only eight tests otherwise
@pytest.mark.parametrize("tracer", TRACERS)
def test_conv1d_can_be_traced(tracer: str, optimized: tuple[nn.Module, nn.Module, Any]) -> None:
    model, plain, _ = optimized
    x = torch.randn(2, 3, K)
    with torch.no_grad():
        traced = TRACERS[tracer](model, x)
        assert_close(traced(x), plain(x))
        assert_close(traced(-x), plain(-x))
        assert len(packed_linear_nodes(model, x)) == 2


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("product", ["x @ w", "x.matmul, not contiguous", "linear of w.t()", "x @ w.mT", "x @ w.T"])
@pytest.mark.parametrize("tracer", ["make_fx", "compile", "export", "export strict"])
def test_products_with_transposed_weights_are_served_when_traced(
    product: str, tracer: str, own_store: MemoryStore
) -> None:
    x = torch.randn(1, 3, K)
    model = prepare_model(nn.Sequential(ParameterProduct(*PRODUCTS[product])), x, own_store)
    wanted = model(x)
    assert gemmtune.optimize(model, x, tune=False).swapped
    with torch.no_grad():
        assert_close(TRACERS[tracer](model, x)(x), wanted)
        assert len(packed_linear_nodes(model, x)) == 1


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "t().mul_": lambda w: w.t().mul_(2),
    "T +=": lambda w: exec("t = w.T; t += 1", {"w": w}),
    "transpose().copy_": lambda w: w.transpose(0, 1).copy_(torch.full_like(w.t(), 0.5)),
    "data.t().zero_": lambda w: w.data.t().zero_(),
    "mul_": lambda w: w.mul_(3),
    "out=": lambda w: torch.mul(torch.ones(w.shape), 3, out=w),
    "init": lambda w: nn.init.constant_(w, 0.25),
}


@pytest.mark.parametrize("memory", [1.25, 4])
@pytest.mark.parametrize("make", [lambda: Conv1D(), lambda: nn.Linear(K, N)], ids=["Conv1D", "Linear"])
@pytest.mark.parametrize("write", WRITES)
def test_writes_through_a_transposed_view_change_the_packed_weight(
    write: str, make: Any, memory: float, own_store: MemoryStore
) -> None:
    x = torch.randn(3, K)
    model = prepare_model(nn.Sequential(make()), x, own_store)
    plain = copy.deepcopy(model)
    assert gemmtune.optimize(model, x, tune=False, memory=memory).swapped
    with torch.no_grad():
        for each in (plain, model):
            WRITES[write](each[0].weight)  # type: ignore[index]
        assert torch.equal(model[0].weight, plain[0].weight)  # type: ignore[index]
        assert_close(model(x), plain(x))


def test_a_write_to_a_row_of_a_transposed_view_is_refused(optimized: tuple[nn.Module, nn.Module, Any]) -> None:
    model, plain, _ = optimized
    with torch.no_grad(), pytest.raises(PackedWeightError, match=r"restore\(\)"):
        model.c_fc.weight.t()[0].zero_()
    assert torch.equal(model.c_fc.weight, plain.c_fc.weight)


def test_transposed_views_and_their_copies_have_the_reference_shape_strides_and_values(
    optimized: tuple[nn.Module, nn.Module, Any],
) -> None:
    model, plain, _ = optimized
    got, wanted = model.c_fc.weight, plain.c_fc.weight
    assert isinstance(got, PackedTensor)
    assert isinstance(got.t(), PackedTensor)
    for view in (lambda w: w.t(), lambda w: w.t().t(), lambda w: w.t().contiguous(), lambda w: w.t().clone(),
                   lambda w: w.permute(0, 1), lambda w: w.transpose(0, 0)):  # fmt: skip
        assert view(got).shape == view(wanted).shape
        assert view(got).stride() == view(wanted).stride()
        assert torch.equal(view(got), view(wanted))
    assert torch.equal(got.t().contiguous().view(-1), wanted.t().contiguous().view(-1))


# --- nn.MultiheadAttention -----------------------------------------------------------------------------------------


ATTENTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "batch first": ({"batch_first": True}, {}),
    "batch second": ({}, {}),
    "no bias": ({"bias": False}, {}),
    "no weights": ({"batch_first": True}, {"need_weights": False}),
    "weights of each head": ({}, {"average_attn_weights": False}),
    "causal": ({}, {"attn_mask": torch.ones(4, 4).triu(1).bool(), "is_causal": True, "need_weights": False}),
    "mask": ({}, {"attn_mask": torch.randn(4, 4)}),
    "bias of k and v": ({"add_bias_kv": True, "add_zero_attn": True}, {}),
}


@pytest.mark.parametrize("case", ATTENTIONS)
def test_the_projections_of_attention_are_served(case: str, own_store: MemoryStore) -> None:
    options, call_options = ATTENTIONS[case]
    x = torch.randn(4, 4, K)
    attention = nn.MultiheadAttention(K, HEADS, **options)
    model = _ready_attention(attention, (x, x, x), call_options, own_store)
    wanted = model(x, x, x, **call_options)
    handle = gemmtune.optimize(model, {"query": x, "key": x, "value": x, **call_options}, tune=False)
    assert handle.swapped == {"in_proj_weight": "toy:plain", "out_proj": "toy:plain"}
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            TOY_RUNS.clear()
            got = model(x, x, x, **call_options)
            assert len(TOY_RUNS) == 2
            assert_close(got[0], wanted[0])
            if wanted[1] is None:
                assert got[1] is None
            else:
                assert_close(got[1], wanted[1])
    if "attn_mask" not in call_options:
        padding = torch.tensor([[False, False, False, True]] * 4)
        handle.restore()
        wanted = model(x, x, x, key_padding_mask=padding, **call_options)
        gemmtune.optimize(model, {"query": x, "key": x, "value": x, **call_options}, tune=False)
        assert_close(model(x, x, x, key_padding_mask=padding, **call_options)[0], wanted[0])


def _ready_attention(
    model: nn.Module, inputs: tuple[Tensor, ...], call_options: dict[str, Any], store: MemoryStore
) -> nn.Module:
    """Store a decision for every product of this call, and return the model for inference."""
    prepare_model(nn.Identity(), inputs[0], store)
    model.eval().requires_grad_(False)
    with gemmtune.record() as recorded:
        model(*inputs, **call_options)
    store_toy_decisions(store, recorded.problems)
    return model


def test_attention_with_separate_projection_weights_is_served(own_store: MemoryStore) -> None:
    query, key, value = torch.randn(3, 2, K), torch.randn(5, 2, 8), torch.randn(5, 2, 12)
    attention = nn.MultiheadAttention(K, HEADS, kdim=8, vdim=12)
    model = _ready_attention(attention, (query, key, value), {}, own_store)
    wanted = model(query, key, value)
    handle = gemmtune.optimize(model, (query, key, value), tune=False)
    assert handle.swapped.keys() == {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj"}
    TOY_RUNS.clear()
    for got, want in zip(model(query, key, value), wanted, strict=True):
        assert_close(got, want)
    assert len(TOY_RUNS) == 4


@pytest.mark.parametrize("memory", [1.25, 4])
def test_a_projection_weight_that_is_multiplied_in_parts_is_left_with_the_reason(
    memory: float, own_store: MemoryStore
) -> None:
    query, key = torch.randn(3, 2, K), torch.randn(5, 2, K)
    model = _ready_attention(nn.MultiheadAttention(K, HEADS), (query, key, key), {}, own_store)
    wanted = model(query, key, key)
    handle = gemmtune.optimize(model, (query, key, key), tune=False, memory=memory)
    assert handle.swapped.keys() == {"out_proj"}
    assert "multiplied by linear in a way" in handle.left["in_proj_weight"]
    assert_close(model(query, key, key)[0], wanted[0])


def test_a_packed_projection_computes_cross_attention(own_store: MemoryStore) -> None:
    x, key = torch.randn(3, 2, K), torch.randn(5, 2, K)
    model = _ready_attention(nn.MultiheadAttention(K, HEADS), (x, x, x), {}, own_store)
    wanted = model(x, key, key)
    assert len(gemmtune.optimize(model, (x, x, x), tune=False).swapped) == 2
    with torch.no_grad():
        assert_close(model(x, key, key)[0], wanted[0])
        compiled = torch.compile(lambda *inputs: model(*inputs)[0], fullgraph=True, backend="aot_eager")
        assert_close(compiled(x, key, key), wanted[0])


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("tracer", ["make_fx", "compile", "export", "export strict"])
def test_an_encoder_layer_can_be_traced(tracer: str, own_store: MemoryStore) -> None:
    x = torch.randn(2, 4, K)
    model = prepare_model(nn.TransformerEncoderLayer(K, HEADS, 2 * K, batch_first=True), x, own_store)
    with torch.no_grad():
        wanted = model(x)
        handle = gemmtune.optimize(model, x, tune=False)
        assert handle.swapped.keys() == {"self_attn.in_proj_weight", "self_attn.out_proj", "linear1", "linear2"}
        assert handle.left == {}
        TOY_RUNS.clear()
        assert_close(model(x), wanted)
        assert len(TOY_RUNS) == 4
        traced = TRACERS[tracer](model, x)
        assert_close(traced(x), wanted)


# --- weights that are not packed ----------------------------------------------------------------------------------


class MultipliedByWeightAndTranspose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(K, K))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.code) @ self.code.t()


def test_a_weight_multiplied_with_and_without_transpose_is_packed_only_beside_its_raw_copy(
    own_store: MemoryStore,
) -> None:
    x = torch.randn(3, K)
    model = prepare_model(MultipliedByWeightAndTranspose(), x, own_store)
    wanted = model(x)
    assert "read besides its product, by matmul" in gemmtune.optimize(model, x, tune=False).left["code"]
    assert gemmtune.optimize(model, x, tune=False, memory=4).swapped.keys() == {"code"}
    assert_close(model(x), wanted)


UNSUPPORTED_PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "einsum": lambda x, w, b: torch.einsum("bmk,nk->bmn", x, w),
    "bmm": lambda x, w, b: torch.bmm(x, w.t()[None].expand(1, -1, -1)),
    "addmm": lambda x, w, b: torch.addmm(b, x[0], w.t(), alpha=2)[None],
    "linear": lambda x, w, b: F.linear(x, w[:3]),
    "matmul": lambda x, w, b: w @ x[0].t(),
}


@pytest.mark.parametrize("product", UNSUPPORTED_PRODUCTS)
def test_unsupported_products_are_left_with_their_name(product: str, own_store: MemoryStore) -> None:
    x = torch.randn(1, 3, K)
    model = prepare_model(nn.Sequential(ParameterProduct(UNSUPPORTED_PRODUCTS[product], False)), x, own_store)
    handle = gemmtune.optimize(model, x, tune=False)
    assert f"is multiplied by {product}" in handle.left["0.table"]
    assert handle.swapped == {}


class LanguageModel(nn.Module):
    """Model as GPT-2: embeddings of tokens and positions, and a head that shares the token embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(N, K), nn.Embedding(8, K)
        self.mlp, self.norm = Conv1DModel(), nn.LayerNorm(K)
        self.lm_head = nn.Linear(K, N, bias=False)
        self.lm_head.weight = self.wte.weight
        self.gate = nn.Parameter(torch.randn(1, K))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight[: len(ids)]
        return self.lm_head(self.norm(self.mlp(x) * self.gate))


def test_weights_without_a_product_are_not_reported(own_store: MemoryStore) -> None:
    ids = torch.tensor([1, 5, 2])
    model = prepare_model(LanguageModel(), ids, own_store)
    wanted = model(ids)
    handle = gemmtune.optimize(model, ids, tune=False)
    assert handle.swapped.keys() == {"mlp.c_fc", "mlp.c_proj"}
    assert handle.left.keys() == {"lm_head"}
    handle.restore()
    handle = gemmtune.optimize(model, ids, tune=False, memory=4)
    assert handle.swapped.keys() == {"mlp.c_fc", "mlp.c_proj", "lm_head"}
    assert_close(model(ids), wanted)


class Decaying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(K, N))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table.mul_(0.5)


def test_a_weight_that_forward_writes_is_left_with_the_reason(own_store: MemoryStore) -> None:
    x = torch.randn(3, K)
    model = prepare_model(Decaying(), x, own_store)
    assert "read besides its product, by mul_" in gemmtune.optimize(model, x, tune=False).left["table"]


def test_optimizing_a_second_time_reports_nothing_for_packed_weights(own_store: MemoryStore) -> None:
    x = torch.randn(3, 2, K)
    model = _ready_attention(nn.MultiheadAttention(K, HEADS), (x, x, x), {}, own_store)
    assert len(gemmtune.optimize(model, (x, x, x), tune=False).swapped) == 2
    second = gemmtune.optimize(model, (x, x, x), tune=False)
    assert second.swapped == second.left == {}


def test_tied_linears_are_served_by_one_packed_weight(own_store: MemoryStore) -> None:
    x = torch.randn(3, K)
    first, second = nn.Linear(K, K), nn.Linear(K, K)
    second.weight = first.weight
    model = prepare_model(nn.Sequential(first, second), x, own_store)
    wanted = model(x)
    handle = gemmtune.optimize(model, x, tune=False, memory=4)
    assert handle.swapped.keys() == {"0", "1"}
    assert_close(model(x), wanted)
    handle.restore()
    assert first.weight is second.weight
    assert torch.equal(model(x), wanted)


def test_a_product_with_a_detached_weight_is_recorded_with_a_constant_operand(own_store: MemoryStore) -> None:
    """record() alone sees a detached weight as a variable; ``optimize`` packs it."""
    x = torch.randn(1, 3, K)
    model = nn.Sequential(ParameterProduct(lambda x, w, b: F.linear(x, w.detach(), b), False)).eval()
    sites = find_sites(model, 1.25, {})
    recorded = observe(model, x, sites, {})
    problems = {problem for site in sites for problem in site.ran}
    assert len(problems) == 1
    assert problems <= {problem for problem, _ in recorded.problems}
    assert all(problem.b.constant for problem in problems)


class GptqLinear(nn.Module):
    """Module with an integer weight in a format that gemmtune does not support."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.randint(-9, 9, (K // 8, N), dtype=torch.int32))
        self.register_buffer("scales", torch.rand(1, N))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.qweight.repeat_interleave(8, 0).to(x.dtype) * self.scales)


class LibraryTensor(torch.Tensor):
    """Tensor subclass as a quantisation library has it."""


class LinearWithSubclassWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-9, 9, (N, K), dtype=torch.int8).as_subclass(LibraryTensor))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.as_subclass(Tensor).to(x.dtype))


def test_quantised_weights_of_unknown_formats_are_left_with_the_reason(own_store: MemoryStore) -> None:
    x = torch.randn(3, K)
    model = nn.ModuleDict({"gptq": GptqLinear(), "wrapped": LinearWithSubclassWeight()})
    model.forward = lambda t: model["gptq"](t) + model["wrapped"](t)
    model.eval()
    handle = gemmtune.optimize(model, x, tune=False)
    assert "qweight, torch.int32" in handle.left["gptq"]
    assert "register_weight_only" in handle.left["gptq"]
    assert "LibraryTensor, a subclass of torch.Tensor" in handle.left["wrapped"]
    assert handle.swapped == {}


def test_record_has_the_products_inside_attention() -> None:
    x = torch.randn(2, 3, K)
    with gemmtune.record() as recorded, torch.no_grad():
        nn.MultiheadAttention(K, HEADS)(x, x, x)
    sizes = {(problem.m, problem.n, problem.k) for problem, _ in recorded.problems if problem.b.constant}
    assert sizes == {(6, 3 * K, K), (6, K, K)}
    assert RUNTIME.observer is None
