"""The schema of a store's file: which version it has, whether it is ours, and how it is brought up to date."""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Iterator
from typing import Literal

from ..core.errors import StoreError
from .schema import MIGRATIONS, SCHEMA_VERSION


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection, kind: Literal["IMMEDIATE", "DEFERRED"] = "IMMEDIATE") -> Iterator[None]:
    """IMMEDIATE takes the write lock at once, so that no half-done transaction has to give way; DEFERRED is to read."""
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:  # an interrupt too must not leave half a transaction
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def version_of(connection: sqlite3.Connection) -> int:
    """The schema version; 0 for an empty file. To be called in a transaction, lest another process upgrade in between.

    Raises StoreError for somebody else's database, a newer one, or one with anything in its schema that gemmtune did
    not put there (a view or a trigger could answer, or act, in a table's place).
    """
    objects = _objects(connection)
    if not objects:
        return 0
    if "gemmtune_schema" not in {name for _, name, _ in objects}:
        tables = sorted(name for kind, name, _ in objects if kind == "table")
        names = ", ".join(tables[:3]) + (f" and {len(tables) - 3} more" if len(tables) > 3 else "")
        raise StoreError(
            f"it is a SQLite database, but not a gemmtune store (its tables: {names or 'none'}); choose another with "
            "--store or GEMMTUNE_STORE"
        )
    row = connection.execute("SELECT version FROM gemmtune_schema").fetchone()
    if row is None or not isinstance(row[0], int) or row[0] < 1:
        raise StoreError("its schema version is damaged")
    if row[0] > SCHEMA_VERSION:
        raise StoreError(f"its schema version is {row[0]}, this gemmtune knows up to {SCHEMA_VERSION}: update gemmtune")
    if objects != _schema(row[0]):
        raise StoreError("its tables are not those of a gemmtune store; restore the file, or choose another path")
    return int(row[0])


def _objects(connection: sqlite3.Connection) -> frozenset[tuple[str, str, str]]:
    """What the database's schema declares, but for what ANALYZE leaves."""
    sql = "SELECT type, name, coalesce(sql, '') FROM sqlite_master WHERE name NOT LIKE 'sqlite_stat%'"
    return frozenset(connection.execute(sql))


@functools.cache
def _schema(version: int) -> frozenset[tuple[str, str, str]]:
    """What the schema of that version declares."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        _apply(connection, 0, version)
        return _objects(connection)


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the schema up to date, in one transaction."""
    with transaction(connection):
        _apply(connection, version_of(connection), SCHEMA_VERSION)  # read again: another process may have been first


def _apply(connection: sqlite3.Connection, version: int, wanted: int) -> None:
    for step in range(version, wanted):
        for statement in MIGRATIONS[step]:
            connection.execute(statement)
    connection.execute("UPDATE gemmtune_schema SET version = ?", (wanted,))
