"""The race: it finds the fastest candidate, and whether it beats ATen beyond the noise in every surrounding it serves
in.

The *baselines* of a race are ATen's candidates; all other entrants are *challengers*. Screening drops the entrants that
are far behind. Interleaved rounds with sequential elimination then reduce the rest until nobody can be much faster than
the leader (elimination.py). A paired test on fresh timings (paired_test.py) decides between the leading challenger and
the fastest baseline. Only the paired test can make a winner: the rounds before it chose the leader for its good times,
so their times flatter it. A winner must be no slower in any surrounding (surroundings.py); where it is slower, the next
challenger is tested. A challenger that is about as fast as ATen in the paired test wins if it is clearly faster in
every surrounding with other work: ATen's kernels may overlap with themselves when they are timed back to back, which
they cannot do in a model. When a packed layout leads, the raw layout has a paired test of its own, because an unpacked
weight is served by the kernel that beats ATen on the raw weight.

A disturbed machine (stalls, noise, others' load) lengthens a race that is undecided when its budget ends, to twice the
budget at most. When the machine's load or clock changed during the paired test, the test is repeated. A question that a
disturbed machine leaves open is inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ..core.decision import BACK_TO_BACK, Evidence, LayoutDecision, Outcome, Stage, Verdict
from .clock import Clock
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
from .outcome import RaceResult
from .paired_test import PairedTest, paired_test
from .race_entry import EntrantError, RaceEntry, fastest, ratio_to_baseline, sample
from .screening import SHORT_S
from .stats import drift
from .surroundings import OVERLAP, SLOWER, Comparison, compare

__all__ = ["Entrant", "RaceResult", "RaceSetup", "race"]

_MAX_CHALLENGERS = 3  # challengers that may be compared in the surroundings, one after the other
# A raw challenger further behind ATen than this share in the rounds has no paired test of its layout.
_MAX_RAW_DEFICIT = 0.02
# A baseline that takes this multiple of its time before the race, and this many seconds more, was disturbed.
_IMPLAUSIBLE, _IMPLAUSIBLE_S = 4.0, 20e-6


def race(
    entrants: Sequence[Entrant],
    clock: Clock,
    budget_s: float,
    *,
    seed: int = 0,
    min_pairs: int = 50,
    min_gain: float = 0.003,
    progress: Progress | None = None,
    setup: RaceSetup | None = None,
) -> RaceResult:
    """Race ``entrants`` for at most ``budget_s`` seconds of ``clock`` and return the RaceResult.

    The budget is kept within 10%, or one timing if that is more; a disturbed machine may double it. A winner's paired
    time ratio to the fastest baseline is below ``1 - min_gain`` with 99.5% confidence, or it is at most 1.015 and below
    0.98 among other work; anything less is a tie.
    ``min_pairs``: pairs before the first look, unless a pair takes longer than 10 ms. Without a baseline the fastest
    entrant wins unopposed. An entrant that raises, or that is faster than the machine can be, is out (stage
    ``failed``). Raises ValueError for a budget that is not positive or ids that repeat.
    """
    if not budget_s > 0.0:
        raise ValueError(f"budget_s must be positive; got {budget_s!r}")
    if len({e.id for e in entrants}) != len(entrants):
        raise ValueError("entrants must have distinct ids")
    return _Race(entrants, clock, budget_s, seed, progress, setup or RaceSetup(), min_pairs, min_gain).run()


class _Race(Elimination):
    """The state of one race; ``run`` is its pipeline."""

    def __init__(
        self, entrants: Sequence[Entrant], clock: Clock, budget_s: float, seed: int, progress: Progress | None,
        setup: RaceSetup, min_pairs: int, min_gain: float,
    ) -> None:  # fmt: skip
        super().__init__(entrants, clock, budget_s, seed, progress, setup, min_pairs)
        self._min_gain = min_gain
        self.layouts: dict[str, LayoutDecision] = {}

    def run(self) -> RaceResult:
        self.choose()
        state_before, test_repeated, tried = self._machine_state(), False, 0
        while True:
            baseline, challenger = self._fastest_active(baselines=True), self._fastest_active(baselines=False)
            if baseline is None or challenger is None:
                return self._unopposed(challenger or baseline, baseline)
            self._equalize_calls()
            test = self._run_test(challenger, baseline, self._test_deadline)
            if not (challenger.active and baseline.active):
                self._restore_dropped()
                continue
            state_now = self._machine_state()
            changed = state_before.differs(state_now)
            if changed and not test_repeated and self._elapsed_s() < (1.0 + EXTENSION / 2) * self.budget:
                state_before, test_repeated = state_now, True
                self.conditions["repeated"] = changed
                continue
            won, disagreement = self._record_layout(test, challenger, baseline)
            if not (challenger.active and baseline.active):
                self._restore_dropped()
                continue
            tried += 1
            if disagreement and tried < _MAX_CHALLENGERS and self._elapsed_s() < self._limit_s():
                challenger.drop("eliminated", disagreement)
                self.stopped = disagreement
                continue
            return self._decided(test, challenger, baseline, won, disagreement)

    # --- paired tests and surroundings ---

    def _run_test(
        self, challenger: RaceEntry, baseline: RaceEntry, deadline: Callable[[PairedTest], float]
    ) -> PairedTest:
        """Return the paired test of two entries, timed with equally many calls.

        Its timings may be longer than those of the rounds that chose the two entries.
        """
        entries = [challenger, baseline]
        fastest_s = max(min(entry.median for entry in entries), 1e-9)
        raise_calls(entries, math.ceil(self.clock.paired_timing_s / fastest_s), self.clock.paired_timing_s)
        return paired_test(
            challenger, baseline, self.clock, deadline, self.rng, self.move,
            min_pairs=self._min_pairs, gain=self._min_gain, far_apart=self._are_far_apart(challenger, baseline),
        )  # fmt: skip

    def _test_deadline(self, test: PairedTest) -> float:
        """Return the time of the clock at which the paired test must end; later once the test shows that the machine is
        disturbed."""
        if test.stalled > STALLED or (len(test.baseline) >= 8 and noise(test.baseline) > NOISE):
            self.disturbed = True
        return self.start + self._limit_s() - self._reserved_after_test_s()

    def _record_layout(self, test: PairedTest, challenger: RaceEntry, baseline: RaceEntry) -> tuple[bool, str]:
        """Record the paired test for its layout, with the comparisons in the surroundings unless the challenger lost.

        Returns whether the challenger wins, and the surrounding that disagrees with a paired test that it won, in
        words; empty where none does.
        """
        if test.interval is None:
            return False, ""
        compared: dict[str, Comparison] = {}
        overlap, disagreement, won = True, "", test.won
        if test.won:
            compared, overlap = self._compare_in_surroundings(challenger, baseline, lambda item: not item.disagrees)
            disagreement = _disagreement(compared, baseline)
            won = not disagreement
        elif test.decided and test.interval.hi <= 1.0 + SLOWER and self._surroundings:
            compared, overlap = self._compare_in_surroundings(challenger, baseline, lambda item: item.is_faster)
            won = self._wins_among_other_work(compared)
        if challenger.raw and not baseline.raw and not won:
            return False, disagreement  # the raw layout has another baseline
        ratios = {name: round(item.ratio, 4) for name, item in compared.items()}
        round_ratio = ratio_to_baseline(challenger, baseline)
        self.layouts[challenger.packing or ""] = LayoutDecision(
            "winner" if won else "tie", challenger.id, baseline.id,
            test.interval.center, test.interval.lo, test.interval.hi, ratios, overlap,
            round_ratio if math.isfinite(round_ratio) else None,
        )  # fmt: skip
        if won and not test.won:
            test.reason += f", and {self.layouts[challenger.packing or ''].worst_ratio:.3f}x at most among other work"
        return won, disagreement

    def _wins_among_other_work(self, compared: Mapping[str, Comparison]) -> bool:
        """Whether a challenger is clearly faster in every surrounding with other work, and not slower back to back."""
        names = {surrounding.name for surrounding in self._surroundings}
        among_work = names - {BACK_TO_BACK}
        return (
            bool(among_work)
            and names == compared.keys()
            and all(compared[name].is_faster for name in among_work)
            and not any(item.ratio > 1.0 + SLOWER for item in compared.values())
        )

    def _compare_in_surroundings(
        self, challenger: RaceEntry, baseline: RaceEntry, is_enough: Callable[[Comparison], bool]
    ) -> tuple[dict[str, Comparison], bool]:
        """Return (the comparison by surrounding, whether overlapping pays).

        One variant of the challenger serves in all surroundings: the one whose worst ratio is the best. is_enough:
        whether a comparison leaves the challenger a chance; the comparisons end with the first surrounding in which no
        variant has one.
        """
        comparisons: dict[str, dict[str, Comparison]] = {}
        share_s = SURROUNDINGS_SHARE * self.budget / max(1, len(self._surroundings))
        for surrounding in self._surroundings:
            deadline = self.clock.now() + share_s
            try:
                by_variant = compare(surrounding, challenger, baseline, self.clock, self.rng, deadline)
            except EntrantError as error:
                error.entry.drop("failed", f"{error} {surrounding.name}")
                return {}, True
            if by_variant:
                comparisons[surrounding.name] = by_variant
            if by_variant and not any(map(is_enough, by_variant.values())):
                break
        variant = self._best_variant(comparisons)
        return {name: item.get(variant, item[""]) for name, item in comparisons.items()}, variant == OVERLAP

    def _best_variant(self, comparisons: Mapping[str, Mapping[str, Comparison]]) -> str:
        """Return the variant whose worst ratio is the lowest, among the surroundings that were timed with several
        variants."""
        with_variants = [item for item in comparisons.values() if len(item) > 1]
        names = {name for item in with_variants for name in item} or {OVERLAP}
        return min(sorted(names), key=lambda name: max((item[name].ratio for item in with_variants), default=0.0))

    def _test_raw_layout(self) -> None:
        """Run a paired test for the raw layout, where the main test compared other layouts. The result is in
        ``layouts``."""
        raw = [entry for entry in self.entries if entry.raw and entry.times and entry.stage != "failed"]
        baseline = fastest([entry for entry in raw if entry.is_baseline])
        challengers = [entry for entry in raw if not entry.is_baseline]
        if "" in self.layouts or baseline is None or not challengers:
            return
        challenger = min(challengers, key=lambda entry: ratio_to_baseline(entry, baseline))
        if ratio_to_baseline(challenger, baseline) > 1.0 + _MAX_RAW_DEFICIT:
            return
        remaining_s = self.start + self._limit_s() - self.clock.now()
        deadline = self.clock.now() + max(remaining_s, 0.05 * self.budget)
        saved = [(entry, entry.active, entry.stage, entry.reason) for entry in (challenger, baseline)]
        test = self._run_test(challenger, baseline, lambda _: deadline)
        if not any(entry.stage == "failed" for entry in (challenger, baseline)):
            self._record_layout(test, challenger, baseline)
        for entry, active, stage, reason in saved:
            if entry.stage != "failed":
                entry.active, entry.stage, entry.reason = active, stage, reason

    # --- results ---

    def _unopposed(self, leader: RaceEntry | None, baseline: RaceEntry | None) -> RaceResult:
        if leader is None:
            return self._result("none_valid", None, None, "no entrant could be timed")
        if leader is baseline:
            self._test_raw_layout()
            outcome, reason = self._tie(None)
            return self._result(outcome, leader, baseline, reason or self.stopped or "no challenger is left")
        return self._result("winner", leader, None, "there is no baseline to beat")

    def _decided(
        self, test: PairedTest, challenger: RaceEntry, baseline: RaceEntry, won: bool, disagreement: str
    ) -> RaceResult:
        for entry, times in ((challenger, test.challenger), (baseline, test.baseline)):
            entry.test_times, entry.baseline_test_times = times, test.baseline
        if test.stalled:
            self.conditions["stalled"] = f"{test.stalled:.0%} of the pairs, set aside"
        implausible = self._implausible_baseline(baseline)
        won = won and not implausible
        for entry in self._active():
            was_tested = entry in (challenger, baseline)
            entry.reason = test.reason if was_tested else "among the fastest; not chosen for the paired test"
        self._test_raw_layout()
        if won:
            return self._result("winner", challenger, baseline, test.reason)
        outcome, reason = self._tie(test)
        if implausible:
            outcome, reason = "inconclusive", implausible
        words = disagreement or test.reason
        return self._result(outcome, baseline, baseline, f"{words}; {reason}" if reason else words)

    def _tie(self, test: PairedTest | None) -> tuple[Outcome, str]:
        """Return whether a race without a winner is a tie or inconclusive, and why in words.

        A race of the best two is not enough evidence: on a machine that others use, the search before it may have
        missed the best candidate, and kernels that wait for their threads all take equally long.
        """
        if self.contended:
            return "inconclusive", "others kept the cores busy that the kernels' threads need"
        if self.disturbed and test is not None and (test.may_hide_a_gain or (test.unclear and not test.decided)):
            return "inconclusive", "the machine was too disturbed to decide"
        return "tie", ""

    def _implausible_baseline(self, baseline: RaceEntry) -> str:
        """Return why the baseline's times are not believed, being far above its times before the race; empty when they
        are."""
        earlier_s, now_s = self._earlier_s.get(baseline.id), baseline.median
        if earlier_s is None:
            return ""
        cold_s = self._cold_s if earlier_s < SHORT_S else 0.0
        if now_s <= _IMPLAUSIBLE * earlier_s + _IMPLAUSIBLE_S + cold_s:
            return ""
        return (
            f"{baseline.id} took {1e6 * now_s:.3g} us a call in the race and {1e6 * earlier_s:.3g} us before it: "
            "the machine was disturbed"
        )

    def _result(
        self, outcome: Outcome, leader: RaceEntry | None, baseline: RaceEntry | None, stopped: str
    ) -> RaceResult:
        conditions = self._conditions(baseline or leader)
        evidence: dict[str, Evidence] = {}
        for entry in self.entries:
            stage: Stage = "winner" if entry is leader and outcome == "winner" else entry.stage
            entry_conditions = conditions | self.clock.conditions(entry.guarded, entry.active)
            verdict = Verdict(entry.fault, entry.reason) if stage == "failed" else None
            evidence[entry.id] = Evidence(
                dict(entry.candidate), entry.id, stage, entry.packing, entry.reason, verdict,
                sample(entry, baseline, entry_conditions),
            )  # fmt: skip
        fastest_by_packing: dict[str, RaceEntry] = {}
        timed = [entry for entry in self.entries if entry.times and entry.stage != "failed"]
        for entry in sorted(timed, key=lambda entry: ratio_to_baseline(entry, baseline) if baseline else entry.median):
            fastest_by_packing.setdefault(entry.packing or "", entry)
        if leader is not None:
            fastest_by_packing[leader.packing or ""] = leader
        return RaceResult(
            outcome,
            leader.id if leader else None,
            baseline.id if baseline else None,
            stopped,
            evidence,
            {packing: entry.id for packing, entry in fastest_by_packing.items()},
            self.layouts,
            self.rounds,
            self._elapsed_s(),
            conditions,
        )

    def _conditions(self, reference: RaceEntry | None) -> dict[str, str]:
        conditions = dict(self.conditions)
        # In a paired test fewer entries run between two calls than in the rounds before: drift compares times of one
        # kind only.
        if reference is not None and (moved := drift(reference.test_times or list(reference.times.values()))):
            conditions["drift"] = f"{moved:+.1%}"
        if (extra := self._elapsed_s() - self.budget) > 0.1 * self.budget and self.disturbed:
            conditions["extended"] = f"by {extra:.1f} s: the machine was disturbed"
        return conditions


def _disagreement(compared: Mapping[str, Comparison], baseline: RaceEntry) -> str:
    """Return the first surrounding in which a challenger is slower, in words; empty where none is."""
    disagreements = (
        f"{item.ratio:.3f}x the time of {baseline.id} {name}, where it was faster in the paired test"
        for name, item in compared.items()
        if item.disagrees
    )
    return next(disagreements, "")
