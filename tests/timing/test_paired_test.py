"""Paired tests on simulated time: the winner, faults, and the deadline."""

from __future__ import annotations

import itertools
import random

import pytest

from gemmtune.testing.clock import FakeClock
from gemmtune.timing.clock import Run
from gemmtune.timing.paired_test import (
    ALPHA,
    MAX_PAIRS,
    PairedTest,
    _faster_at_every_placement,
    _look,
    _mean_agreement,
    _Split,
    _split_stalls,
    paired_test,
)
from gemmtune.timing.race_entry import RaceEntry
from gemmtune.timing.stats import Interval, ratio_interval


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


@pytest.mark.parametrize(
    ("far_apart", "seconds", "pairs"), [(True, 2.1e-3, 12), (True, 1e-3, 50), (False, 2.1e-3, 50), (False, 7e-3, 12)]
)
def test_interim_tests_are_earlier_for_kernels_that_are_far_apart(far_apart: bool, seconds: float, pairs: int) -> None:
    clock = FakeClock(noise=0.001)
    challenger = make_entry("native", clock.kernel(0.5 * seconds), seconds=0.5 * seconds)
    baseline = make_entry("aten", clock.kernel(seconds), seconds=seconds)
    test = paired_test(challenger, baseline, clock, lambda _: 60.0, random.Random(0), far_apart=far_apart)
    assert (test.won, len(test.challenger)) == (True, pairs)


def test_operands_move_twice_before_the_first_interim_test() -> None:
    clock = FakeClock()
    moves: list[float] = []

    def move() -> bool:
        moves.append(clock.now())
        return True

    challenger, baseline = make_entry("native", clock.kernel(0.5e-3)), make_entry("aten", clock.kernel(1e-3))
    result = paired_test(challenger, baseline, clock, lambda _: 60.0, random.Random(0), move)
    assert result.won
    assert result.moves == [16, 33]
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


# --- stalls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("longest", "is_stall"),
    [(1.2, False), (1.21, True)],
)
@pytest.mark.parametrize("side", [0, 1])
def test_timing_a_fifth_above_the_median_is_a_stall(longest: float, is_stall: bool, side: int) -> None:
    steady, other = [1.0] * 20, [1.0] * 19 + [longest]
    split = _split_stalls(*((other, steady) if side == 0 else (steady, other)))
    assert (split.challenger_stalls, split.baseline_stalls) == ((is_stall, 0) if side == 0 else (0, is_stall))
    assert len(split.challenger) == len(split.baseline) == 20 - is_stall
    assert max(*split.challenger, *split.baseline) == (1.0 if is_stall else longest)


@pytest.mark.parametrize(("longest", "stalls"), [(1.88, 0), (1.9, 1)])
def test_timing_six_sigmas_above_the_median_of_noisy_times_is_a_stall(longest: float, stalls: int) -> None:
    """The MAD of the times is 1.4826 * 0.1: the limit is 1.89."""
    noisy = [0.8, 0.9, 0.9, 1.0, 1.0, 1.0, 1.1, 1.1, 1.2, 1.0, longest]
    split = _split_stalls(noisy, [1.0] * 11)
    assert split.challenger_stalls == stalls
    assert len(split.challenger) == 11 - stalls


@pytest.mark.parametrize(("stalled", "is_set_aside"), [(5, True), (6, False)])
def test_stalls_in_more_than_a_quarter_of_the_pairs_stay(stalled: int, is_set_aside: bool) -> None:
    times = [9.0] * stalled + [1.0] * (20 - stalled)
    split = _split_stalls(times, [1.0] * 20)
    assert split.challenger == ([1.0] * 15 if is_set_aside else times)
    assert (split.challenger_stalls, split.baseline_stalls) == (stalled, 0)


def test_few_pairs_have_no_stalls() -> None:
    assert _split_stalls([1.0] * 7 + [9.0], [1.0] * 8) == _Split([1.0] * 7 + [9.0], [1.0] * 8)
    assert _split_stalls([1.0] * 8 + [9.0], [1.0] * 9).challenger_stalls == 1


def agreement(challenger: list[float], baseline: list[float], *, last: bool = False, rounds: float = 0.0) -> str:
    """Return the agreement of the means. rounds: seconds by which the challenger was slower in the rounds before."""
    before = ([1.0 + rounds], [1.0]) if rounds else ((), ())
    test = PairedTest(challenger=challenger, baseline=baseline, round_times=before)
    return _mean_agreement(test, _split_stalls(challenger, baseline), last)


def test_mean_of_the_pairs_without_stalls_must_be_lower() -> None:
    assert agreement([0.9] * 20, [1.0] * 20) == "agrees"
    assert agreement([1.0] * 20, [1.0] * 20) == "differs"
    assert agreement([0.9] * 11 + [1.05] * 9, [0.95] * 20) == "differs"


