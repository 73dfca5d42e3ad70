"""Check of changed stores and exports: none may crash, execute code, or make dispatch serve a wrong kernel."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from gemmtune import backends
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision, Verdict
from gemmtune.core.errors import StoreError
from gemmtune.core.printable import visible
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.target import Target
from gemmtune.core.tuned_plan import PlanInterval, PlanKernel, TunedPlan
from gemmtune.dispatch import runtime
from gemmtune.dispatch.index import DecisionIndex
from gemmtune.dispatch.runtime import Runtime
from gemmtune.store import MemoryStore, SqliteStore
from gemmtune.store.base import Store
from helpers.serving import decide, evidence, register, toy

from . import mutants
from .checks import Outcome, check
from .store_children import start

_A, _B = Operand("float32"), Operand("float32", Layout("col"), constant=True)
_FIRST = Problem("mm", 3, 5, 4, _A, _B, "float32")
PROBLEMS = (_FIRST, _FIRST.with_m(32), Problem("mm", 3, 7, 4, _A, _B, "float32"))
PACKINGS = (None, "toy:plain", "toy:other")
_SLOW_S = 5.0  # a mutant whose reading takes longer counts as hung


def decisions_of(target_key: str) -> list[Decision]:
    """Return a decision for each problem: the winner's tag is the problem's index, and a faster candidate was wrong."""
    decisions = []
    for index, problem in enumerate(PROBLEMS):
        good, packed, wrong = toy("", index), toy("plain", index), toy("", 100 + index)
        rows = (evidence(good, 0.2), evidence(packed, 0.1), evidence(wrong, 0.01, ok=False))
        decision = decide(problem, *rows, chosen=packed)
        rest = {name: row for name, row in decision.alternatives.items() if row != wrong.id}
        alternatives = {**rest, "": good.id}
        decisions.append(
            msgspec.structs.replace(decision, alternatives=alternatives, target_key=target_key, created=5.0)
        )
    return decisions


def plan_of(target_key: str) -> TunedPlan:
    """Return a plan for the first problem's weight in two layouts, with a faster kernel that was wrong."""
    good, packed, other, wrong = toy("", 0), toy("plain", 0), toy("plain", 1), toy("", 100)
    verdict, times = Verdict("exact"), {1: 1e-3, 64: 2e-3}
    kernels = (
        PlanKernel(good.to_dict(), good.id, 3, None, True, times, (1, 64), verdict),
        PlanKernel(packed.to_dict(), packed.id, 3, "toy:plain", True, times, (1, 8), verdict),
        PlanKernel(other.to_dict(), other.id, 32, "toy:plain", False, times, (9, 64), verdict),
        PlanKernel(wrong.to_dict(), wrong.id, 3, None, True, {1: 1e-4}, (1,), Verdict("wrong")),
    )
    intervals = {
        "": (PlanInterval(1, 64, good.id),),
        "toy:plain": (PlanInterval(1, 8, packed.id), PlanInterval(9, 64, other.id)),
    }
    return TunedPlan(_FIRST.plan_key, _FIRST.to_dict(), target_key, 1, 64, intervals, kernels, created=5.0)


