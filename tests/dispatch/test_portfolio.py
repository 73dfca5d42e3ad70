"""Choice of one layout for all M by the least total time, and of Plan entries that are surely faster than ATen."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from gemmtune.backends.aten import AtenBackend
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision, Evidence, LayoutDecision
from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Problem
from gemmtune.core.workloads import bmm_problem, int_problem, linear_problem
from gemmtune.dispatch import build_plan, choose_packing, rank_packings
from gemmtune.dispatch.portfolio import SERVING_S, layouts_in_use, tuned_point
from helpers.plans import PLAIN_S, PROBLEM, planted_plan, simulated
from helpers.serving import decide, evidence, toy


def make_decision_at(m: int, **seconds: float):  # type: ignore[no-untyped-def]
    """Return a Decision at one M with a toy kernel per layout. ATen's default candidate takes 1 s."""
    rows = [evidence(toy("" if layout == "raw" else layout), time, time) for layout, time in seconds.items()]
    return decide(linear_problem(m, 8, 8, "float32"), *rows)


def test_call_counts_weight_the_choice_of_a_layout() -> None:
    decisions = [make_decision_at(1, plain=0.1, other=0.12), make_decision_at(64, plain=0.9, other=0.6)]
    assert choose_packing(decisions) == "toy:other"
    assert choose_packing(decisions, {1: 1000, 64: 1}) == "toy:plain"
    assert rank_packings(decisions) == ["toy:other", "toy:plain", None]
    # 1.5 times the time at one M outweighs 1.2 times at another, whatever the ratios to ATen.
    assert (
        choose_packing([make_decision_at(1, plain=0.010, other=0.015), make_decision_at(64, plain=0.72, other=0.60)])
        == "toy:plain"
    )


def test_layouts_with_equal_times_are_ordered_by_name() -> None:
    """The name decides when times differ by less than the noise, so that another tuning chooses the same layout."""
    for other in (0.0995, 0.1, 0.1005):
        assert rank_packings([make_decision_at(1, other=other, plain=0.1)]) == ["toy:plain", "toy:other", None]
    assert rank_packings([make_decision_at(1, other=0.1, plain=0.102)]) == ["toy:other", "toy:plain", None]
    assert rank_packings([make_decision_at(1, other=0.102, plain=0.1)]) == ["toy:plain", "toy:other", None]


def test_layout_must_serve_all_m_and_be_faster_than_aten() -> None:
    assert (
        choose_packing([make_decision_at(1, plain=0.1), make_decision_at(64, other=0.1)]) == "toy:other"
    )  # which takes no longer at M = 1
    assert (
        choose_packing([make_decision_at(1, plain=0.1), make_decision_at(64, raw=0.5)]) is None
    )  # at worst 64 calls of plain
    assert choose_packing([make_decision_at(1, plain=0.995)]) is None
    assert choose_packing([make_decision_at(1, plain=0.98)]) == "toy:plain"
    assert choose_packing([]) is None


def test_layouts_in_use_are_ordered_by_total_time() -> None:
    points = [
        tuned_point(decision)
        for decision in (
            make_decision_at(1, plain=0.1, other=2.0, raw=0.05),
            make_decision_at(64, other=0.1, third=0.2),
        )
    ]
    assert layouts_in_use(points) == ["toy:third", "toy:other", "toy:plain"]
    assert rank_packings(points) == ["toy:third", None]  # the others are slower than the raw weight
    assert layouts_in_use([]) == []


def test_kernels_on_the_raw_weight_compete_with_packed_ones() -> None:
    assert choose_packing([make_decision_at(1, plain=0.5, raw=0.4)]) is None
    assert choose_packing([make_decision_at(1, plain=0.3, raw=0.4)]) == "toy:plain"


def test_raw_kernels_option_excludes_kernels_on_the_raw_weight() -> None:
    decisions = [make_decision_at(1, plain=0.5, raw=0.4), make_decision_at(4, plain=0.5, raw=0.4)]
    assert rank_packings(decisions) == [None]
    assert rank_packings(decisions, raw_kernels=False) == ["toy:plain", None]
    assert rank_packings([make_decision_at(1, plain=0.995, raw=0.4)], raw_kernels=False) == [None]


