"""Stores that cannot be written, are no stores or are locked; text in them that acts; files on a full disk."""

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
from helpers import command
from helpers.factories import make_decision, make_legal_decision

NASTY = "a\x1b]0;title\x07\x1b[2J\nerror: forged [bold]b[/] \u202e\x9b31m"


@pytest.fixture
def here() -> Target:
    return current_target()


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The problems that were searched: a search decides at once."""
    problems: list[str] = []

    def decide(self: Any, problem: Problem, crew: object) -> Decision:
        problems.append(problem.key)
        decision = make_decision(problem, "winner", self._target)
        self._keep(decision)
        return decision

    monkeypatch.setattr(gemmtune.tuning.tuner.Tuner, "_tune_one", decide)
    monkeypatch.setattr(ceilings, "load_or_measure", lambda path, target: {})
    return problems


# A store that cannot be written


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite files are opened as a user without write permission would get them (permission bits bind not root)."""
    real = sqlite3.connect

    def connect(name: str, **options: Any) -> sqlite3.Connection:
        return real(name.split("?")[0] + "?mode=ro" if options.get("uri") else name, **options)

    monkeypatch.setattr(sqlite3, "connect", connect)


def test_a_store_that_cannot_be_written_is_said_before_the_search(
    tmp_path: Path, here: Target, searched: list[str], read_only: None
) -> None:
    path = tmp_path / "s.db"
    path.touch()
    for args in (("--store", path), ("--store", path, "--json"), ("--store", tmp_path / "s.db" / "below.db")):
        result = command.invoke("tune", "4,64,32", *args)
        assert result.code == 1
        assert "cannot" in result.err + result.out
        assert "GEMMTUNE_STORE" in result.err + result.out or "below.db" in result.err
    assert searched == []


