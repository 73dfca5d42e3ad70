"""Which forms of a graph's products serve: alone, with the operations that follow, or merged with others of one input.

Every form is a Problem that the store has a decision for, with the measured time of what would serve it. A product
that computes the pointwise operations behind it saves the kernel that Inductor would launch for them, if no operation
is left in it. One that adds a residual saves the kernels behind it a read. The cheapest set of forms is chosen; a
product stays Inductor's where no form of it is cheaper than PyTorch's own operator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

from ..core.problem import Problem
from .costs import cost_of, pointwise_s, residual_s
from .graph_call import GraphCall
from .matching import Product
from .nodes import aten, is_call, is_view, value_of, without_views

_CLEAR = 0.99  # a form must take at most this share of the time of the forms that it replaces

# Operators that Inductor calls, and does not compile into its pointwise kernels.
_EXTERN = (
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten._int_mm.default, aten._scaled_mm.default,
    aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Form:
    """A form that serves. products: more than one where they are merged. length: of the one product's chain.

    seconds: of its kernel.
    """

    products: tuple[Product, ...]
    call: GraphCall
    length: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Alone:
    """How one product is served by itself.

    form: None where PyTorch's operator serves. seconds: of its kernel. saved: the last node of the pointwise operations
    that the kernel includes, or None.
    """

    form: Form | None
    seconds: float
    saved: fx.Node | None = None


class GraphPlan:
    """The forms of the products of one graph."""

    def __init__(self, products: Sequence[Product]) -> None:
        self.products = tuple(products)
        self.groups = merge_groups(products)
        self._ends = {product.end(product.fixed) for product in products}

    def problems(self) -> dict[tuple[torch.device, Problem], int]:
        """Return the Problems of all forms by device, with the number of products that they stand for."""
        counts: dict[tuple[torch.device, Problem], int] = {}
        for product in self.products:
            for length in {product.fixed, self.fused_length(product)}:
                if length is not None:
                    key = (device_of(product), product.problem(length))
                    counts[key] = counts.get(key, 0) + 1
        for group in self.groups:
            key = (device_of(group[0]), merged_call(group).problem)
            counts[key] = counts.get(key, 0) + 1
        return counts

    def fused_length(self, product: Product) -> int | None:
        """Return the length of a product's chain that saves a pointwise kernel, or a read of a residual; None if none
        does."""
        length = product.fixed
        for link in product.chain[product.fixed :]:
            if link.aux is not None and not self._is_in_memory(link.aux):
                break
            length += 1
        while length > product.fixed and not (_ends_here(product, length) or _adds_residual(product, length)):
            length -= 1
        return length if length > product.fixed else None

    def _is_in_memory(self, node: fx.Node) -> bool:
        """Whether the graph stores a node's value, so that a kernel may read it: inputs, products, and what several
        operations read."""
        source = without_views(node)
        return (
            source.op != "call_function" or source in self._ends or is_call(source, *_EXTERN) or len(source.users) > 1
        )

    def choose(self) -> list[Form]:
        """Return the forms that serve, by the store's decisions. Products without one are Inductor's."""
        alone = self._alone()
        merged: dict[int, Form] = {}
        for group in self.groups:
            form = self._merged(group, alone)
            if form is not None:
                merged |= dict.fromkeys(map(id, group), form)
        forms = list({id(form): form for form in merged.values()}.values())
        single = (alone.get(id(product)) for product in self.products if id(product) not in merged)
        return forms + [each.form for each in single if each is not None and each.form is not None]

    def _alone(self) -> dict[int, _Alone]:
        """Return how each product is served by itself, by id; those that were not tuned are not in it."""
        result: dict[int, _Alone] = {}
        saved: set[fx.Node] = set()
        for product in self.products:
            device, length = device_of(product), self.fused_length(product)
            plain = cost_of(product.problem(product.fixed), device)
            if plain is None:
                continue
            call = product.call(product.fixed)
            form = Form((product,), call, product.fixed, plain.seconds) if plain.beats_torch else None
            result[id(product)] = _Alone(form, plain.seconds)
            end = None if length is None else product.end(length)
            if length is None or end is None or end in saved:
                continue
            problem = product.problem(length)
            fused = cost_of(problem, device)
            if fused is None or not fused.beats_torch:
                continue
            if fused.seconds < _CLEAR * (plain.seconds + _saved_s(product, length)):
                form = Form((product,), product.call(length), length, fused.seconds)
                result[id(product)] = _Alone(form, fused.seconds, end)
                saved.add(end)
        return result

    def _merged(self, group: Sequence[Product], alone: dict[int, _Alone]) -> Form | None:
        """Return the form in which a group is one product, if that is cheaper than all of them alone."""
        if not all(id(product) in alone for product in group):
            return None
        call, device = merged_call(group), device_of(group[0])
        cost = cost_of(call.problem, device)
        if cost is None:
            return None
        lost = 0.0  # what forms of single products save
        for product in group:
            each, length = alone[id(product)], self.fused_length(product)
            if each.saved is not None and length is not None:
                lost += _saved_s(product, length)
        total = sum(alone[id(product)].seconds for product in group)
        return Form(tuple(group), call, group[0].fixed, cost.seconds) if cost.seconds + lost < _CLEAR * total else None


def device_of(product: Product) -> torch.device:
    """Return the device of a product's operands."""
    value = value_of(product.node)
    assert value is not None
    return value.device


