"""What a race found, as data that travels between processes."""

from __future__ import annotations

import msgspec

from ..core.decision import LayoutDecision, Outcome, Sample, Stage, Verdict
from ..core.verdict import VerdictKind


class Leading(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Progress within a race, any number of times before Raced."""

    id: str
    median_s: float
    ratio: float


class Placed(msgspec.Struct, forbid_unknown_fields=True):
    """How one candidate came out of the race. fault: what one of stage ``failed`` did."""

    id: str
    stage: Stage
    reason: str
    sample: Sample | None
    fault: VerdictKind = "crashed"


class Raced(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Reply to Race. groups: the fastest id per packing. layouts: duels by packing. faults: kernels that were no longer
    right after the race."""

    outcome: Outcome
    leader: str | None
    stopped: str
    placed: tuple[Placed, ...]
    groups: dict[str, str]
    layouts: dict[str, LayoutDecision] = {}
    faults: dict[str, Verdict] = {}
