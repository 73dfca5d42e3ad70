"""A duel on simulated time: who wins, what a fault costs, and what the deadline allows."""

from __future__ import annotations

import itertools
import random

import pytest

from gemmtune.testing.clock import FakeClock
from gemmtune.timing.clock import Run
from gemmtune.timing.paired_test import PairedTest, paired_test
from gemmtune.timing.race_entry import RaceEntry
from gemmtune.timing.stats import ratio_interval


def lane(name: str, run: Run, *, is_baseline: bool = False, seconds: float = 1e-3) -> RaceEntry:
    """A lane of one call a timing, timed once before."""
    return RaceEntry(name, run, is_baseline, None, calls=1, times={0: seconds})


def fight(clock: FakeClock, challenger: Run, *, deadline_s: float = 60.0) -> tuple[PairedTest, RaceEntry]:
    """A duel of ``challenger`` with an incumbent of a millisecond."""
    mine = lane("native", challenger)
    theirs = lane("aten", clock.kernel(1e-3), is_baseline=True)
    found = paired_test(mine, theirs, clock, lambda _: deadline_s, random.Random(0))
    return found, mine


def raising_from(call: int, run: Run) -> Run:
    """``run``, which raises from so many calls on."""
    calls = 0

    def counted(i: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= call:
            raise RuntimeError("misaligned address")
        run(i)

    return counted


@pytest.mark.parametrize("call", [1, 2, 49, 51])
def test_a_challenger_that_raises_has_lost_and_is_dropped(call: int) -> None:
    clock = FakeClock()
    found, mine = fight(clock, raising_from(call, clock.kernel(0.996e-3)))
    assert not found.won
    assert not found.decided
    assert found.reason == "native raised RuntimeError: misaligned address in the paired test"
    assert (mine.stage, mine.active, mine.reason) == ("failed", False, found.reason)
    assert len(found.challenger) == len(found.baseline) == call - 1


def test_an_incumbent_that_raises_is_dropped_too() -> None:
    clock = FakeClock()
    mine, theirs = (
        lane("native", clock.kernel(1e-3)),
        lane("aten", raising_from(7, clock.kernel(1e-3)), is_baseline=True),
    )
    found = paired_test(mine, theirs, clock, lambda _: 60.0, random.Random(0))
    assert not found.won
    assert found.reason.startswith("aten raised RuntimeError")
    assert (theirs.stage, theirs.active) == ("failed", False)
    assert mine.active


def test_a_faster_challenger_wins_at_the_first_look() -> None:
    clock = FakeClock()
    found, mine = fight(clock, clock.kernel(0.8e-3))
    assert found.won
    assert found.decided
    assert len(found.challenger) == 50
    assert found.interval is not None
    assert found.interval.lo <= 0.8 <= found.interval.hi
    assert mine.active


def test_pairs_that_empty_the_caches_first_are_looked_at_earlier() -> None:
    """Twelve of them span half a second, as few pairs of slow calls do; fifty take more than a race may last."""
    clock = FakeClock(chill_s=20e-3)
    found, _ = fight(clock, clock.kernel(0.5e-3), deadline_s=0.8)
    assert found.won
    assert len(found.challenger) == 12


def test_a_slower_challenger_is_settled_without_a_gain_to_hide() -> None:
    clock = FakeClock()
    found, _ = fight(clock, clock.kernel(1.2e-3))
    assert not found.won
    assert found.decided
    assert not found.may_hide_a_gain
    assert "not faster by 0.3%" in found.reason


def test_without_time_nothing_is_decided() -> None:
    clock = FakeClock()
    found, _ = fight(clock, clock.kernel(0.5e-3), deadline_s=0.0)
    assert not found.won
    assert not found.decided
    assert found.may_hide_a_gain
    assert found.reason == "the budget allowed 0 pairs; a decision needs 9, so the baseline stays"


def test_few_pairs_in_the_time_there_is_can_be_enough() -> None:
    clock = FakeClock(noise=0.001)
    found, _ = fight(clock, clock.kernel(0.5e-3), deadline_s=0.02)
    assert found.won
    assert 9 <= len(found.challenger) < 20


def test_slow_pairs_are_looked_at_sooner() -> None:
    clock = FakeClock(noise=0.001)
    mine, theirs = lane("native", clock.kernel(5e-3), seconds=5e-3), lane("aten", clock.kernel(9e-3), seconds=9e-3)
    assert len(paired_test(mine, theirs, clock, lambda _: 60.0, random.Random(0)).challenger) == 12


def test_operands_are_moved_twice_before_the_first_look() -> None:
    clock = FakeClock()
    moves: list[float] = []

    def move() -> bool:
        moves.append(clock.now())
        return True

    mine, theirs = lane("native", clock.kernel(0.5e-3)), lane("aten", clock.kernel(1e-3))
    found = paired_test(mine, theirs, clock, lambda _: 60.0, random.Random(0), move)
    assert found.won
    assert found.places == [16, 33]
    assert len(moves) == 2


def test_a_winner_wins_wherever_the_operands_lie() -> None:
    """It is 5% slower before the operands move (after 16 pairs), and 30% faster from then on."""
    clock = FakeClock(noise=0.001)
    seconds = iter([1.05e-3] * 16)
    mine = lane("native", lambda i: clock.kernel(next(seconds, 0.7e-3))(i))
    found = paired_test(mine, lane("aten", clock.kernel(1e-3)), clock, lambda _: 1.0, random.Random(0), lambda: True)
    assert not found.won
    assert "not decided" in found.reason


def test_the_last_look_takes_all_pairs_into_account() -> None:
    """The first look, at 50 pairs, does not decide, and time runs out before the second."""
    clock = FakeClock()
    test, _ = fight(clock, clock.kernel(1e-3), deadline_s=0.13)
    assert 50 < len(test.challenger) < 76
    assert test.interval is not None
    assert test.interval.center == ratio_interval(test.challenger, test.baseline).center


def stalling(clock: FakeClock, seconds: float, stall_s: float) -> Run:
    """Return a kernel that takes ``stall_s`` more in every tenth call."""
    stalls = itertools.cycle([stall_s] + [0.0] * 9)
    return lambda i: clock.kernel(seconds + next(stalls))(i)


def test_stalls_that_both_sides_share_cost_the_challenger_no_win() -> None:
    """Its mean is the worse one, since its stalls happened to be longer; the machine explains their number."""
    clock = FakeClock(noise=0.001)
    challenger, baseline = lane("native", stalling(clock, 0.9e-3, 20e-3)), lane("aten", stalling(clock, 1e-3, 18e-3))
    test = paired_test(challenger, baseline, clock, lambda _: 60.0, random.Random(0))
    assert test.won
    assert sum(test.challenger) > sum(test.baseline)
    assert len(test.challenger) == 50


def test_stalls_of_the_challenger_alone_cost_it_the_win() -> None:
    clock = FakeClock(noise=0.001)
    challenger, baseline = lane("native", stalling(clock, 0.9e-3, 20e-3)), lane("aten", clock.kernel(1e-3))
    test = paired_test(challenger, baseline, clock, lambda _: 60.0, random.Random(0))
    assert not test.won
    assert "its mean time, stalls counted" in test.reason
