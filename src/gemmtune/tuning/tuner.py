"""Problem -> Decision: the one place that ties search, measuring and the store together.

One problem goes through explore (guided search: each candidate built, checked on one draw, timed roughly), confirm
(the promising ones checked on every draw) and race (the confirmed against ATen, under sound statistics).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from ..core.decision import Decision
from ..core.errors import StoreError, WorkerError
from ..core.events import ProblemDone, ProblemStarted, Progress, silent
from ..core.problem import Problem, plan_key_of
from ..core.target import Target
from ..dispatch.portfolio import TunedPoint, layouts_in_use, tuned_point
from ..store.base import Store
from ..timing.clock import Latency
from ..workers.builds import Builders
from ..workers.worker import Hands, Limits, LocalWorker, Worker, WorkerStartError
from .candidates import INCUMBENT, enumerate_candidates
from .trial import Trial, first_builds

log = logging.getLogger("gemmtune")

LEASE_S = 30.0  # renewed every third of it: what a process elsewhere that died can hold others up
AHEAD = 2  # problems whose builds begin while one is tuned
LOOK_S = 0.25  # how often a waiting tuner looks whether the other has decided


@dataclass(frozen=True, slots=True)
class Budget:
    """What one problem may cost: seconds of wall time (starting a worker not counted), and candidates tried.

    seconds: kept within 10%. None: 6 (3 on a GPU), and more for problems whose single calls are slow.
    """

    seconds: float | None = None
    candidates: int | None = None

    def __post_init__(self) -> None:
        seconds = self.seconds
        if seconds is not None and not (isinstance(seconds, int | float) and 0.0 < seconds < float("inf")):
            raise ValueError(f"a budget's seconds must be a positive number or None; got {seconds!r}")
        if self.candidates is not None and (not isinstance(self.candidates, int) or self.candidates < 1):
            raise ValueError(f"a budget's candidates must be a positive int or None; got {self.candidates!r}")


class Tuner:
    """Tunes problems for one Target, through one Store.

    backend_names: whose candidates to try; ATen's always are. isolate: work in a worker process (False: in this one,
    for debugging; a candidate that crashes takes the process along). force: tune even what the store knows (failures
    remembered in the store stay failures). progress: called with the events of ``core/events.py``. wait: for the
    decision of another process that is tuning the same problem (False: leave the problem out; never two at once). hot:
    race on operands that are in the cache, where serving finds them in memory unless a model is tiny. latency: what a
    GPU's calls are timed as, in a CUDA graph (``graph``) or launched one by one (``eager``), as they will be served;
    CPUs know no difference. Raises ValueError for another latency.
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
    ) -> None:
        if latency not in get_args(Latency):
            raise ValueError(f"latency must be one of {', '.join(get_args(Latency))}; got {latency!r}")
        self._target, self._store, self._progress = target, store, progress
        self._names = tuple(dict.fromkeys((INCUMBENT, *backend_names)))
        self._budget = budget or Budget()
        self._isolate, self._force, self._seed, self._limits = isolate, force, seed, limits
        self._wait, self._hot, self._latency = wait, hot, latency
        self._plans = _PlanPoints((), target, store)
        self.unkept: list[Decision] = []  # decisions that the store did not take, and why not
        self.trouble = ""

    def tune(self, problems: Iterable[tuple[Problem, int]]) -> list[Decision]:
        """Decide every problem; the decisions come in the order of first mention, duplicates merged.

        The int is a call count: what costs most overall (count x flops) is tuned first, so that an interrupted run has
        decided what matters most. Each decision is in the store before the next problem starts; KeyboardInterrupt ends
        the worker, gives the lease back and passes through. What a disturbed machine left inconclusive is not stored;
        unless the budget is the user's, it is tuned once more when all else is done. Raises WorkerStartError when no
        worker can be started, ValueError for an unknown backend.
        """
        weights: dict[Problem, int] = {}
        for problem, count in problems:
            weights[problem] = weights.get(problem, 0) + count
        known = {} if self._force else self._look_up(weights)
        order = sorted(weights, key=lambda problem: (problem not in known, -weights[problem] * problem.flops))
        decisions: dict[Problem, Decision] = {}
        with closing(self._new_crew()) as crew:
            crew.to_come = [problem for problem in order if problem not in known]
            self._plans = _PlanPoints(crew.to_come, self._target, self._store)
            for index, problem in enumerate(order):
                decision = self._decide(problem, known.get(problem), index, len(order), crew)
                if decision is not None:
                    decisions[problem] = decision
                    self._plans.add(decision)
            self._decide_again(decisions, crew)
        return [decisions[problem] for problem in weights if problem in decisions]

    def _new_crew(self) -> _Crew:
        return _Crew(self._target, self._isolate, self._limits, self._latency, self._store.artifacts_directory)

    def _look_up(self, problems: Iterable[Problem]) -> dict[Problem, Decision]:
        found = ((problem, self._store.get(self._target, problem.key)) for problem in problems)
        return {problem: decision for problem, decision in found if decision is not None}

    def _decide(self, problem: Problem, known: Decision | None, index: int, total: int, crew: _Crew) -> Decision | None:
        """The decision, by whomever; None when another process is at it and this one does not wait."""
        self._progress(ProblemStarted(index, total, problem, cached=known is not None))
        start = time.perf_counter()
        decision = known or self._tune_alone(problem, crew)
        if decision is None:
            return None
        if known is None:
            crew.spent.append(time.perf_counter() - start)
        each = sum(crew.spent) / len(crew.spent) if crew.spent else None
        left = total - index - 1
        self._progress(ProblemDone(index, total, decision, 0.0 if left == 0 else None if each is None else each * left))
        return decision

    def _decide_again(self, decisions: dict[Problem, Decision], crew: _Crew) -> None:
        """Tune what is inconclusive once more, in another moment, unless the user has said what a problem may cost."""
        if self._budget.seconds is not None:
            return
        crew.to_come = [problem for problem, decision in decisions.items() if decision.outcome == "inconclusive"]
        for index, problem in enumerate(crew.to_come):
            again = self._decide(problem, None, index, len(crew.to_come), crew)
            decisions[problem] = again or decisions[problem]

    def _tune_alone(self, problem: Problem, crew: _Crew) -> Decision | None:
        """Tune under the problem's lease: of many processes that want it one tunes, the others have its decision."""
        lease, told = self._lease(problem), False
        while lease is None:
            if not self._wait:
                return None
            if not told:
                log.info("another process is tuning %s: waiting for its decision", problem.key)
                told = True
            time.sleep(LOOK_S)
            lease = self._lease(problem)
        with lease:
            # The former holder's decision may be newer than the first look.
            known = None if self._force else self._store.get(self._target, problem.key)
            return known or self._tune_one(problem, crew)

    def _lease(self, problem: Problem) -> AbstractContextManager[object] | None:
        """None while another holds it. A store that cannot be written has no leases to give, and tuning needs none."""
        try:
            return self._store.lease(self._target, problem.key, LEASE_S)
        except StoreError as error:
            log.debug("tuning without a lease: %s", error)
            return nullcontext()

    def _tune_one(self, problem: Problem, crew: _Crew) -> Decision:
        hands = crew.hands()
        build = crew.builders if self._isolate else None
        ahead = crew.builders.ahead if self._builds_overlap() else None
        trial = Trial(
            problem, self._target, self._names, self._store, hands, self._progress, self._seed,
            build=build, build_ahead=ahead, hot=self._hot, layouts=self._plans.layouts(problem),
        )  # fmt: skip
        self._build_ahead(problem, crew)
        hands.wait()
        try:
            decision = trial.run(self._budget.seconds, self._budget.candidates)
        except WorkerStartError:
            raise
        except WorkerError as error:  # this problem cannot be worked on here, which says nothing of the others
            return trial.give_up(str(error))
        self._keep(decision)
        return decision

    def _builds_overlap(self) -> bool:
        """Whether builds do not disturb what is timed meanwhile: a GPU, by its own clock."""
        return self._isolate and self._target.device != "cpu" and self._latency == "graph"

    def _build_ahead(self, problem: Problem, crew: _Crew) -> None:
        """Begin with what the problems after this one will want built."""
        if not self._builds_overlap():
            return
        after = crew.to_come.index(problem) + 1
        for later in crew.to_come[after : after + AHEAD]:
            if later not in crew.built_for:
                crew.built_for.add(later)
                candidates, _ = enumerate_candidates(later, self._target, self._names)
                crew.builders.ahead(later, first_builds(candidates), self._target)

    def _keep(self, decision: Decision) -> None:
        """Store a decision, after those that the store did not take before. Those that it does not take now stay in
        ``unkept``; the first is said in the log."""
        if decision.outcome == "inconclusive":
            return
        self.unkept.append(decision)
        try:
            while self.unkept:
                self._store.put(self._target, self.unkept[0])
                del self.unkept[0]
        except StoreError as error:
            if not self.trouble:
                log.warning("decisions of this run are not kept: %s", error)
            self.trouble = str(error)


