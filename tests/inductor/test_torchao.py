"""Linears that torchao quantised, in graphs: which Problems they are, and that the products compute the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gemmtune
from gemmtune.inductor.graph_call import GraphCall
from gemmtune.store import MemoryStore
from helpers.graphs import prefer, run_pass, trace
from helpers.torchao_modules import REASON, SKIPPED

pytest.importorskip("torchao", reason=REASON, exc_type=SKIPPED)
from torchao import quantization as ao
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.quant_primitives import MappingType

pytestmark = pytest.mark.usefixtures("fresh_compiler")

CONFIGS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "int8 weights": (ao.Int8WeightOnlyConfig, "mixed_mm", "int8"),
    "float8 weights": (ao.Float8WeightOnlyConfig, "mixed_mm", "float8_e4m3fn"),
    "int8 dynamic": (ao.Int8DynamicActivationInt8WeightConfig, "int_mm", "int8"),
    "int8 weights in groups": (
        lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerGroup(32)), "mixed_mm", "int8"
    ),
    "int4 weights in groups, as int8": (
        lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)), "mixed_mm", "int8"
    ),
    "int8 weights, asymmetric": (
        lambda: ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int8, granularity=PerAxis(0), mapping_type=MappingType.ASYMMETRIC
        ),
        "mixed_mm", "int8",
    ),
    "int8 weights in groups, asymmetric": (
        lambda: ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int8, granularity=PerGroup(32), mapping_type=MappingType.ASYMMETRIC
        ),
        "mixed_mm", "int8",
    ),
}  # fmt: skip
WEIGHT_ONLY = [name for name, (_, family, _) in CONFIGS.items() if family == "mixed_mm"]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
        self.down = nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def quantised(name: str) -> nn.Module:
    model = Mlp().bfloat16().eval().requires_grad_(False)
    ao.quantize_(model, CONFIGS[name][0]())
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_quantised_linears_are_problems_of_constant_weights(name: str) -> None:
    _, family, dtype = CONFIGS[name]
    options = {"store": MemoryStore()}
    (report,) = gemmtune.inductor.explain(quantised(name), torch.randn(3, 64).bfloat16(), options=options)
    assert not report.unmatched
    assert len(report.products) == 3
    for product in report.products:
        assert product.key.startswith(f"{family}|m3."), product.key
        assert f"|{dtype}:c" in product.key
        assert ":const" in product.key


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_linears_keep_the_roundings_of_torchao_if_asked_for(name: str) -> None:
    """Problems have the scales in float32, which torchao rounds to the activations' dtype."""
    options = {"store": MemoryStore(), "emulate_precision_casts": True}
    (report,) = gemmtune.inductor.explain(quantised(name), torch.randn(3, 64).bfloat16(), options=options)
    assert not report.products
    assert {reason for _, reason in report.unmatched} == {"eager PyTorch rounds the dequantised weight or its scales"}


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_compiled_linears_compute_what_torchao_does(name: str, merged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, fused=not merged, merged=merged)
    model = quantised(name)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = copy.deepcopy(model)(x)
    compiled = gemmtune.compile(model, options={"policy": "cached", "store": MemoryStore()})
    with torch.no_grad():
        for _ in range(2):
            result = compiled(x)
    # Activations that are quantised in the graph may round to the neighbouring integer.
    error = (result.float() - expected.float()).norm() / expected.float().norm()
    assert error < (2e-2 if name == "int8 dynamic" else 1e-2)


@pytest.mark.parametrize("name", ["int8 weights in groups, asymmetric", "int8 weights, asymmetric"])
def test_tuned_kernels_serve_weights_with_zero_points_and_see_writes(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512)).bfloat16().eval().requires_grad_(False)
    ao.quantize_(model, CONFIGS[name][0]())
    x, store = torch.randn(3, 256).bfloat16(), MemoryStore()
    compiled = gemmtune.compile(model, options={"store": store, "budget": 2.0})
    with torch.no_grad():
        first = compiled(x)
        torch.testing.assert_close(first, model(x), rtol=2e-2, atol=2e-2)
        (report,) = gemmtune.inductor.explain(model, x, options={"store": store})
        (product,) = report.products
        model[0].weight.scale.mul_(2)  # type: ignore[union-attr, operator]
        second = compiled(x)
        torch.testing.assert_close(second, model(x), rtol=2e-2, atol=4e-2)
    assert not torch.equal(first, second)
    if product.reason == "it was not tuned":
        pytest.skip("the machine was too busy to decide")
    assert product.kernel, product.reason


@pytest.mark.parametrize("changed", ["scale by another size", "not constant"])
def test_other_dequantised_weights_stay_as_they_are(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only constant weights with a scale for each group are weight-only Problems; others are floating matrices."""
    prefer(monkeypatch)

    def function(x: Tensor, data: Tensor, scale: Tensor) -> Tensor:
        grouped = data.reshape(96, 2, 32).to(x.dtype) * scale
        return F.linear(x, grouped.reshape(96, 64))

    sizes = (1, 2, 1) if changed == "scale by another size" else (96, 2, 1)
    arguments = (torch.randn(3, 64), torch.randint(-128, 128, (96, 64), dtype=torch.int8), torch.rand(sizes))
    module = trace(function, *arguments)
    (product,) = run_pass(monkeypatch, module, [1, 2] if changed == "scale by another size" else [2])
    assert GraphCall.from_json(str(product.args[2])).problem.family == "mm"


def test_groups_of_float8_weights_without_zero_points(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch)

    def function(x: Tensor, data: Tensor, scale: Tensor) -> Tensor:
        grouped = data.reshape(96, 2, 32).to(x.dtype) * scale.unsqueeze(-1)
        return F.linear(x, grouped.reshape(96, 64))

    data = torch.randn(96, 64).to(torch.float8_e4m3fn)
    arguments = (torch.randn(3, 64), data, torch.rand(96, 2))
    module = trace(function, *arguments)
    (product,) = run_pass(monkeypatch, module, [1, 2])
    problem = GraphCall.from_json(str(product.args[2])).problem
    assert (problem.family, problem.b.dtype) == ("mixed_mm", "float8_e4m3fn")
    assert problem.b.quant is not None
    assert (problem.b.quant.group, problem.b.quant.zero_point) == (32, False)
    torch.testing.assert_close(module(*arguments), function(*arguments))
