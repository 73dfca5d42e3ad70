"""From Decisions to a Plan: one layout for a weight, and for each tuned M the fastest kernel in that layout."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..backends.aten.fusion import addmm_prefix
from ..core.candidate import Candidate
from ..core.problem import Problem
from ..core.verdict import FAULTS
from .plan import Plan, PlanEntry

if TYPE_CHECKING:
    from ..core.decision import Decision, Evidence, LayoutDecision, Sample

# A packed layout must save this share of the total time to be worth a second form of the weight.
WORTHWHILE = 0.99
# Layouts whose total times differ by no more are alike: which of them is ahead changes from tuning to tuning.
ALIKE = 1.01
# What serving a kernel costs in Python beyond calling the plain op: it has its output allocated here, and its arguments
# checked (benchmarks/overhead.py: 1 to 2 us). Races time kernels alone; a kernel of microseconds must win this back.
SERVING_S = 2e-6

# A time of a few calls that was never raced counts for so much more beside raced ones: its operands may have been in
# the cache, which no flush empties where it has 480 MB.
UNRACED = 1.3

# ATen's own ops on the raw operand that are just what plain PyTorch runs.
FALLBACK_TEMPLATES = (
    "mm",
    "bmm",
    "int_mm",
    "int_mm_pad",
    "int8pack",
    "upcast",
    "scaled_mm",
    "scaled_mm_pad",
    "composite",
)


@dataclass(frozen=True, slots=True)
class Option:
    """An eligible candidate at one M: seconds per call as served, upper bound of its time ratio over ATen's best.

    won: whether it won the duel of its layout; None where that had none. overlap: as ``Kernel.overlap``.
    """

    candidate: Candidate
    seconds: float
    ratio_hi: float
    won: bool | None = None
    overlap: bool = True

    @property
    def beats_aten(self) -> bool:
        if self.candidate.backend == "aten" or self.won is None:
            return self.candidate.backend == "aten" or self.ratio_hi < 1.0
        return self.won


@dataclass(frozen=True, slots=True)
class TunedPoint:
    """What one Decision says to dispatch: the fastest eligible option per layout (None: the raw operand).

    ``plain_s``: the time of the plain op on the raw operand (infinite when it was not timed). faulty: the ids of
    candidates that this Decision's evidence found to be wrong, unstable, crashed or hung.
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
    """Extract a Point. Raises KeyError, TypeError or ValueError when the record is malformed."""
    problem = Problem.from_dict(decision.problem)
    by_id = {row.id: row for row in decision.evidence}
    base = _incumbent_seconds(decision.evidence)
    options: dict[str | None, Option] = {}
    for candidate_id in (*decision.alternatives.values(), decision.chosen):
        row = by_id.get(candidate_id or "")
        option = None if row is None else _option(row, base)
        if row is not None and option is not None:
            held = options.get(row.packing)
            if held is None or option.seconds < held.seconds:
                options[row.packing] = option
    for packing, layout in decision.layouts.items():
        options[packing or None] = _duelled(layout, by_id, options.get(packing or None), base)
    raw_aten = [
        _seconds(row.sample, base)
        for row in decision.evidence
        if row.packing is None and _eligible(row) and row.sample is not None and _is_fallback_template(row.candidate)
    ]
    faulty = frozenset(row.id for row in decision.evidence if row.verdict is not None and row.verdict.kind in FAULTS)
    return TunedPoint(problem, decision.outcome, options, min(raw_aten, default=float("inf")), faulty)


def without_faulty(p: TunedPoint, faulty: Collection[str]) -> TunedPoint:
    """Return the Point without the options whose candidates are ``faulty`` at any M of its Plan."""
    options = {packing: option for packing, option in p.options.items() if option.candidate.id not in faulty}
    return p if len(options) == len(p.options) else replace(p, options=options)


