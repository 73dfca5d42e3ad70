"""Packed modules inside torch.compile's graphs."""

from __future__ import annotations

import copy

import torch
from torch import nn

import gemmtune


def test_one_graph_under_torch_compile() -> None:
    """Packed modules do not break the graph, and a copy answers for itself."""
    raw = torch.randint(-128, 128, (8, 16), dtype=torch.int8)
    packed = gemmtune.pack(raw, scale=torch.rand(8))
    module = gemmtune.nn.WeightOnlyLinear(packed, names={"weight": "weight", "scale": "scales"})
    other = copy.deepcopy(module)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state["weight"] = state["weight"].flip(0)
    other.load_state_dict(state)
    x = torch.randn(3, 2, 16)
    with torch.no_grad():
        for one in (module, other):
            compiled = torch.compile(nn.Sequential(one, nn.ReLU()), fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(x), one(x).relu(), rtol=0, atol=0)
        assert not torch.equal(module(x), other(x))