@pytest.mark.parametrize(
    ("challenger_stalls", "baseline_stalls", "last", "expected"),
    [
        (2, 2, False, "agrees"),
        (1, 1, False, "agrees"),
        (1, 0, False, "unclear"),
        (1, 0, True, "unclear"),
        (3, 1, False, "unclear"),
        (3, 1, True, "agrees"),
        (10, 0, False, "differs"),
        (10, 0, True, "differs"),
        (12, 1, False, "differs"),
    ],
)
def test_stalls_count_where_chance_does_not_explain_that_one_side_has_them(
    challenger_stalls: int, baseline_stalls: int, last: bool, expected: str
) -> None:
    """The challenger's stalls are so long that its mean is the higher one."""
    challenger = [99.0] * challenger_stalls + [0.9] * (100 - challenger_stalls)
    baseline = [9.0] * baseline_stalls + [1.0] * (100 - baseline_stalls)
    assert agreement(challenger, baseline, last=last) == expected


def test_times_of_the_rounds_before_the_test_count_in_the_mean() -> None:
    assert agreement([0.9] * 20, [1.0] * 20, rounds=1.9) == "agrees"
    assert agreement([0.9] * 20, [1.0] * 20, rounds=2.1) == "unclear"


# --- looks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slow", "moves", "is_faster"),
    [
        (range(0), [], True),
        (range(10), [10], False),
        (range(10, 20), [10, 20], False),
        (range(25, 30), [25], False),
        (range(26, 30), [26], True),  # four pairs say nothing about a placement
        (range(5), [5], False),
        (range(4), [4], True),
        (range(14), [], True),
    ],
)
def test_placement_with_a_few_pairs_must_show_the_gain(slow: range, moves: list[int], is_faster: bool) -> None:
    challenger = [1.1 if i in slow else 0.9 for i in range(30)]
    test = PairedTest(challenger=challenger, baseline=[1.0] * 30, moves=moves)
    assert _faster_at_every_placement(test) is is_faster


def test_equal_median_at_a_placement_is_no_gain() -> None:
    assert not _faster_at_every_placement(PairedTest(challenger=[1.0] * 5, baseline=[1.0] * 5))


def look(
    challenger: list[float], *, last: bool = False, gain: float = 0.003, **state: object
) -> tuple[PairedTest, bool]:
    test = PairedTest(challenger=challenger, baseline=[1.0] * len(challenger), **state)  # type: ignore[arg-type]
    _, is_faster = _look(test, _Split(test.challenger, test.baseline), gain, last)
    return test, is_faster


@pytest.mark.parametrize(
    ("ratio", "decided", "is_faster"),
    [(0.9, False, True), (0.9971, True, False), (0.9969, False, True), (1.1, True, False)],
)
def test_interval_on_one_side_of_the_least_gain_decides(ratio: float, decided: bool, is_faster: bool) -> None:
    test, faster = look([ratio] * 50)
    assert (test.decided, faster) == (decided, is_faster)


def test_looks_spend_the_error_with_the_cube_root_of_the_pairs() -> None:
    test, _ = look([0.9] * 75)
    assert test.error_spent == pytest.approx(ALPHA * (75 / MAX_PAIRS) ** (1 / 3)) == pytest.approx(ALPHA / 2)
    assert test.interval is not None
    assert test.interval.level == pytest.approx(1.0 - ALPHA / 2, abs=1e-6)
    later, _ = look([0.9] * 75, last=True, error_spent=0.004)
    assert later.error_spent == ALPHA
    beyond, _ = look([0.9] * 2 * MAX_PAIRS)
    assert beyond.error_spent == ALPHA


def test_interval_of_a_look_has_only_the_error_that_is_left() -> None:
    rng = random.Random(0)
    times = [rng.gauss(0.99, 0.01) for _ in range(75)]
    fresh, _ = look(times)
    rest, _ = look(times, error_spent=0.0049)
    assert fresh.interval == ratio_interval(times, [1.0] * 75, ALPHA * (75 / MAX_PAIRS) ** (1 / 3))
    assert rest.interval is not None
    assert rest.interval.lo < fresh.interval.lo
    assert rest.interval.hi > fresh.interval.hi


def test_too_few_pairs_for_the_level_show_no_gain() -> None:
    """Nine pairs attain an error of 2 / 512, and the first look may spend 1% times the cube root of 9 / 600."""
    _, early = look([0.5] * 9)
    _, final = look([0.5] * 9, last=True)
    assert (early, final) == (False, True)


