"""The command line against hostile lines: thousands inside one process, hundreds as processes of their own."""

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
from helpers.factories import make_decision

from .checks import Outcome, check
from .command_lines import Folder, lines
from .isolation import apart

SECONDS = 20.0  # a line that takes longer hangs


class Hang(BaseException):
    """A line took longer than ``SECONDS``."""


@dataclass(frozen=True)
class Ran:
    """What a line did. as_json: whether a command took --json (None: no command was reached). trace: a traceback."""

    code: int | None
    out: bytes
    err: str
    as_json: bool | None
    trace: str = ""

    def faults(self) -> Iterator[str]:
        """What is wrong with it, in words."""
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
    raise ValueError(f"{name} is not JSON")


# --- inside one process ------------------------------------------------------------------------------------------


class QuickTuner(Tuner):
    """Decides at once, with failures and interruptions now and then; really tunes every tenth tiny problem."""

    runs = real = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "isolate": False})
        self._budget = Budget(min(self._budget.seconds or 1.0, 0.05), 3)

    def tune(self, problems: Iterable[tuple[Problem, int]]) -> list[Decision]:
        pairs = list(problems)
        QuickTuner.runs += 1
        tiny = sum(problem.flops for problem, _ in pairs) < 1e5
        if tiny and QuickTuner.runs % 10 == 0:
            QuickTuner.real += 1
            return super().tune(pairs)
        return [self._made(problem, index, len(pairs)) for index, (problem, _) in enumerate(pairs)]

    def _made(self, problem: Problem, index: int, total: int) -> Decision:
        rng = random.Random(QuickTuner.runs * 100 + index)
        self._progress(ProblemStarted(index, total, problem))
        if rng.random() < 0.1:
            raise KeyboardInterrupt
        made = make_decision(problem, rng.choice(("winner", "tie", "none_valid")), self._target)
        with contextlib.suppress(StoreError):
            self._store.put(self._target, made)
        self._progress(ProblemDone(index, total, made, None))
        return made


def _prepare() -> Callable[[Sequence[str]], Ran]:
    """Make tuning cheap in this process, and the machine a small one; returns what runs a line."""
    gemmtune.tuning.tuner.Tuner = QuickTuner  # type: ignore[misc]
    ceilings.read_bandwidth = lambda seconds=0.5: 1e10
    ceilings.arithmetic = lambda seconds=0.2: {"float32": 1e11}
    gemmtune.core.target._memory = lambda: 64 << 20  # any shape that passes is small
    logging.getLogger("gemmtune").addHandler(logging.NullHandler())
    seen: list[bool | None] = []
    invoke = TyperCommand.invoke

    def noted(self: TyperCommand, context: Any) -> Any:
        seen.append(bool(context.params.get("as_json")))
        return invoke(self, context)

    TyperCommand.invoke = noted  # type: ignore[method-assign]
    command = typer.main.get_command(app)

    def run(args: Sequence[str]) -> Ran:
        seen[:] = [None]
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
        return Ran(code, out.buffer.getvalue(), err.buffer.getvalue().decode(), seen[-1], trace)  # type: ignore[attr-defined]

    return run


def _stream(errors: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors)


def _strays(folder: Folder, args: Sequence[str], store: str) -> list[str]:
    """What changed in the folder though the line does not name it."""
    asked = {os.path.normpath(text) for text in _values(args)} | {os.path.normpath(store)}
    if "report" in args:
        asked.add("report.html")
    return [path for path in folder.changes() if not any(_covers(name, path) for name in asked)]


def _values(args: Sequence[str]) -> Iterator[str]:
    for token in args:
        yield from (token, token.removeprefix("-o"), token.partition("=")[2])


def _covers(name: str, path: str) -> bool:
    """Whether writing ``name`` explains a change of ``path``: itself, a folder it needs, the ceilings beside it."""
    beside = os.path.splitext(name)[0] + ".ceilings.json"
    return path in (name, beside) or name.startswith(path + os.sep)


def _fuzz(count: int, seed: int, replies: Connection) -> None:
    """Run ``count`` lines in this process, in a folder made for them; sends a summary."""
    run = _prepare()
    target = current_target()
    codes: dict[str, int] = {}
    faults: list[dict[str, Any]] = []
    signal.signal(signal.SIGALRM, _hang)
    with tempfile.TemporaryDirectory(prefix="gemmtune-lines-") as root:
        folder = Folder(Path(root), target)
        os.environ["HOME"] = str(folder.here)
        rng = random.Random(seed)
        for args in itertools.islice(lines(seed), count):
            store = os.environ["GEMMTUNE_STORE"] = rng.choice(
                ("default.db", "default.db", "good.db", "dir", "garbage.db")
            )
            path, start = list(sys.path), time.perf_counter()
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            ran = run(args)
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.path[:] = path
            torch.set_num_threads(target.threads)
            found = [*ran.faults(), *(f"left behind: {stray}" for stray in _strays(folder, args, store))]
            faults += ({"line": args, "store": store, "fault": text} for text in found)
            name = f"{ran.code}{' with JSON' if ran.as_json and ran.code != 2 else ''}"
            codes[name] = codes.get(name, 0) + 1
            if time.perf_counter() - start > SECONDS / 4:
                print(f"slow: {args} took {time.perf_counter() - start:.1f} s", file=sys.stderr)
            if folder.changes():
                folder.restore()
        os.chdir("/")
    replies.send((codes, faults, QuickTuner.runs, QuickTuner.real))


