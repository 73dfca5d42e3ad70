"""The tuner: Problems in, Decisions out. Only this package combines search, measurement and the store.

One Problem passes through three phases: explore (guided search: each candidate is built, checked on one test case and
given a screening time), confirm (the promising candidates are checked on every test case) and race (the confirmed
candidates against ATen, under sound statistics).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import get_args

from ..core import devices
from ..core.decision import Decision
from ..core.errors import StoreError, WorkerError
from ..core.events import DecisionsUnstored, EventsInOrder, ProblemDone, ProblemStarted, Progress, silent
from ..core.problem import Problem, plan_keys_of
from ..core.target import Target
from ..dispatch.portfolio import TunedPoint, layouts_in_use, tuned_point
from ..store.base import Store
from ..timing.clock import Latency
from ..verify.inputs import operand_bytes
from ..workers.contract import OPERAND_MULTIPLE, Limits, WorkerStartError
from .candidates import BASELINE_BACKEND, enumerate_candidates
from .exploration import BUILT_AHEAD, BUILT_AHEAD_OVERLAPPING, first_builds
from .search import get as get_search
from .session import TuningSession
from .turns import Pause, Steps, run_in_turns
from .worker_pool import WorkerPool

log = logging.getLogger("gemmtune")

# seconds; renewed every third of it. A process on another machine that died can block others for this long
LEASE_S = 30.0
# The number of later problems whose first builds begin while one problem is tuned. With three, and more of them known
# beforehand, the seven problems of a decoder with int8 weights at batch 64 waited 2.0 s for builds, with one 3.5 s
# (H200, 16 processors, compile-built-ahead-h200-20261130.txt).
BUILT_AHEAD_PROBLEMS = 3
IN_PROGRESS = 2  # problems at a time: one is tuned while the other waits for builds
POLL_S = 0.25  # seconds between two looks of a waiting tuner at whether the other process has decided


@dataclass(frozen=True, slots=True)
class Budget:
    """The cost limit of tuning one problem: seconds of wall time (starting a worker is not counted), and candidates
    tried.

    seconds: kept within 10%. None: ``default_s``, builds not counted, and more for problems whose single calls are
    slow. default_s: None: 6 (3 on a GPU); where it is given, more than 2 seconds of builds after the first ones are
    counted.
    """

    seconds: float | None = None
    candidates: int | None = None
    default_s: float | None = None

    def __post_init__(self) -> None:
        seconds = self.seconds
        if seconds is not None and not (isinstance(seconds, int | float) and 0.0 < seconds < float("inf")):
            raise ValueError(f"a budget's seconds must be a positive number or None; got {seconds!r}")
        if self.candidates is not None and (not isinstance(self.candidates, int) or self.candidates < 1):
            raise ValueError(f"a budget's candidates must be a positive int or None; got {self.candidates!r}")


class Tuner:
    """A tuner of problems for one Target, through one Store.

    backend_names: the backends whose candidates are tried; ATen is always added. isolate: work in a worker process
    (False: in this process, for debugging; a candidate that crashes takes the process along). force: tune even problems
    that the store has decisions for (failures remembered in the store stay failures). progress: called with the events
    of ``core/events.py``. wait: wait for the decision of another process that is tuning the same problem (False: leave
    the problem out; two processes never tune one problem at once). hot: race on operands that are in the cache,
    although serving finds them in memory unless a model is tiny. latency: how a GPU's calls are timed, as they will be
    served: in a CUDA graph (``graph``) or launched one by one (``eager``); CPUs have no such difference. search:
    the name of a search strategy (``search.py``). Raises ValueError for another latency or an unknown search.
    """

    def __init__(
        self,
        target: Target,
        backend_names: Sequence[str],
        store: Store,
        budget: Budget | None = None,
        progress: Progress = silent,
        *,
        isolate: bool = True,
        force: bool = False,
        wait: bool = True,
        hot: bool = False,
        seed: int = 0,
        limits: Limits | None = None,
        latency: Latency = "graph",
        search: str = "local",
    ) -> None:
        if latency not in get_args(Latency):
            raise ValueError(f"latency must be one of {', '.join(get_args(Latency))}; got {latency!r}")
        self._target, self._store, self._progress = target, store, progress
        self._names = tuple(dict.fromkeys((BASELINE_BACKEND, *backend_names)))
        self._budget = budget or Budget()
        self._isolate, self._force, self._seed, self._limits = isolate, force, seed, limits
        self._wait, self._hot, self._latency = wait, hot, latency
        self._search = get_search(search)
        self._plans = _PlanPoints((), target, store)
        self._unstored: list[Decision] = []
        self._share = 1.0

    def tune(
        self, problems: Iterable[tuple[Problem, int]], pool: WorkerPool | None = None, *, share: float = 1.0
    ) -> list[Decision]:
        """Return a Decision for every problem, in the order of first mention, with duplicates merged.

        The int is a call count: the problems with the largest total cost (count x flops) are tuned first, so that an
        interrupted run has decided those that matter most. Each Decision is in the store as soon as there is
        one. KeyboardInterrupt ends the worker, releases the lease and is raised again. A Decision that a disturbed
        machine left inconclusive is not stored; unless the budget is the user's, its problem is tuned once more after
        all others. pool: the worker to use, from ``new_pool``; None starts one and ends it. share: of the budget's
        ``default_s``, where it is given, that each problem has.

        Raises WorkerStartError when no worker can be started, ValueError for an unknown backend.
        """
        self._share = share
        weights: dict[Problem, int] = {}
        for problem, count in problems:
            weights[problem] = weights.get(problem, 0) + count
        stored = {} if self._force else self._stored_decisions(weights)
        order = sorted(weights, key=lambda problem: (problem not in stored, -weights[problem] * problem.flops))
        decisions: dict[Problem, Decision] = {}
        with closing(self.new_pool()) if pool is None else nullcontext(pool) as pool:
            pool.pending = [problem for problem in order if problem not in stored]
            self._plans = _PlanPoints(pool.pending, self._target, self._store)
            with closing(self._decide(order, stored, pool)) as decided:
                for problem, decision in decided:
                    decisions[problem] = decision
                    self._plans.add(decision)
            self._retune_inconclusive(decisions, pool)
        return [decisions[problem] for problem in weights if problem in decisions]

    def new_pool(self) -> WorkerPool:
        """Return a worker that several calls of ``tune`` can use. The caller closes it."""
        return WorkerPool(self._target, self._isolate, self._limits, self._latency, self._store.artifacts_directory)

    def _stored_decisions(self, problems: Iterable[Problem]) -> dict[Problem, Decision]:
        records = ((problem, self._store.get(self._target, problem.key)) for problem in problems)
        return {problem: decision for problem, decision in records if decision is not None}

    def _decide(
        self, problems: Sequence[Problem], stored: Mapping[Problem, Decision], pool: WorkerPool
    ) -> Generator[tuple[Problem, Decision], None, None]:
        """Yield each problem with the decision of the store, of this process or of another one, as soon as there is
        one: none where another process is tuning the problem and this tuner does not wait.

        The next problem is begun while one waits for builds, where ``_may_begin`` says so.
        """
        events, total = EventsInOrder(self._progress), len(problems)

        def begin(index: int) -> Steps[Decision | None]:
            problem, progress = problems[index], events.of(index)
            progress(ProblemStarted(index, total, problem, cached=problem in stored))
            decision = stored.get(problem)
            return decision or (yield from self._tune_under_lease(problem, pool, progress))

        def may_begin(index: int, others: Sequence[int]) -> bool:
            return self._may_begin(problems[index], [problems[other] for other in others])

        for ended in run_in_turns([functools.partial(begin, index) for index in range(total)], may_begin):
            problem, decision = problems[ended.index], ended.result
            if decision is not None:
                if problem not in stored:
                    pool.durations_s.append(ended.seconds)
                remaining_s = pool.expected_s(total - ended.index - 1)
                events.of(ended.index)(ProblemDone(ended.index, total, decision, remaining_s))
            events.end(ended.index)
            if decision is not None:
                yield problem, decision

    def _may_begin(self, problem: Problem, others: Sequence[Problem]) -> bool:
        """Whether a problem may be begun while others, which are in progress, wait for builds.

        Only where builds disturb no timing, no time of a user's budget passes meanwhile, and the device has the memory
        that the worker may use for all. Not for problems of one Plan: the layouts that are tried first are those of the
        kernels at other M.
        """
        if len(others) >= IN_PROGRESS or self._budget.seconds is not None or not self._builds_overlap():
            return False
        if any(problem.plan_key == other.plan_key for other in others):
            return False
        kind, wanted = devices.get(self._target.device), sum(map(operand_bytes, (problem, *others)))
        return OPERAND_MULTIPLE * wanted <= kind.free_bytes(self._target.torch_device)

    def _retune_inconclusive(self, decisions: dict[Problem, Decision], pool: WorkerPool) -> None:
        """Tune each inconclusive problem once more, at another moment, unless the user has set a problem's budget in
        seconds."""
        if self._budget.seconds is not None:
            return
        pool.pending = [problem for problem, decision in decisions.items() if decision.outcome == "inconclusive"]
        with closing(self._decide(pool.pending, {}, pool)) as decided:
            decisions.update(decided)

    def _tune_under_lease(self, problem: Problem, pool: WorkerPool, progress: Progress) -> Steps[Decision | None]:
        """Tune while holding the problem's lease: one of several processes tunes, and the others read its decision.

        None when another process holds the lease and this tuner does not wait.
        """
        lease, logged = self._lease(problem), False
        while lease is None:
            if not self._wait:
                return None
            if not logged:
                log.info("another process is tuning %s: waiting for its decision", problem.key)
                logged = True
            yield Pause(seconds=POLL_S)
            lease = self._lease(problem)
        with lease:
            # The previous holder may have stored a decision since the first look-up.
            stored = None if self._force else self._store.get(self._target, problem.key)
            return stored or (yield from self._tune_one(problem, pool, progress))

    def _lease(self, problem: Problem) -> AbstractContextManager[object] | None:
        """Return the problem's lease; None while another process holds it.

        A store that cannot be written to grants no leases, and tuning goes on without one.
        """
        try:
            return self._store.lease(self._target, problem.key, LEASE_S)
        except StoreError as error:
            log.debug("tuning without a lease: %s", error)
            return nullcontext()

    def _tune_one(self, problem: Problem, pool: WorkerPool, progress: Progress) -> Steps[Decision]:
        worker = pool.worker()
        build = pool.builders.begin if self._isolate else None
        ahead = pool.builders.ahead if self._builds_overlap() else None
        session = TuningSession(
            problem, self._target, self._names, self._store, worker, progress, self._seed,
            build=build, build_ahead=ahead, hot=self._hot, layouts=self._plans.layouts(problem),
            search=self._search,
        )  # fmt: skip
        self._build_ahead(problem, pool)
        worker.wait()
        default_s = None if self._budget.default_s is None else self._share * self._budget.default_s
        try:
            decision = yield from session.steps(self._budget.seconds, self._budget.candidates, default_s)
        except WorkerStartError:
            raise
        except WorkerError as error:  # the worker cannot open this problem; others may still be tuned
            return session.none_valid_decision(str(error))
        self._store_decision(decision, progress)
        return decision

    def _builds_overlap(self) -> bool:
        """Whether builds may run beside timing without disturbing it: where the device's own clock times graphs."""
        profile = devices.get(self._target.device).profile
        return self._isolate and profile.builds_overlap and self._latency == "graph"

    def _build_ahead(self, problem: Problem, pool: WorkerPool) -> None:
        """Begin the first builds of ``problem``, for which the worker may still be starting, and of those after it."""
        self.begin_builds(problem, pool, later=False)
        upcoming = [*pool.pending[pool.pending.index(problem) + 1 :], *pool.expected]
        for item in upcoming[:BUILT_AHEAD_PROBLEMS]:
            self.begin_builds(item, pool)

    def begin_builds(self, problem: Problem, pool: WorkerPool, *, later: bool = True) -> None:
        """Begin the first builds of a problem, where they disturb no timing and did not begin before. later: whether
        another problem is tuned first, so that its builds go first."""
        if self._builds_overlap() and problem not in pool.built_early:
            pool.built_early.add(problem)
            candidates, _ = enumerate_candidates(problem, self._target, self._names)
            count = BUILT_AHEAD if later else BUILT_AHEAD_OVERLAPPING
            first = first_builds(problem, candidates, self._target, count)
            pool.builders.ahead(problem, first, self._target, later=later)

    def _store_decision(self, decision: Decision, progress: Progress) -> None:
        """Store a decision, after the earlier ones that the store could not take.

        Decisions that cannot be stored now stay in ``_unstored``; the first failure is logged as a warning.
        """
        if decision.outcome == "inconclusive":
            return
        failed_before, reason = len(self._unstored), ""
        self._unstored.append(decision)
        try:
            while self._unstored:
                self._store.put(self._target, self._unstored[0])
                del self._unstored[0]
        except StoreError as error:
            reason = str(error)
            if not failed_before:
                log.warning("decisions of this run are not kept: %s", error)
        if failed_before or reason:
            progress(DecisionsUnstored(self._target.key, len(self._unstored), reason))


