"""Forms of products that include more than the operations behind one of them: a norm in front, and a gate behind.

A gate is ``silu(a @ w) * (a @ v)``: two products of one input, merged, of which the kernel multiplies the results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from torch import fx

from ..core.epilogue import GATES, Kind, Step
from ..ops.operands import dtype_name
from .graph_call import GraphCall
from .matching import Product
from .merging import merged_call
from .nodes import EXTERN, feeds_products, is_call, readers, value_of, without_views

_GATE_OF: dict[str, Kind] = {activation: gate for gate, activation in GATES.items()}


class WideForm(NamedTuple):
    """A form with a norm in front of the products, or a gate behind them, or both.

    products: in the order of their columns. length: how many operations of the first one's chain the kernel computes.
    normed: whether it computes the norm in front. gate: the kind of the step at the end; None without a gate.
    """

    products: tuple[Product, ...]
    length: int
    normed: bool
    gate: Kind | None = None

    @property
    def call(self) -> GraphCall:
        """The GraphCall of this form."""
        first = self.products[0]
        if len(self.products) == 1:
            return first.call(self.length, normed=self.normed)
        call = merged_call(self.products, normed=self.normed)
        if self.gate is None:
            return call
        value = value_of(first.end(self.length))
        assert value is not None
        epilogue = (*call.problem.epilogue, Step(self.gate))
        return call._replace(
            problem=dataclasses.replace(call.problem, epilogue=epilogue, out_dtype=dtype_name(value.dtype))
        )

    @property
    def extent(self) -> int:
        """How much the form includes: a norm, a gate, or both."""
        return int(self.normed) + int(self.gate is not None)

    @property
    def ends_kernel(self) -> bool:
        """Whether a gate is all that Inductor's kernel behind the products computes."""
        return self.gate is not None and feeds_products(self.products[0].end(self.length))

    @property
    def end(self) -> fx.Node | None:
        """The last node of the operations behind the products that the kernel computes; None without any."""
        first = self.products[0]
        return first.end(self.length) if self.length > first.fixed else None

    def has_rows_in(self, stored: Collection[fx.Node]) -> bool:
        """Whether the graph stores the rows whose norm the kernel computes, if it computes one. stored: the results of
        products that it stores."""
        norm = self.products[0].norm if self.normed else None
        if norm is None:
            return True
        rows = without_views(norm.rows)
        return rows.op != "call_function" or rows in stored or is_call(rows, *EXTERN)


def wide_forms(
    products: Sequence[Product], groups: Sequence[tuple[Product, ...]], length_of: Callable[[Product], int]
) -> list[WideForm]:
    """Return the wide forms of a graph's products. groups: those that could be one product. length_of: returns how many
    operations of its chain one product computes by itself."""
    normed = _norm_groups(products, groups)
    forms = [WideForm(group, length_of(group[0]) if len(group) == 1 else group[0].fixed, True) for group in normed]
    behind_norms = {frozenset(map(id, group)) for group in normed}
    for group in groups:
        for gate in _gates(group):
            forms.append(gate)
            if frozenset(map(id, group)) in behind_norms:
                forms.append(gate._replace(normed=True))
    return forms


def _norm_groups(products: Sequence[Product], groups: Sequence[tuple[Product, ...]]) -> list[tuple[Product, ...]]:
    """Return the products that alone read the result of a norm: one, or all of a group that could be one product."""
    by_norm: dict[fx.Node, list[Product]] = {}
    for product in products:
        if product.norm is not None:
            by_norm.setdefault(product.norm.result, []).append(product)
    mergeable = {frozenset(map(id, group)) for group in groups}
    return [
        tuple(group)
        for result, group in by_norm.items()
        if readers(result) == {product.node for product in group}
        and (len(group) == 1 or frozenset(map(id, group)) in mergeable)
    ]


def _gates(group: Sequence[Product]) -> Iterator[WideForm]:
    """Yield the form with a gate of a group of two products: the one whose result passes through an activation is the
    first."""
    if len(group) != 2:
        return
    for gate, factor in (group, reversed(group)):
        length, kind = _gate_length(gate, factor)
        if length:
            yield WideForm((gate, factor), length, False, kind)
            return


def _gate_length(gate: Product, factor: Product) -> tuple[int, Kind | None]:
    """Return how many operations of a product's chain are an activation and the multiplication by another product's
    result, which nothing else reads, and the gate's kind; (0, None) where the chain does not begin so."""
    kinds: list[str] = []
    for length, link in enumerate(gate.chain[gate.fixed :], gate.fixed + 1):
        kinds += [bound.step.kind for bound in link.steps]
        if link.aux is None:
            continue
        result = without_views(factor.end(factor.fixed))
        is_gate = len(kinds) == 2 and kinds[0] in _GATE_OF and kinds[1] == "mul"
        if is_gate and without_views(link.aux) is result and readers(result) == {link.node}:
            return length, _GATE_OF[kinds[0]]
        return 0, None
    return 0, None
