"""Checks of the store: killed writers, failing disks, many processes, tuners that start at the same time."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.target import Target
from gemmtune.dispatch import runtime
from gemmtune.dispatch.runtime import Runtime
from gemmtune.store import MemoryStore, SqliteStore
from gemmtune.store.base import Store
from gemmtune.testing.store_suite import PROBLEM, TARGET
from helpers.serving import decide, evidence, register, toy

from . import store_children as children
from . import store_faults, store_kills
from .checks import Outcome, check, findings_text


@check(
    "SIGKILL of writers of decisions and artifacts at a random moment (making and upgrading a store among them)",
    "2,000 kills: 0 acknowledged entries lost, 0 corrupt, temporary files swept",
)
def killed_writers(full: bool) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        counts = children.finish(children.start(store_kills.kill_writers, folder, 2000 if full else 44, 1))
    entries = counts["decisions"] + counts["artifacts"]
    ok = entries > 0 and not (counts["lost"] or counts["damaged"] or counts["left"] or counts["errors"])
    return Outcome(
        f"{counts['killed']} killed, {entries} acknowledged: {counts['lost']} lost, {counts['damaged']} corrupt; "
        f"{counts['journals']} hot journals and {counts['temporary']} temporary files met, {counts['left']} left"
        + findings_text(counts["errors"]),
        ok,
        counts,
    )


@check("disk full, EIO at every single call, a limit of file size", "0 acknowledged lost, 0 corrupt, StoreError only")
def faulty_disk(full: bool) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        limit = children.finish(children.start(store_faults.run_with_size_limits, folder, 512 if full else 16384))
        library = _fault_library(Path(folder))
        if library is None:
            faults = {"faults": 0, "wrong": []}
        else:
            variables = {"LD_PRELOAD": str(library)}
            faults = children.finish(children.start(store_faults.fail_each_call, folder, 0 if full else 2, **variables))
    wrong = faults["wrong"] + limit["wrong"]
    injected = f"{faults['faults']} failed calls" if library else "no C compiler: no calls failed"
    return Outcome(
        f"{injected}, {limit['limits']} size limits ({limit['refused']} writes refused): {len(wrong)} wrong"
        + findings_text(wrong),
        not wrong and (library is None or faults["faults"] > 0),
        {"faults": faults, "limits": limit},
    )


def _fault_library(folder: Path) -> Path | None:
    """Compile the library of faults for LD_PRELOAD; None without a C compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    source, library = Path(__file__).with_name("faults.c"), folder / "faults.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@check("a directory that may only be read", "what is there is served; every write a StoreError; no store: in memory")
def read_only_directory(full: bool) -> Outcome:
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o711)  # the process of the check may drop root's rights
        folder = Path(parent) / "data"
        folder.mkdir()
        counts = children.finish(children.start(store_faults.use_read_only_directory, str(folder)))
    wrong = counts["wrong"]
    return Outcome(f"{counts['refused']} writes refused, {len(wrong)} wrong" + findings_text(wrong), not wrong, counts)


@check(
    "8 processes x 10,000 mixed operations on one store (gets, puts, leases, failures, listings, prunes)",
    "exact final state, 0 uncaught errors",
)
def many_processes(full: bool) -> Outcome:
    workers, operations = (8, 10_000) if full else (3, 200)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        with children.ready_processes(
            [(children.run_mixed_operations, str(path), n, operations) for n in range(workers)]
        ) as processes:
            children.start_work(processes)
            results, errors = children.collect(processes)
        with closing(SqliteStore(path)) as store:
            store.prune(older_than_s=_BEFORE_1970_S + time.time())
            wrong = [text for row in results for text in row["wrong"]] + _differences(store, results)
    done: Counter[str] = Counter()
    for row in results:
        done.update(row["done"])
    total = sum(done.values())
    return Outcome(
        f"{total} operations by {workers} processes: {len(wrong)} differences, {len(errors)} uncaught errors"
        + findings_text(wrong + errors),
        not wrong and not errors and total == workers * operations,
        {"done": done, "wrong": wrong, "errors": errors},
    )


_BEFORE_1970_S = 1e8  # temporary decisions are older than that before the epoch


