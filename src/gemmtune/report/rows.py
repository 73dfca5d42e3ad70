"""What tables and plots say of a Decision, drawn from its evidence alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core import workloads
from ..core.problem import Problem

if TYPE_CHECKING:
    from ..core.decision import Decision, Evidence


HOW = (
    "ATen and best: median times of a call, timed by turns. Speed-up: the median of the ratios of neighbouring "
    "timings, which drift does not move; so it need not be the ratio of the two medians."
)


@dataclass(frozen=True, slots=True)
class Row:
    """One Decision in short. Times are seconds a call; speedup is ATen's time over the chosen kernel's, paired.

    lo, hi: the 95% interval of speedup. aten_s: the ATen candidate that it is over, timed by turns with the chosen one
    (where there was no duel, the fastest valid one). best_s: the chosen kernel. Either is
    None when nothing was measured. kernel: the chosen one in a few words. tried, illegal: numbers of candidates.
    """

    problem: Problem
    label: str
    outcome: str
    aten_id: str
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


def backend_of(row: Evidence) -> str:
    """The backend a candidate belongs to."""
    return str(row.candidate.get("backend", "?"))


def kernel_name(row: Evidence | None) -> str:
    """A candidate in a few words, for tables: ``native/packed avx512_bf16 6x64``. Its id says everything."""
    if row is None:
        return ""
    config = dict(row.candidate.get("config", {}))
    words = [f"{backend_of(row)}/{row.candidate.get('template', '?')}"]
    if "isa" in config:
        words.append(str(config["isa"]))
    if "mr" in config and "nr" in config:
        words.append(f"{config['mr']}x{config['nr']}")
    return " ".join(words if len(words) > 1 else [*words, *(str(value) for value in config.values())])


def measured(decision: Decision) -> list[Evidence]:
    """The valid candidates that were timed, fastest first."""
    rows = [row for row in decision.evidence if row.sample is not None and (row.verdict is None or row.verdict.ok)]
    return sorted(rows, key=lambda row: row.sample.median_s if row.sample is not None else 0.0)


def median_s(row: Evidence | None) -> float | None:
    """Seconds a call; None for a candidate that is not there or was not timed."""
    return None if row is None or row.sample is None else row.sample.median_s


def rival(decision: Decision) -> Evidence | None:
    """The ATen candidate that the chosen one's ratio is over: they were timed by turns. None when nobody fought."""
    chosen = decision.find(decision.chosen)
    if chosen is None:
        return None
    layout = decision.layouts.get(chosen.packing or "")
    if layout is not None and layout.candidate == chosen.id:
        return decision.find(layout.baseline)
    atens = [row for row in measured(decision) if backend_of(row) == "aten" and row.stage == "finalist"]
    return max(atens, key=lambda row: row.sample.rounds if row.sample is not None else 0, default=None)


def best_by_backend(decision: Decision) -> dict[str, Evidence]:
    """The fastest valid candidate of each backend. The chosen one stands for its backend, since it won the duel, and
    the one that lost it for ATen: a time from another moment has nothing to do with their ratio."""
    best: dict[str, Evidence] = {}
    for fighter in (decision.find(decision.chosen), rival(decision)):
        if fighter is not None and fighter.sample is not None:
            best.setdefault(backend_of(fighter), fighter)
    for row in measured(decision):
        best.setdefault(backend_of(row), row)
    return best


_DISTURBED = ("stalled", "extended", "fought again", "stolen")
_BUSY_CORES = 0.5


def disturbance(decision: Decision) -> str:
    """What disturbed the machine while the chosen kernel and its rival were timed; empty when nothing is recorded."""
    found: dict[str, str] = {}
    for row in (decision.find(decision.chosen), rival(decision)):
        conditions = {} if row is None or row.sample is None else row.sample.conditions
        found |= {name: f"{name} {conditions[name]}" for name in _DISTURBED if name in conditions}
        load = conditions.get("load", "").partition(" ")[0]
        if load.replace(".", "", 1).isdecimal() and float(load) > _BUSY_CORES:
            found["load"] = f"others kept {load} cores busy"
    return "; ".join(found.values())


def summarize(decision: Decision) -> Row:
    """A Decision as one Row."""
    problem = Problem.from_dict(decision.problem)
    best = best_by_backend(decision)
    aten, chosen = best.get("aten"), decision.find(decision.chosen)
    sample = chosen.sample if chosen is not None else None
    won = decision.outcome == "winner" and sample is not None
    speedup, lo, hi = (
        (1 / sample.ratio, 1 / sample.ratio_hi, 1 / sample.ratio_lo) if won and sample is not None else (1.0, 1.0, 1.0)
    )
    illegal = sum(row.stage == "illegal" for row in decision.evidence)
    return Row(
        problem=problem,
        label=workloads.label(problem),
        outcome=decision.outcome,
        aten_id=aten.id if aten is not None else "",
        aten_s=median_s(aten),
        best_id=decision.chosen or "",
        kernel=kernel_name(chosen),
        best_s=median_s(chosen),
        speedup=speedup,
        lo=lo,
        hi=hi,
        tried=sum(row.stage not in ("illegal", "untried") for row in decision.evidence),
        illegal=illegal,
        seconds=decision.seconds,
    )


def ordered(decisions: Iterable[Decision]) -> list[Decision]:
    """In the order people read: by dtype, then K, N, then M."""

    def place(decision: Decision) -> tuple[str, int, int, int, str]:
        problem = Problem.from_dict(decision.problem)
        return workloads.dtype_name(problem), problem.k, problem.n, problem.m, decision.problem_key

    return sorted(decisions, key=place)


def duration(seconds: float | None) -> str:
    """A time with three digits and a fitting unit: ``1.24 ms``; ``-`` for None."""
    if seconds is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            value = seconds * scale
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    raise AssertionError("unreachable")