def test_gain_that_is_shown_stands_when_the_error_is_spent() -> None:
    shown = Interval(0.9, 0.89, 0.91, 0.99)
    test, is_faster = look([1.2] * 50, last=True, unclear=True, interval=shown)
    assert (test.interval, is_faster) == (shown, False)  # this placement does not show it any more
    test, is_faster = look([0.95] * 50, last=True, unclear=True, interval=shown)
    assert (test.interval, is_faster) == (shown, True)
    again, is_faster = look([0.95] * 50, unclear=True, interval=shown)
    assert is_faster
    assert again.interval != shown


@pytest.mark.parametrize(
    ("state", "hides"),
    [
        ({}, True),
        ({"interval": Interval(1.0, 0.97, 1.1, 0.99)}, True),
        ({"interval": Interval(1.0, 0.98, 1.1, 0.99)}, False),
        ({"interval": Interval(1.0, 0.97, 1.1, 0.99), "decided": True}, False),
        ({"won": True}, False),
    ],
)
def test_test_may_hide_a_gain_of_two_percent(state: dict[str, object], hides: bool) -> None:
    assert PairedTest(**state).may_hide_a_gain is hides  # type: ignore[arg-type]


# --- number of pairs ---------------------------------------------------------------------------------------------


def test_open_question_ends_after_600_pairs() -> None:
    """The challenger is faster by just the least gain, and the noise is too large to say so."""
    clock = FakeClock(noise=0.05)
    result, _ = run_paired_test(clock, clock.kernel(0.997e-3))
    assert (result.won, result.decided) == (False, False)
    assert len(result.challenger) == MAX_PAIRS
    assert result.reason.endswith("not decided, so the baseline stays")


def test_looks_are_half_again_as_many_pairs_apart() -> None:
    counts = set()
    for seed in range(8):
        clock = FakeClock(seed, noise=0.05)
        result, _ = run_paired_test(clock, clock.kernel(0.98e-3))
        counts.add(len(result.challenger))
    assert counts <= {50, 76, 115, 173, 261, 393, 591, MAX_PAIRS}
    assert len(counts) > 2


def test_stalls_of_the_challenger_are_watched_for_2400_pairs() -> None:
    clock = FakeClock(noise=0.001)
    stalls = itertools.cycle([0.1] + [0.0] * 96)
    result, _ = run_paired_test(clock, lambda i: clock.kernel(0.9e-3 + next(stalls))(i), deadline_s=600.0)
    assert (result.won, result.decided) == (False, True)
    assert len(result.challenger) == 4 * MAX_PAIRS
    assert "its mean time, stalls counted: the baseline stays" in result.reason
    assert result.stalled == pytest.approx(1 / 97, abs=1e-3)


def test_order_within_the_pairs_is_random() -> None:
    clock, order = FakeClock(noise=0.001), list[str]()

    def noting(name: str, seconds: float) -> Run:
        def run(i: int) -> None:
            order.append(name)
            clock.kernel(seconds)(i)

        return run

    challenger, baseline = make_entry("native", noting("c", 0.5e-3)), make_entry("aten", noting("b", 1e-3))
    result = paired_test(challenger, baseline, clock, lambda _: 60.0, random.Random(0))
    assert 15 <= order[::2].count("c") <= 35
    assert result.challenger == pytest.approx([0.5e-3] * 50, rel=0.1)
    assert result.baseline == pytest.approx([1e-3] * 50, rel=0.1)


def test_least_gain_and_first_look_are_options() -> None:
    clock = FakeClock(noise=0.001)
    challenger, baseline = make_entry("native", clock.kernel(0.95e-3)), make_entry("aten", clock.kernel(1e-3))
    result = paired_test(challenger, baseline, clock, lambda _: 60.0, random.Random(0), min_pairs=20, gain=0.1)
    assert not result.won
    assert len(result.challenger) == 20
    assert result.reason.endswith("not faster by 10.0%")


@pytest.mark.parametrize(("min_pairs", "moves"), [(50, [16, 33]), (15, [5, 10]), (14, [7])])
def test_operands_move_within_the_pairs_of_the_first_look(min_pairs: int, moves: list[int]) -> None:
    clock = FakeClock(noise=0.001)
    challenger, baseline = make_entry("native", clock.kernel(0.5e-3)), make_entry("aten", clock.kernel(1e-3))
    result = paired_test(
        challenger, baseline, clock, lambda _: 60.0, random.Random(0), lambda: True, min_pairs=min_pairs
    )
    assert result.won
    assert result.moves == moves


def test_pair_that_would_end_after_the_deadline_is_not_timed() -> None:
    clock = FakeClock(noise=0.0)
    result, _ = run_paired_test(clock, clock.kernel(1e-3), deadline_s=0.0405)
    assert len(result.challenger) == 20
