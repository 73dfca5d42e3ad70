"""Epilogues in an ATen graph: the operations on a product's result that a kernel can apply before it stores it.

``links`` follows a product's result through its users. Each Link is one operation; a kernel may include the first few.
Inductor computes a chain of pointwise operations in float32 and rounds at its end, and so does an epilogue. With
``emulate_precision_casts`` each rounding of eager PyTorch is a step of its own.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .. import fuse
from ..fuse import BoundStep
from .nodes import CONVERT, FLOATS, aten, is_call, is_floating, is_view, meta_tensor, value_of

_LOW = (torch.bfloat16, torch.float16)


class Link(NamedTuple):
    """One operation of an epilogue.

    steps: what a kernel does; their tensors are on the meta device. aux: the node of the steps' tensor, or None. node:
    the operation's result in the graph.
    """

    steps: tuple[BoundStep, ...]
    aux: fx.Node | None
    node: fx.Node


def links(product: fx.Node, columns: int, *, emulate: bool = False) -> list[Link]:
    """Return the operations that follow a product [M, columns], in order. Each is the only user of the one before it.
    emulate: whether results of low precision are rounded as eager PyTorch does."""
    result: list[Link] = []
    current, rounded = product, _low_dtype(product)
    while True:
        link = _next(current, columns)
        if link is None:
            return result
        after = _low_dtype(link.node)
        if not link.steps:  # a view, or a conversion, which does not undo a rounding
            rounded = after or rounded
        else:
            if emulate and rounded is not None:  # what the operation reads has been rounded
                link = link._replace(steps=(fuse.cast(rounded), *link.steps))
            rounded = after
        result.append(link)
        current = link.node


def _low_dtype(node: fx.Node) -> torch.dtype | None:
    """Return the dtype of a node's value if it has a low precision."""
    value = value_of(node)
    return value.dtype if value is not None and value.dtype in _LOW else None


def _next(current: fx.Node, columns: int) -> Link | None:
    users = list(current.users)
    if len(users) == 1:
        user = users[0]
        if is_view(user) and user.args[0] is current:
            return Link((), None, user) if _keeps_rows(user, columns) else None
        if is_call(user, CONVERT):
            return Link((), None, user) if is_floating(user) else None
        return _simple(user, current, columns)
    return _silu(current) or _gelu(current)


def _keeps_rows(node: fx.Node, columns: int) -> bool:
    value = value_of(node)
    return value is not None and value.dim() > 0 and isinstance(value.shape[-1], int) and value.shape[-1] == columns


def _simple(user: fx.Node, current: fx.Node, columns: int) -> Link | None:
    """Return the Link of an operation with one other operand at most."""
    if not is_floating(user):
        return None
    if is_call(user, aten.relu.default):
        return Link((fuse.relu(),), None, user)
    if is_call(user, aten.mul.Tensor, aten.mul.Scalar) and isinstance(user.args[1], int | float):
        return Link((fuse.scale(float(user.args[1])),), None, user)
    if not is_call(user, aten.add.Tensor, aten.mul.Tensor) or len(user.args) < 2:
        return None
    other = user.args[1] if user.args[0] is current else user.args[0]
    if not isinstance(other, fx.Node) or other is current:
        return None
    alpha = user.kwargs.get("alpha", 1)
    if alpha != 1:
        return None
    tensor = _epilogue_tensor(other, current, columns)
    if tensor is None:
        return None
    if user.target is aten.mul.Tensor:
        step = fuse.mul(tensor) if tensor.dim() == 2 and tensor.shape[1] == columns else fuse.scale(tensor)
    else:
        step = fuse.bias(tensor) if tensor.dim() == 1 else fuse.add(tensor)
    return Link((step,), other, user)


