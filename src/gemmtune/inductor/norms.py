"""Norms in an ATen graph whose results only products read, so that the kernel of a product may compute them."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import fx

from ..core.epilogue import Epilogue, Kind, Step
from ..ops.operands import dtype_name
from .nodes import FLOATS, aten, factors, is_call, value_of, without_conversions


class Norm(NamedTuple):
    """An RMS norm ``rows * rsqrt(mean(rows**2) + eps) * weight`` over the last dimension, or a layer norm
    ``(rows - mean(rows)) * rsqrt(variance(rows) + eps) * weight + bias``, of which the bias may be missing.

    result: the node of the normalised rows. rows: the node of the rows, of the result's shape and dtype. tensors: the
    nodes of the weight and the bias, each [K], of the same dtype. steps: what a Problem says about it, one step for
    each tensor.
    """

    result: fx.Node
    rows: fx.Node
    tensors: tuple[fx.Node, ...]
    steps: Epilogue


class _Unscaled(NamedTuple):
    """A norm without a weight: rows, less their means in a layer norm, times a factor for each row.

    wide: the node of the rows, as they are normalised. inner: the nodes between the two, which nothing else may read.
    """

    kind: Kind
    wide: fx.Node
    eps: float
    inner: tuple[fx.Node, ...]


def find_norm(result: fx.Node) -> Norm | None:
    """Return the norm whose result a node is; None for any other node, and where other nodes read an intermediate
    result, which no kernel of a product stores.

    Matched are ``torch.nn.functional.rms_norm`` and ``layer_norm`` with a weight, and the RMS norms of models that
    convert to float32, normalise, and multiply by the weight before or after they convert back.
    """
    end = without_conversions(result)
    for scaled, bias in [(end, None), *_terms(end)]:
        for weight, normed in factors(without_conversions(scaled)):
            unscaled = without_conversions(normed)
            norm = _unscaled_norm(unscaled)
            tensors = (weight,) if bias is None else (weight, bias)
            if norm is None or (bias is not None and norm.kind == "rms_norm"):
                continue
            rows = without_conversions(norm.wide)
            if not _fits(result, rows, tensors):
                continue
            inner = {end, scaled, without_conversions(scaled), normed, unscaled, *norm.inner} - {result}
            if any(len(node.users) > 1 for node in inner):
                return None
            value = value_of(result)
            assert value is not None
            dtype = dtype_name(value.dtype)
            steps = Step(norm.kind, "inner", dtype, norm.eps), Step("norm_bias", "inner", dtype)
            return Norm(result, rows, tensors, steps[: len(tensors)])
    return None


def _terms(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the two terms of a sum of tensors in both orders."""
    if is_call(node, aten.add.Tensor) and not node.kwargs:
        first, second = node.args
        if isinstance(first, fx.Node) and isinstance(second, fx.Node):
            yield first, second
            yield second, first


def _unscaled_norm(node: fx.Node) -> _Unscaled | None:
    """Return the norm without a weight that a node computes; None if it computes none."""
    for left, factor in factors(node):
        if not is_call(factor, aten.rsqrt.default):
            continue
        total: Any = factor.args[0]
        if not is_call(total, aten.add.Tensor, aten.add.Scalar) or total.kwargs:
            continue
        mean, eps = total.args
        if not isinstance(eps, int | float) or not math.isfinite(eps) or eps < 0:
            continue
        if is_call(left, aten.sub.Tensor) and not left.kwargs:
            wide, center = left.args
            if isinstance(wide, fx.Node) and _are_moments(mean, center, wide):
                return _Unscaled("layer_norm", wide, float(eps), (left, factor))
        elif _is_mean_square(mean, left):
            return _Unscaled("rms_norm", left, float(eps), (factor,))
    return None


def _is_mean_square(mean: Any, wide: fx.Node) -> bool:
    """Whether a node computes ``mean(wide**2, -1, keepdim)``."""
    if not is_call(mean, aten.mean.dim) or mean.kwargs or len(mean.args) < 3 or not mean.args[2]:
        return False
    square, dims = mean.args[:2]
    is_square = (is_call(square, aten.pow.Tensor_Scalar) and square.args == (wide, 2)) or (
        is_call(square, aten.mul.Tensor) and square.args == (wide, wide)
    )
    return is_square and _is_last(dims, wide)


def _are_moments(variance: Any, mean: Any, wide: fx.Node) -> bool:
    """Whether two nodes are the variance, divided by the number of elements, and the mean of ``wide`` over its last
    dimension, which is kept."""
    if not (is_call(variance, operator.getitem) and is_call(mean, operator.getitem)):
        return False
    moments, index = variance.args
    if index != 0 or mean.args != (moments, 1) or not is_call(moments, aten.var_mean.correction):
        return False
    if len(moments.args) != 2 or moments.args[0] is not wide or not _is_last(moments.args[1], wide):
        return False
    return dict(moments.kwargs) == {"correction": 0, "keepdim": True}


def _is_last(dims: Any, node: fx.Node) -> bool:
    """Whether dimensions of a node's value are the last one alone."""
    value = value_of(node)
    return value is not None and [dim % value.dim() for dim in dims] == [value.dim() - 1]


def _fits(result: fx.Node, rows: fx.Node, tensors: tuple[fx.Node, ...]) -> bool:
    """Whether rows, tensors and result have one floating dtype and device, and the shapes of a norm."""
    values = [value for value in map(value_of, (result, rows, *tensors)) if value is not None]
    if len(values) < 2 + len(tensors) or len({(value.dtype, value.device) for value in values}) > 1:
        return False
    normed, source, *factors = values
    shapes_fit = tuple(source.shape) == tuple(normed.shape) and all(
        tuple(each.shape) == tuple(normed.shape[-1:]) for each in factors
    )
    return shapes_fit and normed.dtype in FLOATS
