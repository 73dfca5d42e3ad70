"""Which Problems of a graph are tuned: those of the widest forms first, the others where they may be cheaper."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gemmtune.backends.aten.quantized import INT8PACK_ROWS
from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Problem
from gemmtune.core.workloads import build
from gemmtune.inductor import graph_pass, matching, plan_graph
from gemmtune.inductor.costs import Cost, pointwise_s
from gemmtune.inductor.graph_pass import ProductPass
from gemmtune.inductor.matching import DYNAMIC_M, find_products
from gemmtune.inductor.options import Options
from gemmtune.inductor.plan_graph import GraphPlan, Problems
from gemmtune.store import MemoryStore
from helpers.graphs import trace, trace_dynamic

CPU = torch.device("cpu")
X, W, U, DOWN = (torch.randn(*shape).bfloat16() for shape in ((3, 64), (48, 64), (48, 64), (64, 48)))
GAIN = torch.rand(64).bfloat16()
RESIDUALS = torch.randn(INT8PACK_ROWS + 1, 64).bfloat16()


def block(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, gain: Tensor) -> Tensor:
    wide = x.float()
    h = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * gain
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


GATES, RESIDUAL = ("rms_norm", "swiglu"), ("add",)  # the forms of the block that include most


def traced() -> Any:
    """Return the graph of ``block``, whose inputs after the first are constant."""
    return trace(block, X, W, U, DOWN, GAIN).graph


def dynamic_trace() -> Any:
    """Return ``block`` with a symbolic number of rows, 3 in the first call."""
    return trace_dynamic(block, X, W, U, DOWN, GAIN)


def plan() -> GraphPlan:
    graph = traced()
    products, _ = find_products(graph, frozenset(list(graph.nodes)[1:5]), emulate=False)
    return GraphPlan(products)


def kinds(problems: Problems | Iterable[tuple[Problem, int]]) -> set[tuple[int, tuple[str, ...]]]:
    """Return the columns and the kinds of the steps of Problems."""
    listed = (
        [problem for _, problem in problems] if isinstance(problems, dict) else [problem for problem, _ in problems]
    )
    return {(problem.n, tuple(step.kind for step in problem.epilogue)) for problem in listed}


ONE_OF_TWO = ("one of two",)  # in place of the kinds of the steps, of which a product that may be merged has none


def other_kinds() -> tuple[set[tuple[int, tuple[str, ...]]], set[tuple[int, tuple[str, ...]]]]:
    """Return ``kinds`` of the two sets of other Problems of ``block``."""
    others, without_gate, parts = plan().other_problems()
    assert not without_gate  # on a GPU only
    return kinds(others), kinds(parts)


NORMED_PAIR = {(48, ()), (96, ()), (96, GATES), (96, ("rms_norm",)), (96, ("swiglu",))}
LESS_WIDE = NORMED_PAIR - {(96, GATES)}
SLOW: dict[tuple[str, ...], float] = {(): 5.0, ("rms_norm",): 5.0, ("swiglu",): 5.0}
EVERY = NORMED_PAIR | {(64, ()), (64, RESIDUAL)}


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], float]:
    """Have kernels for every form, and assume 1 second of products that were not tuned. Returns the seconds of tuned
    Problems by the kinds of their steps, or ONE_OF_TWO; the test fills it."""
    seconds: dict[tuple[str, ...], float] = {}

    def cost(problem: Problem, device: torch.device) -> Cost | None:
        steps = ONE_OF_TWO if problem.n == 48 else tuple(step.kind for step in problem.epilogue)
        return Cost(seconds[steps], True) if steps in seconds else None

    monkeypatch.setattr(plan_graph, "has_own_kernels", lambda *_: True)
    monkeypatch.setattr(plan_graph, "cost_of", cost)
    monkeypatch.setattr(graph_pass, "cost_of", cost)
    monkeypatch.setattr(plan_graph, "assumed_s", lambda *_: 1.0)
    return seconds


def test_symbolic_rows_are_those_of_the_first_call_on_a_cpu_and_always_the_same_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for host, rows in ((True, 3), (False, DYNAMIC_M)):
        monkeypatch.setattr(matching, "is_host", lambda kind, host=host: host)
        for traced_graph, expected in ((trace(block, X, W, U, DOWN, GAIN), 3), (dynamic_trace(), rows)):
            graph = traced_graph.graph
            products, _ = find_products(graph, frozenset(list(graph.nodes)[1:5]), emulate=False)
            assert {product.problem(product.fixed).m for product in products} == {expected}


def test_widest_forms_come_first(decided: dict[tuple[str, ...], float]) -> None:
    assert kinds(plan().first_problems()) == {(96, GATES), (64, RESIDUAL)}


def test_all_forms_come_first_where_nothing_is_assumed(
    decided: dict[tuple[str, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_graph, "assumed_s", lambda *_: None)
    monkeypatch.setattr(plan_graph, "is_host", lambda kind: False)
    assert kinds(plan().first_problems()) == EVERY
    assert plan().choose() == []


@pytest.mark.parametrize(
    ("losing", "others", "chosen"),
    [
        (set[tuple[str, ...]](), set[tuple[int, tuple[str, ...]]](), [1, 2]),
        ({GATES}, NORMED_PAIR, [1]),
        ({RESIDUAL}, {(64, ()), (64, RESIDUAL)}, [2]),
        ({GATES, RESIDUAL}, EVERY, []),
    ],
)
def test_other_forms_are_tuned_on_a_cpu_where_the_widest_is_not_faster_than_pytorch(
    losing: set[tuple[str, ...]], others: set[tuple[int, tuple[str, ...]]], chosen: list[int],
    decided: dict[tuple[str, ...], float], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(plan_graph, "assumed_s", lambda *_: None)
    assert kinds(plan().first_problems()) == {(96, GATES), (64, RESIDUAL)}
    assert plan().expected_problems() == {}

    def cost(problem: Problem, device: torch.device) -> Cost | None:
        steps = tuple(step.kind for step in problem.epilogue)
        return Cost(1e-3, steps not in losing) if steps in (GATES, RESIDUAL) else None

    monkeypatch.setattr(plan_graph, "cost_of", cost)
    assert other_kinds() == (others, set())
    assert [len(form.products) for form in plan().choose()] == chosen


@pytest.mark.parametrize(
    ("kernel", "others", "chosen"),
    [("native/expand", set(), [RESIDUAL]), ("aten/dequant", {(64, ()), (64, RESIDUAL)}, [])],
)
def test_other_forms_of_int8_weights_are_tuned_on_a_cpu_where_pytorch_serves_the_widest(
    kernel: str, others: set[tuple[int, tuple[str, ...]]], chosen: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of many rows, no form of PyTorch's is one that ``torch.compile`` would run."""

    def cost(problem: Problem, device: torch.device) -> Cost | None:
        return Cost(1e-3, True, kernel) if problem.epilogue else None

    def plan() -> GraphPlan:
        operands = (torch.randn(INT8PACK_ROWS + 1, 48).bfloat16(), torch.ones(64, 48, dtype=torch.int8), GAIN)
        graph = trace(lambda x, w, s, r: F.linear(x, w.to(x.dtype)) * s + r, *operands, RESIDUALS).graph
        return GraphPlan(find_products(graph, frozenset(list(graph.nodes)[1:3]), emulate=False)[0])

    assert kinds(plan().first_problems()) == {(64, RESIDUAL)}
    monkeypatch.setattr(plan_graph, "cost_of", cost)
    assert kinds(plan().other_problems()[0]) == others
    assert [tuple(step.kind for step in form.call.problem.epilogue) for form in plan().choose()] == chosen


