"""Races on the simulated clock: false and true winners, budgets, and the result of each entrant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gemmtune.core.decision import Verdict
from gemmtune.core.events import BestSoFar
from gemmtune.testing.clock import FakeClock
from gemmtune.timing.clock import CpuClock, Run
from gemmtune.timing.machine import MachineState
from gemmtune.timing.paired_test import PairedTest
from gemmtune.timing.race import Entrant, RaceResult, RaceSetup, _Race, race
from gemmtune.timing.race_entry import RaceEntry
from gemmtune.timing.stats import Interval
from gemmtune.timing.surroundings import OVERLAP, Comparison, Surrounding

NOISY = {"noise": 0.02, "drift": 0.01, "stalls": 0.03}


def make_entrants(clock: FakeClock, challengers: Sequence[float], incumbents: Sequence[float]) -> list[Entrant]:
    baselines = [Entrant(f"aten{i}", clock.kernel(s), is_baseline=True) for i, s in enumerate(incumbents)]
    return baselines + [Entrant(f"native{i}", clock.kernel(s), packing=f"g{i % 2}") for i, s in enumerate(challengers)]


def run_race(
    challengers: Sequence[float], incumbents: Sequence[float], seed: int = 0, budget: float = 6.0, **clock: float
) -> RaceResult:
    fake_clock = FakeClock(seed, **clock)  # type: ignore[arg-type]
    return race(make_entrants(fake_clock, challengers, incumbents), fake_clock, budget, seed=seed)


@pytest.mark.parametrize(("count", "runs"), [(2, 150), (20, 50), (200, 10)])
def test_identical_candidates_tie(count: int, runs: int) -> None:
    outcomes = [run_race([1e-3] * count, [1e-3] * 3, seed, **NOISY).outcome for seed in range(runs)]
    assert outcomes == ["tie"] * runs


@pytest.mark.parametrize(("gain", "least"), [(0.02, 0.95), (0.05, 0.99)])
def test_faster_candidates_win(gain: float, least: float) -> None:
    runs = 60
    results = [run_race([1e-3] * 9 + [(1 - gain) * 1e-3], [1e-3, 1.2e-3], seed, **NOISY) for seed in range(runs)]
    correct = sum(r.outcome == "winner" and r.leader == "native9" for r in results)
    assert correct >= least * runs


def test_winner_must_beat_the_fastest_baseline() -> None:
    result = run_race([0.9e-3], [1.3e-3, 0.8e-3, 1.0e-3], **NOISY)
    assert (result.outcome, result.leader, result.baseline) == ("tie", "aten1", "aten1")


def test_gains_below_the_threshold_are_ties() -> None:
    outcomes = [run_race([0.998e-3], [1e-3], seed, noise=0.005).outcome for seed in range(20)]
    assert outcomes == ["tie"] * 20


def test_result_has_the_stage_and_reason_of_each_entrant() -> None:
    result = run_race([0.5e-3, 0.55e-3, 2e-3], [1e-3, 3e-3], noise=0.01)
    rows = result.evidence
    assert (result.outcome, result.leader, result.baseline) == ("winner", "native0", "aten0")
    assert rows["native0"].stage == "winner"
    assert rows["native1"].stage == "eliminated"
    assert "x the time of native0" in rows["native1"].reason
    assert rows["native2"].stage == "screened"
    assert "slower than the best after 4 rounds" in rows["native2"].reason
    assert rows["aten0"].stage == "finalist"
    assert "slower than the best baseline" in rows["aten1"].reason
    assert result.stopped == rows["native0"].reason
    assert "after 50 pairs" in result.stopped


def test_samples_have_paired_ratios_to_the_baseline() -> None:
    result = run_race([0.5e-3] * 2, [1e-3], noise=0.02, drift=0.2, drift_s=0.05)
    for name in ("native0", "native1"):
        sample = result.evidence[name].sample
        assert sample is not None
        assert sample.ratio_lo <= sample.ratio <= sample.ratio_hi
        assert sample.ratio == pytest.approx(0.5, rel=0.03)
        assert sample.lo_s <= sample.median_s <= sample.hi_s
        assert len(sample.times) == min(64, sample.rounds)
    incumbent = result.evidence["aten0"].sample
    assert incumbent is not None
    assert (incumbent.ratio, incumbent.ratio_lo, incumbent.ratio_hi) == (1.0, 1.0, 1.0)


def test_alternatives_are_the_fastest_of_each_group() -> None:
    result = run_race([0.7e-3, 0.5e-3, 0.6e-3, 0.9e-3], [1e-3], noise=0.005)
    assert result.alternatives == {"g1": "native1", "g0": "native2", "": "aten0"}


@pytest.mark.parametrize("budget", [0.05, 0.5, 5.0])
@pytest.mark.parametrize("seconds", [5e-6, 1e-3, 5e-3])
def test_race_stays_within_its_budget(budget: float, seconds: float) -> None:
    longest = 8 * max(seconds, 500e-6) * 4  # calibration and one round
    steady = run_race([seconds] * 6, [seconds] * 2, budget=budget, noise=0.02)
    assert steady.seconds <= max(1.1 * budget, longest)
    assert "extended" not in steady.conditions
    disturbed = run_race([seconds] * 6, [seconds] * 2, budget=budget, **NOISY)
    assert disturbed.seconds <= max(2.1 * budget, longest)


def test_slow_kernels_are_decided_with_fewer_pairs() -> None:
    result = run_race([0.05, 0.1], [0.1], budget=4.0, **NOISY)
    assert (result.outcome, result.leader) == ("winner", "native0")
    assert result.seconds <= 4.4


@pytest.mark.parametrize(("count", "budget"), [(1, 0.5), (2, 0.8), (4, 0.8), (8, 0.7)])
def test_short_race_leaves_enough_pairs_for_the_paired_test(count: int, budget: float) -> None:
    """Cache flushes take far longer here than the kernels."""
    for seed in range(10):
        result = run_race([1e-3] * count, [4e-3], seed, budget, chill_s=20e-3)
        assert result.outcome == "winner"
        assert result.seconds <= 1.1 * budget


def test_race_with_little_time_drops_entrants() -> None:
    """There are twenty entrants and time for 1.5 rounds: only the best, and the best of each group, are timed again."""
    clock = FakeClock(chill_s=10e-3, noise=0.05)
    seconds = [4e-3, *[4.4e-3] * 18]
    earlier_s = {f"native{i}": s for i, s in enumerate(seconds)}
    result = race(make_entrants(clock, seconds, [6e-3]), clock, 1.5, setup=RaceSetup(earlier_s=earlier_s))
    assert (result.outcome, result.leader) == ("winner", "native0")
    assert result.rounds >= 5
    dropped = [row for row in result.evidence.values() if "more than the time allows" in row.reason]
    assert len(dropped) >= 10
    assert {row.stage for row in dropped} == {"screened"}
    assert set(result.alternatives) == {"", "g0", "g1"}
    assert result.seconds <= 1.65


def test_baseline_wins_with_too_small_a_budget() -> None:
    result = run_race([0.05] * 3, [0.1], budget=0.3)
    assert (result.outcome, result.leader) == ("tie", "aten0")
    assert "a decision needs 9" in result.stopped or "no challenger" in result.stopped
    assert {row.stage for row in result.evidence.values()} >= {"untried"}


def test_heavy_stalls_do_not_change_the_outcome() -> None:
    outcomes = [run_race([0.95e-3, 1e-3], [1e-3], s, noise=0.03, stalls=0.1, stall_s=8e-3) for s in range(30)]
    assert [r.leader for r in outcomes] == ["native0"] * 30
    ties = [run_race([1e-3], [1e-3], s, noise=0.03, stalls=0.1, stall_s=8e-3).outcome for s in range(30)]
    assert ties == ["tie"] * 30


def test_races_with_equal_seeds_are_equal() -> None:
    assert run_race([1e-3, 0.97e-3], [1e-3], 3, **NOISY) == run_race([1e-3, 0.97e-3], [1e-3], 3, **NOISY)


def test_race_without_a_baseline_or_without_entrants() -> None:
    alone = run_race([1e-3, 0.5e-3], [])
    assert (alone.outcome, alone.leader, alone.baseline) == ("winner", "native1", None)
    assert run_race([], [1e-3, 0.5e-3]).leader == "aten1"
    empty = run_race([], [])
    assert (empty.outcome, empty.leader) == ("none_valid", None)


@pytest.mark.parametrize("after", [0, 3, 200])
@pytest.mark.parametrize(("victim", "leader"), [("aten0", "native0"), ("native0", "native1")])
def test_entrant_that_raises_fails_alone(victim: str, leader: str, after: int) -> None:
    """The victim's 0.5 ms eliminate the others, which return when it fails, even in the paired test."""
    clock = FakeClock(0)
    calls = 0

    def raising(i: int) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise RuntimeError("lost its way")
        clock.kernel(0.5e-3)(i)

    entrants = [
        Entrant("aten0", clock.kernel(1.1e-3), is_baseline=True),
        Entrant("aten1", clock.kernel(1.0e-3), is_baseline=True),
        Entrant("native0", clock.kernel(0.48e-3 if victim == "aten0" else 0.8e-3)),
        Entrant("native1", clock.kernel(0.82e-3)),
    ]
    entrants = [Entrant(e.id, raising if e.id == victim else e.run, e.is_baseline) for e in entrants]
    result = race(entrants, clock, 2.0, min_pairs=300)
    assert result.evidence[victim].stage == "failed"
    assert "RuntimeError: lost its way" in result.evidence[victim].reason
    assert (result.outcome, result.leader) == ("winner", leader)
    assert result.baseline == "aten1"
    assert calls == after + 1


