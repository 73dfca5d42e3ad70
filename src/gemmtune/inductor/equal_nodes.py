"""Operations of a graph that compute the same from the same become one, so that products of one input are seen.

A model whose linears quantise their activations does so once for each of q, k and v, and Inductor's graphs of inference
keep all of these operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .nodes import aten, is_view, value_of

_OVERLOAD = type(aten.mm.default)


def share_equal_nodes(graph: fx.Graph) -> int:
    """Have nodes that call one pure operator with equal arguments be one node. Return how many were removed.

    Nodes whose result the graph returns, itself or as a view, are kept: a caller may write to one result and not to the
    other.
    """
    first: dict[Any, fx.Node] = {}
    removed = 0
    for node in list(graph.nodes):
        if not _is_pure(node) or _is_returned(node):
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        try:
            other = first.setdefault(key, node)
        except TypeError:  # an argument that has no hash
            continue
        if other is not node:
            node.replace_all_uses_with(other)
            graph.erase_node(node)
            removed += 1
    return removed


def _is_pure(node: fx.Node) -> bool:
    """Whether a node calls an operator of ATen's or of torch.prims that reads values, neither writes nor draws random
    numbers, and has one tensor as its result."""
    target = node.target
    return (
        node.op == "call_function"
        and isinstance(target, _OVERLOAD)
        and target.namespace in ("aten", "prims")
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and bool(node.all_input_nodes)
        and value_of(node) is not None
    )


def _is_returned(node: fx.Node) -> bool:
    """Whether the graph returns a node's value or a view of it."""
    return any(user.op == "output" or (is_view(user) and _is_returned(user)) for user in node.users)


def _frozen(value: Any) -> Any:
    """Return an argument in a form that can be hashed; equal numbers of different types stay different."""
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(each)) for name, each in value.items())
    return value if isinstance(value, fx.Node) else (type(value), value)
