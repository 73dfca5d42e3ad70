"""What became of the products of a graph: the kernel and the form of each, and why others stayed Inductor's."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

from ..core.errors import GemmtuneError
from ..core.problem import Problem
from ..core.workloads import label
from ..dispatch.runtime import RUNTIME, current_target
from .costs import Cost, cost_of
from .matching import Product
from .plan_graph import Form, GraphPlan, device_of

FormName = Literal["alone", "fused", "merged", "inductor"]


@dataclass(frozen=True)
class ProductReport:
    """One product of a graph.

    nodes: the names of the graph's nodes that its kernel computes, in order, a norm's result first. problem: the
    Problem in short. key: the Problem's key. form: ``alone``; ``fused`` with the operations behind it; ``merged`` with
    other products of its input; ``inductor`` where it stayed PyTorch's operator. kernel: the candidate's id; empty for
    PyTorch's. seconds: of one call by the store's decision, or None. ratio: the median and the interval of the kernel's
    time over PyTorch's in the paired test, or None. reason: why it stayed Inductor's; empty for others. normed: whether
    the kernel computes the norm in front. gated: whether it multiplies the product by another one of its input.
    """

    nodes: tuple[str, ...]
    problem: str
    key: str
    form: FormName
    kernel: str = ""
    seconds: float | None = None
    ratio: tuple[float, float, float] | None = None
    reason: str = ""
    normed: bool = False
    gated: bool = False

    def __str__(self) -> str:
        text = f"{', '.join(self.nodes)}: {self.problem}"
        if self.form == "inductor":
            return f"{text}: Inductor's ({self.reason})"
        ratio = "" if self.ratio is None else "; {:.3f}x [{:.3f}-{:.3f}] of PyTorch's time".format(*self.ratio)
        seconds = "" if self.seconds is None else f", {1e6 * self.seconds:.1f} us"
        return f"{text}: {self.form}, {self.kernel}{seconds}{ratio}"


@dataclass(frozen=True)
class GraphReport:
    """The products of one graph, in order. unmatched: nodes that are products and no Problem, as (name, reason)."""

    products: tuple[ProductReport, ...]
    unmatched: tuple[tuple[str, str], ...] = ()

    def count(self, form: FormName) -> int:
        """Return the number of products in a form."""
        return sum(product.form == form for product in self.products)

    @property
    def summary(self) -> str:
        """One line about the graph."""
        total = len(self.products) + len(self.unmatched)
        served = len(self.products) - self.count("inductor")
        normed = sum(product.normed for product in self.products)
        gated = sum(product.gated for product in self.products)
        return (
            f"gemmtune serves {served} of {total} products of a graph: {self.count('merged')} merged ones, "
            f"{self.count('fused')} with the operations behind them, {normed} with the norm in front of them, "
            f"{gated} in gates"
        )

    def lines(self) -> list[str]:
        """Return a line for each product."""
        return [*map(str, self.products), *(f"{name}: not matched ({reason})" for name, reason in self.unmatched)]


def report_of(plan: GraphPlan, forms: Sequence[Form], unmatched: Mapping[fx.Node, str]) -> GraphReport:
    """Return the report of a graph whose products ``forms`` serve; products in no form are Inductor's."""
    chosen = {id(product): form for form in forms for product in form.products}
    reports = [_report(product, chosen.get(id(product))) for product in plan.products]
    return GraphReport(tuple(reports), tuple((node.name, reason) for node, reason in unmatched.items()))


def provenance(form: Form) -> str:
    """Return a form's products, kernel and measured ratio in one line, for the generated code."""
    reports = [_report(product, form) for product in form.products]
    return str(replace(reports[0], nodes=tuple(node for report in reports for node in report.nodes)))


def _report(product: Product, form: Form | None) -> ProductReport:
    device = device_of(product)
    if form is None:
        problem = product.problem(product.fixed)
        return ProductReport(
            _nodes(product, product.fixed), _label(product, problem), problem.key, "inductor",
            reason=_why_not_served(product, cost_of(problem, device)),
        )  # fmt: skip
    problem, cost = form.call.problem, cost_of(form.call.problem, device)
    name: FormName = "merged" if len(form.products) > 1 else "fused" if form.length > product.fixed else "alone"
    kernel = "" if cost is None else cost.kernel
    length = form.length if product is form.products[0] else product.fixed
    return ProductReport(
        _nodes(product, length, normed=form.normed), _label(product, problem), problem.key, name, kernel, form.seconds,
        _ratio(problem.key, kernel, device, RUNTIME.generation) if product.torch_s is None else None,
        normed=form.normed, gated=form.gated,
    )  # fmt: skip


def _label(product: Product, problem: Problem) -> str:
    """Return a Problem in short. Where M, or the batch, is symbolic, the times of a report are those at the
    Problem's."""
    others = "M" if product.dim == "m" else "batches"
    return f"{label(problem)} (and all other {others})" if product.is_dynamic else label(problem)


def _nodes(product: Product, length: int, *, normed: bool = False) -> tuple[str, ...]:
    first = (product.norm.result.name,) if normed and product.norm is not None else ()
    return (*first, product.node.name, *(link.node.name for link in product.chain[:length]))


def _why_not_served(product: Product, cost: Cost | None) -> str:
    """Return why no kernel of gemmtune's serves a product. cost: of its Problem."""
    if cost is None:
        return "it was not tuned"
    seconds = cost.seconds if product.torch_s is None else product.torch_s()
    return "PyTorch's operator was not timed" if seconds is None else f"PyTorch's operator takes {1e6 * seconds:.1f} us"


@functools.lru_cache(maxsize=256)
def _ratio(key: str, kernel: str, device: torch.device, generation: int) -> tuple[float, float, float] | None:
    """Return the ratio, with its interval, of the paired test that a kernel won for a Problem; None where there is no
    record. Remembered for a generation of the runtime: the layers of a model have equal Problems."""
    store = RUNTIME.store()
    try:
        decision = None if store is None else store.get(current_target(device), key)
    except GemmtuneError:  # a report must not fail for a store that cannot be read now
        return None
    layouts = () if decision is None else decision.layouts.values()
    return next(((row.ratio, row.ratio_lo, row.ratio_hi) for row in layouts if row.candidate == kernel), None)
