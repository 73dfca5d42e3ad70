"""Which forms of a graph's products serve: alone, with the operations that follow, or merged with others of one input.

Every form is a Problem that the store has a decision for, with the measured time of what would serve it. A product
that computes the pointwise operations behind it saves the kernel that Inductor would launch for them, if no operation
is left in it. One that adds a residual saves the kernels behind it a read. One that computes the norm in front of it
saves the norm's kernel, if nothing else reads its result and its rows are in memory anyway; two that are a gate and its
factor save the kernel that multiplies them. The cheapest set of forms is chosen; a product stays Inductor's where no
form of it is cheaper than PyTorch's own operator.

Tuning begins with the form that includes most of each product. On a GPU the others are not tuned where that is about as
fast as the device's memory allows for them (``costs.assumed_s``), nor, of few rows, without a residual or a gate where
the form with it serves; on a CPU where it is faster than PyTorch's form, if that is one that ``torch.compile`` would
run (``costs.has_fused_rival``), or if a native kernel multiplies by quantised weights. The parts of merged products
come last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import fx

from ..core.devices import is_host
from ..core.problem import Problem
from .costs import (
    MOST_ROWS,
    Cost,
    assumed_s,
    cost_of,
    gate_read_s,
    has_fused_rival,
    has_own_kernels,
    most_rows,
    norm_s,
    pointwise_s,
    residual_s,
)
from .graph_call import GraphCall
from .matching import Product
from .merging import merge_groups, merged_call
from .nodes import EXTERN, feeds_products, is_call, is_view, value_of, without_views
from .wide_forms import WideForm, wide_forms

_ATEN_PREFIX = "aten/"  # of the ids of PyTorch's candidates
_LEAST_SAVED_S = 1e-6  # a gate that saves less is not tuned
# What is assumed of a product alone on a CPU, over its share of a form that includes more, which was tuned. Operations
# take less time in a product's kernel than in one of Inductor's: 53.8 ms for a gate of 256 rows of bf16, 53.9 for its
# product, and 1.3 for Inductor's kernel (docs/adr/0018-norms-and-gates-are-steps.md).
_ALONE = 1.02
# What a residual adds to a product's kernel on a GPU for up to _FEW_ROWS rows: 0.7 us in the mean of four products of
# 16 and 64 rows, 0.0 to 1.4 (H200, benchmarks/results/compile-residuals-h200-20261130.txt).
_RESIDUAL_S, _FEW_ROWS = 0.7e-6, 64
_CLEAR = 0.99  # a form must take at most this share of the time of the forms that it replaces
# PyTorch's operator counts as this share of a time that was not measured in a race: the machine's speed varies.
_UNPAIRED = 0.9


@dataclasses.dataclass(frozen=True)
class Form:
    """A form that serves. products: more than one where they are merged. length: of the one product's chain.

    seconds: of its kernel. normed: whether the kernel computes the norm in front of the products. gated: whether it
    multiplies their results, which are the operations of the first one's chain.
    """

    products: tuple[Product, ...]
    call: GraphCall
    length: int
    seconds: float
    normed: bool = False
    gated: bool = False


@dataclasses.dataclass(frozen=True)
class _Alone:
    """How one product is served by itself.

    form: None where PyTorch's operator serves, or where the product was not tuned by itself. seconds: of its kernel.
    saved: the last node of the pointwise operations that the kernel includes, or None. is_assumed: whether the seconds
    are assumed.
    """

    form: Form | None
    seconds: float
    saved: fx.Node | None = None
    is_assumed: bool = False


class _Candidate(NamedTuple):
    """A form that may be tuned. extent: how much it includes; each form of a product has another extent."""

    products: tuple[Product, ...]
    problem: Problem
    extent: int

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The Problems that must be tuned: with a symbolic M also those without the norm, or without the gate, for more
        rows than kernels of products compute these for."""
        if not self.products[0].is_dynamic:
            return (self.problem,)
        return tuple(problem for problem, _ in problems_by_rows(self.problem, device_of(self.products[0])))


# The extents of a product's forms: alone, with the operations behind it, merged; wide forms come after them.
_PLAIN, _FUSED, _MERGED = range(3)

Problems = dict[tuple[torch.device, Problem], int]


