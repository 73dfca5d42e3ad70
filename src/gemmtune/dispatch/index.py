"""The store's decisions for one Target, by plan key. They are read once, and again after ``refresh``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from ..core.errors import StoreBusy
from ..core.problem import Problem, plan_key_of
from ..core.verdict import FAULTS
from .plan import Plan, nearest
from .portfolio import TunedPoint, build_plan, tuned_point, without_faulty

if TYPE_CHECKING:
    from ..core.target import Target
    from ..store.base import Store


class DecisionIndex:
    """Tuned points by plan key, and the Plans built from them so far."""

    def __init__(self, points: Mapping[str, list[TunedPoint]], failures: Mapping[str, Collection[str]]) -> None:
        """points: by plan key. failures: ids of faulty candidates by plan key, besides those in the points."""
        self._failed = {
            key: frozenset(failures.get(key, ())).union(*(p.faulty for p in rows)) for key, rows in points.items()
        }
        self._failed |= {key: frozenset(ids) for key, ids in failures.items() if key not in points}
        self._points = {key: [without_faulty(p, self._failed[key]) for p in rows] for key, rows in points.items()}
        self._plans: dict[tuple[str, str | None], Plan | None] = {}

    @classmethod
    def read(cls, store: Store | None, target: Target, warn: Callable[[str], None]) -> DecisionIndex:
        """Return all decisions for ``target``. Damaged records and unreadable stores are misses, and are logged once.

        Raises StoreBusy where the store is read ``short_timeout`` while another process writes it.
        """
        points: dict[str, list[TunedPoint]] = {}
        failures: dict[str, set[str]] = {}
        try:
            for decision in () if store is None else store.decisions(target):
                try:
                    tuned = tuned_point(decision)
                except (KeyError, TypeError, ValueError) as error:
                    warn(f"a stored decision is malformed and is ignored ({error})")
                    continue
                points.setdefault(tuned.problem.plan_key, []).append(tuned)
            for problem_key, failed in ({} if store is None else store.all_failures(target)).items():
                faulty = {candidate_id for candidate_id, verdict in failed.items() if verdict.kind in FAULTS}
                failures.setdefault(plan_key_of(problem_key), set()).update(faulty)
        except StoreBusy:
            raise
        except Exception as error:  # a Store from outside may raise anything: it is a miss
            warn(f"the store cannot be read ({error}); PyTorch's own kernels serve")
        return cls(points, failures)

    def plan(self, plan_key: str, packing: str | None) -> Plan | None:
        """Return the Plan for a weight in ``packing`` (None: raw), or None when nothing was tuned for it."""
        key = (plan_key, packing)
        if key not in self._plans:
            points = self._points.get(plan_key)
            self._plans[key] = build_plan(points, packing) if points else None
        return self._plans[key]

    def failed(self, plan_key: str) -> frozenset[str]:
        """Return the ids of candidates that were wrong, unstable, crashed or hung at any M of a Plan."""
        return self._failed.get(plan_key, frozenset())

    def points(self, plan_key: str) -> list[TunedPoint]:
        """Return the decisions that a Plan is made of, one for each tuned M."""
        return list(self._points.get(plan_key, ()))

    def has_near(self, problem: Problem, factor: int) -> bool:
        """Whether an M within ``factor`` of the Problem's was tuned."""
        sizes = tuple(sorted(p.m for p in self._points.get(problem.plan_key, ())))
        if not sizes:
            return False
        m, size = max(1, problem.m), sizes[nearest(sizes, max(1, problem.m))]
        return max(m, size) <= factor * max(1, min(m, size))
