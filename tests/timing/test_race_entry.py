"""Race entries: their ranking when the machine's speed changes."""

from __future__ import annotations

import random

from gemmtune.timing.race_entry import RaceEntry, ranked


def _make_entry(name: str, times: dict[int, float]) -> RaceEntry:
    entry = RaceEntry(name, lambda _: None, False, None)
    for round_, seconds in times.items():
        entry.record(round_, seconds, 0.0)
    return entry


def test_ranking_compares_times_within_rounds() -> None:
    # The machine is slow in half of the rounds. Each entry's own median falls on one side or the other of the gap
    # between slow and fast rounds.
    rng = random.Random(0)
    slowdowns = [2.0 if rng.random() < 0.5 else 1.0 for _ in range(41)]
    quick = _make_entry(
        "quick", {r: 1.00e-3 * slowdown * rng.uniform(0.99, 1.01) for r, slowdown in enumerate(slowdowns)}
    )
    slow = _make_entry(
        "slow", {r: 1.03e-3 * slowdown * rng.uniform(0.99, 1.01) for r, slowdown in enumerate(slowdowns)}
    )
    other = _make_entry("other", {r: 1.10e-3 * slowdown for r, slowdown in enumerate(slowdowns)})
    assert [entry.id for entry in ranked([other, slow, quick])] == ["quick", "slow", "other"]


def test_ranking_uses_only_shared_rounds() -> None:
    # The entry "late" has times of slow rounds only.
    early = _make_entry("early", {r: 1.0e-3 if r < 10 else 2.0e-3 for r in range(20)})
    late = _make_entry("late", dict.fromkeys(range(10, 20), 0.0019))
    assert [entry.id for entry in ranked([early, late])] == ["late", "early"]


def test_ranking_uses_medians_without_a_shared_round() -> None:
    first, second = _make_entry("first", {0: 2.0e-3}), _make_entry("second", {1: 1.0e-3})
    assert [entry.id for entry in ranked([first, second])] == ["second", "first"]
    assert ranked([]) == []