def test_other_forms_of_a_product_are_not_tuned_where_the_widest_is_fast_enough(
    decided: dict[tuple[str, ...], float],
) -> None:
    decided |= {GATES: 1.9, RESIDUAL: 0.9}  # for two products, and for one
    assert other_kinds() == (set(), set())
    assert [len(form.products) for form in plan().choose()] == [1, 2]


PART = {(48, ())}


@pytest.mark.parametrize(
    ("times", "others", "parts"),
    [
        ({GATES: 2.1, RESIDUAL: 0.9}, NORMED_PAIR - PART, PART),
        ({GATES: 1.9, RESIDUAL: 1.1}, {(64, ()), (64, RESIDUAL)}, set()),
        ({RESIDUAL: 0.9}, NORMED_PAIR - PART, PART),
        ({}, EVERY - PART, PART),
    ],
)
def test_other_forms_are_tuned_where_the_widest_is_slower_than_assumed_of_them(
    times: dict[tuple[str, ...], float], others: set[tuple[int, tuple[str, ...]]],
    parts: set[tuple[int, tuple[str, ...]]],
    decided: dict[tuple[str, ...], float],
) -> None:  # fmt: skip
    decided |= times
    assert other_kinds() == (others, parts)


@pytest.mark.parametrize("merged_s", [1.9, 2.1])
def test_parts_of_a_merged_product_are_tuned_where_they_are_assumed_to_be_cheaper(
    merged_s: float, decided: dict[tuple[str, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two parts is assumed to take 1 second, and the merged product is not limited by arithmetic."""
    monkeypatch.setattr(plan_graph, "_slowness", lambda *_: 1.0)
    decided |= {GATES: 2.1, ("rms_norm",): 5.0, ("swiglu",): 5.0, RESIDUAL: 0.9, (): merged_s}
    assert other_kinds()[1] == (PART if merged_s > 2.0 else set())


@pytest.mark.parametrize(
    ("seconds", "rows", "beats_torch", "is_tuned"),
    [(20e-6, 64, True, False), (20e-6, 65, True, True), (20e-6, 64, False, True), (200e-6, 64, True, True)],
)
def test_product_whose_residual_form_is_fast_is_not_tuned_by_itself_for_few_rows_on_a_gpu(
    seconds: float, rows: int, beats_torch: bool, is_tuned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bandwidth allows 10 us for the product; one with a residual takes longer, by less than an addition costs."""
    monkeypatch.setattr(plan_graph, "is_host", lambda _: False)
    monkeypatch.setattr(plan_graph, "has_own_kernels", lambda *_: True)
    monkeypatch.setattr(plan_graph, "assumed_s", lambda *_: 10e-6)
    monkeypatch.setattr(
        plan_graph, "cost_of", lambda problem, _: Cost(seconds, beats_torch) if problem.epilogue else None
    )
    x, residual = torch.randn(rows, 64).bfloat16(), torch.randn(rows, 48).bfloat16()
    graph = trace(lambda x, w, r: F.linear(x, w) + r, x, W, residual).graph
    products, _ = find_products(graph, frozenset(list(graph.nodes)[1:2]), emulate=False)
    one = GraphPlan(products)
    plain = {(48, ())}
    assert kinds(one.first_problems()) == {(48, RESIDUAL)}
    assert kinds(one.expected_problems()) == (plain if rows > 64 else set())
    others, *later = one.other_problems()
    assert (plain <= kinds(others), any(later)) == (is_tuned, False)
    if beats_torch and not is_tuned:
        (form,) = one.choose()
        assert [step.kind for step in form.call.problem.epilogue] == ["add"]


GATED, MERGED, NORMED = {(96, GATES), (96, ("swiglu",))}, {(96, ())}, {(96, ("rms_norm",))}


@pytest.mark.parametrize(
    ("seconds", "is_host", "stages"),
    [
        ({GATES: 2.1}, False, (GATED, MERGED, PART)),
        ({GATES: 2.1, ("swiglu",): 1.9}, False, (GATED, set(), set())),  # it serves
        ({GATES: 2.1, ("swiglu",): 2.1}, False, (GATED, MERGED, PART)),  # its parts are assumed to take 2 seconds
        ({}, False, (GATED, MERGED | NORMED, PART)),  # the norm was not tuned with the gate
        ({GATES: 2.1}, True, (GATED | MERGED | NORMED, set(), PART)),
    ],
)
def test_forms_without_a_gate_are_tuned_for_few_rows_on_a_gpu_where_none_with_it_serves(
    seconds: dict[tuple[str, ...], float], is_host: bool, stages: tuple[set[Any], ...],
    decided: dict[tuple[str, ...], float], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(plan_graph, "is_host", lambda _: is_host)
    decided |= {RESIDUAL: 0.9} | seconds
    assert tuple(map(kinds, plan().other_problems())) == stages
    expected = [(problem.n, tuple(step.kind for step in problem.epilogue)) for _, problem in plan().expected_problems()]
    assert [kind for kind in expected if kind[0] == 96] == [*([] if is_host else [(96, ("swiglu",))]), (96, ())]


def test_products_without_residual_norm_and_gate_are_expected_to_follow(
    decided: dict[tuple[str, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kinds(plan().expected_problems()) == {(64, ()), (96, ())}
    decided |= {GATES: 2.1, RESIDUAL: 1.1}
    assert plan().expected_problems().items() <= plan().other_problems()[0].items()
    monkeypatch.setattr(plan_graph, "assumed_s", lambda *_: None)
    assert plan().expected_problems() == {}  # all forms come first


@pytest.mark.parametrize("merged_s", [1.9, 4.0])
def test_parts_of_a_merged_product_are_assumed_to_be_as_slow_beside_their_traffic_as_the_whole(
    merged_s: float, decided: dict[tuple[str, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two products of 1 second each by their traffic are one that may take as long as 1.9 seconds."""
    monkeypatch.setattr(plan_graph, "assumed_s", lambda problem, device: 1.0 if problem.n == 48 else 1.9)
    monkeypatch.setattr(plan_graph, "cost_of", lambda problem, _: Cost(merged_s, True) if problem.n == 96 else None)
    graph = trace(lambda x, w, u: (F.linear(x, w), F.linear(x, u)), X, W, U).graph
    products, _ = find_products(graph, frozenset(list(graph.nodes)[1:3]), emulate=False)
    two = GraphPlan(products)
    assert not any(two.other_problems())
    assert [len(form.products) for form in two.choose()] == [2]


def test_products_that_were_not_tuned_stay_inductors(decided: dict[tuple[str, ...], float]) -> None:
    decided |= {GATES: 2.1, RESIDUAL: 1.1}
    assert plan().choose() == []


def tune_in_rounds(monkeypatch: pytest.MonkeyPatch, *times: dict[tuple[str, ...], float], decided: Any) -> list[Any]:
    """Run the pass over the graph. times: the seconds that each round of tuning finds. Returns the rounds' Problems."""
    rounds: list[Any] = []

    def tune(problems: Any, *_: Any, more: Any, **__: Any) -> list[Any]:
        while problems:
            decided.update(times[len(rounds)])
            rounds.append(kinds(problems))
            problems = more()
        return []

    monkeypatch.setattr(graph_pass, "tune_on_device", tune)
    monkeypatch.setattr(graph_pass, "constant_inputs", lambda graph: frozenset(list(graph.nodes)[1:5]))
    ProductPass(Options())(traced())
    return rounds


def test_worker_that_tuned_the_widest_forms_tunes_the_others(
    decided: dict[tuple[str, ...], float], own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = tune_in_rounds(monkeypatch, {GATES: 2.1, RESIDUAL: 0.9}, SLOW, decided=decided)
    assert rounds == [{(96, GATES), (64, RESIDUAL)}, LESS_WIDE - PART]


@pytest.mark.parametrize("merged_s", [2.0, 3.0])
def test_parts_of_a_merged_product_are_not_tuned_where_it_is_cheaper(
    merged_s: float, decided: dict[tuple[str, ...], float], own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merged product is limited by arithmetic if it takes 3 seconds; so are its parts."""
    merged: dict[tuple[str, ...], float] = {(): merged_s, ("rms_norm",): 5.0, ("swiglu",): 5.0}
    monkeypatch.setattr(plan_graph, "assumed_s", lambda problem, _: 1.0 if problem.n == 48 else 1.9)
    rounds = tune_in_rounds(monkeypatch, {GATES: 3.5, RESIDUAL: 0.9}, merged, decided=decided)
    assert rounds == [{(96, GATES), (64, RESIDUAL)}, LESS_WIDE - PART]


def test_later_process_tunes_only_what_an_earlier_one_left(
    decided: dict[tuple[str, ...], float], own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided |= {GATES: 2.1, RESIDUAL: 0.9}
    assert tune_in_rounds(monkeypatch, SLOW, decided=decided) == [LESS_WIDE - PART]
    assert tune_in_rounds(monkeypatch, decided=decided) == []


def test_forms_that_could_not_be_tuned_are_not_asked_for_again(
    decided: dict[tuple[str, ...], float], own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    widest = {(96, GATES), (64, RESIDUAL)}
    assert tune_in_rounds(monkeypatch, {}, {}, {}, decided=decided) == [widest, EVERY - widest - PART, PART]


@pytest.mark.parametrize(("busy_rounds", "undecided"), [(1, 1), (2, 1), (1, None)])
def test_problems_that_a_busy_machine_left_undecided_are_tuned_once_more(
    busy_rounds: int,
    undecided: int | None,
    decided: dict[tuple[str, ...], float],
    own_store: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One of several; all of them are not, since the machine is still busy then."""
    rounds: list[list[Problem]] = []

    def tune(problems: Any, *_: Any, **__: Any) -> list[Any]:
        rounds.append([problem for problem, _ in problems])
        busy = rounds[-1][:undecided] if len(rounds) <= busy_rounds else []
        return [
            SimpleNamespace(problem=problem.to_dict(), outcome="inconclusive" if problem in busy else "winner")
            for problem in rounds[-1]
        ]

    monkeypatch.setattr(graph_pass, "tune_on_device", tune)
    monkeypatch.setattr(graph_pass, "constant_inputs", lambda graph: frozenset(list(graph.nodes)[1:5]))
    ProductPass(Options())(traced())
    assert rounds[1:] == ([] if undecided is None else [rounds[0][:1]])
    warned = [record.message for record in caplog.records if "inconclusive" in record.message]
    assert len(warned) == int(undecided is None or busy_rounds == 2)


@pytest.mark.parametrize(
    ("gate_s", "torch_s", "chosen"),
    [(0.95, 1.0, False), (0.85, 1.0, True), (0.85, None, False), (0.65, None, True), (0.65, 0.7, False)],
)
def test_gate_on_a_cpu_is_compared_with_other_forms_in_one_race(
    gate_s: float, torch_s: float | None, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product of both weights took 0.675 s in its own race, which is 90% of what PyTorch's took there. torch_s: the
    seconds of PyTorch's product in the gate's race; None: unknown."""
    behind = pointwise_s(replace(build(3, 96, 64, "bf16"), epilogue=(Step("swiglu"),)), CPU)
    costs = {
        ("swiglu",): Cost(gate_s, True, torch_s=None if torch_s is None else torch_s + behind),
        (): Cost(0.675, True, torch_s=0.75),
    }
    monkeypatch.setattr(plan_graph, "has_own_kernels", lambda *_: True)
    monkeypatch.setattr(
        plan_graph, "cost_of", lambda problem, device: costs.get(tuple(s.kind for s in problem.epilogue))
    )
    forms = plan().choose()
    assert any(form.gated for form in forms) == chosen


@pytest.mark.parametrize(("gate_rows", "behind_norm"), [(1024, ("swiglu",)), (32, ())])
def test_symbolic_rows_are_tuned_for_a_range(
    gate_rows: int,
    behind_norm: tuple[str, ...],
    decided: dict[tuple[str, ...], float],
    own_store: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A norm and a gate for as many rows as kernels compute them; the plan of a product without them serves others."""
    rounds: list[tuple[Any, Any]] = []

    def tune(problems: Any, *_: Any, m: Any, batch: Any, **__: Any) -> list[Any]:
        assert batch is None
        decided[GATES] = 1.9  # and nothing of the residual
        rounds.append((kinds(problems), m))
        return []

    monkeypatch.setattr(graph_pass, "tune_on_device", tune)
    monkeypatch.setattr(plan_graph, "most_rows", lambda problem, device: 32 if problem.norm else gate_rows)
    monkeypatch.setattr(graph_pass, "constant_inputs", lambda graph: frozenset(list(graph.nodes)[1:5]))
    ProductPass(Options())(dynamic_trace().graph)
    widest = {(64, RESIDUAL), (96, behind_norm)}
    assert rounds == [(widest, "all"), ({(96, GATES)}, range(1, 33)), ({(64, ())}, "all")]


def test_symbolic_batch_is_tuned_for_all_batches(
    decided: dict[tuple[str, ...], float], own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[tuple[Any, ...]] = []

    def tune(problems: Any, *_: Any, m: Any, batch: Any, **__: Any) -> list[Any]:
        rounds.append((m, batch, [(problem.family, problem.batch, problem.m) for problem, _ in problems]))
        return []

    def attend(x: Tensor, b: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(x, b.expand(x.shape[0], 64, 64)).view(-1, 64) @ w.t()  # torch 2.9 cannot trace F.linear here

    monkeypatch.setattr(graph_pass, "tune_on_device", tune)
    monkeypatch.setattr(graph_pass, "constant_inputs", lambda graph: frozenset(list(graph.nodes)[2:3]))
    ProductPass(Options())(trace_dynamic(attend, torch.randn(5, 3, 64).bfloat16(), W.new_zeros(1, 64, 64), W).graph)
    assert rounds == [(None, "all", [("bmm", 5, 3)]), ("all", None, [("mm", 1, 15)])]
