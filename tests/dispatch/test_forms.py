"""Which form of a weight serves each M, where it is kept raw and packed, and where two forms pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from gemmtune.core.tuned_plan import TunedPlan
from gemmtune.dispatch.forms import CLEARLY, Forms, Ratio, choose_forms, forms_by_ratios
from gemmtune.dispatch.index import DecisionIndex
from gemmtune.dispatch.plan_layouts import NO_SLOWER
from gemmtune.dispatch.portfolio import tuned_point
from helpers.plans import (
    PLAIN,
    PLAIN_S,
    PROBLEM,
    Model,
    SimulatedKernel,
    decisions_at,
    planted_plan,
    simulated,
)

SIZES = (1, 8, 64, 512)
ATEN = SimulatedKernel(PLAIN, PLAIN_S)


def share(*by_size: float, last: float = 0.5) -> Model:
    """Return the time of a kernel as shares of ATen's time up to each of ``SIZES``; ``last`` above them."""
    shares = dict(zip(SIZES, by_size, strict=False))
    return lambda m: next((value for size, value in shares.items() if m <= size), last) * PLAIN_S(m)


def packed_kernel(*by_size: float) -> SimulatedKernel:
    return simulated("packed", share(*by_size), packing="p:x")


def plan_of(packed: SimulatedKernel, raw: SimulatedKernel = ATEN, noise: float = 0.0) -> TunedPlan:
    """Return a plan in which ``packed`` serves its layout, and ``raw`` the raw weight."""
    spans = {"p:x": [(1, 512, packed)], "": [(1, 512, raw)]}
    kernels = [packed] if raw is ATEN else [packed, raw]
    plan = planted_plan(PROBLEM, kernels, spans, SIZES, target_key="t")
    return msgspec.structs.replace(plan, noise=dict.fromkeys(SIZES, noise))


def raw_sizes(forms: Forms, sizes: Sequence[int] = range(1, 601)) -> list[int]:
    return [m for m in sizes if forms.is_raw(m)]


def index_of(plan: TunedPlan, failures: Sequence[str] = ()) -> DecisionIndex:
    return DecisionIndex({}, {PROBLEM.plan_key: failures}, {PROBLEM.plan_key: plan})


# --- intervals of M


@pytest.mark.parametrize(("served_raw", "raw"), [
    ("", []),
    ("pppp", []),
    ("rrrr", [(1, 600)]),
    ("pprr", [(9, 600)]),  # raw from the first M that is not known to be faster packed
    ("rrpp", [(1, 63)]),
    ("prpp", [(2, 63)]),
    ("rprp", [(1, 7), (9, 511)]),
    ("pprp", [(9, 511)]),
])  # fmt: skip
def test_raw_form_serves_between_two_m_of_which_it_serves_one(served_raw: str, raw: list[tuple[int, int]]) -> None:
    ratios = {m: Ratio(2.0 if form == "r" else 0.5) for m, form in zip(SIZES, served_raw, strict=False)}
    forms = forms_by_ratios(ratios)
    assert raw_sizes(forms) == [m for first, last in raw for m in range(first, last + 1)]
    assert list(forms.changes) == sorted(forms.changes)
    assert forms.pays == ("p" in served_raw and "r" in served_raw)


@pytest.mark.parametrize(("ratio", "is_raw", "pays"), [
    (1.0 + NO_SLOWER - 0.001, False, False), (1.0 + NO_SLOWER + 0.001, True, False),
    (1.0 + CLEARLY - 0.001, True, False), (1.0 + CLEARLY + 0.001, True, True),
])  # fmt: skip
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_two_forms_pay_where_the_raw_one_is_clearly_faster(
    ratio: float, is_raw: bool, pays: bool, noise: float
) -> None:
    forms = choose_forms("p:x", [], plan_of(packed_kernel(0.5, 0.5, ratio + noise, 0.5), noise=noise))
    assert (forms.is_raw(64), forms.pays) == (is_raw, pays)


# --- by a plan


def test_plan_whose_packed_layout_is_slower_than_aten_in_the_middle() -> None:
    plan = plan_of(packed_kernel(0.5, 0.5, 1.3, 0.5))
    index = index_of(plan)
    assert index.layouts(PROBLEM.plan_key) == [None]
    assert index.layouts_beside_raw(PROBLEM.plan_key) == ["p:x"]
    assert raw_sizes(index.forms(PROBLEM.plan_key, "p:x")) == list(range(9, 512))


