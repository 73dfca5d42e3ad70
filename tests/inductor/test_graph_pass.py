"""The pass over Inductor's graphs: which nodes a product replaces, and that the graph computes the same."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from gemmtune.inductor import graph_pass, hooks, plan_graph
from gemmtune.inductor.costs import Cost
from gemmtune.inductor.graph_pass import ProductPass
from gemmtune.inductor.graph_report import GraphReport
from gemmtune.inductor.options import Options, parse_options
from helpers.graphs import prefer, run_pass, trace, trace_dynamic

BF16 = torch.bfloat16
GENERATOR = torch.Generator().manual_seed(0)  # operands that are equal in every run
X, WIDE = torch.randn(3, 64, generator=GENERATOR).bfloat16(), torch.randn(2, 3, 64, generator=GENERATOR).bfloat16()
SQUARE, OTHER = (
    torch.randn(64, 64, generator=GENERATOR).bfloat16() / 8,
    torch.randn(64, 64, generator=GENERATOR).bfloat16() / 8,
)
W, V, U = (torch.randn(n, 64, generator=GENERATOR).bfloat16() / 8 for n in (48, 16, 48))
DOWN = torch.randn(64, 48, generator=GENERATOR).bfloat16() / 8
BIAS, BIAS_V = torch.randn(48, generator=GENERATOR).bfloat16(), torch.randn(16, generator=GENERATOR).bfloat16()
INT8 = torch.randint(-128, 128, (48, 64), dtype=torch.int8, generator=GENERATOR)
INT8_V = torch.randint(-128, 128, (16, 64), dtype=torch.int8, generator=GENERATOR)
SCALE, SCALE_V = (
    torch.rand(48, generator=GENERATOR).bfloat16() / 50,
    torch.rand(16, generator=GENERATOR).bfloat16() / 50,
)


def steps_of(node: fx.Node) -> list[str]:
    """Return the kinds of a product's epilogue steps."""
    call = json.loads(node.args[2])  # type: ignore[arg-type]
    return [step["kind"] for step in call["problem"]["epilogue"]]


def assert_same(module: fx.GraphModule, function: Callable[..., Any], *args: Any) -> None:
    """Compare a graph's results with the function's, in float32."""
    with torch.no_grad():
        results, expected = module(*args), function(*args)
    pairs = zip(results, expected, strict=True) if isinstance(expected, tuple) else [(results, expected)]
    for result, reference in pairs:
        assert result.dtype == reference.dtype
        torch.testing.assert_close(result.float(), reference.float(), rtol=3e-2, atol=3e-2)


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def dequantised(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype) * scale[:, None])


