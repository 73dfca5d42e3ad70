"""Checks of the command line with hostile arguments: thousands of lines in one process, hundreds in separate ones."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
import typer.main
from typer.core import TyperCommand

import gemmtune.core.target
import gemmtune.tuning.tuner
from gemmtune.cli.commands import app
from gemmtune.core.decision import Decision
from gemmtune.core.errors import StoreError
from gemmtune.core.events import ProblemDone, ProblemStarted
from gemmtune.core.problem import Problem
from gemmtune.dispatch import current_target
from gemmtune.report import ceilings
from gemmtune.tuning.tuner import Budget, Tuner
from gemmtune.tuning.worker_pool import WorkerPool
from helpers.factories import make_decision

from .checks import Outcome, check
from .command_lines import Folder, lines
from .isolation import call_in_process

LIMIT_S = 20.0  # a line that takes longer counts as hung


class LineTimeout(BaseException):
    """Raised when a line takes longer than ``LIMIT_S``."""


@dataclass(frozen=True)
class LineResult:
    """Result of a line. ``as_json``: whether --json was parsed (None: no command ran). ``trace``: a traceback."""

    code: int | None
    out: bytes
    err: str
    as_json: bool | None
    trace: str = ""

    def faults(self) -> Iterator[str]:
        """Yield the faults of the result as text."""
        if self.trace or "Traceback" in self.err:
            yield f"traceback: {(self.trace or self.err)[-1500:]}"
        elif self.code not in (0, 1, 2):
            yield f"exit code {self.code}: {self.err[-500:]}"
        if self.code == 1 and not self.err.strip() and not self.as_json and not self.out:
            yield "failed without a word"
        if self.as_json:
            yield from self._json_faults()

    def _json_faults(self) -> Iterator[str]:
        if self.code == 2:
            if self.out:
                yield f"--json and wrong usage, and yet stdout has {self.out[:200]!r}"
            return
        try:
            json.loads(self.out, parse_constant=_refuse)
        except ValueError as error:
            yield f"--json, and stdout is no JSON ({error}): {self.out[:200]!r}"


def _refuse(name: str) -> Any:
    """Raise ValueError for NaN and infinities, which Python's parser accepts."""
    raise ValueError(f"{name} is not JSON")


# --- in one process ----------------------------------------------------------------------------------------------


class QuickTuner(Tuner):
    """Tuner that decides at once, sometimes with an interruption, and really tunes one of ten small problems."""

    runs = real = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "isolate": False})
        self._budget = Budget(min(self._budget.seconds or 1.0, 0.05), 3)

    def tune(self, problems: Iterable[tuple[Problem, int]], pool: WorkerPool | None = None) -> list[Decision]:
        pairs = list(problems)
        QuickTuner.runs += 1
        tiny = sum(problem.flops for problem, _ in pairs) < 1e5
        if tiny and QuickTuner.runs % 10 == 0:
            QuickTuner.real += 1
            return super().tune(pairs, pool)
        return [self._decide_at_once(problem, index, len(pairs)) for index, (problem, _) in enumerate(pairs)]

    def _decide_at_once(self, problem: Problem, index: int, total: int) -> Decision:
        """Store and return a random decision; sometimes raise KeyboardInterrupt."""
        rng = random.Random(QuickTuner.runs * 100 + index)
        self._progress(ProblemStarted(index, total, problem))
        if rng.random() < 0.1:
            raise KeyboardInterrupt
        decision = make_decision(problem, rng.choice(("winner", "tie", "none_valid")), self._target)
        with contextlib.suppress(StoreError):
            self._store.put(self._target, decision)
        self._progress(ProblemDone(index, total, decision, None))
        return decision


def _prepare() -> Callable[[Sequence[str]], LineResult]:
    """Replace tuning, bandwidth and memory in this process by small ones, and return a function that runs a line."""
    gemmtune.tuning.tuner.Tuner = QuickTuner  # type: ignore[misc]
    ceilings.read_bandwidth = lambda seconds=0.5: 1e10
    ceilings.arithmetic = lambda seconds=0.2: {"float32": 1e11}
    gemmtune.core.target._memory = lambda: 64 << 20  # any shape that passes is small
    logging.getLogger("gemmtune").addHandler(logging.NullHandler())
    json_flags: list[bool | None] = []
    invoke = TyperCommand.invoke

    def recording_invoke(self: TyperCommand, context: Any) -> Any:
        json_flags.append(bool(context.params.get("as_json")))
        return invoke(self, context)

    TyperCommand.invoke = recording_invoke  # type: ignore[method-assign]
    command = typer.main.get_command(app)

    def run(args: Sequence[str]) -> LineResult:
        json_flags[:] = [None]
        out, err = _stream("strict"), _stream("backslashreplace")
        code, trace = None, ""
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                command.main(args=list(args), prog_name="gemmtune")
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            except BaseException:
                trace = traceback.format_exc()
            out.flush(), err.flush()
        return LineResult(code, out.buffer.getvalue(), err.buffer.getvalue().decode(), json_flags[-1], trace)  # type: ignore[attr-defined]

    return run


