"""The tuning of one Problem, from its candidates to a Decision: explore, confirm, race.

The tuner runs one TuningSession for each Problem. A *baseline* is one of ATen's candidates; a *screening time* is the
time of a candidate's first few calls, measured alone and before any race.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import msgspec

from ..core import devices
from ..core.decision import Decision, Outcome
from ..core.devices import TuningProfile
from ..core.errors import WorkerError
from ..core.events import BestSoFar, Progress
from ..core.problem import Problem
from ..core.target import Target
from ..store.base import Store
from ..timing.outcome import LeaderUpdate, RaceResult
from ..workers.contract import MeasurementWorker, WorkerLost
from .candidates import enumerate_candidates
from .exploration import CONFIRM_END, Build, BuildAhead, Exploration
from .ledger import Ledger, Row
from .search import get as get_search
from .searcher import SearcherFactory
from .selection import (
    MAX_BASELINES,
    MAX_PACKINGS,
    best_of_each_packing_first,
    entrants,
    grouped_by_packing,
    promising,
    raw_pair,
    within,
)
from .session_context import SessionContext
from .time_budget import TimeBudget
from .turns import Steps

# Preparing operands and oracle counts for no more than this share of the budget: on a busy machine it could take all
# the time that choosing a kernel needs.
OPEN_SHARE = 0.3
# Seconds of builds after the first ones that do not count where a budget has a ``default_s`` of its own. When 3 s of
# all builds did not count, the first Decision of a weight spent its time on the start of the builders: for M = 2048 it
# had tried 6 to 8 candidates in 12 of 21 plans, 17 to 51 in the others (H100s and H200s, the ``tried`` of
# every-m-20261127-045358 to -143103).
BUILDS_S = 2.0
# Within this factor a few screening times do not tell which of ATen's candidates is the fastest.
UNCERTAIN_BASELINE = 1.15
# Calls of the leader that a race needs to decide anything, however little of the default budget remains.
SLOW_TEST_CALLS = 80
# Of a budget that is not the user's. With 0.05 and 0.25, the first Decision of a weight, which waits for builds, stayed
# a tie ("the budget allowed 2 pairs") although a kernel took 0.74 of ATen's time (int8 weights, M = 2048, H100).
_LEAST_RACE = 0.5
# The share of a default budget at which checks of the best candidate of each packing end. Where exploring had taken
# long, only one of four packings was checked with one row of int8 weights; 256 rows then chose another one for all M,
# in which one row was served by the kernel for 256, in twice the time.
BEST_OF_PACKING_END = 1.0
CHECK_CALLS = 16  # calls that checking a candidate makes at least: some on each test case, and one at each other M


def budget_of(profile: TuningProfile, seconds: float | None, default_s: float | None) -> TimeBudget:
    """Return the budget of a session that ``TuningSession.steps`` is to take these seconds for. ``BUILDS_S`` are not
    counted of one with a ``default_s``, and as small a part of them as that is of the usual time of a tuned M."""
    if default_s is None:
        return TimeBudget(seconds or profile.default_s, seconds is not None)
    builds_s = BUILDS_S * min(1.0, default_s / (profile.tuned_m_s or default_s))
    return TimeBudget(seconds or default_s, seconds is not None, builds_s)


class TuningSession:
    """The tuning session of one Problem: it tries candidates through a measurement worker and returns a Decision.

    Candidates are listed by the constructor, while a worker may still be starting.

    worker: the measurement worker, which builds, checks, times and races. build: begins to build candidates before they
    are tried (see ``workers.builds.Builders.begin``); None leaves building to the worker. build_ahead: begins to build
    candidates that may be tried next, while others are timed; None where that would disturb timing. hot: race on
    operands that are in the cache. layouts: names of the packed layouts in which the same weight has kernels at other
    M, the fastest first; candidates in the first of these layouts are tried, checked and raced before others, because
    one layout serves all M of a weight. search: makes the search strategy; None for the local search. Raises
    ValueError for an unknown backend name.
    """

    def __init__(
        self,
        problem: Problem,
        target: Target,
        backend_names: Sequence[str],
        store: Store,
        worker: MeasurementWorker,
        progress: Progress,
        seed: int,
        *,
        build: Build | None = None,
        build_ahead: BuildAhead | None = None,
        hot: bool = False,
        layouts: Sequence[str] = (),
        search: SearcherFactory | None = None,
    ) -> None:
        candidates, illegal = enumerate_candidates(problem, target, backend_names)
        self._hot, self._worker = hot, worker
        self._profile, self._ledger = devices.get(target.device).profile, Ledger(candidates, illegal)
        self._context = SessionContext(
            problem, target, store, worker, progress, seed, self._profile, tuple(layouts[:MAX_PACKINGS]), self._ledger,
            TimeBudget(self._profile.default_s, strict=False),
        )  # fmt: skip
        self._exploration = Exploration(self._context, candidates, search or get_search("local"), build, build_ahead)

    @property
    def _budget(self) -> TimeBudget:
        return self._context.budget

    def steps(self, seconds: float | None, limit: int | None, default_s: float | None = None) -> Steps[Decision]:
        """Return the Decision, reached within ``seconds`` and after at most ``limit`` candidates. What other work takes
        during waits for builds does not count; it may use the same worker.

        seconds: kept within 10%, unless the first timings of ATen and of one other candidate take longer; None is
        ``default_s`` (by default 6, 3 on a GPU), and more for problems whose single calls are slow. Raises WorkerError
        when the worker cannot open the problem at all.
        """
        run_started = time.perf_counter()
        self._context.budget = budget_of(self._profile, seconds, default_s)
        self._worker.open(self._context.problem, self._context.seed)
        if not self._budget.strict:
            self._budget.cap_spent(OPEN_SHARE)
        stopped = yield from self._exploration.steps(limit)
        self._exploration.retime_fastest()
        self._confirm()
        raced = self._race()
        self._record_race(raced)
        decision = self._decision(raced.outcome, raced.leader, f"{stopped}; {raced.stopped}", raced.alternatives)
        layouts = {name: item for name, item in raced.layouts.items() if self._ledger[item.candidate].eligible}
        own_s = time.perf_counter() - run_started - self._context.others_s
        return msgspec.structs.replace(decision, seconds=own_s, layouts=layouts)

    def none_valid_decision(self, reason: str) -> Decision:
        """Return the Decision for a problem that no worker could open: ``none_valid``, with the evidence collected so
        far. It must not be stored."""
        for row in self._ledger.rows():
            row.eligible = False
        return self._decision("none_valid", None, reason, {})

    def _confirm(self) -> None:
        """Check the promising candidates fully, since only a confirmed candidate can be served.

        The best candidate of each packing comes first: the layout that a weight's other M select must have a kernel at
        this M.
        """
        context = self._context
        rows = promising(context.ledger.timed(), context.layouts, context.profile.max_raced)
        rows = best_of_each_packing_first(rows, context.layouts)
        count = len({row.packing for row in rows})
        end = CONFIRM_END if self._budget.strict else BEST_OF_PACKING_END
        for row in rows[:count]:
            if self._leaves_race_time(row, end):
                self._check(row)
        for row in grouped_by_packing(rows[count:]):
            if self._leaves_race_time(row):
                self._check(row)
        # Even when time is short, the best baseline and the best other candidate are always checked.
        for is_baseline in (True, False):
            rows = [row for row in self._ledger.timed() if row.is_baseline == is_baseline]
            for row in rows[: None if is_baseline else self._profile.max_raced]:
                if self._ledger.best(is_baseline=is_baseline, eligible=True) is not None:
                    break
                self._check(row)
        # Calls that alone take the whole budget must not decide which of ATen's candidates serves.
        if not self._budget.strict:
            rows = [row for row in self._ledger.timed() if row.is_baseline]
            for row in within(rows, UNCERTAIN_BASELINE)[:MAX_BASELINES]:
                self._check(row)
            self._confirm_raw_pair()

    def _leaves_race_time(self, row: Row, end: float = CONFIRM_END) -> bool:
        """Whether a check of ``row`` ends within the share ``end`` of the budget and, within a user's, leaves the race
        its time.

        ATen's plain candidate on a quantised weight may be 50 times slower than the others: checking it took the time
        that the race needed, which then could not show that a kernel four times as fast as ATen's best is faster.
        """
        end_s = self._budget.elapsed_s + CHECK_CALLS * row.screening_s
        if self._budget.strict and self._budget.seconds < end_s + self._context.reserve_s():
            return False
        return end_s < end * self._budget.seconds

    def _confirm_raw_pair(self) -> None:
        """Check the fastest kernel and ATen's fastest candidate on the raw weight, even when time is short.

        Unless both are checked the raw layout has no paired test, and plain ATen serves a raw weight. A kernel that
        fails is replaced by the next, up to ``MAX_PACKINGS`` times.
        """
        for _ in range(MAX_PACKINGS):
            pair = raw_pair([row for row in self._ledger.timed() if row.stage != "failed"])
            for row in pair:
                self._check(row)
            if all(row.eligible for row in pair):
                return

    def _check(self, row: Row) -> None:
        if row.eligible or row.stage == "failed":
            return
        verdict = self._worker.confirm(row.candidate, self._context.deadline_s()).verdict
        # Another kernel may have damaged the heap that a candidate of ATen crashed on.
        if verdict.kind == "crashed" and row.is_baseline:
            verdict = self._worker.confirm(row.candidate, self._context.deadline_s()).verdict
        if verdict.ok:
            row.verdict, row.eligible = verdict, True
        else:
            self._context.fail(row, verdict)

    def _race(self) -> RaceResult:
        """Race the eligible candidates and return the result.

        A candidate that crashes the worker, or whose output is wrong after the race, is marked as failed, and the
        others race again.
        """
        unexplained_losses = 0
        while rows := self._entrants():
            budget_s = self._race_seconds(rows)
            try:
                candidates = [row.candidate for row in rows]
                earlier_s = {row.id: row.screening_s for row in rows}
                raced = self._worker.race(
                    candidates, budget_s, self._context.seed, self._report_leading, self._hot, earlier_s
                )  # fmt: skip
                if not raced.faults:
                    return raced
                for name, verdict in raced.faults.items():
                    self._context.fail(self._ledger[name], verdict)
                continue
            except WorkerLost as loss:
                if loss.candidate_id is not None:
                    self._context.fail(self._ledger[loss.candidate_id], loss.verdict)
                    continue
                unexplained_losses += 1
                reason = f"the race was lost: {loss.verdict.detail}"
            except WorkerError as error:
                unexplained_losses += 1
                reason = f"the race failed: {error}"
            if unexplained_losses == 2:
                return self._result_without_race(reason)
        return RaceResult("none_valid", stopped="no candidate passed its checks")

    def _entrants(self) -> list[Row]:
        context = self._context
        eligible = [row for row in context.ledger.timed() if row.eligible]
        return entrants(eligible, context.layouts, context.profile.max_raced, context.budget.remaining_s)

    def _race_seconds(self, rows: Sequence[Row]) -> float:
        """Return the seconds for the race: those that remain of the budget.

        Unless the budget is the user's, a race gets at least ``_LEAST_RACE`` of it, however long exploring took, and
        one of slow calls gets more, since neither could decide anything otherwise.
        """
        if self._budget.strict:
            return max(self._budget.remaining_s, 0.05 * self._budget.seconds)
        slow_race_s = SLOW_TEST_CALLS * min(row.screening_s for row in rows)
        remaining_s = min(self._budget.remaining_s, self._profile.race_s or math.inf)
        least_s = min(_LEAST_RACE * self._budget.seconds, self._profile.race_s or math.inf)
        return max(remaining_s, min(0.75 * self._budget.seconds, slow_race_s), least_s)

    def _report_leading(self, leading: LeaderUpdate) -> None:
        self._context.progress(BestSoFar(leading.id, leading.median_s, leading.ratio))

    def _result_without_race(self, reason: str) -> RaceResult:
        """Return the result when no race could be completed: inconclusive, with ATen serving if it is eligible."""
        baseline = self._ledger.best(is_baseline=True, eligible=True)
        return RaceResult(
            "inconclusive" if baseline else "none_valid", baseline.id if baseline else None, stopped=reason
        )

    def _record_race(self, raced: RaceResult) -> None:
        for evidence in raced.evidence.values():
            row = self._ledger[evidence.id]
            if evidence.verdict is not None:
                self._context.fail(row, evidence.verdict)
                continue
            row.stage = "screened" if evidence.stage == "untried" else evidence.stage
            row.reason, row.sample = evidence.reason, evidence.sample

    def _decision(self, outcome: Outcome, chosen: str | None, stopped: str, raced: dict[str, str]) -> Decision:
        return Decision(
            problem_key=self._context.problem.key,
            problem=self._context.problem.to_dict(),
            target_key=self._context.target.key,
            outcome=outcome,
            chosen=chosen,
            evidence=self._ledger.evidence(),
            alternatives=self._ledger.alternatives(raced),
            stopped=stopped,
            seconds=self._budget.elapsed_s,
            seed=self._context.seed,
            created=time.time(),
        )
