"""Race entries: calls per timing, their ranking when the machine's speed changes, and the Sample of each."""

from __future__ import annotations

import random

import pytest

from gemmtune.timing.race_entry import (
    KEPT_TIMES,
    EntrantError,
    RaceEntry,
    fastest,
    ranked,
    ratio_to_baseline,
    sample,
)
from gemmtune.timing.stats import median_interval, ratio_interval


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


def test_fastest_is_the_first_of_those_that_were_timed() -> None:
    never, slow, quick = _make_entry("never", {}), _make_entry("slow", {0: 2.0}), _make_entry("quick", {0: 1.0})
    assert fastest([never, slow, quick]) is quick
    assert fastest([never]) is None
    assert fastest([]) is None


def test_median_and_cost_of_the_next_timing() -> None:
    entry = _make_entry("entry", {0: 1.0, 1: 5.0, 2: 2.0})
    entry.calls = 3
    assert (entry.median, entry.cost) == (2.0, 6.0)
    never = RaceEntry("never", lambda _: None, False, None, calls=3)
    assert (never.median, never.cost) == (float("inf"), 0.0)


def test_entry_without_a_packing_reads_the_raw_weight() -> None:
    assert RaceEntry("raw", lambda _: None, False, None).raw
    assert not RaceEntry("packed", lambda _: None, False, "p").raw


@pytest.mark.parametrize(
    ("seconds", "floor_s", "calls"),
    [
        (1.0, 8.0, 4),  # a timing of half the floor is long enough
        (0.75, 8.0, 11),  # one below that is not: the floor is 10.67 calls
        (0.125, 8.0, 64),
        (1e-9, 8.0, 10_000),
        (1e-9, 4e-6, 400),  # a call is taken to last 10 ns at least
        (0.0, 4e-6, 400),
        (1.0, 1.0, 4),
    ],
)
def test_timing_far_below_the_floor_raises_the_calls(seconds: float, floor_s: float, calls: int) -> None:
    entry = RaceEntry("entry", lambda _: None, False, None, calls=4)
    entry.record(2, seconds, floor_s)
    assert (entry.times, entry.calls) == ({2: seconds}, calls)


def test_calls_are_never_reduced() -> None:
    entry = RaceEntry("entry", lambda _: None, False, None, calls=20_000)
    entry.record(0, 1e-9, 8.0)
    assert entry.calls == 20_000


def test_exception_of_a_kernel_names_its_entry() -> None:
    def run(i: int) -> None:
        raise RuntimeError(f"operand {i}")

    entry = RaceEntry("entry", run, False, None)
    with pytest.raises(EntrantError, match="raised RuntimeError: operand 7") as caught:
        entry.guarded(7)
    assert caught.value.entry is entry


def test_paired_times_are_those_of_the_last_200_shared_rounds() -> None:
    first = _make_entry("first", {r: float(r) for r in range(300)})
    second = _make_entry("second", {r: 2.0 * r for r in range(50, 400)})
    assert first.paired(second) == ([float(r) for r in range(100, 300)], [2.0 * r for r in range(100, 300)])


def test_ratio_to_the_baseline_is_the_median_over_the_shared_rounds() -> None:
    baseline = _make_entry("baseline", {0: 1.0, 1: 2.0, 2: 4.0, 3: 1.0})
    assert ratio_to_baseline(_make_entry("entry", {0: 3.0, 1: 4.0, 2: 4.0}), baseline) == 2.0
    assert ratio_to_baseline(_make_entry("other", {9: 1.0}), baseline) == float("inf")


def test_sample_of_the_rounds_has_the_ratio_to_the_baseline() -> None:
    rng = random.Random(0)
    times = {r: rng.uniform(0.9, 1.1) for r in range(100)}
    entry, baseline = _make_entry("entry", times), _make_entry("baseline", dict.fromkeys(range(100), 2.0))
    result = sample(entry, baseline, {"operands": "hot"})
    assert result is not None
    interval, ratio = median_interval(list(times.values())), ratio_interval(*entry.paired(baseline))
    assert (result.median_s, result.lo_s, result.hi_s) == (interval.center, interval.lo, interval.hi)
    assert (result.ratio, result.ratio_lo, result.ratio_hi) == (ratio.center, ratio.lo, ratio.hi)
    assert (result.rounds, result.condition, result.conditions) == (100, "hot", {"operands": "hot"})
    assert result.times == tuple(times.values())[-KEPT_TIMES:]


@pytest.mark.parametrize("rounds", [20, 250])
def test_sample_of_a_paired_test_has_the_last_pairs(rounds: int) -> None:
    rng = random.Random(1)
    entry, baseline = _make_entry("entry", {0: 9.0}), _make_entry("baseline", {0: 1.0})
    entry.test_times = [rng.uniform(0.9, 1.1) for _ in range(rounds)]
    entry.baseline_test_times = [rng.uniform(1.9, 2.1) for _ in range(rounds)]
    result = sample(entry, baseline, {})
    assert result is not None
    ratio = ratio_interval(entry.test_times[-200:], entry.baseline_test_times[-200:])
    assert (result.ratio, result.ratio_lo, result.ratio_hi) == (ratio.center, ratio.lo, ratio.hi)
    assert (result.rounds, result.condition) == (rounds, "cold")
    assert result.median_s == median_interval(entry.test_times).center


def test_sample_without_a_ratio_is_one_times_the_baseline() -> None:
    baseline, other = _make_entry("baseline", {0: 2.0, 1: 2.0}), _make_entry("other", {5: 1.0})
    for entry, against in ((baseline, baseline), (other, None), (other, baseline)):
        result = sample(entry, against, {"operands": "cold"})
        assert result is not None
        assert (result.ratio, result.ratio_lo, result.ratio_hi, result.condition) == (1.0, 1.0, 1.0, "cold")
    assert sample(_make_entry("never", {}), baseline, {}) is None
