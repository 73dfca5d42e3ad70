"""Operations on a failing disk: each call fails in turn, files have a size limit, or the directory is read-only."""

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


def fail_each_call(folder: str, max_calls: int) -> None:
    """Fail each call of each operation in turn through the preloaded library, and print the counts.

    ``max_calls`` is the largest number of calls of an operation that fail in turn; 0 means all.
    """
    figures: dict[str, Any] = {"faults": 0, "refused": 0, "missed": 0, "done": 0, "wrong": []}
    fault_kinds = {
        "disk full": (errno.ENOSPC, WRITES | TRUNCATES | NAMES, 1),
        "disk full, once": (errno.ENOSPC, WRITES | TRUNCATES | NAMES, 0),
        "EIO": (errno.EIO, WRITES | SYNCS | TRUNCATES | NAMES | READS, 1),
        "EIO, once": (errno.EIO, WRITES | SYNCS | TRUNCATES | NAMES | READS, 0),
        "EIO of fsync": (errno.EIO, SYNCS, 0),
    }
    for name, (error, kinds, sticky) in fault_kinds.items():
        for operation in _OPERATIONS:
            after = 0
            while _run_with_fault(Path(folder), operation, (kinds, error, after, sticky), figures, name):
                after += 1
                if max_calls and after >= max_calls:
                    break
    print(json.dumps(figures))


_OPERATIONS = ("first put", "put", "upgrade", "import", "artifact", "first artifact", "lease", "get", "get artifact")


def _run_with_fault(folder: Path, operation: str, fault: tuple[int, int, int, int], figures: Any, name: str) -> bool:
    """Run an operation whose n-th call fails. Return False if it has fewer calls."""
    directory = folder / "room"
    directory.mkdir()
    path = directory / "deep" / "store.db"
    store, artifacts = SqliteStore(path), Artifacts.beside(path)
    _prepare(operation, path, store, artifacts)
    library, label = ctypes.CDLL(None), f"{name}, call {fault[2]} of {operation}"
    library.fault_arm(str(directory).encode(), *fault[:2], ctypes.c_long(fault[2]), fault[3])
    try:
        answer = _operate(operation, directory, store, artifacts)
        figures["missed" if answer is False else "done"] += 1
        result: bool | None = answer
    except StoreError:
        result = None
        figures["refused"] += 1
    except Exception as error:  # any other exception is a finding
        result = None
        figures["wrong"].append(f"{label}: {type(error).__name__}: {error}")
    hits = library.fault_disarm()
    figures["faults"] += hits > 0
    _check_after(operation, result, path, store, artifacts, lambda text: figures["wrong"].append(f"{label}: {text}"))
    shutil.rmtree(directory)
    return bool(hits)


def _prepare(operation: str, path: Path, store: SqliteStore, artifacts: Artifacts) -> None:
    """Write the records, artifacts and files that an operation needs."""
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


def _operate(operation: str, directory: Path, store: SqliteStore, artifacts: Artifacts) -> bool:
    """Run an operation. Return False if a read has no result, else True."""
    if operation == "get":
        return store.get(TARGET, PROBLEM.with_m(7).key) == decision_of(7)
    if operation == "get artifact":
        return artifacts.get(key_of(7)) is not None
    if operation.endswith("artifact"):
        artifacts.put(key_of(9), b"new" * 5000)
    elif operation == "import":
        store.import_(directory / "export.json")
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
    """Check after the fault that acknowledged records exist, that the file is valid, and that the used store works."""
    with contextlib.closing(SqliteStore(path)) as new_store:
        expected = [1, 3] if operation == "upgrade" else [] if operation.startswith("first") else [7]
        if operation != "upgrade" and expected and (artifact := artifacts.get(key_of(7))) is None:
            wrong(f"the artifact is lost ({artifact})")
        if done and operation in ("first put", "put", "upgrade"):
            expected.append(9)
        if done and operation == "import":
            expected.append(8)
        if done and operation.endswith("artifact") and artifacts.get(key_of(7 if "get" in operation else 9)) is None:
            wrong("an acknowledged artifact is lost")
        lost = [number for number in expected if new_store.get(TARGET, PROBLEM.with_m(number).key) is None]
        if lost:
            wrong(f"decisions lost: {lost}")
        for text in new_store.verify():
            wrong(text)
        for store in (used, new_store):
            with _reporting_errors(wrong):
                store.put(TARGET, decision_of(10))
        with _reporting_errors(wrong):
            artifacts.put(key_of(10), b"after")
        used.close()
    remaining_files = [
        name for _, _, names in os.walk(path.parent.parent) for name in names if name.endswith((".tmp", "-journal"))
    ]
    # A temporary file whose removal failed, too, exists as long as its process, which is this one.
    remaining_files = [name for name in remaining_files if done or not name.endswith(".tmp")]
    if remaining_files:
        wrong(f"left behind: {remaining_files}")


@contextlib.contextmanager
def _reporting_errors(wrong: Callable[[str], None]) -> Iterator[None]:
    """Report a StoreError of the block."""
    try:
        yield
    except StoreError as error:
        wrong(f"afterwards: {error}")


def run_with_size_limits(folder: str, step: int) -> None:
    """Write decisions, artifacts and exports under every limit of file size, as on a disk that is full at that byte."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    wrong: list[str] = []
    refused = limits = 0
    for limit in range(0, 120_000, step):
        directory = Path(folder) / "limited"
        path = directory / "store.db"
        store, artifacts, stored = SqliteStore(path), Artifacts.beside(path), []
        store.put(TARGET, decision_of(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        for number in range(2, 40):
            try:
                store.put(TARGET, decision_of(number))
                stored.append(number)
            except StoreError:
                refused += 1
                break
        try:
            artifacts.put(key_of(1), bytes(50_000))
        except StoreError:
            refused += 1
        try:
            store.export(directory / "export.json")
        except StoreError:
            refused += 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        limits += 1
        with contextlib.closing(SqliteStore(path)) as new_store:
            wrong += [
                f"limit {limit}: {n} lost" for n in [1, *stored] if new_store.get(TARGET, PROBLEM.with_m(n).key) is None
            ]
            wrong += new_store.verify()
        wrong += [
            f"limit {limit}: {p.name} left" for p in directory.rglob("*") if p.name.endswith((".tmp", "-journal"))
        ]
        store.close()
        shutil.rmtree(directory)
    print(json.dumps({"limits": limits, "refused": refused, "wrong": wrong}))


def use_read_only_directory(folder: str) -> None:
    """Read and write a store in a read-only directory, as a user other than root, whom permission bits bind."""
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
        writes: tuple[Callable[[], object], ...] = (
            lambda: store.put(TARGET, decision_of(2)),
            lambda: store.lease(TARGET, PROBLEM.key, 60.0),
            lambda: artifacts.put(key_of(2), b"new"),
            lambda: store.export(Path(folder) / "export.json"),
            lambda: SqliteStore(Path(folder) / "other.db").put(TARGET, decision_of(2)),
        )
        for number, action in enumerate(writes):
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
    print(json.dumps({"refused": len(writes), "wrong": wrong}))
