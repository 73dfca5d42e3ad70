"""RMS norms in an ATen graph whose results only products read, so that the kernel of a product may compute them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import fx

from ..core.epilogue import Step
from ..ops.operands import dtype_name
from .nodes import FLOATS, aten, factors, is_call, value_of, without_conversions


class Norm(NamedTuple):
    """An RMS norm ``rows * rsqrt(mean(rows**2) + eps) * weight`` over the last dimension.

    result: the node of the normalised rows. rows: the node of the rows, of the result's shape and dtype. weight: the
    node of the weight [K], of the same dtype. step: what a Problem says about it.
    """

    result: fx.Node
    rows: fx.Node
    weight: fx.Node
    step: Step


def find_norm(result: fx.Node) -> Norm | None:
    """Return the norm whose result a node is; None for any other node, and where other nodes read an intermediate
    result, which no kernel of a product stores.

    Matched are ``torch.nn.functional.rms_norm``, and the norms of models that convert to float32, normalise, and
    multiply by the weight before or after they convert back.
    """
    scaled = without_conversions(result)
    for weight, normed in factors(scaled):
        unscaled = without_conversions(normed)
        for wide, factor in factors(unscaled):
            eps = _eps_of(factor, wide)
            rows = without_conversions(wide)
            if eps is None or not _fits(result, rows, weight):
                continue
            if any(len(node.users) > 1 for node in {scaled, normed, unscaled, factor} - {result}):
                return None
            value = value_of(result)
            assert value is not None
            return Norm(result, rows, weight, Step("rms_norm", "inner", dtype_name(value.dtype), eps))
    return None


def _eps_of(factor: Any, wide: fx.Node) -> float | None:
    """Return eps where ``factor`` is ``rsqrt(mean(wide**2, -1, keepdim) + eps)``; None where it is not."""
    if not is_call(factor, aten.rsqrt.default):
        return None
    total = factor.args[0]
    if not is_call(total, aten.add.Tensor, aten.add.Scalar) or total.kwargs:
        return None
    mean, eps = total.args
    if not is_call(mean, aten.mean.dim) or not isinstance(eps, int | float) or not math.isfinite(eps) or eps < 0:
        return None
    value = value_of(wide)
    if value is None or mean.kwargs or len(mean.args) < 3 or not mean.args[2]:
        return None
    square, dims = mean.args[:2]
    if [dim % value.dim() for dim in dims] != [value.dim() - 1]:
        return None
    is_square = (is_call(square, aten.pow.Tensor_Scalar) and square.args == (wide, 2)) or (
        is_call(square, aten.mul.Tensor) and square.args == (wide, wide)
    )
    return float(eps) if is_square else None


def _fits(result: fx.Node, rows: fx.Node, weight: fx.Node) -> bool:
    """Whether rows, weight and result have one floating dtype and device, and the shapes of a norm."""
    values = [value for value in map(value_of, (result, rows, weight)) if value is not None]
    if len(values) < 3 or len({(value.dtype, value.device) for value in values}) > 1:
        return False
    normed, source, factors = values
    shapes_fit = tuple(source.shape) == tuple(normed.shape) and tuple(factors.shape) == tuple(normed.shape[-1:])
    return shapes_fit and normed.dtype in FLOATS
