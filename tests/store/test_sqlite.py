"""SqliteStore: the conformance suite, several processes on one file, and damage as a miss."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gemmtune.core.decision import Verdict
from gemmtune.core.errors import StoreBusy, StoreError
from gemmtune.store import MemoryStore, SqliteStore
from gemmtune.store.base import Store
from gemmtune.store.schema import SCHEMA_VERSION, digest
from gemmtune.testing.store_suite import PROBLEM, TARGET, StoreSuite, make_decision, make_plan
from helpers.forking import passes_in_forked_child


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "store.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    with contextlib.closing(SqliteStore(path)) as opened:
        yield opened


class TestSqliteStore(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[SqliteStore]:  # type: ignore[override]
        with contextlib.closing(SqliteStore(tmp_path / "suite.db")) as opened:
            yield opened


def execute(path: Path, sql: str, *args: object) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(sql, args)


def test_reopened_store_has_the_stored_decisions(store: SqliteStore, path: Path) -> None:
    store.put(TARGET, make_decision())
    with contextlib.closing(SqliteStore(path)) as again:
        assert again.get(TARGET, PROBLEM.key) == make_decision()


def test_first_write_creates_a_private_directory(store: SqliteStore, path: Path) -> None:
    assert store.get(TARGET, PROBLEM.key) is None
    assert not path.parent.exists()
    store.put(TARGET, make_decision())
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_journal_mode_is_delete(store: SqliteStore, path: Path) -> None:
    store.put(TARGET, make_decision())
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE decisions SET body = substr(body, 1, 100)",
        "UPDATE decisions SET body = 'text'",
        "UPDATE decisions SET body = NULL WHERE 0",
        "UPDATE decisions SET digest = 'x'",
        "UPDATE decisions SET body = CAST(replace(CAST(body AS TEXT), '0.51', '0.52') AS BLOB)",
        "UPDATE decisions SET problem_key = problem_key || 'x'",
    ],
)
def test_damaged_row_is_a_miss_and_warns_once(
    store: SqliteStore, path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.put(TARGET, make_decision())
    store.put(TARGET, make_decision(PROBLEM.with_m(9)))
    is_harmless = damage.endswith("WHERE 0")
    execute(path, damage if is_harmless else f"{damage} WHERE problem_key = ?", *([] if is_harmless else [PROBLEM.key]))
    with caplog.at_level(logging.WARNING, "gemmtune"):
        assert (store.get(TARGET, PROBLEM.key) is None) is not is_harmless
        assert store.get(TARGET, PROBLEM.with_m(9).key) == make_decision(PROBLEM.with_m(9))
        assert len(list(store.decisions())) == (2 if is_harmless else 1)
        assert len(list(store.decisions())) == (2 if is_harmless else 1)
    assert len(caplog.records) == (0 if is_harmless else 1)
    assert bool(store.verify()) is not is_harmless
    store.put(TARGET, make_decision())
    assert store.get(TARGET, PROBLEM.key) == make_decision()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE plans SET body = substr(body, 1, 100)",
        "UPDATE plans SET body = 'text'",
        "UPDATE plans SET digest = 'x'",
        "UPDATE plans SET body = CAST(replace(CAST(body AS TEXT), '0.05', '0.06') AS BLOB)",
        "UPDATE plans SET plan_key = plan_key || 'x'",
    ],
)
def test_damaged_plan_is_a_miss_and_warns_once(
    store: SqliteStore, path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = make_plan(replace(PROBLEM, n=6))
    store.put(TARGET, make_decision())
    store.put_plan(TARGET, make_plan())
    store.put_plan(TARGET, other)
    execute(path, f"{damage} WHERE plan_key = ?", PROBLEM.plan_key)
    with caplog.at_level(logging.WARNING, "gemmtune"):
        assert store.get_plan(TARGET, PROBLEM.plan_key) is None
        assert store.get_plan(TARGET, other.plan_key) == other
        assert list(store.plans()) == [other]
        assert list(store.plans()) == [other]
        assert store.get(TARGET, PROBLEM.key) == make_decision()
    assert len(caplog.records) == 1
    assert len(store.verify()) == 1
    store.put_plan(TARGET, make_plan())
    assert store.get_plan(TARGET, PROBLEM.plan_key) == make_plan()


def test_verify_reports_damage_of_a_plan_that_reads_accept(store: SqliteStore, path: Path) -> None:
    """Reads check the kernels that serve only."""
    store.put_plan(TARGET, make_plan())
    kernels = make_plan().kernels
    forged = msgspec.structs.replace(
        make_plan(), kernels=(*kernels[:3], msgspec.structs.replace(kernels[3], times={1: -1.0}))
    )
    body = msgspec.json.encode(forged)
    execute(path, "UPDATE plans SET body = ?, digest = ?", body, digest(TARGET.key, PROBLEM.plan_key, body))
    assert store.get_plan(TARGET, PROBLEM.plan_key) == forged
    (line,) = store.verify()
    assert line.startswith(f"plan {PROBLEM.plan_key}: ")
    assert "not positive and finite" in line


def test_verify_reports_a_plan_without_its_target(store: SqliteStore, path: Path) -> None:
    store.put_plan(TARGET, make_plan())
    execute(path, "DELETE FROM targets")
    assert store.verify() == [f"plan {PROBLEM.plan_key}: its target {TARGET.key} is missing"]


def test_damaged_targets_and_failures_are_ignored(store: SqliteStore, path: Path) -> None:
    store.put(TARGET, make_decision())
    store.remember_failure(TARGET, PROBLEM.key, "a", Verdict("hung"))
    execute(path, "UPDATE targets SET body = CAST(replace(CAST(body AS TEXT), 'suite', 'other') AS BLOB)")
    execute(path, "UPDATE failures SET body = CAST('{}' AS BLOB)")
    assert store.targets() == []
    assert store.failures(TARGET, PROBLEM.key) == {}
    assert len(store.verify()) == 3  # the target, the decision without its target, and the failure


def test_file_that_is_no_database_is_a_miss_and_is_not_written(
    path: Path, store: SqliteStore, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database at all" * 100)
    assert store.get(TARGET, PROBLEM.key) is None
    assert store.failures(TARGET, PROBLEM.key) == {}
    assert len(caplog.records) == 1
    assert store.verify()
    with pytest.raises(StoreError, match="cannot write the store"):
        store.put(TARGET, make_decision())
    assert path.read_bytes().startswith(b"not a database")


def test_database_of_another_program_is_not_written(path: Path, store: SqliteStore) -> None:
    path.parent.mkdir()
    execute(path, "CREATE TABLE theirs (x)")
    assert store.get(TARGET, PROBLEM.key) is None
    with pytest.raises(StoreError, match="not a gemmtune store"):
        store.put(TARGET, make_decision())


def test_newer_schema_is_a_miss_and_is_not_written(path: Path, store: SqliteStore) -> None:
    store.put(TARGET, make_decision())
    store.close()
    execute(path, "UPDATE gemmtune_schema SET version = ?", SCHEMA_VERSION + 1)
    assert store.get(TARGET, PROBLEM.key) is None
    with pytest.raises(StoreError, match="update gemmtune"):
        store.put(TARGET, make_decision())


def test_truncated_file_is_a_miss(path: Path, store: SqliteStore) -> None:
    for m in range(1, 8):
        store.put(TARGET, make_decision(PROBLEM.with_m(m)))
    store.close()
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)
    assert [store.get(TARGET, PROBLEM.with_m(m).key) for m in (1, 7)].count(None) >= 1
    assert store.verify()


def test_impossible_path_raises_store_error_on_put(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = SqliteStore(tmp_path / "file" / "store.db")
    assert store.get(TARGET, PROBLEM.key) is None
    assert list(store.decisions()) == []
    with pytest.raises(StoreError, match="cannot write the store"):
        store.put(TARGET, make_decision())


def test_read_only_file_is_read_and_raises_store_error_on_put(
    path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(TARGET, make_decision())
    store.close()
    original = sqlite3.connect
    # Permission bits do not restrict root, so open the file in the read-only mode of a user without write permission.

    def connect(name: str, **options: Any) -> sqlite3.Connection:
        return original(name.split("?")[0] + "?mode=ro" if options.get("uri") else name, **options)

    monkeypatch.setattr(sqlite3, "connect", connect)
    assert store.get(TARGET, PROBLEM.key) == make_decision()
    with pytest.raises(StoreError, match="readonly"):
        store.put(TARGET, make_decision())


def test_full_disk_raises_store_error_and_keeps_earlier_decisions(path: Path, store: SqliteStore) -> None:
    store.put(TARGET, make_decision())
    connection = store._connection
    assert connection is not None
    connection.execute(f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').fetchone()[0]}")
    decisions = [make_decision(PROBLEM.with_m(m)) for m in range(1, 40)]

    def put_all() -> None:
        for decision in decisions:
            store.put(TARGET, decision)

    with pytest.raises(StoreError, match="full"):
        put_all()
    assert store.get(TARGET, PROBLEM.key) == make_decision()


def test_locked_store_is_a_miss_for_readers(path: Path) -> None:
    store = SqliteStore(path, timeout_s=0.05)
    store.put(TARGET, make_decision())
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert store.get(TARGET, PROBLEM.key) is None
        with pytest.raises(StoreError, match="locked"):
            store.put(TARGET, make_decision())
    assert store.get(TARGET, PROBLEM.key) == make_decision()


def test_replaced_file_is_reopened(path: Path, store: SqliteStore) -> None:
    store.put(TARGET, make_decision())
    path.unlink()
    assert store.get(TARGET, PROBLEM.key) is None
    store.put(TARGET, make_decision(PROBLEM.with_m(2)))
    with contextlib.closing(SqliteStore(path)) as again:
        assert len(list(again.decisions())) == 1


def test_forked_child_opens_its_own_connection(path: Path, store: SqliteStore) -> None:
    store.put(TARGET, make_decision())
    child = os.fork()
    if child == 0:
        store.put(TARGET, make_decision(PROBLEM.with_m(2)))
        os._exit(0 if store.get(TARGET, PROBLEM.key) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(store.decisions())) == 2


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_lock_is_reset_in_a_forked_child(kind: str, store: SqliteStore) -> None:
    forked: Store = store if kind == "file" else MemoryStore()
    forked.put(TARGET, make_decision())
    assert passes_in_forked_child(forked._lock, lambda: list(forked.decisions()))


WRITER = """
import sys
from gemmtune.store import SqliteStore
from gemmtune.testing.store_suite import PROBLEM, TARGET, make_decision
store, first, count = SqliteStore(sys.argv[1], timeout_s=60), int(sys.argv[2]), int(sys.argv[3])
for m in range(first, first + count):
    store.put(TARGET, make_decision(PROBLEM.with_m(m)))
    print(m, flush=True)
