"""Tuning weights as functions of M: Decisions at a few M by the tuner, then a TunedPlan for each weight."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard, TypeVar

from ..core import devices
from ..core.decision import Decision
from ..core.errors import StoreError, WorkerError
from ..core.events import PlanDone, Progress, silent
from ..core.problem import Dim, Problem
from ..core.target import Target
from ..core.tuned_plan import TunedPlan
from ..store.base import Store
from ..workers.contract import WorkerStartError
from .config_keys import ConfigKey, keyed
from .keyed_plan import KeyedSession
from .plan_session import PlanSession
from .predicted_kernels import expected_kernels, list_ahead, short_turns
from .sizes import SizeRange, Sizes, parse_sizes
from .tuner import LEASE_S, POLL_S, Tuner
from .weight_session import WeightSession
from .worker_pool import WorkerPool

MAX_RECORDED = 6  # recorded M that are tuned by themselves; the others are served by the intervals
_LEAST_SWEEP = 0.25  # the least share of the default time for other M that a range of few M has
# The least share of a Decision's time that is left where those before took long, as the first of a process does, for
# which a worker starts. With whole Decisions a weight of 30 or so took more than 25 s on 16 cores, 25.8 and 26.2 (fp8
# 8192x1024 and bfloat16 4096x4096, H200; every-m-20261129-062005.json, -014126). With halves, and 0.3 of the time for
# other M at least, int8 weights 8192x1024 took 25.6 to 26.2 s as the first weight on four hosts of five (-125030 to
# -164706), and 24.3 s since (-164955).
_LEAST_OF_DECISION = 0.4
_FEW_ROWS = 32  # a call with fewer rows takes about as long as one with so many: it reads the weight

log = logging.getLogger("gemmtune")

Session = TypeVar("Session", bound=WeightSession)


@dataclass
class Weight:
    """A weight to tune: one of its Problems, and the recorded calls by M. dim: the dimension whose sizes are called
    M."""

    problem: Problem
    counts: dict[int, int] = field(default_factory=dict)
    dim: Dim = "m"

    @property
    def cost(self) -> int:
        """The FLOPs of the recorded calls: weights that cost most are tuned first."""
        return sum(count * self.at(m).flops for m, count in self.counts.items())

    @property
    def plan_key(self) -> str:
        """The key of the weight's plan."""
        return self.problem.plan_key_over(self.dim)

    def at(self, m: int) -> Problem:
        """Return the Problem at another M."""
        return self.problem.with_size(self.dim, m)


def weights_of(problems: Iterable[tuple[Problem, int]], dim: Dim = "m") -> list[Weight]:
    """Return the weights of counted Problems: Problems that differ in M only (with the dim "batch": in the batch) share
    one. Empty Problems are left out."""
    weights: dict[str, Weight] = {}
    for problem, count in problems:
        if not problem.is_empty:
            counts = weights.setdefault(problem.plan_key_over(dim), Weight(problem, dim=dim)).counts
            counts[problem.size(dim)] = counts.get(problem.size(dim), 0) + count
    return sorted(weights.values(), key=lambda weight: -weight.cost)


