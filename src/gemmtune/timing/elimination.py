"""The rounds before the duel: calibration, screening, and elimination until few entrants are left.

Every round times each remaining entrant once, in random order, so that drift and neighbours hit all alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ..core.events import BestSoFar
from .clock import FLOOR_S, Clock, Run
from .duel import FIRST_SLOW_LOOK, SLOW_PAIR_S
from .lane import EntrantError, Lane, by_ratio, fastest, ranked
from .machine import Machine, Weather
from .stats import mad, ratio_interval, slower_than, spend
from .surroundings import Surrounding

ALPHA = 0.02  # chance that a race eliminates an entrant as fast as the leader, over all looks and entrants
SCREEN_RATIO = 1.5
EXTENSION = 1.0  # of the budget, on a disturbed machine
_SCREEN_ROUNDS = (2, 4)
_STALL_S = 20e-3  # a difference that two stalls cannot explain; smaller ones wait for the second screening
# Rounds -> challengers that may go on.
_LOOKS = {8: 24, 12: 12, 18: 8, 27: 6, 40: 4, 60: 4, 90: 4, 135: 3, 200: 3, 300: 3, 450: 3}
_GROUP_ROUNDS = 18  # the fastest of each group stays so long: a Plan compares groups by these times
_ALIKE = 0.004  # once nobody can be faster than the leader by more than this share (90%), the leader is chosen
_MOVE_EVERY, _MOVE_SHARE = 5, 0.1  # operands are moved after so many rounds, if it takes so little of the time left
_PLACES = 8  # times they are moved before a leader is chosen
_LUCK = 0.05  # what a place may be worth: in fewer places than that a lane is not eliminated for less
# Raw challengers this far behind ATen's raw kernels, or behind the best of all, are not kept for a duel of their own.
_RAW_BEHIND, _RAW_WORTH = 1.2, 8.0
_DUEL_SHARE = 0.4  # of the budget
# The share of the budget that pairs without which a duel decides nothing may take of the rounds before.
_DUEL_MOST = 0.9
_FEW_ROUNDS = 5  # of which a race has time for all that it goes on with
_CLOSE_INCUMBENT = 1.1  # incumbents this close by their first times may each be the fastest
# Of the budget, for what follows the duel: all surroundings of a challenger, and the raw layout's own duel.
SURROUNDINGS_SHARE, _RAW_SHARE = 0.2, 0.15
# A ratio that a duel's first look decides, as an interval and as single times tell it, and the looks' pairs that it may
# take.
_CLEAR, _CLEAR_AT_ONCE, _CLEAR_LOOKS = 0.9, 0.8, 1.5
NOISE, STALLED = 0.05, 0.05
_LOAD, _STOLEN = 0.25, 0.02  # beyond these the machine is disturbed

Progress = Callable[[BestSoFar], None]


@dataclass(frozen=True, slots=True)
class Entrant:
    """Something to time. run(i): one call on operand set i. incumbent: ATen's. group: the packing layout or None."""

    id: str
    run: Run
    incumbent: bool = False
    group: str | None = None


@dataclass(frozen=True, slots=True)
class RaceSetup:
    """What a race knows besides its entrants.

    machine: asked for load and clock. conditions: what every Sample is to say besides. move: puts the operands
    elsewhere in memory; called now and then, since where a large operand happens to lie moves a memory-bound kernel's
    time by some percent for as long as it lies there. move_s: the seconds that is expected to take. surroundings:
    in which a winner must hold. least_s: seconds below which no kernel can be. earlier_s: seconds per call measured
    before the race, by entrant id.
    """

    machine: Machine | None = None
    conditions: Mapping[str, str] = field(default_factory=dict)
    move: Callable[[], None] | None = None
    move_s: float = 0.0
    surroundings: Sequence[Surrounding] = ()
    least_s: float = 0.0
    earlier_s: Mapping[str, float] = field(default_factory=dict)