"""


def start_writer(path: Path, first: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(first), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_acknowledged_writes_survive_a_killed_writer(path: Path, store: SqliteStore) -> None:
    surviving, killed = start_writer(path, 0, 30), start_writer(path, 1000, 100_000)
    assert killed.stdout is not None
    with killed.stdout as lines:
        acknowledged = [int(lines.readline()) for _ in range(5)]
        killed.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in lines]
    killed.wait()
    out, _ = surviving.communicate(timeout=60)
    assert surviving.returncode == 0
    acknowledged += [int(line) for line in out.splitlines()]
    missing = [m for m in acknowledged if store.get(TARGET, PROBLEM.with_m(m).key) is None]
    assert missing == []
    assert store.verify() == []


def test_lease_of_a_dead_process_is_taken_over(path: Path, store: SqliteStore) -> None:
    code = (
        "import sys; from gemmtune.store import SqliteStore; from gemmtune.testing.store_suite import PROBLEM, TARGET; "
        "print(SqliteStore(sys.argv[1]).lease(TARGET, PROBLEM.key, 600.0) is not None, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert (store.lease_remaining_s(TARGET, PROBLEM.key) or 0.0) > 500.0
        assert store.lease(TARGET, PROBLEM.key, 60.0) is None
        holder.kill()
    assert store.lease_remaining_s(TARGET, PROBLEM.key) is None
    assert store.lease(TARGET, PROBLEM.key, 60.0) is not None


@pytest.mark.parametrize(
    "damage", ["owner = 'me'", "owner = x'00ff'", "owner = '--'", "expires = 'soon'", "expires = 9e18", "expires = 0"]
)
def test_damaged_lease_is_ignored(path: Path, store: SqliteStore, damage: str) -> None:
    assert store.lease(TARGET, PROBLEM.key, 60.0) is not None
    execute(path, f"UPDATE leases SET {damage}")
    assert store.lease_remaining_s(TARGET, PROBLEM.key) is None
    assert store.lease(TARGET, PROBLEM.key, 60.0) is not None


def test_lease_of_another_machine_is_valid_until_it_expires(path: Path, store: SqliteStore) -> None:
    assert store.lease(TARGET, PROBLEM.key, 60.0) is not None
    execute(path, "UPDATE leases SET owner = 'elsewhere-1-99'")
    assert store.lease(TARGET, PROBLEM.key, 60.0) is None
    execute(path, "UPDATE leases SET expires = 1.5")
    assert store.lease(TARGET, PROBLEM.key, 60.0) is not None


def test_lease_of_an_unwritable_store_raises_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = SqliteStore(tmp_path / "file" / "store.db")
    assert store.lease_remaining_s(TARGET, PROBLEM.key) is None
    with pytest.raises(StoreError, match="cannot write the store"):
        store.lease(TARGET, PROBLEM.key, 60.0)


def test_plan_of_an_unwritable_store_raises_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = SqliteStore(tmp_path / "file" / "store.db")
    assert store.get_plan(TARGET, PROBLEM.plan_key) is None
    assert list(store.plans()) == []
    with pytest.raises(StoreError, match="cannot write the store"):
        store.put_plan(TARGET, make_plan())


def test_empty_file_becomes_a_store(path: Path, store: SqliteStore) -> None:
    """A writer that died before its first commit leaves an empty file."""
    path.parent.mkdir()
    path.touch()
    assert store.get(TARGET, PROBLEM.key) is None
    assert store.failures(TARGET, PROBLEM.key) == {}
    store.put(TARGET, make_decision())
    assert store.get(TARGET, PROBLEM.key) == make_decision()


@pytest.mark.parametrize(
    "change",
    [
        "CREATE TRIGGER spy AFTER INSERT ON decisions BEGIN DELETE FROM decisions; END",
        "CREATE VIEW more AS SELECT * FROM decisions",
        "ALTER TABLE decisions ADD COLUMN extra",
        "DROP TABLE leases",
        "DROP TABLE plans",
    ],
)
def test_changed_schema_raises_store_error_on_put(path: Path, store: SqliteStore, change: str) -> None:
    store.put(TARGET, make_decision())
    store.close()
    execute(path, change)
    assert store.get(TARGET, PROBLEM.key) is None
    with pytest.raises(StoreError, match="not those of a gemmtune store"):
        store.put(TARGET, make_decision())


def test_tables_of_analyze_are_no_damage(path: Path, store: SqliteStore) -> None:
    store.put(TARGET, make_decision())
    execute(path, "ANALYZE")
    store.close()
    assert store.get(TARGET, PROBLEM.key) == make_decision()


def test_undecodable_names_in_the_schema_are_damage(path: Path, store: SqliteStore) -> None:
    """sqlite3 fails to decode the damaged schema that its error quotes."""
    store.put(TARGET, make_decision())
    store.close()
    body = path.read_bytes()
    path.write_bytes(body.replace(b"CREATE TABLE decisions (target_key", b"CREATE TABLE \xe5ecisions )target_key"))
    assert store.get(TARGET, PROBLEM.key) is None
    assert store.verify()
    with pytest.raises(StoreError, match="cannot write the store"):
        store.put(TARGET, make_decision())


@pytest.mark.parametrize("offset", [105, 1045, 3000])
def test_unreadable_write_into_a_damaged_file_raises_store_error(path: Path, offset: int) -> None:
    """SQLite may accept a write into a damaged B-tree whose row it cannot read again."""
    problems = [PROBLEM.with_m(m) for m in (1, 2, 3)]
    with contextlib.closing(SqliteStore(path)) as store:
        for problem in problems:
            store.put(TARGET, make_decision(problem))
    sound = path.read_bytes()
    for page in range(4096, len(sound), 4096):
        path.write_bytes(sound[: page + offset] + b"\xff" * (4096 - offset) + sound[page + 4096 :])
        with contextlib.closing(SqliteStore(path)) as store:
            for problem in problems:
                with contextlib.suppress(StoreError):
                    store.put(TARGET, make_decision(problem))
                    assert store.get(TARGET, problem.key) == make_decision(problem)


def test_absent_file_has_no_damage(store: SqliteStore, path: Path) -> None:
    assert store.verify() == []
    assert not path.exists()


def test_message_about_another_programs_database_names_three_tables(path: Path, store: SqliteStore) -> None:
    path.parent.mkdir()
    for name in "edcba":
        execute(path, f"CREATE TABLE {name} (x)")
    with pytest.raises(StoreError, match=r"its tables: a, b, c and 2 more"):
        store.put(TARGET, make_decision())


@contextlib.contextmanager
def exclusive_lock(path: Path, seconds: float) -> Iterator[None]:
    """Lock the file as a writer does, for the block or for some seconds, whichever ends first."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        timer = threading.Timer(seconds, writer.execute, ["ROLLBACK"])
        timer.start()
        yield
        timer.cancel()
        timer.join()


