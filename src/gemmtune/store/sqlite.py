"""``SqliteStore``: a store in one SQLite file, which many processes and threads can use at once.

It uses SQLite's rollback journal, not WAL: WAL had a reset bug up to 3.51.2 that could lose acknowledged data, and
decisions are written too rarely for WAL's speed to matter. ``synchronous=EXTRA`` also syncs the directory after the
journal is unlinked. Without that, a power cut can restore a committed transaction's journal, which undoes it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from ..core.artifacts import Artifacts
from ..core.decision import Decision, Verdict
from ..core.errors import StoreBusy, StoreError
from ..core.owner import Owner, this_process
from ..core.target import Target
from ..core.tuned_plan import TunedPlan
from .base import SHORT_TIMEOUT_S, Report, Store, retained_keys, warn
from .exchange import read_export
from .foreign import describe_file
from .lease import Lease, check_ttl, remaining_s
from .legality import legal_only
from .memory import require_owner
from .migrate import migrate, read_version, transaction
from .schema import (
    DAMAGE,
    SCHEMA_VERSION,
    DamagedRecord,
    check_decision,
    check_plan,
    decode_decision,
    decode_plan,
    decode_target,
    decode_verdict,
    digest,
    encode_decision,
    encode_plan,
    encode_target,
    encode_verdict,
)

# The errors that sqlite3 raises for a file. UnicodeError: its messages quote damaged names, which may not be text.
_FILE_ERRORS = (sqlite3.Error, OSError, UnicodeError)

# Free disk space that a search requires before it begins: more than a decision with all its evidence takes.
_PROBE_BYTES = 256 << 10
_MAX_DAMAGE_LINES = 100

_LEASE = "SELECT owner, expires FROM leases WHERE target_key = ? AND problem_key = ?"
_BODY = "SELECT digest, body FROM decisions WHERE target_key = ? AND problem_key = ?"
_PLAN_BODY = "SELECT digest, body FROM plans WHERE target_key = ? AND plan_key = ?"
_PLANS_SINCE = 3  # the schema version that introduced the table of plans


class SqliteStore(Store):
    """A store of decisions and plans in the SQLite file ``path``.

    The first write creates the file, and its directory with mode 0700. Reading never raises: a missing, locked, foreign
    or damaged file is a miss, with one warning through the ``gemmtune`` logger. Writing raises StoreError. timeout_s:
    seconds to wait for another process's write; reads within ``short_timeout`` raise StoreBusy after SHORT_TIMEOUT_S.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout_s: float = 10.0) -> None:
        self.path = Path(path).absolute()
        self._timeout_s = timeout_s
        super().__init__()
        self._connection: sqlite3.Connection | None = None
        self._opened_identity: tuple[int, int, int] | None = None
        self._version = 0
        self._warned = False
        self._busy_timeout_s = timeout_s  # the connection's current setting
        self._thread = threading.local()

    @property
    def artifacts_directory(self) -> Path:
        """The directory beside the file: ``store.artifacts`` for ``store.db``."""
        return Artifacts.beside(self.path).directory

    # Reading

    def get(self, target: Target, problem_key: str) -> Decision | None:
        for row in self._read(_BODY, (target.key, problem_key)):
            with self._skipping_damaged():
                return _decision(target.key, problem_key, *row)
        return None

    def decisions(self, target: Target | None = None) -> Iterator[Decision]:
        where, args = ("", ()) if target is None else (" WHERE target_key = ?", (target.key,))
        sql = f"SELECT target_key, problem_key FROM decisions{where} ORDER BY created DESC, rowid DESC"
        for keys in self._read(sql, args):  # keys first: one record in memory at a time
            for row in self._read(_BODY, keys):
                with self._skipping_damaged():
                    yield _decision(*keys, *row)

    def get_plan(self, target: Target, plan_key: str) -> TunedPlan | None:
        for row in self._read(_PLAN_BODY, (target.key, plan_key), since=_PLANS_SINCE):
            with self._skipping_damaged():
                return _plan(target.key, plan_key, *row)
        return None

    def plans(self, target: Target | None = None) -> Iterator[TunedPlan]:
        where, args = ("", ()) if target is None else (" WHERE target_key = ?", (target.key,))
        sql = f"SELECT target_key, plan_key FROM plans{where} ORDER BY created DESC, rowid DESC"
        for keys in self._read(sql, args, since=_PLANS_SINCE):
            for row in self._read(_PLAN_BODY, keys, since=_PLANS_SINCE):
                with self._skipping_damaged():
                    yield _plan(*keys, *row)

    def targets(self) -> list[Target]:
        targets = {}
        for table, since in (("decisions", 1), ("plans", _PLANS_SINCE)):
            sql = f"SELECT key, body FROM targets WHERE key IN (SELECT target_key FROM {table})"
            for key, body in self._read(sql, since=since):
                with self._skipping_damaged():
                    targets[key] = decode_target(_require_bytes(body), key)
        return [targets[key] for key in sorted(targets)]

    def failures(self, target: Target, problem_key: str) -> dict[str, Verdict]:
        failures = {}
        sql = "SELECT candidate_id, body FROM failures WHERE target_key = ? AND problem_key = ?"
        for candidate_id, body in self._read(sql, (target.key, problem_key)):
            with self._skipping_damaged():
                failures[candidate_id] = decode_verdict(_require_bytes(body))
        return failures

    def all_failures(self, target: Target) -> dict[str, dict[str, Verdict]]:
        failures: dict[str, dict[str, Verdict]] = {}
        sql = "SELECT problem_key, candidate_id, body FROM failures WHERE target_key = ?"
        for problem_key, candidate_id, body in self._read(sql, (target.key,)):
            with self._skipping_damaged():
                failures.setdefault(problem_key, {})[candidate_id] = decode_verdict(_require_bytes(body))
        return failures

    def check(self) -> None:
        with self._lock:
            try:
                connection = self._open(create=False)
                if connection is not None:
                    plans = ["plans"] if self._has_version(connection, _PLANS_SINCE) else []
                    for table in ("targets", "decisions", "failures", *plans):
                        connection.execute(f"SELECT * FROM {table} LIMIT 1").fetchall()
            except (*_FILE_ERRORS, StoreError) as error:
                self.close()
                raise StoreError(f"cannot read the store {self.path}: {self._explain(error)}") from error

    def _explain(self, error: Exception) -> str:
        """Return what is wrong with the file and how to repair it."""
        if _locked(error):
            return f"another process is writing it, for longer than {self._timeout_s:g} s; try again when that is done"
        if isinstance(error, sqlite3.DatabaseError):
            return f"it is {describe_file(self.path)} ({error}); move it away, or choose another with --store"
        return str(error)

    @contextlib.contextmanager
    def short_timeout(self) -> Iterator[None]:
        previous, self._thread.short = self._short_timeout, True
        try:
            yield
        finally:
            self._thread.short = previous

    @property
    def _short_timeout(self) -> bool:
        return getattr(self._thread, "short", False)

    def verify(self, unchecked: Report | None = None) -> list[str]:
        damage = self._damage()
        return damage + self._illegal_lines(unchecked)

    def _damage(self) -> list[str]:
        if not os.path.exists(self.path):
            return []
        try:
            with self._lock:
                connection = self._open(create=False)
                if connection is None:
                    return []
                rows = connection.execute("PRAGMA integrity_check").fetchall()
                damage = [f"{self.path}: {text}" for (text,) in rows if text != "ok"]
                has_plans = self._has_version(connection, _PLANS_SINCE)
                return damage + list(_damaged_records(connection, plans=has_plans))
        except (*_FILE_ERRORS, StoreError) as error:
            return [f"{self.path}: {error}"]

    # Writing

    def put(self, target: Target, decision: Decision) -> None:
        self._put_all([(target, decision)], [])

    def put_plan(self, target: Target, plan: TunedPlan) -> None:
        self._put_all([], [(target, plan)])

    def remove_plan(self, target: Target, plan_key: str) -> None:
        sql = "DELETE FROM plans WHERE target_key = ? AND plan_key = ?"
        self._write(lambda connection: connection.execute(sql, (target.key, plan_key)))

    def import_(self, path: Path, report: Report = warn) -> int:
        content = read_export(path)
        decisions = legal_only(content.decisions, report)
        self._put_all(decisions, legal_only(content.plans, report))
        return len(decisions)

    def _put_all(self, decisions: list[tuple[Target, Decision]], plans: list[tuple[Target, TunedPlan]]) -> None:
        owners: dict[str, bytes] = {}
        pairs: list[tuple[Target, Decision | TunedPlan]] = [*decisions, *plans]
        for target, record in pairs:
            require_owner(target, record)
            owners[target.key] = encode_target(target)
        decision_rows = [
            _row(row.target_key, row.problem_key, row.created, encode_decision(row)) for _, row in decisions
        ]
        plan_rows = [_row(plan.target_key, plan.plan_key, plan.created, encode_plan(plan)) for _, plan in plans]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany("INSERT OR REPLACE INTO targets VALUES (?, ?)", owners.items())
            for table, body_of, rows in (("decisions", _BODY, decision_rows), ("plans", _PLAN_BODY, plan_rows)):
                connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?, ?, ?)", rows)
                for target_key, key, _, *stored in rows:  # with a damaged B-tree SQLite may not find its own rows
                    if connection.execute(body_of, (target_key, key)).fetchone() != tuple(stored):
                        raise sqlite3.DatabaseError("what was written does not read back: the file is damaged")

        self._write(write)

    def check_writable(self) -> None:
        row = ("", secrets.token_hex(16), "-" * _PROBE_BYTES, "", 0.0)  # a lease without an owner that has expired
        self._write(lambda connection: connection.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?)", row))
        sql = "DELETE FROM leases WHERE target_key = '' AND expires = 0"
        self._write(lambda connection: connection.execute(sql))

    def remember_failure(self, target: Target, problem_key: str, candidate_id: str, verdict: Verdict) -> None:
        row = (target.key, problem_key, candidate_id, time.time(), encode_verdict(verdict))
        sql = "INSERT OR REPLACE INTO failures VALUES (?, ?, ?, ?, ?)"
        self._write(lambda connection: connection.execute(sql, row))

    def lease(self, target: Target, problem_key: str, ttl_s: float) -> Lease | None:
        check_ttl(ttl_s)
        if (
            self.lease_remaining_s(target, problem_key) is not None
        ):  # a read first, so as not to block others with a write
            return None
        keys, token = (target.key, problem_key), secrets.token_hex(16)

        def acquire(connection: sqlite3.Connection) -> bool:
            if any(_remaining_lease_s(*row) is not None for row in connection.execute(_LEASE, keys)):
                return False
            row = (*keys, this_process().text, token, time.time() + ttl_s)
            connection.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?)", row)
            return True

        def renew(connection: sqlite3.Connection) -> bool:
            sql = "UPDATE leases SET expires = ? WHERE target_key = ? AND problem_key = ? AND token = ?"
            return connection.execute(sql, (time.time() + ttl_s, *keys, token)).rowcount == 1

        def release(connection: sqlite3.Connection) -> None:
            connection.execute(
                "DELETE FROM leases WHERE target_key = ? AND problem_key = ? AND token = ?", (*keys, token)
            )

        if not self._write(acquire):
            return None
        return Lease(ttl_s, lambda: bool(self._write(renew)), lambda: self._write(release))

    def lease_remaining_s(self, target: Target, problem_key: str) -> float | None:
        for row in self._read(_LEASE, (target.key, problem_key), since=2):
            return _remaining_lease_s(*row)
        return None

    def prune(self, *, keep: Target | Collection[Target] | None = None, older_than_s: float | None = None) -> int:
        if not os.path.exists(self.path):
            return 0
        oldest = float("-inf") if older_than_s is None else time.time() - older_than_s
        retained = retained_keys(keep)

        def delete(connection: sqlite3.Connection) -> int:
            rule = "created < ?"
            if retained:
                rule += f" OR target_key NOT IN ({', '.join('?' * len(retained))})"
            connection.execute(f"DELETE FROM failures WHERE {rule}", (oldest, *retained))
            connection.execute(f"DELETE FROM plans WHERE {rule}", (oldest, *retained))
            deleted = connection.execute(f"DELETE FROM decisions WHERE {rule}", (oldest, *retained)).rowcount
            used = "SELECT target_key FROM decisions UNION SELECT target_key FROM plans"
            connection.execute(f"DELETE FROM targets WHERE key NOT IN ({used})")
            connection.execute("DELETE FROM leases WHERE expires < ?", (time.time(),))
            return deleted

        return int(self._write(delete))

    def close(self) -> None:
        with self._lock:
            if (
                self._connection is not None
                and self._opened_identity is not None
                and self._opened_identity[0] == os.getpid()
            ):
                self._connection.close()
            self._connection = self._opened_identity = None
            self._version = 0

    # The file

    def _read(self, sql: str, args: tuple[Any, ...] = (), since: int = 1) -> list[tuple[Any, ...]]:
        """Return the rows of a query.

        since: the schema version that introduced the table. Returns no rows when there is no store, or when its schema
        is older. Raises StoreBusy within ``short_timeout`` when a writer blocks the read.
        """
        if not self._lock.acquire(timeout=SHORT_TIMEOUT_S if self._short_timeout else -1):
            raise StoreBusy(f"the store {self.path} is being written")
        try:
            connection = self._open(create=False)
            if connection is None or not self._has_version(connection, since):
                return []
            return connection.execute(sql, args).fetchall()
        except (*_FILE_ERRORS, StoreError) as error:
            if self._short_timeout and _locked(error):
                raise StoreBusy(f"the store {self.path} is being written") from error
            self._warn(f"cannot read the store {self.path}: {error}; going on without it (`gemmtune store verify`)")
            self.close()
            return []
        finally:
            self._lock.release()

    def _write(self, action: Callable[[sqlite3.Connection], Any]) -> Any:
        with self._lock:
            try:
                connection = self._open(create=True)
                assert connection is not None  # create=True gives one or raises
                with transaction(connection):
                    return action(connection)
            except _FILE_ERRORS as error:
                self.close()
                raise StoreError(
                    f"cannot write the store {self.path}: {error}; free or repair it, or choose another "
                    "with --store or GEMMTUNE_STORE"
                ) from error

    def _open(self, *, create: bool) -> sqlite3.Connection | None:
        """Return the connection to the current file; None when there is no file and ``create`` is false.

        The file is opened again in a forked child (SQLite connections must not cross a fork) and when the file was
        replaced (writes to an unlinked file would lose acknowledged data). Only a writer migrates the schema; a reader
        reads an old schema unchanged.
        """
        identity = self._identity()
        if self._connection is None or self._opened_identity != identity:
            self.close()
            if identity is None:
                if not create:
                    return None
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._busy_timeout_s = self._timeout_s if create or not self._short_timeout else SHORT_TIMEOUT_S
            self._connection = _connect(self.path, self._busy_timeout_s, create)
            try:
                self._connection.execute("PRAGMA synchronous = EXTRA")
                self._connection.execute("PRAGMA trusted_schema = OFF")  # a foreign schema must not run functions
                with transaction(self._connection, "DEFERRED"):
                    self._version = read_version(self._connection)
            except BaseException:  # an interrupt too must not leave the connection open
                self._connection.close()
                self._connection = None
                raise
            self._opened_identity = self._identity()
        self._wait(self._timeout_s if create or not self._short_timeout else SHORT_TIMEOUT_S)
        if self._version < SCHEMA_VERSION and (create or self._version == 0):
            if not create:
                self.close()  # an empty file: another process is about to create the store in it
                return None
            migrate(self._connection)
            self._version = SCHEMA_VERSION
        return self._connection

    def _has_version(self, connection: sqlite3.Connection, since: int) -> bool:
        """Whether the schema has this version or a later one, to which another process may just have migrated it."""
        if self._version < since:
            with transaction(connection, "DEFERRED"):
                self._version = read_version(connection)
        return self._version >= since

    def _wait(self, seconds: float) -> None:
        """Set how long the connection waits for another connection's lock."""
        if self._busy_timeout_s != seconds and self._connection is not None:
            self._connection.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
            self._busy_timeout_s = seconds

    def _identity(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None
        return (os.getpid(), status.st_dev, status.st_ino)

    @contextlib.contextmanager
    def _skipping_damaged(self) -> Iterator[None]:
        try:
            yield
        except DamagedRecord as error:
            self._warn(f"damaged record in the store {self.path}: {error}; it counts as a miss")

    def _warn(self, text: str) -> None:
        if text not in self.damage and len(self.damage) < _MAX_DAMAGE_LINES:
            self.damage.append(text)
        if not self._warned:
            self._warned = True
            warn(text)


def _locked(error: Exception) -> bool:
    """Whether the error is a timeout while waiting for another connection's lock."""
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


def _connect(path: Path, timeout_s: float, create: bool) -> sqlite3.Connection:
    """Open the file. SQLite's mode ``rw`` falls back to read-only access when the file is not writable."""
    uri = f"{path.as_uri()}?mode={'rwc' if create else 'rw'}"
    return sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False)