def _stream(errors: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors)


def _unexpected_changes(folder: Folder, args: Sequence[str], store: str) -> list[str]:
    """Return the changed paths of the directory that the line does not name."""
    named = {os.path.normpath(text) for text in _values(args)} | {os.path.normpath(store)}
    if "report" in args:
        named.add("report.html")
    return [path for path in folder.changes() if not any(_covers(name, path) for name in named)]


def _values(args: Sequence[str]) -> Iterator[str]:
    """Yield every token, and the value in it if it is ``-oVALUE`` or ``--option=VALUE``."""
    for token in args:
        yield from (token, token.removeprefix("-o"), token.partition("=")[2])


def _covers(name: str, path: str) -> bool:
    """Return whether a write of ``name`` may change ``path``: the file, a parent directory, or its ceilings file."""
    beside = os.path.splitext(name)[0] + ".ceilings.json"
    return path in (name, beside) or name.startswith(path + os.sep)


def _fuzz(count: int, seed: int, connection: Connection) -> None:
    """Run ``count`` lines in this process, in a new directory, and send a summary."""
    run = _prepare()
    target = current_target()
    codes: dict[str, int] = {}
    faults: list[dict[str, Any]] = []
    signal.signal(signal.SIGALRM, _raise_timeout)
    with tempfile.TemporaryDirectory(prefix="gemmtune-lines-") as root:
        folder = Folder(Path(root), target)
        os.environ["HOME"] = str(folder.path)
        rng = random.Random(seed)
        for args in itertools.islice(lines(seed), count):
            store = os.environ["GEMMTUNE_STORE"] = rng.choice(
                ("default.db", "default.db", "good.db", "dir", "garbage.db")
            )
            path, start = list(sys.path), time.perf_counter()
            signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
            result = run(args)
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.path[:] = path
            torch.set_num_threads(target.threads)
            texts = [
                *result.faults(),
                *(f"left behind: {changed}" for changed in _unexpected_changes(folder, args, store)),
            ]
            faults += ({"line": args, "store": store, "fault": text} for text in texts)
            name = f"{result.code}{' with JSON' if result.as_json and result.code != 2 else ''}"
            codes[name] = codes.get(name, 0) + 1
            if time.perf_counter() - start > LIMIT_S / 4:
                print(f"slow: {args} took {time.perf_counter() - start:.1f} s", file=sys.stderr)
            if folder.changes():
                folder.restore()
        os.chdir("/")
    connection.send((codes, faults, QuickTuner.runs, QuickTuner.real))


def _raise_timeout(*_: Any) -> None:
    raise LineTimeout(f"still running after {LIMIT_S} s")


@check(
    "10,000 fuzzed command lines in one process (tuning mostly by a stand-in): hostile values, options repeated, "
    "reordered, cut; stores that are damaged, foreign, directories, pipes, loops",
    "exit 0, 1 or 2; no traceback; JSON whenever --json was taken; nothing left behind",
)
def command_lines(full: bool) -> Outcome:
    count = 10_000 if full else 400
    reply = call_in_process(_fuzz, count, 1 if full else 2, limit_s=1800 if full else 120)
    if reply is None:
        return Outcome("the process that ran them died or hung", False)
    codes, faults, tuner_runs, real_runs = reply
    counts = ", ".join(f"exit {code}: {number}" for code, number in sorted(codes.items()))
    counts += f"; {tuner_runs} came to tuning, {real_runs} really tuned"
    return Outcome(
        f"{len(faults)} faults in {sum(codes.values()):,} lines ({counts})",
        not faults and sum(codes.values()) == count,
        {"codes": codes, "tuned": tuner_runs, "really": real_runs, "faults": faults[:50]},
    )


# --- in separate processes --------------------------------------------------------------------------------------

# Lines that users interrupt and pipe.
_COMMON_LINES = (
    ["tune", "8x8x8", "--budget", "0.05", "--store", "new.db"],
    ["tune", "1,2,3", "--dtype", "fp32", "--budget", "0.05", "--json", "--store", "new.db", "--force"],
    ["bench", "8x8x8", "--budget", "0.05", "--backends", "native"],
    ["explain", "8", "8", "8", "--any-machine", "--store", "good.db"],
    ["report", "--all-machines", "-o", "out.html", "--store", "good.db"],
    ["store", "ls", "--store", "good.db"],
    ["store", "export", "out.json", "--store", "good.db", "--json"],
    ["doctor", "--store", "good.db"],
    ["--help"],
)


