"""``MemoryStore``: a store in memory, for tests and for machines on which no file can be written."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from pathlib import Path

from ..core.decision import Decision, Verdict
from ..core.target import Target
from ..core.tuned_plan import TunedPlan
from .base import Report, Store, retained_keys, warn
from .exchange import read_export
from .lease import Lease, check_ttl, remaining_s
from .legality import legal_only
from .schema import decode_decision, decode_plan, encode_decision, encode_plan


class MemoryStore(Store):
    """A store whose records end with the process. Otherwise it behaves like SqliteStore. Threads may share it.

    Records are kept encoded. Artifacts that backends build for its decisions go to the default store's directory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._targets: dict[str, Target] = {}
        self._rows: dict[tuple[str, str], tuple[float, int, bytes]] = {}
        self._plans: dict[tuple[str, str], tuple[float, int, bytes]] = {}
        self._failures: dict[tuple[str, str], dict[str, Verdict]] = {}
        self._leases: dict[tuple[str, str], tuple[object, float]] = {}
        self._serial = 0

    def get(self, target: Target, problem_key: str) -> Decision | None:
        row = self._rows.get((target.key, problem_key))
        return None if row is None else decode_decision(row[2], target.key, problem_key)

    def put(self, target: Target, decision: Decision) -> None:
        self._put_all([(target, decision)])

    def get_plan(self, target: Target, plan_key: str) -> TunedPlan | None:
        row = self._plans.get((target.key, plan_key))
        return None if row is None else decode_plan(row[2], target.key, plan_key)

    def put_plan(self, target: Target, plan: TunedPlan) -> None:
        self._put_all([], [(target, plan)])

    def remove_plan(self, target: Target, plan_key: str) -> None:
        with self._lock:
            self._plans.pop((target.key, plan_key), None)

    def _put_all(
        self, decisions: list[tuple[Target, Decision]], plans: list[tuple[Target, TunedPlan]] | None = None
    ) -> None:
        rows = []
        for target, decision in decisions:
            require_owner(target, decision)
            rows.append((self._rows, target, decision.problem_key, decision.created, encode_decision(decision)))
        for target, plan in plans or ():
            require_owner(target, plan)
            rows.append((self._plans, target, plan.plan_key, plan.created, encode_plan(plan)))
        with self._lock:
            for table, target, key, created, body in rows:
                self._serial += 1
                self._targets[target.key] = target
                table[target.key, key] = (created or time.time(), self._serial, body)

    def decisions(self, target: Target | None = None) -> Iterator[Decision]:
        for body, *keys in self._newest_first(self._rows, target):
            yield decode_decision(body, *keys)

    def plans(self, target: Target | None = None) -> Iterator[TunedPlan]:
        for body, *keys in self._newest_first(self._plans, target):
            yield decode_plan(body, *keys)

    def _newest_first(
        self, table: dict[tuple[str, str], tuple[float, int, bytes]], target: Target | None
    ) -> list[tuple[bytes, str, str]]:
        """Return the body and the two keys of each record of a target, or of all targets."""
        with self._lock:
            chosen = [(row, key) for key, row in table.items() if target is None or key[0] == target.key]
        return [(row[2], *key) for row, key in sorted(chosen, reverse=True)]

    def targets(self) -> list[Target]:
        with self._lock:
            used = {key for key, _ in (*self._rows, *self._plans)}
            return [self._targets[key] for key in sorted(used)]

    def remember_failure(self, target: Target, problem_key: str, candidate_id: str, verdict: Verdict) -> None:
        with self._lock:
            self._failures.setdefault((target.key, problem_key), {})[candidate_id] = verdict

    def failures(self, target: Target, problem_key: str) -> dict[str, Verdict]:
        with self._lock:
            return dict(self._failures.get((target.key, problem_key), {}))

    def all_failures(self, target: Target) -> dict[str, dict[str, Verdict]]:
        with self._lock:
            return {key: dict(rows) for (owner, key), rows in self._failures.items() if owner == target.key}

    def lease(self, target: Target, problem_key: str, ttl_s: float) -> Lease | None:
        check_ttl(ttl_s)
        key, token = (target.key, problem_key), object()
        with self._lock:
            if self.lease_remaining_s(target, problem_key) is not None:
                return None
            self._leases[key] = (token, time.monotonic() + ttl_s)
        return Lease(ttl_s, lambda: self._renew(key, token, ttl_s), lambda: self._release(key, token))

    def _renew(self, key: tuple[str, str], token: object, ttl_s: float) -> bool:
        with self._lock:
            lease = self._leases.get(key)
            if lease is None or lease[0] is not token:
                return False
            self._leases[key] = (token, time.monotonic() + ttl_s)
            return True

    def _release(self, key: tuple[str, str], token: object) -> None:
        with self._lock:
            if key in self._leases and self._leases[key][0] is token:
                del self._leases[key]

    def lease_remaining_s(self, target: Target, problem_key: str) -> float | None:
        lease = self._leases.get((target.key, problem_key))
        return None if lease is None else remaining_s(lease[1], time.monotonic())

    def import_(self, path: Path, report: Report = warn) -> int:
        content = read_export(path)
        decisions = legal_only(content.decisions, report)
        self._put_all(decisions, legal_only(content.plans, report))
        return len(decisions)

    def prune(self, *, keep: Target | Collection[Target] | None = None, older_than_s: float | None = None) -> int:
        oldest = float("-inf") if older_than_s is None else time.time() - older_than_s
        retained = retained_keys(keep)
        with self._lock:
            before = len(self._rows)
            for table in (self._rows, self._plans):
                for key, row in list(table.items()):
                    if (retained and key[0] not in retained) or row[0] < oldest:
                        del table[key]
            if retained:
                self._failures = {key: rows for key, rows in self._failures.items() if key[0] in retained}
            return before - len(self._rows)

    def verify(self, unchecked: Report | None = None) -> list[str]:
        return self._illegal_lines(unchecked)

    def close(self) -> None:
        """Do nothing: there is no connection, and the records stay in memory as long as the store."""


def require_owner(target: Target, record: Decision | TunedPlan) -> None:
    """Raise ValueError unless the decision or plan was made for this target."""
    if record.target_key != target.key:
        kind, key = ("plan", record.plan_key) if isinstance(record, TunedPlan) else ("decision", record.problem_key)
        raise ValueError(
            f"the {kind} for {key} was made for target {record.target_key}, not {target.key}; "
            f"a {kind} is valid only for the machine and versions it was measured on"
        )
