"""An entrant's record while it races."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ..core.decision import Sample, Stage
from ..core.verdict import VerdictKind
from .clock import Run
from .stats import median_interval, ratio_interval

KEPT_TIMES = 64
_MAX_RATIOS = 200  # paired ratios an interval is made of: its cost grows with their square


class EntrantError(Exception):
    """An entrant raised while it was timed; ``lane`` is its record."""

    def __init__(self, lane: Lane, error: Exception) -> None:
        super().__init__(f"raised {type(error).__name__}: {error}")
        self.lane = lane


@dataclass(slots=True, eq=False)
class Lane:
    """times: seconds per call by round. duel, rival: its and the incumbent's times in the duel, pair by pair. fault:
    what a lane of stage ``failed`` did."""

    id: str
    run: Run
    incumbent: bool
    group: str | None
    calls: int = 0
    active: bool = True
    stage: Stage = "finalist"
    reason: str = ""
    fault: VerdictKind = "crashed"
    times: dict[int, float] = field(default_factory=dict)
    duel: list[float] = field(default_factory=list)
    rival: list[float] = field(default_factory=list)

    @property
    def raw(self) -> bool:
        """Whether it takes the weight as it lies."""
        return not self.group

    def guarded(self, i: int) -> None:
        """``run``, with what it raises tied to this lane."""
        try:
            self.run(i)
        except Exception as error:  # a kernel may raise anything, and it costs that kernel
            raise EntrantError(self, error) from error

    def drop(self, stage: Stage, reason: str) -> None:
        self.active, self.stage, self.reason = False, stage, reason

    def record(self, round_: int, seconds: float, floor_s: float) -> None:
        """Keep a timing. One far shorter than the floor shows that calibration met a stall: more calls from now on."""
        self.times[round_] = seconds
        if seconds * self.calls < floor_s / 2.0:
            self.calls = max(self.calls, min(10_000, round(floor_s / max(seconds, 1e-8))))

    @property
    def median(self) -> float:
        return median(self.times.values()) if self.times else float("inf")

    @property
    def cost(self) -> float:
        """Seconds its next timing will take."""
        return self.calls * (self.median if self.times else 0.0)

    def paired(self, other: Lane) -> tuple[list[float], list[float]]:
        """Times of both in the rounds they share."""
        rounds = sorted(self.times.keys() & other.times.keys())[-_MAX_RATIOS:]
        return [self.times[r] for r in rounds], [other.times[r] for r in rounds]


def ranked(lanes: Sequence[Lane]) -> list[Lane]:
    """Fastest first: by the median, over the rounds they share, of each one's time over that round's median.

    A machine's pace changes by a tenth from one second to the next where others compute beside it, and a median of a
    lane's own times depends on how many of its rounds fell into which; within a round all lanes meet the same.
    """
    shared = set.intersection(*(set(lane.times) for lane in lanes)) if lanes else set()
    if not shared:
        return sorted(lanes, key=lambda lane: lane.median)
    levels = {round_: median(lane.times[round_] for lane in lanes) for round_ in shared}
    return sorted(lanes, key=lambda lane: median(lane.times[round_] / level for round_, level in levels.items()))


def fastest(lanes: Sequence[Lane]) -> Lane | None:
    """The first of ``ranked`` among those that were timed."""
    return next(iter(ranked([lane for lane in lanes if lane.times])), None)


def by_ratio(lane: Lane, incumbent: Lane) -> float:
    """Median paired ratio to the incumbent: comparable between lanes that left at different rounds."""
    mine, base = lane.paired(incumbent)
    return median(t / b for t, b in zip(mine, base, strict=True)) if mine else float("inf")


def sample(lane: Lane, incumbent: Lane | None, conditions: dict[str, str]) -> Sample | None:
    """The lane's Sample; of the duel where it fought in it, of the rounds otherwise. None when it was never timed.

    conditions: what the Sample is to say; "operands" (cold or hot) among them.
    """
    times = lane.duel or list(lane.times.values())
    if not times:
        return None
    center = median_interval(times)
    ratio = (1.0, 1.0, 1.0)
    if incumbent is not None and lane is not incumbent:
        mine, base = (lane.duel, lane.rival) if lane.duel else lane.paired(incumbent)
        if mine:
            found = ratio_interval(mine[-_MAX_RATIOS:], base[-_MAX_RATIOS:])
            ratio = (found.center, found.lo, found.hi)
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
