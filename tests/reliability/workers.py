"""Checks of worker processes: hostile candidates, hostile builds, and parents that die."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import psutil

from gemmtune import backends
from gemmtune.backends.base import Artifact
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Verdict
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.target import Target, current_cpu
from gemmtune.testing import hostile_backend, toy_compiler
from gemmtune.workers.builds import Builders, BuildLimits
from gemmtune.workers.contract import Limits
from gemmtune.workers.host_pool import HOST_POOL
from gemmtune.workers.process_tags import tagged
from gemmtune.workers.worker import Worker

from .checks import Outcome, check

PROBLEM = Problem("mm", 5, 24, 32, Operand("float32"), Operand("float32", Layout("col"), constant=True), "float32")
OVERSHOOT_S = 2.0

# The verdicts that each kind of candidate may get: several, where they depend on which process notices first.
KINDS: dict[str, tuple[str, ...]] = {
    "segv": ("crashed",), "abort": ("crashed",), "exit": ("crashed",), "sys_exit": ("crashed",), "raise": ("crashed",),
    "orphan": ("crashed",), "child": ("crashed",), "daemon": ("crashed",), "daemon_segv": ("crashed",),
    "fork": ("crashed", "within_bound"), "flood": ("within_bound",), "babble": ("crashed",), "unasked": ("crashed",),
    "close": ("crashed",), "poison": ("crashed",), "oom": ("out_of_memory",), "fill_memory": ("out_of_memory",),
    "wrong": ("wrong",), "scribble": ("wrong",), "hang": ("hung",), "spin": ("hung",), "hold": ("hung",),
    "stop": ("hung",), "garble": ("hung",), "kill_host": ("crashed",),
}  # fmt: skip
HANGING_S, OTHERS_S = 0.4, 10.0  # deadlines: of kinds that only a deadline ends, and of all others


def _target() -> Target:
    return replace(current_cpu(), threads=1)


def _candidate(kind: str) -> Candidate:
    return Candidate.make("hostile", kind, kind=kind)


def _unexpected_processes(worker: Worker) -> list[str]:
    """Return the processes that should have ended: all but the host and its worker, with the tag or without it."""
    host = None if worker.pid is None else psutil.Process(worker.pid).ppid()
    processes = {process.pid: process for process in tagged(worker.tag or "") if process.pid not in (worker.pid, host)}
    if worker.pid is None:  # the host is among them then, and has no children
        processes = {pid: process for pid, process in processes.items() if process.ppid() != os.getpid()}
    return [f"{pid}: {process}" for pid, process in processes.items()] + _sleepers()


def _sleepers() -> list[str]:
    """Return the processes of hostile candidates by their command: they drop their environment and their parent."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "import time; time.sleep(1000)" in process.cmdline():
                processes.append(f"{process.pid}: {process}")
    return processes


@dataclass
class _Tally:
    verdicts: dict[str, Counter[str]] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    failed_next: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    overshoot_s: float = 0.0


def _attempt_kind(worker: Worker, kind: str, tally: _Tally) -> None:
    """Attempt a hostile candidate and then a correct one, and count the faults."""
    deadline_s = HANGING_S if "hung" in KINDS[kind] else OTHERS_S
    start = time.monotonic()
    verdict = worker.attempt(_candidate(kind), deadline_s).verdict
    tally.overshoot_s = max(tally.overshoot_s, time.monotonic() - start - deadline_s)
    assert verdict is not None  # without cutoff_s every candidate is checked
    tally.verdicts.setdefault(kind, Counter())[verdict.kind] += 1
    if verdict.kind not in KINDS[kind]:
        tally.unexpected.append(f"{kind}: {verdict.kind}: {verdict.detail[:300]}")
    tally.orphans += [f"{kind}: {left}" for left in _unexpected_processes(worker)]
    following = worker.attempt(_candidate("good"), OTHERS_S).verdict
    if following is None or not following.ok:
        tally.failed_next.append(f"{kind}: {following}")


@check(
    f"hostile candidates, {len(KINDS)} kinds (hang, spin, hold the GIL, SIGSTOP, segfault, abort, exit(0), SystemExit, "
    "out of memory, forks, daemons that hide, flooded output, corrupted, truncated and unasked frames, a lost context "
    "..) x 100 each",
    "parent alive, next candidate correct, 0 orphans, overshoot < 2 s",
)
def hostile_candidates(full: bool) -> Outcome:
    backends.register("hostile", hostile_backend.ENTRY_POINT)
    tally = _Tally()
    repeats = 100 if full else 1
    with Worker(_target(), limits=Limits(memory=256 << 20)) as worker:
        worker.open(PROBLEM, 1)
        worker.attempt(_candidate("good"), OTHERS_S)
        for _ in range(repeats):
            for kind in KINDS:
                _attempt_kind(worker, kind, tally)
        starts, tag = worker.starts, worker.tag
    tally.orphans += [str(process) for process in tagged(tag or "")]
    total = repeats * len(KINDS)
    overshoot = max(0.0, tally.overshoot_s)
    return Outcome(
        f"parent alive; next candidate correct {total - len(tally.failed_next)} of {total}; {len(tally.orphans)} "
        f"orphans; {len(tally.unexpected)} verdicts of another kind; largest overshoot {overshoot:.2f} s; "
        f"{starts} workers",
        # The short form asserts no times: it runs among other tests.
        not (tally.failed_next or tally.orphans or tally.unexpected) and (overshoot < OVERSHOOT_S or not full),
        {
            "verdicts": {kind: dict(counts) for kind, counts in tally.verdicts.items()},
            "unexpected": tally.unexpected[:50],
            "failed_next": tally.failed_next[:50],
            "orphans": tally.orphans[:50],
            "overshoot_s": overshoot,
            "workers": starts,
        },
    )


