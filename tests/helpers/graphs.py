"""ATen graphs as Inductor's post-grad passes receive them, and costs that choose a form of every product."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from gemmtune.inductor import graph_pass, plan_graph
from gemmtune.inductor.costs import Cost
from gemmtune.inductor.graph_pass import ProductPass
from gemmtune.inductor.operator import product
from gemmtune.inductor.options import Options


def trace(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """Return a function's functional graph on these arguments, in decomposed operators."""
    functional = torch.func.functionalize(function)
    with torch.no_grad():
        module = make_fx(functional, decomposition_table=select_decomp_table(), tracing_mode="fake")(*args)
    module.graph.eliminate_dead_code()
    return module


def trace_dynamic(function: Callable[..., Any], rows: Tensor, *args: Any) -> fx.GraphModule:
    """Return a function's functional graph in decomposed operators, in which the first dimension of the first argument
    is symbolic."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    sizes = [DimDynamic.DYNAMIC, *([DimDynamic.STATIC] * (rows.dim() - 1))]
    fakes = [mode.from_tensor(rows, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))]
    for arg in args:
        static = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.STATIC] * arg.dim())
        fakes.append(mode.from_tensor(arg, symbolic_context=static))
    functional = torch.func.functionalize(function)
    with torch.no_grad(), mode:
        module = make_fx(functional, decomposition_table=select_decomp_table(), tracing_mode="real")(*fakes)
    module.graph.eliminate_dead_code()
    return module


def run_pass(
    monkeypatch: pytest.MonkeyPatch, module: fx.GraphModule, constants: Collection[int], **options: Any
) -> list[fx.Node]:
    """Run gemmtune's pass over a graph whose inputs at ``constants`` are weights. Return the products that it made."""

    def inputs(graph: fx.Graph) -> frozenset[fx.Node]:
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        return frozenset(placeholders[index] for index in constants)

    monkeypatch.setattr(graph_pass, "constant_inputs", inputs)
    ProductPass(Options(policy="cached", **options))(module.graph)
    module.recompile()
    return [node for node in module.graph.nodes if node.target is product]


def prefer(monkeypatch: pytest.MonkeyPatch, *, fused: bool = False, merged: bool = False) -> None:
    """Have every product be faster than PyTorch's. fused: with the operations behind it. merged: with others."""

    def cost(problem: Any, device: Any) -> Cost:
        steps = len(problem.epilogue)
        seconds = 1e-3 * problem.n ** (0.5 if merged else 1.0)
        return Cost(seconds / (1 + steps) if fused else seconds * (1 + steps), True)

    monkeypatch.setattr(plan_graph, "cost_of", cost)