class Elimination:
    """The rounds of one race: ``choose`` ends when a leader is chosen, or time for the duel must be left."""

    def __init__(
        self, entrants: Sequence[Entrant], clock: Clock, budget_s: float, seed: int, progress: Progress | None,
        setup: RaceSetup, min_duel: int,
    ) -> None:  # fmt: skip
        self._min_duel = min_duel
        self.clock, self.budget, self.progress, self.machine = clock, budget_s, progress, setup.machine
        self.conditions = dict(setup.conditions)
        self._move, self._move_s, self.moves = setup.move, setup.move_s, 0
        self._least_s, self._surroundings, self._earlier_s = setup.least_s, setup.surroundings, setup.earlier_s
        self.rng = random.Random(seed)
        self.lanes = [Lane(e.id, e.run, e.incumbent, e.group) for e in entrants]
        self.disturbed = self.contended = False
        self._weather()  # of the time before: candidates were tried in it
        self.start = clock.now()
        self.rounds = 0
        self._each_s = 0.0  # what a timing took in the last round, with all that goes with it
        self.clear = False  # at the last look, leader and best incumbent were far apart
        self.stopped = ""

    def choose(self) -> None:
        self._calibrate()
        self._screen()
        self._eliminate()
        self._drop_impossible()

    def _drop_impossible(self) -> None:
        """A time that the machine cannot reach is a fault of the measurement, or of a kernel that does nothing."""
        for lane in self._active():
            if lane.times and lane.median < self._least_s:
                took, least = f"{1e6 * lane.median:.3g} us", f"{1e6 * self._least_s:.3g} us"
                lane.drop("failed", f"{took} a call, where this machine needs {least}: it cannot have computed it")
                lane.fault = "wrong"

    def _calibrate(self) -> None:
        """Warm every lane up, incumbents first; whoever is not reached in half the budget stays untried."""
        for lane in sorted(self.lanes, key=lambda lane: not lane.incumbent):
            if self._spent() > 0.5 * self.budget and any(other.calls for other in self.lanes):
                lane.drop("untried", "the budget was spent before its turn")
                continue
            try:
                lane.calls = self.clock.calls_for(lane.guarded, FLOOR_S)
            except EntrantError as error:
                error.lane.drop("failed", str(error))

    def _screen(self) -> None:
        for rounds in _SCREEN_ROUNDS:
            while self.rounds < rounds:
                if not self._affordable():
                    return
                self._round()
                if self.rounds == 1:
                    self._look_ahead()
                    self._drop_unaffordable()
            for incumbents in (True, False):
                self._screen_out(incumbents)

    def _drop_unaffordable(self) -> None:
        """Drop the slowest entrants when the budget does not allow five rounds of all: a leader chosen by one timing
        of each is chosen by chance. The best of each group stays, and every incumbent close to the fastest."""
        left = self._limit() - self._duel_s() - self._spent()
        places = int(left / max(self._each_s * (_FEW_ROUNDS - self.rounds), 1e-9))
        lanes = sorted(self._active(), key=self._first_estimate_s)
        if len(lanes) <= places:
            return
        incumbents = [lane for lane in lanes if lane.incumbent]
        kept = self._raw_leaders()
        close_s = _CLOSE_INCUMBENT * min((self._first_estimate_s(lane) for lane in incumbents), default=0.0)
        kept |= {lane.id for lane in incumbents if self._first_estimate_s(lane) <= close_s}
        kept |= {lane.id for lane in {lane.group: lane for lane in reversed(lanes) if not lane.incumbent}.values()}
        others = [lane for lane in lanes if lane.id not in kept]
        for lane in others[max(0, places - len(kept)) :]:
            place, count = lanes.index(lane) + 1, len(lanes)
            lane.drop("screened", f"in place {place} of {count} by its first times; more than the time allows")

    def _first_estimate_s(self, lane: Lane) -> float:
        """Return seconds per call after one round: the lower of that round's and the time before the race, since a
        stall can double one of them."""
        return min(lane.median, self._earlier_s.get(lane.id, lane.median))

    def _screen_out(self, incumbents: bool) -> None:
        """Drop whoever is far behind; incumbents only by a faster incumbent. Stalls cannot: the minimum counts, and it
        takes four timings where a stall or two would make the difference."""
        field = [lane for lane in self._active() if lane.incumbent or not incumbents]
        if not field:
            return
        best = min(lane.median for lane in field)
        kept = self._raw_leaders()
        for lane in field:
            fastest = min(lane.times.values())
            ratio, sure = fastest / best, self.rounds >= _SCREEN_ROUNDS[-1]
            if not sure and (fastest - best) * lane.calls < _STALL_S:
                continue
            if ratio > SCREEN_RATIO and lane.incumbent == incumbents and lane.id not in kept:
                than = "the best incumbent" if incumbents else "the best"
                lane.drop("screened", f"{ratio:.1f}x slower than {than} after {self.rounds} rounds")

    def _eliminate(self) -> None:
        self._even_out()
        for look, (rounds, places) in enumerate(_LOOKS.items(), start=1):
            while self.rounds < rounds:
                if self._settled():
                    return
                if not self._affordable():
                    self.stopped = f"the time for choosing a leader was spent after {self.rounds} rounds"
                    return
                self._round()
                if self.rounds % _MOVE_EVERY == 0 and self.moves < _PLACES:
                    self.move()
            self._look_around()
            self._thin(look, places)
            self._look_ahead()
            self._report()
            if self.rounds >= _GROUP_ROUNDS and (self.moves >= _PLACES or not self._movable()) and self._chosen():
                return

    def _thin(self, look: int, places: int) -> None:
        """Eliminate on confidence bounds (union over lanes, alpha spent over looks), then keep the best ``places``."""
        active = self._active()
        leader = fastest(active)
        best = self._best(incumbents=True)
        alpha = spend(ALPHA, look) / max(1, len(active))
        kept = self._group_leaders() | self._raw_leaders() if self.rounds < _GROUP_ROUNDS else set()
        for lane in active:
            rival = best if lane.incumbent else leader
            if rival is None or lane is rival or lane.id in kept:
                continue
            found = slower_than(*lane.paired(rival), alpha)
            lucky = self.moves < _PLACES and self._movable()
            if found is not None and (not lucky or found.center > 1.0 + _LUCK):
                text = f"{found.center:.3f}x the time of {rival.id} ({found.lo:.3f}..{found.hi:.3f})"
                lane.drop("eliminated", f"{text} after {self.rounds} rounds")
        rest = ranked([lane for lane in self._active() if not lane.incumbent])
        if self.moves < _PLACES and self._movable():
            places *= 2
        for place, lane in enumerate(rest[places:], start=places + 1):
            if lane.id not in kept:
                lane.drop("eliminated", f"in place {place} of {len(rest)} after {self.rounds} rounds, beyond {places}")

    def _group_leaders(self) -> set[str]:
        """The fastest challenger of each group."""
        challengers = ranked([lane for lane in self._active() if not lane.incumbent])
        fastest = {lane.group: lane.id for lane in reversed(challengers)}
        return set(fastest.values())

    def _raw_leaders(self) -> set[str]:
        """The fastest challenger and the fastest incumbent that take the weight as it lies: a raw weight is served by
        one of these two, whatever packed layouts gain. None where the incumbent is far ahead, or both far behind."""
        active = self._active()
        raw = [[lane for lane in active if lane.raw and lane.incumbent == side] for side in (False, True)]
        challenger, incumbent = fastest(raw[0]), fastest(raw[1])
        if challenger is None or incumbent is None:
            return set()
        slow = challenger.median > min(
            _RAW_BEHIND * incumbent.median, _RAW_WORTH * min(lane.median for lane in active)
        )  # fmt: skip
        return set() if slow else {challenger.id, incumbent.id}

    def _chosen(self) -> bool:
        """Whether no challenger can be much faster than the leader, nor any incumbent than the best of them."""
        for incumbents in (True, False):
            best = self._best(incumbents=incumbents)
            for lane in self._active():
                if best is not None and lane is not best and lane.incumbent == incumbents:
                    found = ratio_interval(*lane.paired(best), 0.1)
                    if found.lo < 1.0 - _ALIKE:
                        return False
        return True

    def _settled(self) -> bool:
        """One challenger and one incumbent at most: nothing left to choose."""
        active = self._active()
        incumbents = sum(lane.incumbent for lane in active)
        return incumbents <= 1 and len(active) - incumbents <= 1 and self.rounds >= max(_SCREEN_ROUNDS)

    def _even_out(self) -> None:
        """Let every lane make as many calls a timing as the one with most: the first call of a timing finds caches and
        threads as another kernel left them, and counts for more among few calls than among many."""
        lanes = self._active()
        most = max((lane.calls for lane in lanes), default=0)
        raise_calls(lanes, most, FLOOR_S)

    def _round(self) -> None:
        """Time every active lane once, in random order. One that raises is dropped, and the round done again."""
        while lanes := self._active():
            self.rng.shuffle(lanes)
            began = self.clock.now()
            try:
                times = self.clock.time_round([lane.guarded for lane in lanes], [lane.calls for lane in lanes])
            except EntrantError as error:
                error.lane.drop("failed", str(error))
                self._revive()
                continue
            self._each_s = (self.clock.now() - began) / len(lanes)
            for lane, seconds in zip(lanes, times, strict=True):
                lane.record(self.rounds, seconds, FLOOR_S)
            if self.rounds >= _SCREEN_ROUNDS[-1]:
                self._even_out()
            break
        self.rounds += 1

    def _revive(self) -> None:
        """After a failure: whoever was dropped for being slower may have been measured against what failed."""
        for lane in self.lanes:
            if lane.stage in ("screened", "eliminated"):
                lane.active, lane.stage, lane.reason = True, "finalist", ""

    def _active(self) -> list[Lane]:
        return [lane for lane in self.lanes if lane.active]

    def _spent(self) -> float:
        return self.clock.now() - self.start

    def _affordable(self) -> bool:
        """Whether one more round leaves the duel its share of the budget (the first round always may)."""
        cost = max(sum(lane.cost for lane in self._active()), self._each_s * len(self._active()))
        return self.rounds == 0 or self._spent() + cost <= self._limit() - self._duel_s()

    def _duel_s(self) -> float:
        """What the duel is left of the budget: its share, more where that is too few pairs to decide anything, and what
        the pairs before its first look take when leader and incumbent were so far apart at the last look that it will
        be decided there."""
        each_s, limit = max(self._each_s, self.clock.duel_s), self._limit()
        share = max(_DUEL_SHARE * limit, min(FIRST_SLOW_LOOK * 2.0 * each_s, _DUEL_MOST * limit))
        first = FIRST_SLOW_LOOK if 2.0 * each_s > SLOW_PAIR_S else self._min_duel
        pairs_s = _CLEAR_LOOKS * first * 2.0 * each_s + 2.0 * self._move_s
        return self._after_s() + (min(share, pairs_s) if self.clear else share)

    def _after_s(self) -> float:
        """Seconds that are left for what follows the duel."""
        share = (SURROUNDINGS_SHARE if self._surroundings else 0.0) + (_RAW_SHARE if self._raw_apart() else 0.0)
        return share * self.budget

    def _raw_apart(self) -> bool:
        """Whether the raw layout needs a duel of its own: another layout leads, on one side at least."""
        leaders = (self._best(incumbents=True), self._best(incumbents=False))
        raw = [lane for lane in self.lanes if lane.raw and lane.times and lane.stage != "failed"]
        both = {lane.incumbent for lane in raw} == {True, False}
        return both and any(lane is not None and not lane.raw for lane in leaders)

    def _look_ahead(self) -> None:
        """Whether the best of either side are far apart; by their single times, before there are rounds enough."""
        incumbent, leader = self._best(incumbents=True), self._best(incumbents=False)
        if incumbent is None or leader is None:
            return
        if self.rounds < min(_LOOKS):
            ratio = self._first_estimate_s(leader) / self._first_estimate_s(incumbent)
            self.clear = ratio < _CLEAR_AT_ONCE or ratio > 1.0 / _CLEAR_AT_ONCE
            return
        found = ratio_interval(*leader.paired(incumbent), 0.1)
        self.clear = found.hi < _CLEAR or found.lo > 1.0 / _CLEAR

    def _movable(self) -> bool:
        """Whether the operands can be put elsewhere, and that takes little of the time that is left."""
        left = self.start + self.budget - self.clock.now()
        return self._move is not None and self._move_s <= _MOVE_SHARE * left

    def move(self) -> bool:
        """Put the operands elsewhere, if that is worth it."""
        start = self.clock.now()
        if self._move is None or not self._movable():
            return False
        self._move()
        self._move_s, self.moves = self.clock.now() - start, self.moves + 1
        return True

    def _limit(self) -> float:
        """Seconds this race may take."""
        return self.budget * (1.0 + (EXTENSION if self.disturbed else 0.0))

    def _look_around(self) -> None:
        """Whether the machine is disturbed, as the incumbent's timings tell (they are the ones there are most of)."""
        reference = self._best(incumbents=True) or self._best(incumbents=False)
        if reference is not None and noise(list(reference.times.values())) > NOISE:
            self.disturbed = True

    def _weather(self) -> Weather:
        """What else went on since it was last asked for; that too can make the machine a disturbed one."""
        found = self.machine.weather() if self.machine is not None else Weather()
        self.disturbed = self.disturbed or found.load > _LOAD or found.stolen > _STOLEN
        self.contended = self.contended or found.contention
        if self.machine is not None:
            self.conditions.update(found.words())
        return found

    def _best(self, *, incumbents: bool) -> Lane | None:
        return fastest([lane for lane in self._active() if lane.incumbent == incumbents])

    def _report(self) -> None:
        incumbent, leader = self._best(incumbents=True), fastest(self._active())
        if self.progress is not None and leader is not None:
            ratio = by_ratio(leader, incumbent) if incumbent is not None else 1.0
            self.progress(BestSoFar(leader.id, leader.median, ratio))


def raise_calls(lanes: Sequence[Lane], calls: int, floor_s: float) -> None:
    """So many calls a timing, where that is more; of one far slower than the others, which cannot be mistaken for them,
    only as many as take twice the floor."""
    for lane in lanes:
        lane.calls = max(lane.calls, min(calls, round(2.0 * floor_s / max(lane.median, 1e-9))))


def noise(times: Sequence[float]) -> float:
    """Robust standard deviation, relative to the median."""
    return mad(times) / median(times) if times else 0.0
