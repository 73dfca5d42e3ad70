"""Lanes: ranking them when the machine's pace changes."""

from __future__ import annotations

import random

from gemmtune.timing.race_entry import RaceEntry, ranked


def _lane(name: str, times: dict[int, float]) -> RaceEntry:
    lane = RaceEntry(name, lambda _: None, False, None)
    for round_, seconds in times.items():
        lane.record(round_, seconds, 0.0)
    return lane


def test_ranked_by_what_lanes_did_in_the_same_rounds() -> None:
    # In half of the rounds the machine is slow, and the two differ in how much that costs them: their own medians fall
    # on one side or the other of the gap.
    rng = random.Random(0)
    paces = [2.0 if rng.random() < 0.5 else 1.0 for _ in range(41)]
    quick = _lane("quick", {r: 1.00e-3 * pace * rng.uniform(0.99, 1.01) for r, pace in enumerate(paces)})
    slow = _lane("slow", {r: 1.03e-3 * pace * rng.uniform(0.99, 1.01) for r, pace in enumerate(paces)})
    other = _lane("other", {r: 1.10e-3 * pace for r, pace in enumerate(paces)})
    assert [lane.id for lane in ranked([other, slow, quick])] == ["quick", "slow", "other"]


def test_ranked_uses_only_rounds_that_all_share() -> None:
    # The late one met the slow rounds only.
    early = _lane("early", {r: 1.0e-3 if r < 10 else 2.0e-3 for r in range(20)})
    late = _lane("late", dict.fromkeys(range(10, 20), 0.0019))
    assert [lane.id for lane in ranked([early, late])] == ["late", "early"]


def test_ranked_without_a_shared_round_falls_back_to_medians() -> None:
    first, second = _lane("first", {0: 2.0e-3}), _lane("second", {1: 1.0e-3})
    assert [lane.id for lane in ranked([first, second])] == ["second", "first"]
    assert ranked([]) == []