def _ends_here(product: Product, length: int) -> bool:
    """Whether the first ``length`` operations of a chain are all of a pointwise kernel: only products and the graph's
    output read their result, and not all of them are views and conversions."""
    works = any(link.steps for link in product.chain[product.fixed : length])
    return works and not is_view(product.end(length)) and _feeds_products(product.end(length))


def _adds_residual(product: Product, length: int) -> bool:
    """Whether the last one of the first ``length`` operations adds a matrix of the result's shape."""
    steps = product.chain[length - 1].steps
    if not steps or steps[-1].step.kind != "add":
        return False
    tensor = steps[-1].tensor
    return tensor is not None and tensor.shape[-1] == product.columns


def _saved_s(product: Product, length: int) -> float:
    """Return the seconds of Inductor's kernels that a product saves which includes ``length`` operations."""
    problem, device = product.problem(length), device_of(product)
    return pointwise_s(problem, device) if _ends_here(product, length) else residual_s(problem, device)


def _feeds_products(node: fx.Node) -> bool:
    """Whether only products and the graph's output read a node, through views."""
    for user in node.users:
        if is_view(user):
            if not _feeds_products(user):
                return False
        elif user.op != "output" and not is_call(user, *_EXTERN):
            return False
    return True


def merge_groups(products: Sequence[Product]) -> list[tuple[Product, ...]]:
    """Return the products of one input that could be one: by different constant weights, with equal steps."""
    groups: dict[object, list[Product]] = {}
    for product in products:
        if product.form in ("linear", "weight_only") and _is_mergeable(product):
            problem = product.problem(product.fixed)
            steps = tuple(step.key for step in problem.epilogue)
            key = (
                product.source, product.form, problem.family, problem.m, problem.k, problem.a, problem.b,
                problem.out_dtype, steps, product.aux_in_parts, _shared_aux(product),
            )  # fmt: skip
            groups.setdefault(key, []).append(product)
    distinct = (tuple(group) for group in groups.values() if len({p.weights[0] for p in group}) == len(group) > 1)
    return list(distinct)


def _is_mergeable(product: Product) -> bool:
    """Whether the columns of a product could be some of another one's: no tensor of its steps has a value for each
    element of the result, and one at most has a value for each column, which is constant."""
    steps = [step for step in product.problem(product.fixed).epilogue if step.takes_tensor]
    columns = [step for step in steps if step.axis == "col"]
    if any(step.axis == "full" for step in steps):
        return False
    return len(columns) == (0 if product.aux_in_parts is None else 1)


def _shared_aux(product: Product) -> tuple[fx.Node, ...]:
    """Return the nodes of the steps' tensors that merged products have in common."""
    return tuple(node for index, node in enumerate(product.aux) if index != product.aux_in_parts)


def merged_call(group: Sequence[Product]) -> GraphCall:
    """Return the GraphCall of a group: its columns are those of the products, one behind the other."""
    first = group[0]
    problem = first.problem(first.fixed)
    columns = tuple(product.columns for product in group)
    return GraphCall(dataclasses.replace(problem, n=sum(columns)), first.form, columns, first.aux_in_parts)
