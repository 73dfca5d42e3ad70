"""The pass over Inductor's graphs in which gemmtune chooses the products, before Inductor's own passes see them."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from .. import __version__
from ..core import devices
from ..core.problem import Problem
from ..core.workloads import label
from ..dispatch.runtime import RUNTIME
from ..tuning.api import tune_on_device
from ..tuning.sizes import Sizes
from . import (
    call_site,
    costs,
    epilogues,
    graph_call,
    hooks,
    matching,
    nodes,
    operator,
    plan_graph,
    weight_forms,
)  # fmt: skip
from .matching import Product, find_products
from .nodes import aten, is_view, value_of
from .operator import product as product_op
from .options import Options
from .plan_graph import Form, GraphPlan, device_of

log = logging.getLogger("gemmtune")

_SOURCES = (
    __file__, *(str(m.__file__) for m in (
        call_site, costs, epilogues, graph_call, hooks, matching, nodes, operator, plan_graph, weight_forms,
    )),
)  # fmt: skip
_LOCK = threading.RLock()


class TunedMeanwhile(Exception):
    """Raised by the pass when it has tuned Problems: the decisions are part of the key under which Inductor caches the
    graph, so that the backend compiles it again."""


class ProductPass(CustomGraphPass):
    """Replaces the products of a graph that gemmtune serves. options: the backend's. before: passes that the user set,
    which run first. restarts: whether ``TunedMeanwhile`` may be raised. asked: the keys of Problems that are not tuned,
    because that has just been tried; the pass adds those that it tunes."""

    def __init__(
        self, options: Options, before: Sequence[Any] = (), *, restarts: bool = False, asked: set[str] | None = None
    ) -> None:
        self.options, self.before, self.restarts = options, tuple(before), restarts
        self.asked = set() if asked is None else asked

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.before:
            each(graph)
        if self.options.policy == "off" or not hooks.compiles_python():
            return
        with _LOCK, store_of(self.options):
            constants = hooks.constant_inputs(graph)
            products = find_products(graph, constants, emulate=self.options.emulates_casts)
            products = [p for p in products if devices.is_served(device_of(p))]
            if not products:
                return
            plan = GraphPlan(products)
            if self.options.policy == "on-miss":
                self._tune(plan)
            forms = plan.choose()
            for form in forms:
                replace(graph, form)
            graph.lint()
            _log(plan, forms)

    def _tune(self, plan: GraphPlan) -> None:
        """Tune the Problems that the store has no decision for. Raises TunedMeanwhile where ``restarts``."""
        dynamic = {product.problem(product.fixed).plan_key for product in plan.products if product.is_dynamic}
        tuned = False
        for device, missing in _missing(plan).items():
            problems = [(problem, count) for problem, count in missing if problem.key not in self.asked]
            self.asked |= {problem.key for problem, _ in problems}
            free = [(p, count) for p, count in problems if p.plan_key in dynamic]
            fixed = [(p, count) for p, count in problems if p.plan_key not in dynamic]
            if fixed:
                self._tune_now(fixed, device, None)
            if free:
                self._tune_now(free, device, self.options.multi_kernel_hints or "all")
            tuned = tuned or bool(problems)
        if tuned and self.restarts:
            raise TunedMeanwhile

    def _tune_now(self, problems: list[tuple[Problem, int]], device: torch.device, sizes: Sizes | None) -> None:
        store = RUNTIME.store()
        if store is None:
            return
        log.info("tuning %d problems of a graph on %s", len(problems), device)
        with hooks.outside_of_compilation():
            tune_on_device(problems, device, store, budget=self.options.budget, backends=self.options.backends, m=sizes)
        RUNTIME.refresh(store)

    def uuid(self) -> Any:
        """Return what the pass's effect depends on: its sources, the options and all decisions of the store."""
        with store_of(self.options):
            parts = [get_hash_for_files(_SOURCES), __version__, self.options.policy, self.options.emulates_casts]
            parts += [decisions_digest(), *(_uuid_of(each) for each in self.before)]
        return None if None in parts else "|".join(str(part) for part in parts)


