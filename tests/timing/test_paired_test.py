"""Paired tests on simulated time: the winner, faults, and the deadline."""

from __future__ import annotations

import itertools
import random

import pytest

from gemmtune.testing.clock import FakeClock
from gemmtune.timing.clock import Run
from gemmtune.timing.paired_test import PairedTest, paired_test
from gemmtune.timing.race_entry import RaceEntry
from gemmtune.timing.stats import ratio_interval


def make_entry(name: str, run: Run, *, is_baseline: bool = False, seconds: float = 1e-3) -> RaceEntry:
    """Return a race entry with one call per timing and one earlier time."""
    return RaceEntry(name, run, is_baseline, None, calls=1, times={0: seconds})


def run_paired_test(clock: FakeClock, challenger: Run, *, deadline_s: float = 60.0) -> tuple[PairedTest, RaceEntry]:
    """Run a paired test of ``challenger`` with a baseline of 1 ms. Return its result and the challenger's entry."""
    challenger_entry = make_entry("native", challenger)
    baseline_entry = make_entry("aten", clock.kernel(1e-3), is_baseline=True)
    result = paired_test(challenger_entry, baseline_entry, clock, lambda _: deadline_s, random.Random(0))
    return result, challenger_entry


def raising_from(call: int, run: Run) -> Run:
    """Return ``run`` changed so that it raises at call number ``call`` and later."""
    calls = 0

    def raising(i: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= call:
            raise RuntimeError("misaligned address")
        run(i)

    return raising


@pytest.mark.parametrize("call", [1, 2, 49, 51])
def test_challenger_that_raises_loses_and_is_dropped(call: int) -> None:
    clock = FakeClock()
    result, entry = run_paired_test(clock, raising_from(call, clock.kernel(0.996e-3)))
    assert not result.won
    assert not result.decided
    assert result.reason == "native raised RuntimeError: misaligned address in the paired test"
    assert (entry.stage, entry.active, entry.reason) == ("failed", False, result.reason)
    assert len(result.challenger) == len(result.baseline) == call - 1


def test_baseline_that_raises_is_dropped() -> None:
    clock = FakeClock()
    challenger, baseline = (
        make_entry("native", clock.kernel(1e-3)),
        make_entry("aten", raising_from(7, clock.kernel(1e-3)), is_baseline=True),
    )
    result = paired_test(challenger, baseline, clock, lambda _: 60.0, random.Random(0))
    assert not result.won
    assert result.reason.startswith("aten raised RuntimeError")
    assert (baseline.stage, baseline.active) == ("failed", False)
    assert challenger.active


def test_faster_challenger_wins_at_the_first_interim_test() -> None:
    clock = FakeClock()
    result, entry = run_paired_test(clock, clock.kernel(0.8e-3))
    assert result.won
    assert result.decided
    assert len(result.challenger) == 50
    assert result.interval is not None
    assert result.interval.lo <= 0.8 <= result.interval.hi
    assert entry.active


def test_interim_tests_are_earlier_for_pairs_with_cache_flushes() -> None:
    """Twelve such pairs take half a second; fifty would take longer than a race."""
    clock = FakeClock(chill_s=20e-3)
    result, _ = run_paired_test(clock, clock.kernel(0.5e-3), deadline_s=0.8)
    assert result.won
    assert len(result.challenger) == 12


def test_slower_challenger_is_decided_against() -> None:
    clock = FakeClock()
    result, _ = run_paired_test(clock, clock.kernel(1.2e-3))
    assert not result.won
    assert result.decided
    assert not result.may_hide_a_gain
    assert "not faster by 0.3%" in result.reason


def test_no_decision_without_time() -> None:
    clock = FakeClock()
    result, _ = run_paired_test(clock, clock.kernel(0.5e-3), deadline_s=0.0)
    assert not result.won
    assert not result.decided
    assert result.may_hide_a_gain
    assert result.reason == "the budget allowed 0 pairs; a decision needs 9, so the baseline stays"


def test_few_pairs_before_the_deadline_can_decide() -> None:
    clock = FakeClock(noise=0.001)
    result, _ = run_paired_test(clock, clock.kernel(0.5e-3), deadline_s=0.02)
    assert result.won
    assert 9 <= len(result.challenger) < 20


def test_interim_tests_are_earlier_for_slow_pairs() -> None:
    clock = FakeClock(noise=0.001)
    challenger, baseline = (
        make_entry("native", clock.kernel(5e-3), seconds=5e-3),
        make_entry("aten", clock.kernel(9e-3), seconds=9e-3),
    )
    assert len(paired_test(challenger, baseline, clock, lambda _: 60.0, random.Random(0)).challenger) == 12


def test_operands_move_twice_before_the_first_interim_test() -> None:
    clock = FakeClock()
    moves: list[float] = []

    def move() -> bool:
        moves.append(clock.now())
        return True

    challenger, baseline = make_entry("native", clock.kernel(0.5e-3)), make_entry("aten", clock.kernel(1e-3))
    result = paired_test(challenger, baseline, clock, lambda _: 60.0, random.Random(0), move)
    assert result.won
    assert result.places == [16, 33]
    assert len(moves) == 2


def test_winner_must_be_faster_at_all_operand_addresses() -> None:
    """The challenger is 5% slower before the operands move (after 16 pairs), and 30% faster after that."""
    clock = FakeClock(noise=0.001)
    seconds = iter([1.05e-3] * 16)
    challenger = make_entry("native", lambda i: clock.kernel(next(seconds, 0.7e-3))(i))
    result = paired_test(
        challenger, make_entry("aten", clock.kernel(1e-3)), clock, lambda _: 1.0, random.Random(0), lambda: True
    )
    assert not result.won
    assert "not decided" in result.reason


def test_last_look_takes_all_pairs_into_account() -> None:
    """The first look, at 50 pairs, does not decide, and time runs out before the second."""
    clock = FakeClock()
    result, _ = run_paired_test(clock, clock.kernel(1e-3), deadline_s=0.13)
    assert 50 < len(result.challenger) < 76
    assert result.interval is not None
    assert result.interval.center == ratio_interval(result.challenger, result.baseline).center


def stalling(clock: FakeClock, seconds: float, stall_s: float) -> Run:
    """Return a kernel that takes ``stall_s`` more in every tenth call."""
    stalls = itertools.cycle([stall_s] + [0.0] * 9)
    return lambda i: clock.kernel(seconds + next(stalls))(i)


def test_stalls_that_both_sides_share_cost_the_challenger_no_win() -> None:
    """The challenger has the worse mean because its stalls are longer. Both sides have equally many stalls."""
    clock = FakeClock(noise=0.001)
    challenger, baseline = (
        make_entry("native", stalling(clock, 0.9e-3, 20e-3)),
        make_entry("aten", stalling(clock, 1e-3, 18e-3)),
    )
    result = paired_test(challenger, baseline, clock, lambda _: 60.0, random.Random(0))
    assert result.won
    assert sum(result.challenger) > sum(result.baseline)
    assert len(result.challenger) == 50


def test_stalls_of_the_challenger_alone_cost_it_the_win() -> None:
    clock = FakeClock(noise=0.001)
    challenger, baseline = make_entry("native", stalling(clock, 0.9e-3, 20e-3)), make_entry("aten", clock.kernel(1e-3))
    result = paired_test(challenger, baseline, clock, lambda _: 60.0, random.Random(0))
    assert not result.won
    assert "its mean time, stalls counted" in result.reason