def test_race_of_real_kernels_on_the_cpu_clock() -> None:
    small, large = torch.randn(32, 64), torch.randn(512, 512)
    entrants = [
        Entrant("aten", lambda i: torch.mm(large, large), is_baseline=True),
        Entrant("less", lambda i: torch.mm(small, small.t())),
    ]
    result = race(entrants, CpuClock(), 20.0)  # stops after 50 pairs, 0.2 s on an idle machine
    assert (result.outcome, result.leader) == ("winner", "less")
    sample = result.evidence["less"].sample
    assert sample is not None
    assert 0.0 < sample.ratio_lo <= sample.ratio <= sample.ratio_hi < 1.0


def test_similar_entrants_have_equal_call_counts() -> None:
    clock, counts = FakeClock(0), list[list[int]]()
    original = clock.time_round

    def record_counts(runs: Sequence[Run], calls: Sequence[int]) -> list[float]:
        counts.append(sorted(calls))
        return original(runs, calls)

    clock.time_round = record_counts  # type: ignore[method-assign]
    times = iter((3, 4, 5))
    clock.calls_for = lambda run, floor_s: next(times)  # type: ignore[method-assign]
    race(make_entrants(clock, [1e-4, 1e-4], [1e-4]), clock, 2.0)
    assert counts[0] == [3, 4, 5]
    assert all(len(set(row)) == 1 for row in counts[4:])


