"""``MemoryStore``: a store in memory, for tests and for machines on which no file can be written."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from pathlib import Path

from ..core.decision import Decision, Verdict
from ..core.target import Target
from .base import Report, Store, retained_keys, warn
from .exchange import read_export, write_export
from .lease import Lease, check_ttl, remaining_s
from .legality import legal_only
from .schema import decode_decision, encode_decision


class MemoryStore(Store):
    """A store whose records end with the process. Otherwise it behaves like SqliteStore. Threads may share it.

    Records are kept encoded. Artifacts that backends build for its decisions go to the default store's directory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._targets: dict[str, Target] = {}
        self._rows: dict[tuple[str, str], tuple[float, int, bytes]] = {}
        self._failures: dict[tuple[str, str], dict[str, Verdict]] = {}
        self._leases: dict[tuple[str, str], tuple[object, float]] = {}
        self._serial = 0

    def get(self, target: Target, problem_key: str) -> Decision | None:
        row = self._rows.get((target.key, problem_key))
        return None if row is None else decode_decision(row[2], target.key, problem_key)

    def put(self, target: Target, decision: Decision) -> None:
        self._put_all([(target, decision)])

    def _put_all(self, pairs: list[tuple[Target, Decision]]) -> None:
        rows = []
        for target, decision in pairs:
            require_owner(target, decision)
            rows.append((target, decision, encode_decision(decision)))
        with self._lock:
            for target, decision, body in rows:
                self._serial += 1
                self._targets[target.key] = target
                key = (target.key, decision.problem_key)
                self._rows[key] = (decision.created or time.time(), self._serial, body)

    def decisions(self, target: Target | None = None) -> Iterator[Decision]:
        with self._lock:
            chosen = [(row, key) for key, row in self._rows.items() if target is None or key[0] == target.key]
        for row, key in sorted(chosen, reverse=True):
            yield decode_decision(row[2], *key)

    def targets(self) -> list[Target]:
        with self._lock:
            used = {key for key, _ in self._rows}
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

    def export(self, path: Path, target: Target | None = None) -> int:
        owners = self.targets() if target is None else [target]
        return write_export(path, ((owner, row) for owner in owners for row in self.decisions(owner)))

    def import_(self, path: Path, report: Report = warn) -> int:
        pairs = legal_only(read_export(path), report)
        self._put_all(pairs)
        return len(pairs)

    def prune(self, *, keep: Target | Collection[Target] | None = None, older_than_s: float | None = None) -> int:
        oldest = float("-inf") if older_than_s is None else time.time() - older_than_s
        retained = retained_keys(keep)
        with self._lock:
            doomed = [
                key for key, row in self._rows.items() if (retained and key[0] not in retained) or row[0] < oldest
            ]
            for key in doomed:
                del self._rows[key]
            if retained:
                self._failures = {key: rows for key, rows in self._failures.items() if key[0] in retained}
        return len(doomed)

    def verify(self, unchecked: Report | None = None) -> list[str]:
        return self._illegal_lines(unchecked)

    def close(self) -> None:
        """Do nothing: there is no connection, and the records stay in memory as long as the store."""


def require_owner(target: Target, decision: Decision) -> None:
    """Raise ValueError unless the decision was made for this target."""
    if decision.target_key != target.key:
        raise ValueError(
            f"the decision for {decision.problem_key} was made for target {decision.target_key}, not {target.key}; "
            "a decision is valid only for the machine and versions it was measured on"
        )
