from msgspec.structs import replace

from gemmtune.core.decision import Verdict
from gemmtune.core.tuned_plan import PlanInterval
from gemmtune.core.workloads import bmm_problem
from gemmtune.report.plan_rows import (
    cannot_serve,
    intervals_text,
    noise_text,
    plain_kernel,
    plan_document,
    plan_label,
    plan_line,
    short_names,
    summarize_layouts,
    thinned,
    times_over_m,
    verified_text,
)
from helpers.plans import COMPOSITE, HALF, LARGE, PLAIN, PROBLEM, SMALL, planted_plan, simulated, staircase

SIZES = [1, 16, 48, 128]
PACKED = simulated("packed", staircase(2.0, 1.0, 16), rows=16, packing="panels")
PLAN = planted_plan(
    PROBLEM,
    [SMALL, LARGE, PACKED],
    {"": [(1, 40, SMALL), (41, 128, LARGE)], "panels": [(1, 128, PACKED)]},
    SIZES,
    target_key="t",
)


def test_layouts_are_summarized() -> None:
    raw, packed = summarize_layouts(PLAN)
    assert (raw.label, raw.packing, raw.first, raw.last) == ("Mx64x96 fp32", "", 1, 128)
    assert (raw.kernels, raw.intervals, raw.regret_m, raw.measured) == (2, 2, 48, 4)
    assert (packed.packing, packed.kernels, packed.intervals, packed.regret) == ("panels", 1, 1, 0.0)


def test_plan_line() -> None:
    assert plan_line(PLAN) == (
        "Mx64x96 fp32: M 1-128, 3 kernels in 3 intervals of 2 layouts, worst regret 11.1% at M = 48"
    )
    one = planted_plan(PROBLEM, [SMALL], {"": [(1, 16, SMALL)]}, [1, 16], target_key="t")
    assert plan_line(one) == "Mx64x96 fp32: M 1-16, 1 kernel in 1 interval, worst regret 0.0%"
    keyed = replace(one, config_key="power_of_2")
    assert plan_line(keyed) == "Mx64x96 fp32: M 1-16 by power_of_2, 1 kernel in 1 interval, worst regret 0.0%"
    assert (plan_document(keyed)["config_key"], plan_document(one)["config_key"]) == ("power_of_2", None)
    untimed = replace(one, kernels=tuple(replace(kernel, times={}) for kernel in one.kernels))
    assert plan_line(untimed) == "Mx64x96 fp32: M 1-16, 1 kernel in 1 interval"


def test_plain_kernel_is_the_unpacked_plain_op() -> None:
    found = plain_kernel(PLAN)
    assert found is not None
    assert found.id == PLAIN.id
    without = replace(PLAN, kernels=tuple(kernel for kernel in PLAN.kernels if kernel.id != PLAIN.id))
    assert plain_kernel(without) is None
    assert [row.aten_s for row in times_over_m(without, "")] == [None] * 4
    assert short_names(without) == {SMALL.id: "A", LARGE.id: "B", PACKED.id: "C"}


def test_plain_kernel_is_no_conversion_where_pytorch_has_an_operator() -> None:
    plan = planted_plan(HALF, [COMPOSITE], {"": [(1, 128, COMPOSITE)]}, SIZES, target_key="t")
    found = plain_kernel(plan)
    assert found is not None
    assert found.id == PLAIN.id
    assert short_names(plan) == {PLAIN.id: "ATen", COMPOSITE.id: "A"}


def test_times_have_the_kernels_of_the_layout_only() -> None:
    rows = times_over_m(PLAN, "panels")
    assert [row.m for row in rows] == SIZES
    assert {name for row in rows for name in row.seconds} == {PACKED.id}
    assert [row.serves for row in times_over_m(PLAN, "")] == [SMALL.id, SMALL.id, LARGE.id, LARGE.id]


