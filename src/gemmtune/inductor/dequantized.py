"""Dequantised weights in an ATen graph: int8 and fp8 weights, converted and scaled as in gpt-fast and torchao."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import fx

from .nodes import (
    CONVERT,
    aten,
    is_call,
    meta_tensor,
    sizes_of,
    transposed_source,
    value_of,
    without_conversions,
    without_views,
)

_QUANTIZED = (torch.int8, torch.float8_e4m3fn)


def _quantized_source(node: fx.Node) -> fx.Node | None:
    """Return the int8 or fp8 tensor of which a node is the conversion to a floating dtype."""
    if not is_call(node, CONVERT, aten._to_copy.default) or not isinstance(node.args[0], fx.Node):
        return None
    value = value_of(node.args[0])
    return node.args[0] if value is not None and value.dtype in _QUANTIZED else None


def _without_transposes(node: fx.Node) -> tuple[fx.Node, bool]:
    """Return the matrix of which a node is a view or a conversion between floating dtypes, and whether the node is its
    transpose."""
    transposed = False
    while True:
        node = without_conversions(node)
        source = transposed_source(node)
        if source is None:
            return node, transposed
        node, transposed = source, not transposed


def constant_vector(node: fx.Node, constants: Collection[fx.Node], size: int) -> fx.Node | None:
    """Return the constant tensor of ``size`` elements of which a node is a view or a conversion between floating
    dtypes."""
    before = None
    while node is not before:
        before = node
        node = without_views(_without_transposes(node)[0])
    value = meta_tensor(node)
    return node if node in constants and value is not None and value.numel() == size else None


class DequantizedWeight(NamedTuple):
    """A dequantised weight: data [N, K], constant, and the node of its scales, if they are applied before the
    product."""

    data: fx.Node
    scale: fx.Node | None


def dequantized_weight(b: fx.Node, constants: Collection[fx.Node]) -> DequantizedWeight | None:
    """Return the weight of which b [K, N] is the dequantised transpose; None if b is no such node.

    A weight is converted, and perhaps multiplied by the scales of its output channels, before or after it is
    transposed, as gpt-fast and torchao do.
    """
    dequantized, transposed = _without_transposes(b)
    factors: list[tuple[fx.Node, fx.Node | None]] = [(dequantized, None)]
    if is_call(dequantized, aten.mul.Tensor):
        first, second = dequantized.args[:2]
        both = isinstance(first, fx.Node) and isinstance(second, fx.Node)
        factors = [(first, second), (second, first)] if both else []  # type: ignore[list-item]
    for factor, scale in factors:
        widened, outer = _without_transposes(factor)
        raw = _quantized_source(widened)
        if raw is None:
            continue
        data, inner = _without_transposes(raw)
        if data not in constants or not transposed ^ outer ^ inner:
            continue
        n = sizes_of(data)[0]
        if scale is None or list(sizes_of(scale)) == ([n, 1] if transposed else [1, n]):
            return DequantizedWeight(data, scale)
    return None
