"""The rounds before the paired test: screening, the reserved time, calls per timing, and failed entrants."""

from __future__ import annotations

import pytest

from gemmtune.testing.clock import FakeClock
from gemmtune.timing.elimination import Elimination, Entrant, RaceSetup, raise_calls
from gemmtune.timing.race_entry import RaceEntry


def eliminate(challengers: list[float], baseline_s: float = 1e-3, *, budget_s: float = 6.0) -> Elimination:
    """Return the finished rounds of challengers with these seconds per call, each of its own packing.

    ``noise`` is small, so that an interval after eight rounds is narrower than a tenth.
    """
    clock = FakeClock(0, noise=0.002)
    entrants = [Entrant("aten", clock.kernel(baseline_s), is_baseline=True)]
    entrants += [Entrant(f"native{i}", clock.kernel(s), packing=f"g{i}") for i, s in enumerate(challengers)]
    rounds = Elimination(entrants, clock, budget_s, 0, None, RaceSetup(), 50)
    rounds.choose()
    return rounds


@pytest.mark.parametrize(("ratio", "far_apart"), [(0.5, True), (1.0, False), (1.3, True)])
def test_intervals_tell_whether_leader_and_baseline_are_far_apart(ratio: float, far_apart: bool) -> None:
    """A third entrant, as fast as the first, keeps the rounds going."""
    assert eliminate([ratio * 1e-3, ratio * 1e-3]).far_apart is far_apart


@pytest.mark.parametrize(("ratio", "far_apart"), [(0.5, True), (1.0, False), (1.4, True)])
def test_single_times_tell_whether_they_are_far_apart_before_eight_rounds(ratio: float, far_apart: bool) -> None:
    rounds = eliminate([ratio * 1e-3])
    assert rounds.rounds < 8
    assert rounds.far_apart is far_apart


def test_one_challenger_and_one_baseline_are_chosen_after_the_last_screening() -> None:
    assert eliminate([0.9e-3]).rounds == 4


@pytest.mark.parametrize(("seconds", "rounds"), [(15e-3, 4), (40e-3, 2)])
def test_difference_that_two_stalls_explain_waits_for_the_second_screening(seconds: float, rounds: int) -> None:
    slow = eliminate([6e-3, seconds], 6e-3).entries[-1]
    assert slow.stage == "screened"
    assert slow.reason.endswith(f"slower than the best after {rounds} rounds")


def test_slow_entry_makes_only_the_calls_that_twice_the_floor_allows() -> None:
    fast, slow = (RaceEntry(str(s), lambda _: None, False, None, calls=1, times={0: s}) for s in (1e-6, 1e-4))
    raise_calls([fast, slow], 500, 500e-6)
    assert (fast.calls, slow.calls) == (500, 10)


def test_small_difference_eliminates_nobody_before_the_operands_have_moved_eight_times() -> None:
    """Addresses of operands change a time by some percent. A difference of 10% is larger than that."""
    clock = FakeClock(0, noise=0.002)
    ratios = (1.0, 1.03, 1.1)
    entrants = [Entrant("aten", clock.kernel(1e-3), is_baseline=True)]
    entrants += [Entrant(f"native{i}", clock.kernel(ratio * 0.9e-3), packing="p") for i, ratio in enumerate(ratios)]
    rounds = Elimination(entrants, clock, 6.0, 0, None, RaceSetup(move=lambda: None), 50)
    rounds.choose()
    _, _, near, far = rounds.entries
    assert far.reason.endswith("after 12 rounds")
    assert near.stage == "eliminated"
    assert int(near.reason.split()[-2]) >= 40