def _remaining_lease_s(owner: object, expires: object) -> float | None:
    """Return the seconds until a lease expires; None when it has expired, its owner is dead, or the row is invalid."""
    if not isinstance(owner, str) or not isinstance(expires, float):
        return None
    process = Owner.parse(owner)
    return None if process is None or process.dead else remaining_s(expires, time.time())


def _require_bytes(body: object) -> bytes:
    if not isinstance(body, bytes):
        raise DamagedRecord(f"a record's body is {type(body).__name__}, not bytes")
    return body


def _require_intact(target_key: str, key: str, checksum: str, body: object, kind: str) -> bytes:
    raw = _require_bytes(body)
    if digest(target_key, key, raw) != checksum:
        raise DamagedRecord(f"the checksum of the {kind} for {key} does not match")
    return raw


def _decision(target_key: str, problem_key: str, checksum: str, body: object) -> Decision:
    raw = _require_intact(target_key, problem_key, checksum, body, "decision")
    return decode_decision(raw, target_key, problem_key)


def _plan(target_key: str, plan_key: str, checksum: str, body: object) -> TunedPlan:
    return decode_plan(_require_intact(target_key, plan_key, checksum, body, "plan"), target_key, plan_key)


def _row(target_key: str, key: str, created: float, body: bytes) -> tuple[str, str, float, str, bytes]:
    """Return the row of a decision or plan; one without a time was created now."""
    return target_key, key, created or time.time(), digest(target_key, key, body), body