def _hang(*_: Any) -> None:
    raise Hang(f"still running after {SECONDS} s")


@check(
    "10,000 fuzzed command lines in one process (tuning mostly by a stand-in): hostile values, options repeated, "
    "reordered, cut; stores that are damaged, foreign, directories, pipes, loops",
    "exit 0, 1 or 2; no traceback; JSON whenever --json was taken; nothing left behind",
)
def command_lines(full: bool) -> Outcome:
    count = 10_000 if full else 400
    reply = apart(_fuzz, count, 1 if full else 2, limit_s=1800 if full else 120)
    if reply is None:
        return Outcome("the process that ran them died or hung", False)
    codes, faults, tuned, really = reply
    words = ", ".join(f"exit {code}: {number}" for code, number in sorted(codes.items()))
    words += f"; {tuned} came to tuning, {really} really tuned"
    return Outcome(
        f"{len(faults)} faults in {sum(codes.values()):,} lines ({words})",
        not faults and sum(codes.values()) == count,
        {"codes": codes, "tuned": tuned, "really": really, "faults": faults[:50]},
    )


# --- as processes of their own -----------------------------------------------------------------------------------

# (arguments, whether it may tune): what people interrupt and pipe.
_USUAL = (
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


def _quiet_lines(seed: int) -> Iterator[list[str]]:
    """Fuzzed lines that do not tune: a process of its own has no stand-in."""
    return (args for args in lines(seed) if "tune" not in args and "bench" not in args)


def _spawned(folder: Folder, count: int, seed: int) -> Iterator[tuple[str, list[str], list[str]]]:
    """Run lines as processes, each meeting some mishap; yields (mishap, arguments, faults)."""
    rng, hostile = random.Random(seed), _quiet_lines(seed)
    mishaps = ("none", "interrupt", "interrupt", "interrupt", "reader leaves", "no stdin", "no stdout", "full disk")
    for _ in range(count):
        mishap = rng.choice(mishaps)
        args = next(hostile) if mishap == "none" or rng.random() < 0.2 else rng.choice(_USUAL)
        args = [
            text.encode("utf-8", "surrogateescape").replace(b"\0", b"").decode("utf-8", "surrogateescape")
            for text in args
        ]
        yield mishap, args, _spawn(args, mishap, rng.uniform(0.02, 2.5))
        folder.restore()


def _spawn(args: list[str], mishap: str, delay_s: float) -> list[str]:
    mark = f"gemmtune-line-{os.getpid()}-{time.monotonic_ns()}"
    environment = {**os.environ, "GEMMTUNE_MARK": mark, "GEMMTUNE_STORE": "default.db"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "gemmtune", *args]
    if mishap in _REDIRECTED:
        command = ["sh", "-c", f'exec "$@" {_REDIRECTED[mishap]}', "sh", *command]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    if mishap == "reader leaves":
        process.stdout.close()
        process.stdout = None
    if mishap == "interrupt":
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
    return [*_process_faults(process.returncode, err.decode(errors="replace"), mishap), *_orphans(mark)]


_REDIRECTED = {"no stdin": "<&-", "no stdout": ">&-", "full disk": ">/dev/full"}


def _process_faults(code: int, err: str, mishap: str) -> Iterator[str]:
    loud = "Traceback" in err or "Exception ignored" in err
    if mishap == "interrupt" and (loud or code == -signal.SIGINT) and "gemmtune/cli" not in err:
        return  # before the first line of the command: the interpreter was still starting
    if loud:
        yield f"traceback: {err[-1500:]}"
    if code not in (0, 1, 2):
        yield f"exit code {code}: {err[-500:]}"


def _orphans(mark: str) -> Iterator[str]:
    """Processes of this line that are still there two seconds after its end."""
    deadline = time.monotonic() + 2.0
    while found := [process for process in psutil.process_iter() if _marked(process, mark)]:
        if time.monotonic() > deadline:
            yield f"{len(found)} processes left: {[process.cmdline() for process in found]}"
            for process in found:
                process.kill()
            return
        time.sleep(0.05)


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("GEMMTUNE_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@check(
    "200 command lines as processes: fuzzed ones; Ctrl-C at a random moment; stdout closed, a pipe without a reader or "
    "a full disk; stdin closed",
    "exit 0, 1 or 2; no traceback; no process left",
)
def command_processes(full: bool) -> Outcome:
    count = 200 if full else 2
    kinds: dict[str, int] = {}
    faults: list[dict[str, Any]] = []
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="gemmtune-lines-") as root:
        try:
            for mishap, args, found in _spawned(Folder(Path(root), current_target()), count, 1):
                kinds[mishap] = kinds.get(mishap, 0) + 1
                faults += ({"line": args, "mishap": mishap, "fault": text} for text in found)
        finally:
            os.chdir(before)
    words = ", ".join(f"{name}: {number}" for name, number in sorted(kinds.items()))
    return Outcome(f"{len(faults)} faults in {count} processes ({words})", not faults, {"faults": faults[:50]})
