"""Dequantised weights in an ATen graph: int8 and fp8 weights, converted and scaled as in gpt-fast and torchao, with a
scale for each output channel or for each group of one."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import fx

from .nodes import (
    CONVERT,
    aten,
    factors,
    is_call,
    is_dynamic,
    is_floating,
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
    """A dequantised weight: data [N, K], constant, and the node of its scales, if they are applied before the product.

    group: elements of K that share a scale; then the scales [N, groups] are constant, and so are the zero points of
    this shape, if there are any. None: a scale for each output channel.
    """

    data: fx.Node
    scale: fx.Node | None
    group: int | None = None
    zero_point: fx.Node | None = None


def dequantized_weight(b: fx.Node, constants: Collection[fx.Node]) -> DequantizedWeight | None:
    """Return the weight of which b [K, N] is the dequantised transpose; None if b is no such node.

    A weight is converted, and perhaps multiplied by the scales of its output channels, before or after it is
    transposed, as gpt-fast and torchao do.
    """
    dequantized, transposed = _without_transposes(b)
    pairs: list[tuple[fx.Node, fx.Node | None]] = [*factors(dequantized), (dequantized, None)]
    for factor, scale in pairs:
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


def grouped_weight(b: fx.Node, constants: Collection[fx.Node]) -> DequantizedWeight | None:
    """Return the weight of which b [K, N] is the dequantised transpose, with a scale for each group, or with a scale
    and a zero point for each output channel; None if b is no such node.

    The weight is converted, divided into groups [N, groups, group] (not where an output channel is one group), less its
    zero points, multiplied by its scales, and is a matrix again, as torchao does.
    """
    matrix, transposed = _without_transposes(b)
    scaled = without_conversions(without_views(matrix))
    sizes = list(sizes_of(scaled))
    if not transposed or len(sizes) not in (2, 3) or is_dynamic(sizes):
        return None
    n, *divided, group = sizes
    groups = divided[0] if divided else 1
    if list(sizes_of(matrix)) != [n, groups * group]:
        return None
    for shifted, scale in factors(scaled):
        widened, zero_point = _without_zero_points(without_conversions(shifted))
        raw = _quantized_source(without_conversions(widened))
        data = None if raw is None else without_views(raw)
        if data is None or data not in constants or list(sizes_of(data)) != [n, groups * group]:
            continue
        by_group = [n, *divided, 1]
        scales = _constant_by_group(scale, constants, by_group)
        zero_points = None if zero_point is None else _constant_by_group(zero_point, constants, by_group)
        if scales is not None and (zero_points is not None or (zero_point is None and divided)):
            return DequantizedWeight(data, scales, group, zero_points)
    return None


def _without_zero_points(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return the integers and the zero points of which a node is the difference; the node itself and None where it is
    none."""
    if is_call(node, aten.sub.Tensor) and not node.kwargs:
        integers, zero_points = node.args
        if isinstance(integers, fx.Node) and isinstance(zero_points, fx.Node):
            return integers, zero_points
    return node, None


def _constant_by_group(node: fx.Node, constants: Collection[fx.Node], sizes: list[int]) -> fx.Node | None:
    """Return the constant tensor of which a node of these sizes ([N, groups, 1], or [N, 1] for one group) is a view and
    a conversion to a floating dtype."""
    if list(sizes_of(node)) != sizes:
        return None
    source = without_conversions(without_views(node))
    if is_call(source, CONVERT, aten._to_copy.default) and is_floating(source):
        source = source.args[0]  # type: ignore[assignment]  # integers
    source = without_views(source)
    return source if source in constants else None