class GraphPlan:
    """The forms of the products of one graph."""

    def __init__(self, products: Sequence[Product]) -> None:
        self.products = tuple(products)
        self.groups = merge_groups(products)
        self._ends = {product.end(product.fixed) for product in products}
        self._lengths = {id(product): self._fused_length(product) for product in products}
        wide = wide_forms(products, self.groups, lambda product: self._lengths[id(product)] or product.fixed)
        self._wide = list(filter(_is_worthwhile, wide))
        self._candidates = list(self._list_candidates())
        self._widest = self._widest_forms()

    @property
    def dynamic_keys(self) -> set[str]:
        """The plan keys of the Problems whose M, or batch, is symbolic."""
        dynamic = (candidate for candidate in self._candidates if candidate.products[0].is_dynamic)
        return {problem.plan_key_over(each.products[0].dim) for each in dynamic for problem in each.problems}

    def first_problems(self) -> Problems:
        """Return the Problems to tune first, by device, with the number of products that they stand for: of the form of
        each product that includes most; of all forms where nothing could be assumed of those that are not tuned."""
        return _counts(
            candidate
            for candidate in self._candidates
            if any(self._widest[id(p)] is candidate or not _may_be_assumed(p) for p in candidate.products)
        )

    def other_problems(self) -> tuple[Problems, ...]:
        """Return the Problems of the other forms of those products that the forms of ``first_problems`` do not serve
        yet, since they may be cheaper; and Problems to tune after these, by the decisions for them: the forms without
        a gate where no form with it serves, of few rows on a GPU; then the parts of products that may be merged, where
        the times that are assumed of the parts are less than the merged product's."""
        forms = self.choose()
        served = {id(product): form.call.problem for form in forms for product in form.products}
        merged = {id(product) for form in forms if len(form.products) > 1 for product in form.products}
        gated = {id(product) for form in forms if form.gated for product in form.products}
        others: list[_Candidate] = []
        without_gate: list[_Candidate] = []
        parts: list[_Candidate] = []
        for candidate in self._candidates:
            ids = set(map(id, candidate.products))
            if all(served.get(each) == self._widest[each].problem for each in ids):
                continue
            if self._is_assumed_part(candidate):
                parts.append(candidate)
            elif not self._is_beside_a_gate(candidate):
                others.append(candidate)
            elif not ids <= gated and not self._norm_was_tuned_with_gate(candidate):
                without_gate.append(candidate)
        parts = [part for part in parts if id(part.products[0]) not in merged]
        return _counts(others), _counts(without_gate), _counts(parts)

    def _is_assumed_part(self, candidate: _Candidate) -> bool:
        """Whether a candidate is one product alone, of several that may be merged, for which a time is assumed. It
        takes no less than that, so that it need not be tuned where the merged product is cheaper."""
        product = candidate.products[0]
        is_part = candidate.extent == _PLAIN and len(self._widest[id(product)].products) > 1
        return is_part and self._assumed_alone_s(product) is not None

    def expected_problems(self) -> Problems:
        """Return the Problems that ``other_problems`` is likely to return once the first ones are decided: on a GPU
        those without norms, gates and other operations, which may take longer in a product's kernel than in one of
        Inductor's; of few rows before these those with a gate or a residual, but without a norm."""
        expected = filter(self._is_expected, self._candidates)
        return _counts(sorted(expected, key=lambda candidate: candidate.extent, reverse=True))

    def _is_expected(self, candidate: _Candidate) -> bool:
        """Whether a candidate is the widest form of its products without what surrounds them, and a GPU's bandwidth
        tells a time that may be less than that form's."""
        product = candidate.products[0]
        widest = self._widest[id(product)]
        if candidate is widest or len(candidate.products) != len(widest.products) or _assumed_s(product) is None:
            return False
        if candidate.problem == widest.problem.without_norm() and self._has_few_rows(widest):
            return True
        return candidate.extent in (_PLAIN, _MERGED) and not self._is_assumed_from_residual(product)

    def _assumed_alone_s(self, product: Product) -> float | None:
        """Return the seconds that are assumed of a product that was not tuned by itself; None where nothing can be."""
        device, widest = device_of(product), self._widest[id(product)].problem
        seconds, from_residual = _assumed_s(product), self._is_assumed_from_residual(product)
        from_widest = seconds is None and _may_be_assumed_from(widest, device)
        cost = cost_of(widest, device) if from_residual or from_widest else None
        if cost is None or not cost.beats_torch:
            return seconds
        if from_widest and not has_fused_rival(widest) and cost.kernel.startswith(_ATEN_PREFIX):
            return None
        if from_residual:
            return max(seconds or 0.0, cost.seconds - _RESIDUAL_S)
        return _ALONE * cost.seconds * product.columns / widest.n

    def _is_assumed_from_residual(self, product: Product) -> bool:
        """Whether the time of a product that was not tuned by itself is assumed from that of its widest form: on a GPU
        of few rows, where that adds only a residual and the operations before it."""
        widest, length = self._widest[id(product)], self._lengths[id(product)]
        if not self._has_few_rows(widest) or widest.extent != _FUSED or length is None:
            return False
        return _adds_residual(product, length)

    def _is_beside_a_gate(self, candidate: _Candidate) -> bool:
        """Whether a form has no gate, and need not be tuned where one of the same products with their gate serves: on a
        GPU, for few rows. A gate takes a product's kernel no time with 16 rows (16x28672x4096 by int8 weights: 32.2 us
        with and without it; H200, benchmarks/results/compile-residuals-h200-20261130.txt), and Inductor's kernel some.
        With 32 rows it took 7.6 us (43.4 and 35.9; compile-gates-h200-20261201.txt), and no form with it served."""
        widest = self._widest[id(candidate.products[0])]
        return self._has_few_rows(widest) and widest.problem.gate is not None and candidate.problem.gate is None

    def _norm_was_tuned_with_gate(self, candidate: _Candidate) -> bool:
        """Whether a form has a norm and no gate, and the form with both was tuned. It is not the cheapest where that is
        not: its kernel takes about as long (32x28672x4096 by int8 weights 58.3 us, with the gate 57.0; H200,
        benchmarks/results/compile-gates-h200-20261201.txt), and Inductor's for the gate comes on top."""
        device, widest = device_of(candidate.products[0]), self._widest[id(candidate.products[0])].problem
        is_without_gate = candidate.problem.norm is not None and candidate.problem == widest.without_gate()
        return is_without_gate and cost_of(widest, device) is not None

    @staticmethod
    def _has_few_rows(form: _Candidate) -> bool:
        """Whether a form's products have few rows, in every call, on a GPU."""
        product = form.products[0]
        return not is_host(device_of(product).type) and not product.is_dynamic and form.problem.m <= _FEW_ROWS

    def _widest_forms(self) -> dict[int, _Candidate]:
        """Return the form of each product that includes most, by id."""
        widest: dict[int, _Candidate] = {}
        for candidate in sorted(self._candidates, key=lambda candidate: candidate.extent):
            widest |= dict.fromkeys(map(id, candidate.products), candidate)
        return widest

    def _list_candidates(self) -> Iterator[_Candidate]:
        """Yield all forms that may be tuned."""
        lengths = ((product, self._lengths[id(product)]) for product in self.products)
        stored = self._ends | {product.end(length) for product, length in lengths if length is not None}
        wide = [form for form in self._wide if form.has_rows_in(stored)]
        gates = {id(form.products[0]) for form in wide if form.gate is not None}
        for product in self.products:
            yield _Candidate((product,), product.problem(product.fixed), _PLAIN)
            length = None if id(product) in gates else self._lengths[id(product)]
            if length is not None:
                yield _Candidate((product,), product.problem(length), _FUSED)
        for group in self.groups:
            yield _Candidate(group, merged_call(group).problem, _MERGED)
        for form in wide:
            yield _Candidate(form.products, form.call.problem, _MERGED + form.extent)

    def _fused_length(self, product: Product) -> int | None:
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
        return source.op != "call_function" or source in self._ends or is_call(source, *EXTERN) or len(source.users) > 1

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
        for wide in self._cheapest_wide(alone, merged, stored):
            replaced = set(map(id, wide.products))
            forms = [*(form for form in forms if id(form.products[0]) not in replaced), wide]
        return forms

    def _cheapest_wide(
        self, alone: dict[int, _Alone], merged: dict[int, Form], stored: Collection[fx.Node]
    ) -> list[Form]:
        """Return the wide forms that are cheaper than the forms that were chosen for their products, with Inductor's
        kernels that they save; of several for the same products, the one that saves most."""
        best: dict[frozenset[int], tuple[float, Form]] = {}
        for wide in self._wide:
            call, device = wide.call, device_of(wide.products[0])
            cost = cost_of(call.problem, device)
            if cost is None or not cost.beats_torch or not wide.has_rows_in(stored):
                continue
            if not all(id(product) in alone for product in wide.products):
                continue
            present = self._present_s(wide, call.problem, cost, alone, merged)
            key, saved = frozenset(map(id, wide.products)), present - cost.seconds
            if cost.seconds < _CLEAR * present and saved > best.get(key, (0.0, None))[0]:
                form = Form(wide.products, call, wide.length, cost.seconds, wide.normed, bool(wide.gate))
                best[key] = saved, form
        return [form for _, form in best.values()]

    def _present_s(
        self, wide: WideForm, problem: Problem, cost: Cost, alone: dict[int, _Alone], merged: dict[int, Form]
    ) -> float:
        """Return the seconds of the forms that were chosen for a wide form's products, and of Inductor's kernels that
        the wide form saves. problem, cost: the wide form's."""
        device, chosen, end = device_of(wide.products[0]), merged.get(id(wide.products[0])), wide.end
        singles = [alone[id(product)] for product in wide.products] if chosen is None else []
        seconds = sum(single.seconds for single in singles) if chosen is None else chosen.seconds
        if wide.gate is not None and is_host(device.type) and has_fused_rival(problem) and problem.family == "mm":
            forms = [chosen] if chosen is not None else [single.form for single in singles]
            seconds = _seconds_in_race(cost, pointwise_s(problem, device), seconds, forms)
        if end is not None and all(single.saved is not end for single in singles):
            seconds += _gate_saved_s(wide, problem) if wide.gate else _saved_s(wide.products[0], wide.length)
        for product, single in zip(wide.products, singles, strict=False):
            length = self._lengths[id(product)]
            if single.saved not in (None, end) and length is not None:
                seconds -= _saved_s(product, length)
        return seconds + (norm_s(problem, device) if wide.normed else 0.0)

    def _alone(self) -> dict[int, _Alone]:
        """Return how each product is served by itself, by id; those of which nothing is known are not in it."""
        result: dict[int, _Alone] = {}
        saved: set[fx.Node] = set()
        for product in self.products:
            device, length = device_of(product), self._lengths[id(product)]
            plain = cost_of(product.problem(product.fixed), device)
            is_tuned, is_assumed = plain is not None, plain is None
            if plain is None:
                seconds = self._assumed_alone_s(product)
                if seconds is None:
                    continue
                plain = Cost(seconds, False)
            if product.torch_s is not None:
                torch_s = product.torch_s()
                if torch_s is None:
                    continue
                by_torch = Cost(_UNPAIRED * torch_s, False)
                is_assumed = is_assumed and plain <= by_torch
                plain = min(plain, by_torch)
            call = product.call(product.fixed)
            form = Form((product,), call, product.fixed, plain.seconds) if plain.beats_torch else None
            result[id(product)] = _Alone(form, plain.seconds, is_assumed=is_assumed)
            end = None if length is None else product.end(length)
            if length is None or end is None or end in saved:
                continue
            problem = product.problem(length)
            fused = cost_of(problem, device)
            if fused is None and not is_tuned:  # what is not tuned might include these operations at no cost
                result[id(product)] = _Alone(None, plain.seconds, end, is_assumed=is_assumed)
                saved.add(end)
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
        # On a CPU, PyTorch's operator takes as long for one product as for its parts; their times, which were measured
        # one after the other, differ by the host's noise.
        if cost is None or (is_host(device.type) and not cost.beats_torch):
            return None
        lost, slowness = self._saved_alone(group, alone), _slowness(call.problem, cost.seconds, device)
        singles = (alone[id(product)] for product in group)
        total = sum(single.seconds * (slowness if single.is_assumed else 1.0) for single in singles)
        return Form(tuple(group), call, group[0].fixed, cost.seconds) if cost.seconds + lost < _CLEAR * total else None

    def _saved_alone(self, group: Sequence[Product], alone: dict[int, _Alone]) -> float:
        """Return the seconds of Inductor's kernels that the forms of single products save."""
        saved = 0.0
        for product in group:
            length = self._lengths[id(product)]
            if alone[id(product)].saved is not None and length is not None:
                saved += _saved_s(product, length)
        return saved