class MutantReader:
    """Reader that passes mutants to a store and to dispatch, and counts the faults."""

    def __init__(self, folder: Path) -> None:
        register()
        self.folder = folder
        self.target = runtime.current_target()
        _load_one_kernel_of_each_backend(self.target)
        self.original = {decision.problem_key: decision for decision in decisions_of(self.target.key)}
        self.original_plan = plan_of(self.target.key)
        self.tally: Counter[str] = Counter()
        self.findings: list[str] = []
        self.running: str | None = None
        self.slowest_s = 0.0
        with contextlib.closing(SqliteStore(folder / "original.db")) as store:
            for decision in self.original.values():
                store.put(self.target, decision)
            store.put_plan(self.target, self.original_plan)
            store.remember_failure(self.target, _FIRST.key, "toy/bad", Verdict("crashed", "signal 11"))
            store.lease(self.target, _FIRST.key, 60.0)
            store.export(folder / "original.json")
        self.database = (folder / "original.db").read_bytes()
        self.export = (folder / "original.json").read_bytes()
        self._open(self._write_file(self.database), random.Random(0), "the original store", exact=True)
        again = MemoryStore()
        again.import_(folder / "original.json")
        self._examine_store(again, "the original export", exact=True)
        assert not self.findings, self.findings
        assert self.tally.pop("read whole") == 2
        self.tally.clear()
        visible("\x1b")
        # Added last: the first use of a decoder or a codec imports code, which is no fault of a mutant.
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Count forbidden events of Python while a mutant is read."""
        if self.running is None:
            return
        if event in _FORBIDDEN or event.startswith(("os.exec", "os.spawn", "socket.", "winreg.")):
            self.findings.append(f"{self.running}: executed: {event} {args!r:.200}")
            self.tally["executed"] += 1
        elif event == "open" and _writes(args[2]) and not str(args[0]).startswith(str(self.folder)):
            self.findings.append(f"{self.running}: wrote: {args!r:.200}")
            self.tally["executed"] += 1

    def read_mutant(self, number: int) -> None:
        """Create and read the mutant of a number."""
        rng = random.Random(number)
        kind, read = rng.choices(
            (("bytes", self._bytes), ("journal", self._journal), ("records", self._records), ("export", self._export)),
            (40, 5, 25, 30),
        )[0]
        self.tally[kind] += 1
        name = f"mutant {number} ({kind})"
        try:
            read(rng, name)
        except Exception as error:  # any exception is a finding
            self._finding("crashed", name, f"{type(error).__name__}: {error}")
        finally:
            self.running = None

    def _finding(self, kind: str, name: str, text: str) -> None:
        """Count a finding of a kind, and add its text."""
        self.tally[kind] += 1
        self.findings.append(f"{name}: {kind}: {text:.300}")

    def _bytes(self, rng: random.Random, name: str) -> None:
        path = self._write_file(mutants.bytes_of(rng, self.database))
        self._open(path, rng, name, exact=True)

    def _journal(self, rng: random.Random, name: str) -> None:
        path = self._write_file(self.database)
        path.with_name("mutant.db-journal").write_bytes(mutants.journal_of(rng, self.database))
        self._open(path, rng, name, exact=True)

    def _records(self, rng: random.Random, name: str) -> None:
        path = self._write_file(self.database)
        mutants.database_of(rng, path)
        self._open(path, rng, name, exact=False)

    def _write_file(self, body: bytes) -> Path:
        """Write a mutated database, without journals, and return its path."""
        for suffix in ("-journal", "-wal", "-shm"):
            (self.folder / f"mutant.db{suffix}").unlink(missing_ok=True)
        path = self.folder / "mutant.db"
        path.write_bytes(body)
        return path

    def _export(self, rng: random.Random, name: str) -> None:
        if rng.random() < 0.3:
            body = mutants.bytes_of(rng, self.export)
        else:
            body = mutants.text_of(rng, mutants.tree_of(rng, json.loads(self.export)))
        path = self.folder / "mutant.json"
        path.write_bytes(body)
        store = MemoryStore()
        self.running, start_s = name, time.perf_counter()
        try:
            store.import_(path)
        except StoreError:
            self.tally["refused"] += 1
        self._examine_store(store, name, exact=False)
        self._check_seconds(time.perf_counter() - start_s, name)

    def _open(self, path: Path, rng: random.Random, name: str, *, exact: bool) -> None:
        self.running, start_s = name, time.perf_counter()
        with contextlib.closing(SqliteStore(path, timeout_s=0.1)) as store:
            self._examine_store(store, name, exact=exact)
            if rng.random() < 0.05:
                self._write(store, name)
        self.running = None
        self._check_seconds(time.perf_counter() - start_s, name)

    def _check_seconds(self, seconds: float, name: str) -> None:
        self.slowest_s = max(self.slowest_s, seconds)
        if seconds > _SLOW_S:
            self._finding("hung", name, f"{seconds:.1f} s")

    def _write(self, store: Store, name: str) -> None:
        """Write a decision. It must be refused, or be read back."""
        decision = self.original[_FIRST.key]
        try:
            store.put(self.target, decision)
        except StoreError:
            return
        if store.get(self.target, _FIRST.key) != decision:
            self._finding("wrong", name, "an acknowledged write is lost")

    def _examine_store(self, store: Store, name: str, *, exact: bool) -> None:
        """Read everything in a store. ``exact``: a changed record must fail its checksum."""
        decisions = list(store.decisions(self.target))
        for problem in PROBLEMS:
            decision = store.get(self.target, problem.key)
            if decision is not None:
                decisions.append(decision)
                if decision.problem_key != problem.key:
                    self._finding("wrong", name, f"{decision.problem_key} for {problem.key}")
            store.failures(self.target, problem.key)
            store.lease_remaining_s(self.target, problem.key)
        for decision in decisions:
            if exact and decision != self.original.get(decision.problem_key):
                self._finding("wrong", name, f"a changed decision for {decision.problem_key}")
            for text in unsound(decision):
                self._finding("wrong", name, text)
        self._examine_plans(store, name, exact=exact)
        all_decisions = list(store.decisions())
        if any(target.key == self.target.key and target != self.target for target in store.targets()):
            self._finding("wrong", name, "a changed target under this one's key")
        damage = store.verify()
        is_complete = len(all_decisions) == len(PROBLEMS) and {d.problem_key: d for d in all_decisions} == self.original
        self.tally["read whole" if is_complete else "read in part" if all_decisions else "missed"] += 1
        self.tally["told by verify"] += bool(damage)
        self._check_dispatch(store, decisions, name)

    def _examine_plans(self, store: Store, name: str, *, exact: bool) -> None:
        """Read all plans in a store. ``exact``: a changed record must fail its checksum."""
        plans = list(store.plans(self.target))
        for problem in PROBLEMS:
            plan = store.get_plan(self.target, problem.plan_key)
            if plan is not None:
                plans.append(plan)
                if plan.plan_key != problem.plan_key:
                    self._finding("wrong", name, f"the plan for {plan.plan_key} for {problem.plan_key}")
        for plan in plans:
            if exact and plan != self.original_plan:
                self._finding("wrong", name, f"a changed plan for {plan.plan_key}")
            for text in unsound_plan(plan):
                self._finding("wrong", name, text)
        list(store.plans())

    def _check_dispatch(self, store: Store, decisions: Iterable[Decision], name: str) -> None:
        """Check that dispatch serves only candidates that the evidence of the same problem calls correct."""
        allowed: dict[str, list[Candidate]] = {}
        for decision in decisions:
            rows = [row for row in decision.evidence if row.verdict is not None and row.verdict.kind in _PASSED]
            for row in rows:
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    allowed.setdefault(decision.problem_key, []).append(Candidate.from_dict(row.candidate))
        index = DecisionIndex.read(store, self.target, _ignore)
        local_runtime = Runtime()
        local_runtime.warn_once = _ignore  # type: ignore[method-assign]
        local_runtime.refresh(store)
        for problem in PROBLEMS:
            for packing in PACKINGS:
                plan = index.plan(problem.plan_key, packing)
                for entry in plan.entries if plan is not None else ():
                    if entry.candidate is not None:
                        self.tally["planned"] += 1
                        if entry.candidate not in allowed.get(problem.with_m(entry.m).key, ()):
                            self._finding("wrong", name, f"{entry.candidate.id} for {problem.key} at {entry.m}")
            with mock.patch.object(runtime, "current_target", return_value=self.target):
                kernel: Any = local_runtime.kernel_for(problem)
            if kernel is not None and kernel.problem.plan_key != problem.plan_key:
                self._finding("wrong", name, f"a kernel for {kernel.problem.key} serves {problem.key}")


def unsound(decision: Decision) -> list[str]:
    """Return the faults of a decision that a store returned, by rules that are independent of the store's."""
    if Problem.from_dict(decision.problem).key != decision.problem_key:
        return [f"{decision.problem_key} describes another problem"]
    rows = {row.id: row for row in decision.evidence}
    served = {*decision.alternatives.values(), decision.chosen} - {None}
    wrong = []
    for name in served:
        row = rows.get(str(name))
        if row is None or row.verdict is None or row.verdict.kind not in _PASSED:
            wrong.append(f"{name} is served unchecked for {decision.problem_key}")
        elif Candidate.from_dict(row.candidate).id != name:
            wrong.append(f"{name} is another candidate in {decision.problem_key}")
    return wrong


