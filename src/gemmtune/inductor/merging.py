"""Products of one input that are multiplied as one: by their weights side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import fx

from .graph_call import GraphCall
from .matching import Product


def merge_groups(products: Sequence[Product]) -> list[tuple[Product, ...]]:
    """Return the products of one input that could be one: by different constant weights, with equal steps."""
    groups: dict[object, list[Product]] = {}
    for product in products:
        if product.form != "matrix" and _is_mergeable(product):
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


def merged_call(group: Sequence[Product], *, normed: bool = False) -> GraphCall:
    """Return the GraphCall of a group: its columns are those of the products, one behind the other. normed: with the
    norm in front."""
    first = group[0]
    problem = first.problem(first.fixed, normed=normed)
    columns, in_parts = tuple(product.columns for product in group), first.aux_in_parts
    if in_parts is not None and normed:
        in_parts += len(problem.norm_steps)  # whose tensors are the first
    return GraphCall(dataclasses.replace(problem, n=sum(columns)), first.form, columns, in_parts)