def _is_worthwhile(form: WideForm) -> bool:
    """Whether there are kernels for a wide form, and it saves time that tuning could show."""
    problem = form.call.problem
    saves = form.normed or form.gate is None or _gate_saved_s(form, problem) > _LEAST_SAVED_S
    return saves and has_own_kernels(problem, device_of(form.products[0]))


def _gate_saved_s(form: WideForm, problem: Problem) -> float:
    """Return the seconds of Inductor's kernels that a gate saves: all of one, or reading twice as much."""
    device = device_of(form.products[0])
    return pointwise_s(problem, device) if form.ends_kernel else gate_read_s(problem, device)


def _seconds_in_race(cost: Cost, gate_s: float, seconds: float, forms: Sequence[Form | None]) -> float:
    """Return the seconds that the forms of two products would have taken in the race of their gate, whose cost is
    ``cost``; ``seconds``, which they took in their own races, where that is not known.

    A CPU's speed differs by 5% and more from one race to the next, and a gate saves less. PyTorch's product was timed
    in all races: in that of the gate with a kernel behind it that takes ``gate_s`` (of int8 weights, the plain op with
    a gate is another product). forms: None where PyTorch's operator serves.
    """
    served = [form for form in forms if form is not None]
    costs = [cost_of(form.call.problem, device_of(form.products[0])) for form in served]
    by_torch = [None if each is None else each.torch_s for each in costs]
    if cost.torch_s is None or cost.torch_s <= gate_s or None in by_torch:
        return seconds
    rest_s = seconds - sum(form.seconds for form in served)
    torch_s = rest_s + sum(each for each in by_torch if each is not None)
    return seconds / torch_s * (cost.torch_s - gate_s)


