"""The schema version of a store's file, and its migration to the current version."""

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
    """Run a block in a transaction, which is rolled back when the block raises.

    kind: IMMEDIATE acquires the write lock at the start, so that a transaction never fails halfway because of another
    writer; DEFERRED is for reading.
    """
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:  # an interrupt too must not leave half a transaction
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def read_version(connection: sqlite3.Connection) -> int:
    """Return the schema version; 0 for an empty file.

    Must be called in a transaction, since another process could migrate the schema between its reads. Raises StoreError
    for another program's database, for a newer schema, and for a schema with objects that gemmtune did not create (a
    view or a trigger could replace a table's contents or act on it).
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
    """Return (type, name, SQL) of all objects in the database's schema except the tables that ANALYZE creates."""
    sql = "SELECT type, name, coalesce(sql, '') FROM sqlite_master WHERE name NOT LIKE 'sqlite_stat%'"
    return frozenset(connection.execute(sql))


@functools.cache
def _schema(version: int) -> frozenset[tuple[str, str, str]]:
    """Return the objects, as ``_objects`` does, that gemmtune's schema of a version contains."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        _apply(connection, 0, version)
        return _objects(connection)


def migrate(connection: sqlite3.Connection) -> None:
    """Migrate the schema to SCHEMA_VERSION in one transaction."""
    with transaction(connection):
        _apply(connection, read_version(connection), SCHEMA_VERSION)  # another process may have migrated it already


def _apply(connection: sqlite3.Connection, version: int, last: int) -> None:
    for step in range(version, last):
        for statement in MIGRATIONS[step]:
            connection.execute(statement)
    connection.execute("UPDATE gemmtune_schema SET version = ?", (last,))