def _lines_without_tuning(seed: int) -> Iterator[list[str]]:
    """Return fuzzed lines that do not tune: a separate process has no ``QuickTuner``."""
    return (args for args in lines(seed) if "tune" not in args and "bench" not in args)


def _run_lines(folder: Folder, count: int, seed: int) -> Iterator[tuple[str, list[str], list[str]]]:
    """Run each line as a process with a random disturbance. Yield (disturbance, arguments, faults)."""
    rng, hostile = random.Random(seed), _lines_without_tuning(seed)
    disturbances = (
        "none",
        "interrupt",
        "interrupt",
        "interrupt",
        "reader leaves",
        "no stdin",
        "no stdout",
        "full disk",
    )
    for _ in range(count):
        disturbance = rng.choice(disturbances)
        args = next(hostile) if disturbance == "none" or rng.random() < 0.2 else rng.choice(_COMMON_LINES)
        args = [
            text.encode("utf-8", "surrogateescape").replace(b"\0", b"").decode("utf-8", "surrogateescape")
            for text in args
        ]
        yield disturbance, args, _run_line(args, disturbance, rng.uniform(0.02, 2.5))
        folder.restore()


def _run_line(args: list[str], disturbance: str, delay_s: float) -> list[str]:
    """Run a line as a process with a disturbance, and return its faults."""
    tag = f"gemmtune-line-{os.getpid()}-{time.monotonic_ns()}"
    environment = {**os.environ, "GEMMTUNE_MARK": tag, "GEMMTUNE_STORE": "default.db"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "gemmtune", *args]
    if disturbance in _REDIRECTED:
        command = ["sh", "-c", f'exec "$@" {_REDIRECTED[disturbance]}', "sh", *command]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    if disturbance == "reader leaves":
        process.stdout.close()
        process.stdout = None
    if disturbance == "interrupt":
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(delay_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
    try:
        _, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return ["still running after 60 s"]
    return [*_process_faults(process.returncode, err.decode(errors="replace"), disturbance), *_orphans(tag)]


_REDIRECTED = {"no stdin": "<&-", "no stdout": ">&-", "full disk": ">/dev/full"}


def _process_faults(code: int, err: str, disturbance: str) -> Iterator[str]:
    """Yield the faults in a process's exit code and standard error."""
    has_traceback = "Traceback" in err or "Exception ignored" in err
    if disturbance == "interrupt" and (has_traceback or code == -signal.SIGINT) and "gemmtune/cli" not in err:
        return  # interrupted before the first line of the command, while the interpreter started
    if has_traceback:
        yield f"traceback: {err[-1500:]}"
    if code not in (0, 1, 2):
        yield f"exit code {code}: {err[-500:]}"


def _orphans(tag: str) -> Iterator[str]:
    """Yield the processes of this line that still run two seconds after its end, and kill them."""
    deadline = time.monotonic() + 2.0
    while orphans := [process for process in psutil.process_iter() if _has_tag(process, tag)]:
        if time.monotonic() > deadline:
            yield f"{len(orphans)} processes left: {[process.cmdline() for process in orphans]}"
            for process in orphans:
                process.kill()
            return
        time.sleep(0.05)


def _has_tag(process: psutil.Process, tag: str) -> bool:
    """Return whether a running process has this tag in its environment."""
    try:
        return process.environ().get("GEMMTUNE_MARK") == tag and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@check(
    "200 command lines as processes: fuzzed ones; Ctrl-C at a random moment; stdout closed, a pipe without a reader or "
    "a full disk; stdin closed",
    "exit 0, 1 or 2; no traceback; no process left",
)
def command_processes(full: bool) -> Outcome:
    count = 200 if full else 2
    disturbance_counts: dict[str, int] = {}
    faults: list[dict[str, Any]] = []
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="gemmtune-lines-") as root:
        try:
            for disturbance, args, texts in _run_lines(Folder(Path(root), current_target()), count, 1):
                disturbance_counts[disturbance] = disturbance_counts.get(disturbance, 0) + 1
                faults += ({"line": args, "mishap": disturbance, "fault": text} for text in texts)
        finally:
            os.chdir(before)
    counts = ", ".join(f"{name}: {number}" for name, number in sorted(disturbance_counts.items()))
    return Outcome(f"{len(faults)} faults in {count} processes ({counts})", not faults, {"faults": faults[:50]})