def _epilogue_tensor(other: fx.Node, current: fx.Node, columns: int) -> Tensor | None:
    """Return a tensor on the meta device for an operand of an epilogue: [columns], or [M, columns] or [M, 1] with the M
    of the example inputs. None for other shapes, dtypes and devices."""
    value, beside, tensor = value_of(other), value_of(current), meta_tensor(other)
    if value is None or beside is None or tensor is None or value.device != beside.device:
        return None
    if tensor.dtype not in FLOATS:
        return None
    if tuple(value.shape) == tuple(beside.shape):
        return torch.empty(tensor.numel() // columns, columns, dtype=tensor.dtype, device="meta")
    if columns > 1 and tuple(value.shape) == (*beside.shape[:-1], 1):
        return torch.empty(tensor.numel(), 1, dtype=tensor.dtype, device="meta")
    if tensor.numel() == columns and tensor.shape[-1:] == (columns,) and value.dim() <= beside.dim():
        return torch.empty(columns, dtype=tensor.dtype, device="meta")
    return None


def _silu(x: fx.Node) -> Link | None:
    """Match x * sigmoid(x), and x / (1 + exp(-x)), which PyTorch makes of silu."""
    for user in x.users:
        if is_call(user, aten.sigmoid.default):
            end = _product(user, x)
            return Link((fuse.silu(),), None, end) if end is not None and _used_within(x, {user, end}) else None
        if is_call(user, aten.neg.default):
            exponential = _only_user(user, aten.exp.default)
            total = _only_user(exponential, aten.add.Tensor)
            end = _only_user(total, aten.div.Tensor)
            if total is None or end is None or total.args[1] != 1 or end.args[0] is not x:
                return None
            return Link((fuse.silu(),), None, end) if _used_within(x, {user, end}) else None
    return None


def _gelu(x: fx.Node) -> Link | None:
    """Match gelu in the two forms that PyTorch makes of it: with erf, and with tanh."""
    half = next((user for user in x.users if is_call(user, aten.mul.Tensor) and user.args[1] == 0.5), None)
    end = _only_user(half, aten.mul.Tensor)
    if half is None or end is None:
        return None
    other: Any = end.args[1] if end.args[0] is half else end.args[0]
    if not is_call(other, aten.add.Tensor) or other.args[1] != 1 or len(other.users) > 1:
        return None
    inner: Any = other.args[0]
    if is_call(inner, aten.erf.default):
        parts, step = _erf_argument(inner.args[0], x), fuse.gelu()
    elif is_call(inner, aten.tanh.default):
        parts, step = _tanh_argument(inner.args[0], x), fuse.gelu("tanh")
    else:
        return None
    if parts is None or not _used_within(x, {half, end, *parts}):
        return None
    return Link((step,), None, end) if all(len(node.users) == 1 for node in (inner, *parts)) else None


def _erf_argument(node: Any, x: fx.Node) -> set[fx.Node] | None:
    """Return the nodes of x / sqrt(2); None if the node is no such expression."""
    is_scaled = is_call(node, aten.mul.Tensor) and node.args[0] is x and _is_close(node.args[1], math.sqrt(0.5))
    return {node} if is_scaled else None


def _tanh_argument(node: Any, x: fx.Node) -> set[fx.Node] | None:
    """Return the nodes of sqrt(2 / pi) * (x + 0.044715 * x^3); None if the node is no such expression."""
    if not is_call(node, aten.mul.Tensor) or not _is_close(node.args[1], math.sqrt(2 / math.pi)):
        return None
    total = node.args[0]
    if not is_call(total, aten.add.Tensor) or total.args[0] is not x:
        return None
    cubic = total.args[1]
    if not is_call(cubic, aten.mul.Tensor) or not _is_close(cubic.args[1], 0.044715):
        return None
    cube = cubic.args[0]
    if is_call(cube, aten.pow.Tensor_Scalar) and cube.args == (x, 3):
        return {node, total, cubic, cube}
    if not is_call(cube, aten.mul.Tensor):
        return None
    square, last = cube.args[:2]
    if last is not x or not is_call(square, aten.mul.Tensor) or square.args != (x, x):
        return None
    return {node, total, cubic, cube, square}


def _is_close(value: Any, expected: float) -> bool:
    return isinstance(value, float) and math.isclose(value, expected, rel_tol=1e-6)


def _only_user(node: fx.Node | None, target: Any) -> fx.Node | None:
    """Return the only user of a node if it calls ``target``."""
    user = next(iter(node.users)) if node is not None and len(node.users) == 1 else None
    return user if is_call(user, target) else None


def _product(a: fx.Node, b: fx.Node) -> fx.Node | None:
    """Return the only user of ``a`` if it is ``a * b``."""
    user = _only_user(a, aten.mul.Tensor)
    return user if user is not None and set(user.args) == {a, b} else None


def _used_within(x: fx.Node, nodes: set[fx.Node]) -> bool:
    """Whether all users of ``x`` are among the nodes."""
    return all(user in nodes for user in x.users)