def _uuid_of(each: Any) -> Any:
    return each.uuid() if isinstance(each, CustomGraphPass) else None


@contextmanager
def store_of(options: Options) -> Any:
    """Return a context in which the store of the options is in use; it stays in use."""
    if options.store is not None and RUNTIME.store() is not options.store:
        RUNTIME.refresh(options.store)
    yield


def decisions_digest() -> str:
    """Return a digest of all decisions of the store in use for this machine's devices."""
    parts = [
        RUNTIME.index(device).digest()
        for device in map(torch.device, devices.names())
        if devices.is_host(device.type) or devices.get(device.type).module.is_available()
    ]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def _missing(plan: GraphPlan) -> dict[torch.device, list[tuple[Problem, int]]]:
    """Return the Problems of a plan that were not tuned, by device."""
    missing: dict[torch.device, list[tuple[Problem, int]]] = {}
    for (device, problem), count in plan.problems().items():
        if costs.cost_of(problem, device) is None and not _is_decided(problem, device):
            missing.setdefault(device, []).append((problem, count))
    return missing


def _is_decided(problem: Problem, device: torch.device) -> bool:
    index = RUNTIME.index(device)
    return any(point.m == problem.m for point in index.points(problem.plan_key))


def replace(graph: fx.Graph, form: Form) -> None:
    """Replace the nodes of a form's products by ``gemmtune::product``, and erase what nobody reads any more."""
    if len(form.products) == 1:
        _replace_one(graph, form.products[0], form)
    else:
        _replace_merged(graph, form.products, form)
    graph.eliminate_dead_code()


def _replace_one(graph: fx.Graph, product: Product, form: Form) -> None:
    end = product.end(form.length)
    with graph.inserting_before(end):
        aux = _aux_nodes(graph, product, form)
        result = _product_node(graph, form, product.a, [*product.weights, *aux], [end], product)
        value, shaped = value_of(end), value_of(result)
        assert value is not None
        assert shaped is not None
        if len(value.shape) != len(shaped.shape) or end is not product.node:
            result = _call(graph, aten.reshape.default, (result, _shape_args(graph, product, end)), value)
    _hand_over(end, result)


def _replace_merged(graph: fx.Graph, products: Sequence[Product], form: Form) -> None:
    position = {node: index for index, node in enumerate(graph.nodes)}
    ordered = sorted(products, key=lambda product: position[product.node])
    weights = [node for index in range(len(products[0].weights)) for node in (p.weights[index] for p in products)]
    position_in_aux = products[0].aux_in_parts
    parts = [] if position_in_aux is None else [p.aux[position_in_aux] for p in products]
    ends = [product.end(product.fixed) for product in products]
    with graph.inserting_before(ordered[0].node):
        shared = _aux_nodes(graph, ordered[0], form, without=position_in_aux)
        result = _product_node(graph, form, ordered[0].a, [*weights, *parts, *shared], ends, ordered[0])
        start, slices = 0, []
        whole = value_of(result)
        assert whole is not None
        for product in products:
            value = whole[:, start : start + product.columns]
            slices.append(_call(graph, aten.slice.Tensor, (result, 1, start, start + product.columns), value))
            start += product.columns
    for product, end, columns in zip(products, ends, slices, strict=True):
        node = columns
        if end is not product.node:  # the scale of an int8 weight is part of the product
            with graph.inserting_before(end):
                shape = _shape_args(graph, product, end)
                node = _call(graph, aten.reshape.default, (columns, shape), end.meta["val"])
        _hand_over(end, node)


def _hand_over(end: fx.Node, result: fx.Node) -> None:
    """Have the users of ``end`` read ``result``, which has its metadata but for the value."""
    result.meta = {**{k: v for k, v in end.meta.items() if k != "val"}, "val": result.meta["val"]}
    end.replace_all_uses_with(result)


