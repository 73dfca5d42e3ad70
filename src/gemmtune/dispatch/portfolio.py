"""From Decisions to a Plan: the choice of one layout for a weight, and of the fastest kernel in it at each tuned M."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..backends.aten import is_fallback
from ..backends.aten.fusion import addmm_prefix
from ..core.candidate import Candidate
from ..core.problem import Problem
from ..core.verdict import FAULTS
from .plan import Interval, Plan, PlanEntry

if TYPE_CHECKING:
    from ..core.decision import Decision, Evidence, LayoutDecision, Sample
    from ..core.tuned_plan import TunedPlan

# A packed layout must have at most this share of the raw weight's total time to be worth a second form of the weight.
WORTHWHILE = 0.99
# Layouts whose total times are within this factor are alike: which of them is ahead changes from tuning to tuning.
ALIKE = 1.01
# Seconds that serving a kernel costs the host beyond calling the plain op: gemmtune allocates the output and checks the
# arguments in Python (benchmarks/overhead.py: 1 to 2 us). A race times kernels alone, so that a kernel of microseconds
# must win this back.
SERVING_S = 2e-6

# The factor on screening times of candidates that were not raced: their operands may have been in the cache, which no
# flush empties where it has 480 MB.
UNRACED = 1.3


class Option(NamedTuple):
    """An eligible candidate at one M.

    seconds: per call, as served. ratio_hi: upper bound of its time over that of ATen's best. won: whether it won the
    paired test of its layout; None where the layout had none. overlap: as ``Kernel.overlap``.
    """

    candidate: Candidate
    seconds: float
    ratio_hi: float
    won: bool | None = None
    overlap: bool = True

    @property
    def beats_aten(self) -> bool:
        """Whether it serves rather than the plain op: it is ATen's own, or it is faster beyond the noise."""
        if self.candidate.backend == "aten" or self.won is None:
            return self.candidate.backend == "aten" or self.ratio_hi < 1.0
        return self.won


class TunedPoint(NamedTuple):
    """The part of one Decision that dispatch reads.

    options: the fastest eligible option by layout (None: the raw weight). plain_s: seconds of the plain op on the raw
    weight (infinite when it was not timed). faulty: ids of candidates that were wrong, unstable, crashed or hung.
    """

    problem: Problem
    outcome: str
    options: Mapping[str | None, Option]
    plain_s: float
    faulty: frozenset[str] = frozenset()

    @property
    def m(self) -> int:
        return self.problem.m


def tuned_point(decision: Decision) -> TunedPoint:
    """Return the TunedPoint of a Decision. Raises KeyError, TypeError or ValueError when the record is malformed."""
    problem = Problem.from_dict(decision.problem)
    by_id = {row.id: row for row in decision.evidence}
    base = _baseline_seconds(decision.evidence)
    options: dict[str | None, Option] = {}
    for candidate_id in (*decision.alternatives.values(), decision.chosen):
        row = by_id.get(candidate_id or "")
        option = None if row is None else _option(row, base, problem)
        if row is not None and option is not None:
            fastest = options.get(row.packing)
            if fastest is None or option.seconds < fastest.seconds:
                options[row.packing] = option
    factor = _serving_factor(decision)
    options = {
        packing: option if option.candidate.backend == "aten" else option._replace(seconds=factor * option.seconds)
        for packing, option in options.items()
    }
    for packing, layout in decision.layouts.items():
        options[packing or None] = _tested(layout, by_id, options.get(packing or None), base, problem)
    raw_aten = [
        _seconds(row.sample, base)
        for row in decision.evidence
        if row.sample is not None and _eligible(row) and _runs_as_pytorch(row, problem)
    ]
    faulty = frozenset(row.id for row in decision.evidence if row.verdict is not None and row.verdict.kind in FAULTS)
    return TunedPoint(problem, decision.outcome, options, min(raw_aten, default=float("inf")), faulty)


def _serving_factor(decision: Decision) -> float:
    """Return the winner's worst ratio to its baseline over their ratio in the rounds of the race; 1.0 without a winner.

    By this factor, kernels of layouts that had no paired test are assumed to take longer than in the rounds, as the
    winner does. Otherwise a layout that was 7% slower in every round would serve (int8 weights 3072x2048, one row, an
    EPYC: the winner had 0.387 of the baseline's time in the paired test, 0.409 among other work, and the layout that
    served 0.355 in the rounds).
    """
    won = (layout for layout in decision.layouts.values() if layout.candidate == decision.chosen)
    winner = next((layout for layout in won if layout.outcome == "winner"), None)
    if winner is None or winner.round_ratio is None or not 0.0 < winner.round_ratio < math.inf:
        return 1.0
    return winner.worst_ratio / winner.round_ratio


