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
from gemmtune.store import MemoryStore
from helpers.graphs import prefer

pytest.importorskip("torchao", reason="pip install torchao")
from torchao import quantization as ao

pytestmark = pytest.mark.usefixtures("fresh_compiler")

CONFIGS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "int8 weights": (ao.Int8WeightOnlyConfig, "mixed_mm", "int8"),
    "float8 weights": (ao.Float8WeightOnlyConfig, "mixed_mm", "float8_e4m3fn"),
    "int8 dynamic": (ao.Int8DynamicActivationInt8WeightConfig, "int_mm", "int8"),
}


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


@pytest.mark.parametrize("name", ["int8 weights", "float8 weights"])
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