class _PlanPoints:
    """What is decided for the Plans of ``problems``, in the store at first and then in the course of tuning."""

    def __init__(self, problems: Iterable[Problem], target: Target, store: Store) -> None:
        self._points: dict[str, dict[str, TunedPoint]] = {problem.plan_key: {} for problem in problems}
        try:
            for decision in store.decisions(target) if self._points else ():
                self.add(decision)
        except StoreError as error:
            log.debug("the decisions for other M are not read: %s", error)

    def add(self, decision: Decision) -> None:
        """Take a Decision into account if one of the Plans is made of it."""
        points = self._points.get(plan_key_of(decision.problem_key))
        if points is not None and decision.outcome != "inconclusive":
            try:
                points[decision.problem_key] = tuned_point(decision)
            except (KeyError, TypeError, ValueError) as error:  # dispatch does not serve such a record either
                log.debug("the decision for %s is not read: %s", decision.problem_key, error)

    def layouts(self, problem: Problem) -> list[str]:
        """Return the packed layouts that the weight of ``problem`` has kernels in at other M, the fastest first."""
        points = self._points.get(problem.plan_key, {})
        return layouts_in_use([found for key, found in points.items() if key != problem.key])


def busy_words(decisions: Sequence[Decision]) -> str:
    """One line on the decisions that are inconclusive; empty when none is."""
    count, total = sum(decision.outcome == "inconclusive" for decision in decisions), len(decisions)
    if not count:
        return ""
    return (
        f"the machine was busy: {count} of {total} problems are inconclusive and not stored; PyTorch serves them until "
        "they are tuned again"
    )


class _Crew:
    """The worker, started at the first problem that needs one, builders, and the seconds that problems have taken.

    artifacts: the directory for what is built. to_come: all problems that the store does not know, in order; built_for:
    those whose builds were begun early.
    """

    def __init__(
        self, target: Target, isolate: bool, limits: Limits | None, latency: Latency, artifacts: Path | None = None
    ) -> None:
        self._target, self._isolate, self._limits, self._latency = target, isolate, limits, latency
        self._artifacts = artifacts
        self._hands: Hands | None = None
        self.builders = Builders(artifacts=artifacts)
        self.spent: list[float] = []
        self.to_come: list[Problem] = []
        self.built_for: set[Problem] = set()

    def hands(self) -> Hands:
        if self._hands is None:
            self._hands = (
                Worker(self._target, limits=self._limits, latency=self._latency, artifacts=self._artifacts)
                if self._isolate
                else LocalWorker(self._target, latency=self._latency, artifacts=self._artifacts)
            )
            self._hands.start()
        return self._hands

    def close(self) -> None:
        self.builders.close()
        if self._hands is not None:
            self._hands.close()
