"""The race: which entrant is fastest, and does it beat ATen beyond the noise, wherever it will be served?

Screening drops the hopeless, interleaved rounds with sequential elimination thin the field until nobody can be much
faster than the leader (elimination.py), and a paired duel on fresh timings decides between the leader and the fastest
incumbent. Only the duel can make a winner: the rounds before it chose the leader for its good times, so their times
flatter it. A winner must be no slower in any surrounding (surroundings.py); the next challenger has its turn where one
is. When a packed layout leads, the raw layout has a duel of its own: a weight that is not packed is served by what
beats ATen on the raw weight.

A disturbed machine (stalls, noise, others' load) lengthens a race that is undecided when its budget ends, to twice the
budget at most; a machine that changed its load or clock during the duel has it fought again. What a disturbed machine
leaves open is inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..core.decision import LayoutDecision, Outcome, Sample, Stage
from ..core.verdict import VerdictKind
from .clock import Clock
from .duel import Duel, duel
from .elimination import (
    EXTENSION,
    NOISE,
    STALLED,
    SURROUNDINGS_SHARE,
    Elimination,
    Entrant,
    Progress,
    RaceSetup,
    noise,
    raise_calls,
)
from .lane import EntrantError, Lane, by_ratio, fastest, sample
from .stats import drift
from .surroundings import OVERLAP, Comparison, compare

__all__ = ["Entrant", "RaceResult", "RaceSetup", "Standing", "race"]

_CHALLENGERS = 3  # that may be tried in the surroundings, one after the other
_BEHIND = 0.02  # a challenger further behind ATen than that in the rounds needs no duel of its layout
# An incumbent that takes so many times as long as before the race, and so much more, was disturbed.
_UNLIKELY, _UNLIKELY_S = 4.0, 20e-6


@dataclass(frozen=True, slots=True)
class Standing:
    """How far an entrant came, and why it stopped there. sample is None when it was never timed. fault: what one of
    stage ``failed`` did."""

    id: str
    stage: Stage
    reason: str
    sample: Sample | None
    fault: VerdictKind = "crashed"


@dataclass(frozen=True, slots=True)
class RaceResult:
    """outcome: ``winner`` (leader beat the fastest incumbent, in every surrounding), ``tie`` (leader is that
    incumbent), ``inconclusive`` (the same, on a machine too disturbed to tell) or ``none_valid``.

    standings: by entrant id. alternatives: the fastest entrant id per group ("" = None). stopped: why the race ended.
    conditions: what the machine did meanwhile, in words. layouts: duels by group.
    """

    outcome: Outcome
    leader: str | None
    incumbent: str | None
    standings: dict[str, Standing]
    alternatives: dict[str, str]
    stopped: str
    rounds: int
    seconds: float
    conditions: dict[str, str] = field(default_factory=dict)
    layouts: dict[str, LayoutDecision] = field(default_factory=dict)


def race(
    entrants: Sequence[Entrant],
    clock: Clock,
    budget_s: float,
    *,
    seed: int = 0,
    min_duel: int = 50,
    min_gain: float = 0.003,
    progress: Progress | None = None,
    setup: RaceSetup | None = None,
) -> RaceResult:
    """Race ``entrants`` for at most ``budget_s`` seconds of ``clock`` (kept within 10%, or one timing if that is more;
    a disturbed machine may double it).

    A winner's paired time ratio to the fastest incumbent is below ``1 - min_gain`` with 99.5% confidence; anything
    less is a tie. ``min_duel``: pairs before the first look, unless a pair takes longer than 10 ms. Without an
    incumbent the fastest wins unopposed. An entrant that raises, or that is faster than the machine can be, is out
    (stage ``failed``). Raises ValueError for a budget that is not positive or ids that repeat.
    """
    if not budget_s > 0.0:
        raise ValueError(f"budget_s must be positive; got {budget_s!r}")
    if len({e.id for e in entrants}) != len(entrants):
        raise ValueError("entrants must have distinct ids")
    return _Race(entrants, clock, budget_s, seed, progress, setup or RaceSetup(), min_duel, min_gain).run()


class _Race(Elimination):
    """One race's state; ``run`` is its pipeline."""

    def __init__(
        self, entrants: Sequence[Entrant], clock: Clock, budget_s: float, seed: int, progress: Progress | None,
        setup: RaceSetup, min_duel: int, min_gain: float,
    ) -> None:  # fmt: skip
        super().__init__(entrants, clock, budget_s, seed, progress, setup, min_duel)
        self._min_gain = min_gain
        self.layouts: dict[str, LayoutDecision] = {}

    def run(self) -> RaceResult:
        self.choose()
        before, fought_again, tried = self._weather(), False, 0
        while True:
            incumbent, challenger = self._best(incumbents=True), self._best(incumbents=False)
            if incumbent is None or challenger is None:
                return self._unopposed(challenger or incumbent, incumbent)
            self._even_out()
            found = self._duel(challenger, incumbent, self._deadline)
            if not (challenger.active and incumbent.active):
                self._revive()
                continue
            now = self._weather()
            changed = before.differs(now)
            if changed and not fought_again and self._spent() < (1.0 + EXTENSION / 2) * self.budget:
                before, fought_again = now, True
                self.conditions["fought again"] = changed
                continue
            disagreement = self._settle_layout(found, challenger, incumbent)
            if not (challenger.active and incumbent.active):
                self._revive()
                continue
            tried += 1
            if disagreement and tried < _CHALLENGERS and self._spent() < self._limit():
                challenger.drop("eliminated", disagreement)
                self.stopped = disagreement
                continue
            return self._decided(found, challenger, incumbent, disagreement)

    # --- duels and surroundings ---

    def _duel(self, challenger: Lane, incumbent: Lane, deadline: Callable[[Duel], float]) -> Duel:
        """A duel's timings may be longer than those that chose who fights it, and make as many calls of both."""
        fighters = [challenger, incumbent]
        fastest_s = max(min(lane.median for lane in fighters), 1e-9)
        raise_calls(fighters, math.ceil(self.clock.duel_s / fastest_s), self.clock.duel_s)
        return duel(
            challenger, incumbent, self.clock, deadline, self.rng, self.move,
            min_pairs=self._min_duel, gain=self._min_gain,
        )  # fmt: skip

    def _deadline(self, found: Duel) -> float:
        """When the duel must end, by the clock; later once it shows that the machine is disturbed."""
        if found.stalled > STALLED or (len(found.incumbent) >= 8 and noise(found.incumbent) > NOISE):
            self.disturbed = True
        return self.start + self._limit() - self._after_s()

    def _settle_layout(self, found: Duel, challenger: Lane, incumbent: Lane) -> str:
        """Record the duel as its layout's, with the surroundings when it was won. Returns the surrounding that
        disagrees, in words; empty where none does."""
        if found.interval is None:
            return ""
        ratios, overlap, disagreement = self._surround(challenger, incumbent) if found.won else ({}, True, "")
        won = found.won and not disagreement
        if challenger.raw and not incumbent.raw and not won:
            return disagreement  # the raw layout's baseline is another one
        self.layouts[challenger.group or ""] = LayoutDecision(
            "winner" if won else "tie", challenger.id, incumbent.id,
            found.interval.center, found.interval.lo, found.interval.hi, ratios, overlap,
        )  # fmt: skip
        return disagreement

    def _surround(self, challenger: Lane, incumbent: Lane) -> tuple[dict[str, float], bool, str]:
        """(median ratio by surrounding, whether overlapping pays, the first surrounding that disagrees in words).

        One variant of the challenger serves in all of them: the one whose worst ratio is the best.
        """
        found: dict[str, dict[str, Comparison]] = {}
        share = SURROUNDINGS_SHARE * self.budget / max(1, len(self._surroundings))
        for surrounding in self._surroundings:
            until = self.clock.now() + share
            try:
                compared = compare(surrounding, challenger, incumbent, self.clock, self.rng, until)
            except EntrantError as error:
                error.lane.drop("failed", f"{error} {surrounding.name}")
                return {}, True, ""
            if compared:
                found[surrounding.name] = compared
            if compared and all(item.disagrees for item in compared.values()):
                break
        variant = self._best_variant(found)
        chosen = {name: item.get(variant, item[""]) for name, item in found.items()}
        text = next((f"{item.ratio:.3f}x the time of {incumbent.id} {name}, where it was faster in the duel"
                     for name, item in chosen.items() if item.disagrees), "")  # fmt: skip
        return {name: round(item.ratio, 4) for name, item in chosen.items()}, variant == OVERLAP, text

    def _best_variant(self, found: Mapping[str, Mapping[str, Comparison]]) -> str:
        """The variant with the lowest of the worst ratios, among the surroundings that know several."""
        several = [item for item in found.values() if len(item) > 1]
        names = {name for item in several for name in item} or {OVERLAP}
        return min(sorted(names), key=lambda name: max((item[name].ratio for item in several), default=0.0))

    def _duel_raw(self) -> None:
        """The raw layout's own duel, where other layouts have fought the main one. The outcome is in ``layouts``."""
        raw = [lane for lane in self.lanes if lane.raw and lane.times and lane.stage != "failed"]
        incumbent = fastest([lane for lane in raw if lane.incumbent])
        challengers = [lane for lane in raw if not lane.incumbent]
        if "" in self.layouts or incumbent is None or not challengers:
            return
        challenger = min(challengers, key=lambda lane: by_ratio(lane, incumbent))
        if by_ratio(challenger, incumbent) > 1.0 + _BEHIND:
            return
        left = self.start + self._limit() - self.clock.now()
        until = self.clock.now() + max(left, 0.05 * self.budget)
        stages = [(lane, lane.active, lane.stage, lane.reason) for lane in (challenger, incumbent)]
        found = self._duel(challenger, incumbent, lambda _: until)
        if not any(lane.stage == "failed" for lane in (challenger, incumbent)):
            self._settle_layout(found, challenger, incumbent)
        for lane, active, stage, reason in stages:
            if lane.stage != "failed":
                lane.active, lane.stage, lane.reason = active, stage, reason

    # --- results ---

    def _unopposed(self, leader: Lane | None, incumbent: Lane | None) -> RaceResult:
        if leader is None:
            return self._result("none_valid", None, None, "no entrant could be timed")
        if leader is incumbent:
            self._duel_raw()
            outcome, reason = self._tie(None)
            return self._result(outcome, leader, incumbent, reason or self.stopped or "no challenger is left")
        return self._result("winner", leader, None, "there is no incumbent to beat")

    def _decided(self, found: Duel, challenger: Lane, incumbent: Lane, disagreement: str) -> RaceResult:
        for lane, times in ((challenger, found.challenger), (incumbent, found.incumbent)):
            lane.duel, lane.rival = times, found.incumbent
        if found.stalled:
            self.conditions["stalled"] = f"{found.stalled:.0%} of the pairs, set aside"
        unlikely = self._unlikely(incumbent)
        won = found.won and not disagreement and not unlikely
        for lane in self._active():
            fought = lane in (challenger, incumbent)
            lane.reason = found.reason if fought else "among the fastest; not chosen for the duel"
        self._duel_raw()
        if won:
            return self._result("winner", challenger, incumbent, found.reason)
        outcome, reason = self._tie(found)
        if unlikely:
            outcome, reason = "inconclusive", unlikely
        words = disagreement or found.reason
        return self._result(outcome, incumbent, incumbent, f"{words}; {reason}" if reason else words)

    def _tie(self, found: Duel | None) -> tuple[Outcome, str]:
        """Whether a race that nobody won is a tie, or inconclusive, and why in words.

        A race of the best two is not all: on a machine that others use, the search before it may have missed the best
        candidate, and kernels that wait for their threads all take as long.
        """
        if self.contended:
            return "inconclusive", "others kept the cores busy that the kernels' threads need"
        if self.disturbed and found is not None and (found.may_hide_a_gain or (found.unclear and not found.decided)):
            return "inconclusive", "the machine was too disturbed to decide"
        return "tie", ""

    def _unlikely(self, incumbent: Lane) -> str:
        """Why the incumbent's times are not believed, or empty: they are far above what it took before the race."""
        earlier_s, now_s = self._earlier_s.get(incumbent.id), incumbent.median
        if earlier_s is None or now_s <= _UNLIKELY * earlier_s + _UNLIKELY_S:
            return ""
        return (
            f"{incumbent.id} took {1e6 * now_s:.3g} us a call in the race and {1e6 * earlier_s:.3g} us before it: "
            "the machine was disturbed"
        )

    def _result(self, outcome: Outcome, leader: Lane | None, incumbent: Lane | None, stopped: str) -> RaceResult:
        conditions = self._conditions(incumbent or leader)
        standings: dict[str, Standing] = {}
        for lane in self.lanes:
            stage: Stage = "winner" if lane is leader and outcome == "winner" else lane.stage
            words = conditions | self.clock.conditions(lane.guarded, lane.active)
            standings[lane.id] = Standing(lane.id, stage, lane.reason, sample(lane, incumbent, words), lane.fault)
        groups: dict[str, Lane] = {}
        timed = [lane for lane in self.lanes if lane.times and lane.stage != "failed"]
        for lane in sorted(timed, key=lambda lane: by_ratio(lane, incumbent) if incumbent else lane.median):
            groups.setdefault(lane.group or "", lane)
        if leader is not None:
            groups[leader.group or ""] = leader
        return RaceResult(
            outcome,
            leader.id if leader else None,
            incumbent.id if incumbent else None,
            standings,
            {group: lane.id for group, lane in groups.items()},
            stopped,
            self.rounds,
            self._spent(),
            conditions,
            self.layouts,
        )

    def _conditions(self, reference: Lane | None) -> dict[str, str]:
        found = dict(self.conditions)
        # In a duel fewer lanes come between two calls than in the rounds before: only like is compared with like.
        if reference is not None and (moved := drift(reference.duel or list(reference.times.values()))):
            found["drift"] = f"{moved:+.1%}"
        if (extra := self._spent() - self.budget) > 0.1 * self.budget and self.disturbed:
            found["extended"] = f"by {extra:.1f} s: the machine was disturbed"
        return found
