"""Plan: the entry that serves each M."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from gemmtune.core.candidate import Candidate
from gemmtune.dispatch import Plan, PlanEntry
from gemmtune.dispatch.plan import Interval, nearest

SIZES = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=8, unique=True).map(sorted)


@given(SIZES, st.integers(1, 1 << 21))
def test_nearest_is_by_ratio(sizes: list[int], m: int) -> None:
    chosen = sizes[nearest(tuple(sizes), m)]
    least_distance = min(abs(math.log(size / m)) for size in sizes)
    assert abs(math.log(chosen / m)) <= least_distance + 1e-9


FOR_1, FOR_256 = Candidate.make("toy", "one"), Candidate.make("toy", "many")


def test_an_m_that_was_not_measured_is_served_by_the_plain_op_unless_bounds_show_a_kernel_to_be_faster() -> None:
    entries = (
        PlanEntry(1, FOR_1, seconds=1.0, plain_s=2.0),
        PlanEntry(16, None, plain_s=2.5),
        PlanEntry(256, FOR_256, seconds=2.4, plain_s=9.0),
    )
    plan = Plan("key", None, entries)
    assert [plan.pick(m).candidate for m in (1, 16, 256)] == [FOR_1, None, FOR_256]
    assert plan.pick(2).candidate is None  # at most 2.0 by two calls, and the plain op takes 2.0 at least
    assert plan.pick(100).candidate == FOR_256  # 2.4 at most, and half of 9.0 at least
    assert plan.pick(100000).candidate is None


def test_intervals_come_first_and_end_where_they_end() -> None:
    inside = PlanEntry(16, FOR_256, seconds=1.0)
    plan = Plan("key", None, (PlanEntry(8, FOR_1, seconds=1.0, plain_s=2.0),), (Interval(5, 20, inside),))
    assert [plan.pick(m) for m in (5, 8, 20)] == [inside, inside, inside]
    assert plan.pick(21).candidate is None
    assert [plan.covers(m) for m in (20, 21)] == [True, False]


def test_a_packed_weight_is_served_by_the_kernel_with_the_least_upper_bound() -> None:
    plan = Plan("key", "toy:x", (PlanEntry(1, FOR_1, seconds=1.0), PlanEntry(256, FOR_256, seconds=10.0)))
    assert plan.pick(4).candidate == FOR_1
    assert plan.pick(100).candidate == FOR_256
    assert [entry.m for entry in plan.ranked(100)] == [256, 1]


def test_plain_sizes_are_those_of_intervals_that_the_plain_op_serves() -> None:
    """They are close together where a library changes its kernel often."""
    served, plain = PlanEntry(8, FOR_1), PlanEntry(8, None)
    intervals = (Interval(3, 6, plain), Interval(7, 99, served), Interval(100, 8192, plain))
    sizes = Plan("key", None, (), intervals).plain_sizes()
    assert sizes[:6] == [3, 4, 5, 6, 100, 101]
    assert all(below < above <= below * 65 / 64 + 1 for below, above in itertools.pairwise(sizes[4:]))
    assert 8192 * 64 / 65 < sizes[-1] <= 8192
    assert Plan("key", None, (), intervals[1:2]).plain_sizes() == []
