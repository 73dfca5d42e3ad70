"""The results of tuning: Verdicts, Samples and Decisions, as strictly typed data that msgspec stores as JSON."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .verdict import VerdictKind

Outcome = Literal["winner", "tie", "none_valid", "inconclusive"]
Stage = Literal["illegal", "untried", "failed", "screened", "eliminated", "finalist", "winner"]


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of verifying a kernel.

    detail: where the output is wrong and by how much, or what failed. worst: the largest error as a fraction of the
    bound (0 for exact; > 1 is wrong).
    """

    kind: VerdictKind
    detail: str = ""
    worst: float = 0.0

    @property
    def ok(self) -> bool:
        return self.kind in ("exact", "within_bound")


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The timings of one kernel on one Problem, in seconds per call.

    median_s, lo_s, hi_s: the median time and its interval. rounds: number of timed rounds. ratio: the median of the
    paired ratios of this kernel's time to ATen's in the same rounds, with the 95% interval [ratio_lo, ratio_hi].
    times: raw times per round (bounded in number). condition: cold or hot operands. packing_s: one-time cost of packing
    the constant operand. conditions: how the sample was measured, in words, by name.
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
    """The record of one candidate: the last stage of tuning that it reached, and the reason why it stopped there.

    candidate: ``Candidate.to_dict()``. packing: the layout in which the kernel takes its weight; None: unpacked.
    """

    candidate: dict[str, Any]
    id: str
    stage: Stage
    packing: str | None = None
    reason: str = ""
    verdict: Verdict | None = None
    sample: Sample | None = None
    workspace_bytes: int = 0


BACK_TO_BACK = "back to back"
"""The surrounding in which a kernel's calls follow one another directly (``timing.surroundings``)."""


class LayoutDecision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of the paired test in one weight layout, against the ATen kernel that would otherwise serve.

    outcome: ``winner`` when ``candidate`` is faster than ``baseline`` beyond the noise and slower in no surrounding, or
    as fast (within 1.5%) in calls of its own back to back and faster by 2% wherever other work surrounds it; else
    ``tie``. baseline: id of an ATen candidate; in the unpacked layout, it is one that takes the unpacked weight. ratio:
    the median of the paired ratios of the candidate's time to the baseline's, with its interval [ratio_lo, ratio_hi].
    surroundings: the median paired ratio by the name of the surrounding work (``timing.surroundings``). overlap:
    whether the kernel is faster in a CUDA graph when it begins before the preceding kernel ends (programmatic dependent
    launch, PDL). round_ratio: the median of the same ratios in the rounds before the paired test, to which those of
    kernels without a paired test are comparable; None in records written before this field existed.
    """

    outcome: Literal["winner", "tie"]
    candidate: str
    baseline: str
    ratio: float
    ratio_lo: float
    ratio_hi: float
    surroundings: dict[str, float] = {}
    overlap: bool = True
    round_ratio: float | None = None

    @property
    def won_among_other_work_only(self) -> bool:
        """Whether the candidate won for its times among other work, and is no faster back to back."""
        return self.outcome == "winner" and self.ratio >= 1.0

    @property
    def worst_ratio(self) -> float:
        """The largest of the ratios: the paired test's and those of all surroundings. Only those among other work count
        for a kernel that won there, and not back to back."""
        if self.won_among_other_work_only:
            among_work = (ratio for name, ratio in self.surroundings.items() if name != BACK_TO_BACK)
            return max(among_work, default=self.ratio)
        return max((self.ratio, *self.surroundings.values()))


class Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of tuning one Problem on one Target, with all evidence.

    problem: ``Problem.to_dict()``.
    outcome: ``winner`` (``chosen`` is faster than ATen beyond the noise), ``tie`` (ATen serves; ``chosen`` is ATen's
    fastest candidate), ``none_valid`` (``chosen`` is None; dispatch falls back to the ATen op), or ``inconclusive``
    (the machine was too disturbed to decide; ``chosen`` is ATen's fastest candidate; stores refuse the decision, so
    that the problem is tuned again).
    alternatives: id of the fastest eligible candidate by packing ("" = unpacked), so that one layout can be chosen for
    many M. layouts: results of paired tests by packing ("" = unpacked), for the layouts that were tested; records
    written before this field existed have none. seconds: duration of tuning. created: Unix time.
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
        """Return the evidence of one candidate; None when there is none."""
        return next((row for row in self.evidence if row.id == candidate_id), None)

    @property
    def speedup(self) -> float:
        """The paired speedup of ``chosen`` over ATen; 1.0 unless the outcome is ``winner``. For a kernel that won among
        other work only, it is the least one there."""
        row = self.find(self.chosen)
        if self.outcome != "winner" or row is None or row.sample is None:
            return 1.0
        layout = self.layouts.get(row.packing or "")
        if layout is not None and layout.candidate == row.id and layout.won_among_other_work_only:
            return 1.0 / layout.worst_ratio
        return 1.0 / row.sample.ratio