@pytest.mark.parametrize("opened", [False, True])
def test_read_waits_for_a_writer(path: Path, opened: bool) -> None:
    with contextlib.closing(SqliteStore(path)) as writer:
        writer.put(TARGET, make_decision())
    with contextlib.closing(SqliteStore(path, timeout_s=30.0)) as reader:
        if opened:
            assert reader.get(TARGET, PROBLEM.key) == make_decision()
        with exclusive_lock(path, 0.3):
            assert reader.get(TARGET, PROBLEM.key) == make_decision()


@pytest.mark.parametrize("opened", [False, True])
def test_read_with_a_short_timeout_does_not_wait_for_a_writer(path: Path, opened: bool) -> None:
    with contextlib.closing(SqliteStore(path)) as writer:
        writer.put(TARGET, make_decision())
    with contextlib.closing(SqliteStore(path, timeout_s=30.0)) as reader:
        if opened:
            assert reader.get(TARGET, PROBLEM.key) == make_decision()
        with exclusive_lock(path, 20.0), reader.short_timeout(), pytest.raises(StoreBusy):
            reader.get(TARGET, PROBLEM.key)
        assert reader.get(TARGET, PROBLEM.key) == make_decision()


def test_check_explains_a_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot read the store .*: \[Errno 20\] Not a directory"):
        SqliteStore(tmp_path / "file" / "store.db").check()


