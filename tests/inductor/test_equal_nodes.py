"""Which operations of a graph become one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gemmtune.inductor.equal_nodes import share_equal_nodes
from helpers.graphs import prefer, run_pass, trace

X = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
W, V = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def shared(module: fx.GraphModule) -> int:
    """Return how many nodes were removed, after checks of the graph."""
    removed = share_equal_nodes(module.graph)
    module.graph.lint()
    module.recompile()
    return removed


def test_equal_chains_become_one() -> None:
    def function(x: Tensor) -> Tensor:
        return (x.abs().amax(1, keepdim=True) + 1) * (x.abs().amax(1, keepdim=True) + 2)

    module = trace(function, X)
    expected = function(X)
    assert shared(module) == 2
    assert torch.equal(module(X), expected)
    assert shared(module) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 1) * (x + 1.0),
        lambda x: x.sum(0).sum(0) + x.sum(1).sum(0),
        lambda x: F.dropout(x, 0.5) * F.dropout(x, 0.5),
        lambda x: (x + 1, x + 1),
        lambda x: ((x + 1).view(-1), x + 1, (x + 1).sum()),
    ],
    ids=["another type", "another argument", "random numbers", "results", "views of results"],
)
def test_operations_stay_apart(function: object) -> None:
    module = trace(function, X)  # type: ignore[arg-type]
    assert shared(module) == 0


def test_products_whose_input_is_computed_for_each_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, merged=True)

    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.linear(x.bfloat16() * 2, w) - F.linear(x.bfloat16() * 2, v)

    module = trace(function, X, W, V)
    assert len(run_pass(monkeypatch, module, constants=(1, 2))) == 1
    torch.testing.assert_close(module(X, W, V), function(X, W, V), rtol=3e-2, atol=3e-2)
