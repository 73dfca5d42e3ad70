"""Where is measured next, from simulated times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmtune.core.tuned_plan import PlanInterval
from gemmtune.tuning import gaps
from gemmtune.tuning.curves import Curves
from gemmtune.tuning.gaps import Gap
from helpers.curves import sample_curves, serve, simulated_curves, staircase, wave_curves


def test_crossing_is_more_urgent_than_a_flat_part() -> None:
    curves = sample_curves(
        {"a": staircase(1.0, 0.0), "b": lambda m: 0.5 if m <= 100 else 2.0}, (1, 64, 128, 256, 512),
        steps={"a": 64, "b": 512},
    )  # fmt: skip
    found = gaps.gaps(curves, serve(curves))
    assert (found[0].a, found[0].b) == (64, 128)
    assert found[0].loss > 0.3
    assert {(gap.a, gap.b): gap.loss for gap in found[1:]} == {(1, 64): 0.0, (128, 256): 0.0, (256, 512): 0.0}


@pytest.mark.parametrize(("counts", "first"), [({20: 9}, (17, 32)), ({300: 9}, (257, 512))])
def test_gap_with_recorded_calls_is_the_most_urgent(counts: Mapping[int, int], first: tuple[int, int]) -> None:
    models = {"a": lambda m: 1.5 if 20 < m < 400 else 1.0, "b": lambda m: 1.0 if 20 < m < 400 else 1.5}
    curves = sample_curves(models, steps=dict.fromkeys(models, 512), counts=counts)
    found = gaps.gaps(curves, serve(curves))
    assert (found[0].a, found[0].b) == first
    assert [gap.loss for gap in found[:3]] == pytest.approx([0.5, 0.5, 0.0])


def test_step_between_two_m_may_lose_time() -> None:
    """With steps of one row the time is on a line between two M; with steps of 64 rows it may be far off."""
    losses = {}
    for rows in (1, 64):
        curves = sample_curves({"k": staircase(1.0, rows / 64, rows)}, (64, 192), steps={"k": rows})
        (gap,) = gaps.gaps(curves, serve(curves))
        losses[rows] = gap.loss
    assert losses[1] < 0.05 < losses[64]


@given(simulated_curves())
def test_gaps_are_ranked_and_contain_other_m(curves: Curves) -> None:
    found = gaps.gaps(curves, serve(curves))
    assert all(gap.b - gap.a > 1 for gap in found)
    assert [gap.urgency for gap in found] == sorted((gap.urgency for gap in found), reverse=True)
    assert all(math.isfinite(gap.loss) and gap.loss >= 0.0 for gap in found)


@given(simulated_curves(), st.booleans())
def test_next_size_is_inside_the_gap(curves: Curves, odd: bool) -> None:
    for gap in gaps.gaps(curves, serve(curves)):
        assert gap.a < gaps.next_size(curves, gap, odd) < gap.b


@pytest.mark.parametrize(
    ("rows", "gap", "expected"),
    [
        (64, (64, 256), 129),
        (16, (64, 100), 81),
        (64, (1, 60), 9),
        (64, (65, 257), 128),  # the gap begins and ends with the first M after a step
        (64, (65, 256), 129),
        (64, (100, 300), 193),
        (64, (129, 300), 192),
    ],
)
def test_next_size_is_beside_a_step_of_the_tile_if_the_gap_has_one(
    rows: int, gap: tuple[int, int], expected: int
) -> None:
    curves = sample_curves({"k": staircase(1.0, 1.0, rows)}, gap, steps={"k": rows})
    assert gaps.next_size(curves, Gap(*gap, 1.0, 1.0)) == expected


def test_next_size_is_the_first_after_a_full_row_of_tiles_that_the_plain_op_serves() -> None:
    for a, is_plain, expected in ((128, True, 129), (128, False, 257), (130, True, 256), (192, True, 193)):
        curves = sample_curves({"k": staircase(1.0, 1.0, 64)}, (a, 400), steps={"k": 64})
        assert gaps.next_size(curves, Gap(a, 400, 1.0, 1.0, is_plain)) == expected


def test_gaps_tell_whether_the_plain_op_serves_them() -> None:
    times = {"k": {64: 1.0, 128: 2.0, 192: 2.0, 400: 4.0}, "p": {64: 3.0, 128: 2.0, 192: 3.0, 400: 5.0}}
    curves = Curves(1, 400, times, "p")
    found = {gap.a: gap.is_plain for gap in gaps.gaps(curves, serve(curves))}
    assert found == {64: False, 128: True, 192: False}


def test_next_size_is_odd_where_asked() -> None:
    curves = sample_curves({"k": staircase(1.0, 1.0)}, (64, 256))
    gap = Gap(64, 256, 1.0, 1.0)
    assert [gaps.next_size(curves, gap, odd) for odd in (True, False)] == [129, 128]
    assert gaps.next_size(curves, Gap(63, 65, 1.0, 1.0)) == 64


def margin_curves(kernel_s: float) -> Curves:
    """Return curves of a plain op that was scanned and takes 100 us, and of a kernel."""
    sizes = (256, 384, 512)
    times = {"k": dict.fromkeys(sizes, kernel_s), "plain": dict.fromkeys(sizes, 1e-4)}
    scan = dict.fromkeys(range(256, 512, 32), 1e-4)
    return Curves(256, 512, times, "plain", {"k": 64}, waves=True, scan=scan)


def test_thin_margins_are_measured_between_edges_of_tiles() -> None:
    serving = [PlanInterval(256, 400, "k"), PlanInterval(401, 512, "plain")]
    thin = gaps.thin_margins(margin_curves(0.95e-4), serving)
    assert [name for _, name in thin] == ["k", "k"]
    assert sorted((256 < m < 384, 384 < m <= 400) for m, _ in thin) == [(False, True), (True, False)]
    assert all(m % 8 not in (0, 1, 7) for m, _ in thin)
    assert gaps.thin_margins(margin_curves(0.8e-4), serving) == []  # far faster
    assert gaps.thin_margins(replace(margin_curves(0.95e-4), waves=False), serving) == []
    assert gaps.thin_margins(replace(margin_curves(0.95e-4), scan={}), serving) == []


def test_the_thinnest_margins_come_first() -> None:
    curves = margin_curves(0.95e-4)
    slower = {256: 0.9e-4, 384: 0.9e-4, 512: 0.97e-4}
    (first, _), (second, _) = gaps.thin_margins(
        replace(curves, times={**curves.times, "k": slower}), [PlanInterval(256, 512, "k")]
    )
    assert first > 384 > second


def test_expected_loss_of_the_plain_op_is_that_of_its_scan() -> None:
    """At M = 448 it takes twice as long as at the measured M on either side."""
    times = {"k": {384: 1e-4, 512: 1e-4}, "plain": {384: 0.9e-4, 512: 0.9e-4}}
    scan = {m: 2e-4 if 420 < m < 470 else 0.9e-4 for m in range(385, 512, 8)}
    curves = Curves(
        384, 512, times, "plain", {"k": 64}, waves=True, scan=scan,
        estimated_s=lambda name, m: 1.0 if name == "k" else None,
    )  # fmt: skip
    serving = [PlanInterval(384, 512, "plain")]
    ((m, name),) = gaps.expected_losses(curves, serving, lambda m: ["k"], 0.01)
    assert (name, 420 < m < 470) == ("k", True)
    assert gaps.expected_losses(replace(curves, scan={}), serving, lambda m: ["k"], 0.01) == []


def test_m_are_found_at_which_another_kernel_is_expected_to_be_faster() -> None:
    curves = wave_curves({"small": 48, "between": 56}, (150, 190, 260))
    found = (PlanInterval(150, 260, "small"),)
    (m, name), *others = gaps.expected_losses(curves, found, lambda m: ["small", "between"], 0.01)
    assert not others
    assert name == "between"
    assert 193 <= m <= 224
    assert not gaps.expected_losses(curves, found, lambda m: ["small"], 0.01)
    assert not gaps.expected_losses(curves, found, lambda m: ["small", "between"], 0.8)