def _without_raw(p: TunedPoint) -> TunedPoint:
    """Return the Point without its option on the raw weight: the plain op is what serves that."""
    return replace(p, options={packing: option for packing, option in p.options.items() if packing is not None})


def _duelled(layout: LayoutDecision, by_id: Mapping[str, Evidence], raced: Option | None, base: float | None) -> Option:
    """The option of a layout that had a duel: its time is the baseline's by the ratio, at worst of all surroundings.

    A layout whose candidate did not win is served by whatever was raced fastest in it, no faster than that.
    """
    row, beside = by_id[layout.candidate], by_id[layout.baseline]
    own = _option(row, base)
    if own is None or beside.sample is None:
        raise ValueError(f"{layout.candidate!r} duelled without a sample")
    seconds = layout.worst_ratio * _seconds(beside.sample, base)
    extra = own.seconds - _seconds(row.sample, base) if row.sample is not None else 0.0
    if layout.outcome == "winner" or raced is None or raced.candidate == own.candidate:
        won = layout.outcome == "winner"
        return Option(own.candidate, seconds + extra, layout.ratio_hi, won, layout.overlap)
    return raced if raced.candidate.backend == "aten" else replace(raced, won=False)


def _eligible(row: Evidence) -> bool:
    return row.verdict is not None and row.verdict.ok


def _option(row: Evidence, base: float | None) -> Option | None:
    if not _eligible(row) or row.sample is None:
        return None
    candidate = Candidate.from_dict(row.candidate)
    # What was timed in a CUDA graph is meant for graphs, which replay without Python.
    graph = row.sample.conditions.get("timed") == "graph"
    extra = 0.0 if graph or (row.packing is None and _is_fallback_template(row.candidate)) else SERVING_S
    unsure = UNRACED if row.stage == "screened" else 1.0
    return Option(candidate, unsure * _seconds(row.sample, base) + extra, row.sample.ratio_hi)


def _is_fallback_template(candidate: Mapping[str, Any]) -> bool:
    return candidate.get("backend") == "aten" and candidate.get("template") in FALLBACK_TEMPLATES


def _incumbent_seconds(evidence: Iterable[Evidence]) -> float | None:
    """The time of the ATen candidate that the others' ratios are to: the one timed most."""
    samples = [row.sample for row in evidence if row.candidate.get("backend") == "aten" and row.sample is not None]
    own = [sample for sample in samples if sample.ratio == sample.ratio_lo == sample.ratio_hi == 1.0]
    return max(own, key=lambda sample: sample.rounds).median_s if own else None


def _seconds(sample: Sample, base: float | None) -> float:
    """Seconds a call by the paired ratio: candidates left the race at different rounds, in different weather."""
    return sample.median_s if base is None else sample.ratio * base


def choose_packing(
    decisions: Iterable[Decision | TunedPoint], weights: Mapping[int, float] | None = None
) -> str | None:
    """The layout with the least total time over the tuned Ms; None keeps the weight as it is.

    weights: calls per M. Without them every M counts alike, each time as a multiple of the best one there (total time
    would let the largest M decide alone). Where a layout has no kernel of its own at an M, the one that the Plan
    would serve there counts, at what it takes at most. A packed layout must beat the raw weight's total by 1%.
    """
    return next(iter(rank_packings(decisions, weights)), None)


def rank_packings(
    decisions: Iterable[Decision | TunedPoint], weights: Mapping[int, float] | None = None, *, raw_kernels: bool = True
) -> list[str | None]:
    """Every layout worth having, best first; the raw weight (None) ends the list.

    Those within 1% of the best go by their names, the last first, so that another tuning of the same weight comes to
    the same layout. raw_kernels: whether kernels on the raw weight would serve it; otherwise the plain op does, and its
    time counts.
    """
    points = [item if isinstance(item, TunedPoint) else tuned_point(item) for item in decisions]
    if not points:
        return [None]
    if not raw_kernels:
        points = [_without_raw(p) for p in points]
    share = {p.m: weights.get(p.m, 1.0) if weights else 1.0 / _unit_seconds(p) for p in points}
    raw = sum(share[p.m] * _raw_seconds(p) for p in points)
    totals = _totals(points, share)
    worth = sorted((total, layout) for layout, total in totals.items() if total < WORTHWHILE * raw)
    alike = sorted((layout for total, layout in worth if total <= ALIKE * worth[0][0]), reverse=True)
    return [*alike, *(layout for _, layout in worth[len(alike) :]), None]


