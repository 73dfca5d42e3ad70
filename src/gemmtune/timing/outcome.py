"""The messages that carry a race's progress and result between processes."""

from __future__ import annotations

import msgspec

from ..core.decision import LayoutDecision, Outcome, Sample, Stage, Verdict
from ..core.verdict import VerdictKind


class LeaderUpdate(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The leader during a race; any number of these messages precede Raced. ratio: its time over the baseline's."""

    id: str
    median_s: float
    ratio: float


class Placement(msgspec.Struct, forbid_unknown_fields=True):
    """One candidate's result in the race. fault: the kind of failure of a candidate whose stage is ``failed``."""

    id: str
    stage: Stage
    reason: str
    sample: Sample | None
    fault: VerdictKind = "crashed"


class Raced(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The reply to Race: the result of a race.

    placed: the result of every candidate. groups: the fastest id per packing. layouts: the paired tests by packing.
    faults: the verdicts on kernels whose output was no longer right after the race.
    """

    outcome: Outcome
    leader: str | None
    stopped: str
    placed: tuple[Placement, ...]
    groups: dict[str, str]
    layouts: dict[str, LayoutDecision] = {}
    faults: dict[str, Verdict] = {}