def test_timings_of_the_paired_test_have_the_clocks_length() -> None:
    clock, counts = FakeClock(0), list[list[int]]()
    clock.paired_timing_s, original = 2e-3, clock.time_round

    def record_counts(runs: Sequence[Run], calls: Sequence[int]) -> list[float]:
        counts.append(list(calls))
        return original(runs, calls)

    clock.time_round = record_counts  # type: ignore[method-assign]
    race(make_entrants(clock, [0.9e-4, 1.1e-4], [1e-4]), clock, 4.0)
    assert len(counts[0]) == 3
    assert max(counts[0]) <= 6
    assert all(row[0] == row[1] and 20 <= row[0] <= 24 for row in counts[-50:])


def test_progress_reports_the_best_candidate() -> None:
    clock, events = FakeClock(0), list[BestSoFar]()
    race(make_entrants(clock, [0.5e-3, 0.98e-3], [1e-3, 1.01e-3]), clock, 2.0, progress=events.append)
    assert events
    assert {event.candidate_id for event in events} == {"native0"}
    assert events[-1].ratio == pytest.approx(0.5, rel=0.05)


def test_drift_is_reported_as_a_condition() -> None:
    steady = run_race([1e-3], [1e-3], noise=0.005)
    assert steady.conditions == {}
    moved = run_race([1e-3] * 4, [1e-3], noise=0.002, drift=0.4, drift_s=2.0)
    assert moved.conditions["drift"].endswith("%")
    sample = moved.evidence["aten0"].sample
    assert sample is not None
    assert sample.conditions == moved.conditions


def test_invalid_arguments_raise_value_error() -> None:
    clock = FakeClock(0)
    with pytest.raises(ValueError, match="budget_s must be positive"):
        race([], clock, 0.0)
    with pytest.raises(ValueError, match="distinct ids"):
        race([Entrant("x", clock.kernel(1.0)), Entrant("x", clock.kernel(1.0))], clock, 1.0)