def layouts_in_use(points: Sequence[TunedPoint]) -> list[str]:
    """Every layout that has a kernel at one of the Ms at least, the one with the least total time first.

    Unlike ``rank_packings`` it also returns layouts that are slower than the raw weight: at an M that is not tuned yet
    they may win enough.
    """
    totals = _totals(points, {p.m: 1.0 / _unit_seconds(p) for p in points})
    return sorted(totals, key=lambda layout: (totals[layout], layout))


def _totals(points: Sequence[TunedPoint], share: Mapping[int, float]) -> dict[str, float]:
    """The total time of each packed layout over all points, each M's time times its share."""
    totals: dict[str, float] = {}
    for layout in {name for p in points for name in p.options if name is not None}:
        own = {p.m: p.options[layout].seconds for p in points if layout in p.options}
        totals[layout] = sum(share[p.m] * _at_most(own, p.m) for p in points)
    return totals


def _at_most(own: Mapping[int, float], m: int) -> float:
    """Seconds at M by the times a layout has at other M: fewer rows take no longer, more rows are so many calls."""
    return min(seconds * max(1.0, m / max(tuned, 1)) for tuned, seconds in own.items()) if m not in own else own[m]


def _unit_seconds(p: TunedPoint) -> float:
    """What times at this M are multiples of: the best of any layout or of the raw weight."""
    best = min((_raw_seconds(p), *(option.seconds for option in p.options.values())))
    return best if best < float("inf") else 1.0


def _raw_seconds(p: TunedPoint) -> float:
    option = p.options.get(None)
    if option is not None and option.beats_aten:
        return min(option.seconds, p.plain_s)
    return p.plain_s


def _is_plain(problem: Problem) -> bool:
    """Whether plain PyTorch computes what ATen's usual candidate computes: it rounds before the steps of an epilogue
    (but for those that addmm takes), and the verified candidate does not."""
    if problem.family == "mm" and problem.out_dtype == problem.a.dtype:
        return addmm_prefix(problem).steps == len(problem.epilogue)
    return problem.family != "mixed_mm" and not problem.epilogue


def build_plan(decisions: Sequence[Decision | TunedPoint], packing: str | None = None) -> Plan | None:
    """The Plan of Decisions that differ only in M, for a weight in ``packing``; None when nothing there can serve it.

    On the raw operand, an M whose best is ATen's usual op, or whose winner is not sure to beat ATen, is plain. With a
    packed weight the Ms that have a kernel for that layout answer for the others.
    """
    points = sorted(
        (item if isinstance(item, TunedPoint) else tuned_point(item) for item in decisions), key=lambda p: p.m
    )
    if packing is None:
        entries = [_raw_entry(p) for p in points]
    else:
        options = [(p.m, p.options[packing]) for p in points if packing in p.options]
        entries = [PlanEntry(m, option.candidate, option.overlap) for m, option in options]
    return Plan(points[0].problem.plan_key, packing, tuple(entries)) if entries else None


def _raw_entry(p: TunedPoint) -> PlanEntry:
    option = p.options.get(None)
    return PlanEntry(p.m, _raw_choice(p, option), option is None or option.overlap)


def _raw_choice(p: TunedPoint, option: Option | None) -> Candidate | None:
    if option is None or not option.beats_aten:
        return None
    if _is_fallback_template(option.candidate.to_dict()):
        return None if _is_plain(p.problem) else option.candidate
    return option.candidate if option.seconds < p.plain_s else None