FUSED = {
    "bias and gelu": (lambda x, w, b, d: F.linear(F.gelu(F.linear(x, w, b)), d), (X, W, BIAS, DOWN), ["bias", "gelu"]),
    "gelu tanh": (
        lambda x, w, d: F.linear(F.gelu(F.linear(x, w), approximate="tanh"), d), (X, W, DOWN), ["gelu_tanh"],
    ),
    "silu": (lambda x, w: F.silu(F.linear(x, w)), (WIDE, W), ["silu"]),
    "x * sigmoid(x)": (lambda x, w: (y := F.linear(x, w)) * torch.sigmoid(y), (X, W), ["silu"]),
    "relu": (lambda x, w: F.relu(F.linear(x, w)), (WIDE, W), ["relu"]),
    "residual": (lambda x, w, r: r + F.linear(x, w), (WIDE, W, torch.randn(2, 3, 48).bfloat16()), ["add"]),
    "a number": (lambda x, w: F.linear(x, w) * 0.5, (X, W), ["scale"]),
    "a vector": (lambda x, w, s: F.linear(x, w) * s, (WIDE, W, SCALE), ["scale"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
def test_product_computes_the_operations_behind_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, args, steps = FUSED[name]
    prefer(monkeypatch, fused=True)
    module = trace(function, *args)
    products = run_pass(monkeypatch, module, constants=range(1, len(args)))
    assert steps_of(products[0]) == steps
    assert not any(
        node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) for node in module.graph.nodes
    )
    assert_same(module, function, *args)


@pytest.mark.parametrize(("constants", "steps"), [((3,), [[], [], ["silu", "mul"]]), ((1, 2, 3), [[], ["swiglu"]])])
def test_gate_on_a_cpu_is_multiplied_in_a_kernel(
    constants: tuple[int, ...], steps: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In that of both products where their weights can be packed side by side, else in that of one of them."""
    prefer(monkeypatch, fused=True)
    module = trace(mlp, X, W, U, DOWN)
    assert sorted(map(steps_of, run_pass(monkeypatch, module, constants=constants))) == steps
    assert_same(module, mlp, X, W, U, DOWN)


def test_operation_that_another_kernel_must_do_anyway_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """An activation before a norm is computed in the norm's kernel."""
    prefer(monkeypatch, fused=True)

    def block(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(F.relu(F.linear(x, w)), (64,))

    module = trace(block, X, SQUARE)
    assert [steps_of(node) for node in run_pass(monkeypatch, module, constants=(1,))] == [[]]
    assert_same(module, block, X, SQUARE)


@pytest.mark.parametrize(
    ("function", "tangents", "safe"),
    [
        (lambda x: torch.relu(x) + 1, (), True),
        (lambda x: x + torch.zeros(3, 64), (), False),
        (lambda x: x + torch.arange(64), (), False),
        (lambda x: torch.relu(x) + 1, ("tangent",), False),
    ],
)
def test_dependent_launch_is_for_graphs_whose_operations_all_read_tensors(
    function: Callable[[Tensor], Tensor], tangents: tuple[str, ...], safe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = trace(function, X.float()).graph
    metadata = SimpleNamespace(traced_tangents=tangents)
    monkeypatch.setattr(hooks.TracingContext, "try_get", lambda: SimpleNamespace(fw_metadata=metadata))
    assert hooks.is_pdl_safe(graph) == safe


@pytest.mark.skipif(
    "triton.enable_pdl" not in hooks.inductor_config.get_config_copy(),
    reason="Inductor of this torch has no option triton.enable_pdl",
)
def test_unsafe_graph_disables_dependent_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks.TracingContext, "try_get", lambda: None)
    with hooks.inductor_config.patch({"triton.enable_pdl": True}):
        ProductPass(Options(policy="off"), checks_pdl=True)(trace(torch.relu, X).graph)
        assert not hooks.inductor_config.triton.enable_pdl


def test_key_of_a_graph_has_coordinate_descent() -> None:
    """It is off when AOTAutograd makes the graph's key."""
    keys = {ProductPass(parse_options(None, {"coordinate_descent_tuning": on})).uuid() for on in (False, True)}
    assert len(keys) == 2


def test_residual_is_added_by_the_product_so_that_the_norm_behind_it_reads_one_matrix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefer(monkeypatch, fused=True)

    def block(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        x = x + F.linear(x, w)
        return x + F.linear(F.rms_norm(x, (64,)), u)

    module = trace(block, X, SQUARE, OTHER)
    assert [steps_of(node) for node in run_pass(monkeypatch, module, constants=(1, 2))] == [["add"], ["add"]]
    assert_same(module, block, X, SQUARE, OTHER)


def test_result_that_two_operations_read_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, fused=True)

    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, w)
        return F.relu(y), y.abs()

    module = trace(both, X, W)
    assert [steps_of(node) for node in run_pass(monkeypatch, module, constants=(1,))] == [[]]
    assert_same(module, both, X, W)


def test_precision_casts_of_eager_pytorch_are_steps_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, fused=True)
    function = FUSED["residual"][0]
    args = FUSED["residual"][1]
    module = trace(function, *args)
    (node,) = run_pass(monkeypatch, module, (1,), inductor={"emulate_precision_casts": True})
    assert steps_of(node) == ["cast", "add"]
    with torch.no_grad():
        assert torch.equal(module(*args), function(*args))


def test_rounding_before_a_conversion_is_a_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, fused=True)
    module = trace(FUSED["silu"][0], WIDE, W)
    (node,) = run_pass(monkeypatch, module, (1,), inductor={"emulate_precision_casts": True})
    assert steps_of(node) == ["cast", "silu"]
    with torch.no_grad():
        assert torch.equal(module(WIDE, W), F.silu(F.linear(WIDE, W)))


def test_integer_product_is_scaled_by_rows_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, fused=True)

    def dynamic(x: Tensor, rows: Tensor, w: Tensor, columns: Tensor) -> Tensor:
        return (torch._int_mm(x, w.t()).float() * rows * columns).to(BF16)

    x = torch.randint(-128, 128, (17, 64), dtype=torch.int8)
    args = (x, torch.rand(17, 1) / 50, INT8, torch.rand(48) / 50)
    module = trace(dynamic, *args)
    (node,) = run_pass(monkeypatch, module, constants=(2, 3))
    assert steps_of(node) == ["scale", "scale"]
    assert_same(module, dynamic, *args)