class _PlanPoints:
    """The tuned points of the Plans that ``problems`` belong to: first those in the store, then those that tuning
    adds."""

    def __init__(self, problems: Iterable[Problem], target: Target, store: Store) -> None:
        self._points: dict[str, dict[str, TunedPoint]] = {problem.plan_key: {} for problem in problems}
        try:
            for decision in store.decisions(target) if self._points else ():
                self.add(decision)
        except StoreError as error:
            log.debug("the decisions for other M are not read: %s", error)

    def add(self, decision: Decision) -> None:
        """Add the Decision if it belongs to one of the Plans."""
        points = self._points.get(plan_keys_of(decision.problem_key)[0])
        if points is not None and decision.outcome != "inconclusive":
            try:
                points[decision.problem_key] = tuned_point(decision)
            except (KeyError, TypeError, ValueError) as error:  # dispatch does not serve an unreadable record either
                log.debug("the decision for %s is not read: %s", decision.problem_key, error)

    def layouts(self, problem: Problem) -> list[str]:
        """Return the packed layouts in which the weight of ``problem`` has kernels at other M, the fastest first."""
        points = self._points.get(problem.plan_key, {})
        return layouts_in_use([point for key, point in points.items() if key != problem.key])


def inconclusive_summary(decisions: Sequence[Decision]) -> str:
    """Return one line on the inconclusive decisions; empty when none is inconclusive."""
    count, total = sum(decision.outcome == "inconclusive" for decision in decisions), len(decisions)
    if not count:
        return ""
    return (
        f"the machine was busy: {count} of {total} problems are inconclusive and not stored; PyTorch serves them until "
        "they are tuned again"
    )