def test_screening_times_need_a_larger_gain_than_race_times() -> None:
    problem = linear_problem(1, 8, 8, "float32")
    raced = evidence(toy("plain"), 0.5, 0.5)
    for seconds, chosen in ((0.45, "toy:plain"), (0.3, "toy:other")):
        screened = msgspec.structs.replace(evidence(toy("other"), seconds, seconds), stage="screened")
        assert choose_packing([decide(problem, raced, screened)]) == chosen


def test_wrong_candidates_are_never_chosen() -> None:
    problem = linear_problem(1, 8, 8, "float32")
    decision = decide(problem, evidence(toy("plain"), 0.1, ok=False), chosen=toy("plain"))
    assert choose_packing([decision]) is None
    plan = build_plan([decision])
    assert plan is not None
    assert all(entry.candidate is None for entry in plan.entries)


def test_plan_has_an_entry_per_tuned_m() -> None:
    decisions = [make_decision_at(64, raw=0.5), make_decision_at(1, raw=1.5)]
    plan = build_plan(decisions)
    assert plan is not None
    # At M = 1 the raw kernel is slower than ATen: plain PyTorch serves.
    assert [(entry.m, entry.candidate) for entry in plan.entries] == [(1, None), (64, toy(""))]
    packed_plan = build_plan([make_decision_at(1, plain=0.5), make_decision_at(64, other=0.5)], "toy:plain")
    assert packed_plan is not None
    assert [(entry.m, entry.candidate) for entry in packed_plan.entries] == [(1, toy("plain"))]
    assert build_plan(decisions, "toy:plain") is None


def test_kernel_within_noise_of_aten_is_not_served() -> None:
    problem = linear_problem(1, 8, 8, "float32")
    unsure = decide(problem, evidence(toy(""), 0.99, 1.0))
    plan = build_plan([unsure])
    assert plan is not None
    assert all(entry.candidate is None for entry in plan.entries)


def test_default_aten_template_is_served_by_the_fallback() -> None:
    mm, bias = Candidate.make("aten", "mm"), Step("bias", "col", "float32")
    linear, bmm = linear_problem(1, 8, 8, "float32"), Candidate.make("aten", "bmm")
    for problem, candidate, is_plain in (
        (linear, mm, True),
        (replace(linear, epilogue=(bias,)), mm, True),
        (replace(linear, epilogue=(bias, Step("relu"))), mm, False),
        (bmm_problem(2, 8, 8, 8, "float32"), bmm, True),
        (replace(bmm_problem(2, 8, 8, 8, "float32"), epilogue=(bias,)), bmm, False),
    ):
        plan = build_plan([decide(problem, evidence(candidate, 0.5), chosen=candidate)])
        assert plan is not None
        assert plan.entries[0].candidate == (None if is_plain else candidate)


def test_other_aten_templates_are_served_as_kernels() -> None:
    problem = linear_problem(1, 8, 8, "float32")
    transposed = Candidate.make("aten", "mm_t")
    plan = build_plan([decide(problem, evidence(transposed, 0.5), chosen=transposed)])
    assert plan is not None
    assert plan.entries[0].candidate == transposed


# --- a CPU on which torch.mm is slow in bfloat16

HALF = linear_problem(8, 8, 8, "bfloat16")
COMPOSITE = Candidate.make("aten", "composite")


def composite_decision(problem: Problem = HALF, *rows: Evidence, **changes: object) -> Decision:
    """Return a Decision in which converting the operands takes 0.2 of the plain op's time, which is 1 s."""
    composite = evidence(COMPOSITE, 0.2, 0.2)
    return msgspec.structs.replace(decide(problem, *rows, composite, chosen=COMPOSITE), **changes)


