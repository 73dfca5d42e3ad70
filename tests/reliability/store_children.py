"""The processes that the storing checks start: workers on one store and tuners that start cold are here.

    python -c BOOT SYS_PATH MODULE FUNCTION ARGS

Each prints one JSON document (or a line an event), and ends by itself when its standard input closes or it is done.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
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
    return msgspec.structs.replace(decision, stopped=tag or decision.stopped)


def key_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def body_of(number: int) -> bytes:
    """Bytes that belong to a number: none to 200 KB, so that a writer can be met at any stage."""
    rng = random.Random(number)
    return rng.randbytes(int(10 ** rng.uniform(0, 5.3)))


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
    from gemmtune.core.events import CandidateTried, Event, ProblemStarted
    from gemmtune.core.target import current_cpu
    from gemmtune.tuning.tuner import Budget, Tuner

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
