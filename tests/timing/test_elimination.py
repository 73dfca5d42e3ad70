"""The rounds before the paired test: screening, the reserved time, calls per timing, and failed entrants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gemmtune.core.events import BestSoFar
from gemmtune.testing.clock import FakeClock
from gemmtune.timing.elimination import Elimination, Entrant, Progress, RaceSetup, noise, raise_calls
from gemmtune.timing.machine import MachineState
from gemmtune.timing.race_entry import RaceEntry
from gemmtune.timing.surroundings import Surrounding


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


# --- one step at a time ------------------------------------------------------------------------------------------


def make_rounds(
    times: Mapping[str, Sequence[float] | float], *, budget_s: float = 100.0, timing_s: float = 0.0,
    packings: Mapping[str, str] = {}, min_pairs: int = 50, progress: Progress | None = None, **setup: Any,
) -> Elimination:  # fmt: skip
    """Return rounds that have these times, round by round. A name that begins with ``aten`` is a baseline's.

    packings: names of packed layouts by entry. timing_s: the seconds that a timing took in the last round. setup: for
    RaceSetup.
    """
    clock = FakeClock(0, noise=0.0)
    entrants = [Entrant(name, clock.kernel(1.0), name.startswith("aten"), packings.get(name)) for name in times]
    rounds = Elimination(entrants, clock, budget_s, 0, progress, RaceSetup(**setup), min_pairs)
    for entry in rounds.entries:
        seconds = times[entry.id]
        entry.times = dict(enumerate([seconds] if isinstance(seconds, float) else seconds))
        entry.calls = 1
        rounds.rounds = max(rounds.rounds, len(entry.times))
    rounds._timing_s = timing_s
    return rounds


def active(rounds: Elimination) -> list[str]:
    return [entry.id for entry in rounds.entries if entry.active]


def reason(rounds: Elimination, name: str) -> str:
    return next(entry.reason for entry in rounds.entries if entry.id == name)


@pytest.mark.parametrize(
    ("times", "leaders"),
    [
        ({"aten": 1.0, "x": 1.2}, {"aten", "x"}),
        ({"aten": 1.0, "x": 1.21}, set()),
        ({"aten": 1.0, "x": 0.5, "y": 0.4, "aten2": 2.0}, {"aten", "y"}),
        ({"aten": 100.0, "x": 8.0, "packed": 1.0}, {"aten", "x"}),
        ({"aten": 100.0, "x": 8.01, "packed": 1.0}, set()),
        ({"aten": 200.0, "x": 16.0, "packed": 2.0}, {"aten", "x"}),
        ({"aten": 1.0, "packed": 1.0}, set()),
        ({"x": 1.0, "packed": 1.0}, set()),
        ({"x": 1.0, "aten/packed": 1.0}, set()),
    ],
)
def test_leaders_on_the_raw_weight_are_near_each_other_and_not_far_behind(
    times: dict[str, float], leaders: set[str]
) -> None:
    packings = {name: "p" for name in times if "packed" in name}
    assert make_rounds(times, packings=packings)._raw_leaders() == leaders


def test_entries_that_are_out_are_no_leaders() -> None:
    rounds = make_rounds({"aten": 1.0, "x": 1.0, "y": 1.1})
    rounds.entries[1].drop("eliminated", "")
    assert rounds._raw_leaders() == {"aten", "y"}
    packed = make_rounds({"a": 1.0, "b": 1.1, "c": 1.2, "aten": 0.5}, packings={"a": "p", "b": "p", "c": "q"})
    assert packed._group_leaders() == {"a", "c"}
    packed.entries[0].drop("eliminated", "")
    assert packed._group_leaders() == {"b", "c"}


@pytest.mark.parametrize("baselines", [False, True])
def test_screening_drops_what_is_more_than_half_as_slow_again(baselines: bool) -> None:
    names = ("aten1", "aten2", "aten3") if baselines else ("x1", "x2", "x3")
    rounds = make_rounds(
        {names[0]: [1.0, 3.0], names[1]: [1.5, 4.0], names[2]: [9.0, 3.1]}, packings=dict.fromkeys(names, "p")
    )
    rounds.entries[0].times = {0: 1.0, 1: 1.0}
    rounds._screen_side(baselines)
    assert active(rounds) == list(names[:2])
    than = "the best baseline" if baselines else "the best"
    assert reason(rounds, names[2]) == f"3.1x slower than {than} after 2 rounds"


def test_screening_compares_baselines_with_baselines_alone() -> None:
    rounds = make_rounds({"aten1": 4.0, "aten2": 7.0, "x": 1.0}, packings={"x": "p", "aten1": "p", "aten2": "p"})
    rounds._screen_side(False)
    assert active(rounds) == ["aten1", "aten2", "x"]
    rounds._screen_side(True)
    assert active(rounds) == ["aten1", "x"]
    assert reason(rounds, "aten2") == "1.8x slower than the best baseline after 1 rounds"
    alone = make_rounds({"x": 1.0})
    alone._screen_side(True)
    assert active(alone) == ["x"]


def test_screening_compares_challengers_with_the_best_of_all_and_keeps_the_raw_leaders() -> None:
    rounds = make_rounds({"aten": 5.0, "raw": 4.0, "slow": 4.1, "best": 1.0}, packings={"slow": "p", "best": "q"})
    rounds._screen_side(False)
    assert active(rounds) == ["aten", "raw", "best"]


@pytest.mark.parametrize(
    ("calls", "count", "is_dropped"), [(1, 2, False), (2, 2, True), (3, 2, True), (1, 3, False), (1, 4, True)]
)
def test_difference_of_two_stalls_is_no_reason_before_the_last_screening(
    calls: int, count: int, is_dropped: bool
) -> None:
    """One call is 15 ms slower; two stalls explain 20 ms of a timing."""
    rounds = make_rounds({"x": [5e-3] * count, "y": [20e-3] * count}, packings={"x": "p", "y": "p"})
    for entry in rounds.entries:
        entry.calls = calls
    rounds._screen_side(False)
    assert (active(rounds) == ["x"]) is is_dropped


def test_exactly_two_stalls_are_a_reason() -> None:
    rounds = make_rounds({"x": 0.0, "y": 20e-3, "z": 1.0}, packings={"x": "p", "y": "p", "z": "p"})
    rounds.entries[0].times = {0: 1e-300}
    rounds._screen_side(False)
    assert active(rounds) == ["x"]


def test_entries_beyond_the_time_for_five_rounds_are_dropped_by_their_first_times() -> None:
    """Each timing takes 1 s and the paired test 40 of 100 s. So 60 s allow four more rounds of 15 entries."""
    times = {f"x{i:02}": 1.0 + i / 100 for i in range(20)}
    packings = dict.fromkeys(times, "p")
    rounds = make_rounds({**times, "aten": 5.0}, packings=packings, timing_s=1.0)
    rounds._drop_unaffordable()
    assert active(rounds) == [*list(times)[:14], "aten"]
    assert reason(rounds, "x14") == "in place 15 of 21 by its first times; more than the time allows"
    assert {entry.stage for entry in rounds.entries if not entry.active} == {"screened"}
    enough = make_rounds(dict(list(times.items())[:15]), packings=packings, timing_s=1.0)
    enough._drop_unaffordable()
    assert len(active(enough)) == 15


def test_best_of_each_group_and_close_baselines_are_kept_without_time() -> None:
    times = {
        "aten1": 1.0,
        "aten2": 1.1,
        "aten3": 1.11,
        "a": 2.0,
        "b": 2.1,
        "c": 3.0,
        "d": 3.1,
        "raw1": 1.15,
        "raw2": 1.2,
    }
    packings = {"a": "p", "b": "p", "c": "q", "d": "q"}
    rounds = make_rounds(times, packings=packings, timing_s=1e3)
    rounds._drop_unaffordable()
    assert active(rounds) == ["aten1", "aten2", "a", "c", "raw1"]


def test_first_estimate_is_the_lower_of_two_times() -> None:
    rounds = make_rounds({"a": 2.0, "b": 3.0, "c": 1.0}, earlier_s={"a": 1.5, "c": 9.0})
    assert [rounds._first_estimate_s(entry) for entry in rounds.entries] == [1.5, 3.0, 1.0]


def steady(seconds: float, count: int, spread: float = 1e-3) -> list[float]:
    """Return times around ``seconds``, all different."""
    return [seconds * (1.0 + spread * (i % 7 - 3)) for i in range(count)]


def test_slower_entries_are_eliminated_by_their_intervals() -> None:
    times = {"aten1": steady(2.0, 40), "aten2": steady(2.1, 40), "x": steady(1.0, 40), "y": steady(1.1, 40)}
    rounds = make_rounds(times, packings={"x": "p", "y": "p"})
    rounds._eliminate_slower(1, 24)
    assert active(rounds) == ["aten1", "x"]
    assert reason(rounds, "y").startswith("1.100x the time of x (")
    assert reason(rounds, "y").endswith(") after 40 rounds")
    assert reason(rounds, "aten2").startswith("1.050x the time of aten1 (")


def test_best_of_each_group_is_kept_for_eighteen_rounds() -> None:
    for count, left in ((17, ["a", "c", "aten"]), (18, ["a", "aten"])):
        times = {"a": steady(1.0, count), "b": steady(1.2, count), "c": steady(1.3, count), "aten": steady(9.0, count)}
        rounds = make_rounds(times, packings={"a": "p", "b": "p", "c": "q"})
        rounds._eliminate_slower(1, 24)
        assert active(rounds) == left


def test_challengers_beyond_the_limit_are_eliminated_by_rank() -> None:
    times = {f"x{i}": [1.0 + i / 1000, 1.1, 1.0 + i / 1000] for i in range(5)}
    rounds = make_rounds({**times, "aten": [2.0] * 3}, packings={**dict.fromkeys(times, "p"), "x4": "q"})
    rounds._eliminate_slower(1, 2)
    assert active(rounds) == ["x0", "x1", "x4", "aten"]  # x4 is the best of its group
    assert reason(rounds, "x2") == "in place 3 of 5 after 3 rounds, beyond 2"


@pytest.mark.parametrize(("move_s", "moves", "limit"), [(0.0, 0, 4), (0.0, 7, 4), (0.0, 8, 2), (11.0, 0, 2)])
def test_twice_as_many_challengers_stay_while_moves_are_due(move_s: float, moves: int, limit: int) -> None:
    times = {f"x{i}": [1.0 + i / 1000] * 3 for i in range(6)}
    rounds = make_rounds(times, packings=dict.fromkeys(times, "p"), move=lambda: None, move_s=move_s)
    rounds.moves = moves
    rounds._eliminate_slower(1, 2)
    assert active(rounds) == [f"x{i}" for i in range(limit)]


def test_leader_is_chosen_when_no_other_can_be_faster_by_much() -> None:
    def is_chosen(**times: list[float]) -> bool:
        return make_rounds(times)._is_leader_chosen()

    base = [1.0] * 20
    assert is_chosen(x=base, y=steady(1.1, 20), aten=steady(2.0, 20))
    assert is_chosen(x=base, y=base, aten1=base, aten2=base)
    wide = steady(1.0, 20, 0.1)
    assert not is_chosen(x=base, y=wide)
    assert not is_chosen(aten1=base, aten2=wide, x=base)
    assert is_chosen(aten1=wide, x=base)
    assert is_chosen()


@pytest.mark.parametrize(
    ("names", "count", "is_settled"),
    [
        (("aten", "x"), 4, True),
        (("aten", "x"), 3, False),
        (("aten",), 4, True),
        (("x",), 4, True),
        (("aten", "x", "y"), 4, False),
        (("aten", "aten2", "x"), 4, False),
    ],
)
def test_choice_is_settled_with_one_of_each_side_after_the_screenings(
    names: tuple[str, ...], count: int, is_settled: bool
) -> None:
    assert make_rounds({name: [1.0] * count for name in names})._is_choice_settled() is is_settled


@pytest.mark.parametrize(
    ("elapsed_s", "timing_s", "seconds", "is_affordable"),
    [
        (56.0, 1.0, 2.0, True),  # 60 s of 100 are for the rounds, and a round of two takes 4 s
        (56.1, 1.0, 2.0, False),
        (48.0, 2.0, 1.0, True),  # the overhead of timings counts, and reserves 48 s for twelve pairs
        (48.1, 2.0, 1.0, False),
        (58.0, 1.0, 1.0, True),
    ],
)
def test_round_is_affordable_if_it_leaves_the_paired_test_its_share(
    elapsed_s: float, timing_s: float, seconds: float, is_affordable: bool
) -> None:
    rounds = make_rounds({"aten": seconds, "x": seconds}, timing_s=timing_s)
    rounds.start = -elapsed_s
    assert rounds._affordable() is is_affordable
    rounds.rounds = 0
    assert rounds._affordable()


@pytest.mark.parametrize(
    ("timing_s", "far_apart", "options", "reserved_s"),
    [
        (0.1, False, {}, 40.0),
        (2.0, False, {}, 48.0),  # twelve pairs of 4 s
        (10.0, False, {}, 90.0),
        (0.1, True, {}, 1.5 * 12 * 0.2),
        (0.0015, True, {}, 1.5 * 50 * 0.003),  # a pair of 3 ms is not slow
        (0.0016, True, {}, 1.5 * 12 * 0.0032),
        (1e-4, True, {}, 1.5 * 50 * 1e-3),  # the clock's own least timing is 0.5 ms
        (0.1, True, {"move_s": 2.0}, 1.5 * 12 * 0.2 + 4.0),
        (0.1, True, {"move_s": 50.0}, 40.0),
        (0.1, False, {"surroundings": [Surrounding("after", lambda name, variant: lambda i: None)]}, 60.0),
    ],
)
def test_paired_test_has_its_share_or_the_pairs_of_its_first_look(
    timing_s: float, far_apart: bool, options: dict[str, Any], reserved_s: float
) -> None:
    rounds = make_rounds({"aten": 1.0, "x": 1.0}, timing_s=timing_s, **options)
    rounds.far_apart = far_apart
    assert rounds._reserved_for_test_s() == pytest.approx(reserved_s)


@pytest.mark.parametrize(
    ("times", "needs"),
    [
        ({"aten": 1.0, "x": 1.0}, False),
        ({"aten": 2.0, "aten/packed": 1.0, "x": 1.0}, True),
        ({"aten": 1.0, "aten/packed": 2.0, "x": 1.0}, False),
        ({"aten": 1.0, "x": 2.0, "packed": 1.0}, True),
        ({"aten": 1.0, "packed": 1.0}, False),
        ({"aten/packed": 1.0, "x": 1.0}, False),
    ],
)
def test_raw_layout_needs_a_test_of_its_own_when_another_layout_leads(times: dict[str, float], needs: bool) -> None:
    rounds = make_rounds(times, packings={name: "p" for name in times if "packed" in name})
    assert rounds._raw_needs_own_test() is needs
    assert rounds._reserved_after_test_s() == pytest.approx(15.0 if needs else 0.0)
    for entry in rounds.entries:
        if entry.id == "x":
            entry.stage = "failed"
    assert not rounds._raw_needs_own_test()


@pytest.mark.parametrize(
    ("ratio", "far_apart"), [(0.79, True), (0.8, False), (1.0, False), (1.25, False), (1.26, True)]
)
def test_single_times_far_apart_are_a_quarter_apart(ratio: float, far_apart: bool) -> None:
    rounds = make_rounds({"aten": [1.0] * 7, "x": [ratio] * 7})
    rounds._update_far_apart()
    assert rounds.far_apart is far_apart


@pytest.mark.parametrize(
    ("ratio", "far_apart"), [(0.89, True), (0.91, False), (1.0, False), (1.1, False), (1.12, True)]
)
def test_intervals_far_apart_are_a_tenth_apart(ratio: float, far_apart: bool) -> None:
    rounds = make_rounds({"aten": [1.0] * 8, "x": [ratio] * 8})
    rounds._update_far_apart()
    assert rounds.far_apart is far_apart


def test_one_side_alone_is_not_far_apart() -> None:
    for name in ("aten", "x"):
        rounds = make_rounds({name: [1.0] * 8})
        rounds._update_far_apart()
        assert not rounds.far_apart


@pytest.mark.parametrize(("move_s", "elapsed_s", "moved"), [(0.0, 0.0, True), (9.5, 5.0, True), (9.6, 5.0, False)])
def test_operands_move_when_that_takes_a_tenth_of_the_remaining_time(
    move_s: float, elapsed_s: float, moved: bool
) -> None:
    calls: list[int] = []

    def move() -> None:
        calls.append(1)
        rounds.clock._time += 3.0  # type: ignore[attr-defined]

    rounds = make_rounds({"x": 1.0}, move=move, move_s=move_s)
    rounds.clock._time = 2.0  # type: ignore[attr-defined]
    rounds.start = 2.0 - elapsed_s
    assert rounds.move() is moved
    assert (len(calls), rounds.moves) == (moved, moved)
    assert rounds._move_s == (3.0 if moved else move_s)
    assert make_rounds({"x": 1.0}).move() is False


class OneState:
    """A machine that is always in one state."""

    def __init__(self, state: MachineState) -> None:
        self.state = state

    def read_state(self) -> MachineState:
        return self.state


@pytest.mark.parametrize(
    ("state", "disturbed", "contended"),
    [
        (MachineState(load=0.25, stolen=0.02), False, False),
        (MachineState(load=0.26), True, False),
        (MachineState(stolen=0.021), True, False),
        (MachineState(contention=True), False, True),
    ],
)
def test_load_and_stolen_time_disturb_a_race(state: MachineState, disturbed: bool, contended: bool) -> None:
    machine = OneState(state)
    rounds = make_rounds({"x": 1.0}, machine=machine)
    assert (rounds.disturbed, rounds.contended) == (disturbed, contended)
    assert rounds.conditions == state.words()
    assert rounds._limit_s() == (200.0 if disturbed else 100.0)
    machine.state = MachineState()
    assert rounds._machine_state() == MachineState()
    assert (rounds.disturbed, rounds.contended) == (disturbed, contended)
    assert make_rounds({"x": 1.0}).conditions == {}


@pytest.mark.parametrize(("spread", "disturbed"), [(0.016, False), (0.018, True)])
@pytest.mark.parametrize("name", ["aten", "x"])
def test_noisy_times_of_the_best_baseline_disturb_a_race(name: str, spread: float, disturbed: bool) -> None:
    """The MAD of the times is 1.4826 times twice the spread."""
    rounds = make_rounds({name: steady(1.0, 14, spread), "other": steady(9.0, 14, 0.2 if name == "aten" else spread)})
    rounds._update_disturbed()
    assert rounds.disturbed is disturbed


def test_noise_is_relative_to_the_median() -> None:
    assert noise([2.0, 4.0, 6.0]) == pytest.approx(1.4826 * 2.0 / 4.0)
    assert noise([]) == 0.0


def test_progress_has_the_leader_and_its_ratio_to_the_best_baseline() -> None:
    events: list[BestSoFar] = []
    make_rounds({"aten": 2.0, "x": 1.0}, progress=events.append)._report()
    make_rounds({"x": 1.0}, progress=events.append)._report()
    make_rounds({}, progress=events.append)._report()
    assert events == [BestSoFar("x", 1.0, 0.5), BestSoFar("x", 1.0, 1.0)]


def test_entries_faster_than_the_machine_can_be_fail() -> None:
    rounds = make_rounds({"x": 1e-6, "y": 2e-6, "never": []}, least_s=2e-6)
    rounds._drop_impossible()
    assert active(rounds) == ["y", "never"]
    failed = rounds.entries[0]
    assert (failed.stage, failed.fault) == ("failed", "wrong")
    assert failed.reason == "1 us a call, where this machine needs 2 us: it cannot have computed it"


def test_entries_not_reached_in_half_the_budget_stay_untried() -> None:
    """Each calibration takes 1 s, and baselines come first."""
    for budget_s, left in ((4.0, ["x", "y", "aten"]), (3.0, ["x", "aten"]), (1.0, ["aten"])):
        rounds = make_rounds({"x": [], "y": [], "aten": []}, budget_s=budget_s)
        for entry in rounds.entries:
            entry.calls = 0
        rounds._calibrate()
        assert active(rounds) == left
        assert {entry.reason for entry in rounds.entries if not entry.active} <= {
            "the budget was spent before its turn"
        }
        assert {entry.stage for entry in rounds.entries if not entry.active} <= {"untried"}


def test_entries_dropped_for_being_slower_return_and_others_do_not() -> None:
    rounds = make_rounds(dict.fromkeys(("a", "b", "c", "d", "e"), 1.0))
    for entry, stage in zip(rounds.entries, ("screened", "eliminated", "failed", "untried"), strict=False):
        entry.drop(stage, "why")  # type: ignore[arg-type]
    rounds._restore_dropped()
    assert active(rounds) == ["a", "b", "e"]
    assert [(entry.stage, entry.reason) for entry in rounds.entries[:3]] == [
        ("finalist", ""), ("finalist", ""), ("failed", "why")
    ]  # fmt: skip


def test_round_times_every_active_entry_once_and_measures_a_timing() -> None:
    rounds = make_rounds({"x": [], "y": [], "z": []})
    rounds.entries[2].drop("screened", "")
    rounds._round()
    assert rounds.rounds == 1
    assert [entry.times for entry in rounds.entries] == [{0: 1.0}, {0: 1.0}, {}]
    assert rounds._timing_s == 1.0
    nobody = make_rounds({})
    nobody._round()
    assert nobody.rounds == 1


def test_calls_are_equal_from_the_fifth_round_on() -> None:
    for count, calls in ((3, [1, 9]), (4, [9, 9])):
        rounds = make_rounds({"x": [1e-5] * count, "y": [1e-5] * count})
        rounds.entries[1].calls = 9
        for entry in rounds.entries:
            entry.run = rounds.clock.kernel(1e-3)  # type: ignore[attr-defined]
        rounds._round()
        assert [entry.calls for entry in rounds.entries] == calls