def _differences(store: Store, results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the differences between the store and the last writes of all processes."""
    stored = {decision.problem["m"]: decision.stopped for decision in store.decisions()}
    possible: dict[int, set[str]] = {}
    for row in results:
        for number, tag in row["last"].items():
            possible.setdefault(int(number), set()).add(tag)
    wrong = [f"{m} holds {stored.get(m)}" for m, tags in possible.items() if stored.get(m) not in tags]
    wrong += [f"{m} should not be there" for m in stored.keys() - possible.keys()]
    for worker, row in enumerate(results):
        failures = store.failures(TARGET, PROBLEM.with_m(1000 * (worker + 1)).key)
        if {name: verdict.detail for name, verdict in failures.items()} != row["failed"]:
            wrong.append(f"the failures of {worker}")
        if row["warned"]:
            wrong.append(f"{worker} met damage")
    return wrong + store.verify()


@check("8 cold processes that want the same problems at once", "one tuning each, the others have its decision")
def cold_processes(full: bool) -> Outcome:
    workers, sizes = (8, [5, 6, 7]) if full else (3, [5])
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store.db")
        with children.ready_processes([(children.tune_small_problems, path, sizes, 0.0)] * workers) as processes:
            children.start_work(processes)
            results, errors = children.collect(processes)
    tuned = Counter(m for row in results for m in row["tuned"])
    is_same = all(row["m"] == sizes and row["created"] == results[0]["created"] for row in results)
    return Outcome(
        f"{workers} processes, {len(sizes)} problems: {sum(tuned.values())} tunings, "
        f"{'the same' if is_same else 'DIFFERENT'} decisions" + findings_text(errors),
        not errors and is_same and tuned == Counter(sizes),
        {"results": results, "errors": errors},
    )


@check("the one that tunes is killed while 4 others wait", "one of them takes over, at once")
def killed_tuner(full: bool) -> Outcome:
    others, takeovers, errors = (4 if full else 2), 0, []
    rounds = 3 if full else 1
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "store.db")
            calls = [(children.tune_small_problems, path, [5], 600.0)] + [
                (children.tune_small_problems, path, [5], 0.0)
            ] * others
            with children.ready_processes(calls) as (first, *waiting):
                children.start_work([first])
                assert first.stdout is not None
                first.stdout.readline()  # it is tuning
                children.start_work(waiting)
                time.sleep(1.0)  # the others wait for the lease
                first.kill()
                results, failed = children.collect(waiting)
        errors += failed
        takeovers += sum(len(row["tuned"]) for row in results) == 1 and len({row["created"][0] for row in results}) == 1
    return Outcome(
        f"{takeovers} of {rounds} times exactly one took over" + findings_text(errors),
        takeovers == rounds and not errors,
        {"takeovers": takeovers, "rounds": rounds, "errors": errors},
    )


@check("every Target field changed, one at a time, in the store and in dispatch", "a miss each time")
def changed_targets(full: bool) -> Outcome:
    register()
    gpu = {
        "driver": "580.65",
        "cublaslt": "130100 libcublasLt.so.13 (a1)",
        "nvrtc": "libnvrtc.so.13 (b2)",
        "triton": "3.6.0",
    }
    target = runtime.current_target().with_versions(gpu)  # the further versions in the Target of a GPU
    problem = Problem("mm", 3, 5, 4, Operand("float32"), Operand("float32", Layout("col")), "float32")
    changes = dict(_changes(target))
    with tempfile.TemporaryDirectory() as folder, closing(SqliteStore(Path(folder) / "store.db")) as on_disk:
        hits = [name for store in (MemoryStore(), on_disk) for name in _hits(store, target, problem, changes)]
    missing = {field.name for field in fields(Target) if field.compare} - {name.partition(":")[0] for name in changes}
    return Outcome(
        f"{len(changes)} changes in 2 stores and dispatch: {len(hits)} served" + findings_text([*hits, *missing]),
        not hits and not missing,
        {"changes": list(changes), "served": hits},
    )


def _changes(target: Target) -> Iterator[tuple[str, Target]]:
    """Yield named targets that differ from this one in one field, or in one version or source."""
    for name, value in {
        "device": "cuda", "name": target.name + " 2", "capability": "9.0", "isa": target.isa[:-1],
        "caches": (1, *target.caches[1:]), "threads": target.threads + 1, "cores": target.cores + 1,
        "memory": target.memory + 1,
    }.items():  # fmt: skip
        yield name, replace(target, **{name: value})
    for name in ("versions", "sources"):
        entries = dict(getattr(target, name))
        for key in (*entries, "driver", "cuda", "cublaslt", "triton", "nvrtc", "compiler"):
            other = {**entries, key: entries.get(key, "") + "+"}
            yield f"{name}:{key}", replace(target, **{name: tuple(sorted(other.items()))})
        for key in entries:
            remaining = tuple(pair for pair in getattr(target, name) if pair[0] != key)
            yield f"{name}:without {key}", replace(target, **{name: remaining})


def _hits(store: Store, target: Target, problem: Problem, changes: dict[str, Target]) -> list[str]:
    """Return the changes after which a decision still serves; ``unchanged`` if it does not serve without a change."""
    decision = decide(problem, evidence(toy(), 0.1), chosen=toy())
    store.put(target, msgspec.structs.replace(decision, target_key=target.key))
    hits = [] if _serves(store, target, problem) == (True, True) else ["unchanged"]
    return hits + [name for name, other in changes.items() if any(_serves(store, other, problem))]


def _serves(store: Store, target: Target, problem: Problem) -> tuple[bool, bool]:
    """Return whether the store has a decision for the target, and whether dispatch on that target serves its kernel."""
    local_runtime = Runtime()
    local_runtime.refresh(store)
    with mock.patch.object(runtime, "current_target", return_value=target):
        return store.get(target, problem.key) is not None, local_runtime.kernel_for(problem) is not None