def test_packed_layout_is_compared_with_kernels_for_the_raw_weight() -> None:
    raw = simulated("raw", share(0.9, 0.9, 0.4, 0.9))
    plan = plan_of(packed_kernel(0.5, 0.5, 0.6, 0.5), raw)
    index = index_of(plan)
    assert index.layouts(PROBLEM.plan_key) == ["p:x", None]
    assert index.layouts_beside_raw(PROBLEM.plan_key) == ["p:x"]
    assert raw_sizes(index.forms(PROBLEM.plan_key, "p:x"), SIZES) == [64]


def test_overhead_and_surcharge_count_for_kernels_and_not_for_plain_pytorch() -> None:
    packed = packed_kernel(0.9, 0.9, 0.9, 0.9)
    plan = plan_of(packed)
    assert raw_sizes(choose_forms("p:x", [], plan)) == []
    slow = msgspec.structs.replace(plan, overhead_s=2e-6)  # of 10.1 us at M = 1, and of 61.2 us at M = 512
    assert raw_sizes(choose_forms("p:x", [], slow), SIZES) == [1, 8, 64]
    kernels = [msgspec.structs.replace(k, surcharge=1.2) if k.id == packed.id else k for k in plan.kernels]
    slow = msgspec.structs.replace(plan, kernels=tuple(kernels))
    assert raw_sizes(choose_forms("p:x", [], slow), SIZES) == list(SIZES)


@pytest.mark.parametrize(("overhead_s", "layouts"), [(0.0, ["p:x"]), (2e-6, [])])
def test_overhead_counts_where_plain_pytorch_serves_one_of_two_forms(overhead_s: float, layouts: list[str]) -> None:
    """The packed form saves 20% at one M; each call of the other M costs the host more than plain PyTorch would."""
    plan = plan_of(packed_kernel(1.3, 1.3, 0.8, 1.3))
    index = index_of(msgspec.structs.replace(plan, overhead_s=overhead_s))
    assert raw_sizes(index.forms(PROBLEM.plan_key, "p:x"), SIZES) == [1, 8, 512]
    assert index.layouts_beside_raw(PROBLEM.plan_key) == layouts


def test_two_forms_must_be_faster_than_any_form_alone() -> None:
    raw = simulated("raw", share(0.5, 0.5, 0.5, 0.5))
    fast = simulated("fast", share(0.3, 0.3, 0.3, 0.3), packing="p:fast")
    packed = packed_kernel(0.4, 0.4, 0.9, 0.4)
    spans = {"p:x": [(1, 512, packed)], "p:fast": [(1, 512, fast)], "": [(1, 512, raw)]}
    index = index_of(planted_plan(PROBLEM, [fast, packed, raw], spans, SIZES, target_key="t"))
    assert index.forms(PROBLEM.plan_key, "p:x").pays
    assert index.layouts_beside_raw(PROBLEM.plan_key) == []
    assert index.layouts(PROBLEM.plan_key) == ["p:fast", None]


def test_layouts_are_ranked_by_the_time_of_both_forms() -> None:
    """Alone, the second layout takes less time in the mean."""
    short = simulated("short", share(0.3, 0.3, 0.3, 3.0), packing="p:short")
    even = simulated("even", share(0.9, 0.9, 0.9, 1.1), packing="p:even")
    spans = {"p:even": [(1, 512, even)], "p:short": [(1, 512, short)], "": [(1, 512, ATEN)]}
    index = index_of(planted_plan(PROBLEM, [short, even], spans, SIZES, target_key="t"))
    assert index.layouts_beside_raw(PROBLEM.plan_key) == ["p:short", "p:even"]


def test_raw_form_serves_all_m_of_a_layout_that_is_faulty_or_unknown() -> None:
    packed = packed_kernel(0.5, 0.5, 1.3, 0.5)
    for index, layout in ((index_of(plan_of(packed), [packed.id]), "p:x"), (index_of(plan_of(packed)), "p:other")):
        assert raw_sizes(index.forms(PROBLEM.plan_key, layout)) == list(range(1, 601))
        assert layout not in index.layouts_beside_raw(PROBLEM.plan_key)


