"""``Store``: the interface of stores of decisions and plans. A store holds data, never code."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import StoreError
from ..core.printable import visible
from ..core.problem import plan_keys_of
from ..core.target import Target
from .exchange import write_export
from .legality import review

log = logging.getLogger("gemmtune")
Report = Callable[[str], None]
SHORT_TIMEOUT_S = 0.03  # seconds that dispatch's reads wait for a writer

if TYPE_CHECKING:
    from ..core.decision import Decision, Verdict
    from ..core.tuned_plan import TunedPlan
    from .lease import Lease


def retained_keys(keep: Target | Collection[Target] | None) -> tuple[str, ...]:
    """Return the keys of the Targets whose records ``prune`` retains; empty when it retains all of them."""
    if keep is None:
        return ()
    return (keep.key,) if isinstance(keep, Target) else tuple(target.key for target in keep)


def warn(line: str) -> None:
    """Log one line as a warning of the ``gemmtune`` logger, with unprintable characters escaped.

    The line may contain names from an untrusted store or export.
    """
    log.warning("%s", visible(line))


_STORES: weakref.WeakSet[Store] = weakref.WeakSet()


class Store(ABC):
    """Decisions, plans and failures of candidates by Target, with one transaction per record.

    A store without plans need not define ``get_plan``, ``put_plan``, ``remove_plan`` and ``plans``.

    Readers treat a damaged record as a miss and warn once; writers raise StoreError.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.damage: list[str] = []  # damaged records that reads treated as misses so far, one line each
        _STORES.add(self)

    def check(self) -> None:
        """Raise StoreError, with a description of the file, when the store's path has a file that is no readable store.

        Readers only warn and continue without the store. A command that was asked for this particular store calls this
        method first.
        """
        return

    def check_writable(self) -> None:
        """Write a record and delete it again. Raises StoreError when the store cannot be written."""
        return

    def short_timeout(self) -> AbstractContextManager[None]:
        """Return a context manager that shortens the time for which this thread's reads wait for a writer.

        Inside it a read waits some tens of milliseconds at most and then raises StoreBusy. Outside it a read waits for
        seconds and then reports a miss.
        """
        return nullcontext()

    @property
    def artifacts_directory(self) -> Path | None:
        """The directory for artifacts that backends build for this store's decisions; None: the default store's."""
        return None

    @abstractmethod
    def get(self, target: Target, problem_key: str) -> Decision | None:
        """Return the decision for a problem on exactly this target; None when there is none."""

    @abstractmethod
    def put(self, target: Target, decision: Decision) -> None:
        """Store one decision, replacing a former one. The decision is durable when this method returns."""

    @abstractmethod
    def decisions(self, target: Target | None = None) -> Iterator[Decision]:
        """Yield the decisions of one target, or of all targets, newest first."""

    @abstractmethod
    def targets(self) -> list[Target]:
        """Return all targets that have a decision or a plan."""

    def get_plan(self, target: Target, plan_key: str) -> TunedPlan | None:
        """Return the plan for a weight on exactly this target; None when there is none.

        This default implementation returns None.
        """
        return None

    def put_plan(self, target: Target, plan: TunedPlan) -> None:
        """Store one plan, replacing a former one. The plan is durable when this method returns.

        Raises ValueError when the plan fails a check or was made for another target, and StoreError when the store
        cannot be written. This default implementation always raises StoreError.
        """
        raise StoreError(f"{type(self).__name__} keeps no plans")

    def remove_plan(self, target: Target, plan_key: str) -> None:
        """Remove the plan for a weight, if there is one; its decisions stay.

        Raises StoreError when the store cannot be written. This default implementation always raises StoreError.
        """
        raise StoreError(f"{type(self).__name__} removes no plans")

    def plans(self, target: Target | None = None) -> Iterator[TunedPlan]:
        """Yield the plans of one target, or of all targets, newest first.

        This default implementation yields none.
        """
        return iter(())

    @abstractmethod
    def remember_failure(self, target: Target, problem_key: str, candidate_id: str, verdict: Verdict) -> None:
        """Store the Verdict of a candidate that crashed, hung or was wrong, so that tuning on this target skips it."""

    @abstractmethod
    def failures(self, target: Target, problem_key: str) -> dict[str, Verdict]:
        """Return the stored failures of a problem by candidate id.

        ``problem_key`` may be a plan key, under which the faults that apply to every M are stored.
        """

    def all_failures(self, target: Target) -> dict[str, dict[str, Verdict]]:
        """Return a target's stored failures by problem key or plan key, then by candidate id.

        This default implementation only covers the problems that have a decision, and their plan keys.
        """
        keys = {decision.problem_key for decision in self.decisions(target)}
        keys |= {plan_key for key in keys for plan_key in plan_keys_of(key)}
        return {key: failures for key in sorted(keys) if (failures := self.failures(target, key))}

    @abstractmethod
    def lease(self, target: Target, problem_key: str, ttl_s: float) -> Lease | None:
        """Acquire the exclusive right to tune a problem for ``ttl_s`` seconds (at most an hour).

        Returns None while another owner has the lease. An owner loses its lease when it dies or when the time has run
        out. Raises StoreError when the store cannot be written.
        """

    @abstractmethod
    def lease_remaining_s(self, target: Target, problem_key: str) -> float | None:
        """Return the seconds until the current lease on a problem runs out; None when there is no lease."""

    def export(self, path: Path, target: Target | None = None) -> int:
        """Write decisions and plans to one readable, versioned JSON file. Returns the number of decisions."""
        owners = self.targets() if target is None else [target]
        decisions = ((owner, row) for owner in owners for row in self.decisions(owner))
        return write_export(path, decisions, ((owner, plan) for owner in owners for plan in self.plans(owner)))

    @abstractmethod
    def import_(self, path: Path, report: Report = warn) -> int:
        """Validate an exported file completely, then store its decisions and plans in one step.

        Returns the number of decisions that were stored. Nothing is stored when the file is invalid. Decisions and
        plans that would serve a kernel which is not legal for their Problem and Target are skipped; ``report`` is
        called with one line for each.
        """

    @abstractmethod
    def prune(self, *, keep: Target | Collection[Target] | None = None, older_than_s: float | None = None) -> int:
        """Delete the decisions and plans of targets other than ``keep``, and those older than an age.

        Returns the number of decisions that were deleted; plans are not counted.

        keep: None retains the records of all targets. older_than_s: age in seconds; None: no limit.
        """

    @abstractmethod
    def verify(self, unchecked: Report | None = None) -> list[str]:
        """Return one line for each damaged record, and for each kernel that would be served but is not legal.

        The list is empty when the store is sound. ``unchecked`` is called with one line for each kernel whose legality
        this installation cannot determine; dispatch checks such a kernel on the machine where it serves.
        """

    def _illegal_lines(self, unchecked: Report | None) -> list[str]:
        """Return one line for each kernel that an undamaged Decision or plan would serve although it is not legal."""
        lines: list[str] = []
        for target in self.targets():
            records: Iterator[Decision | TunedPlan] = chain(self.decisions(target), self.plans(target))
            for record in records:
                findings = review(target, record)
                lines += findings.illegal
                for line in findings.unchecked if unchecked is not None else ():
                    unchecked(line)  # type: ignore[misc]
        return lines

    @abstractmethod
    def close(self) -> None:
        """Close open connections. Idempotent."""


def _after_fork() -> None:
    """Give every store of a forked child a new lock: the thread that owned the lock may not exist in the child."""
    for store in list(_STORES):
        store._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