# --- builds -----------------------------------------------------------------------------------------------------

BUILDS = {
    "good": "built", "slow": "built", "fails": "build_failed", "unsupported": "unsupported", "segv": "crashed",
    "exit": "crashed", "hang": "hung", "greedy": "out_of_memory",
}  # fmt: skip


@contextlib.contextmanager
def _toy_compiler() -> Iterator[None]:
    """Register the toy compiler, and use a new store directory in the block."""
    backends.register("toy", toy_compiler.ENTRY_POINT)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"GEMMTUNE_STORE": f"{folder}/store.db"}):
        yield


@check(
    f"hostile builds in the pool, {len(BUILDS)} kinds x 100 each, among good ones",
    "the right verdict for each, every good one built, 0 orphans",
)
def hostile_builds(full: bool) -> Outcome:
    repeats = 100 if full else 1
    wanted = {
        Candidate.make("toy", kind, kind=kind, number=number): outcome
        for number in range(repeats)
        for kind, outcome in BUILDS.items()
    }
    limits = BuildLimits(build_s=1.0 if full else 3.0, builders=4, memory=1 << 30)
    with _toy_compiler(), Builders(limits) as builders:
        start = time.monotonic()
        built = builders(PROBLEM, wanted, _target())
        seconds = time.monotonic() - start
    outcomes = {candidate: _outcome(built[candidate.id]) for candidate in wanted}
    wrong = [
        f"{candidate.id}: {outcomes[candidate]}" for candidate in wanted if outcomes[candidate] != wanted[candidate]
    ]
    HOST_POOL.close()  # of other rows
    orphans = [str(process) for process in psutil.Process().children(recursive=True)] + _sleepers()
    return Outcome(
        f"{len(wanted) - len(wrong)} of {len(wanted)} as they should be; {len(orphans)} orphans; {seconds:.0f} s",
        not wrong and not orphans,
        {"wrong": wrong[:50], "orphans": orphans, "seconds": seconds},
    )


def _outcome(result: Artifact | Verdict) -> str:
    return result.kind if isinstance(result, Verdict) else "built"


# --- parents ----------------------------------------------------------------------------------------------------


def doomed_parent(kind: str) -> None:
    """Print the tag and the pid of a worker, then wait for a candidate that never ends. Runs in a separate process."""
    backends.register("hostile", hostile_backend.ENTRY_POINT)
    worker = Worker(_target())
    worker.open(PROBLEM, 1)
    print(json.dumps({"tag": worker.tag, "worker": worker.pid}), flush=True)
    worker.attempt(_candidate(kind), 600.0)


@check(
    "parents killed (SIGKILL, SIGTERM) while their worker hangs, spins, holds the GIL or is stopped",
    "0 processes left after 5 s",
)
def parents_that_die(full: bool) -> Outcome:
    signals = (signal.SIGKILL, signal.SIGTERM)
    kinds = ("hang", "spin", "hold", "stop") if full else ("stop",)
    all_survivors: list[str] = []
    slowest, rounds = 0.0, 0
    for _ in range(5 if full else 1):
        for kind in kinds:
            for signal_ in signals if full else signals[:1]:
                seconds, survivors = _kill_a_parent(kind, signal_, 5.0 if full else 30.0)
                all_survivors += [f"{kind}, {signal_.name}: {survivor}" for survivor in survivors]
                slowest, rounds = max(slowest, seconds), rounds + 1
    return Outcome(
        f"{len(all_survivors)} processes left by {rounds} parents; the last was gone after {slowest:.2f} s",
        not all_survivors,
        {"left": all_survivors, "slowest_s": slowest, "parents": rounds},
    )


def _kill_a_parent(kind: str, signal_: signal.Signals, limit_s: float) -> tuple[float, list[str]]:
    """Return the seconds until no process had the worker's tag, and the processes that had it after ``limit_s``."""
    code = f"from reliability.workers import doomed_parent; doomed_parent({kind!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None  # stdout=PIPE
        report: dict[str, Any] = json.loads(parent.stdout.readline())
        time.sleep(0.3)  # until the worker runs the candidate
        parent.send_signal(signal_)
        parent.wait()
    start = time.monotonic()
    while (tagged_processes := tagged(report["tag"])) and time.monotonic() - start < limit_s:
        time.sleep(0.01)
    survivors = [str(process) for process in tagged_processes]
    for process in tagged_processes:
        process.kill()
    return time.monotonic() - start, survivors
