"""The tuning of one Problem, from its candidates to a Decision: explore, confirm, race.

The tuner runs one TuningSession for each Problem. A *baseline* is one of ATen's candidates; a *screening time* is the
time of a candidate's first few calls, measured alone and before any race.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from .. import backends
from ..backends.base import Artifact
from ..core import devices
from ..core.candidate import Candidate
from ..core.decision import Decision, Outcome, Verdict
from ..core.errors import StoreError, WorkerError
from ..core.events import BestSoFar, CandidateTried, Progress
from ..core.problem import Problem
from ..core.target import Target
from ..core.verdict import FAULTS
from ..store.base import Store
from ..timing.machine import allowed_cpus
from ..timing.outcome import LeaderUpdate, RaceResult
from ..workers.builds import is_prebuilt
from ..workers.worker import MeasurementWorker, WorkerLost
from .candidates import BASELINE_BACKEND, enumerate_candidates
from .ledger import Ledger, Row
from .search import Searcher, SearcherFactory, SearchOptions
from .search import get as get_search

log = logging.getLogger("gemmtune")

Build = Callable[[Problem, Iterable[Candidate], Target], Mapping[str, Artifact | Verdict]]
BuildAhead = Callable[[Problem, Iterable[Candidate], Target], None]

# Shares of the budget at which a phase ends and the next begins; the race has the remainder. Preparing operands and
# oracle counts for no more than OPEN_SHARE: on a busy machine it could take all the time that choosing a kernel needs.
OPEN_SHARE = 0.3
EXPLORE_END, CONFIRM_END = 0.5, 0.75
# Without a user's budget, a problem whose single calls are slow may take this multiple of the default budget.
DEFAULT_OVERRUN = 1.5
MIN_OTHERS = 4  # candidates other than ATen's that are tried even when ATen's alone took the share for exploring

CLOSE = 1.3  # a candidate whose screening time is within this factor of the best may turn out fastest in a race
CLOSE_BASELINE = 1.5  # ATen has few candidates: a wider limit keeps the name "ATen" honest
# Within this factor a few screening times do not tell which of ATen's candidates is the fastest.
UNCERTAIN_BASELINE = 1.15
# Kernels on the raw weight are raced when they take up to this multiple of the best packed kernel's time.
RAW_WITHIN = 8.0
# The fastest candidate of each packing is confirmed within this factor of the best, for Plans that share one packing
# over many M.
PACKING_WITHIN = 5.0

MAX_BASELINES, MAX_PACKINGS = 4, 4
# The fastest candidates whose screening times are within this factor are timed once more when there is time to spare:
# each was timed at another moment, and a busy neighbour of half a second doubles the times during that moment.
RETIMED_WITHIN = 3.0
# Calls of the leader that a race needs to decide anything, however little of the default budget remains.
SLOW_TEST_CALLS = 80
# ATEN_END: ATen's share of a user's budget. RACE_PAIRS: the pairs of timings for which a race is always left time: 12
# for its paired test, and the rounds before it.
ATEN_END, RACE_PAIRS = 0.35, 16
CHECK_CALLS = 16  # calls that checking a candidate makes at least: some on each test case, and one at each other M

BUILT_AHEAD = 12  # of each template

# Candidates tried, before the search's own, in each layout that the weight has kernels in at other M.
TRIED_PER_LAYOUT = 2

NOT_REMEMBERED = ("build_failed", "unsupported")  # failures that are not stored: trying again costs nothing


class TuningSession:
    """The tuning session of one Problem: it tries candidates through a measurement worker and returns a Decision.

    Candidates are listed by the constructor, while a worker may still be starting.

    worker: the measurement worker, which builds, checks, times and races. build: builds candidates before they are
    tried (see ``workers.builds.Builders``); None leaves building to the worker. build_ahead: begins to build candidates
    that may be tried next, while others are timed; None where that would disturb timing. hot: race on operands that are
    in the cache. layouts: names of the packed layouts in which the same weight has kernels at other M, the fastest
    first; candidates in the first of these layouts are tried, checked and raced before others, because one layout
    serves all M of a weight. search: makes the search strategy; None for the local search. Raises ValueError for an
    unknown backend name.
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
        self._problem, self._target, self._store = problem, target, store
        self._build, self._build_ahead, self._hot = build, build_ahead, hot
        self._worker, self._progress, self._seed = worker, progress, seed
        self._layouts = tuple(layouts[:MAX_PACKINGS])
        self._search = search or get_search("local")
        self._candidates, illegal = enumerate_candidates(problem, target, backend_names)
        self._ledger = Ledger(self._candidates, illegal)
        self._started = time.perf_counter()
        self._profile = devices.get(target.device).profile
        self._seconds, self._strict = self._profile.default_s, False
        self._builds: dict[str, Artifact | Verdict] = {}
        self._best_s = self._slowest_s = 0.0
        # Upper bound of the seconds that a timing takes besides its calls, such as emptying the caches.
        self._overhead_s = 0.0
        self._others_tried = 0

    def run(self, seconds: float | None, limit: int | None) -> Decision:
        """Return the Decision, reached within ``seconds`` and after at most ``limit`` candidates.

        seconds: kept within 10%, unless the first timings of ATen and of one other candidate take longer; None is 6 (3
        on a GPU), and more for problems whose single calls are slow. Raises WorkerError when the worker cannot open the
        problem at all.
        """
        self._started = run_started = time.perf_counter()
        self._seconds, self._strict = seconds or self._profile.default_s, seconds is not None
        self._worker.open(self._problem, self._seed)
        if not self._strict:
            self._started = max(self._started, time.perf_counter() - OPEN_SHARE * self._seconds)
        stopped = self._explore(limit)
        self._retime_fastest()
        self._confirm()
        raced = self._race()
        self._record_race(raced)
        decision = self._decision(raced.outcome, raced.leader, f"{stopped}; {raced.stopped}", raced.alternatives)
        layouts = {name: item for name, item in raced.layouts.items() if self._ledger[item.candidate].eligible}
        return msgspec.structs.replace(decision, seconds=time.perf_counter() - run_started, layouts=layouts)

    def none_valid_decision(self, reason: str) -> Decision:
        """Return the Decision for a problem that no worker could open: ``none_valid``, with the evidence collected so
        far. It must not be stored."""
        for row in self._ledger.rows():
            row.eligible = False
        return self._decision("none_valid", None, reason, {})

    # Explore

    def _explore(self, limit: int | None) -> str:
        """Try candidates in the order of the search. Return the reason why exploring ended."""
        candidates = self._forget_failures()
        first = self._first_in_layouts(candidates)
        search = self._search(candidates, SearchOptions(first, self._seed, limit, self._profile))
        self._build_now(first_builds(candidates))
        tried = 0
        while (batch := search.ask()) is not None:
            batch = self._buildable(batch, search)
            if self._build_ahead is not None:
                likely = [candidate for candidate in search.likely if candidate.id not in self._builds]
                # Half of the processors: the other half stays free for candidates that turn out to be wanted instead.
                self._build_ahead(self._problem, likely[: max(1, len(allowed_cpus()) // 2)], self._target)
            for position, candidate in enumerate(batch):
                if self._must_skip(candidate):
                    search.tell(candidate.id, None)
                    continue
                if self._must_stop(candidate):
                    return f"the share of the budget for exploring was spent after {tried} candidates"
                row = self._attempt(candidate)
                search.tell(candidate.id, row.screening_s if row.times_s else None)
                tried += 1
                self._report_tried(row, self._candidates_left(search.left + len(batch) - position - 1, tried))
        return f"the search ended after {tried} candidates"

    def _first_in_layouts(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the first TRIED_PER_LAYOUT candidates in each layout that the weight uses at other M."""
        by_layout: dict[str | None, list[Candidate]] = {layout: [] for layout in self._layouts}
        for candidate in candidates if by_layout else ():
            if candidate.backend == BASELINE_BACKEND:
                continue  # every candidate of ATen is tried anyway
            group = by_layout.get(self._layout_of(candidate))
            if group is not None and len(group) < TRIED_PER_LAYOUT:
                group.append(candidate)
        return [candidate for group in by_layout.values() for candidate in group]

    def _layout_of(self, candidate: Candidate) -> str | None:
        try:
            return backends.get(candidate.backend).packing_of(self._problem, candidate)
        except NotImplementedError:  # only the loaded kernel has this name
            return None

    def _retime_fastest(self) -> None:
        """Time the fastest candidates once more, at another moment, while exploring has time to spare."""
        others = [row for row in self._ledger.timed() if not row.is_baseline]
        for row in _within(others, RETIMED_WITHIN)[: self._profile.retimed]:
            if self._share_spent() > EXPLORE_END:
                return
            result = self._worker.attempt(row.candidate, self._deadline(), self._cutoff_s(row.candidate))
            row.verdict = result.verdict if row.verdict is None else row.verdict
            if result.verdict is not None and not result.verdict.ok:
                row.times_s = ()
                self._fail(row, result.verdict)
            else:
                row.times_s += result.times_s

    def _build_now(self, candidates: Sequence[Candidate]) -> Mapping[str, Artifact | Verdict]:
        """Build candidates and return the outcome of every build so far, by candidate id.

        Building takes no time of the default budget, because one build serves many problems.
        """
        if self._build is not None and candidates:
            start = time.perf_counter()
            self._builds |= self._build(self._problem, candidates, self._target)
            if not self._strict:
                self._started += time.perf_counter() - start
        return self._builds

    def _buildable(self, batch: Sequence[Candidate], search: Searcher) -> list[Candidate]:
        """Return the candidates of ``batch`` whose build did not fail; all are built before any of them is timed.

        Builders that would be idle meanwhile build the candidates that the search may ask for next.
        """
        to_build = [candidate for candidate in batch if candidate.id not in self._builds]
        idle_builders = -len(to_build) % len(allowed_cpus()) if to_build and self._profile.builds_overlap else 0
        if idle_builders:
            to_build += [candidate for candidate in search.likely if candidate.id not in self._builds][:idle_builders]
        builds = self._build_now(to_build)
        for candidate in batch:
            build = builds.get(candidate.id)
            if isinstance(build, Verdict):
                self._fail(self._ledger[candidate.id], build)
                search.tell(candidate.id, None)
        return [candidate for candidate in batch if not isinstance(builds.get(candidate.id), Verdict)]

    def _forget_failures(self) -> list[Candidate]:
        """Return the candidates without those whose failure the store remembers: on this problem, or at any M of its
        Plan when the candidate itself was at fault."""
        failures = self._store.failures(self._target, self._problem.plan_key)
        failures |= self._store.failures(self._target, self._problem.key)
        for candidate in self._candidates:
            if candidate.id in failures:
                verdict = failures[candidate.id]
                self._ledger.fail(candidate.id, verdict, f"not tried again: {verdict.kind} before")
        return [candidate for candidate in self._candidates if candidate.id not in failures]

    def _must_stop(self, candidate: Candidate) -> bool:
        """Whether exploring ends before ``candidate``.

        All of ATen's candidates and some others are tried in any case, unless that takes far more than the budget.
        """
        share_spent = self._share_spent()
        if candidate.backend == BASELINE_BACKEND:
            return (
                not self._strict and share_spent > DEFAULT_OVERRUN and self._ledger.best(is_baseline=True) is not None
            )
        if self._strict:
            too_late = share_spent > EXPLORE_END and (self._others_tried >= MIN_OTHERS or share_spent > CONFIRM_END)
            return self._others_tried > 0 and (too_late or self._elapsed_s() + self._reserve_s() > self._seconds)
        # Twice that for the others: one candidate of ATen's that is slow beyond reason must not leave it without a
        # rival.
        return share_spent > EXPLORE_END and (self._others_tried >= MIN_OTHERS or share_spent > 2 * DEFAULT_OVERRUN)

    def _must_skip(self, candidate: Candidate) -> bool:
        """Whether a candidate of ATen's is skipped: within a user's budget ATen's further candidates must leave time
        for a rival."""
        if not self._strict or candidate.backend != BASELINE_BACKEND or self._share_spent() < ATEN_END:
            return False
        if self._ledger.best(is_baseline=True) is None:
            return False
        self._ledger[candidate.id].reason = "the share of the budget for ATen's ways was spent before its turn"
        return True

    def _reserve_s(self) -> float:
        """Return the seconds that checking and racing the best baseline and the best other candidate will take."""
        baseline = self._ledger.best(is_baseline=True)
        pair_s = self._best_s + (baseline.screening_s if baseline is not None else 0.0) + 2.0 * self._overhead_s
        return 2.0 * self._slowest_s + RACE_PAIRS * pair_s

    def _attempt(self, candidate: Candidate) -> Row:
        start = time.perf_counter()
        result = self._worker.attempt(candidate, self._deadline(), self._cutoff_s(candidate))
        row = self._ledger[candidate.id]
        row.stage, row.verdict, row.packing = "screened", result.verdict, result.packing
        row.packing_s, row.workspace_bytes, row.times_s = result.packing_s, result.workspace_bytes, result.times_s
        self._others_tried += candidate.backend != BASELINE_BACKEND
        if result.verdict is None:
            row.reason = f"{row.screening_s / self._best_s:.1f}x the best rough time: not worth checking"
        elif not result.verdict.ok:
            row.times_s = ()
            self._fail(row, result.verdict)
        if row.times_s:
            elapsed_s = time.perf_counter() - start
            overhead_s = max(0.0, elapsed_s / len(row.times_s) - row.screening_s)
            self._overhead_s = min(self._overhead_s, overhead_s) if self._slowest_s else overhead_s
            self._slowest_s = max(self._slowest_s, elapsed_s)
        return row

    def _cutoff_s(self, candidate: Candidate) -> float | None:
        """Return the screening time in seconds beyond which a candidate has no chance in a race.

        None while there is no time to compare with.
        """
        if candidate.backend == BASELINE_BACKEND:
            baseline = self._ledger.best(is_baseline=True)
            return CLOSE_BASELINE * baseline.screening_s if baseline is not None else None
        return CLOSE * self._best_s if self._best_s else None

    def _deadline(self) -> float | None:
        """Return the seconds that one candidate may take: ten times the slowest so far, at least 3.

        None, which stands for the worker's own limit, until one candidate has worked.
        """
        return max(3.0, 10.0 * self._slowest_s) if self._slowest_s else None

    def _fail(self, row: Row, verdict: Verdict) -> None:
        self._ledger.fail(row.id, verdict)
        if verdict.kind in NOT_REMEMBERED or (row.is_baseline and verdict.kind in ("wrong", "unstable")):
            return  # checking ATen again is cheap, and excluding it for good is not
        try:
            self._store.remember_failure(self._target, self._problem.key, row.id, verdict)
            if verdict.kind in FAULTS:  # such a kernel may not serve another M of the Plan
                self._store.remember_failure(self._target, self._problem.plan_key, row.id, verdict)
        except StoreError as error:
            log.debug("a failure is not remembered: %s", error)

    def _report_tried(self, row: Row, candidates_left: int) -> None:
        median_s = row.screening_s if row.times_s else None
        self._progress(CandidateTried(row.id, row.verdict, median_s, candidates_left))
        if median_s is not None and (not self._best_s or median_s < self._best_s):
            self._best_s = median_s
            baseline = self._ledger.best(is_baseline=True)
            self._progress(
                BestSoFar(row.id, median_s, median_s / baseline.screening_s if baseline is not None else 1.0)
            )

    def _candidates_left(self, listed: int, tried: int) -> int:
        """Return how many candidates are still to come: those that the search has listed, limited to the number that
        the remaining time for exploring allows."""
        remaining_s = max(0.0, EXPLORE_END - self._share_spent()) * self._seconds
        each_s = self._share_spent() * self._seconds / tried
        return min(listed, int(remaining_s / each_s) + 1 if each_s > 0 else listed)

    # Confirm

    def _confirm(self) -> None:
        """Check the promising candidates fully, since only a confirmed candidate can be served.

        The best candidate of each packing comes first: the layout that a weight's other M select must have a kernel at
        this M.
        """
        rows = _best_of_each_packing_first(self._promising(), self._layouts)
        count = len({row.packing for row in rows})
        for row in rows[:count] + _grouped_by_packing(rows[count:]):
            if self._leaves_race_time(row):
                self._check(row)
        # even when time is short: the best baseline and the best other candidate are always checked
        for is_baseline in (True, False):
            rows = [row for row in self._ledger.timed() if row.is_baseline == is_baseline]
            for row in rows[: None if is_baseline else self._profile.max_raced]:
                if self._ledger.best(is_baseline=is_baseline, eligible=True) is not None:
                    break
                self._check(row)
        if not self._strict:  # calls that alone take the whole budget must not decide which of ATen's candidates serves
            rows = [row for row in self._ledger.timed() if row.is_baseline]
            for row in _within(rows, UNCERTAIN_BASELINE)[:MAX_BASELINES]:
                self._check(row)
            self._confirm_raw_pair()

    def _leaves_race_time(self, row: Row) -> bool:
        """Whether a check of ``row`` ends in this phase and, within a user's budget, leaves the race its time.

        ATen's plain candidate on a quantised weight may be 50 times slower than the others: checking it took the time
        that the race needed, which then could not show that a kernel four times as fast as ATen's best is faster.
        """
        end_s = self._elapsed_s() + CHECK_CALLS * row.screening_s
        return end_s < CONFIRM_END * self._seconds and not (self._strict and self._seconds < end_s + self._reserve_s())

    def _confirm_raw_pair(self) -> None:
        """Check the fastest kernel and ATen's fastest candidate on the raw weight, even when time is short.

        Unless both are checked the raw layout has no paired test, and plain ATen serves a raw weight. A kernel that
        fails is replaced by the next, up to ``MAX_PACKINGS`` times.
        """
        for _ in range(MAX_PACKINGS):
            pair = self._raw_pair([row for row in self._ledger.timed() if row.stage != "failed"])
            for row in pair:
                self._check(row)
            if all(row.eligible for row in pair):
                return

    def _promising(self) -> list[Row]:
        """Return the rows that may win a race, or be a packing's best in a Plan that shares that packing."""
        rows = self._ledger.timed()
        baselines = [row for row in rows if row.is_baseline]
        others = [row for row in rows if not row.is_baseline]
        chosen = _within(baselines, CLOSE_BASELINE)[:MAX_BASELINES]
        chosen += [row for row in baselines if row.packing is None][:1]
        chosen += _within(others, CLOSE)[: self._profile.max_raced]
        best_by_packing = {row.packing: row for row in reversed(_within(rows, PACKING_WITHIN))}
        chosen += sorted(best_by_packing.values(), key=lambda row: row.screening_s)[:MAX_PACKINGS]
        chosen += [best_by_packing[layout] for layout in self._layouts if layout in best_by_packing]
        return list({row.id: row for row in chosen}.values())

    def _check(self, row: Row) -> None:
        if row.eligible or row.stage == "failed":
            return
        verdict = self._worker.confirm(row.candidate, self._deadline()).verdict
        if (
            verdict.kind == "crashed" and row.is_baseline
        ):  # another kernel may have damaged the heap that ATen crashed on
            verdict = self._worker.confirm(row.candidate, self._deadline()).verdict
        if verdict.ok:
            row.verdict, row.eligible = verdict, True
        else:
            self._fail(row, verdict)

    # Race

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
                    candidates, budget_s, self._seed, self._report_leading, self._hot, earlier_s
                )  # fmt: skip
                if not raced.faults:
                    return raced
                for name, verdict in raced.faults.items():
                    self._fail(self._ledger[name], verdict)
                continue
            except WorkerLost as loss:
                if loss.candidate_id is not None:
                    self._fail(self._ledger[loss.candidate_id], loss.verdict)
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
        """Return the rows to race, most important first: ATen's best, the other candidates, then more of ATen's.

        A race that is short of memory leaves out the last of them.
        """
        rows = [row for row in self._ledger.timed() if row.eligible]
        baselines = _within([row for row in rows if row.is_baseline], CLOSE_BASELINE)[:MAX_BASELINES]
        others = _within([row for row in rows if not row.is_baseline], CLOSE_BASELINE)
        others = _best_of_each_packing_first(others, self._layouts)
        raw = self._raw_pair(rows)
        baselines += [row for row in raw if row.is_baseline and row not in baselines]
        others[1:1] = [row for row in raw if not row.is_baseline and row not in others[:1]]
        others = list({row.id: row for row in others}.values())
        best_s = min((row.screening_s for row in rows), default=1.0)
        others = others[: max(3, min(self._profile.max_raced, int(self._remaining_s() / (20 * best_s))))]
        for row in rows:
            if row not in baselines and row not in others:
                row.reason = row.reason or f"{row.screening_s / best_s:.2f}x the best rough time: not raced"
        return baselines[:1] + others + baselines[1:]

    def _raw_pair(self, rows: Sequence[Row]) -> list[Row]:
        """Return the fastest challenger and the fastest baseline that read the raw (unpacked) weight, which one of the
        two serves.

        Empty when ATen's is far ahead, or when both are far behind the best row.
        """
        raw = [row for row in rows if row.packing is None]
        challenger = next((row for row in raw if not row.is_baseline), None)
        baseline = next((row for row in raw if row.is_baseline), None)
        if challenger is None or baseline is None:
            return []
        return (
            [challenger, baseline]
            if challenger.screening_s <= min(CLOSE * baseline.screening_s, RAW_WITHIN * rows[0].screening_s)
            else []
        )

    def _race_seconds(self, rows: Sequence[Row]) -> float:
        """Return the seconds for the race: those that remain of the budget.

        Unless the budget is the user's, a race of slow calls gets more, since it could not decide anything otherwise.
        """
        if self._strict:
            return max(self._remaining_s(), 0.05 * self._seconds)
        slow_race_s = SLOW_TEST_CALLS * min(row.screening_s for row in rows)
        remaining_s = min(self._remaining_s(), self._profile.race_s or math.inf)
        return max(remaining_s, min(0.75 * self._seconds, slow_race_s), 0.05 * self._seconds)

    def _report_leading(self, leading: LeaderUpdate) -> None:
        self._progress(BestSoFar(leading.id, leading.median_s, leading.ratio))

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
                self._fail(row, evidence.verdict)
                continue
            row.stage = "screened" if evidence.stage == "untried" else evidence.stage
            row.reason, row.sample = evidence.reason, evidence.sample

    # The outcome

    def _decision(self, outcome: Outcome, chosen: str | None, stopped: str, raced: dict[str, str]) -> Decision:
        return Decision(
            problem_key=self._problem.key,
            problem=self._problem.to_dict(),
            target_key=self._target.key,
            outcome=outcome,
            chosen=chosen,
            evidence=self._ledger.evidence(),
            alternatives=self._ledger.alternatives(raced),
            stopped=stopped,
            seconds=time.perf_counter() - self._started,
            seed=self._seed,
            created=time.time(),
        )

    def _share_spent(self) -> float:
        """Return the share of the budget that is spent."""
        return (time.perf_counter() - self._started) / self._seconds

    def _elapsed_s(self) -> float:
        return self._share_spent() * self._seconds

    def _remaining_s(self) -> float:
        return max(0.0, 1.0 - self._share_spent()) * self._seconds


def first_builds(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the first BUILT_AHEAD candidates of each template that needs building.

    The search asks for all of them, a few at a time.
    """
    firsts: dict[tuple[str, str], list[Candidate]] = {}
    for candidate in candidates:
        if not is_prebuilt(backends.get(candidate.backend)):
            firsts.setdefault((candidate.backend, candidate.template), []).append(candidate)
    return [candidate for group in firsts.values() for candidate in group[:BUILT_AHEAD]]


def _within(rows: Sequence[Row], factor: float) -> list[Row]:
    """Return the rows within ``factor`` of the first; rows are sorted by screening time."""
    return [row for row in rows if row.screening_s <= factor * rows[0].screening_s]


def _best_of_each_packing_first(rows: Sequence[Row], layouts: Sequence[str] = ()) -> list[Row]:
    """Return ``rows`` with the best overall first, then the best of each packing (those in ``layouts`` first), then the
    rest.

    A Plan compares packings by raced times, so each packing needs an entrant.
    """
    best_rows = list({row.packing: row for row in reversed(rows)}.values())
    best_rows.sort(key=lambda row: (row is not rows[0], row.packing not in layouts, row.screening_s))
    best_ids = {row.id for row in best_rows}
    return best_rows + [row for row in rows if row.id not in best_ids]


def _grouped_by_packing(rows: Iterable[Row]) -> list[Row]:
    """Return ``rows`` with those of one packing next to each other, so that each layout is packed once."""
    groups: dict[str | None, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.packing, []).append(row)
    return [row for group in groups.values() for row in group]
