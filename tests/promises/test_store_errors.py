"""Tests of stores that are read-only, damaged or locked, of control characters in them, and of files on a full disk."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import gemmtune
import gemmtune.tuning.tuner
from gemmtune.core import files
from gemmtune.core.decision import Decision
from gemmtune.core.errors import StoreBusy, StoreError
from gemmtune.core.events import DecisionsUnstored, Event, Progress
from gemmtune.core.printable import visible
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.core.workloads import build
from gemmtune.dispatch import current_target
from gemmtune.dispatch.cache import DISPATCH_CACHE
from gemmtune.dispatch.runtime import RUNTIME
from gemmtune.report import ceilings
from gemmtune.store import MemoryStore, SqliteStore, open_store
from gemmtune.store.base import SHORT_TIMEOUT_S
from gemmtune.tuning.turns import Pause, Steps
from helpers import command
from helpers.factories import make_decision, make_legal_decision

CONTROL_TEXT = "a\x1b]0;title\x07\x1b[2J\nerror: forged [bold]b[/] \u202e\x9b31m"


@pytest.fixture
def current() -> Target:
    return current_target()


@pytest.fixture
def tuned_keys(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the search by an immediate decision, and return the list of the keys of tuned problems."""
    problems: list[str] = []

    def decide(self: Any, problem: Problem, pool: object, progress: Progress) -> Steps[Decision]:
        yield Pause(seconds=0.0)
        problems.append(problem.key)
        decision = make_decision(problem, "winner", self._target)
        self._store_decision(decision, progress)
        return decision

    monkeypatch.setattr(gemmtune.tuning.tuner.Tuner, "_tune_one", decide)
    monkeypatch.setattr(ceilings, "load_or_measure", lambda path, target: {})
    return problems


# A store that cannot be written


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open SQLite files read-only, as for a user without write permission (permission bits do not bind root)."""
    real = sqlite3.connect

    def connect(name: str, **options: Any) -> sqlite3.Connection:
        return real(name.split("?")[0] + "?mode=ro" if options.get("uri") else name, **options)

    monkeypatch.setattr(sqlite3, "connect", connect)


def test_tune_reports_a_read_only_store_before_the_search(
    tmp_path: Path, current: Target, tuned_keys: list[str], read_only: None
) -> None:
    path = tmp_path / "s.db"
    path.touch()
    for args in (("--store", path), ("--store", path, "--json"), ("--store", tmp_path / "s.db" / "below.db")):
        result = command.invoke("tune", "4,64,32", *args)
        assert result.code == 1
        assert "cannot" in result.err + result.out
        assert "GEMMTUNE_STORE" in result.err + result.out or "below.db" in result.err
    assert tuned_keys == []


def test_tune_does_not_replace_an_unwritable_default_store_by_memory(
    tmp_path: Path, tuned_keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GEMMTUNE_STORE", str(tmp_path / "file" / "store.db"))
    result = command.invoke("tune", "4,64,32")
    assert result.code == 1
    assert "file/store.db" in result.err
    assert tuned_keys == []


def test_tune_succeeds_on_a_read_only_store_with_the_decisions(
    tmp_path: Path,
    current: Target,
    tuned_keys: list[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    path = tmp_path / "s.db"
    with contextlib.closing(open_store(path)) as store:
        store.put(current, make_decision(build(4, 64, 32, "bf16"), "winner", current))
    request.getfixturevalue("read_only")
    assert command.invoke("tune", "4,64,32", "--store", path).code == 0
    assert command.invoke("tune", "4,64,32", "--store", path, "--force").code == 1
    assert tuned_keys == []


def test_tune_reports_decisions_that_a_full_store_did_not_store(
    tmp_path: Path, tuned_keys: list[str], monkeypatch: pytest.MonkeyPatch, current: Target
) -> None:
    path, real = tmp_path / "s.db", SqliteStore.put

    def put(self: SqliteStore, target: Target, decision: Decision) -> None:
        if len(tuned_keys) > 1:
            raise StoreError("cannot write the store: database or disk is full")
        real(self, target, decision)

    monkeypatch.setattr(SqliteStore, "put", put)
    result = command.invoke("tune", "4,64,32", "8,64,32", "16,64,32", "--store", path)
    assert result.code == 1
    assert "2 of 3 decisions are not kept: cannot write the store: database or disk is full" in result.err
    second = command.invoke("tune", "4,64,32", "8,64,32", "--store", path, "--json")
    assert second.code == 1
    assert second.json["not_kept"] == 2
    assert "full" in second.json["store_error"]


def test_a_decision_that_was_not_stored_is_stored_with_a_later_one(tuned_keys: list[str], current: Target) -> None:
    class Full(MemoryStore):
        def put(self, target: Target, decision: Decision) -> None:
            if len(tuned_keys) == 1:
                raise StoreError("full")
            super().put(target, decision)

    store = Full()
    events: list[Event] = []
    tuner = gemmtune.tuning.tuner.Tuner(current, ["aten"], store, progress=events.append)
    tuner.tune([(build(m, 64, 32, "bf16"), 1) for m in (4, 8)])
    assert len(list(store.decisions(current))) == 2
    failures = [event for event in events if isinstance(event, DecisionsUnstored)]
    assert failures == [DecisionsUnstored(current.key, 1, "full"), DecisionsUnstored(current.key, 0, "")]


def test_check_writable_writes_no_record_and_raises_on_a_full_disk(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db")
    with contextlib.closing(store):
        store.check_writable()
        assert store.verify() == []
        assert store._connection is not None
        assert store._connection.execute("SELECT count(*) FROM leases").fetchone() == (0,)
        store._connection.execute("VACUUM")
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StoreError, match="full"):
            store.check_writable()


# A file that is no store


def foreign(path: Path) -> None:
    """Write a SQLite database of another application."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE theirs (x)")


