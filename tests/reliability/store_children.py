"""Processes of the checks of the store: workers that share a store, and tuners that start at the same time.

    python -c BOOT SYS_PATH MODULE FUNCTION ARGS

Each prints one JSON document, or a line for each event. It ends when it is done or its standard input closes.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from gemmtune.core.decision import Decision, Verdict
from gemmtune.core.problem import Operand, Problem
from gemmtune.store import SqliteStore
from gemmtune.testing.store_suite import PROBLEM, TARGET, make_decision

_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "getattr(importlib.import_module(sys.argv[2]), sys.argv[3])(*json.loads(sys.argv[4]))"
)
FIXTURE = Path(__file__).parents[1] / "store" / "fixtures" / "store-v1.db"


def start(function: Callable[..., None], *args: object, **variables: str) -> subprocess.Popen[str]:
    """Start a new process that calls a module's function, with pipes and with ``variables`` in its environment."""
    path = json.dumps([os.path.abspath(entry) for entry in sys.path])
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT, path, function.__module__, function.__name__, json.dumps(args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **one_thread, **variables},
    )


def finish(process: subprocess.Popen[str]) -> Any:
    """Wait for a process, and return the JSON document in its last line. Raise RuntimeError if it failed."""
    try:
        out, _ = process.communicate()
    except BaseException:  # an interrupt must end the process, too
        process.kill()
        process.wait()
        raise
    if process.returncode != 0:
        raise RuntimeError(f"a helper process ended with {process.returncode}: {out[-500:]}")
    return json.loads(out.splitlines()[-1])


@contextmanager
def ready_processes(calls: Sequence[tuple[Any, ...]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes that import their modules and wait for ``start_work``. The end of the block kills them."""
    with ExitStack() as stack:
        processes = []
        for function, *args in calls:
            process = stack.enter_context(start(function, *args))
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("a helper process did not start")
        yield processes


def start_work(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Make waiting processes start their work."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def collect(processes: Sequence[subprocess.Popen[str]]) -> tuple[list[Any], list[str]]:
    """Wait for processes. Return the results of those that succeeded and the errors of the others."""
    results, errors = [], []
    for process in processes:
        try:
            results.append(finish(process))
        except RuntimeError as error:
            errors.append(str(error))
    return results, errors


def decision_of(number: int, tag: str = "") -> Decision:
    """Return the decision of a number, which is its M. ``tag`` distinguishes versions."""
    return replace_stopped(make_decision(PROBLEM.with_m(number)), tag)


def replace_stopped(decision: Decision, tag: str) -> Decision:
    """Return the decision with ``tag`` in its field ``stopped``, if there is a tag."""
    return msgspec.structs.replace(decision, stopped=tag or decision.stopped)


def key_of(number: int) -> str:
    """Return the artifact key of a number."""
    return hashlib.sha256(str(number).encode()).hexdigest()


def body_of(number: int) -> bytes:
    """Return the artifact of a number: up to 200 KB, so that a kill may interrupt a writer at any stage."""
    rng = random.Random(number)
    return rng.randbytes(int(10 ** rng.uniform(0, 5.3)))


# Many processes, one store

_SHARED = 16  # problems that every process writes
_OWN = 200


def run_mixed_operations(path: str, worker: int, operations: int) -> None:
    """Run mixed operations on one store after a line on standard input, and print the last write of each record."""
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
            decision = store.get(TARGET, PROBLEM.with_m(own).key)
            if (decision.stopped if decision else None) != last.get(own):
                wrong.append(f"get {own}: {decision and decision.stopped} for {last.get(own)}")
        elif action in ("put", "share"):
            number = own if action == "put" else rng.randrange(1, _SHARED)
            store.put(TARGET, decision_of(number, tag))  # no prune removes it
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
            _acquire_lease(store, rng, path, wrong)
        elif action == "list":
            listed = {d.problem["m"] for d in store.decisions(TARGET)}
            if not {number for number in last if number >= 1000} <= listed:
                wrong.append(f"list at {step}")
        else:
            store.prune(older_than_s=time.time() + 1e8)  # removes decisions from before 1966
    print(json.dumps({"done": done, "last": last, "failed": failed, "wrong": wrong, "warned": store._warned}))


def _acquire_lease(store: SqliteStore, rng: random.Random, path: str, wrong: list[str]) -> None:
    """Acquire and release a lease. An exclusive file shows that no other process has the lease at the same time."""
    number = rng.randrange(1, 4)
    lease = store.lease(TARGET, PROBLEM.with_m(number).key, 600.0)
    if lease is None:
        return
    exclusive_file = f"{path}.lease{number}"
    try:
        os.close(os.open(exclusive_file, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        wrong.append(f"two had the lease of {number}")
    else:
        os.unlink(exclusive_file)
    lease.release()


# Tuners that start at the same time


def tune_small_problems(path: str, sizes: list[int], delay_s: float) -> None:
    """Tune small problems through one store, and print the problems that this process tuned.

    After the first candidate of each problem the process prints ``tuning`` and waits for ``delay_s`` seconds.
    """
    from gemmtune.core.events import CandidateTried, Event, ProblemStarted
    from gemmtune.core.target import current_cpu
    from gemmtune.tuning.tuner import Budget, Tuner

    tuned: list[int] = []
    current_m = [0]

    def report(event: Event) -> None:
        if isinstance(event, ProblemStarted):
            current_m[0] = event.problem.m
        elif isinstance(event, CandidateTried) and current_m[0] not in tuned:
            tuned.append(current_m[0])
            print("tuning", flush=True)
            time.sleep(delay_s)

    problems = [(Problem("mm", m, 24, 32, Operand("float32"), Operand("float32"), "float32"), 1) for m in sizes]
    tuner = Tuner(replace(current_cpu(), threads=1), ["aten"], SqliteStore(path), Budget(1.0), report)
    print("ready", flush=True)
    sys.stdin.readline()
    decisions = tuner.tune(problems)
    print(
        json.dumps(
            {"tuned": tuned, "created": [d.created for d in decisions], "m": [d.problem["m"] for d in decisions]}
        )
    )