GAIN = torch.rand(64, generator=GENERATOR).bfloat16() + 0.5
SHIFT = torch.randn(64, generator=GENERATOR).bfloat16()


def model_norm(x: Tensor, gain: Tensor) -> Tensor:
    """Return the RMS norm of Llama models, which rounds before it multiplies by the weight."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * gain


def torch_norm(x: Tensor, gain: Tensor) -> Tensor:
    """Return what Inductor makes of torch.nn.functional.rms_norm, which rounds at its end."""
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5) * gain).to(x.dtype)


def layer_norm(x: Tensor, gain: Tensor, shift: Tensor | None = None) -> Tensor:
    """Return what Inductor makes of torch.nn.functional.layer_norm."""
    wide = x.float()
    variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
    scaled = (wide - mean) * torch.rsqrt(variance + 1e-5) * gain
    return (scaled if shift is None else scaled + shift).to(x.dtype)


def prefer_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, fused=True, merged=True)
    monkeypatch.setattr(plan_graph, "has_own_kernels", lambda problem, device: True)


@pytest.mark.parametrize("norm", [model_norm, torch_norm])
@pytest.mark.parametrize("rows", [X, WIDE], ids=["matrix", "batch"])
def test_product_computes_the_norm_in_front_of_it(
    norm: Callable[[Tensor, Tensor], Tensor], rows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer_norms(monkeypatch)

    def block(x: Tensor, w: Tensor, v: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        h = norm(x, gain)
        return F.linear(h, w), F.linear(h, v)

    module = trace(block, rows, W, V, GAIN)
    (node,) = run_pass(monkeypatch, module, constants=(1, 2, 3))
    assert steps_of(node) == ["rms_norm"]
    assert torch.ops.aten.rsqrt.default not in {node.target for node in module.graph.nodes}
    assert_same(module, block, rows, W, V, GAIN)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("norm", [layer_norm, lambda x, gain, shift: F.layer_norm(x, (64,), gain, shift)])
@pytest.mark.parametrize("rows", [X, WIDE], ids=["matrix", "batch"])
def test_product_computes_the_layer_norm_in_front_of_it(
    biased: bool, norm: Callable[..., Tensor], rows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer_norms(monkeypatch)

    def block(x: Tensor, w: Tensor, b: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        return F.linear(norm(x, gain, shift if biased else None), w, b)

    args = (rows, W, BIAS, GAIN, SHIFT)
    module = trace(block, *args)
    (node,) = run_pass(monkeypatch, module, constants=range(1, 5))
    assert steps_of(node) == ["layer_norm", *(["norm_bias"] if biased else []), "bias"]
    assert torch.ops.aten.rsqrt.default not in {node.target for node in module.graph.nodes}
    assert_same(module, block, *args)


def test_layer_norm_in_front_of_int8_weights_that_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scales of the columns, which are merged, follow both tensors of the norm."""
    prefer_norms(monkeypatch)

    def block(x: Tensor, w: Tensor, v: Tensor, s: Tensor, t: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        h = layer_norm(x, gain, shift)
        return torch.cat([F.linear(h, w.to(x.dtype)) * s, F.linear(h, v.to(x.dtype)) * t], -1)

    args = (X, INT8, INT8_V, SCALE, SCALE_V, GAIN, SHIFT)
    module = trace(block, *args)
    (node,) = run_pass(monkeypatch, module, constants=range(1, 7))
    assert steps_of(node) == ["layer_norm", "norm_bias"]
    assert_same(module, block, *args)


def test_layer_norm_in_front_of_biased_products_that_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer_norms(monkeypatch)

    def block(x: Tensor, w: Tensor, v: Tensor, b: Tensor, c: Tensor, gain: Tensor, shift: Tensor) -> Any:
        h = layer_norm(x, gain, shift)
        return F.linear(h, w, b), F.linear(h, v, c)

    args = (WIDE, W, V, BIAS, BIAS_V, GAIN, SHIFT)
    module = trace(block, *args)
    (node,) = run_pass(monkeypatch, module, constants=range(1, 7))
    assert steps_of(node) == ["layer_norm", "norm_bias", "bias"]
    assert_same(module, block, *args)


def test_norm_between_two_products_is_computed_by_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one adds the residual, so that the rows are in memory."""
    prefer_norms(monkeypatch)

    def block(x: Tensor, w: Tensor, u: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
        x = x + F.linear(x, w)
        return x + F.linear(model_norm(x, gain), u, bias)

    args = (X, SQUARE, OTHER, torch.randn(64, generator=GENERATOR).bfloat16(), GAIN)
    module = trace(block, *args)
    assert [steps_of(node) for node in run_pass(monkeypatch, module, constants=(1, 2, 3, 4))] == [
        ["add"], ["rms_norm", "bias", "add"],
    ]  # fmt: skip
    assert_same(module, block, *args)


def test_norm_in_front_of_int8_weights_that_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer_norms(monkeypatch)

    def block(x: Tensor, w: Tensor, v: Tensor, s: Tensor, t: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        h = model_norm(x, gain)
        return F.linear(h, w.to(x.dtype)) * s, F.linear(h, v.to(x.dtype)) * t

    args = (X, INT8, INT8_V, SCALE, SCALE_V, GAIN)
    module = trace(block, *args)
    (node,) = run_pass(monkeypatch, module, constants=range(1, 6))
    assert steps_of(node) == ["rms_norm"]
    assert_same(module, block, *args)


def test_norm_in_front_of_biased_products_that_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer_norms(monkeypatch)

    def block(x: Tensor, w: Tensor, v: Tensor, b: Tensor, c: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        h = model_norm(x, gain)
        return F.linear(h, w, b), F.linear(h, v, c)

    args = (WIDE, W, V, BIAS, BIAS_V, GAIN)
    module = trace(block, *args)
    (node,) = run_pass(monkeypatch, module, constants=range(1, 6))
    assert steps_of(node) == ["rms_norm", "bias"]
    assert_same(module, block, *args)


GATES = {
    "silu": (F.silu, "swiglu"),
    "gelu": (F.gelu, "geglu"),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), "geglu_tanh"),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", GATES)
def test_two_products_and_the_gate_between_them_are_one(
    name: str, swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer_norms(monkeypatch)
    activation, kind = GATES[name]

    def block(x: Tensor, first: Tensor, second: Tensor, down: Tensor, gain: Tensor) -> Tensor:
        h = model_norm(x, gain)
        a, b = F.linear(h, first), F.linear(h, second)
        return F.linear(a * activation(b) if swapped else activation(a) * b, down)

    args = (WIDE, W, U, DOWN, GAIN)
    module = trace(block, *args)
    assert [steps_of(node) for node in run_pass(monkeypatch, module, constants=range(1, 5))] == [["rms_norm", kind], []]
    assert not any(
        node.target in (torch.ops.aten.mul.Tensor, torch.ops.aten.rsqrt.default) for node in module.graph.nodes
    )
    assert_same(module, block, *args)


def swap_batches(x: Tensor, b: Tensor) -> Tensor:
    """Return bmm of a product whose M is x's first dimension."""
    return torch.bmm(x.transpose(0, 1), b)


def attend(x: Tensor, b: Tensor) -> Tensor:
    """Return bmm of a product whose batch is x's first dimension."""
    return torch.bmm(x, b.expand(x.shape[0], *b.shape[1:]))


@pytest.mark.parametrize(("function", "sizes"), [(swap_batches, (5, 3, 16)), (attend, (3, 5, 16))])
def test_batched_product_of_a_graph_for_every_m_and_for_every_batch(
    function: Callable[..., Tensor], sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer_norms(monkeypatch)
    b = torch.randn(3 if function is swap_batches else 1, 16, 24, generator=GENERATOR).bfloat16()
    x = torch.randn(70, *sizes[1:], generator=GENERATOR).bfloat16()
    module = trace_dynamic(function, x[: sizes[0]], b)
    assert len(run_pass(monkeypatch, module, constants=())) == 1
    for count in (1, sizes[0], 2, 70):
        assert_same(module, function, x[:count], b)


def test_batched_product_with_more_symbolic_sizes_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer_norms(monkeypatch)

    def gram(x: Tensor) -> Tensor:
        return torch.bmm(x.reshape(-1, 4, 16).transpose(0, 1), x.reshape(4, -1, 16).transpose(1, 2))

    module = trace_dynamic(gram, torch.randn(5, 4, 16, generator=GENERATOR).bfloat16())
    assert run_pass(monkeypatch, module, constants=()) == []


@pytest.mark.parametrize("name", GATES)
def test_norm_and_gate_of_a_graph_for_all_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer_norms(monkeypatch)
    activation, kind = GATES[name]

    def block(x: Tensor, first: Tensor, second: Tensor, down: Tensor, gain: Tensor) -> Tensor:
        h = model_norm(x, gain)
        return x + F.linear(activation(F.linear(h, first)) * F.linear(h, second), down)

    weights = (W, U, DOWN, GAIN)
    module = trace_dynamic(block, X, *weights)
    products = run_pass(monkeypatch, module, constants=range(1, 5))
    assert [steps_of(node) for node in products] == [["rms_norm", kind], ["add"]]
    for rows in (X[:2], X, torch.randn(70, 64, generator=GENERATOR).bfloat16()):
        assert_same(module, block, rows, *weights)


def test_report_names_the_nodes_of_norms_and_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer_norms(monkeypatch)

    def block(x: Tensor, w: Tensor, u: Tensor, down: Tensor, gain: Tensor) -> Tensor:
        h = model_norm(x, gain)
        return F.linear(F.silu(F.linear(h, w)) * F.linear(h, u), down)

    module = trace(block, X, W, U, DOWN, GAIN)
    graph, reports = module.graph, list[GraphReport]()
    monkeypatch.setattr(graph_pass, "constant_inputs", lambda graph: frozenset(list(graph.nodes)[1:5]))
    ProductPass(Options(policy="cached"), on_report=lambda _, report: reports.append(report))(graph)
    (report,) = reports
    assert report.summary.endswith("2 with the norm in front of them, 2 in gates")
    gate, up, down = report.products
    assert (gate.normed, gate.gated, down.normed, down.gated) == (True, True, False, False)
    assert gate.nodes[0] == up.nodes[0] != gate.nodes[1] == "mm"
    assert len(up.nodes) == 2
    assert gate.nodes[-1].startswith("mul")


def test_gate_of_int8_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer_norms(monkeypatch)

    def block(x: Tensor, w: Tensor, v: Tensor, s: Tensor, t: Tensor, down: Tensor) -> Tensor:
        gate, up = (F.linear(x, weight.to(x.dtype)) * scale for weight, scale in ((w, s), (v, t)))
        return F.linear(F.silu(gate) * up, down)

    args = (X / 8, INT8, INT8.flip(0).contiguous(), SCALE, SCALE.flip(0).contiguous(), DOWN)
    module = trace(block, *args)
    assert [steps_of(node) for node in run_pass(monkeypatch, module, constants=range(1, 6))] == [["swiglu"], []]
    assert_same(module, block, *args)


def factor_read_twice(x: Tensor, w: Tensor, u: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    up = F.linear(x, u)
    return F.linear(F.silu(F.linear(x, w)) * up, down), up


def gate_by_another_matrix(x: Tensor, w: Tensor, u: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, w)) * (F.linear(x, u) + 1), down)


def gate_read_by_a_norm(x: Tensor, w: Tensor, u: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.rms_norm(F.silu(F.linear(x, w)) * F.linear(x, u), (48,)), down)


@pytest.mark.parametrize(
    "block", [factor_read_twice, gate_by_another_matrix, gate_read_by_a_norm], ids=lambda function: function.__name__
)
def test_gate_is_no_form_where_its_factor_or_its_result_is_needed(
    block: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer_norms(monkeypatch)
    module = trace(block, X, W, U, DOWN)
    assert not any("swiglu" in steps_of(node) for node in run_pass(monkeypatch, module, constants=(1, 2, 3)))
    assert_same(module, block, X, W, U, DOWN)


def test_gate_that_a_kernel_of_inductors_reads_is_a_form_if_reading_one_matrix_saves_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefer_norms(monkeypatch)
    monkeypatch.setattr(plan_graph, "_LEAST_SAVED_S", 0.0)
    module = trace(gate_read_by_a_norm, X, W, U, DOWN)
    assert [steps_of(node) for node in run_pass(monkeypatch, module, constants=(1, 2, 3))] == [["swiglu"], []]
    assert_same(module, gate_read_by_a_norm, X, W, U, DOWN)


def result_read_twice(x: Tensor, w: Tensor, gain: Tensor) -> Tensor:
    h = model_norm(x, gain)
    return h + F.linear(h, w)


def rows_not_in_memory(x: Tensor, w: Tensor, gain: Tensor) -> Tensor:
    return F.linear(model_norm(torch.relu(x), gain), w)


def weight_of_another_dtype(x: Tensor, w: Tensor, gain: Tensor) -> Tensor:
    return F.linear(model_norm(x, gain.float()).bfloat16(), w)


def centered_by_another_mean(x: Tensor, w: Tensor, gain: Tensor) -> Tensor:
    wide = x.float()
    variance, _ = torch.var_mean(wide, -1, correction=0, keepdim=True)
    _, mean = torch.var_mean(wide * 2.0, -1, correction=0, keepdim=True)
    return F.linear(((wide - mean) * torch.rsqrt(variance + 1e-5) * gain).to(x.dtype), w)


def variance_of_a_sample(x: Tensor, w: Tensor, gain: Tensor) -> Tensor:
    wide = x.float()
    variance, mean = torch.var_mean(wide, -1, correction=1, keepdim=True)
    return F.linear(((wide - mean) * torch.rsqrt(variance + 1e-5) * gain).to(x.dtype), w)


def bias_of_rows(x: Tensor, w: Tensor, gain: Tensor) -> Tensor:
    return F.linear(layer_norm(x, gain, x), w)


def rms_norm_with_a_bias(x: Tensor, w: Tensor, gain: Tensor) -> Tensor:
    return F.linear(torch_norm(x, gain) + gain, w)


def mean_of_columns(x: Tensor, w: Tensor, gain: Tensor) -> Tensor:
    wide = x.float()
    return F.linear((wide * torch.rsqrt(wide.pow(2).mean(0, keepdim=True) + 1e-5)).to(x.dtype) * gain, w)


@pytest.mark.parametrize(
    "block",
    [
        result_read_twice, rows_not_in_memory, weight_of_another_dtype, mean_of_columns, centered_by_another_mean,
        variance_of_a_sample, bias_of_rows, rms_norm_with_a_bias,
    ],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_norm_stays_inductors(block: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    prefer_norms(monkeypatch)
    module = trace(block, X, SQUARE, GAIN)
    (node,) = run_pass(monkeypatch, module, constants=(1, 2))
    assert not {"rms_norm", "layer_norm"}.intersection(steps_of(node))
    assert_same(module, block, X, SQUARE, GAIN)


def test_norm_keeps_the_roundings_of_eager_pytorch_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer_norms(monkeypatch)
    module = trace(lambda x, w, gain: F.linear(model_norm(x, gain), w), X, SQUARE, GAIN)
    (node,) = run_pass(monkeypatch, module, (1, 2), inductor={"emulate_precision_casts": True})
    assert steps_of(node) == []


MERGED = {
    "q, k": (lambda x, w, v: (F.linear(x, w), F.linear(x, v)), (WIDE, W, V), (1, 2)),
    "biased": (
        lambda x, w, v, b, c: (F.linear(x, w, b), F.linear(x, v, c)), (WIDE, W, V, BIAS, BIAS_V), (1, 2, 3, 4),
    ),
    "int8 weights": (
        lambda x, w, v, s, t: (F.linear(x, w.to(BF16)) * s, F.linear(x, v.to(BF16)) * t),
        (WIDE, INT8, INT8_V, SCALE, SCALE_V), (1, 2, 3, 4),
    ),
    "dequantised first": (
        lambda x, w, v, s, t: (dequantised(x, w, s), dequantised(x, v, t)),
        (X, INT8, INT8_V, SCALE, SCALE_V), (1, 2, 3, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MERGED)
def test_products_of_one_input_are_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, args, constants = MERGED[name]
    prefer(monkeypatch, merged=True)
    args = tuple(arg.clone() for arg in args)  # merging moves weights
    module = trace(function, *args)
    (node,) = run_pass(monkeypatch, module, constants)
    assert json.loads(node.args[2])["problem"]["n"] == 64  # type: ignore[arg-type]
    assert_same(module, function, *args)


def test_products_that_pytorch_serves_are_not_merged_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_graph, "cost_of", lambda problem, device: Cost(1e-3 * problem.n**0.5, beats_torch=False))
    module = trace(MERGED["q, k"][0], WIDE, W, V)
    assert not run_pass(monkeypatch, module, constants=(1, 2))


def test_fp8_products_are_merged_with_the_scales_of_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, merged=True)
    fp8 = torch.float8_e4m3fn

    def both(x: Tensor, sx: Tensor, w: Tensor, v: Tensor, sw: Tensor, sv: Tensor) -> tuple[Tensor, Tensor]:
        first = torch._scaled_mm(x, w.t(), sx, sw, out_dtype=BF16)
        return first, torch._scaled_mm(x, v.t(), sx, sv, out_dtype=BF16)

    args = (
        X.to(fp8), torch.rand(3, 1), W.to(fp8), V.to(fp8), torch.rand(1, 48), torch.rand(1, 16),
    )  # fmt: skip
    module = trace(both, *args)
    (node,) = run_pass(monkeypatch, module, constants=(2, 3, 4, 5))
    assert steps_of(node) == ["scale", "scale"]
    x, sx, w, v, sw, sv = (arg.float() for arg in args)  # ATen's product has no row-wise scales on CPUs before 2.12
    expected = [(x @ weight.t() * sx * scale).to(BF16) for weight, scale in ((w, sw), (v, sv))]
    torch.testing.assert_close(list(module(*args)), expected, rtol=3e-2, atol=3e-2)


def test_weights_that_are_no_constants_are_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, merged=True)
    function, args, _ = MERGED["q, k"]
    module = trace(function, *args)
    assert len(run_pass(monkeypatch, module, constants=())) == 2
    assert_same(module, function, *args)


OTHERS = {
    "matrix [K, N]": (torch.mm, (X, torch.randn(64, 48).bfloat16())),
    "bmm": (torch.bmm, (torch.randn(2, 3, 8), torch.randn(2, 8, 5))),
    "transposed a": (lambda a, b: torch.mm(a.t(), b), (torch.randn(8, 3), torch.randn(8, 5))),
    "addmm with a matrix": (torch.addmm, (torch.randn(3, 5), torch.randn(3, 8), torch.randn(8, 5))),
    "integers": (torch._int_mm, (torch.ones(17, 64, dtype=torch.int8), INT8.t())),
    "einsum": (lambda a, b: torch.einsum("bmk,nk->bmn", a, b), (WIDE, W)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, args = OTHERS[name]
    prefer(monkeypatch)
    module = trace(function, *args)
    assert len(run_pass(monkeypatch, module, constants=(1,))) == 1
    assert_same(module, function, *args)


def test_products_that_pytorch_serves_as_fast_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was tuned here."""
    module = trace(mlp, X, W, U, DOWN)
    assert run_pass(monkeypatch, module, constants=(1, 2, 3)) == []
    assert_same(module, mlp, X, W, U, DOWN)


def test_empty_products_and_other_dtypes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch)
    for a, b in ((torch.randn(0, 8), torch.randn(8, 5)), (torch.ones(2, 3).long(), torch.ones(3, 4).long())):
        assert run_pass(monkeypatch, trace(torch.mm, a, b), constants=(1,)) == []


Operation = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
OPERATIONS: list[Operation] = [
    lambda x, w, v, r: F.linear(x, w),
    lambda x, w, v, r: F.linear(x, w, r[0]),
    lambda x, w, v, r: x @ w,
    lambda x, w, v, r: F.gelu(F.linear(x, w)),
    lambda x, w, v, r: F.silu(F.linear(x, w)) * F.linear(x, w.t().contiguous()),
    lambda x, w, v, r: x + F.linear(x, w),
    lambda x, w, v, r: F.relu(F.linear(x, w, r[0])) + r[1],
    lambda x, w, v, r: F.linear(x, w) * F.linear(x, w * 0.5),
    lambda x, w, v, r: F.rms_norm(x, (16,)),
    lambda x, w, v, r: x.view(2, -1, 16).transpose(0, 1).reshape(-1, 16),
    lambda x, w, v, r: F.linear(x, w).mul_(0.5).add_(r[0]),
    lambda x, w, v, r: torch.softmax(x, -1) @ w.t(),
    lambda x, w, v, r: torch.cat([F.linear(x, w[:8]), F.linear(x, w[8:])], -1),
    lambda x, w, v, r: model_norm(x, r[1]),
    lambda x, w, v, r: F.linear(layer_norm(x, r[1], r[0]), w, r[0]),
    lambda x, w, v, r: x + F.linear(torch_norm(x, r[1]), w, r[0]),
    lambda x, w, v, r: F.linear(F.silu(F.linear(x, w)) * F.linear(x, v), w),
    lambda x, w, v, r: F.linear(F.gelu(F.linear(h := model_norm(x, r[1]), w)) * F.linear(h, v), w),
]


EXAMPLES = int(os.environ.get("GEMMTUNE_RANDOM_GRAPHS", "120"))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chosen=st.lists(st.integers(0, len(OPERATIONS) - 1), min_size=1, max_size=6),
    rows=st.sampled_from([2, 4, 6]),
    fused=st.booleans(),
    merged=st.booleans(),
    wide=st.booleans(),
    constant=st.booleans(),
)
def test_random_graphs_compute_the_same(
    chosen: list[int], rows: int, fused: bool, merged: bool, wide: bool, constant: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(len(chosen))
    shapes = ((rows, 16), (16, 16), (16, 16), (2, 16))
    x, w, v, r = (torch.randn(*shape, generator=generator) / 3 for shape in shapes)

    def function(x: Tensor, w: Tensor, v: Tensor, r: Tensor) -> Tensor:
        for index in chosen:
            x = torch.tanh(OPERATIONS[index](x, w, v, r)) if index % 2 else OPERATIONS[index](x, w, v, r)
        return x

    with monkeypatch.context() as patch:
        prefer(patch, fused=fused, merged=merged)
        patch.setattr(plan_graph, "has_own_kernels", lambda problem, device: wide)
        module = trace(function, x, w, v, r)
        run_pass(patch, module, constants=(1, 2, 3) if constant else ())
        torch.testing.assert_close(module(x, w, v, r), function(x, w, v, r), rtol=1e-4, atol=1e-4)