def _counts(candidates: Iterable[_Candidate]) -> Problems:
    """Return the Problems of forms by device, with the number of forms that have them."""
    counts: Problems = {}
    for candidate in candidates:
        for problem in candidate.problems:
            key = (device_of(candidate.products[0]), problem)
            counts[key] = counts.get(key, 0) + 1
    return counts


def problems_by_rows(problem: Problem, device: torch.device) -> list[tuple[Problem, int]]:
    """Return the Problems that serve a Problem at all M, each with the most rows for which there are kernels of it
    (``MOST_ROWS``: any number): the Problem itself; then, for more rows, without its norm, and without its gate."""
    result: list[tuple[Problem, int]] = []
    for each in dict.fromkeys((problem, problem.without_norm(), problem.without_norm().without_gate())):
        rows = most_rows(each, device) if each.norm or each.gate else MOST_ROWS
        if rows > (result[-1][1] if result else 0):
            result.append((each, rows))
    return result


def _slowness(problem: Problem, seconds: float, device: torch.device) -> float:
    """Return how many times longer than ``assumed_s`` a measured product takes, at least 1.0. A product that is limited
    by arithmetic takes about that many times longer in parts, too."""
    assumed = assumed_s(problem, device)
    return 1.0 if assumed is None else max(1.0, seconds / assumed)