def without_faulty(p: TunedPoint, faulty: Collection[str]) -> TunedPoint:
    """Return the point without the options whose candidates are ``faulty`` at another M of its Plan."""
    options = {packing: option for packing, option in p.options.items() if option.candidate.id not in faulty}
    return p if len(options) == len(p.options) else p._replace(options=options)


def without_raw(p: TunedPoint) -> TunedPoint:
    """Return the point without its option on the raw weight, which the plain op serves."""
    return p._replace(options={packing: option for packing, option in p.options.items() if packing is not None})


def _tested(
    layout: LayoutDecision, by_id: Mapping[str, Evidence], raced: Option | None, base: float | None, problem: Problem
) -> Option:
    """Return the option of a layout that had a paired test. Its time is the baseline's times the worst ratio of all
    surroundings.

    A layout whose candidate did not win is served by ``raced``, the candidate that was raced fastest in it. On the raw
    weight that is the baseline if it is not what plain PyTorch runs, which may be slower than both.
    """
    row, baseline = by_id[layout.candidate], by_id[layout.baseline]
    own = _option(row, base, problem)
    if own is None or baseline.sample is None:
        raise ValueError(f"{layout.candidate!r} has a paired test and no sample")
    seconds = layout.worst_ratio * _seconds(baseline.sample, base)
    extra = own.seconds - _seconds(row.sample, base) if row.sample is not None else 0.0
    tested = Option(own.candidate, seconds + extra, layout.ratio_hi, layout.outcome == "winner", layout.overlap)
    if tested.won:
        return tested
    if raced is not None and raced.candidate.backend == "aten":
        return raced
    serves_baseline = row.packing is None and baseline.packing is None and not _runs_as_pytorch(baseline, problem)
    instead = _option(baseline, base, problem) if serves_baseline else None
    if instead is not None:
        return instead
    return tested if raced is None or raced.candidate == own.candidate else raced._replace(won=False)


def _eligible(row: Evidence) -> bool:
    return row.verdict is not None and row.verdict.ok


def _option(row: Evidence, base: float | None, problem: Problem) -> Option | None:
    if not _eligible(row) or row.sample is None:
        return None
    candidate = Candidate.from_dict(row.candidate)
    # Kernels timed in a CUDA graph are to serve in graphs, which replay without Python.
    graph = row.sample.conditions.get("timed") == "graph"
    extra = 0.0 if graph or _runs_as_pytorch(row, problem) else SERVING_S
    unsure = UNRACED if row.stage == "screened" else 1.0
    return Option(candidate, unsure * _seconds(row.sample, base) + extra, row.sample.ratio_hi)


def is_fallback_template(candidate: Mapping[str, Any], problem: Problem) -> bool:
    """Whether a candidate (``Candidate.to_dict()``) is ATen's and runs what plain PyTorch runs on the raw weight of a
    Problem."""
    return candidate.get("backend") == "aten" and is_fallback(str(candidate.get("template")), problem)


def _runs_as_pytorch(row: Evidence, problem: Problem) -> bool:
    """Whether a candidate takes the raw weight, and runs what plain PyTorch runs on it."""
    return row.packing is None and is_fallback_template(row.candidate, problem)


def _baseline_seconds(evidence: Iterable[Evidence]) -> float | None:
    """Return the median time of the ATen candidate that the ratios are relative to: the one with the most rounds."""
    samples = [row.sample for row in evidence if row.candidate.get("backend") == "aten" and row.sample is not None]
    own = [sample for sample in samples if sample.ratio == sample.ratio_lo == sample.ratio_hi == 1.0]
    return max(own, key=lambda sample: sample.rounds).median_s if own else None


def _seconds(sample: Sample, base: float | None) -> float:
    """Return the seconds of a call by its paired ratio: candidates left the race at different rounds, and the machine
    was in different states then."""
    return sample.median_s if base is None else sample.ratio * base