def truncated(path: Path) -> None:
    """Write the first half of a store's file."""
    with contextlib.closing(open_store(path)) as store:
        for m in range(1, 20):
            store.put(current_target(), make_decision(build(m, 512, 512, "bf16"), "winner", current_target()))
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "foreign": (foreign, "a SQLite database, but not a gemmtune store (its tables: theirs)"),
    "text": (lambda path: path.write_text("notes\n" * 999), "it is a text file"),
    "export": (
        lambda path: path.write_text('{"format": "gemmtune-decisions", "version": 1}'),
        "`gemmtune store import`",
    ),
    "gzip": (lambda path: path.write_bytes(b"\x1f\x8b" + bytes(99)), "it is a gzip file"),
    "binary": (lambda path: path.write_bytes(bytes(range(256)) * 9), "it is a binary file"),
    "truncated": (truncated, "malformed"),
}
COMMANDS = [
    ("store", "ls"),
    ("store", "ls", "--json"),
    ("store", "show", "a"),
    ("store", "export", "out.json"),
    ("store", "verify"),
    ("store", "prune", "--older-than", 1),
    ("report",),
    ("explain", 1, 8, 8),
]


@pytest.mark.parametrize("args", COMMANDS, ids=lambda args: " ".join(map(str, args)))
@pytest.mark.parametrize("kind", FILES)
def test_commands_name_the_kind_of_a_file_that_is_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, args: tuple[object, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    path, (make, message) = tmp_path / "file.db", FILES[kind]
    make(path)
    result = command.invoke(*args, "--store", path)
    assert result.code == 1
    assert "the store is empty" not in result.out
    assert message in (result.out + result.err).replace("\n", " ") or (kind, args[0]) == ("truncated", "explain")


def test_commands_report_a_damaged_record(tmp_path: Path, current: Target) -> None:
    path, out = tmp_path / "s.db", tmp_path / "out.json"
    with contextlib.closing(open_store(path)) as store:
        for m in (1, 4):
            store.put(current, make_legal_decision(build(m, 512, 512, "bf16"), current))
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE decisions SET body = x'00' WHERE rowid = (SELECT min(rowid) FROM decisions)")
    listed = command.invoke("store", "ls", "--store", path)
    assert listed.code == 1
    assert "4x512x512 bf16" in listed.out
    assert "does not match" in listed.err
    as_json = command.invoke("store", "ls", "--store", path, "--json")
    assert as_json.code == 1
    assert (len(as_json.json["decisions"]), len(as_json.json["damage"])) == (1, 1)
    assert command.invoke("store", "export", out, "--store", path).code == 1
    assert len(json.loads(out.read_text())["decisions"]) == 1


def test_a_locked_store_is_reported_as_locked_and_not_as_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.db"
    with contextlib.closing(open_store(path)) as store:
        store.put(current_target(), make_decision(target=current_target()))
    real = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **options: real(*args, **{**options, "timeout": 0.01}))
    with locked(path):
        result = command.invoke("store", "ls", "--store", path)
    assert result.code == 1
    assert "another process is writing it" in result.err


# Control characters in text


def test_visible_text_is_one_printable_line() -> None:
    assert visible(CONTROL_TEXT).isprintable()
    assert visible("16x4096 bf16 [a=1] é") == "16x4096 bf16 [a=1] é"
    assert visible("\x1b\n\u202e") == "\\x1b\\n\\u202e"


