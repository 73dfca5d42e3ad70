"""The rounds before the paired test: calibration, screening, and elimination until few entrants remain.

Every round times each remaining entrant once, in random order, so that drift and neighbours affect all alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..core.events import BestSoFar
from .clock import FLOOR_S, Clock, Run
from .machine import Machine, MachineState
from .paired_test import FIRST_SLOW_LOOK, first_look
from .race_entry import EntrantError, RaceEntry, fastest, ranked, ratio_to_baseline
from .stats import mad, ratio_interval, slower_than, spend
from .surroundings import Surrounding

ALPHA = 0.02  # chance that a race eliminates an entrant as fast as the leader, over all looks and entrants
SCREEN_RATIO = 1.5
EXTENSION = 1.0  # share of the budget that a disturbed machine adds
_SCREEN_ROUNDS = (2, 4)
_TWO_STALLS_S = 20e-3  # a difference that two stalls cannot explain; smaller differences wait for the second screening
# Rounds so far -> challengers that may remain.
_CHALLENGERS_BY_ROUND = {8: 24, 12: 12, 18: 8, 27: 6, 40: 4, 60: 4, 90: 4, 135: 3, 200: 3, 300: 3, 450: 3}
_GROUP_ROUNDS = 18  # rounds that the fastest of each group stays in: a Plan compares groups by these times
# Once nobody can be faster than the leader by more than this share (90% confidence), the leader is chosen.
_NEGLIGIBLE_GAIN = 0.004
# Operands are moved every so many rounds, if a move takes at most this share of the time left.
_MOVE_EVERY, _MOVE_SHARE = 5, 0.1
_MAX_MOVES = 8  # moves of the operands before a leader is chosen
# The effect of the operands' addresses: with fewer moves than _MAX_MOVES, an entry is not eliminated for a smaller
# difference.
_PLACEMENT_EFFECT = 0.05
# Raw challengers slower than ATen's raw kernels by the first factor, or than the best entry by the second, have no
# paired test of their own.
_RAW_BEHIND_BASELINE, _RAW_BEHIND_BEST = 1.2, 8.0
_TEST_SHARE = 0.4  # of the budget
# The largest share of the budget that is taken from the rounds for the pairs without which a paired test decides
# nothing.
_TEST_MAX_SHARE = 0.9
_MIN_ROUNDS = 5  # rounds for which the remaining time must suffice for every remaining entry
_CLOSE_BASELINE = 1.1  # baselines within this factor by their first times may each be the fastest
# Shares of the budget for the work after the paired test: all surroundings of a challenger, and the raw layout's own
# paired test.
SURROUNDINGS_SHARE, _RAW_SHARE = 0.2, 0.15
# A ratio that the first look of a paired test decides, by its interval and by single times, and the multiple of that
# look's pairs that the test may take.
_FAR_APART, _FAR_APART_FIRST, _FAR_APART_LOOKS = 0.9, 0.8, 1.5
NOISE, STALLED = 0.05, 0.05
_LOAD, _STOLEN = 0.25, 0.02  # beyond these the machine is disturbed

Progress = Callable[[BestSoFar], None]


@dataclass(frozen=True, slots=True)
class Entrant:
    """A kernel to race.

    run(i): one call on operand set i. is_baseline: whether it is one of ATen's candidates. packing: the name of its
    packed layout; None or empty for the raw weight. candidate: ``Candidate.to_dict()``, for its Evidence.
    """

    id: str
    run: Run
    is_baseline: bool = False
    packing: str | None = None
    candidate: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RaceSetup:
    """The inputs of a race besides its entrants.

    machine: read for load and clock. conditions: what every Sample states besides the race's own conditions. move:
    moves the operands to other memory; called now and then, since the address of a large operand changes a memory-bound
    kernel's time by some percent for as long as the operand stays there. move_s: the seconds that a move is expected to
    take. surroundings: those in which a winner must be no slower. least_s: seconds that no correct kernel can undercut.
    earlier_s: seconds per call measured before the race, by entrant id. cold_s: seconds that a call which was short
    then (``screening.SHORT_S``) may take longer on operands that are not in the cache.
    """

    machine: Machine | None = None
    conditions: Mapping[str, str] = field(default_factory=dict)
    move: Callable[[], None] | None = None
    move_s: float = 0.0
    surroundings: Sequence[Surrounding] = ()
    least_s: float = 0.0
    earlier_s: Mapping[str, float] = field(default_factory=dict)
    cold_s: float = 0.0


class Elimination:
    """The rounds of one race: ``choose`` ends when a leader is chosen, or when the remaining time is needed for the
    paired test."""

    def __init__(
        self, entrants: Sequence[Entrant], clock: Clock, budget_s: float, seed: int, progress: Progress | None,
        setup: RaceSetup, min_pairs: int,
    ) -> None:  # fmt: skip
        self._min_pairs = min_pairs
        self.clock, self.budget, self.progress, self.machine = clock, budget_s, progress, setup.machine
        self.conditions = dict(setup.conditions)
        self._move, self._move_s, self.moves = setup.move, setup.move_s, 0
        self._least_s, self._surroundings = setup.least_s, setup.surroundings
        self._earlier_s, self._cold_s = setup.earlier_s, setup.cold_s
        self.rng = random.Random(seed)
        self.entries = [RaceEntry(e.id, e.run, e.is_baseline, e.packing or None, e.candidate) for e in entrants]
        self.disturbed = self.contended = False
        self._machine_state()  # covers the time before the race, in which candidates were tried
        self.start = clock.now()
        self.rounds = 0
        self._timing_s = 0.0  # seconds that a timing took in the last round, overhead included
        self.far_apart = False  # at the last look, leader and best baseline were far apart
        self.stopped = ""

    def choose(self) -> None:
        self._calibrate()
        self._screen()
        self._eliminate()
        self._drop_impossible()

    def _drop_impossible(self) -> None:
        """Fail entries with a time that the machine cannot reach: the measurement is wrong, or the kernel computes
        nothing."""
        for entry in self._active():
            if entry.times and entry.median < self._least_s:
                median_s, least_s = f"{1e6 * entry.median:.3g} us", f"{1e6 * self._least_s:.3g} us"
                entry.drop(
                    "failed", f"{median_s} a call, where this machine needs {least_s}: it cannot have computed it"
                )
                entry.fault = "wrong"

    def _calibrate(self) -> None:
        """Warm every entry up, baselines first; an entry that is not reached in half the budget stays untried."""
        for entry in sorted(self.entries, key=lambda entry: not entry.is_baseline):
            if self._elapsed_s() > 0.5 * self.budget and any(other.calls for other in self.entries):
                entry.drop("untried", "the budget was spent before its turn")
                continue
            try:
                entry.calls = self.clock.calls_for(entry.guarded, FLOOR_S)
            except EntrantError as error:
                error.entry.drop("failed", str(error))

    def _screen(self) -> None:
        for rounds in _SCREEN_ROUNDS:
            while self.rounds < rounds:
                if not self._affordable():
                    return
                self._round()
                if self.rounds == 1:
                    self._update_far_apart()
                    self._drop_unaffordable()
            for baselines in (True, False):
                self._screen_side(baselines)

    def _drop_unaffordable(self) -> None:
        """Drop the slowest entries when the budget does not allow five rounds of all of them.

        A leader chosen by one timing of each would be chosen by chance. The best of each group stays, and every
        baseline close to the fastest.
        """
        remaining_s = self._limit_s() - self._reserved_for_test_s() - self._elapsed_s()
        affordable = int(remaining_s / max(self._timing_s * (_MIN_ROUNDS - self.rounds), 1e-9))
        entries = sorted(self._active(), key=self._first_estimate_s)
        if len(entries) <= affordable:
            return
        baseline_entries = [entry for entry in entries if entry.is_baseline]
        protected = self._raw_leaders()
        close_s = _CLOSE_BASELINE * min((self._first_estimate_s(entry) for entry in baseline_entries), default=0.0)
        protected |= {entry.id for entry in baseline_entries if self._first_estimate_s(entry) <= close_s}
        protected |= {
            entry.id
            for entry in {entry.packing: entry for entry in reversed(entries) if not entry.is_baseline}.values()
        }
        others = [entry for entry in entries if entry.id not in protected]
        for entry in others[max(0, affordable - len(protected)) :]:
            rank, count = entries.index(entry) + 1, len(entries)
            entry.drop("screened", f"in place {rank} of {count} by its first times; more than the time allows")

    def _first_estimate_s(self, entry: RaceEntry) -> float:
        """Return seconds per call after one round: the lower of that round's time and the time before the race, since a
        stall can double one of them."""
        return min(entry.median, self._earlier_s.get(entry.id, entry.median))

    def _screen_side(self, baselines: bool) -> None:
        """Drop entries that are far behind; a baseline only when a faster baseline is ahead of it.

        Stalls cannot drop an entry: its minimum counts, and four timings are needed where one or two stalls could
        explain the difference.
        """
        entries = [entry for entry in self._active() if entry.is_baseline or not baselines]
        if not entries:
            return
        best = min(entry.median for entry in entries)
        protected = self._raw_leaders()
        for entry in entries:
            fastest = min(entry.times.values())
            ratio, is_last_screening = fastest / best, self.rounds >= _SCREEN_ROUNDS[-1]
            if not is_last_screening and (fastest - best) * entry.calls < _TWO_STALLS_S:
                continue
            if ratio > SCREEN_RATIO and entry.is_baseline == baselines and entry.id not in protected:
                than = "the best baseline" if baselines else "the best"
                entry.drop("screened", f"{ratio:.1f}x slower than {than} after {self.rounds} rounds")

    def _eliminate(self) -> None:
        self._equalize_calls()
        for look, (rounds, max_challengers) in enumerate(_CHALLENGERS_BY_ROUND.items(), start=1):
            while self.rounds < rounds:
                if self._is_choice_settled():
                    return
                if not self._affordable():
                    self.stopped = f"the time for choosing a leader was spent after {self.rounds} rounds"
                    return
                self._round()
                if self.rounds % _MOVE_EVERY == 0 and self.moves < _MAX_MOVES:
                    self.move()
            self._update_disturbed()
            self._eliminate_slower(look, max_challengers)
            self._update_far_apart()
            self._report()
            if (
                self.rounds >= _GROUP_ROUNDS
                and (self.moves >= _MAX_MOVES or not self._is_move_affordable())
                and self._is_leader_chosen()
            ):
                return

    def _eliminate_slower(self, look: int, max_challengers: int) -> None:
        """Eliminate entries on confidence bounds (union over entries, alpha spent over looks), then all but the best
        ``max_challengers`` challengers."""
        active = self._active()
        leader = fastest(active)
        best_baseline = self._fastest_active(baselines=True)
        alpha = spend(ALPHA, look) / max(1, len(active))
        protected = self._group_leaders() | self._raw_leaders() if self.rounds < _GROUP_ROUNDS else set()
        for entry in active:
            rival = best_baseline if entry.is_baseline else leader
            if rival is None or entry is rival or entry.id in protected:
                continue
            interval = slower_than(*entry.paired(rival), alpha)
            more_moves_due = self.moves < _MAX_MOVES and self._is_move_affordable()
            if interval is not None and (not more_moves_due or interval.center > 1.0 + _PLACEMENT_EFFECT):
                text = f"{interval.center:.3f}x the time of {rival.id} ({interval.lo:.3f}..{interval.hi:.3f})"
                entry.drop("eliminated", f"{text} after {self.rounds} rounds")
        challengers = ranked([entry for entry in self._active() if not entry.is_baseline])
        if self.moves < _MAX_MOVES and self._is_move_affordable():
            max_challengers *= 2
        for rank, entry in enumerate(challengers[max_challengers:], start=max_challengers + 1):
            if entry.id not in protected:
                entry.drop(
                    "eliminated",
                    f"in place {rank} of {len(challengers)} after {self.rounds} rounds, beyond {max_challengers}",
                )

    def _group_leaders(self) -> set[str]:
        """Return the ids of the fastest challenger of each group."""
        challengers = ranked([entry for entry in self._active() if not entry.is_baseline])
        fastest = {entry.packing: entry.id for entry in reversed(challengers)}
        return set(fastest.values())

    def _raw_leaders(self) -> set[str]:
        """Return the ids of the fastest challenger and the fastest baseline on the raw weight.

        An unpacked weight is served by one of these two, whatever packed layouts gain. Empty where the baseline is far
        ahead, or where both are far behind.
        """
        active = self._active()
        raw = [[entry for entry in active if entry.raw and entry.is_baseline == side] for side in (False, True)]
        challenger, baseline = fastest(raw[0]), fastest(raw[1])
        if challenger is None or baseline is None:
            return set()
        is_slow = challenger.median > min(
            _RAW_BEHIND_BASELINE * baseline.median, _RAW_BEHIND_BEST * min(entry.median for entry in active)
        )  # fmt: skip
        return set() if is_slow else {challenger.id, baseline.id}

    def _is_leader_chosen(self) -> bool:
        """Whether no challenger can be much faster than the leading one, and no baseline than the best baseline."""
        for baselines in (True, False):
            best = self._fastest_active(baselines=baselines)
            for entry in self._active():
                if best is not None and entry is not best and entry.is_baseline == baselines:
                    interval = ratio_interval(*entry.paired(best), 0.1)
                    if interval.lo < 1.0 - _NEGLIGIBLE_GAIN:
                        return False
        return True

    def _is_choice_settled(self) -> bool:
        """Whether at most one challenger and one baseline remain, after both screenings."""
        active = self._active()
        baselines = sum(entry.is_baseline for entry in active)
        return baselines <= 1 and len(active) - baselines <= 1 and self.rounds >= max(_SCREEN_ROUNDS)

    def _equalize_calls(self) -> None:
        """Raise every entry's calls per timing to the largest number among the entries.

        The first call of a timing starts with caches and threads in the state after another kernel, and has more weight
        among few calls than among many.
        """
        entries = self._active()
        most_calls = max((entry.calls for entry in entries), default=0)
        raise_calls(entries, most_calls, FLOOR_S)

    def _round(self) -> None:
        """Time every active entry once, in random order. An entry that raises is dropped, and the round is repeated."""
        while entries := self._active():
            self.rng.shuffle(entries)
            started = self.clock.now()
            try:
                times = self.clock.time_round([entry.guarded for entry in entries], [entry.calls for entry in entries])
            except EntrantError as error:
                error.entry.drop("failed", str(error))
                self._restore_dropped()
                continue
            self._timing_s = (self.clock.now() - started) / len(entries)
            for entry, seconds in zip(entries, times, strict=True):
                entry.record(self.rounds, seconds, FLOOR_S)
            if self.rounds >= _SCREEN_ROUNDS[-1]:
                self._equalize_calls()
            break
        self.rounds += 1

    def _restore_dropped(self) -> None:
        """Reactivate the entries dropped for being slower: after a failure, they may have been compared with the entry
        that failed."""
        for entry in self.entries:
            if entry.stage in ("screened", "eliminated"):
                entry.active, entry.stage, entry.reason = True, "finalist", ""

    def _active(self) -> list[RaceEntry]:
        return [entry for entry in self.entries if entry.active]

    def _elapsed_s(self) -> float:
        return self.clock.now() - self.start

    def _affordable(self) -> bool:
        """Whether one more round leaves the paired test its share of the budget (the first round is always
        affordable)."""
        cost = max(sum(entry.cost for entry in self._active()), self._timing_s * len(self._active()))
        return self.rounds == 0 or self._elapsed_s() + cost <= self._limit_s() - self._reserved_for_test_s()

    def _reserved_for_test_s(self) -> float:
        """Return the seconds of the budget that are reserved for the paired test and the work after it.

        The paired test has its share of the budget, and more where that share allows too few pairs to decide anything.
        When leader and baseline were so far apart at the last look that the test's first look will decide, only the
        pairs before that look are reserved.
        """
        timing_s, limit_s = max(self._timing_s, self.clock.paired_timing_s), self._limit_s()
        share_s = max(_TEST_SHARE * limit_s, min(FIRST_SLOW_LOOK * 2.0 * timing_s, _TEST_MAX_SHARE * limit_s))
        pairs = first_look(2.0 * timing_s, self._min_pairs, self.far_apart)
        pairs_s = _FAR_APART_LOOKS * pairs * 2.0 * timing_s + 2.0 * self._move_s
        return self._reserved_after_test_s() + (min(share_s, pairs_s) if self.far_apart else share_s)

    def _reserved_after_test_s(self) -> float:
        """Return the seconds reserved for the work after the paired test."""
        share = (SURROUNDINGS_SHARE if self._surroundings else 0.0) + (
            _RAW_SHARE if self._raw_needs_own_test() else 0.0
        )
        return share * self.budget

    def _raw_needs_own_test(self) -> bool:
        """Whether the raw layout needs a paired test of its own: the leading challenger or baseline uses another
        layout."""
        raw = [entry for entry in self.entries if entry.raw and entry.times and entry.stage != "failed"]
        if {entry.is_baseline for entry in raw} != {True, False}:  # asked before each pair, and ranking takes time
            return False
        leaders = (self._fastest_active(baselines=True), self._fastest_active(baselines=False))
        return any(entry is not None and not entry.raw for entry in leaders)

    def _update_far_apart(self) -> None:
        """Update ``far_apart``: whether the leader and the best baseline are far apart."""
        baseline, leader = self._fastest_active(baselines=True), self._fastest_active(baselines=False)
        if baseline is not None and leader is not None:
            self.far_apart = self._are_far_apart(leader, baseline)

    def _are_far_apart(self, challenger: RaceEntry, baseline: RaceEntry) -> bool:
        """Whether the times of two entries differ so much that the first look of a paired test will decide. Before
        there are enough rounds with both, single times tell."""
        times = challenger.paired(baseline)
        if len(times[0]) < min(_CHALLENGERS_BY_ROUND):
            ratio = self._first_estimate_s(challenger) / self._first_estimate_s(baseline)
            return ratio < _FAR_APART_FIRST or ratio > 1.0 / _FAR_APART_FIRST
        interval = ratio_interval(*times, 0.1)
        return interval.hi < _FAR_APART or interval.lo > 1.0 / _FAR_APART

    def _is_move_affordable(self) -> bool:
        """Whether the operands can be moved to other memory, at a small share of the remaining time."""
        remaining_s = self.start + self.budget - self.clock.now()
        return self._move is not None and self._move_s <= _MOVE_SHARE * remaining_s

    def move(self) -> bool:
        """Move the operands to other memory if that is affordable. Returns whether they were moved."""
        start = self.clock.now()
        if self._move is None or not self._is_move_affordable():
            return False
        self._move()
        self._move_s, self.moves = self.clock.now() - start, self.moves + 1
        return True

    def _limit_s(self) -> float:
        """Return the seconds that this race may take."""
        return self.budget * (1.0 + (EXTENSION if self.disturbed else 0.0))

    def _update_disturbed(self) -> None:
        """Mark the machine as disturbed when the timings of the best baseline, which has the most of them, are
        noisy."""
        reference = self._fastest_active(baselines=True) or self._fastest_active(baselines=False)
        if reference is not None and noise(list(reference.times.values())) > NOISE:
            self.disturbed = True

    def _machine_state(self) -> MachineState:
        """Return the machine's state since the previous call, and mark the machine as disturbed or contended when it
        shows that."""
        state = self.machine.read_state() if self.machine is not None else MachineState()
        self.disturbed = self.disturbed or state.load > _LOAD or state.stolen > _STOLEN
        self.contended = self.contended or state.contention
        if self.machine is not None:
            self.conditions.update(state.words())
        return state

    def _fastest_active(self, *, baselines: bool) -> RaceEntry | None:
        return fastest([entry for entry in self._active() if entry.is_baseline == baselines])

    def _report(self) -> None:
        baseline, leader = self._fastest_active(baselines=True), fastest(self._active())
        if self.progress is not None and leader is not None:
            ratio = ratio_to_baseline(leader, baseline) if baseline is not None else 1.0
            self.progress(BestSoFar(leader.id, leader.median, ratio))


def raise_calls(entries: Sequence[RaceEntry], calls: int, floor_s: float) -> None:
    """Raise the calls per timing of every entry to ``calls``, where that is more.

    An entry far slower than the others cannot be mistaken for one of them: it makes only as many calls as take twice
    the floor.
    """
    for entry in entries:
        entry.calls = max(entry.calls, min(calls, round(2.0 * floor_s / max(entry.median, 1e-9))))


def noise(times: Sequence[float]) -> float:
    """Return the robust standard deviation of ``times``, relative to their median."""
    return mad(times) / median(times) if times else 0.0