def test_no_winner_when_the_faster_entry_depends_on_the_addresses() -> None:
    """Half of the addresses favour the challenger by 4%, the others the baseline: no winner, however sure the pairs."""
    factors = (0.96, 1.04)
    for seed in range(10):
        clock, moves = FakeClock(seed, noise=0.01), []
        baseline = clock.kernel(1e-3)

        def challenger(i: int, clock: FakeClock = clock, moves: list[int] = moves) -> None:
            clock.kernel(1e-3 * factors[len(moves) % 2])(i)

        entrants = [Entrant("aten", baseline, is_baseline=True), Entrant("ours", challenger)]
        result = race(entrants, clock, 6.0, seed=seed, setup=RaceSetup(move=lambda moves=moves: moves.append(1)))  # type: ignore[misc]
        assert result.outcome == "tie"
        assert len(moves) >= 2


def test_slow_operand_moves_are_not_repeated() -> None:
    clock, moves = FakeClock(0, noise=0.01), []

    def move() -> None:
        moves.append(1)
        clock._time += 3.0

    entrants = [Entrant("aten", clock.kernel(1e-3), is_baseline=True), Entrant("ours", clock.kernel(0.9e-3))]
    result = race(entrants, clock, 6.0, setup=RaceSetup(move=move))
    assert result.outcome == "winner"
    assert len(moves) == 1
    assert race(entrants, clock, 6.0, setup=RaceSetup(move=move, move_s=3.0)).outcome == "winner"
    assert len(moves) == 1


def test_tie_is_explained_by_the_paired_test() -> None:
    result = run_race([1e-3], [1e-3], noise=0.005)
    assert result.outcome == "tie"
    assert result.stopped == result.evidence["aten0"].reason
    assert result.stopped.endswith("not faster by 0.3%")


class ChangingMachine:
    """A machine whose load is 1.5 cores from the first state after the rounds on."""

    def __init__(self) -> None:
        self.reads = 0

    def read_state(self) -> MachineState:
        self.reads += 1
        return MachineState(load=0.0 if self.reads <= 2 else 1.5)


def test_paired_test_is_repeated_when_the_load_changed_meanwhile() -> None:
    clock = FakeClock(0)
    result = race(make_entrants(clock, [0.9e-3], [1e-3]), clock, 60.0, setup=RaceSetup(machine=ChangingMachine()))
    assert result.outcome == "winner"
    assert result.conditions["repeated"] == "others' load went from 0.0 to 1.5 cores"


def test_stalls_in_the_paired_test_extend_the_race() -> None:
    """The times are steady apart from the stalls: their MAD shows no noise."""
    disturbed = run_race([0.994e-3], [1e-3], budget=0.3, noise=0.01, stalls=0.1)
    assert "extended" in disturbed.conditions
    assert disturbed.seconds > 1.1 * 0.3
    assert "extended" not in run_race([0.994e-3], [1e-3], budget=0.3, noise=0.01).conditions


def layouts_race(raw_s: float, raw_aten_s: float, packed_aten_s: float, budget_s: float = 6.0) -> RaceResult:
    clock = FakeClock(3, noise=0.01)
    entrants = [
        Entrant("aten/packed", clock.kernel(packed_aten_s), is_baseline=True, packing="aten:copy"),
        Entrant("aten/raw", clock.kernel(raw_aten_s), is_baseline=True),
        Entrant("native/raw", clock.kernel(raw_s)),
    ]
    return race(entrants, clock, budget_s, seed=3)


def test_raw_winner_is_compared_with_the_packed_baseline_that_it_beat() -> None:
    result = layouts_race(0.8e-3, 1.1e-3, 1e-3)
    assert (result.outcome, result.leader) == ("winner", "native/raw")
    assert result.layouts[""].baseline == "aten/packed"


def test_raw_challenger_behind_a_packed_baseline_is_compared_with_the_raw_one() -> None:
    result = layouts_race(1e-3, 1.5e-3, 0.9e-3)
    assert (result.outcome, result.leader) == ("tie", "aten/packed")
    layout = result.layouts[""]
    assert (layout.outcome, layout.candidate, layout.baseline) == ("winner", "native/raw", "aten/raw")


def test_paired_test_of_the_raw_layout_has_the_remaining_budget() -> None:
    """Five percent of the budget, which it has in any case, are fewer pairs than a decision needs."""
    result = layouts_race(10e-3, 15e-3, 9e-3, budget_s=2.0)
    assert (result.outcome, result.leader) == ("tie", "aten/packed")
    assert result.layouts[""].outcome == "winner"