@pytest.mark.parametrize("problem", [HALF, bmm_problem(2, 8, 8, 8, "bfloat16"), int_problem(8, 8, 8)])
def test_conversion_of_the_operands_serves_where_pytorchs_operator_is_slower(problem: Problem) -> None:
    point = tuned_point(composite_decision(problem))
    assert point.plain_s == 1.0
    plan = build_plan([point])
    assert plan is not None
    assert [(entry.candidate, entry.plain_s) for entry in plan.entries] == [(COMPOSITE, 1.0)]
    assert plan.entries[0].seconds == pytest.approx(0.2 + SERVING_S, abs=SERVING_S / 10)


def test_conversion_that_is_plain_pytorchs_own_is_served_as_it_was() -> None:
    wide, narrow = linear_problem(8, 8, 8, "float32"), linear_problem(8, 8, 8, "float16")
    for problem, served in ((wide, None), (replace(narrow, epilogue=(Step("gelu"),)), COMPOSITE)):
        point = tuned_point(composite_decision(problem))
        assert point.plain_s == 0.2
        plan = build_plan([point])
        assert plan is not None
        assert plan.entries[0].candidate == served


def test_packed_layout_is_compared_with_the_conversion_where_that_serves_the_raw_weight() -> None:
    faster, slower = (composite_decision(HALF, evidence(toy("plain"), s, s)) for s in (0.15, 0.3))
    assert rank_packings([faster]) == ["toy:plain", None]
    assert rank_packings([slower]) == [None]
    assert rank_packings([slower], raw_kernels=False) == ["toy:plain", None]  # faster than torch.mm
    packed = build_plan([faster], "toy:plain")
    assert packed is not None
    assert packed.entries[0].candidate == toy("plain")


def test_baseline_serves_where_a_raw_kernel_does_not_beat_it() -> None:
    """The plain op, which serves without a winner elsewhere, would take five times as long."""
    row = evidence(toy(""), 0.199, 0.199)
    test = LayoutDecision("tie", row.id, COMPOSITE.id, 0.995, 0.99, 1.01)
    for alternative in (row.id, COMPOSITE.id):
        decision = composite_decision(HALF, row, layouts={"": test}, alternatives={"": alternative})
        plan = build_plan([decision])
        assert plan is not None
        assert plan.entries[0].candidate == COMPOSITE
    plain = msgspec.structs.replace(test, baseline=AtenBackend().default_candidate(HALF).id)
    plan = build_plan([composite_decision(HALF, row, layouts={"": plain}, alternatives={"": row.id}, chosen=row.id)])
    assert plan is not None
    assert plan.entries[0].candidate is None
    won = composite_decision(HALF, row, layouts={"": msgspec.structs.replace(test, outcome="winner")})
    plan = build_plan([won])
    assert plan is not None
    assert plan.entries[0].candidate == toy("")


def test_gain_below_the_serving_overhead_is_ignored() -> None:
    problem = linear_problem(1, 8, 8, "float32")
    for aten_s, expected in ((3e-6, None), (100e-6, toy(""))):
        decision = decide(problem, evidence(toy(""), 0.8 * aten_s, 0.8), chosen=toy(""), aten_s=aten_s)
        plan = build_plan([decision])
        assert plan is not None
        assert plan.entries[0].candidate == expected
        packed = decide(problem, evidence(toy("plain"), 0.8 * aten_s, 0.8), chosen=toy("plain"), aten_s=aten_s)
        assert choose_packing([packed]) == (None if expected is None else "toy:plain")


def test_raw_kernel_that_does_not_serve_has_the_time_of_the_plain_op() -> None:
    """A raw kernel that may be slower than ATen does not serve: a packed layout is compared with the time of ATen."""
    unsure, packed = evidence(toy(""), 0.995, 0.995), evidence(toy("plain"), 0.988, 0.97)
    assert choose_packing([decide(linear_problem(1, 8, 8, "float32"), unsure, packed)]) == "toy:plain"
    sure = evidence(toy(""), 0.975, 0.975)
    assert choose_packing([decide(linear_problem(1, 8, 8, "float32"), sure, packed)]) is None


