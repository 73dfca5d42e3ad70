"""The kernels of a Plan: the fast ones of Decisions at several M, without those that failed at one of them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision, Evidence, LayoutDecision, Verdict
from gemmtune.core.plan_times import surcharge_at
from gemmtune.tuning.plan_pool import (
    LAYOUT_WITHIN,
    MAX_PER_DECISION,
    WITHIN,
    PoolKernel,
    kernel_pool,
    nearest_sizes,
    served_pool,
    surcharges_of,
)
from helpers.plans import (
    COMPOSITE,
    HALF,
    LARGE,
    PLAIN,
    PLAIN_S,
    PROBLEM,
    SMALL,
    SimulatedKernel,
    decisions_at,
    simulated,
    staircase,
)

TUNED = (1, 8, 48, 256)


def ids(pool: Sequence[PoolKernel]) -> list[str]:
    return [kernel.id for kernel in pool]


def with_row(decision: Decision, name: str, **changes: object) -> Decision:
    """Return the Decision with a changed row of one candidate."""
    rows = [msgspec.structs.replace(row, **changes) if row.id == name else row for row in decision.evidence]
    return msgspec.structs.replace(decision, evidence=tuple(rows))


def test_pool_has_the_kernels_that_were_fast_at_some_m() -> None:
    slow = simulated("slow", staircase(9.0, 4.0, 16), rows=16)
    pool = kernel_pool(decisions_at([SMALL, LARGE, slow], TUNED))
    assert ids(pool)[0] == PLAIN.id
    assert set(ids(pool)) == {PLAIN.id, SMALL.id, LARGE.id}
    by_id = {kernel.id: kernel for kernel in pool}
    assert by_id[PLAIN.id].fast_at == set(TUNED)
    assert by_id[SMALL.id].fast_at == {1, 8, 48}
    assert by_id[LARGE.id].fast_at == {48, 256}
    assert [by_id[name].tuned_m for name in (SMALL.id, LARGE.id)] == [1, 48]
    assert [by_id[name].tile_rows for name in (SMALL.id, LARGE.id, PLAIN.id)] == [16, 128, 1]
    assert [kernel.is_plain for kernel in pool] == [True, False, False]


@pytest.mark.parametrize(("share", "is_in"), [(0.8, True), (0.99, True), (1.01, False), (1.6, False)])
@pytest.mark.parametrize("fastest", [0.5, 0.7])
def test_kernel_with_the_plain_ops_product_is_timed_where_it_is_faster_than_that(
    share: float, is_in: bool, fastest: float
) -> None:
    """Not if it takes more than 1.5 times as long as the fastest one."""
    like = SimulatedKernel(Candidate.make("aten", "upcast_converted"), lambda m: share * PLAIN_S(m))
    others = [simulated(f"k{i}", lambda m, i=i: (fastest + 0.01 * i) * PLAIN_S(m)) for i in range(MAX_PER_DECISION)]
    pool = {kernel.id: kernel for kernel in kernel_pool(decisions_at([like, *others], [8]))}
    assert (like.candidate.id in pool) == (is_in and share < 1.5 * fastest)
    assert set(pool) >= {PLAIN.id, *(kernel.candidate.id for kernel in others)}
    if like.candidate.id in pool:
        assert pool[like.candidate.id].has_plain_product
    assert not pool[PLAIN.id].has_plain_product


def test_kernels_fast_at_most_m_come_first() -> None:
    pool = kernel_pool(decisions_at([LARGE, SMALL], TUNED))
    assert ids(pool) == [PLAIN.id, SMALL.id, LARGE.id]


def test_kernels_beyond_the_limit_of_their_layout_are_left_out() -> None:
    kernels = [
        simulated(f"{packing}{share}", lambda m, f=share: f * 1e-6, packing=packing)
        for packing, shares in (("p", (1.0, WITHIN - 0.01, WITHIN + 0.01)), ("q", (LAYOUT_WITHIN + 0.01,)))
        for share in shares
    ]
    assert ids(kernel_pool(decisions_at(kernels, [8]))) == [PLAIN.id, kernels[0].id, kernels[1].id]


def test_number_of_kernels_of_a_layout_is_limited() -> None:
    kernels = [simulated(f"k{i}", lambda m, i=i: (1.0 + 0.001 * i) * 1e-6) for i in range(9)]
    assert ids(kernel_pool(decisions_at(kernels, [8])))[1:] == [kernel.id for kernel in kernels[:MAX_PER_DECISION]]


def test_kernel_that_failed_at_one_m_is_left_out() -> None:
    first, second = decisions_at([SMALL, LARGE], [8, 256])
    wrong = with_row(second, SMALL.id, stage="failed", verdict=Verdict("wrong"), sample=None)
    assert ids(kernel_pool([first, wrong])) == [PLAIN.id, LARGE.id]


def test_failed_and_faulty_kernels_do_not_exclude_slower_ones() -> None:
    fast = simulated("fast", lambda m: 0.5 * min(SMALL.seconds(m), LARGE.seconds(m)))
    decisions = decisions_at([SMALL, LARGE, fast], TUNED)
    assert set(ids(kernel_pool(decisions))) == {PLAIN.id, fast.id}
    assert set(ids(kernel_pool(decisions, {fast.id}))) == {PLAIN.id, SMALL.id, LARGE.id}
    wrong = with_row(decisions[0], fast.id, stage="failed", verdict=Verdict("wrong"), sample=None)
    assert set(ids(kernel_pool([wrong, *decisions[1:]]))) == {PLAIN.id, SMALL.id, LARGE.id}


def test_plain_op_stays_in_the_pool_when_it_is_faulty() -> None:
    assert ids(kernel_pool(decisions_at([SMALL], [8]), {PLAIN.id})) == [PLAIN.id, SMALL.id]


def test_rows_without_a_time_are_left_out() -> None:
    (decision,) = decisions_at([SMALL, LARGE], [8])
    rows = (*decision.evidence, Evidence(simulated("x", PLAIN_S).candidate.to_dict(), "simulated/x[bm=1]", "untried"))
    untimed = with_row(msgspec.structs.replace(decision, evidence=rows), SMALL.id, sample=None)
    assert ids(kernel_pool([untimed])) == [PLAIN.id, LARGE.id]
    assert kernel_pool([msgspec.structs.replace(decision, evidence=())]) == []


def test_kernel_overlaps_only_if_it_was_faster_so_at_each_m() -> None:
    """``overlap`` is a result of the paired tests that it had."""
    decisions = decisions_at([SMALL], [1, 8, 48])
    tested = [
        msgspec.structs.replace(
            decision, layouts={"": LayoutDecision("winner", SMALL.id, PLAIN.id, 0.5, 0.4, 0.6, {}, overlap)}
        )
        for decision, overlap in zip(decisions, (True, False, True), strict=True)
    ]
    assert kernel_pool(tested)[1].overlap is False
    assert kernel_pool([tested[0], decisions[1], tested[2]])[1].overlap is True


@pytest.mark.parametrize(("sizes", "expected"), [([2048], False), ([128, 2048], True)])
def test_untested_kernel_for_many_rows_does_not_overlap(sizes: Sequence[int], expected: bool) -> None:
    decisions = [msgspec.structs.replace(decision, layouts={}) for decision in decisions_at([LARGE], sizes)]
    assert kernel_pool(decisions)[1].overlap is expected
    test = LayoutDecision("winner", LARGE.id, PLAIN.id, 0.5, 0.4, 0.6, {}, True)
    tested = [msgspec.structs.replace(decisions[0], layouts={"": test}), *decisions[1:]]
    assert kernel_pool(tested)[1].overlap is True


# --- ATen's plain op


def test_plain_op_is_atens_fastest_formulation_at_the_largest_m() -> None:
    """``aten/composite`` runs for all M, and is timed at all of them, where ``_int_mm`` wants 17 rows or more."""
    composite = Candidate.make("aten", "composite")

    def with_composite(share: float) -> list[Decision]:
        found = []
        for decision in decisions_at([SMALL], TUNED):
            (plain,) = [row for row in decision.evidence if row.id == PLAIN.id]
            assert plain.sample is not None
            sample = msgspec.structs.replace(plain.sample, ratio=share)
            other = msgspec.structs.replace(plain, candidate=composite.to_dict(), id=composite.id, sample=sample)
            found.append(msgspec.structs.replace(decision, evidence=(*decision.evidence, other)))
        return found

    for share, name in ((1.1, PLAIN.id), (0.9, composite.id)):
        assert [kernel.id for kernel in kernel_pool(with_composite(share)) if kernel.is_plain] == [name]
    fast, slow = with_composite(0.9), with_composite(1.1)
    without = [with_row(decision, composite.id, sample=None) for decision in fast[1:]]
    assert [kernel.id for kernel in kernel_pool([fast[0], *without]) if kernel.is_plain] == [PLAIN.id]
    *few, last = slow
    few = [with_row(decision, PLAIN.id, sample=None) for decision in few]
    assert [kernel.id for kernel in kernel_pool([*few, last]) if kernel.is_plain] == [PLAIN.id]


def test_conversion_of_the_operands_is_no_plain_op_where_pytorch_has_an_operator() -> None:
    for problem, plain in ((HALF, PLAIN.id), (PROBLEM, COMPOSITE.id)):
        pool = kernel_pool(decisions_at([COMPOSITE], TUNED, problem))
        assert [kernel.id for kernel in pool if kernel.is_plain] == [plain]
        assert COMPOSITE.id in ids(pool)
    assert ids(served_pool(decisions_at([COMPOSITE], TUNED, HALF))) == [PLAIN.id, COMPOSITE.id]


# --- paired tests


def layout_test(ratio: float, worst: float, candidate: str = SMALL.id) -> LayoutDecision:
    return LayoutDecision("winner", candidate, PLAIN.id, ratio, 0.9 * ratio, 1.1 * ratio, {"between": worst})


def test_surcharge_is_that_of_the_slowest_surrounding_at_each_m() -> None:
    tests = [
        {"": layout_test(0.5, 0.6), "p": layout_test(0.4, 0.6), "q": layout_test(0.5, 0.5)},
        {"": layout_test(0.5, 0.4), "q": layout_test(0.8, 1.0)},
        {"": layout_test(1.0, 1.0, PLAIN.id)},  # ATen's own kernel was not compared with itself
    ]
    decisions = [
        msgspec.structs.replace(decision, layouts=layouts)
        for decision, layouts in zip(decisions_at([SMALL, LARGE], (8, 48, 192)), tests, strict=True)
    ]
    surcharges = surcharges_of(decisions)
    assert surcharges == {
        "raw": {8: pytest.approx(1.2), 48: 1.0},
        "packed": {8: pytest.approx(1.5), 48: pytest.approx(1.25)},
    }
    assert [surcharge_at(surcharges, "r", m) for m in (1, 19, 20, 512)] == pytest.approx([1.5, 1.5, 1.25, 1.25])
    assert surcharge_at({}, "r", 8) == 1.0


@pytest.mark.parametrize(
    ("falling", "expected"),
    [(False, {1: 1.2, 8: 1.1, 48: 1.3, 192: 1.0}), (True, {1: 1.2, 8: 1.1, 48: 1.1, 192: 1.0})],
)
def test_surcharge_above_one_at_a_smaller_m_is_noise_where_they_fall(falling: bool, expected: dict[int, float]) -> None:
    sizes = (48, 192, 1, 8)  # Decisions come in any order
    decisions = [
        msgspec.structs.replace(decision, layouts={"p": layout_test(0.5, 0.5 * worst)})
        for decision, worst in zip(decisions_at([SMALL], sizes), (1.3, 0.9, 1.2, 1.1), strict=True)
    ]
    assert surcharges_of(decisions, falling=falling)["packed"] == pytest.approx(expected)


@pytest.mark.parametrize(("m", "expected"), [
    (1, {1, 8, 48}), (4, {1, 8}), (8, {1, 8, 48}), (100, {48, 192}), (192, {8, 48, 192}), (300, {48, 192})
])  # fmt: skip
def test_nearest_sizes_are_on_both_sides(m: int, expected: set[int]) -> None:
    assert nearest_sizes({1, 8, 48, 192}, m) == expected


def test_served_pool_has_one_kernel_of_each_layout_and_decision() -> None:
    slow_layout = simulated("q", lambda m: 2.0 * SMALL.seconds(m), packing="q")
    pool = served_pool(decisions_at([SMALL, LARGE, slow_layout], TUNED))
    assert {kernel.id: kernel.fast_at for kernel in pool} == {
        PLAIN.id: set(TUNED), SMALL.id: {1, 8, 48}, LARGE.id: {256}, slow_layout.id: set(TUNED),
    }  # fmt: skip


def test_served_pool_has_no_kernel_where_plain_serves() -> None:
    slow = simulated("slow", lambda m: 1.2 * PLAIN_S(m))
    assert ids(served_pool(decisions_at([slow], TUNED))) == [PLAIN.id]
    assert ids(served_pool(decisions_at([SMALL], TUNED), {SMALL.id})) == [PLAIN.id]