def test_challenger_that_raises_among_other_work_is_out_and_the_next_one_wins() -> None:
    clock = FakeClock(0)

    def run_of(name: str, variant: str) -> Run:
        def raising(i: int) -> None:
            raise RuntimeError("illegal memory access")

        return raising if name == "native0" else clock.kernel({"native1": 0.9e-3}.get(name, 1e-3))

    surrounding = Surrounding("behind an elementwise kernel", run_of)
    entrants = make_entrants(clock, [0.8e-3, 0.805e-3], [1e-3])
    result = race(entrants, clock, 6.0, setup=RaceSetup(surroundings=[surrounding]))
    assert (result.outcome, result.leader) == ("winner", "native1")
    failed = result.evidence["native0"]
    assert failed.verdict is not None
    assert (failed.stage, failed.verdict.kind) == ("failed", "crashed")
    assert failed.reason == "raised RuntimeError: illegal memory access behind an elementwise kernel"


# --- machine and baseline that are not believed ------------------------------------------------------------------


class SteadyMachine:
    """A machine that is always in one state."""

    def __init__(self, **state: Any) -> None:
        self.state = MachineState(**state)

    def read_state(self) -> MachineState:
        return self.state


def test_tie_is_inconclusive_where_others_need_the_cores() -> None:
    clock = FakeClock(0, noise=0.005)
    setup = RaceSetup(machine=SteadyMachine(contention=True))
    tie = race(make_entrants(clock, [1e-3], [1e-3]), clock, 6.0, setup=setup)
    assert tie.outcome == "inconclusive"
    assert tie.leader == tie.baseline == "aten0"
    assert tie.stopped.endswith("; others kept the cores busy that the kernels' threads need")
    assert tie.conditions == {"load": "0.0 cores"}
    win = race(make_entrants(clock, [0.8e-3], [1e-3]), clock, 6.0, setup=setup)
    assert (win.outcome, win.leader) == ("winner", "native0")
    alone = race(make_entrants(clock, [], [1e-3]), clock, 6.0, setup=setup)
    assert (alone.outcome, alone.stopped) == (
        "inconclusive", "others kept the cores busy that the kernels' threads need"
    )  # fmt: skip


def make_race(budget_s: float = 10.0, **setup: Any) -> _Race:
    """Return a race, not yet run, of a baseline of 1 ms and a challenger of 0.9 ms that have one time each."""
    clock = FakeClock(0, noise=0.0)
    entrants = make_entrants(clock, [0.9e-3], [1e-3])
    result = _Race(entrants, clock, budget_s, 0, None, RaceSetup(**setup), 50, 0.003)
    for entry, seconds in zip(result.entries, (1e-3, 0.9e-3), strict=True):
        entry.times, entry.calls = {0: seconds}, 1
    return result


OPEN, NARROW = Interval(1.0, 0.97, 1.03, 0.99), Interval(1.0, 0.99, 1.01, 0.99)


@pytest.mark.parametrize(
    ("disturbed", "test", "outcome"),
    [
        (True, PairedTest(interval=OPEN), "inconclusive"),
        (False, PairedTest(interval=OPEN), "tie"),
        (True, PairedTest(interval=NARROW), "tie"),
        (True, PairedTest(interval=NARROW, unclear=True), "inconclusive"),
        (True, PairedTest(interval=OPEN, unclear=True, decided=True), "tie"),
        (True, PairedTest(interval=OPEN, decided=True), "tie"),
        (True, None, "tie"),
    ],
)
def test_question_that_a_disturbed_machine_leaves_open_is_inconclusive(
    disturbed: bool, test: PairedTest | None, outcome: str
) -> None:
    races = make_race()
    races.disturbed = disturbed
    words = "the machine was too disturbed to decide" if outcome == "inconclusive" else ""
    assert races._tie(test) == (outcome, words)


@pytest.mark.parametrize(
    ("stalled", "times", "disturbed"),
    [
        (0.05, [], False),
        (0.06, [], True),
        (0.0, [1.0, 1.2] * 4, True),
        (0.0, [1.0, 1.2] * 3 + [1.0], False),
        (0.0, [1.0, 1.01] * 4, False),
    ],
)
def test_stalls_and_noise_of_a_paired_test_extend_its_deadline(
    stalled: float, times: list[float], disturbed: bool
) -> None:
    races = make_race()
    deadline = races._test_deadline(PairedTest(stalled=stalled, baseline=times))
    assert races.disturbed is disturbed
    assert deadline == races.start + (20.0 if disturbed else 10.0)


