"""What tuning found out: Verdicts, Samples and Decisions. Data only, strict, JSON-ready (msgspec)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .verdict import VerdictKind

Outcome = Literal["winner", "tie", "none_valid", "inconclusive"]
Stage = Literal["illegal", "untried", "failed", "screened", "eliminated", "finalist", "winner"]


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What checking said. ``detail``: where and by how much, or what went wrong, in words.

    worst: largest error as a fraction of the bound (0 for exact; > 1 is wrong).
    """

    kind: VerdictKind
    detail: str = ""
    worst: float = 0.0

    @property
    def ok(self) -> bool:
        return self.kind in ("exact", "within_bound")


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Timings of one kernel on one Problem. Times in seconds per call.

    ratio: paired time over ATen's in the same rounds (median), with its interval [ratio_lo, ratio_hi] (95%).
    times: the raw per-round times (bounded in number). condition: cold or hot operands. packing_s: one-time cost of
    packing the constant operand.
    """

    median_s: float
    lo_s: float
    hi_s: float
    rounds: int
    ratio: float = 1.0
    ratio_lo: float = 1.0
    ratio_hi: float = 1.0
    times: tuple[float, ...] = ()
    condition: Literal["cold", "hot"] = "cold"
    packing_s: float = 0.0
    conditions: dict[str, str] = {}


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One candidate's record: how far it came and why it stopped there."""

    candidate: dict[str, Any]
    id: str
    stage: Stage
    packing: str | None = None
    reason: str = ""
    verdict: Verdict | None = None
    sample: Sample | None = None
    workspace_bytes: int = 0


class LayoutDecision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of a paired duel in one weight layout, against the ATen kernel that would serve instead.

    outcome: ``winner`` when ``candidate`` is faster than ``baseline`` beyond the noise, in every surrounding; else
    ``tie``.
    baseline: id of an ATen candidate; for the raw layout it takes the raw weight too. ratio: paired time of candidate
    over baseline (median), with its interval [ratio_lo, ratio_hi]. surroundings: the median paired ratio by the name
    of the surrounding (``timing.surroundings``). overlap: whether the kernel, in a CUDA graph, is faster when it
    begins before the kernel in front of it ends (programmatic dependent launch).
    """

    outcome: Literal["winner", "tie"]
    candidate: str
    baseline: str
    ratio: float
    ratio_lo: float
    ratio_hi: float
    surroundings: dict[str, float] = {}
    overlap: bool = True

    @property
    def worst_ratio(self) -> float:
        """The largest ratio of all: of the duel and of each surrounding."""
        return max((self.ratio, *self.surroundings.values()))


class Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome for one Problem on one Target, with everything that led to it.

    outcome: ``winner`` (``chosen`` beat ATen beyond the noise), ``tie`` (ATen serves; ``chosen`` is ATen's best),
    ``none_valid`` (``chosen`` is None; dispatch falls back to the plain ATen op), or ``inconclusive`` (the machine was
    too disturbed to decide; ``chosen`` is ATen's best; stores refuse it, so that the problem is tuned again).
    alternatives: the fastest eligible candidate id per packing ("" = unpacked), so that one layout can be chosen
    over many M. layouts: duels by packing ("" = unpacked), for the layouts that had one; records written before this
    field existed have none. problem: ``Problem.to_dict()``.
    """

    problem_key: str
    problem: dict[str, Any]
    target_key: str
    outcome: Outcome
    chosen: str | None
    evidence: tuple[Evidence, ...]
    alternatives: dict[str, str] = {}
    stopped: str = ""
    seconds: float = 0.0
    seed: int = 0
    created: float = 0.0
    layouts: dict[str, LayoutDecision] = {}

    def find(self, candidate_id: str | None) -> Evidence | None:
        """The evidence of one candidate."""
        return next((row for row in self.evidence if row.id == candidate_id), None)

    @property
    def speedup(self) -> float:
        """Best's speed over ATen's, paired; 1.0 on a tie."""
        row = self.find(self.chosen)
        return 1.0 if self.outcome != "winner" or row is None or row.sample is None else 1.0 / row.sample.ratio