def choose_packing(
    decisions: Iterable[Decision | TunedPoint], weights: Mapping[int, float] | None = None
) -> str | None:
    """Return the layout with the least total time over the tuned M; None for the raw weight.

    weights: calls for each M. Without them every M counts alike: its times are divided by the best one there, since
    otherwise the largest M would decide alone. Where a layout has no kernel at an M, the time is an upper bound of what
    the Plan's kernel for another M takes there. A packed layout must beat the raw weight's total by 1%.
    """
    return next(iter(rank_packings(decisions, weights)), None)


def rank_packings(
    decisions: Iterable[Decision | TunedPoint], weights: Mapping[int, float] | None = None, *, raw_kernels: bool = True
) -> list[str | None]:
    """Return every layout that beats the raw weight, the best first; the raw weight (None) ends the list.

    Layouts within 1% of the best are sorted by name, descending, so that another tuning of the same weight chooses the
    same layout. raw_kernels: whether kernels would serve the raw weight; otherwise the plain op's time counts for it.
    """
    points = [item if isinstance(item, TunedPoint) else tuned_point(item) for item in decisions]
    if not points:
        return [None]
    if not raw_kernels:
        points = [without_raw(p) for p in points]
    share = shares_of_calls(points, weights)
    raw = sum(share[p.m] * raw_seconds(p) for p in points)
    totals = total_seconds(points, share)
    worth = sorted((total, layout) for layout, total in totals.items() if total < WORTHWHILE * raw)
    alike = sorted((layout for total, layout in worth if total <= ALIKE * worth[0][0]), reverse=True)
    return [*alike, *(layout for _, layout in worth[len(alike) :]), None]


def shares_of_calls(points: Sequence[TunedPoint], weights: Mapping[int, float] | None) -> dict[int, float]:
    """Return by how much a second counts at each tuned M. weights: as for ``choose_packing``."""
    return {p.m: weights.get(p.m, 1.0) if weights else 1.0 / _unit_seconds(p) for p in points}


def layouts_in_use(points: Sequence[TunedPoint]) -> list[str]:
    """Return every layout that has a kernel at one M or more, the one with the least total time first.

    Layouts that are slower than the raw weight are among them, unlike in ``rank_packings``: they may win enough at an M
    that is not tuned yet.
    """
    totals = total_seconds(points, {p.m: 1.0 / _unit_seconds(p) for p in points})
    return sorted(totals, key=lambda layout: (totals[layout], layout))


def total_seconds(points: Sequence[TunedPoint], share: Mapping[int, float]) -> dict[str, float]:
    """Return the total time of each packed layout: the sum over the points of share times seconds."""
    totals: dict[str, float] = {}
    for layout in {name for p in points for name in p.options if name is not None}:
        own = {p.m: _ranked_seconds(p, p.options[layout]) for p in points if layout in p.options}
        totals[layout] = sum(share[p.m] * at_most(own, p.m) for p in points)
    return totals


def _ranked_seconds(p: TunedPoint, option: Option) -> float:
    """Return the seconds by which an option of a packed layout is ranked. For a kernel that does not beat ATen beyond
    the noise, they are the plain op's if those are more: otherwise its layout could be ranked before the ATen layout
    that it ties with, and graphs, which such a kernel does not serve, would have the plain op."""
    if option.beats_aten or not math.isfinite(p.plain_s):
        return option.seconds
    return max(option.seconds, p.plain_s)


def at_most(own: Mapping[int, float], m: int) -> float:
    """Return an upper bound of the seconds at M from a layout's times at tuned M: fewer rows take no longer, and more
    rows take no longer than as many calls."""
    return min(seconds * max(1.0, m / max(tuned, 1)) for tuned, seconds in own.items()) if m not in own else own[m]


def _unit_seconds(p: TunedPoint) -> float:
    """Return the time that times at this M are divided by: the best of any layout or of the raw weight."""
    best = min((raw_seconds(p), *(option.seconds for option in p.options.values())))
    return best if best < float("inf") else 1.0


def raw_seconds(p: TunedPoint) -> float:
    """Return the seconds of what serves the raw weight; infinite where nothing was timed."""
    option = p.options.get(None)
    if option is not None and option.beats_aten:
        return min(option.seconds, p.plain_s)
    return p.plain_s


def _is_plain(problem: Problem) -> bool:
    """Whether plain PyTorch computes what ATen's candidate of the same function computes. PyTorch rounds before the
    steps of an epilogue, except those that addmm fuses; the verified candidate does not."""
    if problem.family == "mm" and problem.out_dtype == problem.a.dtype:
        return addmm_prefix(problem).steps == len(problem.epilogue)
    return problem.family != "mixed_mm" and not problem.epilogue