@pytest.mark.parametrize(("earlier_s", "is_believed"), [(0.246e-3, True), (0.244e-3, False), (None, True)])
def test_baseline_far_above_its_earlier_time_decides_nothing(earlier_s: float | None, is_believed: bool) -> None:
    """The baseline takes 1 ms in the race. Four times its earlier time, and 20 us more, are believed."""
    clock = FakeClock(0, noise=0.0)
    setup = RaceSetup(earlier_s={} if earlier_s is None else {"aten0": earlier_s})
    result = race(make_entrants(clock, [0.8e-3], [1e-3]), clock, 6.0, setup=setup)
    assert result.outcome == ("winner" if is_believed else "inconclusive")
    assert result.leader == ("native0" if is_believed else "aten0")
    text = "aten0 took 1e+03 us a call in the race and 244 us before it: the machine was disturbed"
    assert result.stopped.endswith(text) is not is_believed


@pytest.mark.parametrize(("earlier_s", "is_believed"), [(90e-6, True), (79e-6, False), (110e-6, False)])
def test_baseline_that_was_timed_on_operands_in_the_cache_may_take_longer(earlier_s: float, is_believed: bool) -> None:
    """It takes 1 ms in the race: four times its earlier time, 20 us and the 650 us for reading the operands, which do
    not count for calls that were long enough to be timed without the cache."""
    clock = FakeClock(0, noise=0.0)
    setup = RaceSetup(earlier_s={"aten0": earlier_s}, cold_s=650e-6)
    result = race(make_entrants(clock, [0.8e-3], [1e-3]), clock, 6.0, setup=setup)
    assert result.outcome == ("winner" if is_believed else "inconclusive")


class LoadedLater:
    """A machine whose load changes at every reading from the ``first`` one on."""

    def __init__(self, first: int) -> None:
        self.first, self.reads = first, 0

    def read_state(self) -> MachineState:
        self.reads += 1
        return MachineState(load=float(self.reads) if self.reads >= self.first else 0.0)


def test_paired_test_is_repeated_once() -> None:
    clock = FakeClock(0)
    machine = LoadedLater(3)
    result = race(make_entrants(clock, [0.9e-3], [1e-3]), clock, 60.0, setup=RaceSetup(machine=machine))
    assert result.outcome == "winner"
    assert machine.reads == 4  # before the race, before the test, and after each of the two tests


def test_extension_is_stated_where_it_took_more_than_a_tenth() -> None:
    for elapsed_s, disturbed, words in (
        (12.0, True, "by 2.0 s: the machine was disturbed"), (11.0, True, None), (12.0, False, None)
    ):  # fmt: skip
        races = make_race()
        races.disturbed, races.start = disturbed, -elapsed_s
        assert races._conditions(None) == ({} if words is None else {"extended": words})


def test_drift_is_that_of_the_paired_test_if_there_was_one() -> None:
    races = make_race()
    entry = races.entries[0]
    entry.times = dict(enumerate([1.0] * 3 + [1.5] * 6))
    assert races._conditions(entry) == {"drift": "+50.0%"}
    entry.test_times = [1.0] * 6 + [0.75] * 3
    assert races._conditions(entry) == {"drift": "-25.0%"}
    entry.test_times = [1.0] * 9
    assert races._conditions(entry) == {}


# --- surroundings ------------------------------------------------------------------------------------------------


def surrounding_of(
    clock: FakeClock, seconds: dict[tuple[str, str], float], name: str = "behind a copy", *,
    variants: tuple[str, ...] = ("",),
) -> Surrounding:  # fmt: skip
    """Return a surrounding with these seconds per call by entrant and variant; others take 1 ms."""
    return Surrounding(name, lambda entrant, variant: clock.kernel(seconds.get((entrant, variant), 1e-3)),
                       lambda entrant: variants)  # fmt: skip


def test_challenger_slower_in_a_surrounding_leaves_the_win_to_the_next() -> None:
    clock = FakeClock(0)
    slow = {("native0", ""): 1.2e-3, ("native1", ""): 0.9e-3}
    entrants = make_entrants(clock, [0.8e-3, 0.805e-3], [1e-3])
    result = race(entrants, clock, 6.0, setup=RaceSetup(surroundings=[surrounding_of(clock, slow)]))
    assert (result.outcome, result.leader) == ("winner", "native1")
    row = result.evidence["native0"]
    assert row.stage == "eliminated"
    assert row.reason.startswith("1.")
    assert row.reason.endswith("x the time of aten0 behind a copy, where it was faster in the paired test")
    assert result.layouts["g0"].outcome == "tie"
    assert result.layouts["g0"].surroundings["behind a copy"] == pytest.approx(1.2, rel=0.05)
    assert (result.layouts["g1"].outcome, result.layouts["g1"].candidate) == ("winner", "native1")
    assert result.layouts["g1"].surroundings["behind a copy"] == pytest.approx(0.9, rel=0.05)