def test_plain_pytorch_is_the_raw_form_where_a_raw_kernel_is_faulty() -> None:
    raw = simulated("raw", share(0.2, 0.2, 0.2, 0.2))
    plan = plan_of(packed_kernel(0.5, 0.5, 1.3, 0.5), raw)
    assert raw_sizes(index_of(plan).forms(PROBLEM.plan_key, "p:x"), SIZES) == list(SIZES)
    assert raw_sizes(index_of(plan, [raw.id]).forms(PROBLEM.plan_key, "p:x"), SIZES) == [64]


def test_packed_form_serves_where_neither_plain_pytorch_nor_a_raw_kernel_was_timed() -> None:
    packed = packed_kernel(0.5, 0.5, 1.3, 0.5)
    plan = planted_plan(PROBLEM, [packed], {"p:x": [(1, 512, packed)]}, SIZES, target_key="t")
    plan = msgspec.structs.replace(plan, kernels=tuple(k for k in plan.kernels if k.id == packed.id))
    index = index_of(plan)
    assert raw_sizes(index.forms(PROBLEM.plan_key, "p:x")) == []
    assert index.layouts_beside_raw(PROBLEM.plan_key) == []


# --- by Decisions


def test_decisions_at_single_m_choose_the_forms() -> None:
    packed = packed_kernel(0.5, 0.5, 1.3, 1.3)
    points = [tuned_point(decision) for decision in decisions_at([packed], SIZES)]
    index = DecisionIndex({PROBLEM.plan_key: points}, {})
    assert raw_sizes(index.forms(PROBLEM.plan_key, "p:x")) == list(range(9, 601))
    assert index.layouts_beside_raw(PROBLEM.plan_key) == ["p:x"]
    assert index.layouts_beside_raw(PROBLEM.plan_key, {1: 10.0, 8: 5.0}) == []  # the packed form alone is as fast


def test_m_without_a_kernel_of_the_layout_is_served_raw_unless_a_bound_shows_that_packed_is_faster() -> None:
    packed = packed_kernel(0.5, 0.5)
    points = [tuned_point(d) for d in (*decisions_at([packed], [8]), *decisions_at([], [4, 512]))]
    assert raw_sizes(choose_forms("p:x", points), (4, 8, 512)) == [512]


def test_without_any_measurement_the_packed_form_serves() -> None:
    assert choose_forms("p:x", []) == Forms()
    assert DecisionIndex({}, {}).layouts_beside_raw(PROBLEM.plan_key) == []


@pytest.mark.parametrize(("later", "raw"), [(0.4, []), (1.4, [9, 32, 63])])
def test_decision_at_an_m_that_the_plan_does_not_know_counts(later: float, raw: list[int]) -> None:
    plan = msgspec.structs.replace(plan_of(packed_kernel(0.5, 0.5, 0.5, 0.5)), tuned=(8,))
    kernel = replace(packed_kernel(), seconds=lambda m: later * PLAIN_S(m))
    points = [tuned_point(decision) for decision in decisions_at([kernel], [8, 32])]
    assert raw_sizes(choose_forms("p:x", points, plan), (8, 9, 32, 63, 64)) == raw


def test_layouts_are_ranked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked: list[object] = []

    def rank(tuned: TunedPlan, faulty: object, *, raw_kernels: bool) -> list[str | None]:
        ranked.append(raw_kernels)
        return ["toy:plain", None]

    monkeypatch.setattr("gemmtune.dispatch.index.rank_layouts_of_plan", rank)
    tuned = index_of(plan_of(packed_kernel(0.5)))
    tuned.layouts(PROBLEM.plan_key).clear()  # what a caller does with its list changes no other
    assert tuned.layouts(PROBLEM.plan_key) == ["toy:plain", None]
    assert tuned.layouts(PROBLEM.plan_key, raw_kernels=False) == ["toy:plain", None]
    assert ranked == [True, False]


def test_an_index_covers_ranges_and_single_m() -> None:
    tuned = index_of(plan_of(packed_kernel(0.5)))
    last = tuned.tuned_plan(PROBLEM.plan_key)
    assert last is not None
    assert [tuned.covers(PROBLEM.plan_key, m) for m in (last.first, last.last, last.last + 1)] == [True, True, False]
    assert not tuned.covers("another key", last.first)