class PlanTuner:
    """A tuner of weights for one Target, through a Tuner that tunes single M.

    tuner: makes the Decisions, and the worker. seconds: for timing a weight's kernels at other M; None: the device's
    default (``TuningProfile.sweep_s``), less for a part of the default range. force: tune weights that the store has a
    plan for. progress, hot, seed: as for the Tuner. config_key: as for ``gemmtune.tune``. dim:
    "batch" for plans of batched products over their batch: what is called M here is then the batch.
    """

    def __init__(
        self,
        tuner: Tuner,
        target: Target,
        store: Store,
        *,
        seconds: float | None = None,
        force: bool = False,
        hot: bool = False,
        seed: int = 0,
        progress: Progress = silent,
        config_key: ConfigKey | None = None,
        dim: Dim = "m",
    ) -> None:
        self._config_key, self._dim = config_key, dim
        self._tuner, self._target, self._store = tuner, target, store
        self._profile = devices.get(target.device).profile
        self._seconds = seconds
        self._following: list[tuple[Weight, SizeRange]] = []  # the weights after the one that is tuned
        self._force, self._hot, self._seed, self._progress = force, hot, seed, progress

    def tune(
        self, problems: Iterable[tuple[Problem, int]], m: Sizes, pool: WorkerPool | None = None
    ) -> tuple[list[Decision], list[TunedPlan]]:
        """Tune the weights of counted Problems for the M that ``m`` names. Return the Decisions at single M and the
        plans.

        A weight whose stored plan covers the range keeps it. Otherwise, and with ``force``, its plan is replaced by one
        that covers both ranges; one with another ``config_key`` by one of this range. A weight has no plan if no kernel
        is right, if the machine was too disturbed at all M, or with the ``config_key`` "exact". Each plan is stored
        before the next weight begins. pool: the worker to use, from ``Tuner.new_pool``; None starts one and ends it.
        Raises what ``Tuner.tune``, ``parse_sizes`` and ``keyed`` raise.
        """
        weights = weights_of(problems, self._dim)
        parsed = [parse_sizes(m, self._profile, _costliest(weight), weight.problem, self._dim) for weight in weights]
        ranges = [keyed(sizes, self._config_key) for sizes in parsed]
        decisions: list[Decision] = []
        plans: list[TunedPlan] = []
        with contextlib.closing(self._tuner.new_pool()) if pool is None else contextlib.nullcontext(pool) as pool:
            self._following = list(zip(weights, ranges, strict=True))
            while self._following:
                weight, sizes = self._following.pop(0)
                weight_decisions, plan = self._tune_weight(weight, sizes, pool)
                decisions += weight_decisions
                plans += [plan] if plan is not None else []
                self._progress(PlanDone(weight.plan_key, plan, len(self._following)))
        return decisions, plans

    def _tune_weight(
        self, weight: Weight, sizes: SizeRange, pool: WorkerPool
    ) -> tuple[list[Decision], TunedPlan | None]:
        if self._config_key == "exact":
            decisions = self._decide(weight, sizes.tuned, pool)
            self._remove_plan(weight.plan_key)
            return decisions, None
        stored = self._store.get_plan(self._target, weight.plan_key)
        if self._keeps(stored, sizes):
            return self._decide(weight, _decided_for(stored, sizes), pool), stored
        sizes = self._united(sizes, stored)
        started = time.perf_counter()
        decisions = self._decide_and_build(weight, sizes, pool)
        decided_s = time.perf_counter() - started
        return decisions, self._plan_under_lease(weight, sizes, decisions, decided_s, pool)

    def _decide_and_build(self, weight: Weight, sizes: SizeRange, pool: WorkerPool) -> list[Decision]:
        """Return the Decisions at the tuned M, made from the largest M on. While the last two of them are made, the
        kernels that those before make the plan try are built."""
        if not self._profile.max_predicted or sizes.runs:
            return self._decide(weight, sizes.tuned, pool)
        decisions: list[Decision] = []
        started = time.perf_counter()
        pool.start()  # before the builders are forked from the same process
        self._list_ahead(weight, sizes, pool)  # while the worker starts
        for index in reversed(range(len(sizes.tuned))):
            # The builds of one more M: those that the search asks for must not wait for many others.
            for m in reversed(sizes.tuned[max(0, index - 1) : index + 1]):
                self._tuner.begin_builds(weight.at(m), pool, later=m != sizes.tuned[index])
            with self._building_ahead(weight, sizes, decisions, pool) if index < 2 else contextlib.nullcontext():
                share = self._share_of_time(len(sizes.tuned), index + 1, time.perf_counter() - started)
                decisions = decisions + self._decide(weight, sizes.tuned[index : index + 1], pool, share)
        return decisions

    def _share_of_time(self, count: int, left: int, spent_s: float) -> float:
        """Return the share of the usual time for each of the ``left`` M of ``count`` that are still to be tuned: what
        the others took beyond ``slow_m_s`` each shortens it."""
        late_s = max(0.0, spent_s - (count - left) * self._profile.slow_m_s)
        usual_s = left * (self._profile.tuned_m_s or self._profile.default_s)
        return max(_LEAST_OF_DECISION, 1.0 - late_s / usual_s)

    def _keeps(self, stored: TunedPlan | None, sizes: SizeRange) -> TypeGuard[TunedPlan]:
        """Whether a weight's stored plan is kept, rather than replaced by one for a range."""
        return stored is not None and _covers(stored, sizes) and not self._force

    def _list_ahead(self, weight: Weight, sizes: SizeRange, pool: WorkerPool) -> None:
        """Begin to list the candidates that a weight's plan may try, unless they were listed, on a thread, which delays
        this one: to be called when the worker will be busy."""
        if self._builds_ahead(pool):
            arguments = (weight.problem, self._target, sizes)
            threading.Thread(target=list_ahead, args=arguments, name="gemmtune-list", daemon=True).start()

    def _prepare_following(self, pool: WorkerPool) -> None:
        """Begin the first builds of the weight after the one that is tuned, and list its candidates: while a weight's
        kernels are timed at other M, nothing else is built."""
        if not self._following or not self._builds_ahead(pool):
            return
        weight, sizes = self._following[0]
        if self._keeps(self._store.get_plan(self._target, weight.plan_key), sizes):
            return
        for m in reversed(sizes.tuned):  # about the order in which they are decided, and built
            self._tuner.begin_builds(weight.at(m), pool)
        self._list_ahead(weight, sizes, pool)

    @contextlib.contextmanager
    def _building_ahead(
        self, weight: Weight, sizes: SizeRange, decisions: Sequence[Decision], pool: WorkerPool
    ) -> Iterator[None]:
        """Return a context in which builds begin of the kernels that the Decisions so far make the plan try.

        Choosing them took 0.5 s, in which the worker would be idle (int8 weights 4096x4096, beside an H200).
        """
        arguments = (weight, sizes, decisions, pool)
        thread = threading.Thread(target=self._build_ahead, args=arguments, name="gemmtune-choose", daemon=True)
        thread.start()
        try:
            yield
        finally:
            thread.join()  # it must begin no build after the pool is closed

    def _build_ahead(self, weight: Weight, sizes: SizeRange, decisions: Sequence[Decision], pool: WorkerPool) -> None:
        """Begin to build the kernels that the Decisions so far make the plan try at other M: between their M, and at
        smaller ones when only the least is left. Never raises: the plan's own choice raises a backend's error."""
        usable = _usable(decisions)
        if not usable or not self._builds_ahead(pool):
            return
        is_last = len(decisions) >= len(sizes.tuned) - 1
        least = 1 if is_last else min(int(decision.problem[self._dim]) for decision in usable)
        with contextlib.suppress(Exception), short_turns():
            counts = recorded(weight.counts)
            for kernel in expected_kernels(weight.problem, self._target, usable, sizes, counts):
                if kernel.tuned_m >= least:
                    problem = weight.at(kernel.tuned_m)
                    pool.builders.ahead(problem, [kernel.candidate], self._target, later=True)

    def _builds_ahead(self, pool: WorkerPool) -> bool:
        """Whether kernels are built while an M is decided."""
        return self._profile.builds_overlap and pool.begin_builds is not None

    def _decide(self, weight: Weight, sizes: Sequence[int], pool: WorkerPool, share: float = 1.0) -> list[Decision]:
        """Return the Decisions of a weight at some M. share: as for ``Tuner.tune``."""
        problems = [(weight.at(m), weight.counts.get(m, 1)) for m in sizes]
        return self._tuner.tune(problems, pool, share=share) if problems else []

    def _plan_under_lease(
        self, weight: Weight, sizes: SizeRange, decisions: list[Decision], decided_s: float, pool: WorkerPool
    ) -> TunedPlan | None:
        """Make the plan while no other process makes one for the same weight; that of another process is used if it
        covers the range. decided_s: the seconds that the Decisions took."""
        key = weight.plan_key
        try:
            while (lease := self._store.lease(self._target, key, LEASE_S)) is None:
                time.sleep(POLL_S)
        except StoreError as error:
            log.debug("tuning without a lease: %s", error)
            return self._make_plan(weight, sizes, decisions, decided_s, pool)
        with lease:
            stored = self._store.get_plan(self._target, key)
            if self._keeps(stored, sizes):
                return stored
            united = self._united(sizes, stored)
            # Another process may have made a plan meanwhile, from Decisions that this one has not read.
            others = [m for m in united.tuned if m not in sizes.tuned]
            return self._make_plan(weight, united, decisions + self._decide(weight, others, pool), decided_s, pool)

    def _make_plan(
        self, weight: Weight, sizes: SizeRange, decisions: list[Decision], decided_s: float, pool: WorkerPool
    ) -> TunedPlan | None:
        if not _usable(decisions):
            return None
        try:
            plan = self._run_session(weight, sizes, decisions, decided_s, pool)
        except WorkerStartError:
            raise
        except WorkerError as error:
            log.warning("no plan for %s: %s", weight.plan_key, error)
            return None
        if plan is not None:
            self._store_plan(plan)
        return plan

    def _run_session(
        self, weight: Weight, sizes: SizeRange, decisions: list[Decision], decided_s: float, pool: WorkerPool
    ) -> TunedPlan | None:
        """Return the plan that the Decisions and measurements make. Raises WorkerError."""
        if sizes.runs:
            conclusive = (decision for decision in decisions if decision.outcome != "inconclusive")
            decided = {int(decision.problem[self._dim]) for decision in conclusive}
            sizes = sizes._replace(tuned=tuple(m for m in sizes.tuned if m in decided))

        def session(kind: type[Session]) -> Session:
            return kind(
                weight.problem, self._target, self._store, pool.worker(), _usable(decisions), sizes, self._progress,
                self._seed, counts=recorded(weight.counts), hot=self._hot,
            )  # fmt: skip

        seconds = self._sweep_s(sizes, decided_s)
        if sizes.runs:
            return session(KeyedSession).run(seconds)
        self._prepare_following(pool)
        return session(PlanSession).run(seconds, pool.begin_builds)

    def _sweep_s(self, sizes: SizeRange, decided_s: float) -> float:
        """Return the seconds for timing kernels at other M of a range: by default those for all M, times the share of
        them that is in the range by the logarithm, and less where the Decisions took long (``decided_s``)."""
        if self._seconds is not None:
            return self._seconds
        share = math.log(1 + sizes.last) - math.log(sizes.first)
        last = self._profile.last_m if self._dim == "m" else self._profile.last_batch
        seconds = self._profile.sweep_s * max(_LEAST_SWEEP, min(1.0, share / math.log(1 + last)))
        late_s = max(0.0, decided_s - len(sizes.tuned) * self._profile.slow_m_s)
        return max(seconds - late_s, min(seconds, self._profile.least_sweep_s))

    def _united(self, sizes: SizeRange, plan: TunedPlan | None) -> SizeRange:
        """Return the range that contains ``sizes`` and the plan's, with the tuned M of both; ``sizes`` for a plan with
        another ``config_key``. Raises what ``keyed`` raises."""
        if plan is None or plan.config_key != sizes.config_key:
            return sizes
        tuned = {*sizes.tuned, *plan.tuned}
        both = SizeRange(min(sizes.first, plan.first), max(sizes.last, plan.last), tuple(sorted(tuned)), dim=sizes.dim)
        return keyed(both, self._config_key)

    def _remove_plan(self, plan_key: str) -> None:
        if self._store.get_plan(self._target, plan_key) is None:
            return
        try:
            self._store.remove_plan(self._target, plan_key)
        except StoreError as error:
            log.warning("the plan for %s is not removed, and goes on serving: %s", plan_key, error)

    def _store_plan(self, plan: TunedPlan) -> None:
        try:
            self._store.put_plan(self._target, plan)
        except StoreError as error:
            log.warning("the plan for %s is not kept: %s", plan.plan_key, error)