def test_three_challengers_are_compared_at_most() -> None:
    clock = FakeClock(0)
    slow = {(f"native{i}", ""): 1.2e-3 for i in range(3)}
    entrants = make_entrants(clock, [0.8e-3, 0.803e-3, 0.806e-3, 0.809e-3], [1e-3])
    result = race(entrants, clock, 60.0, setup=RaceSetup(surroundings=[surrounding_of(clock, slow)]))
    assert (result.outcome, result.leader) == ("tie", "aten0")
    assert "behind a copy, where it was faster in the paired test" in result.stopped
    assert [result.evidence[f"native{i}"].stage for i in range(2)] == ["eliminated"] * 2


def test_raw_challenger_that_a_surrounding_refuses_against_a_packed_baseline_has_a_test_against_the_raw_one() -> None:
    clock = FakeClock(0, noise=0.002)
    entrants = [
        Entrant("aten/packed", clock.kernel(1e-3), is_baseline=True, packing="aten:copy"),
        Entrant("aten/raw", clock.kernel(1.3e-3), is_baseline=True),
        Entrant("native/raw", clock.kernel(0.9e-3)),
    ]
    slow = {("native/raw", ""): 1.1e-3, ("aten/raw", ""): 1.3e-3}
    result = race(entrants, clock, 10.0, setup=RaceSetup(surroundings=[surrounding_of(clock, slow)]))
    assert result.leader == "aten/packed"
    layout = result.layouts[""]
    assert (layout.outcome, layout.candidate, layout.baseline) == ("winner", "native/raw", "aten/raw")


@pytest.mark.parametrize(
    ("plain", "overlapped", "overlap", "outcome"),
    [
        (0.9e-3, 0.8e-3, True, "winner"),
        (0.8e-3, 0.9e-3, False, "winner"),
        (0.9e-3, 1.2e-3, False, "winner"),
        (1.2e-3, 0.9e-3, True, "winner"),
        (1.1e-3, 1.2e-3, False, "tie"),
    ],
)
def test_variant_with_the_better_worst_ratio_serves(
    plain: float, overlapped: float, overlap: bool, outcome: str
) -> None:
    clock = FakeClock(0, noise=0.002)
    seconds = {("native0", ""): plain, ("native0", OVERLAP): overlapped}
    with_variants = surrounding_of(clock, seconds, variants=("", OVERLAP))
    alone = surrounding_of(clock, {("native0", ""): 0.85e-3}, "alone")
    entrants = make_entrants(clock, [0.8e-3], [1e-3])
    result = race(entrants, clock, 10.0, setup=RaceSetup(surroundings=[with_variants, alone]))
    assert result.outcome == outcome
    layout = result.layouts["g0"]
    assert (layout.outcome, layout.overlap) == (outcome, overlap)
    assert layout.surroundings["behind a copy"] == pytest.approx(min(plain, overlapped) / 1e-3, rel=0.02)
    # A surrounding in which every variant is slower ends the comparisons.
    assert ("alone" in layout.surroundings) == (outcome == "winner")


def test_best_variant_is_that_of_the_surroundings_with_variants() -> None:
    best = make_race()._best_variant
    assert best({}) == OVERLAP
    assert best({"alone": {"": Comparison(0.5, 0.4, 0.6)}}) == OVERLAP
    both = {"": Comparison(0.9, 0.8, 1.0), OVERLAP: Comparison(0.8, 0.7, 0.9)}
    assert best({"alone": {"": Comparison(2.0, 1.9, 2.1)}, "behind": both}) == OVERLAP
    worse = {"": Comparison(0.9, 0.8, 1.0), OVERLAP: Comparison(0.95, 0.7, 1.0)}
    assert best({"behind": both, "before": worse}) == ""


# --- the raw layout ----------------------------------------------------------------------------------------------


def raw_race(raw_s: float, *, after: int | None = None) -> tuple[RaceResult, int]:
    """Race a kernel on the raw weight against ATen's, which takes 1 ms, and a faster packed kernel.

    after: the raw kernel raises after so many calls. Returns the result and the number of the raw kernel's calls.
    """
    clock, calls = FakeClock(3, noise=0.002), 0

    def raw(i: int) -> None:
        nonlocal calls
        calls += 1
        if after is not None and calls > after:
            raise RuntimeError("lost its way")
        clock.kernel(raw_s)(i)

    entrants = [
        Entrant("aten/raw", clock.kernel(1e-3), is_baseline=True),
        Entrant("native/raw", raw),
        Entrant("native/packed", clock.kernel(0.7e-3), packing="p"),
    ]
    return race(entrants, clock, 6.0, seed=3), calls


