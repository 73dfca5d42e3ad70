"""The layout of a weight that was tuned for a range of M: the fastest one that is nowhere slower than plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from gemmtune.core.tuned_plan import TunedPlan
from gemmtune.dispatch.plan_layouts import MAX_NOISE, NO_SLOWER, plain_times, rank_layouts_of_plan, shares_of
from gemmtune.dispatch.portfolio import build_plan
from helpers.plans import (
    COMPOSITE,
    HALF,
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


def share(value: float) -> Model:
    return lambda m: value * PLAIN_S(m)


RAW = simulated("raw", share(0.7))
FAST = simulated("fast", share(0.5), packing="p:fast")


def plan_of(packed: Model, *, raw: Model = RAW.seconds, packing: str = "p:fast") -> TunedPlan:
    """Return a plan in which one packed kernel and one on the raw weight serve all M."""
    fast, slow = replace(FAST, seconds=packed, packing=packing), replace(RAW, seconds=raw)
    spans = {packing: [(1, 512, fast)], "": [(1, 512, slow)]}
    return planted_plan(PROBLEM, [fast, slow], spans, SIZES, target_key="t")


def changed(plan: TunedPlan, name: str, **changes: object) -> TunedPlan:
    kernels = [msgspec.structs.replace(k, **changes) if k.id == name else k for k in plan.kernels]
    return msgspec.structs.replace(plan, kernels=tuple(kernels))


def test_faster_packed_layout_comes_first() -> None:
    assert rank_layouts_of_plan(plan_of(FAST.seconds)) == ["p:fast", None]


def test_packed_layout_slower_than_the_raw_kernels_does_not_serve() -> None:
    plan = plan_of(share(0.8))
    assert rank_layouts_of_plan(plan) == [None]
    assert rank_layouts_of_plan(plan, raw_kernels=False) == ["p:fast", None]


def test_overhead_of_a_call_is_not_that_of_plain_pytorch_on_the_raw_weight() -> None:
    """Plain PyTorch serves the raw weight: a packed kernel that takes as long with its overhead is no faster."""
    for overhead_s, layouts in ((0.0, ["p:fast", None]), (2e-6, [None])):  # of 10.1 us
        spans = {"p:fast": [(1, 512, FAST)], "": [(1, 512, SimulatedKernel(PLAIN, PLAIN_S))]}
        fast = replace(FAST, seconds=share(0.797))
        spans["p:fast"] = [(1, 512, fast)]
        plan = planted_plan(PROBLEM, [fast], spans, [1], target_key="t")
        assert rank_layouts_of_plan(msgspec.structs.replace(plan, overhead_s=overhead_s)) == layouts


@pytest.mark.parametrize(("excess", "serves"), [(-0.001, True), (0.001, False)])
def test_packed_layout_slower_than_plain_pytorch_at_one_m_does_not_serve(excess: float, serves: bool) -> None:
    noise = 0.01
    limit = 1.0 + NO_SLOWER + noise + excess
    plan = plan_of(lambda m: (limit if m == 64 else 0.3) * PLAIN_S(m))
    plan = msgspec.structs.replace(plan, noise=dict.fromkeys(SIZES, noise))
    assert rank_layouts_of_plan(plan) == (["p:fast", None] if serves else [None])


def test_noise_excuses_little() -> None:
    plan = plan_of(lambda m: (1.0 + NO_SLOWER + 2 * MAX_NOISE if m == 64 else 0.3) * PLAIN_S(m))
    assert rank_layouts_of_plan(msgspec.structs.replace(plan, noise=dict.fromkeys(SIZES, 0.5))) == [None]


def test_time_in_the_slowest_surroundings_counts() -> None:
    plan = plan_of(FAST.seconds)
    assert rank_layouts_of_plan(changed(plan, FAST.id, surcharge=1.3)) == ["p:fast", None]
    assert rank_layouts_of_plan(changed(plan, FAST.id, surcharge=1.5)) == [None]
    slow_raw = changed(changed(plan, FAST.id, surcharge=1.5), RAW.id, surcharge=1.3)
    assert rank_layouts_of_plan(slow_raw) == ["p:fast", None]
    for form, factor, ranked in (
        ("packed", 1.3, ["p:fast", None]),
        ("packed", 1.5, [None]),
        ("raw", 1.5, ["p:fast", None]),
    ):
        surcharges = {form: {8: factor}}
        assert rank_layouts_of_plan(msgspec.structs.replace(plan, surcharges=surcharges)) == ranked


def test_overhead_of_a_call_counts_for_kernels_and_not_for_plain_pytorch() -> None:
    plan = msgspec.structs.replace(plan_of(FAST.seconds), overhead_s=4e-6)  # of 10.1 us at M = 1
    assert rank_layouts_of_plan(plan) == ["p:fast", None]
    assert rank_layouts_of_plan(msgspec.structs.replace(plan, overhead_s=6e-6)) == [None]


def test_layout_with_a_faulty_kernel_does_not_serve() -> None:
    plan = plan_of(FAST.seconds)
    assert rank_layouts_of_plan(plan, {FAST.id}) == [None]
    assert rank_layouts_of_plan(plan, {RAW.id}) == ["p:fast", None]


def test_packed_layout_serves_where_plain_pytorch_was_not_timed() -> None:
    """Two packed layouts, each the slower one at one M: there is nothing that they must not be slower than."""
    a = simulated("a", lambda m: 2e-6 if m < 64 else 9e-6, packing="p:a")
    b = simulated("b", lambda m: 3e-6 if m < 64 else 8e-6, packing="p:b")
    plan = planted_plan(PROBLEM, [a, b], {"p:a": [(1, 512, a)], "p:b": [(1, 512, b)]}, SIZES, target_key="t")
    plan = msgspec.structs.replace(plan, kernels=tuple(k for k in plan.kernels if k.id != PLAIN.id))
    assert rank_layouts_of_plan(plan) == ["p:a", "p:b", None]


def test_packed_layout_is_compared_with_pytorchs_operator_and_not_with_a_faster_conversion() -> None:
    """The kernels of the raw weight count by what they take, which is 0.2 of plain PyTorch's time here."""
    for seconds, layouts, without_raw_kernels in (
        (share(0.15), ["p:fast", None], ["p:fast", None]), (share(0.5), [None], ["p:fast", None]),
        (share(1.1), [None], [None]),
    ):  # fmt: skip
        fast = replace(FAST, seconds=seconds)
        spans = {"p:fast": [(1, 512, fast)], "": [(1, 512, COMPOSITE)]}
        plan = planted_plan(HALF, [COMPOSITE, fast], spans, SIZES, target_key="t")
        assert plain_times(plan) == {m: PLAIN_S(m) for m in SIZES}
        assert shares_of(plan, "") == pytest.approx(dict.fromkeys(SIZES, 0.2))
        assert rank_layouts_of_plan(plan) == layouts
        assert rank_layouts_of_plan(plan, raw_kernels=False) == without_raw_kernels
        served = build_plan([], None, plan)
        assert served is not None
        assert served.pick(64).candidate == COMPOSITE.candidate