def build_plan(
    decisions: Sequence[Decision | TunedPoint],
    packing: str | None = None,
    tuned: TunedPlan | None = None,
    faulty: Collection[str] = (),
) -> Plan | None:
    """Return the Plan of Decisions that differ only in M, for a weight in ``packing``; None when no kernel can serve
    it.

    For the raw weight, an M is served by the plain op where ATen's own op is best, or where the winner does not beat
    ATen beyond the noise. For a packed weight only the M that have a kernel in its layout have entries. tuned: the plan
    for a range of M; Decisions at M that it does not know of serve these M. faulty: ids of kernels that its intervals
    must not serve.
    """
    points = sorted(
        (item if isinstance(item, TunedPoint) else tuned_point(item) for item in decisions), key=lambda p: p.m
    )
    if packing is None:
        entries = [_raw_entry(p) for p in points]
    else:
        options = [(p, p.options[packing]) for p in points if packing in p.options]
        entries = [PlanEntry(p.m, o.candidate, o.overlap, o.seconds, _lower_bound(p.plain_s)) for p, o in options]
    intervals: tuple[Interval, ...] = ()
    if tuned is not None:
        intervals = _with_entries(_intervals(tuned, packing, faulty), [e for e in entries if e.m not in tuned.tuned])
    if not entries and not intervals:
        return None
    if tuned is None:
        return Plan(points[0].problem.plan_key, packing, tuple(entries))
    return Plan(tuned.plan_key, packing, tuple(entries), intervals, tuned.dim)


def _intervals(tuned: TunedPlan, packing: str | None, faulty: Collection[str]) -> tuple[Interval, ...]:
    """Return the intervals of a TunedPlan in one layout, without those of faulty kernels.

    Raises KeyError, TypeError or ValueError when the record is malformed.
    """
    problem, intervals = Problem.from_dict(tuned.problem), list[Interval]()
    for interval in tuned.intervals.get(packing or "", ()):
        kernel = tuned.find(interval.kernel)
        if kernel is None or kernel.id in faulty:
            continue
        candidate = Candidate.from_dict(kernel.candidate)
        seconds = max((s for m, s in kernel.times.items() if m <= kernel.tuned_m), default=float("inf"))
        serving = None if packing is None and is_plain_op(problem, candidate) else candidate
        intervals.append(
            Interval(interval.first, interval.last, PlanEntry(kernel.tuned_m, serving, kernel.overlap, seconds))
        )
    return tuple(intervals)


def _with_entries(intervals: tuple[Interval, ...], entries: Iterable[PlanEntry]) -> tuple[Interval, ...]:
    """Return intervals in which each entry serves its own M."""
    for entry in entries:
        parts = [part for interval in intervals for part in _around(interval, entry.m)]
        intervals = tuple(sorted((*parts, Interval(entry.m, entry.m, entry)), key=lambda interval: interval.first))
    return intervals


def _around(interval: Interval, m: int) -> list[Interval]:
    """Return an interval's parts below and above ``m``."""
    parts = (interval._replace(last=min(interval.last, m - 1)), interval._replace(first=max(interval.first, m + 1)))
    if not interval.first <= m <= interval.last:
        return [interval]
    return [part for part in parts if part.first <= part.last]


def _lower_bound(plain_s: float) -> float:
    """Return the plain op's seconds as a lower bound: 0.0 where it was not timed."""
    return plain_s if plain_s < float("inf") else 0.0


def is_plain_op(problem: Problem, candidate: Candidate) -> bool:
    """Whether a candidate computes what plain PyTorch computes for the Problem, by the same function."""
    return is_fallback_template(candidate.to_dict(), problem) and _is_plain(problem)


def _raw_entry(p: TunedPoint) -> PlanEntry:
    option = p.options.get(None)
    choice = _raw_choice(p, option)
    seconds = float("inf") if option is None or choice is None else option.seconds
    return PlanEntry(p.m, choice, option is None or option.overlap, seconds, _lower_bound(p.plain_s))


def _raw_choice(p: TunedPoint, option: Option | None) -> Candidate | None:
    if option is None or not option.beats_aten:
        return None
    if is_fallback_template(option.candidate.to_dict(), p.problem):
        return None if _is_plain(p.problem) else option.candidate
    return option.candidate if option.seconds < p.plain_s else None