def test_a_default_store_that_cannot_be_written_is_not_replaced_by_memory(
    tmp_path: Path, searched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GEMMTUNE_STORE", str(tmp_path / "file" / "store.db"))
    result = command.invoke("tune", "4,64,32")
    assert result.code == 1
    assert "file/store.db" in result.err
    assert searched == []


def test_what_the_store_knows_already_needs_no_writing(
    tmp_path: Path, here: Target, searched: list[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "s.db"
    with contextlib.closing(open_store(path)) as store:
        store.put(here, make_decision(build(4, 64, 32, "bf16"), "winner", here))
    request.getfixturevalue("read_only")
    assert command.invoke("tune", "4,64,32", "--store", path).code == 0
    assert command.invoke("tune", "4,64,32", "--store", path, "--force").code == 1
    assert searched == []


def test_a_store_that_fills_up_later_is_said_and_is_a_failure(
    tmp_path: Path, searched: list[str], monkeypatch: pytest.MonkeyPatch, here: Target
) -> None:
    path, real = tmp_path / "s.db", SqliteStore.put

    def put(self: SqliteStore, target: Target, decision: Decision) -> None:
        if len(searched) > 1:
            raise StoreError("cannot write the store: database or disk is full")
        real(self, target, decision)

    monkeypatch.setattr(SqliteStore, "put", put)
    result = command.invoke("tune", "4,64,32", "8,64,32", "16,64,32", "--store", path)
    assert result.code == 1
    assert "2 of 3 decisions are not kept: cannot write the store: database or disk is full" in result.err
    again = command.invoke("tune", "4,64,32", "8,64,32", "--store", path, "--json")
    assert again.code == 1
    assert again.json["not_kept"] == 2
    assert "full" in again.json["store_error"]


def test_what_was_not_kept_is_kept_once_there_is_room(searched: list[str], here: Target) -> None:
    class Full(MemoryStore):
        def put(self, target: Target, decision: Decision) -> None:
            if len(searched) == 1:
                raise StoreError("full")
            super().put(target, decision)

    store = Full()
    tuner = gemmtune.tuning.tuner.Tuner(here, ["aten"], store)
    tuner.tune([(build(m, 64, 32, "bf16"), 1) for m in (4, 8)])
    assert len(list(store.decisions(here))) == 2
    assert tuner.unstored == []


def test_the_probe_leaves_nothing_and_meets_a_full_disk(tmp_path: Path) -> None:
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
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE theirs (x)")


def truncated(path: Path) -> None:
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
def test_what_a_foreign_or_damaged_file_is_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, args: tuple[object, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    path, (make, words) = tmp_path / "file.db", FILES[kind]
    make(path)
    result = command.invoke(*args, "--store", path)
    assert result.code == 1
    assert "the store is empty" not in result.out
    assert words in (result.out + result.err).replace("\n", " ") or (kind, args[0]) == ("truncated", "explain")


def test_a_damaged_record_is_not_passed_over(tmp_path: Path, here: Target) -> None:
    path, out = tmp_path / "s.db", tmp_path / "out.json"
    with contextlib.closing(open_store(path)) as store:
        for m in (1, 4):
            store.put(here, make_legal_decision(build(m, 512, 512, "bf16"), here))
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


def test_a_store_that_somebody_writes_is_not_called_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.db"
    with contextlib.closing(open_store(path)) as store:
        store.put(current_target(), make_decision(target=current_target()))
    real = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **options: real(*args, **{**options, "timeout": 0.01}))
    with locked(path):
        result = command.invoke("store", "ls", "--store", path)
    assert result.code == 1
    assert "another process is writing it" in result.err


# Text that acts


def test_visible_text_is_one_line_that_does_nothing() -> None:
    assert visible(NASTY).isprintable()
    assert visible("16x4096 bf16 [a=1] é") == "16x4096 bf16 [a=1] é"
    assert visible("\x1b\n\u202e") == "\\x1b\\n\\u202e"


@pytest.fixture
def nasty(tmp_path: Path, here: Target) -> Path:
    """A store whose decision has such text wherever there is text."""
    from dataclasses import replace

    import msgspec

    from gemmtune.core.candidate import Candidate
    from gemmtune.core.decision import LayoutDecision, Verdict
    from gemmtune.store.schema import encode_target

    owner = replace(here, name=NASTY, sources=())
    candidate = Candidate.make(NASTY, NASTY, config=NASTY)
    made = make_decision(build(16, 64, 64, "bf16"), "winner", owner)
    rows = []
    for row in made.evidence:
        verdict = row.verdict and Verdict("wrong" if row.stage == "failed" else "exact", NASTY)
        sample = row.sample and msgspec.structs.replace(row.sample, conditions={NASTY: NASTY})
        rows.append(msgspec.structs.replace(row, reason=NASTY, verdict=verdict, sample=sample))
    best = msgspec.structs.replace(rows[1], candidate=candidate.to_dict(), id=candidate.id, packing=NASTY)
    layout = LayoutDecision("winner", candidate.id, NASTY, 0.5, 0.4, 0.6, {NASTY: 0.5})
    decision = msgspec.structs.replace(
        made, chosen=candidate.id, evidence=(rows[0], best, *rows[2:]), alternatives={NASTY: candidate.id},
        stopped=NASTY, layouts={NASTY: layout},
    )  # fmt: skip
    path = tmp_path / "nasty.db"
    assert encode_target(owner)
    with contextlib.closing(open_store(path)) as store:
        store.put(owner, decision)
    return path


def lines_of(nasty: Path) -> Iterator[tuple[object, ...]]:
    listed = command.invoke("store", "ls", "--json", "--store", nasty).json["decisions"]
    yield ("store", "ls")
    yield ("store", "show", listed[0]["id"])
    yield ("store", "verify")
    yield ("explain", 16, 64, 64, "--any-machine")
    yield ("store", "export", nasty.with_suffix(".json"))
    yield ("store", "import", nasty.with_suffix(".json"))
    yield ("tune", f"nothing\x1b[2J/{NASTY}.py:factory")


def test_no_text_of_a_store_acts_on_the_terminal(nasty: Path) -> None:
    shown = 0
    for args in lines_of(nasty):
        result = command.invoke(*args, "--store", nasty)
        for text in (result.out, result.err):
            assert all(line.isprintable() for line in text.split("\n")), (args, text)
            assert not any(line.startswith("error: forged") for line in text.split("\n"))
            shown += text.count("\\x1b") and text.count("[bold]b[/]")
    assert shown > 20


def test_tuning_shows_such_text_as_it_is(nasty: Path, here: Target, searched: list[str]) -> None:
    """Tables and progress lines of a decision that was imported."""
    from gemmtune.cli.common import plain_console
    from gemmtune.cli.progress import PlainProgress, ProgressState
    from gemmtune.cli.tables import decisions_table
    from gemmtune.core.events import ProblemDone

    with contextlib.closing(open_store(nasty)) as store:
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


def test_warnings_of_a_store_do_not_act(tmp_path: Path, caplog: pytest.LogCaptureFixture, here: Target) -> None:
    with contextlib.closing(SqliteStore(tmp_path / "s.db")) as store:
        store.put(here, make_decision(build(4, 64, 32, "bf16"), "winner", here))
        assert store._connection is not None
        store._connection.execute("UPDATE decisions SET problem_key = ?", (NASTY,))
        assert list(store.decisions()) == []
    assert all(record.getMessage().isprintable() for record in caplog.records)
    assert caplog.records


def test_the_report_escapes_such_text(nasty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gemmtune.report import interactive

    for library in ("/* plotly */", None):
        monkeypatch.setattr(interactive, "library", lambda library=library: library)
        output = tmp_path / "r.html"
        assert command.invoke("report", "-o", output, "--store", nasty, "--all-machines").code == 0
        text = output.read_text()
        assert all(line.isprintable() for line in text.split("\n"))


# Files on a full disk


@pytest.mark.parametrize("command_line", [("report", "-o"), ("store", "export")])
def test_a_full_disk_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Target, command_line: tuple[str, ...]
) -> None:
    path, folder = tmp_path / "s.db", tmp_path / "out"
    with contextlib.closing(open_store(path)) as store:
        store.put(here, make_decision(build(4, 64, 32, "bf16"), "winner", here))
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


def test_a_report_is_for_whoever_may_read_it_and_follows_links(tmp_path: Path, here: Target) -> None:
    path = tmp_path / "s.db"
    with contextlib.closing(open_store(path)) as store:
        store.put(here, make_decision(build(4, 64, 32, "bf16"), "winner", here))
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    assert command.invoke("report", "-o", tmp_path / "link.html", "--store", path).code == 0
    assert (tmp_path / "link.html").is_symlink()
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "real.html").stat().st_mode & 0o777 == 0o666 & ~mask


# Serving beside a writer


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield


@pytest.fixture
def served(tmp_path: Path, here: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqliteStore]:
    former = RUNTIME._store
    store = SqliteStore(tmp_path / "s.db")
    store.put(here, make_legal_decision(build(4, 64, 32, "fp32"), here))
    RUNTIME.refresh(store)
    monkeypatch.setattr(RUNTIME, "_warned", set())
    yield store
    RUNTIME._store = former
    RUNTIME.refresh()
    store.close()


def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that SQLite was told to wait for locks, as they come."""
    seen: list[float] = []
    real = SqliteStore._wait

    def wait(self: SqliteStore, seconds: float) -> None:
        seen.append(seconds)
        real(self, seconds)

    monkeypatch.setattr(SqliteStore, "_wait", wait)
    return seen


def test_a_call_does_not_wait_for_a_locked_store_and_looks_again(
    served: SqliteStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from gemmtune.dispatch import runtime

    x, w = torch.randn(4, 32), torch.nn.Parameter(torch.randn(64, 32), requires_grad=False)
    monkeypatch.setattr(runtime, "RETRY_S", 0.0)
    waited = waits(monkeypatch)
    with caplog.at_level(logging.WARNING, "gemmtune"), locked(served.path):
        for _ in range(3):
            torch.testing.assert_close(gemmtune.linear(x, w), functional.linear(x, w))
        served.close()  # a process's first call opens the file
        torch.testing.assert_close(gemmtune.linear(x, w), functional.linear(x, w))
    assert waited
    assert set(waited) == {SHORT_TIMEOUT_S}
    assert sum("being written" in record.getMessage() for record in caplog.records) == 1
    assert DISPATCH_CACHE == {}  # what was served meanwhile is not what serves from now on
    gemmtune.linear(x, w)
    assert len(DISPATCH_CACHE) == 1
    assert next(iter(RUNTIME._indices.values()))._points


def test_a_busy_store_is_not_asked_by_every_call(served: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(4, 32), torch.randn(64, 32)
    waited = waits(monkeypatch)
    with locked(served.path):
        for _ in range(5):
            gemmtune.linear(x, w)
    assert len(waited) == 1


def test_a_thread_that_writes_does_not_hold_up_a_call_either(served: SqliteStore) -> None:
    held, done = threading.Event(), threading.Event()

    def write() -> None:
        with served._lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=write)
    thread.start()
    held.wait(60)
    try:
        with served.short_timeout(), pytest.raises(StoreBusy):
            served.get(current_target(), "any")
    finally:
        done.set()
        thread.join()
    assert served.get(current_target(), "any") is None


def test_a_tuner_still_waits_for_a_writer(served: SqliteStore, here: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = waits(monkeypatch)
    with served.short_timeout():
        served.get(here, "any")
    served.get(here, "any")
    served.put(here, make_legal_decision(build(8, 64, 32, "fp32"), here))
    assert waited == [SHORT_TIMEOUT_S, 10.0, 10.0]


def test_on_miss_does_not_tune_what_a_busy_store_may_know(served: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Problem] = []
    monkeypatch.setattr(RUNTIME, "miss_hook", lambda problem, device: asked.append(problem))
    with gemmtune.policy("on-miss"), locked(served.path):
        gemmtune.linear(torch.randn(4, 32), torch.randn(64, 32))
        assert asked == []