def count(path: Path, table: str) -> int:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def test_pruning_deletes_failures_targets_and_expired_leases(store: SqliteStore, path: Path) -> None:
    other = replace(TARGET, threads=7)
    for target in (TARGET, other):
        store.put(target, make_decision(target=target))
        store.remember_failure(target, "p", "x", Verdict("crashed"))
        assert store.lease(target, "p", 60.0) is not None
    assert store.prune() == 0
    assert [count(path, table) for table in ("decisions", "failures", "targets", "leases")] == [2, 2, 2, 2]
    execute(path, "UPDATE leases SET expires = 1.0 WHERE target_key = ?", other.key)
    assert store.prune(keep=[TARGET]) == 1
    assert [count(path, table) for table in ("decisions", "failures", "targets", "leases")] == [1, 1, 1, 1]
    assert store.targets() == [TARGET]
    assert store.all_failures(TARGET) == {"p": {"x": Verdict("crashed")}}
    assert store.prune(older_than_s=1e12) == 0
    assert store.prune(older_than_s=0.0) == 1
    assert count(path, "targets") == 0


def test_pruning_an_absent_store_creates_none(store: SqliteStore, path: Path) -> None:
    assert store.prune(older_than_s=0.0) == 0
    assert not path.exists()


def test_probe_of_the_disk_leaves_no_record(store: SqliteStore, path: Path) -> None:
    store.check_writable()
    assert count(path, "leases") == 0
    assert store.verify() == []


