"""What every released version wrote can still be read: a fixture database and an export per version."""

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
from gemmtune.store.schema import SCHEMA_VERSION
from gemmtune.testing.store_suite import PROBLEM, TARGET, make_decision

FIXTURES = Path(__file__).parent / "fixtures"
OTHER = replace(TARGET, threads=1)
WRITTEN = [make_decision(PROBLEM.with_m(m), created=1000.0 + m) for m in (3, 1)]


@pytest.fixture(params=range(1, SCHEMA_VERSION))
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the database that an earlier version left."""
    return Path(shutil.copy(FIXTURES / f"store-v{request.param}.db", tmp_path / "store.db"))


def version(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT version FROM gemmtune_schema").fetchone()[0])


def check_content(store: SqliteStore) -> None:
    assert list(store.decisions(TARGET)) == WRITTEN
    assert store.get(OTHER, PROBLEM.key) == make_decision(target=OTHER)
    assert store.failures(TARGET, PROBLEM.key) == {"native/gemm[isa=amx]": Verdict("crashed", "signal 11")}
    assert store.verify() == []


def test_reading_leaves_an_old_database_as_it_is(old: Path) -> None:
    before = old.read_bytes()
    with contextlib.closing(SqliteStore(old)) as store:
        check_content(store)
        assert store.lease_remaining_s(TARGET, PROBLEM.key) is None
    assert old.read_bytes() == before


@pytest.mark.parametrize("read_first", [False, True])
def test_writing_upgrades_it_and_loses_nothing(old: Path, read_first: bool) -> None:
    with contextlib.closing(SqliteStore(old)) as store:
        if read_first:
            check_content(store)
        lease = store.lease(TARGET, PROBLEM.key, 60.0)
        assert lease is not None
        assert version(old) == SCHEMA_VERSION
        assert store.lease_remaining_s(TARGET, PROBLEM.key) is not None
        check_content(store)
    with contextlib.closing(SqliteStore(old)) as again:
        check_content(again)


def test_upgraded_by_another_while_open(old: Path) -> None:
    with contextlib.closing(SqliteStore(old)) as reader, contextlib.closing(SqliteStore(old)) as writer:
        check_content(reader)
        assert writer.lease(TARGET, PROBLEM.key, 60.0) is not None
        check_content(reader)
        assert reader.lease(TARGET, PROBLEM.key, 60.0) is None


def test_an_upgrade_while_the_schema_is_read_waits(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of one version beside the number of the next would look like somebody else's file."""
    real, tries = migrate._objects, []

    def read_and_be_overtaken(connection: sqlite3.Connection) -> frozenset[tuple[str, str, str]]:
        found = real(connection)
        if not tries:
            tries.append(connection)
            with contextlib.closing(SqliteStore(old, timeout_s=0.05)) as other, contextlib.suppress(StoreError):
                other.put(TARGET, make_decision(PROBLEM.with_m(9)))
        return found

    monkeypatch.setattr(migrate, "_objects", read_and_be_overtaken)
    with contextlib.closing(SqliteStore(old)) as store:
        check_content(store)
    assert tries


def test_an_interrupted_upgrade_is_none(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.store.migrate.MIGRATIONS", ((), ("CREATE TABLE half (x)", "nonsense")))
    with contextlib.closing(SqliteStore(old)) as store, pytest.raises(Exception, match="nonsense"):
        store.put(TARGET, make_decision())
    monkeypatch.undo()
    assert version(old) == 1
    with contextlib.closing(SqliteStore(old)) as store:
        check_content(store)


@pytest.mark.parametrize("made_by", range(1, VERSION + 1))
def test_old_exports_can_be_imported(made_by: int) -> None:
    store = MemoryStore()
    assert store.import_(FIXTURES / f"export-v{made_by}.json") == 3
    assert list(store.decisions(TARGET)) == WRITTEN
    assert store.get(OTHER, PROBLEM.key) == make_decision(target=OTHER)
