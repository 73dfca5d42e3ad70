"""An entrant's record during its race."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from ..core.decision import Sample, Stage
from ..core.verdict import VerdictKind
from .clock import Run
from .stats import median_interval, ratio_interval

KEPT_TIMES = 64
_MAX_RATIOS = 200  # paired ratios that an interval uses: its cost grows with their square


class EntrantError(Exception):
    """An exception that an entrant raised while it was timed; ``entry`` is the entrant's record."""

    def __init__(self, entry: RaceEntry, error: Exception) -> None:
        super().__init__(f"raised {type(error).__name__}: {error}")
        self.entry = entry


@dataclass(slots=True, eq=False)
class RaceEntry:
    """The record of one entrant: its calls per timing, its times, and the stage that it has reached.

    is_baseline: whether it is one of ATen's candidates. packing: the name of its packed layout; None for the raw
    weight. candidate: ``Candidate.to_dict()``. calls: calls per timing. times: seconds per call by round. test_times,
    baseline_test_times: its own and the baseline's times in the paired test, pair by pair. fault: the kind of failure
    of an entry whose stage is ``failed``.
    """

    id: str
    run: Run
    is_baseline: bool
    packing: str | None
    candidate: Mapping[str, Any] = field(default_factory=dict)
    calls: int = 0
    active: bool = True
    stage: Stage = "finalist"
    reason: str = ""
    fault: VerdictKind = "crashed"
    times: dict[int, float] = field(default_factory=dict)
    test_times: list[float] = field(default_factory=list)
    baseline_test_times: list[float] = field(default_factory=list)

    @property
    def raw(self) -> bool:
        """Whether the kernel reads the raw (unpacked) weight."""
        return self.packing is None

    def guarded(self, i: int) -> None:
        """Call ``run``. Raises EntrantError for this entry when ``run`` raises."""
        try:
            self.run(i)
        except Exception as error:  # a kernel may raise anything, and only that kernel fails
            raise EntrantError(self, error) from error

    def drop(self, stage: Stage, reason: str) -> None:
        self.active, self.stage, self.reason = False, stage, reason

    def record(self, round_: int, seconds: float, floor_s: float) -> None:
        """Store a timing. One far shorter than the floor shows that calibration met a stall: later timings make more
        calls."""
        self.times[round_] = seconds
        if seconds * self.calls < floor_s / 2.0:
            self.calls = max(self.calls, min(10_000, round(floor_s / max(seconds, 1e-8))))

    @property
    def median(self) -> float:
        return median(self.times.values()) if self.times else float("inf")

    @property
    def cost(self) -> float:
        """The seconds that the next timing will take."""
        return self.calls * (self.median if self.times else 0.0)

    def paired(self, other: RaceEntry) -> tuple[list[float], list[float]]:
        """Return the times of both entries in the rounds that they share."""
        shared_rounds = sorted(self.times.keys() & other.times.keys())[-_MAX_RATIOS:]
        return [self.times[r] for r in shared_rounds], [other.times[r] for r in shared_rounds]


def ranked(entries: Sequence[RaceEntry]) -> list[RaceEntry]:
    """Return the entries, fastest first: by the median, over the rounds they share, of each entry's time relative to
    the round's median.

    A machine's speed changes by a tenth from one second to the next where others compute on it, and a median of an
    entry's own times depends on how many of its rounds fell into which second; within a round all entries run under
    equal conditions.
    """
    if len(entries) < 2:
        return list(entries)
    shared_rounds = set.intersection(*(set(entry.times) for entry in entries))
    if not shared_rounds:
        return sorted(entries, key=lambda entry: entry.median)
    times = np.array([[entry.times[round_] for round_ in shared_rounds] for entry in entries])
    relative = np.median(times / np.median(times, axis=0), axis=1)
    return [entries[index] for index in np.argsort(relative, kind="stable")]


def fastest(entries: Sequence[RaceEntry]) -> RaceEntry | None:
    """Return the first of ``ranked`` among the entries that were timed; None when none was."""
    return next(iter(ranked([entry for entry in entries if entry.times])), None)


def ratio_to_baseline(entry: RaceEntry, baseline: RaceEntry) -> float:
    """Return the median paired ratio to the baseline, which is comparable between entries that stopped at different
    rounds."""
    times, baseline_times = entry.paired(baseline)
    return median(t / b for t, b in zip(times, baseline_times, strict=True)) if times else float("inf")


def sample(entry: RaceEntry, baseline: RaceEntry | None, conditions: dict[str, str]) -> Sample | None:
    """Return the entry's Sample: of the paired test if the entry took part in it, of the rounds otherwise. None when it
    was never timed.

    conditions: what the Sample states; its key "operands" is cold or hot.
    """
    times = entry.test_times or list(entry.times.values())
    if not times:
        return None
    center = median_interval(times)
    ratio = (1.0, 1.0, 1.0)
    if baseline is not None and entry is not baseline:
        own_times, baseline_times = (
            (entry.test_times, entry.baseline_test_times) if entry.test_times else entry.paired(baseline)
        )
        if own_times:
            interval = ratio_interval(own_times[-_MAX_RATIOS:], baseline_times[-_MAX_RATIOS:])
            ratio = (interval.center, interval.lo, interval.hi)
    return Sample(
        median_s=center.center,
        lo_s=center.lo,
        hi_s=center.hi,
        rounds=len(times),
        ratio=ratio[0],
        ratio_lo=ratio[1],
        ratio_hi=ratio[2],
        times=tuple(times[-KEPT_TIMES:]),
        condition="hot" if conditions.get("operands") == "hot" else "cold",
        conditions=conditions,
    )
