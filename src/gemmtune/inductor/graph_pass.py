"""The pass over Inductor's graphs in which gemmtune chooses the products, before Inductor's own passes see them."""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .. import __version__
from ..core import devices
from ..core.problem import Dim, Problem
from ..dispatch.runtime import RUNTIME
from ..tuning.api import start_workers, tune_on_device
from ..tuning.sizes import Sizes
from ..tuning.tuner import inconclusive_summary
from .costs import MOST_ROWS, cost_of
from .equal_nodes import share_equal_nodes
from .graph_report import GraphReport, provenance, report_of
from .hooks import (
    PROVENANCE,
    CustomGraphPass,
    compiles_python,
    constant_inputs,
    disable_pdl,
    get_hash_for_files,
    is_pdl_safe,
    outside_of_compilation,
)
from .matching import Product, find_products
from .nodes import EXTERN, aten, is_call, is_view
from .operator import product as product_op
from .options import Options
from .plan_graph import Form, GraphPlan, Problems, device_of, problems_by_rows

if TYPE_CHECKING:
    from ..tuning.worker_pool import WorkerPool

log = logging.getLogger("gemmtune")

_SOURCES = tuple(str(path) for path in sorted(Path(__file__).parent.glob("*.py")))
_LOCK = threading.RLock()


class TunedMeanwhile(Exception):
    """Raised by the pass when it has tuned Problems that ``tune_ahead`` did not: the decisions are part of the key
    under which Inductor caches the graph, so that the backend compiles it again."""


