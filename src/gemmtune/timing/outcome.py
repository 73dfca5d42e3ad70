"""The result of a race, as it is sent between processes."""

from __future__ import annotations

import msgspec

from ..core.decision import Evidence, LayoutDecision, Outcome, Verdict


class LeaderUpdate(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The leader during a race; any number of these messages precede the RaceResult. ratio: its time over the
    baseline's."""

    id: str
    median_s: float
    ratio: float


class RaceResult(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The result of a race.

    outcome: ``winner`` (the leader beat the fastest baseline, in every surrounding), ``tie`` (the leader is that
    baseline), ``inconclusive`` (the leader is that baseline, on a machine too disturbed to tell) or ``none_valid``.
    leader, baseline: ids of candidates. stopped: why the race ended. evidence: of every candidate, by id.
    alternatives: the fastest id by packing ("" = unpacked). layouts: the paired tests by packing. rounds: number of
    timed rounds. seconds: duration. conditions: the state of the machine meanwhile, in words. faults: the verdicts on
    kernels whose output was no longer right after the race, by id.
    """

    outcome: Outcome
    leader: str | None = None
    baseline: str | None = None
    stopped: str = ""
    evidence: dict[str, Evidence] = {}
    alternatives: dict[str, str] = {}
    layouts: dict[str, LayoutDecision] = {}
    rounds: int = 0
    seconds: float = 0.0
    conditions: dict[str, str] = {}
    faults: dict[str, Verdict] = {}