def unsound_plan(plan: TunedPlan) -> list[str]:
    """Return the faults of a plan that a store returned, by rules that are independent of the store's."""
    if Problem.from_dict(plan.problem).plan_key != plan.plan_key:
        return [f"{plan.plan_key} describes another problem"]
    wrong = []
    for packing in plan.intervals:
        for m in {plan.first, (plan.first + plan.last) // 2, plan.last, *range(plan.first, min(plan.last, 64) + 1)}:
            kernel = plan.serving(m, packing)
            if kernel is None:
                wrong.append(f"nothing serves {plan.plan_key} at {m}")
            elif kernel.verdict is None or kernel.verdict.kind not in _PASSED:
                wrong.append(f"{kernel.id} is served unchecked for {plan.plan_key} at {m}")
            elif Candidate.from_dict(kernel.candidate).id != kernel.id or (kernel.packing or "") != packing:
                wrong.append(f"{kernel.id} is another candidate in {plan.plan_key}")
    return wrong


def _load_one_kernel_of_each_backend(target: Target) -> None:
    """Load a kernel of each backend: imports at the first kernel are no fault of a mutant."""
    for name in backends.names():
        backend = backends.get(name)
        for candidate in backend.candidates(_FIRST, target):
            if isinstance(candidate, Candidate):
                backend.load(backend.build(_FIRST, candidate, target), _FIRST)
                break


def _writes(flags: object) -> bool:
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


_PASSED = ("exact", "within_bound")
_FORBIDDEN = frozenset({
    "exec", "compile", "import", "code.__new__", "marshal.load", "marshal.loads", "pickle.find_class",
    "os.system", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn", "subprocess.Popen", "os.kill", "os.chmod",
    "ctypes.dlopen", "ctypes.dlsym", "ctypes.call_function", "shutil.rmtree",
    "sqlite3.load_extension", "sqlite3.enable_load_extension",
})  # fmt: skip


def _ignore(text: str) -> None:
    """Ignore a warning: the mutants cause some hundred thousand."""


def read_mutants(folder: str, first: int, count: int) -> None:
    """Read ``count`` mutants from number ``first``. The file ``at`` has the number of the current mutant."""
    logging.disable(logging.CRITICAL)
    reader = MutantReader(Path(folder))
    position = os.open(Path(folder) / "at", os.O_CREAT | os.O_WRONLY)
    for number in range(first, first + count):
        os.pwrite(position, f"{number:>12}".encode(), 0)
        reader.read_mutant(number)
    print(json.dumps({"tally": reader.tally, "findings": reader.findings[:200], "slowest_s": reader.slowest_s}))


@check(
    "mutated stores and exports: flipped bits, truncation, foreign schemas, forged records, hostile JSON and journals",
    "100,000 mutants: 0 crashes, 0 code executed, 0 wrong dispatch",
)
def hostile_data(full: bool) -> Outcome:
    count = 100_000 if full else 300
    tally: Counter[str] = Counter()
    findings: list[str] = []
    slowest, first = 0.0, 0
    while first < count:
        result, reached = _run(read_mutants, first, count - first)
        if result is None:
            tally["crashed"] += 1
            findings.append(f"mutant {reached} ended the process")
        else:
            tally.update(result["tally"])
            findings += result["findings"]
            slowest = max(slowest, result["slowest_s"])
        first = reached + 1
    faults = {name: tally[name] for name in ("crashed", "executed", "wrong", "hung")}
    reads = ", ".join(f"{tally[name]} {name}" for name in ("read whole", "read in part", "missed", "refused"))
    return Outcome(
        f"{count} mutants ({reads}; slowest {slowest:.2f} s): {faults['crashed']} crashes, "
        f"{faults['executed']} executions, {faults['wrong']} wrong, {faults['hung']} hung"
        + ("" if not findings else ": " + "; ".join(findings[:3])),
        not any(faults.values()) and tally["planned"] > count // 2,
        {"tally": dict(tally), "findings": findings, "slowest_s": slowest},
    )


def _run(function: Callable[..., None], first: int, count: int) -> tuple[Any, int]:
    """Run ``function`` in a process. Return its result (None if it was ended) and the number of the last mutant."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(dir=memory)
    process: subprocess.Popen[str] = start(function, folder, first, count)
    try:
        out, _ = process.communicate()
        position = Path(folder) / "at"
        if process.returncode == 0:
            return json.loads(out.splitlines()[-1]), first + count
        if not position.exists():
            raise RuntimeError(f"the process that was to read mutants did not start: {out[-500:]}")
        return None, int(position.read_text())
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)