@pytest.fixture
def control_text_store(tmp_path: Path, current: Target) -> Path:
    """Return the path of a store whose decision has control characters in every text."""
    from dataclasses import replace

    import msgspec

    from gemmtune.core.candidate import Candidate
    from gemmtune.core.decision import LayoutDecision, Verdict
    from gemmtune.store.schema import encode_target

    owner = replace(current, name=CONTROL_TEXT, sources=())
    candidate = Candidate.make(CONTROL_TEXT, CONTROL_TEXT, config=CONTROL_TEXT)
    plain = make_decision(build(16, 64, 64, "bf16"), "winner", owner)
    rows = []
    for row in plain.evidence:
        verdict = row.verdict and Verdict("wrong" if row.stage == "failed" else "exact", CONTROL_TEXT)
        sample = row.sample and msgspec.structs.replace(row.sample, conditions={CONTROL_TEXT: CONTROL_TEXT})
        rows.append(msgspec.structs.replace(row, reason=CONTROL_TEXT, verdict=verdict, sample=sample))
    best = msgspec.structs.replace(rows[1], candidate=candidate.to_dict(), id=candidate.id, packing=CONTROL_TEXT)
    layout = LayoutDecision("winner", candidate.id, CONTROL_TEXT, 0.5, 0.4, 0.6, {CONTROL_TEXT: 0.5})
    decision = msgspec.structs.replace(
        plain, chosen=candidate.id, evidence=(rows[0], best, *rows[2:]), alternatives={CONTROL_TEXT: candidate.id},
        stopped=CONTROL_TEXT, layouts={CONTROL_TEXT: layout},
    )  # fmt: skip
    path = tmp_path / "nasty.db"
    assert encode_target(owner)
    with contextlib.closing(open_store(path)) as store:
        store.put(owner, decision)
    return path


def commands_on(control_text_store: Path) -> Iterator[tuple[object, ...]]:
    """Yield the arguments of commands that show or copy the store's decision."""
    listed = command.invoke("store", "ls", "--json", "--store", control_text_store).json["decisions"]
    yield ("store", "ls")
    yield ("store", "show", listed[0]["id"])
    yield ("store", "verify")
    yield ("explain", 16, 64, 64, "--any-machine")
    yield ("store", "export", control_text_store.with_suffix(".json"))
    yield ("store", "import", control_text_store.with_suffix(".json"))
    yield ("tune", f"nothing\x1b[2J/{CONTROL_TEXT}.py:factory")


def test_commands_print_no_control_characters_of_a_store(control_text_store: Path) -> None:
    escapes = 0
    for args in commands_on(control_text_store):
        result = command.invoke(*args, "--store", control_text_store)
        for text in (result.out, result.err):
            assert all(line.isprintable() for line in text.split("\n")), (args, text)
            assert not any(line.startswith("error: forged") for line in text.split("\n"))
            escapes += text.count("\\x1b") and text.count("[bold]b[/]")
    assert escapes > 20


def test_tables_and_progress_lines_print_no_control_characters(
    control_text_store: Path, current: Target, tuned_keys: list[str]
) -> None:
    """An imported decision has such text."""
    from gemmtune.cli.common import plain_console
    from gemmtune.cli.progress import PlainProgress, ProgressState
    from gemmtune.cli.tables import decisions_table
    from gemmtune.core.events import ProblemDone

    with contextlib.closing(open_store(control_text_store)) as store:
        decision = next(store.decisions())
    out = plain_console()
    with out.capture() as capture:
        out.print(decisions_table([decision]))
    import io

    stream = io.StringIO()
    PlainProgress(ProgressState(), stream)(ProblemDone(0, 1, decision, 0.0))
    for text in (capture.get(), stream.getvalue()):
        assert all(line.isprintable() for line in text.split("\n"))
        assert "[bold]b[/]" in text.replace("\n", "")


def test_warnings_of_a_store_have_no_control_characters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, current: Target
) -> None:
    with contextlib.closing(SqliteStore(tmp_path / "s.db")) as store:
        store.put(current, make_decision(build(4, 64, 32, "bf16"), "winner", current))
        assert store._connection is not None
        store._connection.execute("UPDATE decisions SET problem_key = ?", (CONTROL_TEXT,))
        assert list(store.decisions()) == []
    assert all(record.getMessage().isprintable() for record in caplog.records)
    assert caplog.records


