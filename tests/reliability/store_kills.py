"""Writers that are killed at a random moment, and counts of the acknowledged records that are lost or damaged.

The writers are forked from a process that has imported torch: 2,000 imports would take most of an hour.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import time
from pathlib import Path

from gemmtune.store import Artifacts, SqliteStore
from gemmtune.testing.store_suite import PROBLEM, TARGET

from .store_children import FIXTURE, body_of, decision_of, key_of


def kill_writers(folder: str, kills: int, seed: int) -> None:
    """Kill ``kills`` writers, two at a time, each at a random moment, and print the counts of faults."""
    rng, tally = random.Random(seed), _Tally()
    store = Path()
    for round_ in range((kills + 1) // 2):
        if round_ % 20 == 0:  # a new store: kills also interrupt its creation and its upgrade
            tally.finish_store(store)
            store = Path(folder) / str(round_) / "store.db"
            if round_ % 40 == 20:
                store.parent.mkdir()
                shutil.copy(FIXTURE, store)
        writers = [_Writer(store, 10_000 * (2 * round_ + index)) for index in range(2)]
        for writer in writers:
            writer.kill_after(rng.uniform(0.0, 0.05))
        for writer in writers:
            tally.add(writer)
        tally.check(store, [number for writer in writers for number in writer.acknowledged])
    tally.finish_store(store)
    print(json.dumps(tally.figures))


class _Writer:
    """Forked process that writes decisions and artifacts by turns, and reports acknowledged writes through a pipe."""

    def __init__(self, store: Path, first: int) -> None:
        self._read_end, write_end = os.pipe()
        self._pid = os.fork()
        self.acknowledged: list[tuple[str, int]] = []
        self.errors: list[str] = []
        if self._pid == 0:
            try:
                _write_until_killed(store, first, write_end)
            except BaseException as error:  # the parent counts any error
                os.write(write_end, f"error {type(error).__name__}: {str(error)[:200]}\n".encode())
            finally:
                os._exit(1)
        os.close(write_end)
        select.select([self._read_end], [], [], 60.0)
        self._started = time.perf_counter()

    def kill_after(self, seconds: float) -> None:
        """Send SIGKILL ``seconds`` after the first write, then read the reports."""
        time.sleep(max(0.0, self._started + seconds - time.perf_counter()))
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        with os.fdopen(self._read_end, "rb") as pipe:
            text = pipe.read().decode()
        for line in text.splitlines(keepends=True):
            kind, _, rest = line.partition(" ")
            if kind == "error":
                self.errors.append(rest.strip())
            elif kind in ("decision", "artifact") and line.endswith("\n"):
                self.acknowledged.append((kind, int(rest)))


def _write_until_killed(path: Path, first: int, write_end: int) -> None:
    """Write decisions and artifacts from number ``first``, and report each to the pipe."""
    store, artifacts = SqliteStore(path), Artifacts.beside(path)
    os.write(write_end, b"ready\n")
    for number in range(first, first + 10_000):
        store.put(TARGET, decision_of(number))
        os.write(write_end, f"decision {number}\n".encode())
        artifacts.put(key_of(number), body_of(number))
        os.write(write_end, f"artifact {number}\n".encode())


class _Tally:
    """Counts of the acknowledged records of killed writers, and of their faults."""

    def __init__(self) -> None:
        self.figures = {
            "killed": 0, "idle": 0, "decisions": 0, "artifacts": 0, "lost": 0, "damaged": 0, "left": 0, "stores": 0,
            "journals": 0, "temporary": 0, "errors": [],
        }  # fmt: skip
        self._acknowledged: list[tuple[str, int]] = []

    def add(self, writer: _Writer) -> None:
        """Count a killed writer and its errors."""
        self.figures["killed"] += 1
        self.figures["idle"] += not writer.acknowledged
        self.figures["errors"] += writer.errors

    def check(self, path: Path, acknowledged: list[tuple[str, int]]) -> None:
        """Read the acknowledged records of this round, as another process would."""
        self._acknowledged += acknowledged
        self.figures["journals"] += path.with_name(path.name + "-journal").exists()
        folder = Artifacts.beside(path).directory
        self.figures["temporary"] += sum(name.endswith(".tmp") for name in os.listdir(folder)) if folder.exists() else 0
        with contextlib.closing(SqliteStore(path)) as store:
            self._read_back(store, Artifacts.beside(path), acknowledged)

    def finish_store(self, path: Path) -> None:
        """Write once more, which removes temporary files, read all acknowledged records, and delete the store."""
        if not path.name:
            return
        artifacts = Artifacts.beside(path)
        with contextlib.closing(SqliteStore(path)) as store:
            artifacts.put(key_of(-1), b"last")
            store.put(TARGET, decision_of(1))
            self._read_back(store, artifacts, self._acknowledged)
            self.figures["damaged"] += len(store.verify())
        names = [*os.listdir(path.parent), *os.listdir(artifacts.directory)]
        self.figures["left"] += sum(name.endswith((".tmp", "-journal")) for name in names)
        self.figures["stores"] += 1
        for kind in ("decision", "artifact"):
            self.figures[f"{kind}s"] += sum(acknowledged_kind == kind for acknowledged_kind, _ in self._acknowledged)
        self._acknowledged.clear()
        shutil.rmtree(path.parent)

    def _read_back(self, store: SqliteStore, artifacts: Artifacts, acknowledged: list[tuple[str, int]]) -> None:
        for kind, number in acknowledged:
            if kind == "decision":
                actual: object = store.get(TARGET, PROBLEM.with_m(number).key)
                expected: object = decision_of(number)
            else:
                path = artifacts.get(key_of(number))
                actual, expected = None if path is None else path.read_bytes(), body_of(number)
            self.figures["lost"] += actual is None
            self.figures["damaged"] += actual is not None and actual != expected