def _product_node(
    graph: fx.Graph, form: Form, a: fx.Node, operands: Sequence[fx.Node], ends: Iterable[fx.Node], product: Product
) -> fx.Node:
    rows = value_of(product.node)
    activations = value_of(a)
    assert rows is not None
    assert activations is not None
    shape = (*rows.shape[:-1], form.call.problem.n)
    value = activations.new_empty(shape, dtype=graph_call.out_dtype(form.call))
    node = _call(graph, product_op, (a, list(operands), form.call.to_json()), value)
    first = next(iter(ends))
    node.meta = {**{k: v for k, v in first.meta.items() if k != "val"}, "val": value}
    return node


def _call(graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = value
    return node


def _aux_nodes(graph: fx.Graph, product: Product, form: Form, without: int | None = None) -> list[fx.Node]:
    """Return the nodes of the epilogue's tensors in the shapes of their axes. without: the position of one to leave
    out."""
    steps = [step for step in form.call.problem.epilogue if step.takes_tensor]
    result = []
    for index, (step, node) in enumerate(zip(steps, product.tensors(max(form.length, product.fixed)), strict=True)):
        if index == without:
            continue
        value = value_of(node)
        assert value is not None
        dims = {"full": 2, "col": 1, "row": 1, "tensor": 0}[step.axis]
        if value.dim() == dims:
            result.append(node)
            continue
        shape = {"full": [-1, product.columns], "col": [product.columns], "row": [-1], "tensor": []}[step.axis]
        result.append(_call(graph, aten.reshape.default, (node, shape), value.reshape(shape)))
    return result


def _shape_args(graph: fx.Graph, product: Product, end: fx.Node) -> list[Any]:
    """Return the arguments of a reshape to the shape of ``end``: one of its sizes may be left open."""
    value = value_of(end)
    assert value is not None
    sizes: list[Any] = list(value.shape)
    free = [index for index, size in enumerate(sizes) if not isinstance(size, int)]
    if len(free) == 1:
        sizes[free[0]] = -1
        return sizes
    for index in free:
        sizes[index] = _size_node(graph, end, index)
    return sizes


def _size_node(graph: fx.Graph, end: fx.Node, index: int) -> Any:
    """Return a node of a symbolic size of ``end``: the view that gave it this shape has one."""
    node: Any = end
    while isinstance(node, fx.Node):
        if is_view(node) and len(node.args) > 1 and isinstance(node.args[1], list | tuple):
            return node.args[1][index]
        node = next((arg for arg in node.args if isinstance(arg, fx.Node)), None)
    raise ValueError("no node has the symbolic size of a product's result")


def _log(plan: GraphPlan, forms: Sequence[Form]) -> None:
    """Log each decision (debug) and one summary of the graph (info)."""
    served = sum(len(form.products) for form in forms)
    merged = sum(len(form.products) > 1 for form in forms)
    fused = sum(len(form.products) == 1 and form.length > form.products[0].fixed for form in forms)
    log.info(
        "gemmtune serves %d of %d products of a graph: %d merged ones, %d with the operations behind them",
        served, len(plan.products), merged, fused,
    )  # fmt: skip
    chosen = {id(product): form for form in forms for product in form.products}
    for product in plan.products:
        form = chosen.get(id(product))
        what = label(product.problem(product.fixed))
        if form is None:
            cost = costs.cost_of(product.problem(product.fixed), device_of(product))
            why = "it was not tuned" if cost is None else f"PyTorch's takes {1e6 * cost.seconds:.1f} us"
            log.debug("%s %s: Inductor's (%s)", product.node.name, what, why)
        else:
            log.debug("%s %s: %s, %.1f us", product.node.name, what, label(form.call.problem), 1e6 * form.seconds)
