"""Plan: the entry with the nearest tuned M."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from gemmtune.core.candidate import Candidate
from gemmtune.dispatch import Plan, PlanEntry
from gemmtune.dispatch.plan import nearest

SIZES = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=8, unique=True).map(sorted)


@given(SIZES, st.integers(1, 1 << 21))
def test_nearest_is_by_ratio(sizes: list[int], m: int) -> None:
    chosen = sizes[nearest(tuple(sizes), m)]
    least_distance = min(abs(math.log(size / m)) for size in sizes)
    assert abs(math.log(chosen / m)) <= least_distance + 1e-9


def test_pick_returns_the_entry_of_the_nearest_m() -> None:
    for_1, for_256 = Candidate.make("toy", "one"), Candidate.make("toy", "many")
    plan = Plan("key", None, (PlanEntry(1, for_1), PlanEntry(16, None), PlanEntry(256, for_256)))
    assert [plan.pick(m).m for m in (1, 3, 4, 5, 16, 63, 65, 100000)] == [1, 1, 1, 16, 16, 16, 256, 256]
    assert any(entry.candidate is not None for entry in plan.entries)