def _usable(decisions: Iterable[Decision]) -> list[Decision]:
    """Return the Decisions that say which kernels are fast."""
    return [decision for decision in decisions if decision.outcome not in ("inconclusive", "none_valid")]


def _costliest(weight: Weight) -> list[int]:
    """Return the recorded M that take most of the time, the largest share first, up to ``MAX_RECORDED``; the largest M
    is among them."""
    fewest = _FEW_ROWS if weight.dim == "m" else 1
    order = sorted(weight.counts, key=lambda m: -weight.counts[m] * max(m, fewest))
    return [max(order), *order[: MAX_RECORDED - 1]]


def recorded(counts: Mapping[int, int]) -> dict[int, int]:
    """Return the counts of recorded calls, empty for a single call of a single M: a Problem without counts."""
    return {} if list(counts.values()) == [1] else dict(counts)


def _covers(plan: TunedPlan, sizes: SizeRange) -> bool:
    """Whether a plan serves the whole range as one that is made now with the same ``config_key`` would."""
    if plan.config_key != sizes.config_key or not (plan.first <= sizes.first and sizes.last <= plan.last):
        return False
    if not sizes.runs:
        return True
    clipped = [
        (max(interval.first, sizes.first), min(interval.last, sizes.last))
        for interval in next(iter(plan.intervals.values()), ())
        if interval.first <= sizes.last and interval.last >= sizes.first
    ]
    # A part of the range may have other M that represent its keys.
    is_whole = (plan.first, plan.last) == (sizes.first, sizes.last)
    return clipped == [(run.first, run.last) for run in sizes.runs] and (
        not is_whole or set(sizes.tuned) <= set(plan.tuned)
    )


def _decided_for(plan: TunedPlan, sizes: SizeRange) -> Sequence[int]:
    """Return the M of the range whose Decisions belong to a plan that covers it."""
    return [m for m in plan.tuned if sizes.first <= m <= sizes.last] if sizes.runs else sizes.tuned
