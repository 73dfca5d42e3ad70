"""The processes that the storing checks start: writers to be killed, workers on one store, tuners that start cold.

    python -c BOOT SYS_PATH MODULE FUNCTION ARGS

Each prints one JSON document (or a line an event), and ends by itself when its standard input closes or it is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gemmtune.decision import Decision, Verdict
from gemmtune.errors import StoreError
from gemmtune.problem import Operand, Problem
from gemmtune.store import Artifacts, SqliteStore
from gemmtune.testing.store_suite import PROBLEM, TARGET, make_decision

_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "getattr(importlib.import_module(sys.argv[2]), sys.argv[3])(*json.loads(sys.argv[4]))"
)
FIXTURE = Path(__file__).parents[1] / "store" / "fixtures" / "store-v1.db"


def start(function: Callable[..., None], *args: object, **variables: str) -> subprocess.Popen[str]:
    """Run a module's function in a fresh process with pipes; ``variables`` go into its environment."""
    path = json.dumps([os.path.abspath(entry) for entry in sys.path])
    one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT, path, function.__module__, function.__name__, json.dumps(args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **one, **variables},
    )


def finish(process: subprocess.Popen[str]) -> Any:
    """The JSON document that a process leaves as its last line. Raises RuntimeError when it failed."""
    try:
        out, _ = process.communicate()
    except BaseException:  # an interrupt must not leave it behind
        process.kill()
        process.wait()
        raise
    if process.returncode != 0:
        raise RuntimeError(f"a helper process ended with {process.returncode}: {out[-500:]}")
    return json.loads(out.splitlines()[-1])


def decision_of(number: int, tag: str = "") -> Decision:
    """The Decision that belongs to a number, for another M each; ``tag`` tells versions apart."""
    return replace_stopped(make_decision(PROBLEM.with_m(number)), tag)


def replace_stopped(decision: Decision, tag: str) -> Decision:
    import msgspec

    return msgspec.structs.replace(decision, stopped=tag or decision.stopped)


def key_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def body_of(number: int) -> bytes:
    """Bytes that belong to a number: none to 200 KB, so that a writer can be met at any stage."""
    rng = random.Random(number)
    return rng.randbytes(int(10 ** rng.uniform(0, 5.3)))


# Writers that are killed. They are forked from a process that has imported everything: 2,000 imports of torch would
# take the better part of an hour.