@pytest.mark.parametrize(("raw_s", "outcome"), [(0.9e-3, "winner"), (1e-3, "tie"), (1.01e-3, "tie"), (1.03e-3, None)])
def test_raw_layout_has_a_test_of_its_own_unless_its_kernel_is_far_behind(raw_s: float, outcome: str | None) -> None:
    result, _ = raw_race(raw_s)
    assert (result.outcome, result.leader) == ("winner", "native/packed")
    layout = result.layouts.get("")
    assert (None if layout is None else layout.outcome) == outcome
    assert result.evidence["native/raw"].stage in ("eliminated", "finalist")
    assert "paired test" not in result.evidence["native/raw"].reason


def test_raw_kernel_that_raises_in_its_own_test_fails_alone() -> None:
    _, calls = raw_race(0.9e-3)
    result, _ = raw_race(0.9e-3, after=calls - 20)  # its own test is the last, of 50 pairs
    assert (result.outcome, result.leader) == ("winner", "native/packed")
    row = result.evidence["native/raw"]
    assert (row.stage, row.reason) == ("failed", "native/raw raised RuntimeError: lost its way in the paired test")
    assert "" not in result.layouts
    assert result.alternatives[""] == "aten/raw"


# --- results -----------------------------------------------------------------------------------------------------


def test_race_without_a_rival_says_so() -> None:
    assert run_race([1e-3], []).stopped == "there is no baseline to beat"
    assert run_race([], [1e-3]).stopped == "no challenger is left"
    assert run_race([], []).stopped == "no entrant could be timed"
    alone = run_race([], [1e-3])
    assert (alone.outcome, alone.leader, alone.baseline) == ("tie", "aten0", "aten0")


def test_stalled_share_is_a_condition_and_a_sample_has_the_pairs() -> None:
    result = run_race([0.8e-3], [1e-3], noise=0.01, stalls=0.1)
    assert result.conditions["stalled"].endswith("% of the pairs, set aside")
    steady = run_race([0.8e-3], [1e-3], noise=0.01)
    assert "stalled" not in steady.conditions
    samples = [steady.evidence[name].sample for name in ("aten0", "native0")]
    assert [sample.rounds for sample in samples if sample is not None] == [50, 50]


def test_finalist_that_was_not_tested_has_the_reason() -> None:
    result = run_race([0.8e-3, 0.8e-3], [1e-3], noise=0.005)
    loser = next(row for row in result.evidence.values() if row.id.startswith("native") and row.stage != "winner")
    assert loser.stage == "finalist"
    assert loser.reason == "among the fastest; not chosen for the paired test"


def test_evidence_has_the_candidate_the_packing_and_the_fault() -> None:
    clock = FakeClock(0, noise=0.002)
    entrants = [
        Entrant("aten", clock.kernel(1e-3), is_baseline=True, candidate={"backend": "aten"}),
        Entrant("fast", clock.kernel(1e-6), packing="p", candidate={"backend": "fast"}),
        Entrant("x", clock.kernel(0.8e-3), packing="q"),
    ]
    result = race(entrants, clock, 6.0, setup=RaceSetup(least_s=1e-5, conditions={"operands": "hot"}))
    assert result.alternatives == {"": "aten", "q": "x"}
    row = result.evidence["fast"]
    assert (row.candidate, row.packing, row.stage) == ({"backend": "fast"}, "p", "failed")
    assert row.verdict == Verdict("wrong", row.reason)
    assert result.evidence["x"].verdict is None
    assert result.conditions == {"operands": "hot"}
    sample = result.evidence["x"].sample
    assert sample is not None
    assert sample.condition == "hot"


def test_alternative_of_the_leaders_packing_is_the_leader() -> None:
    """Another entry of its packing may have the better ratio over the rounds that it shares with the baseline."""
    races = make_race()
    baseline, leader = races.entries
    other = RaceEntry("other", leader.run, False, leader.packing, times={0: 0.5e-3})
    races.entries.append(other)
    assert races._result("winner", leader, baseline, "").alternatives == {"": "aten0", "g0": "native0"}
    assert races._result("tie", baseline, baseline, "").alternatives == {"": "aten0", "g0": "other"}
    assert races._result("winner", None, None, "").alternatives == {"": "aten0", "g0": "other"}
    other.stage = "failed"
    assert races._result("tie", baseline, baseline, "").alternatives == {"": "aten0", "g0": "native0"}