class ProductPass(CustomGraphPass):
    """Replaces the products of a graph that gemmtune serves. options: the backend's. before: passes that the user set,
    which run first. restarts: whether ``TunedMeanwhile`` may be raised. asked: the keys of Problems that are not tuned,
    because that has just been tried; the pass adds those that it tunes. checks_pdl: whether programmatic dependent
    launch, which is on, must be off for graphs in which it is not safe (``hooks.is_pdl_safe``). on_report: called with
    each graph and its report. pools: workers by device, where some were started already; the pass uses them once, and
    ends them when it has tuned."""

    def __init__(
        self, options: Options, before: Sequence[Any] = (), *, restarts: bool = False, asked: set[str] | None = None,
        checks_pdl: bool = False, on_report: Callable[[fx.Graph, GraphReport], None] | None = None,
        pools: dict[torch.device, WorkerPool] | None = None,
    ) -> None:  # fmt: skip
        self.options, self.before, self.restarts, self.checks_pdl = options, tuple(before), restarts, checks_pdl
        self.on_report, self._pools = on_report, {} if pools is None else pools
        self.asked = set() if asked is None else asked
        self._descends = options.descends  # it is off while the graph's key is made (``hooks.compile_graph``)
        self._names_decisions = True

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.before:
            each(graph)
        if self.checks_pdl and not is_pdl_safe(graph):
            disable_pdl()
        if self.options.policy == "off":
            return
        if not compiles_python():
            log.info(
                "C++ code (AOTInductor, cpp_wrapper) cannot call gemmtune's kernels: PyTorch's own stay in this graph"
            )
            return
        with _LOCK, store_of(self.options):
            plan, unmatched = self._plan(graph)
            if not (plan.products or unmatched):
                self._report(graph, GraphReport(()))
                return
            if self.options.policy == "on-miss" and self._tune(plan) and self.restarts:
                raise TunedMeanwhile
            forms = plan.choose()
            report = report_of(plan, forms, unmatched)
            rewriter = Rewriter(graph)
            for form in forms:
                rewriter.replace(form)
            graph.eliminate_dead_code()
            graph.lint()
            log.info("%s", report.summary)
            for line in report.lines():
                log.debug("%s", line)
            self._report(graph, report)

    def tune_ahead(self, graph: fx.Graph) -> None:
        """Tune the Problems of a graph that the store has no decision for, and leave the graph as it is.

        Inductor prepares a graph further before it calls the pass, which tunes what only appears then.
        """
        if self.options.policy != "on-miss" or self.before or not compiles_python():
            return
        with _LOCK, store_of(self.options):
            self._tune(self._plan(copy.deepcopy(graph))[0])

    def _plan(self, graph: fx.Graph) -> tuple[GraphPlan, dict[fx.Node, str]]:
        """Return a graph's products that gemmtune may serve, and those that it cannot. Nodes that compute the same
        become one."""
        if any(is_call(node, *EXTERN) for node in graph.nodes):
            share_equal_nodes(graph)
        products, unmatched = find_products(graph, constant_inputs(graph), emulate=self.options.emulates_casts)
        return GraphPlan([p for p in products if devices.is_served(device_of(p))]), unmatched

    def _report(self, graph: fx.Graph, report: GraphReport) -> None:
        if self.on_report is not None:
            self.on_report(graph, report)

    def _tune(self, plan: GraphPlan) -> bool:
        """Tune the Problems that the store has no decision for. Return whether there are any."""
        tuned = False
        for device in {device_of(product): None for product in plan.products}:
            tuned = self._tune_on(device, plan) or tuned
        return tuned

    def _tune_on(self, device: torch.device, plan: GraphPlan) -> bool:
        """Tune a device's Problems that the store has no decision for, by one worker. Return whether there are any."""
        dynamic, first = plan.dynamic_keys, plan.first_problems()
        missing = self._untuned(first, device, dynamic) or self._untuned_others(plan, device, dynamic)
        store = RUNTIME.store()
        if not missing or store is None:
            return bool(missing)
        free = [(problem, count) for problem, count in missing if _free_dim(problem, dynamic) is not None]
        fixed = [(problem, count) for problem, count in missing if _free_dim(problem, dynamic) is None]
        with outside_of_compilation():
            pool = self._pools.pop(device, None) or start_workers(device, store)
        with closing(pool):
            while free:
                self._tune_dynamic(free, device, pool, dynamic)
                free = self._untuned_others(plan, device, dynamic, True)
            if fixed:
                more = functools.partial(self._other_problems, plan, device, dynamic)
                expected = [
                    problem
                    for (ran_on, problem) in _only(plan.expected_problems(), dynamic, False)
                    if ran_on == device and not _is_decided(problem, device)
                ]
                self._tune_now(fixed, device, pool, more=more, expected=expected)
        return True

    def _tune_dynamic(
        self, problems: list[tuple[Problem, int]], device: torch.device, pool: WorkerPool, dynamic: Collection[str]
    ) -> None:
        """Tune Problems with a symbolic M for the M of the options; those with a norm or a gate that kernels compute
        for few rows only, for these; and those with a symbolic batch for all batches. dynamic: their plan keys."""
        over_batch = [pair for pair in problems if _free_dim(pair[0], dynamic) == "batch"]
        if over_batch:
            self._tune_now(over_batch, device, pool, batches="all")
        by_rows: dict[int, list[tuple[Problem, int]]] = {}
        for problem, count in (pair for pair in problems if pair not in over_batch):
            _, rows = problems_by_rows(problem, device)[0]
            by_rows.setdefault(rows, []).append((problem, count))
        every_m: Sizes = self.options.multi_kernel_hints or "all"
        for rows, listed in sorted(by_rows.items(), reverse=True):
            self._tune_now(listed, device, pool, every_m if rows >= MOST_ROWS else range(1, rows + 1))

    def _untuned(self, problems: Problems, device: torch.device, dynamic: Collection[str]) -> list[tuple[Problem, int]]:
        """Return those of a device's Problems that were not tuned, and remember that they were asked for. dynamic: the
        plan keys of those that need a plan for a range of M."""
        index = RUNTIME.index(device)
        missing = []
        for (ran_on, problem), count in problems.items():
            if ran_on != device or problem.key in self.asked:
                continue
            dim = _free_dim(problem, dynamic)
            if dim is not None:
                is_tuned = index.tuned_plan(problem.plan_key_over(dim)) is not None
            else:
                is_tuned = cost_of(problem, device) is not None or _is_decided(problem, device)
            if not is_tuned:
                missing.append((problem, count))
        self.asked |= {problem.key for problem, _ in missing}
        return missing

    def _untuned_others(
        self, plan: GraphPlan, device: torch.device, dynamic: Collection[str], is_dynamic: bool | None = None
    ) -> list[tuple[Problem, int]]:
        """Return the Problems of ``GraphPlan.other_problems`` that were not tuned: the parts of merged products where
        there are no others. dynamic, is_dynamic: as for ``_only``; None: both kinds."""
        for problems in plan.other_problems():
            kind = problems if is_dynamic is None else _only(problems, dynamic, is_dynamic)
            if missing := self._untuned(kind, device, dynamic):
                return missing
        return []

    def _other_problems(
        self, plan: GraphPlan, device: torch.device, dynamic: Collection[str]
    ) -> list[tuple[Problem, int]]:
        """Return the Problems of a fixed M to tune after the first ones, by the decisions for these."""
        RUNTIME.refresh(RUNTIME.store())
        others = self._untuned_others(plan, device, dynamic, False)
        if others:
            log.info("tuning %d other problems of the graph", len(others))
        return others

    def _tune_now(
        self, problems: list[tuple[Problem, int]], device: torch.device, pool: WorkerPool, sizes: Sizes | None = None,
        batches: Sizes | None = None,
        more: Callable[[], list[tuple[Problem, int]]] | None = None, expected: Sequence[Problem] = (),
    ) -> None:  # fmt: skip
        store = RUNTIME.store()
        assert store is not None
        log.info("tuning %d problems of a graph on %s", len(problems), device)
        with outside_of_compilation():
            tune = functools.partial(
                tune_on_device,
                device=device, store=store, budget=self.options.budget, backends=self.options.backends, pool=pool,
            )  # fmt: skip
            decisions = tune(problems, m=sizes, batch=batches, more=more, expected=expected)
            # PyTorch's operators would serve these for as long as this process lives. Where most are undecided, the
            # machine is still busy.
            undecided = [Problem.from_dict(d.problem) for d in decisions if d.outcome == "inconclusive"]
            if sizes is None and batches is None and 0 < 2 * len(undecided) <= len(decisions):
                log.info("tuning %d problems again, since the machine was busy", len(undecided))
                decided = [decision for decision in decisions if decision.outcome != "inconclusive"]
                decisions = decided + tune([(problem, 1) for problem in undecided])
        RUNTIME.refresh(store)
        if words := inconclusive_summary(decisions):
            log.warning("%s", words)

    def uuid(self) -> Any:
        """Return what the pass's effect depends on: its sources, the options and all decisions of the store."""
        parts = [get_hash_for_files(_SOURCES), __version__, self.options.policy, self.options.emulates_casts]
        parts += [self.checks_pdl, self._descends]
        parts += [self.decisions() if self._names_decisions else "", *(_uuid_of(each) for each in self.before)]
        return None if None in parts else "|".join(str(part) for part in parts)

    def decisions(self) -> str:
        """Return a digest of all decisions of the store."""
        with store_of(self.options):
            return decisions_digest()

    @contextmanager
    def without_decisions(self) -> Iterator[None]:
        """Return a context in which ``uuid()`` does not depend on decisions."""
        self._names_decisions = False
        try:
            yield
        finally:
            self._names_decisions = True


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