def test_artifacts_are_beside_the_file(store: SqliteStore, path: Path) -> None:
    assert store.artifacts_directory == path.with_name("store.artifacts")


def test_lease_of_another_token_is_not_renewed_or_released(store: SqliteStore, path: Path) -> None:
    lost = store.lease(TARGET, "p", 60.0)
    assert lost is not None
    execute(path, "UPDATE leases SET token = 'another'")
    assert lost.renew() is False
    lost.release()
    assert store.lease_remaining_s(TARGET, "p") is not None
    execute(path, "UPDATE leases SET expires = 'soon'")
    assert store.lease_remaining_s(TARGET, "p") is None
    held = store.lease(TARGET, "p", 60.0)
    assert held is not None
    assert held.renew() is True


def test_each_kind_of_damaged_record_has_a_line(store: SqliteStore, path: Path) -> None:
    others = [replace(TARGET, threads=threads) for threads in (7, 8)]
    for target in (TARGET, *others):
        store.put(target, make_decision(target=target))
    store.remember_failure(TARGET, "p", "x", Verdict("crashed"))
    execute(path, "UPDATE failures SET body = 'text'")
    execute(path, "UPDATE targets SET body = x'7b' WHERE key = ?", others[0].key)
    execute(path, "DELETE FROM targets WHERE key = ?", others[1].key)
    lines = [line for line in store._damage() if "malformed" in line or "missing" in line or "body is" in line]
    assert any(line.startswith(f"target {others[0].key}: malformed target") for line in lines)
    assert any(line.endswith(f"its target {others[1].key} is missing") for line in lines)
    assert "failure of x for p: a record's body is str, not bytes" in lines
    assert not any(line.endswith(f"its target {TARGET.key} is missing") for line in lines)


