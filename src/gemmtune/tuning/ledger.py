"""The record of every candidate of one Problem, and the Evidence that a Decision keeps of them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median

import msgspec

from ..core.candidate import Candidate, Illegal
from ..core.decision import Evidence, Sample, Stage, Verdict
from .candidates import BASELINE_BACKEND

# Limits on candidates that never ran: a record stays small (a hit is read in well under a millisecond), and each reason
# is still present.
MAX_PER_REASON = 4
MAX_ILLEGAL = 120
MAX_UNTRIED = 8

ONE_DRAW = "checked on one draw of operands only"


@dataclass(slots=True)
class Row:
    """The present state of one candidate. times_s: its screening times in seconds. eligible: every check has passed."""

    candidate: Candidate
    stage: Stage = "untried"
    reason: str = ""
    packing: str | None = None
    packing_s: float = 0.0
    workspace_bytes: int = 0
    verdict: Verdict | None = None
    times_s: tuple[float, ...] = ()
    sample: Sample | None = None
    eligible: bool = False

    @property
    def id(self) -> str:
        return self.candidate.id

    @property
    def screening_s(self) -> float:
        """The least of the screening times (stalls only ever add), infinite without any."""
        return min(self.times_s, default=float("inf"))

    @property
    def is_baseline(self) -> bool:
        return self.candidate.backend == BASELINE_BACKEND


class Ledger:
    """Rows by candidate id, in the order in which the candidates were listed."""

    def __init__(self, candidates: Iterable[Candidate], illegal: Iterable[Illegal]) -> None:
        self._rows = {candidate.id: Row(candidate) for candidate in candidates}
        self._illegal = list(illegal)

    def __getitem__(self, candidate_id: str) -> Row:
        return self._rows[candidate_id]

    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def fail(self, candidate_id: str, verdict: Verdict, reason: str = "") -> None:
        """Mark a candidate as failed: it will not be served, whatever its other results."""
        row = self._rows[candidate_id]
        row.stage, row.verdict, row.eligible, row.sample = "failed", verdict, False, None
        row.reason = reason or verdict.detail

    def timed(self) -> list[Row]:
        """Return the rows with screening times, fastest first."""
        return sorted((row for row in self._rows.values() if row.times_s), key=lambda row: row.screening_s)

    def best(self, *, is_baseline: bool | None = None, eligible: bool = False) -> Row | None:
        """Return the row with the least screening time, among baselines (True), the others (False), or all (None)."""
        rows = (
            row
            for row in self.timed()
            if (is_baseline is None or row.is_baseline == is_baseline) and (row.eligible or not eligible)
        )
        return next(rows, None)

    def alternatives(self, raced: dict[str, str]) -> dict[str, str]:
        """Return the fastest eligible id per packing ("" = unpacked): by the race, or by screening times for packings
        not raced."""
        by_packing = {packing: name for packing, name in raced.items() if self._rows[name].eligible}
        for row in self.timed():
            if row.eligible:
                by_packing.setdefault(row.packing or "", row.id)
        return by_packing

    def evidence(self) -> tuple[Evidence, ...]:
        """Return the Evidence of all candidates that were tried, then a selection of the untried and the illegal ones,
        with the number omitted."""
        baseline = self.best(is_baseline=True)
        tried = [row for row in self._rows.values() if row.stage != "untried"]
        untried = [row for row in self._rows.values() if row.stage == "untried"]
        rows = [_evidence(row, baseline) for row in tried]
        rows += _limit_per_kind((_evidence(row, baseline) for row in untried), _template_of, MAX_UNTRIED)
        illegal = (
            Evidence(item.candidate.to_dict(), item.candidate.id, "illegal", reason=item.reason)
            for item in {item.candidate.id: item for item in self._illegal}.values()
            if item.candidate.id not in self._rows
        )
        rows += list(_limit_per_kind(illegal, _reason_shape, MAX_PER_REASON))[:MAX_ILLEGAL]
        return tuple(rows)


def _evidence(row: Row, baseline: Row | None) -> Evidence:
    sample = row.sample
    if sample is None and row.times_s:
        sample = _screening_sample(row, baseline)
    if sample is not None:
        sample = msgspec.structs.replace(sample, packing_s=row.packing_s)
    verdict = row.verdict
    if verdict is not None and verdict.ok and not row.eligible:
        verdict = msgspec.structs.replace(verdict, detail=verdict.detail or ONE_DRAW)
    return Evidence(
        row.candidate.to_dict(), row.id, row.stage, row.packing, row.reason, verdict, sample, row.workspace_bytes
    )


def _screening_sample(row: Row, baseline: Row | None) -> Sample:
    low, high = min(row.times_s), max(row.times_s)
    ratio = (1.0, 1.0, 1.0)
    if baseline is not None and baseline is not row:
        ratio = (row.screening_s / baseline.screening_s, low / max(baseline.times_s), high / min(baseline.times_s))
    return Sample(
        median(row.times_s),
        low,
        high,
        len(row.times_s),
        *ratio,
        times=row.times_s,
        conditions={"timing": "rough"},
    )


def _limit_per_kind(rows: Iterable[Evidence], kind_of: Callable[[Evidence], object], limit: int) -> Iterator[Evidence]:
    """Return the first ``limit`` rows of each kind; the last of them states how many more there were."""
    groups: dict[object, list[Evidence]] = defaultdict(list)
    for row in rows:
        groups[kind_of(row)].append(row)
    for group in groups.values():
        selected, omitted = group[:limit], len(group) - limit
        if omitted > 0:
            text = f"{selected[-1].reason or 'not tried'} (and {omitted} more like it)"
            selected[-1] = msgspec.structs.replace(selected[-1], reason=text)
        yield from selected


def _template_of(row: Evidence) -> object:
    return (row.candidate["backend"], row.candidate["template"])


def _reason_shape(row: Evidence) -> object:
    """Return a key that is equal for reasons of one backend that differ only in their numbers."""
    return (row.candidate["backend"], re.sub(r"\d+", "#", row.reason))
