"""The store's decisions for one Target, by plan key. They are read once, and again after ``refresh``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..core.errors import StoreBusy
from ..core.problem import Problem, plan_keys_of
from ..core.verdict import FAULTS
from .forms import Forms, choose_forms, rank_by_plan, rank_by_points
from .plan import Plan, nearest
from .plan_layouts import rank_layouts_of_plan
from .portfolio import TunedPoint, build_plan, rank_packings, tuned_point, without_faulty

if TYPE_CHECKING:
    from ..core.target import Target
    from ..core.tuned_plan import TunedPlan
    from ..store.base import Store


class DecisionIndex:
    """Tuned points by plan key, and the Plans built from them so far."""

    def __init__(
        self,
        points: Mapping[str, list[TunedPoint]],
        failures: Mapping[str, Collection[str]],
        tuned: Mapping[str, TunedPlan] = MappingProxyType({}),
    ) -> None:
        """points, tuned: by plan key. failures: ids of faulty candidates by plan key, besides those in the points."""
        self._failed = {
            key: frozenset(failures.get(key, ())).union(*(p.faulty for p in rows)) for key, rows in points.items()
        }
        self._failed |= {key: frozenset(ids) for key, ids in failures.items() if key not in points}
        self._points = {key: [without_faulty(p, self._failed[key]) for p in rows] for key, rows in points.items()}
        self._tuned = dict(tuned)
        self._plans: dict[tuple[str, str | None], Plan | None] = {}
        self._forms: dict[tuple[str, str], Forms] = {}
        self._layouts: dict[tuple[str, bool], list[str | None]] = {}
        self._digest: str | None = None

    @classmethod
    def read(cls, store: Store | None, target: Target, warn: Callable[[str], None]) -> DecisionIndex:
        """Return all decisions for ``target``. Damaged records and unreadable stores are misses, and are logged once.

        Raises StoreBusy where the store is read ``short_timeout`` while another process writes it.
        """
        points: dict[str, list[TunedPoint]] = {}
        failures: dict[str, set[str]] = {}
        plans: dict[str, TunedPlan] = {}
        try:
            for decision in () if store is None else store.decisions(target):
                try:
                    tuned = tuned_point(decision)
                except (KeyError, TypeError, ValueError) as error:
                    warn(f"a stored decision is malformed and is ignored ({error})")
                    continue
                points.setdefault(tuned.problem.plan_key, []).append(tuned)
                if tuned.problem.is_batched:  # a plan over the batch does not serve them either
                    failures.setdefault(tuned.problem.plan_key_over("batch"), set()).update(tuned.faulty)
            for problem_key, failed in ({} if store is None else store.all_failures(target)).items():
                faulty = {candidate_id for candidate_id, verdict in failed.items() if verdict.kind in FAULTS}
                for plan_key in plan_keys_of(problem_key):
                    failures.setdefault(plan_key, set()).update(faulty)
            plans = {} if store is None else {plan.plan_key: plan for plan in store.plans(target)}
        except StoreBusy:
            raise
        except Exception as error:  # a Store from outside may raise anything: it is a miss
            warn(f"the store cannot be read ({error}); PyTorch's own kernels serve")
        return cls(points, failures, plans)

    def plan(self, plan_key: str, packing: str | None) -> Plan | None:
        """Return the Plan for a weight in ``packing`` (None: raw), or None when nothing was tuned for it."""
        key = (plan_key, packing)
        if key not in self._plans:
            points, tuned = self._points.get(plan_key, []), self._tuned.get(plan_key)
            self._plans[key] = build_plan(points, packing, tuned, self.failed(plan_key)) if points or tuned else None
        return self._plans[key]

    def raw_plan(self, problem: Problem) -> tuple[Plan | None, Problem]:
        """Return the Plan that serves a raw weight, and the Problem for which it was tuned.

        A batched product is served by the Plan over its batch where the Plan over M does not know its M. A weight that
        is not constant and has no Plan is served by the kernels that were tuned for a constant one and take it raw
        (beside dense activations, as constant Problems have them).
        """
        plan = self._raw_plan(problem)
        if plan is not None or problem.b.constant or problem.a.layout.key != "r":
            return plan, problem
        constant = replace(problem, b=replace(problem.b, constant=True))
        return self._raw_plan(constant), constant

    def _raw_plan(self, problem: Problem) -> Plan | None:
        """Return the Plan over M; that over the batch where it covers the batch, and the Plan over M not M."""
        plan = self.plan(problem.plan_key, None)
        if problem.is_batched and (plan is None or not plan.covers(problem.m)):
            over_batch = self.plan(problem.plan_key_over("batch"), None)
            if over_batch is not None and over_batch.covers(problem.batch):
                return over_batch
        return plan

    def tuned_plan(self, plan_key: str) -> TunedPlan | None:
        """Return the plan for a range of M; None when the weight was tuned at single M only."""
        return self._tuned.get(plan_key)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was tuned on the Target."""
        return not (self._points or self._tuned)

    def knows(self, plan_key: str) -> bool:
        """Whether the weight was tuned, for a range of M or for single M."""
        return bool(self._points.get(plan_key)) or plan_key in self._tuned

    def layouts(
        self, plan_key: str, counts: Mapping[int, float] | None = None, *, raw_kernels: bool = True
    ) -> list[str | None]:
        """Return the layouts that beat the raw weight, the best first, then None, which is the raw weight.

        Those of the plan for a range of M, if there is one; else by the decisions at the M in ``counts`` (calls by M),
        or at all M. raw_kernels: as for ``portfolio.rank_packings``.
        """
        tuned = self._tuned.get(plan_key)
        if tuned is None:
            return rank_packings(self._points_at(plan_key, counts), counts, raw_kernels=raw_kernels)
        key = (plan_key, raw_kernels)
        if key not in self._layouts:  # compiled graphs ask at every new M
            self._layouts[key] = rank_layouts_of_plan(tuned, self.failed(plan_key), raw_kernels=raw_kernels)
        return list(self._layouts[key])

    def _points_at(self, plan_key: str, counts: Mapping[int, float] | None) -> list[TunedPoint]:
        """Return the decisions at the M in ``counts``; all of them where there is none."""
        points = self._points.get(plan_key, [])
        return points if counts is None else [p for p in points if p.m in counts] or points

    def forms(self, plan_key: str, packing: str) -> Forms:
        """Return which form serves each M of a weight that is kept raw and packed."""
        key = (plan_key, packing)
        if key not in self._forms:
            points, tuned = self._points.get(plan_key, []), self._tuned.get(plan_key)
            self._forms[key] = choose_forms(packing, points, tuned, self.failed(plan_key))
        return self._forms[key]

    def layouts_beside_raw(
        self, plan_key: str, counts: Mapping[int, float] | None = None, *, raw_kernels: bool = True
    ) -> list[str]:
        """Return the layouts for which it pays to keep the raw weight too, the best first. Arguments as for
        ``layouts``."""
        tuned, forms = self._tuned.get(plan_key), partial(self.forms, plan_key)
        if tuned is not None:
            return rank_by_plan(tuned, forms, self.failed(plan_key), raw_kernels=raw_kernels)
        return rank_by_points(self._points_at(plan_key, counts), forms, counts, raw_kernels=raw_kernels)

    def failed(self, plan_key: str) -> frozenset[str]:
        """Return the ids of candidates that were wrong, unstable, crashed or hung at any M of a Plan."""
        return self._failed.get(plan_key, frozenset())

    def digest(self) -> str:
        """Return a digest of all decisions: it changes when what serves some Problem may change."""
        if self._digest is None:
            lines = [f"{key}|{p.m}|{p.outcome}|{p.options}" for key, rows in self._points.items() for p in rows]
            lines += [f"{key}|{sorted(failed)}" for key, failed in self._failed.items()]
            lines += [f"{key}|{plan.intervals}|{plan.created}" for key, plan in self._tuned.items()]
            self._digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
        return self._digest

    def points(self, plan_key: str) -> list[TunedPoint]:
        """Return the decisions that a Plan is made of, one for each tuned M."""
        return list(self._points.get(plan_key, ()))

    def covers(self, plan_key: str, m: int) -> bool:
        """Whether the M was tuned, or a range of M that contains it."""
        tuned = self._tuned.get(plan_key)
        in_range = tuned is not None and tuned.first <= m <= tuned.last
        return in_range or any(point.m == m for point in self._points.get(plan_key, ()))

    def has_near(self, problem: Problem, factor: int) -> bool:
        """Whether an M within ``factor`` of the Problem's was tuned, or a range of M, or of the batch, with the
        Problem's."""
        for dim in problem.dims:
            tuned = self._tuned.get(problem.plan_key_over(dim))
            if tuned is not None and tuned.first <= problem.size(dim) <= tuned.last:
                return True
        sizes = tuple(sorted(p.m for p in self._points.get(problem.plan_key, ())))
        if not sizes:
            return False
        m, size = max(1, problem.m), sizes[nearest(sizes, max(1, problem.m))]
        return max(m, size) <= factor * max(1, min(m, size))
