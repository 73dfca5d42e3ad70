"""A disk that fails: every single call in turn, a limit of file size, a directory that may only be read."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gemmtune.core.errors import StoreError
from gemmtune.store import Artifacts, MemoryStore, SqliteStore, open_store
from gemmtune.testing.store_suite import PROBLEM, TARGET

from .store_children import FIXTURE, decision_of, key_of

WRITES, SYNCS, TRUNCATES, NAMES, READS = 1, 2, 4, 8, 16


def faulty(folder: str, only_first: int) -> None:
    """Fail each call of each operation in turn (the preloaded library does it); prints what came of it.

    only_first: how many of an operation's calls to fail at most; 0 for all of them.
    """
    figures: dict[str, Any] = {"faults": 0, "refused": 0, "missed": 0, "done": 0, "wrong": []}
    weather = {
        "disk full": (errno.ENOSPC, WRITES | TRUNCATES | NAMES, 1),
        "disk full, once": (errno.ENOSPC, WRITES | TRUNCATES | NAMES, 0),
        "EIO": (errno.EIO, WRITES | SYNCS | TRUNCATES | NAMES | READS, 1),
        "EIO, once": (errno.EIO, WRITES | SYNCS | TRUNCATES | NAMES | READS, 0),
        "EIO of fsync": (errno.EIO, SYNCS, 0),
    }
    for name, (error, kinds, sticky) in weather.items():
        for operation in _OPERATIONS:
            after = 0
            while _one_fault(Path(folder), operation, (kinds, error, after, sticky), figures, name):
                after += 1
                if only_first and after >= only_first:
                    break
    print(json.dumps(figures))


_OPERATIONS = ("first put", "put", "upgrade", "import", "artifact", "first artifact", "lease", "get", "get artifact")


def _one_fault(folder: Path, operation: str, fault: tuple[int, int, int, int], figures: Any, name: str) -> bool:
    """Run an operation whose n-th call fails; False when it has fewer calls than that."""
    room = folder / "room"
    room.mkdir()
    path = room / "deep" / "store.db"
    store, artifacts = SqliteStore(path), Artifacts.beside(path)
    _prepare(operation, path, store, artifacts)
    library, what = ctypes.CDLL(None), f"{name}, call {fault[2]} of {operation}"
    library.fault_arm(str(room).encode(), *fault[:2], ctypes.c_long(fault[2]), fault[3])
    try:
        answer = _operate(operation, room, store, artifacts)
        figures["missed" if answer is False else "done"] += 1
        result: bool | None = answer
    except StoreError:
        result = None
        figures["refused"] += 1
    except Exception as error:  # the point of the check: nothing else may come out
        result = None
        figures["wrong"].append(f"{what}: {type(error).__name__}: {error}")
    hits = library.fault_disarm()
    figures["faults"] += hits > 0
    _check_after(operation, result, path, store, artifacts, lambda text: figures["wrong"].append(f"{what}: {text}"))
    shutil.rmtree(room)
    return bool(hits)


def _prepare(operation: str, path: Path, store: SqliteStore, artifacts: Artifacts) -> None:
    if operation == "upgrade":
        path.parent.mkdir()
        shutil.copy(FIXTURE, path)
    elif not operation.startswith("first"):
        store.put(TARGET, decision_of(7))
        artifacts.put(key_of(7), b"kept" * 5000)
    if operation == "import":
        store.put(TARGET, decision_of(8))
        store.export(path.parent.parent / "export.json")
        store.prune(keep=replace(TARGET, threads=77))
        store.put(TARGET, decision_of(7))
    store.close()


def _operate(operation: str, room: Path, store: SqliteStore, artifacts: Artifacts) -> bool:
    """Whether it did what it should; False is a reader's miss."""
    if operation == "get":
        return store.get(TARGET, PROBLEM.with_m(7).key) == decision_of(7)
    if operation == "get artifact":
        return artifacts.get(key_of(7)) is not None
    if operation.endswith("artifact"):
        artifacts.put(key_of(9), b"new" * 5000)
    elif operation == "import":
        store.import_(room / "export.json")
    elif operation == "lease":
        lease = store.lease(TARGET, PROBLEM.key, 60.0)
        if lease is not None:
            lease.release()
    else:
        store.put(TARGET, decision_of(9))
    return True


