"""What is known of every candidate of one Problem, and the Evidence that a Decision keeps of it."""

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

# Kept of those that never ran: a record stays small (a hit is read in well under a millisecond), and each reason shows.
MAX_PER_REASON = 4
MAX_ILLEGAL = 120
MAX_UNTRIED = 8

ONE_DRAW = "checked on one draw of operands only"


@dataclass(slots=True)
class Row:
    """One candidate so far. times_s: its rough times. eligible: every check has passed."""

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
        """The least of the rough times (stalls only ever add), infinite when it has none."""
        return min(self.times_s, default=float("inf"))

    @property
    def incumbent(self) -> bool:
        return self.candidate.backend == BASELINE_BACKEND


class Ledger:
    """Rows by candidate id, in the order the candidates were listed."""

    def __init__(self, candidates: Iterable[Candidate], illegal: Iterable[Illegal]) -> None:
        self._rows = {candidate.id: Row(candidate) for candidate in candidates}
        self._illegal = list(illegal)

    def __getitem__(self, candidate_id: str) -> Row:
        return self._rows[candidate_id]

    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def fail(self, candidate_id: str, verdict: Verdict, reason: str = "") -> None:
        """It will not be served, whatever else is known of it."""
        row = self._rows[candidate_id]
        row.stage, row.verdict, row.eligible, row.sample = "failed", verdict, False, None
        row.reason = reason or verdict.detail

    def timed(self) -> list[Row]:
        """Those with rough times, fastest first."""
        return sorted((row for row in self._rows.values() if row.times_s), key=lambda row: row.screening_s)

    def best(self, *, incumbent: bool | None = None, eligible: bool = False) -> Row | None:
        """The fastest by rough times, among incumbents or the others, or all (None)."""
        rows = (
            row
            for row in self.timed()
            if (incumbent is None or row.incumbent == incumbent) and (row.eligible or not eligible)
        )
        return next(rows, None)

    def alternatives(self, raced: dict[str, str]) -> dict[str, str]:
        """The fastest eligible id per packing ("" = unpacked): as raced, or by rough times for those that were not."""
        found = {packing: name for packing, name in raced.items() if self._rows[name].eligible}
        for row in self.timed():
            if row.eligible:
                found.setdefault(row.packing or "", row.id)
        return found

    def evidence(self) -> tuple[Evidence, ...]:
        """All that was tried, then samples of what was not and of what was illegal, with the number left out."""
        base = self.best(incumbent=True)
        tried = [row for row in self._rows.values() if row.stage != "untried"]
        untried = [row for row in self._rows.values() if row.stage == "untried"]
        rows = [_evidence(row, base) for row in tried]
        rows += _thinned((_evidence(row, base) for row in untried), _template, MAX_UNTRIED)
        illegal = (
            Evidence(item.candidate.to_dict(), item.candidate.id, "illegal", reason=item.reason)
            for item in {item.candidate.id: item for item in self._illegal}.values()
            if item.candidate.id not in self._rows
        )
        rows += list(_thinned(illegal, _reason_shape, MAX_PER_REASON))[:MAX_ILLEGAL]
        return tuple(rows)


def _evidence(row: Row, base: Row | None) -> Evidence:
    sample = row.sample
    if sample is None and row.times_s:
        sample = _rough_sample(row, base)
    if sample is not None:
        sample = msgspec.structs.replace(sample, packing_s=row.packing_s)
    verdict = row.verdict
    if verdict is not None and verdict.ok and not row.eligible:
        verdict = msgspec.structs.replace(verdict, detail=verdict.detail or ONE_DRAW)
    return Evidence(
        row.candidate.to_dict(), row.id, row.stage, row.packing, row.reason, verdict, sample, row.workspace_bytes
    )


def _rough_sample(row: Row, base: Row | None) -> Sample:
    low, high = min(row.times_s), max(row.times_s)
    ratio = (1.0, 1.0, 1.0)
    if base is not None and base is not row:
        ratio = (row.screening_s / base.screening_s, low / max(base.times_s), high / min(base.times_s))
    return Sample(
        median(row.times_s),
        low,
        high,
        len(row.times_s),
        *ratio,
        times=row.times_s,
        conditions={"timing": "rough"},
    )


def _thinned(rows: Iterable[Evidence], kind: Callable[[Evidence], object], limit: int) -> Iterator[Evidence]:
    """The first ``limit`` of each kind; the last one kept says how many more there were."""
    groups: dict[object, list[Evidence]] = defaultdict(list)
    for row in rows:
        groups[kind(row)].append(row)
    for group in groups.values():
        kept, more = group[:limit], len(group) - limit
        if more > 0:
            text = f"{kept[-1].reason or 'not tried'} (and {more} more like it)"
            kept[-1] = msgspec.structs.replace(kept[-1], reason=text)
        yield from kept


def _template(row: Evidence) -> object:
    return (row.candidate["backend"], row.candidate["template"])


def _reason_shape(row: Evidence) -> object:
    """Reasons that differ in their numbers alone are one."""
    return (row.candidate["backend"], re.sub(r"\d+", "#", row.reason))
