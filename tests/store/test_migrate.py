"""Transactions on a store's file, and the schema version of a file that may be anything."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

import pytest

from gemmtune.core.errors import StoreError
from gemmtune.store.migrate import migrate, read_version, transaction
from gemmtune.store.schema import SCHEMA_VERSION


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as opened:
        yield opened


def write_and_raise(connection: sqlite3.Connection, sql: str, error: BaseException) -> None:
    """Execute ``sql`` in a transaction, and raise ``error`` in it."""
    with transaction(connection):
        connection.execute(sql)
        raise error


def test_transaction_is_committed_at_its_end_and_rolled_back_after_an_error(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE numbers (n)")
    with transaction(connection):
        assert connection.in_transaction
        connection.execute("INSERT INTO numbers VALUES (1)")
    assert not connection.in_transaction
    with pytest.raises(KeyboardInterrupt):
        write_and_raise(connection, "INSERT INTO numbers VALUES (2)", KeyboardInterrupt())
    assert not connection.in_transaction
    assert connection.execute("SELECT n FROM numbers").fetchall() == [(1,)]


def test_error_after_a_rollback_of_sqlites_own_is_kept(connection: sqlite3.Connection) -> None:
    with pytest.raises(ZeroDivisionError):
        write_and_raise(connection, "ROLLBACK", ZeroDivisionError())


def test_empty_file_is_migrated_to_the_current_version(connection: sqlite3.Connection) -> None:
    assert read_version(connection) == 0
    migrate(connection)
    assert read_version(connection) == SCHEMA_VERSION
    migrate(connection)
    assert read_version(connection) == SCHEMA_VERSION


@pytest.mark.parametrize(("tables", "names"), [(0, "none"), (1, "t0"), (3, "t0, t1, t2"), (4, "t0, t1, t2 and 1 more")])
def test_database_of_another_program_is_named_by_its_tables(
    connection: sqlite3.Connection, tables: int, names: str
) -> None:
    connection.execute("CREATE VIEW seen AS SELECT 1")
    for number in range(tables):
        connection.execute(f"CREATE TABLE t{number} (x)")
    with pytest.raises(StoreError, match=rf"not a gemmtune store \(its tables: {names}\)"):
        read_version(connection)


@pytest.mark.parametrize("version", ["NULL", "'1'", "0", "-1", "1.5"])
def test_damaged_version_is_refused(connection: sqlite3.Connection, version: str) -> None:
    migrate(connection)
    connection.execute("DELETE FROM gemmtune_schema")
    with pytest.raises(StoreError, match="its schema version is damaged"):
        read_version(connection)
    connection.execute("DROP TABLE gemmtune_schema")
    connection.execute("CREATE TABLE gemmtune_schema (version)")
    connection.execute(f"INSERT INTO gemmtune_schema VALUES ({version})")
    with pytest.raises(StoreError, match="its schema version is damaged"):
        read_version(connection)


def test_newer_and_changed_schemas_are_refused(connection: sqlite3.Connection) -> None:
    migrate(connection)
    connection.execute("ANALYZE")
    assert read_version(connection) == SCHEMA_VERSION
    connection.execute("CREATE VIEW extra AS SELECT 1")
    with pytest.raises(StoreError, match="its tables are not those of a gemmtune store"):
        read_version(connection)
    connection.execute("UPDATE gemmtune_schema SET version = version + 1")
    text = f"its schema version is {SCHEMA_VERSION + 1}, this gemmtune knows up to {SCHEMA_VERSION}"
    with pytest.raises(StoreError, match=text):
        read_version(connection)