def test_plan_that_timed_no_operator_of_pytorchs_is_read() -> None:
    """Older plans may have the conversion in its place."""
    spans = {"p:fast": [(1, 512, FAST)], "": [(1, 512, COMPOSITE)]}
    plan = planted_plan(HALF, [FAST], spans, SIZES, target_key="t", plain=COMPOSITE)
    assert plain_times(plan) == {}
    assert rank_layouts_of_plan(plan) == [None]
    served = build_plan([], None, plan)
    assert served is not None
    assert served.pick(64).candidate == COMPOSITE.candidate


def test_recorded_calls_weigh_more() -> None:
    plan = plan_of(lambda m: (0.75 if m == 64 else 0.3) * PLAIN_S(m), raw=share(0.6))
    assert rank_layouts_of_plan(plan) == ["p:fast", None]
    assert rank_layouts_of_plan(msgspec.structs.replace(plan, counts={64: 1000})) == [None]


# --- M that were tuned by themselves after the plan


def test_decision_at_an_m_that_the_plan_does_not_know_serves_that_m() -> None:
    plan = msgspec.structs.replace(plan_of(FAST.seconds), tuned=(8,))
    other = simulated("other", share(0.4), packing="p:fast")
    known, later = decisions_at([other], [8, 64])
    served = build_plan([known, later], "p:fast", plan)
    assert served is not None
    names = {m: served.pick(m).candidate for m in (1, 8, 63, 64, 65, 512)}
    assert {m for m, candidate in names.items() if candidate == other.candidate} == {64}
    assert {m for m, candidate in names.items() if candidate == FAST.candidate} == {1, 8, 63, 65, 512}
    assert [(interval.first, interval.last) for interval in served.intervals] == [(1, 63), (64, 64), (65, 512)]


@pytest.mark.parametrize("m", [1, 512, 600])
def test_decision_at_an_end_of_the_plan_or_beyond(m: int) -> None:
    other = simulated("other", share(0.4), packing="p:fast")
    served = build_plan(decisions_at([other], [m]), "p:fast", plan_of(FAST.seconds))
    assert served is not None
    assert served.pick(m).candidate == other.candidate
    assert all(interval.first <= interval.last for interval in served.intervals)
    assert {served.pick(n).candidate for n in (2, 511)} == {FAST.candidate}
