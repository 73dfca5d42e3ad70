"""Questions about the nodes of an ATen graph (functional, as Inductor's post-grad passes receive it)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten, prims = torch.ops.aten, torch.ops.prims

_VIEWS = frozenset(
    {
        aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim,
        aten.squeeze.dims, aten.squeeze.default,
    }
)  # fmt: skip
# Operators that Inductor calls, and does not compile into its pointwise kernels.
EXTERN = (
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten._int_mm.default, aten._scaled_mm.default,
    aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._weight_int4pack_mm.default, aten._weight_int4pack_mm_for_cpu.default,
)  # fmt: skip
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # those of Problems in graphs
CONVERT = prims.convert_element_type.default


def is_call(node: Any, *targets: Any) -> bool:
    """Whether a node calls one of these operators."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def is_view(node: Any) -> bool:
    """Whether a node only gives its first argument another shape, with the elements in the same order."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in _VIEWS


def without_views(node: fx.Node) -> fx.Node:
    """Return the node whose elements, in the same order, ``node`` has."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def readers(node: fx.Node) -> set[fx.Node]:
    """Return the nodes that read a node, directly or through views."""
    nodes: set[fx.Node] = set()
    for user in node.users:
        nodes |= readers(user) if is_view(user) else {user}
    return nodes


def feeds_products(node: fx.Node) -> bool:
    """Whether only operators that Inductor calls, and the graph's output, read a node, through views."""
    return all(user.op == "output" or is_call(user, *EXTERN) for user in readers(node))


def is_floating(node: Any) -> bool:
    """Whether a node's value is a tensor of one of ``FLOATS``."""
    value = value_of(node)
    return value is not None and value.dtype in FLOATS


def without_conversions(node: fx.Node) -> fx.Node:
    """Return the node of which ``node`` is a conversion between floating dtypes; the node itself where it is none."""
    while is_call(node, CONVERT, aten._to_copy.default) and is_floating(node) and is_floating(node.args[0]):
        node = node.args[0]  # type: ignore[assignment]
    return node


def factors(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the two factors of a product of tensors in both orders."""
    if is_call(node, aten.mul.Tensor):
        first, second = node.args
        if isinstance(first, fx.Node) and isinstance(second, fx.Node):
            yield first, second
            yield second, first


def value_of(node: Any) -> Tensor | None:
    """Return the fake tensor of a node's value; None if it is no single tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def sizes_of(node: Any) -> Sequence[Any]:
    """Return the sizes of a node's value, of which some may be symbolic; empty if it is no single tensor."""
    value = value_of(node)
    return () if value is None else value.shape


def hint(size: Any) -> int | None:
    """Return the size that a symbolic size had in the example inputs; None for an unbacked one."""
    if isinstance(size, int):
        return size
    symbolic = getattr(size, "node", None)
    if symbolic is None or not symbolic.has_hint():
        return None
    return int(symbolic.hint)


def is_dynamic(sizes: Sequence[Any]) -> bool:
    """Whether one of the sizes is symbolic."""
    return any(not isinstance(size, int) for size in sizes)


def meta_tensor(node: fx.Node) -> Tensor | None:
    """Return a tensor on the meta device with a node's dtype, and the sizes and strides that it had in the example
    inputs; None if it has no such tensor."""
    value = value_of(node)
    if value is None or value.layout is not torch.strided:
        return None
    sizes = [hint(size) for size in value.shape]
    strides = [hint(stride) for stride in value.stride()]
    if None in sizes or None in strides:
        return None
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")  # type: ignore[arg-type]


def transposed_source(node: fx.Node) -> fx.Node | None:
    """Return the matrix of which a node is the transpose; None if it is no transpose."""
    args: tuple[Any, ...] = node.args
    is_transpose = (
        is_call(node, aten.t.default)
        or (is_call(node, aten.permute.default) and list(args[1]) == [1, 0])
        or (is_call(node, aten.transpose.int) and sorted(dim % 2 for dim in args[1:]) == [0, 1])
    )
    return args[0] if is_transpose and isinstance(args[0], fx.Node) else None
