"""The state that the phases of one tuning session share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.decision import Verdict
from ..core.devices import TuningProfile
from ..core.errors import StoreError
from ..core.events import Progress
from ..core.problem import Problem
from ..core.target import Target
from ..core.verdict import FAULTS
from ..store.base import Store
from ..workers.contract import MeasurementWorker
from .ledger import Ledger, Row
from .time_budget import TimeBudget

log = logging.getLogger("gemmtune")

# The pairs of timings for which a race is always left time: 12 for its paired test, and the rounds before it.
RACE_PAIRS = 16
NOT_REMEMBERED = ("build_failed", "unsupported")  # failures that are not stored: trying again costs nothing


@dataclass
class SessionContext:
    """The state of one tuning session.

    layouts: names of the packed layouts in which the same weight has kernels at other M. best_s: the least screening
    time, slowest_s: the seconds of the longest trial of a candidate, overhead_s: upper bound of the seconds that a
    timing takes besides its calls, such as emptying the caches; 0.0 before the first candidate. others_s: the seconds
    that other work took while this session waited for builds.
    """

    problem: Problem
    target: Target
    store: Store
    worker: MeasurementWorker
    progress: Progress
    seed: int
    profile: TuningProfile
    layouts: Sequence[str]
    ledger: Ledger
    budget: TimeBudget
    best_s: float = 0.0
    slowest_s: float = 0.0
    overhead_s: float = 0.0
    others_s: float = 0.0

    def fail(self, row: Row, verdict: Verdict) -> None:
        """Mark a candidate as failed, and store the failure if trying it again would be costly or dangerous."""
        self.ledger.fail(row.id, verdict)
        if verdict.kind in NOT_REMEMBERED or (row.is_baseline and verdict.kind in ("wrong", "unstable")):
            return  # checking ATen again is cheap, and excluding it for good is not
        try:
            self.store.remember_failure(self.target, self.problem.key, row.id, verdict)
            if verdict.kind in FAULTS:  # such a kernel may not serve another M of the Plan
                self.store.remember_failure(self.target, self.problem.plan_key, row.id, verdict)
        except StoreError as error:
            log.debug("a failure is not remembered: %s", error)

    def deadline_s(self, patience: float = 10.0) -> float | None:
        """Return the seconds that one candidate may take: ``patience`` times the slowest so far, at least 3.

        None, which stands for the worker's own limit, until one candidate has worked.
        """
        return max(3.0, patience * self.slowest_s) if self.slowest_s else None

    def reserve_s(self) -> float:
        """Return the seconds that checking and racing the best baseline and the best other candidate will take."""
        baseline = self.ledger.best(is_baseline=True)
        pair_s = self.best_s + (baseline.screening_s if baseline is not None else 0.0) + 2.0 * self.overhead_s
        return 2.0 * self.slowest_s + RACE_PAIRS * pair_s
