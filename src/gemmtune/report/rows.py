"""Summaries of Decisions for tables and plots, computed from their evidence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core import workloads
from ..core.problem import Problem

if TYPE_CHECKING:
    from ..core.decision import Decision, Evidence
    from ..core.tuned_plan import PlanKernel


TIMES_NOTE = (
    "ATen and best: median times of a call, timed by turns. Speed-up: the median of the ratios of neighbouring "
    "timings, which drift does not move; so it need not be the ratio of the two medians."
)


@dataclass(frozen=True, slots=True)
class DecisionSummary:
    """The summary of one Decision. Times are in seconds per call.

    aten_s: the time of the ATen candidate of the paired test (without a paired test, of the fastest valid ATen
    candidate). best_id, best_s: the chosen candidate and its time. A time is None if it was not measured. kernel: the
    short name of the chosen candidate (``kernel_name``). speedup: ATen's time over the chosen candidate's, paired; 1
    without a winner. lo, hi: its 95% interval. tried, illegal: numbers of candidates. seconds: duration of the tuning.
    """

    problem: Problem
    label: str
    outcome: str
    aten_s: float | None
    best_id: str
    kernel: str
    best_s: float | None
    speedup: float
    lo: float
    hi: float
    tried: int
    illegal: int
    seconds: float


def backend_name(row: Evidence | PlanKernel) -> str:
    """Return the name of a candidate's backend."""
    return str(row.candidate.get("backend", "?"))


def kernel_name(row: Evidence | PlanKernel | None) -> str:
    """Return a candidate's short name for tables: ``native/packed avx512_bf16 6x64``. Its id has the whole config."""
    if row is None:
        return ""
    config = dict(row.candidate.get("config", {}))
    parts = [f"{backend_name(row)}/{row.candidate.get('template', '?')}"]
    if "isa" in config:
        parts.append(str(config["isa"]))
    if "mr" in config and "nr" in config:
        parts.append(f"{config['mr']}x{config['nr']}")
    return " ".join(parts if len(parts) > 1 else [*parts, *(str(value) for value in config.values())])


def timed_candidates(decision: Decision) -> list[Evidence]:
    """Return the evidence of the valid candidates that were timed, fastest first."""
    rows = [row for row in decision.evidence if row.sample is not None and (row.verdict is None or row.verdict.ok)]
    return sorted(rows, key=lambda row: row.sample.median_s if row.sample is not None else 0.0)


def median_s(row: Evidence | None) -> float | None:
    """Return a candidate's median time in seconds per call; None if ``row`` is None or was not timed."""
    return None if row is None or row.sample is None else row.sample.median_s


def baseline_of(decision: Decision) -> Evidence | None:
    """Return the ATen candidate that the chosen candidate's ratio is relative to.

    The two were timed alternately in a paired test. For a decision without a record of this test, it is the ATen
    finalist that was timed in the most rounds. None if there is none, or if no candidate was chosen.
    """
    chosen = decision.find(decision.chosen)
    if chosen is None:
        return None
    layout = decision.layouts.get(chosen.packing or "")
    if layout is not None and layout.candidate == chosen.id:
        return decision.find(layout.baseline)
    atens = [row for row in timed_candidates(decision) if backend_name(row) == "aten" and row.stage == "finalist"]
    return max(atens, key=lambda row: row.sample.rounds if row.sample is not None else 0, default=None)


def best_by_backend(decision: Decision) -> dict[str, Evidence]:
    """Return the fastest valid candidate of each backend.

    The chosen candidate represents its backend, because it won the paired test, and the test's baseline represents
    ATen: a time measured at another moment is not comparable with theirs.
    """
    best: dict[str, Evidence] = {}
    for evidence in (decision.find(decision.chosen), baseline_of(decision)):
        if evidence is not None and evidence.sample is not None:
            best.setdefault(backend_name(evidence), evidence)
    for row in timed_candidates(decision):
        best.setdefault(backend_name(row), row)
    return best


# Older records say "fought again" for "repeated".
_DISTURBANCE_CONDITIONS = ("stalled", "extended", "repeated", "fought again", "stolen")
_BUSY_CORES_LIMIT = 0.5


def disturbances_of(decision: Decision) -> str:
    """Return what disturbed the machine while the chosen kernel and its baseline were timed.

    The text comes from the conditions of their samples. It is empty if they record no disturbance.
    """
    descriptions: dict[str, str] = {}
    for row in (decision.find(decision.chosen), baseline_of(decision)):
        conditions = {} if row is None or row.sample is None else row.sample.conditions
        descriptions |= {name: f"{name} {conditions[name]}" for name in _DISTURBANCE_CONDITIONS if name in conditions}
        load = conditions.get("load", "").partition(" ")[0]
        if load.replace(".", "", 1).isdecimal() and float(load) > _BUSY_CORES_LIMIT:
            descriptions["load"] = f"others kept {load} cores busy"
    return "; ".join(descriptions.values())


def summarize(decision: Decision) -> DecisionSummary:
    """Return the summary of a Decision."""
    problem = Problem.from_dict(decision.problem)
    best = best_by_backend(decision)
    chosen = decision.find(decision.chosen)
    sample = chosen.sample if chosen is not None else None
    won = decision.outcome == "winner" and sample is not None
    speedup, speedup_lo, speedup_hi = (
        (1 / sample.ratio, 1 / sample.ratio_hi, 1 / sample.ratio_lo) if won and sample is not None else (1.0, 1.0, 1.0)
    )
    illegal = sum(row.stage == "illegal" for row in decision.evidence)
    return DecisionSummary(
        problem=problem,
        label=workloads.label(problem),
        outcome=decision.outcome,
        aten_s=median_s(best.get("aten")),
        best_id=decision.chosen or "",
        kernel=kernel_name(chosen),
        best_s=median_s(chosen),
        speedup=speedup,
        lo=speedup_lo,
        hi=speedup_hi,
        tried=sum(row.stage not in ("illegal", "untried") for row in decision.evidence),
        illegal=illegal,
        seconds=decision.seconds,
    )


def sorted_decisions(decisions: Iterable[Decision]) -> list[Decision]:
    """Return decisions sorted for display: by dtype, K, N and M."""

    def sort_key(decision: Decision) -> tuple[str, int, int, int, str]:
        problem = Problem.from_dict(decision.problem)
        return workloads.dtype_name(problem), problem.k, problem.n, problem.m, decision.problem_key

    return sorted(decisions, key=sort_key)


def time_text(seconds: float | None) -> str:
    """Return a time as text with up to three digits and a suitable unit, ``1.24 ms``; ``-`` for None."""
    if seconds is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            value = seconds * scale
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    raise AssertionError("unreachable")
