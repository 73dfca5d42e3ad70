"""One layout for all M: the least total time wins, and never against ATen without being sure."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from gemmtune.core.candidate import Candidate
from gemmtune.core.epilogue import Step
from gemmtune.core.workloads import bmm_problem, linear_problem
from gemmtune.dispatch import build_plan, choose_packing, rank_packings
from gemmtune.dispatch.portfolio import layouts_in_use, tuned_point
from helpers.serving import decide, evidence, toy


def at(m: int, **seconds: float):  # type: ignore[no-untyped-def]
    """A Decision at one M with a toy kernel per layout (ATen's plain one takes 1 s)."""
    rows = [evidence(toy("" if layout == "raw" else layout), time, time) for layout, time in seconds.items()]
    return decide(linear_problem(m, 8, 8, "float32"), *rows)


def test_calls_weigh() -> None:
    decisions = [at(1, plain=0.1, other=0.12), at(64, plain=0.9, other=0.6)]
    assert choose_packing(decisions) == "toy:other"
    assert choose_packing(decisions, {1: 1000, 64: 1}) == "toy:plain"
    assert rank_packings(decisions) == ["toy:other", "toy:plain", None]
    # Half again as much time at one M weighs more than a fifth at another, however fast both are beside ATen.
    assert choose_packing([at(1, plain=0.010, other=0.015), at(64, plain=0.72, other=0.60)]) == "toy:plain"


def test_layouts_that_are_alike_are_chosen_by_name() -> None:
    """Another tuning, in which the other one is faster by as little, chooses the same."""
    for other in (0.0995, 0.1, 0.1005):
        assert rank_packings([at(1, other=other, plain=0.1)]) == ["toy:plain", "toy:other", None]
    assert rank_packings([at(1, other=0.1, plain=0.102)]) == ["toy:other", "toy:plain", None]
    assert rank_packings([at(1, other=0.102, plain=0.1)]) == ["toy:plain", "toy:other", None]


def test_a_layout_must_serve_every_m_and_be_worth_it() -> None:
    assert choose_packing([at(1, plain=0.1), at(64, other=0.1)]) == "toy:other"  # which at M = 1 takes no longer
    assert choose_packing([at(1, plain=0.1), at(64, raw=0.5)]) is None  # 64 calls of plain, at worst
    assert choose_packing([at(1, plain=0.995)]) is None
    assert choose_packing([at(1, plain=0.98)]) == "toy:plain"
    assert choose_packing([]) is None


def test_layouts_in_use_are_all_that_have_a_kernel_and_the_one_with_the_least_total_time_is_first() -> None:
    points = [
        tuned_point(decision) for decision in (at(1, plain=0.1, other=2.0, raw=0.05), at(64, other=0.1, third=0.2))
    ]
    assert layouts_in_use(points) == ["toy:third", "toy:other", "toy:plain"]
    assert rank_packings(points) == ["toy:third", None]  # the others are slower than the raw weight
    assert layouts_in_use([]) == []


def test_a_raw_kernel_competes_with_packed_ones() -> None:
    assert choose_packing([at(1, plain=0.5, raw=0.4)]) is None
    assert choose_packing([at(1, plain=0.3, raw=0.4)]) == "toy:plain"


def test_kernels_on_the_raw_weight_do_not_count_where_they_would_not_serve() -> None:
    decisions = [at(1, plain=0.5, raw=0.4), at(4, plain=0.5, raw=0.4)]
    assert rank_packings(decisions) == [None]
    assert rank_packings(decisions, raw_kernels=False) == ["toy:plain", None]
    assert rank_packings([at(1, plain=0.995, raw=0.4)], raw_kernels=False) == [None]


def test_a_time_that_was_never_raced_is_worth_less() -> None:
    problem = linear_problem(1, 8, 8, "float32")
    raced = evidence(toy("plain"), 0.5, 0.5)
    for seconds, chosen in ((0.45, "toy:plain"), (0.3, "toy:other")):
        rough = msgspec.structs.replace(evidence(toy("other"), seconds, seconds), stage="screened")
        assert choose_packing([decide(problem, raced, rough)]) == chosen


def test_wrong_rows_are_never_options() -> None:
    problem = linear_problem(1, 8, 8, "float32")
    decision = decide(problem, evidence(toy("plain"), 0.1, ok=False), chosen=toy("plain"))
    assert choose_packing([decision]) is None
    plan = build_plan([decision])
    assert plan is not None
    assert all(entry.candidate is None for entry in plan.entries)


def test_plan_entries() -> None:
    decisions = [at(64, raw=0.5), at(1, raw=1.5)]
    plan = build_plan(decisions)
    assert plan is not None
    # At M = 1 the raw kernel is slower than ATen: plain PyTorch serves.
    assert [(entry.m, entry.candidate) for entry in plan.entries] == [(1, None), (64, toy(""))]
    packed = build_plan([at(1, plain=0.5), at(64, other=0.5)], "toy:plain")
    assert packed is not None
    assert [(entry.m, entry.candidate) for entry in packed.entries] == [(1, toy("plain"))]
    assert build_plan(decisions, "toy:plain") is None


def test_a_kernel_not_surely_faster_than_aten_stays_out() -> None:
    problem = linear_problem(1, 8, 8, "float32")
    unsure = decide(problem, evidence(toy(""), 0.99, 1.0))
    plan = build_plan([unsure])
    assert plan is not None
    assert all(entry.candidate is None for entry in plan.entries)


def test_atens_usual_form_is_plain_pytorch_where_that_computes_the_same() -> None:
    usual, bias = Candidate.make("aten", "mm"), Step("bias", "col", "float32")
    linear, batched = linear_problem(1, 8, 8, "float32"), Candidate.make("aten", "bmm")
    for problem, candidate, is_plain in (
        (linear, usual, True),
        (replace(linear, epilogue=(bias,)), usual, True),
        (replace(linear, epilogue=(bias, Step("relu"))), usual, False),
        (bmm_problem(2, 8, 8, 8, "float32"), batched, True),
        (replace(bmm_problem(2, 8, 8, 8, "float32"), epilogue=(bias,)), batched, False),
    ):
        plan = build_plan([decide(problem, evidence(candidate, 0.5), chosen=candidate)])
        assert plan is not None
        assert plan.entries[0].candidate == (None if is_plain else candidate)


def test_atens_unusual_forms_serve_as_kernels() -> None:
    problem = linear_problem(1, 8, 8, "float32")
    turned = Candidate.make("aten", "mm_t")
    plan = build_plan([decide(problem, evidence(turned, 0.5), chosen=turned)])
    assert plan is not None
    assert plan.entries[0].candidate == turned


def test_a_gain_that_serving_costs_again_is_none() -> None:
    problem = linear_problem(1, 8, 8, "float32")
    for aten_s, served in ((3e-6, None), (100e-6, toy(""))):
        decision = decide(problem, evidence(toy(""), 0.8 * aten_s, 0.8), chosen=toy(""), aten_s=aten_s)
        plan = build_plan([decision])
        assert plan is not None
        assert plan.entries[0].candidate == served
        packed = decide(problem, evidence(toy("plain"), 0.8 * aten_s, 0.8), chosen=toy("plain"), aten_s=aten_s)
        assert choose_packing([packed]) == (None if served is None else "toy:plain")


def test_a_raw_kernel_that_does_not_serve_has_the_time_of_the_plain_op() -> None:
    """It is not surely faster than ATen, so that a packed layout has to be compared with ATen's second."""
    unsure, packed = evidence(toy(""), 0.995, 0.995), evidence(toy("plain"), 0.988, 0.97)
    assert choose_packing([decide(linear_problem(1, 8, 8, "float32"), unsure, packed)]) == "toy:plain"
    sure = evidence(toy(""), 0.975, 0.975)
    assert choose_packing([decide(linear_problem(1, 8, 8, "float32"), sure, packed)]) is None
