"""Which forms of a graph's products serve: alone, with the operations that follow, or merged with others of one input.

Every form is a Problem that the store has a decision for, with the measured time of what would serve it. A product
that computes the pointwise operations behind it saves the kernel that Inductor would launch for them, if no operation
is left in it. One that adds a residual saves the kernels behind it a read. One that computes the norm in front of it
saves the norm's kernel, if nothing else reads its result and its rows are in memory anyway. The cheapest set of forms
is chosen; a product stays Inductor's where no form of it is cheaper than PyTorch's own operator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import torch
from torch import fx

from ..core.problem import Problem
from .costs import cost_of, has_own_kernels, norm_s, pointwise_s, residual_s
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

    seconds: of its kernel. normed: whether the kernel computes the norm in front of the products.
    """

    products: tuple[Product, ...]
    call: GraphCall
    length: int
    seconds: float
    normed: bool = False


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
        self._normed_groups = norm_groups(products, self.groups)
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
        stored = self._ends | {product.end(length) for product, length in self._fused_lengths()}
        for group in self._normed_groups:
            key = (device_of(group[0]), self._normed_call(group).problem)
            if _has_rows_in(stored, group[0]) and has_own_kernels(key[1], key[0]):
                counts[key] = counts.get(key, 0) + 1
        return counts

    def _fused_lengths(self) -> list[tuple[Product, int]]:
        lengths = ((product, self.fused_length(product)) for product in self.products)
        return [(product, length) for product, length in lengths if length is not None]

    def _normed_call(self, group: Sequence[Product]) -> GraphCall:
        """Return the GraphCall of a group of products with the norm in front of them."""
        if len(group) > 1:
            return merged_call(group, normed=True)
        return group[0].call(self._normed_length(group[0]), normed=True)

    def _normed_length(self, product: Product) -> int:
        """Return how many operations of its chain a product computes which computes the norm in front of it."""
        return self.fused_length(product) or product.fixed

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
        single = [alone[id(p)].form for p in self.products if id(p) not in merged and id(p) in alone]
        forms = [*{id(form): form for form in merged.values()}.values(), *(form for form in single if form is not None)]
        stored = self._ends | {form.products[0].end(form.length) for form in forms if len(form.products) == 1}
        for group in self._normed_groups:
            normed = self._normed(group, alone, merged) if _has_rows_in(stored, group[0]) else None
            if normed is not None:
                forms = [form for form in forms if form.products[0] not in group]
                forms.append(normed)
        return forms

    def _normed(self, group: Sequence[Product], alone: dict[int, _Alone], merged: dict[int, Form]) -> Form | None:
        """Return the form in which a group computes the norm in front of it, if that is cheaper than the norm's kernel
        and the forms that were chosen for the group."""
        call, device, length = self._normed_call(group), device_of(group[0]), group[0].fixed
        cost = cost_of(call.problem, device)
        if cost is None or not cost.beats_torch or not all(id(product) in alone for product in group):
            return None
        chosen = merged.get(id(group[0]))
        before = sum(alone[id(product)].seconds for product in group) if chosen is None else chosen.seconds
        if len(group) == 1:
            length, form = self._normed_length(group[0]), alone[id(group[0])].form
            if length != (group[0].fixed if form is None else form.length):
                return None
        elif chosen is None:
            before -= self._saved_alone(group, alone)
        if cost.seconds < _CLEAR * (before + norm_s(call.problem, device)):
            return Form(tuple(group), call, length, cost.seconds, normed=True)
        return None

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
        lost = self._saved_alone(group, alone)
        total = sum(alone[id(product)].seconds for product in group)
        return Form(tuple(group), call, group[0].fixed, cost.seconds) if cost.seconds + lost < _CLEAR * total else None

    def _saved_alone(self, group: Sequence[Product], alone: dict[int, _Alone]) -> float:
        """Return the seconds of Inductor's kernels that the forms of single products save."""
        saved = 0.0
        for product in group:
            length = self.fused_length(product)
            if alone[id(product)].saved is not None and length is not None:
                saved += _saved_s(product, length)
        return saved


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


def norm_groups(products: Sequence[Product], groups: Sequence[tuple[Product, ...]]) -> list[tuple[Product, ...]]:
    """Return the products that alone read the result of a norm: one, or all of a group that could be one product."""
    readers: dict[fx.Node, list[Product]] = {}
    for product in products:
        if product.norm is not None and not product.is_dynamic:
            readers.setdefault(product.norm.result, []).append(product)
    mergeable = {frozenset(map(id, group)) for group in groups}
    return [
        tuple(group)
        for result, group in readers.items()
        if _readers(result) == {product.node for product in group}
        and (len(group) == 1 or frozenset(map(id, group)) in mergeable)
    ]


def _readers(node: fx.Node) -> set[fx.Node]:
    """Return the nodes that read a node, directly or through views."""
    found: set[fx.Node] = set()
    for user in node.users:
        found |= _readers(user) if is_view(user) else {user}
    return found


def _has_rows_in(stored: Collection[fx.Node], product: Product) -> bool:
    """Whether the graph stores the rows that a product's norm reads. stored: the results of products that it stores."""
    assert product.norm is not None
    rows = without_views(product.norm.rows)
    return rows.op != "call_function" or rows in stored or is_call(rows, *_EXTERN)


def merged_call(group: Sequence[Product], *, normed: bool = False) -> GraphCall:
    """Return the GraphCall of a group: its columns are those of the products, one behind the other. normed: with the
    norm in front."""
    first = group[0]
    problem = first.problem(first.fixed, normed=normed)
    columns, in_parts = tuple(product.columns for product in group), first.aux_in_parts
    if in_parts is not None and normed:
        in_parts += 1  # the norm's weight is the first of the tensors
    return GraphCall(dataclasses.replace(problem, n=sum(columns)), first.form, columns, in_parts)