def test_damage_is_listed_once_and_up_to_a_hundred_lines(
    store: SqliteStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.put(TARGET, make_decision())
    for number in range(120):
        store.remember_failure(TARGET, "p", f"x{number}", Verdict("crashed"))
    execute(path, "UPDATE failures SET body = CAST(candidate_id AS TEXT)")
    execute(path, "UPDATE failures SET body = CAST(candidate_id AS BLOB) WHERE candidate_id <> 'x0'")
    for _ in range(2):
        assert store.failures(TARGET, "p") == {}
        assert store.all_failures(TARGET) == {}
    assert len(store.damage) == len(set(store.damage))
    assert 1 < len(store.damage) <= 100
    assert caplog.text.count("damaged record in the store") == 1


def test_check_of_a_sound_or_an_absent_store_raises_nothing(store: SqliteStore, path: Path) -> None:
    store.check()
    assert not path.exists()
    store.put(TARGET, make_decision())
    store.check()
    assert store.get(TARGET, PROBLEM.key) is not None


def test_check_of_a_locked_store_says_so(path: Path, store: SqliteStore) -> None:
    store.put(TARGET, make_decision())
    with (
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as writer,
        contextlib.closing(SqliteStore(path, timeout_s=0.05)) as reader,
    ):
        writer.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match=r"another process is writing it, for longer than 0\.05 s"):
            reader.check()


def test_short_timeout_ends_with_its_block(store: SqliteStore) -> None:
    store.put(TARGET, make_decision())
    assert not store._short_timeout
    with store.short_timeout():
        with store.short_timeout():
            assert store._short_timeout
        assert store._short_timeout
        assert store.get(TARGET, PROBLEM.key) is not None
        assert store._busy_timeout_s < 1.0
    assert not store._short_timeout
    assert store.get(TARGET, PROBLEM.key) is not None
    assert store._busy_timeout_s == 10.0


def test_check_of_a_file_that_is_no_database_says_what_it_is(path: Path, store: SqliteStore) -> None:
    path.parent.mkdir()
    path.write_text("some words\n" * 100)
    text = r"cannot read the store .*: it is a text file \(file is not a database\); move it away, or choose another"
    with pytest.raises(StoreError, match=text):
        store.check()
    path.write_bytes(b"")
    store.check()


def test_check_of_a_file_with_other_tables_says_so(path: Path, store: SqliteStore) -> None:
    path.parent.mkdir()
    execute(path, "CREATE TABLE t (x)")
    with pytest.raises(
        StoreError, match=r"cannot read the store .*: it is a SQLite database, but not a gemmtune store"
    ):
        store.check()