def _damaged_records(connection: sqlite3.Connection, *, plans: bool) -> Iterator[str]:
    """Yield one line for each record that reads would treat as a miss.

    plans: whether the schema has the table of plans.
    """
    target_keys = set()
    for key, body in connection.execute("SELECT key, body FROM targets"):
        try:
            target_keys.add(decode_target(_require_bytes(body), key).key)
        except DamagedRecord as error:
            yield f"target {key}: {error}"
    checks: list[tuple[str, str, Callable[..., None]]] = [
        ("decision", "problem_key", lambda *row: check_decision(_decision(*row))),
        ("plan", "plan_key", lambda *row: check_plan(_plan(*row))),
    ]
    for kind, key_column, check in checks if plans else checks[:1]:
        for target_key, key, *rest in connection.execute(f"SELECT target_key, {key_column}, digest, body FROM {kind}s"):
            try:
                check(target_key, key, *rest)
                if target_key not in target_keys:
                    yield f"{kind} {key}: its target {target_key} is missing"
            except DAMAGE as error:  # reads do not check the evidence and the kernels that do not serve
                yield f"{kind} {key}: {error}"
    for _, problem_key, candidate_id, _, body in connection.execute("SELECT * FROM failures"):
        try:
            decode_verdict(_require_bytes(body))
        except DamagedRecord as error:
            yield f"failure of {candidate_id} for {problem_key}: {error}"