def _assumed_s(product: Product) -> float | None:
    """Return the seconds of a product by the memory's bandwidth (``costs.assumed_s``); None where that is not known."""
    return assumed_s(product.problem(product.fixed), device_of(product))


def _may_be_assumed(product: Product) -> bool:
    """Whether a time may be assumed of a product that was not tuned by itself, once its widest form is decided."""
    return _assumed_s(product) is not None or _may_be_assumed_from(product.problem(product.fixed), device_of(product))


def _may_be_assumed_from(problem: Problem, device: torch.device) -> bool:
    """Whether the time of a product alone may be assumed from that of a form of it, a Problem, that is faster than
    PyTorch's: on a CPU, if ``torch.compile`` would run that form of PyTorch's; or, of quantised weights, if a native
    kernel serves (which the caller checks), which computes the steps in no more time than Inductor's kernel would."""
    return is_host(device.type) and (has_fused_rival(problem) or problem.family == "mixed_mm")


def device_of(product: Product) -> torch.device:
    """Return the device of a product's operands."""
    value = value_of(product.node)
    assert value is not None
    return value.device


def _ends_here(product: Product, length: int) -> bool:
    """Whether the first ``length`` operations of a chain are all of a pointwise kernel: only products and the graph's
    output read their result, and not all of them are views and conversions."""
    works = any(link.steps for link in product.chain[product.fixed : length])
    return works and not is_view(product.end(length)) and feeds_products(product.end(length))


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