def test_m_at_which_only_aten_was_timed_is_left_out() -> None:
    kernels = [replace(k, times={m: k.times[m] for m in (1, 48)}) if k.id == PACKED.id else k for k in PLAN.kernels]
    plan = replace(PLAN, kernels=tuple(kernels))
    assert [row.m for row in times_over_m(plan, "panels")] == [1, 48]
    assert [row.m for row in times_over_m(plan, "")] == SIZES
    aten = replace(plan, intervals={"": (PlanInterval(1, 128, PLAIN.id),)})
    assert [row.m for row in times_over_m(aten, "")] == SIZES


def test_plan_over_the_batch_is_named_so() -> None:
    problem = bmm_problem(6, 4, 64, 96, "float32")
    plan = planted_plan(problem, [SMALL, LARGE], {"": [(1, 40, SMALL), (41, 128, LARGE)]}, SIZES, target_key="t")
    plan = replace(plan, dim="batch", plan_key=problem.plan_key_over("batch"))
    assert plan_label(plan) == "Bx4x64x96 fp32"
    assert plan_line(plan) == (
        "Bx4x64x96 fp32: batch 1-128, 2 kernels in 2 intervals, worst regret 11.1% at batch = 48"
    )
    (summary,) = summarize_layouts(plan)
    assert summary.size == "batch"
    assert plan_document(plan)["dim"] == "batch"
    assert noise_text(plan).startswith("+-0.5% in the median over 4 batches")
    assert verified_text(plan.kernels[0], "batch").startswith("right at 4 batches from 1 to 128")
    assert verified_text(replace(plan.kernels[0], verified=(7,)), "batch").startswith("right at batch = 7")


def test_thinned_rows_have_both_ends_and_the_worst_regret() -> None:
    sizes = list(range(1, 301))
    rows = times_over_m(
        planted_plan(PROBLEM, [SMALL, LARGE], {"": [(1, 77, LARGE), (78, 300, SMALL)]}, sizes, target_key="t"), ""
    )
    for limit in (3, 4, 24, 299):
        kept = thinned(rows, limit)
        assert len(kept) <= limit
        assert [kept[0].m, kept[-1].m] == [1, 300]
        assert max(rows, key=lambda row: row.regret or 0.0) in kept
    assert thinned(rows, 300) == rows


def test_intervals_text() -> None:
    names = short_names(PLAN)
    assert names == {PLAIN.id: "ATen", SMALL.id: "A", LARGE.id: "B", PACKED.id: "C"}
    assert intervals_text(PLAN, "", names) == "1-40: A, 41-128: B"
    single = replace(PLAN, intervals={"": (PlanInterval(1, 1, SMALL.id), PlanInterval(2, 128, PLAIN.id))})
    assert intervals_text(single, "", names) == "1: A, 2-128: ATen"


def test_what_was_verified() -> None:
    small = PLAN.find(SMALL.id)
    assert small is not None
    assert verified_text(small) == "right at 4 M from 1 to 128 (worst error 0.25 of the bound)"
    assert verified_text(replace(small, verified=(7,), verdict=Verdict("exact"))) == "right at M = 7"
    assert verified_text(replace(small, verified=(7,), verdict=Verdict("wrong"))) == "wrong at M = 7"
    assert verified_text(replace(small, verified=(), verdict=None)).startswith("not verified")


def test_kernels_that_cannot_serve_have_a_reason() -> None:
    verdicts = {SMALL.id: Verdict("wrong", "M = 8: an element is off"), LARGE.id: Verdict("crashed")}
    kernels = tuple(replace(kernel, verdict=verdicts.get(kernel.id, kernel.verdict)) for kernel in PLAN.kernels)
    assert cannot_serve(PLAN) == {}
    assert cannot_serve(replace(PLAN, kernels=kernels)) == {
        SMALL.id: "wrong: M = 8: an element is off", LARGE.id: "crashed",
    }  # fmt: skip


def test_noise_text() -> None:
    noisy = replace(PLAN, noise={1: 0.004, 16: 0.031, 48: 0.01})
    assert noise_text(noisy) == "+-1.0% in the median over 3 M (0.4% to 3.1%), with 95%"
    assert noise_text(replace(PLAN, noise={})) == ""