def killing(folder: str, kills: int, seed: int) -> None:
    """Kill ``kills`` writers, two at a time, each at a random moment; prints what was lost, damaged or left behind."""
    rng, tally = random.Random(seed), _Tally()
    store = Path()
    for round_ in range((kills + 1) // 2):
        if round_ % 20 == 0:  # a fresh store, so that making and upgrading one are met as well
            tally.settle(store)
            store = Path(folder) / str(round_) / "store.db"
            if round_ % 40 == 20:
                store.parent.mkdir()
                shutil.copy(FIXTURE, store)
        writers = [_Writer(store, 10_000 * (2 * round_ + side)) for side in range(2)]
        for writer in writers:
            writer.kill_after(rng.uniform(0.0, 0.05))
        for writer in writers:
            tally.add(writer)
        tally.check(store, [number for writer in writers for number in writer.acknowledged])
    tally.settle(store)
    print(json.dumps(tally.figures))


class _Writer:
    """A forked process that writes decisions and artifacts by turns, and says through a pipe what was acknowledged."""

    def __init__(self, store: Path, first: int) -> None:
        self._from, to = os.pipe()
        self._pid = os.fork()
        self.acknowledged: list[tuple[str, int]] = []
        self.errors: list[str] = []
        if self._pid == 0:
            try:
                _write_on(store, first, to)
            except BaseException as error:  # whatever it is, the parent counts it
                os.write(to, f"error {type(error).__name__}: {str(error)[:200]}\n".encode())
            finally:
                os._exit(1)
        os.close(to)
        select.select([self._from], [], [], 60.0)
        self._started = time.perf_counter()

    def kill_after(self, seconds: float) -> None:
        """SIGKILL, that many seconds after it began to write; then read what it had said."""
        time.sleep(max(0.0, self._started + seconds - time.perf_counter()))
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        with os.fdopen(self._from, "rb") as pipe:
            text = pipe.read().decode()
        for line in text.splitlines(keepends=True):
            kind, _, rest = line.partition(" ")
            if kind == "error":
                self.errors.append(rest.strip())
            elif kind in ("decision", "artifact") and line.endswith("\n"):
                self.acknowledged.append((kind, int(rest)))


def _write_on(path: Path, first: int, to: int) -> None:
    store, artifacts = SqliteStore(path), Artifacts.beside(path)
    os.write(to, b"ready\n")
    for number in range(first, first + 10_000):
        store.put(TARGET, decision_of(number))
        os.write(to, f"decision {number}\n".encode())
        artifacts.put(key_of(number), body_of(number))
        os.write(to, f"artifact {number}\n".encode())


class _Tally:
    """What the killed writers had acknowledged, and what became of it."""

    def __init__(self) -> None:
        self.figures = {
            "killed": 0, "idle": 0, "decisions": 0, "artifacts": 0, "lost": 0, "damaged": 0, "left": 0, "stores": 0,
            "journals": 0, "temporary": 0, "errors": [],
        }  # fmt: skip
        self._kept: list[tuple[str, int]] = []

    def add(self, writer: _Writer) -> None:
        self.figures["killed"] += 1
        self.figures["idle"] += not writer.acknowledged
        self.figures["errors"] += writer.errors

    def check(self, path: Path, acknowledged: list[tuple[str, int]]) -> None:
        """Read back what this round acknowledged, as another process would."""
        self._kept += acknowledged
        self.figures["journals"] += path.with_name(path.name + "-journal").exists()
        folder = Artifacts.beside(path).directory
        self.figures["temporary"] += sum(name.endswith(".tmp") for name in os.listdir(folder)) if folder.exists() else 0
        with contextlib.closing(SqliteStore(path)) as store:
            self._read_back(store, Artifacts.beside(path), acknowledged)

    def settle(self, path: Path) -> None:
        """Read everything in a store back, after one more write that sweeps; then forget it."""
        if not path.name:
            return
        artifacts = Artifacts.beside(path)
        with contextlib.closing(SqliteStore(path)) as store:
            artifacts.put(key_of(-1), b"last")
            store.put(TARGET, decision_of(1))
            self._read_back(store, artifacts, self._kept)
            self.figures["damaged"] += len(store.verify())
        names = [*os.listdir(path.parent), *os.listdir(artifacts.directory)]
        self.figures["left"] += sum(name.endswith((".tmp", "-journal")) for name in names)
        self.figures["stores"] += 1
        for kind in ("decision", "artifact"):
            self.figures[f"{kind}s"] += sum(kept == kind for kept, _ in self._kept)
        self._kept.clear()
        shutil.rmtree(path.parent)

    def _read_back(self, store: SqliteStore, artifacts: Artifacts, acknowledged: list[tuple[str, int]]) -> None:
        for kind, number in acknowledged:
            if kind == "decision":
                found: object = store.get(TARGET, PROBLEM.with_m(number).key)
                wanted: object = decision_of(number)
            else:
                path = artifacts.get(key_of(number))
                found, wanted = None if path is None else path.read_bytes(), body_of(number)
            self.figures["lost"] += found is None
            self.figures["damaged"] += found is not None and found != wanted


# Many processes, one store

_SHARED = 16  # problems that every process writes
_OWN = 200


def mixed(path: str, worker: int, operations: int) -> None:
    """Mixed operations on one store; waits for a line on standard input, prints what its last writes were."""
    rng, store = random.Random(worker), SqliteStore(path)
    done: dict[str, int] = {}
    last: dict[int, str] = {}
    wrong: list[str] = []
    failed: dict[str, str] = {}
    print("ready", flush=True)
    sys.stdin.readline()
    actions = ("get", "put", "share", "temporary", "fail", "failures", "lease", "list", "prune")
    for step, action in enumerate(rng.choices(actions, (40, 22, 6, 8, 8, 8, 5, 1, 2), k=operations)):
        done[action] = done.get(action, 0) + 1
        tag = f"{worker}.{step}"
        own = 1000 * (worker + 1) + rng.randrange(_OWN)
        if action == "get":
            found = store.get(TARGET, PROBLEM.with_m(own).key)
            if (found.stopped if found else None) != last.get(own):
                wrong.append(f"get {own}: {found and found.stopped} for {last.get(own)}")
        elif action in ("put", "share"):
            number = own if action == "put" else rng.randrange(1, _SHARED)
            store.put(TARGET, decision_of(number, tag))  # created long ago, pruned by nobody
            last[number] = tag
        elif action == "temporary":
            old = replace_stopped(make_decision(PROBLEM.with_m(50_000 + rng.randrange(100)), created=-1e9), tag)
            store.put(TARGET, old)
        elif action == "fail":
            name = f"candidate {rng.randrange(20)}"
            store.remember_failure(TARGET, PROBLEM.with_m(1000 * (worker + 1)).key, name, Verdict("hung", tag))
            failed[name] = tag
        elif action == "failures":
            rows = store.failures(TARGET, PROBLEM.with_m(1000 * (worker + 1)).key)
            if {name: row.detail for name, row in rows.items()} != failed:
                wrong.append(f"failures at {step}")
        elif action == "lease":
            _take_lease(store, rng, path, wrong)
        elif action == "list":
            found_own = {d.problem["m"] for d in store.decisions(TARGET)}
            if not {number for number in last if number >= 1000} <= found_own:
                wrong.append(f"list at {step}")
        else:
            store.prune(older_than_s=time.time() + 1e8)  # what was created before 1966
    print(json.dumps({"done": done, "last": last, "failed": failed, "wrong": wrong, "warned": store._warned}))


def _take_lease(store: SqliteStore, rng: random.Random, path: str, wrong: list[str]) -> None:
    """Under a lease nobody else is: an exclusive file proves it."""
    number = rng.randrange(1, 4)
    lease = store.lease(TARGET, PROBLEM.with_m(number).key, 600.0)
    if lease is None:
        return
    proof = f"{path}.lease{number}"
    try:
        os.close(os.open(proof, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        wrong.append(f"two had the lease of {number}")
    else:
        os.unlink(proof)
    lease.release()


# Cold tuners


def cold(path: str, sizes: list[int], linger_s: float) -> None:
    """Tune small problems through one store; prints which were this process's work.

    linger_s: how long to dwell on the first candidate of each, having said ``tuning``.
    """
    from gemmtune.events import CandidateTried, Event, ProblemStarted
    from gemmtune.target import current_cpu
    from gemmtune.tuner import Budget, Tuner

    tuned: list[int] = []
    at = [0]

    def note(event: Event) -> None:
        if isinstance(event, ProblemStarted):
            at[0] = event.problem.m
        elif isinstance(event, CandidateTried) and at[0] not in tuned:
            tuned.append(at[0])
            print("tuning", flush=True)
            time.sleep(linger_s)

    problems = [(Problem("mm", m, 24, 32, Operand("float32"), Operand("float32"), "float32"), 1) for m in sizes]
    tuner = Tuner(replace(current_cpu(), threads=1), ["aten"], SqliteStore(path), Budget(1.0), note)
    print("ready", flush=True)
    sys.stdin.readline()
    decisions = tuner.tune(problems)
    print(
        json.dumps(
            {"tuned": tuned, "created": [d.created for d in decisions], "m": [d.problem["m"] for d in decisions]}
        )
    )


# Faults

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
    from gemmtune.store import MemoryStore, open_store

    if not isinstance(open_store(), MemoryStore):
        wrong.append("a default store that cannot be written is not kept in memory")
    Path(folder).chmod(0o700)
    artifacts.directory.chmod(0o700)
    print(json.dumps({"refused": len(refused), "wrong": wrong}))