def _check_after(
    operation: str, done: bool | None, path: Path, used: SqliteStore, artifacts: Artifacts, wrong: Callable[[str], None]
) -> None:
    """With the disk well again: what was acknowledged is there, the file is sound, and the same store goes on."""
    with contextlib.closing(SqliteStore(path)) as fresh:
        kept = [1, 3] if operation == "upgrade" else [] if operation.startswith("first") else [7]
        if operation != "upgrade" and kept and (found := artifacts.get(key_of(7))) is None:
            wrong(f"the artifact is lost ({found})")
        if done and operation in ("first put", "put", "upgrade"):
            kept.append(9)
        if done and operation == "import":
            kept.append(8)
        if done and operation.endswith("artifact") and artifacts.get(key_of(7 if "get" in operation else 9)) is None:
            wrong("an acknowledged artifact is lost")
        lost = [number for number in kept if fresh.get(TARGET, PROBLEM.with_m(number).key) is None]
        if lost:
            wrong(f"decisions lost: {lost}")
        for text in fresh.verify():
            wrong(text)
        for store in (used, fresh):
            with _reported(wrong):
                store.put(TARGET, decision_of(10))
        with _reported(wrong):
            artifacts.put(key_of(10), b"after")
        used.close()
    left = [
        name for _, _, names in os.walk(path.parent.parent) for name in names if name.endswith((".tmp", "-journal"))
    ]
    # A temporary file whose removal failed too stays as long as its process lives: this one.
    left = [name for name in left if done or not name.endswith(".tmp")]
    if left:
        wrong(f"left behind: {left}")


@contextlib.contextmanager
def _reported(wrong: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        wrong(f"afterwards: {error}")


def limited(folder: str, step: int) -> None:
    """Put decisions, artifacts and exports under a limit of file size (a disk that is full at that byte), for each."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    wrong: list[str] = []
    refused = limits = 0
    for limit in range(0, 120_000, step):
        room = Path(folder) / "limited"
        path = room / "store.db"
        store, artifacts, kept = SqliteStore(path), Artifacts.beside(path), []
        store.put(TARGET, decision_of(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        for number in range(2, 40):
            try:
                store.put(TARGET, decision_of(number))
                kept.append(number)
            except StoreError:
                refused += 1
                break
        try:
            artifacts.put(key_of(1), bytes(50_000))
        except StoreError:
            refused += 1
        try:
            store.export(room / "export.json")
        except StoreError:
            refused += 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        limits += 1
        with contextlib.closing(SqliteStore(path)) as fresh:
            wrong += [
                f"limit {limit}: {n} lost" for n in [1, *kept] if fresh.get(TARGET, PROBLEM.with_m(n).key) is None
            ]
            wrong += fresh.verify()
        wrong += [f"limit {limit}: {p.name} left" for p in room.rglob("*") if p.name.endswith((".tmp", "-journal"))]
        store.close()
        shutil.rmtree(room)
    print(json.dumps({"limits": limits, "refused": refused, "wrong": wrong}))


def read_only(folder: str) -> None:
    """A store in a directory that may only be read: as a user whom permission bits bind."""
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
        os.setgid(65534)
        os.setuid(65534)
    path, wrong = Path(folder) / "store.db", []
    artifacts = Artifacts.beside(path)
    with contextlib.closing(SqliteStore(path)) as store:
        store.put(TARGET, decision_of(1))
        artifacts.put(key_of(1), b"kept")
    path.chmod(0o400)
    artifacts.directory.chmod(0o500)
    Path(folder).chmod(0o500)
    with contextlib.closing(SqliteStore(path)) as store:
        if store.get(TARGET, PROBLEM.with_m(1).key) != decision_of(1):
            wrong.append("what is there is not read")
        if artifacts.get(key_of(1)) is None:
            wrong.append("the artifact that is there is not found")
        if store.verify():
            wrong.append("it does not verify")
        refused: tuple[Callable[[], object], ...] = (
            lambda: store.put(TARGET, decision_of(2)),
            lambda: store.lease(TARGET, PROBLEM.key, 60.0),
            lambda: artifacts.put(key_of(2), b"new"),
            lambda: store.export(Path(folder) / "export.json"),
            lambda: SqliteStore(Path(folder) / "other.db").put(TARGET, decision_of(2)),
        )
        for number, action in enumerate(refused):
            try:
                action()
                wrong.append(f"write {number} was not refused")
            except StoreError:
                continue
    os.environ["GEMMTUNE_STORE"] = str(Path(folder) / "none.db")
    if not isinstance(open_store(), MemoryStore):
        wrong.append("a default store that cannot be written is not kept in memory")
    Path(folder).chmod(0o700)
    artifacts.directory.chmod(0o700)
    print(json.dumps({"refused": len(refused), "wrong": wrong}))
