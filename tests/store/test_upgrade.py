"""Stores and exports of all released versions are read: a fixture database and an export per version."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from gemmtune.core.decision import Verdict
from gemmtune.core.errors import StoreError
from gemmtune.store import MemoryStore, SqliteStore, migrate
from gemmtune.store.exchange import VERSION
from gemmtune.store.schema import MIGRATIONS, SCHEMA_VERSION
from gemmtune.testing.store_suite import PROBLEM, TARGET, make_decision, make_plan

FIXTURES = Path(__file__).parent / "fixtures"
OTHER = replace(TARGET, threads=1)
WRITTEN = [make_decision(PROBLEM.with_m(m), created=1000.0 + m) for m in (3, 1)]


@pytest.fixture(params=range(1, SCHEMA_VERSION))
def old_store_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the path of a copy of the database that an earlier version wrote."""
    return Path(shutil.copy(FIXTURES / f"store-v{request.param}.db", tmp_path / "store.db"))


def version(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT version FROM gemmtune_schema").fetchone()[0])


def assert_content(store: SqliteStore) -> None:
    assert list(store.decisions(TARGET)) == WRITTEN
    assert store.get(OTHER, PROBLEM.key) == make_decision(target=OTHER)
    assert store.failures(TARGET, PROBLEM.key) == {"native/gemm[isa=amx]": Verdict("crashed", "signal 11")}
    assert store.verify() == []


def test_reading_does_not_upgrade_a_database(old_store_path: Path) -> None:
    before = old_store_path.read_bytes()
    with contextlib.closing(SqliteStore(old_store_path)) as store:
        assert_content(store)
        assert store.lease_remaining_s(TARGET, PROBLEM.key) is None
        assert store.get_plan(TARGET, PROBLEM.plan_key) is None
        assert list(store.plans()) == []
        assert {target.key for target in store.targets()} == {TARGET.key, OTHER.key}
        store.check()
        assert store.damage == []
    assert old_store_path.read_bytes() == before


@pytest.mark.parametrize("read_first", [False, True])
def test_writing_upgrades_a_database_without_loss(old_store_path: Path, read_first: bool) -> None:
    with contextlib.closing(SqliteStore(old_store_path)) as store:
        if read_first:
            assert_content(store)
        lease = store.lease(TARGET, PROBLEM.key, 60.0)
        assert lease is not None
        assert version(old_store_path) == SCHEMA_VERSION
        assert store.lease_remaining_s(TARGET, PROBLEM.key) is not None
        assert_content(store)
    with contextlib.closing(SqliteStore(old_store_path)) as again:
        assert_content(again)


def test_upgrade_by_another_connection_while_open(old_store_path: Path) -> None:
    with (
        contextlib.closing(SqliteStore(old_store_path)) as reader,
        contextlib.closing(SqliteStore(old_store_path)) as writer,
    ):
        assert_content(reader)
        assert writer.lease(TARGET, PROBLEM.key, 60.0) is not None
        assert_content(reader)
        assert reader.lease(TARGET, PROBLEM.key, 60.0) is None


def test_reader_sees_what_is_written_after_an_upgrade_by_another_connection(old_store_path: Path) -> None:
    with (
        contextlib.closing(SqliteStore(old_store_path)) as reader,
        contextlib.closing(SqliteStore(old_store_path)) as writer,
    ):
        assert reader.get_plan(TARGET, PROBLEM.plan_key) is None
        writer.put_plan(TARGET, make_plan())
        assert writer.lease(TARGET, PROBLEM.key, 60.0) is not None
        assert reader.get_plan(TARGET, PROBLEM.plan_key) == make_plan()
        assert reader.lease_remaining_s(TARGET, PROBLEM.key) is not None
        assert_content(reader)


def test_plan_is_put_into_an_old_store(old_store_path: Path) -> None:
    with contextlib.closing(SqliteStore(old_store_path)) as store:
        store.put_plan(TARGET, make_plan())
        assert_content(store)
    with contextlib.closing(SqliteStore(old_store_path)) as again:
        assert list(again.plans()) == [make_plan()]
        assert_content(again)


def test_upgrade_waits_while_the_schema_is_read(old_store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of one version with the number of the next would look like a file of another program."""
    original, upgrades = migrate._objects, []

    def read_during_an_upgrade(connection: sqlite3.Connection) -> frozenset[tuple[str, str, str]]:
        objects = original(connection)
        if not upgrades:
            upgrades.append(connection)
            with (
                contextlib.closing(SqliteStore(old_store_path, timeout_s=0.05)) as other,
                contextlib.suppress(StoreError),
            ):
                other.put(TARGET, make_decision(PROBLEM.with_m(9)))
        return objects

    monkeypatch.setattr(migrate, "_objects", read_during_an_upgrade)
    with contextlib.closing(SqliteStore(old_store_path)) as store:
        assert_content(store)
    assert upgrades


def test_failed_upgrade_is_rolled_back(old_store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = version(old_store_path)
    migrations = (*MIGRATIONS[:before], ("CREATE TABLE half (x)", "nonsense"))
    monkeypatch.setattr("gemmtune.store.migrate.MIGRATIONS", migrations)
    with contextlib.closing(SqliteStore(old_store_path)) as store, pytest.raises(Exception, match="nonsense"):
        store.put(TARGET, make_decision())
    monkeypatch.undo()
    assert version(old_store_path) == before
    with contextlib.closing(SqliteStore(old_store_path)) as store:
        assert_content(store)


@pytest.mark.parametrize("export_version", range(1, VERSION + 1))
def test_old_exports_can_be_imported(export_version: int) -> None:
    store = MemoryStore()
    assert store.import_(FIXTURES / f"export-v{export_version}.json") == 3
    assert list(store.decisions(TARGET)) == WRITTEN
    assert store.get(OTHER, PROBLEM.key) == make_decision(target=OTHER)