def test_decision_made_after_the_plan_serves_its_m_alone() -> None:
    kernel, later = simulated("planned", PLAIN_S), toy("")
    for m in (8, 16, 32):  # the first, an inner and the last M of the interval
        plan = planted_plan(PROBLEM, [kernel], {"": [(8, 32, kernel)]}, [8, 32], target_key="t")
        decision = decide(PROBLEM.with_m(m), evidence(later, 0.1), chosen=later)
        served = build_plan([decision], None, plan)
        assert served is not None
        assert served.pick(m).candidate == later
        others = {size for size in range(8, 33) if served.pick(size).candidate == kernel.candidate}
        assert others == set(range(8, 33)) - {m}


def test_time_of_a_tested_layout_includes_the_cost_of_serving_it() -> None:
    """In a CUDA graph the host does nothing; without one, a call of a kernel costs more than a call of ATen's op."""
    row = evidence(toy("plain"), 0.4, 0.4)
    decision = decide(linear_problem(1, 8, 8, "float32"), row, chosen=toy("plain"))
    test = LayoutDecision(
        "winner", row.id, AtenBackend().default_candidate(linear_problem(1, 8, 8, "float32")).id, 0.4, 0.39, 0.41,
        {"between": 0.6},
    )  # fmt: skip
    decision = msgspec.structs.replace(decision, layouts={"toy:plain": test})
    assert tuned_point(decision).options["toy:plain"].seconds == pytest.approx(0.6 + SERVING_S, abs=SERVING_S / 10)


@pytest.mark.parametrize(("round_ratio", "best"), [(0.38, "toy:fast"), (None, "toy:other"), (0.0, "toy:other")])
def test_layout_without_a_paired_test_takes_longer_when_served_as_the_winner_does(
    round_ratio: float | None, best: str
) -> None:
    """The winner is faster in every round, and its times in the paired test and among other work are longer."""
    problem = linear_problem(1, 64, 64, "float32")
    winner, other = evidence(toy("fast"), 0.4, 0.4), evidence(toy("other"), 0.39, 0.39)
    decision = decide(problem, winner, other, chosen=toy("fast"))
    plain = AtenBackend().default_candidate(problem)
    test = LayoutDecision("winner", winner.id, plain.id, 0.4, 0.39, 0.41, {"between": 0.42}, True, round_ratio)
    alternatives = {"toy:fast": winner.id, "toy:other": other.id}
    decision = msgspec.structs.replace(decision, layouts={"toy:fast": test}, alternatives=alternatives)
    point = tuned_point(decision)
    if round_ratio:
        assert point.options["toy:other"].seconds == pytest.approx(0.39 * 0.42 / round_ratio, rel=1e-4)
    assert choose_packing([point]) == best


def test_layout_whose_kernel_ties_with_an_aten_layout_does_not_serve_in_its_stead() -> None:
    """bf16 256x5632x2048 on an EPYC: 0.994 of oneDNN's packed product was no proof, and the graph had the plain op."""
    problem = linear_problem(256, 64, 64, "float32")
    own = evidence(toy("ours"), 0.994, 0.994)
    packed_aten = msgspec.structs.replace(evidence(Candidate.make("aten", "mkldnn"), 1.0, 1.0), packing="aten:mkldnn")
    plain = evidence(AtenBackend().default_candidate(problem), 1.03, 1.03)
    test = LayoutDecision("tie", own.id, packed_aten.id, 0.994, 0.985, 1.004)
    alternatives = {"toy:ours": own.id, "aten:mkldnn": packed_aten.id, "": plain.id}
    decision = msgspec.structs.replace(
        decide(problem, own, packed_aten, chosen=Candidate.make("aten", "mkldnn")),
        evidence=(own, packed_aten, plain), layouts={"toy:ours": test}, alternatives=alternatives,
    )  # fmt: skip
    assert rank_packings([decision]) == ["aten:mkldnn", None]