def test_the_report_has_no_control_characters_of_a_store(
    control_text_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemmtune.report import interactive

    for library in ("/* plotly */", None):
        monkeypatch.setattr(interactive, "library", lambda library=library: library)
        output = tmp_path / "r.html"
        assert command.invoke("report", "-o", output, "--store", control_text_store, "--all-machines").code == 0
        text = output.read_text()
        assert all(line.isprintable() for line in text.split("\n"))


# Files on a full disk


@pytest.mark.parametrize("command_line", [("report", "-o"), ("store", "export")])
def test_a_failed_write_keeps_the_former_file_and_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, current: Target, command_line: tuple[str, ...]
) -> None:
    path, folder = tmp_path / "s.db", tmp_path / "out"
    with contextlib.closing(open_store(path)) as store:
        store.put(current, make_decision(build(4, 64, 32, "bf16"), "winner", current))
    folder.mkdir()
    (folder / "file").write_text("the former one")

    def fsync(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(files.os, "fsync", fsync)
        result = command.invoke(*command_line, folder / "file", "--store", path)
    assert result.code == 1
    assert "No space left on device" in result.err
    assert os.listdir(folder) == ["file"]
    assert (folder / "file").read_text() == "the former one"


def test_a_report_has_the_mode_of_the_umask_and_follows_symbolic_links(tmp_path: Path, current: Target) -> None:
    path = tmp_path / "s.db"
    with contextlib.closing(open_store(path)) as store:
        store.put(current, make_decision(build(4, 64, 32, "bf16"), "winner", current))
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    assert command.invoke("report", "-o", tmp_path / "link.html", "--store", path).code == 0
    assert (tmp_path / "link.html").is_symlink()
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "real.html").stat().st_mode & 0o777 == 0o666 & ~mask


# Dispatch while another process writes the store


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a store's file."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield


@pytest.fixture
def served_store(tmp_path: Path, current: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqliteStore]:
    """Make dispatch serve from a SQLite store with one decision."""
    former = RUNTIME._store
    store = SqliteStore(tmp_path / "s.db")
    store.put(current, make_legal_decision(build(4, 64, 32, "fp32"), current))
    RUNTIME.refresh(store)
    monkeypatch.setattr(RUNTIME, "_warned", set())
    yield store
    RUNTIME._store = former
    RUNTIME.refresh()
    store.close()


def record_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list to which every timeout that SQLite gets for locks is appended, in seconds."""
    timeouts: list[float] = []
    real = SqliteStore._wait

    def wait(self: SqliteStore, seconds: float) -> None:
        timeouts.append(seconds)
        real(self, seconds)

    monkeypatch.setattr(SqliteStore, "_wait", wait)
    return timeouts


def test_a_call_does_not_wait_for_a_locked_store_and_reads_it_later(
    served_store: SqliteStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from gemmtune.dispatch import runtime

    x, w = torch.randn(4, 32), torch.nn.Parameter(torch.randn(64, 32), requires_grad=False)
    monkeypatch.setattr(runtime, "RETRY_S", 0.0)
    timeouts = record_waits(monkeypatch)
    with caplog.at_level(logging.WARNING, "gemmtune"), locked(served_store.path):
        for _ in range(3):
            torch.testing.assert_close(gemmtune.linear(x, w), functional.linear(x, w))
        served_store.close()  # a process's first call opens the file
        torch.testing.assert_close(gemmtune.linear(x, w), functional.linear(x, w))
    assert timeouts
    assert set(timeouts) == {SHORT_TIMEOUT_S}
    assert sum("being written" in record.getMessage() for record in caplog.records) == 1
    assert DISPATCH_CACHE == {}  # calls that were served meanwhile are not cached
    gemmtune.linear(x, w)
    assert len(DISPATCH_CACHE) == 1
    assert next(iter(RUNTIME._indices.values()))._points


def test_a_locked_store_is_not_read_at_every_call(served_store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(4, 32), torch.randn(64, 32)
    timeouts = record_waits(monkeypatch)
    with locked(served_store.path):
        for _ in range(5):
            gemmtune.linear(x, w)
    assert len(timeouts) == 1


def test_a_read_with_a_short_timeout_does_not_wait_for_another_thread(served_store: SqliteStore) -> None:
    has_lock, done = threading.Event(), threading.Event()

    def write() -> None:
        with served_store._lock:
            has_lock.set()
            done.wait(60)

    thread = threading.Thread(target=write)
    thread.start()
    has_lock.wait(60)
    try:
        with served_store.short_timeout(), pytest.raises(StoreBusy):
            served_store.get(current_target(), "any")
    finally:
        done.set()
        thread.join()
    assert served_store.get(current_target(), "any") is None


def test_reads_and_writes_without_a_short_timeout_wait_for_a_writer(
    served_store: SqliteStore, current: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts = record_waits(monkeypatch)
    with served_store.short_timeout():
        served_store.get(current, "any")
    served_store.get(current, "any")
    served_store.put(current, make_legal_decision(build(8, 64, 32, "fp32"), current))
    assert timeouts == [SHORT_TIMEOUT_S, 10.0, 10.0]


def test_on_miss_does_not_tune_while_the_store_is_locked(
    served_store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    missed: list[Problem] = []
    monkeypatch.setattr(RUNTIME, "miss_hook", lambda problem, device: missed.append(problem))
    with gemmtune.policy("on-miss"), locked(served_store.path):
        gemmtune.linear(torch.randn(4, 32), torch.randn(64, 32))
        assert missed == []