def _only(problems: Problems, dynamic: Collection[str], is_dynamic: bool) -> Problems:
    """Return the Problems that need a plan for a range of M or of the batch, or the others. dynamic: the plan keys of
    the former."""
    return {key: count for key, count in problems.items() if (_free_dim(key[1], dynamic) is not None) is is_dynamic}


def _free_dim(problem: Problem, dynamic: Collection[str]) -> Dim | None:
    """Return the dimension whose plan key of the Problem is in ``dynamic``; None where neither is."""
    return next((dim for dim in problem.dims if problem.plan_key_over(dim) in dynamic), None)


def _is_decided(problem: Problem, device: torch.device) -> bool:
    index = RUNTIME.index(device)
    return any(point.m == problem.m for point in index.points(problem.plan_key))


class Rewriter:
    """Replaces products of one graph by ``gemmtune::product``."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._successors: dict[fx.Node, fx.Node] = {}

    def replace(self, form: Form) -> None:
        """Replace the nodes of a form's products. Nodes that nobody reads any more stay in the graph."""
        if len(form.products) == 1:
            self._replace_one(form.products[0], form)
        else:
            self._replace_merged(form.products, form)

    def _replace_one(self, product: Product, form: Form) -> None:
        end = product.end(form.length)
        with self._graph.inserting_before(end):
            aux = self._aux_nodes(product, form)
            result = self._product_node(product, form, [*product.weights, *aux])
            if end is not product.node:
                result = self._reshaped(result, product, form.length)
        self._replace_uses(end, result)

    def _replace_merged(self, products: Sequence[Product], form: Form) -> None:
        position = {node: index for index, node in enumerate(self._graph.nodes)}
        first = min(products, key=lambda product: position[product.node])
        weights = [node for index in range(len(first.weights)) for node in (p.weights[index] for p in products)]
        in_parts = first.aux_in_parts
        parts = [] if in_parts is None else [product.aux[in_parts] for product in products]
        with self._graph.inserting_before(first.node):
            shared = self._aux_nodes(first, form, without=form.call.aux_in_parts)
            result = self._product_node(first, form, [*weights, *parts, *shared])
        if form.gated:
            end = products[0].end(form.length)
            with self._graph.inserting_before(end):
                result = self._reshaped(result, products[0], form.length)
            self._replace_uses(end, result)
            return
        with self._graph.inserting_before(first.node):
            start, columns = 0, []
            for product in products:
                stop = start + product.columns
                value = result.meta["val"][:, start:stop]
                columns.append(self._call(aten.slice.Tensor, (result, 1, start, stop), value))
                start = stop
        for product, node in zip(products, columns, strict=True):
            end = product.end(product.fixed)
            if end is not product.node:  # the scale of an int8 weight is part of the product
                with self._graph.inserting_before(end):
                    node = self._reshaped(node, product, product.fixed)
            self._replace_uses(end, node)

    def _replace_uses(self, end: fx.Node, result: fx.Node) -> None:
        """Have the users of ``end`` read ``result``, which has its metadata but for the value and the provenance."""
        own = {name: result.meta[name] for name in ("val", PROVENANCE) if name in result.meta}
        result.meta = {**end.meta, **own}
        end.replace_all_uses_with(result)
        self._successors[end] = result

    def _current(self, node: fx.Node) -> fx.Node:
        """Return the node that has a node's value now."""
        while node in self._successors:
            node = self._successors[node]
        return node

    def _product_node(self, product: Product, form: Form, operands: Sequence[fx.Node]) -> fx.Node:
        a = self._rows(product) if form.normed else self._current(product.a)
        shape = (*product.node.meta["val"].shape[:-1], form.call.problem.columns)
        value = a.meta["val"].new_empty(shape, dtype=form.call.out_dtype)
        node = self._call(product_op, (a, list(operands), form.call.to_json()), value)
        node.meta = {**product.node.meta, "val": value, PROVENANCE: provenance(form)}
        return node

    def _rows(self, product: Product) -> fx.Node:
        """Return a node [M, K] of the rows that a product's norm reads."""
        assert product.norm is not None
        node = self._current(product.norm.rows)
        value = node.meta["val"]
        if value.dim() == 2:
            return node
        return self._call(aten.reshape.default, (node, [-1, value.shape[-1]]), value.reshape(-1, value.shape[-1]))

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> fx.Node:
        node = self._graph.call_function(target, args)
        node.meta["val"] = value
        return node

    def _reshaped(self, node: fx.Node, product: Product, length: int) -> fx.Node:
        """Return a node of ``node``'s elements in the shape of the result of the first ``length`` operations."""
        value = product.end(length).meta["val"]
        sizes: list[Any] = list(value.shape)
        free = [index for index, size in enumerate(sizes) if not isinstance(size, int)]
        views = [link.node for link in product.chain[:length] if is_view(link.node)]
        if len(free) == 1:
            sizes[free[0]] = -1
        elif free:  # the last view has the nodes of the symbolic sizes, as it made more than the product's one of them
            sizes = list(views[-1].args[1])  # type: ignore[arg-type]
        return self._call(aten.reshape.default, (node, sizes), value)

    def _aux_nodes(self, product: Product, form: Form, without: int | None = None) -> list[fx.Node]:
        """Return the nodes of the epilogue's tensors in the shapes of their axes. without: the position of one to leave
        out."""
        steps = [step for step in form.call.problem.epilogue if step.takes_tensor]
        result = []
        length = form.length if len(form.products) == 1 else product.fixed
        tensors = product.tensors(length, normed=form.normed)
        for index, (step, tensor) in enumerate(zip(steps, tensors, strict=True)):
            if index == without:
                continue
            node = self._current(tensor)
            value = node.meta["val"]
            if value.dim() != {"full": 2, "col": 1, "row": 1, "tensor": 0, "inner": 1}[step.axis]:
                shape = {"full": [-1, product.columns], "col": [product.columns], "row": [-1], "tensor": []}[step.axis]
                node = self._call(aten.reshape.default, (node, shape), value.reshape(shape))
            result.append(node)
        return result
