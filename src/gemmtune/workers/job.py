"""The work itself, for one Problem: build, load, pack, check, time, race. Runs in a worker, or in-process for tests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from .. import backends
from ..backends.base import Artifact, Kernel
from ..backends.location import artifacts_in
from ..core.candidate import Candidate
from ..core.decision import Verdict
from ..core.errors import UnsupportedError, WorkerError
from ..core.problem import Problem
from ..core.target import Target
from ..timing.clock import Latency
from ..timing.cuda_clock import TorchGpu, context_fault, limit_device_memory, warm_up
from ..timing.cuda_clock import rough_times as rough_gpu_times
from ..timing.machine import CpuMachine, Pins
from ..timing.nvml import cuda_machine
from ..timing.outcome import Leading, Raced
from ..timing.timing import (
    BASELINE_BACKEND,
    PACED_BYTES,
    Flush,
    Pace,
    Track,
    on_gpu,
    packs_each_call,
    rough_times,
    scratch_allowance,
)
from ..verify.draws import Draw, prepare
from ..verify.inputs import Inputs, operand_bytes
from ..verify.recheck import recheck
from ..verify.row_stack import OtherRows
from ..verify.verify import Run, guarded, verify
from .limits import limit_memory
from .protocol import Attempt, Attempted, Build, Built, Confirm, Confirmed, Open, Race, Ready, Reply, Request, Setup
from .strays import kill_descendants

_RACE_LEAST = 0.3  # of a race's budget, when making and packing operands took it all

Progress = Callable[[Leading], None]

# How long a kernel is run again on one draw, to see whether it repeats: when it is tried, and before it is eligible.
_GLANCE_S, _PATIENCE_S = 20e-3, 0.1
_ROWS_PATIENCE_S = 25e-3  # for a candidate's calls at other M and what is compared of them, beyond the first call


class ContextLost(WorkerError):
    """A kernel cost this process its device context: whatever comes next fails, in a new process alone it does not."""


class Desk:
    """Answers requests, one at a time. marker_fd: see ``timing.Track``; None when nobody outlives a crash here."""

    def __init__(self, progress: Progress, marker_fd: int | None = None) -> None:
        self._progress, self._marker_fd = progress, marker_fd
        self._target: Target | None = None
        self._job: Job | None = None
        self._latency: Latency = "graph"
        self._artifacts: Path | None = None
        self._pins = Pins()

    def answer(self, request: Request) -> Reply:
        """Do what is asked. A candidate's failure is a Verdict in the reply; what it raises is nobody's fault.

        Raises ContextLost when the device cannot be used any more.
        """
        try:
            with artifacts_in(self._artifacts):
                reply = self._answer(request)
        except Exception as error:  # whatever it was, a lost context may be why
            self._check_context(f"{type(error).__name__}: {error}")
            raise
        if isinstance(reply, Attempted | Confirmed) and reply.verdict is not None and not reply.verdict.ok:
            self._check_context(reply.verdict.detail)
        if isinstance(reply, Raced) and reply.faults:
            self._check_context("; ".join(verdict.detail for verdict in reply.faults.values()))
        return reply

    def _check_context(self, happened: str) -> None:
        """Raise ContextLost if the device's context is, saying what happened before."""
        if self._target is not None and on_gpu(self._target) and (fault := context_fault(self._target.torch_device)):
            raise ContextLost(f"the device's context is lost ({fault}): {happened}")

    def _answer(self, request: Request) -> Reply:
        match request:
            case Setup():
                self._target, self._latency = Target.from_dict(request.target), request.latency
                self._artifacts = None if request.artifacts is None else Path(request.artifacts)
                for name, place in request.guests.items():
                    backends.register(name, place)
                torch.set_num_threads(self._target.threads)
                if request.warm and on_gpu(self._target):
                    warm_up(self._target.torch_device)
                return Ready()
            case Open():
                self._job = None  # the last problem's operands go before this one's come
                problem, target = Problem.from_dict(request.problem), self._need_target()
                self._limit(target, request.memory)
                self._job = Job(problem, target, request.seed, self._latency)
                return Ready(operand_bytes(problem))
            case Attempt():
                attempted = self._need_job().attempt(Candidate.from_dict(request.candidate), request.worth_s)
                attempted.verdict = self._left_behind() or attempted.verdict
                return attempted
            case Confirm():
                confirmed = self._need_job().confirm(Candidate.from_dict(request.candidate))
                return Confirmed(self._left_behind() or confirmed.verdict)
            case Build():
                limit_memory(request.memory)
                candidate = Candidate.from_dict(request.candidate)
                return build(Problem.from_dict(request.problem), candidate, self._need_target())
            case Race():
                candidates = [Candidate.from_dict(item) for item in request.candidates]
                began = time.perf_counter()
                conditions = {"pinned": self._pins.words} if self._pins.words else {}
                track = self._need_job().track(candidates, self._marker_fd, request.hot, conditions)
                left = max(_RACE_LEAST * request.budget_s, request.budget_s - (time.perf_counter() - began))
                raced = track.race(left, request.seed, self._progress, request.earlier_s)
                raced.faults = self._need_job().recheck(track, raced, request.seed)
                self._left_behind()
                return raced

    def _limit(self, target: Target, memory: int) -> None:
        """Keep to the memory allowed, and to the least busy CPUs, of whichever of them the kernels run on."""
        if on_gpu(target):  # whose context reserves address space beyond any limit of ours
            limit_device_memory(target.torch_device, memory)
            return
        limit_memory(memory)
        if self._marker_fd is not None:  # a process of its own, not the user's
            self._pins.choose(target.threads)

    def _left_behind(self) -> Verdict | None:
        """The Verdict for a candidate that left processes running, which are ended. In the user's process, nothing."""
        count = kill_descendants() if self._marker_fd is not None else 0
        return Verdict("crashed", f"it left {count} child process(es) running") if count else None

    def _need_target(self) -> Target:
        if self._target is None:
            raise WorkerError("the worker was given a problem before a target; send Setup first")
        return self._target

    def _need_job(self) -> Job:
        if self._job is None:
            raise WorkerError("the worker was given a candidate before a problem; send Open first")
        return self._job


class Job:
    """One Problem in hand: its operands and oracle, made once, and the packed copies of B that are in use."""

    def __init__(self, problem: Problem, target: Target, seed: int, latency: Latency = "graph") -> None:
        self.problem, self.target, self._seed, self._latency = problem, target, seed, latency
        self._gpu = TorchGpu(target.torch_device) if on_gpu(target) else None
        # Asked when the race begins: for what went on while candidates were tried.
        self._machine = cuda_machine(target.torch_device) if on_gpu(target) else CpuMachine(target.threads)
        self._draws: tuple[Draw, ...] | None = None
        self._rows: OtherRows | None = None
        self._flush: Flush | None = None
        self._pace = Pace() if self._gpu is None and problem.weight_bytes <= PACED_BYTES else None
        self._packed: dict[tuple[str, int], Any] = {}  # by layout, and which B
        self._packing_s: dict[str, float] = {}
        self._checked: dict[str, Verdict] = {}
        self._need_draws()

    def attempt(self, candidate: Candidate, worth_s: float | None = None) -> Attempted:
        """Load, pack, time a few cold calls, check against the first draw unless it is slower than ``worth_s``.

        worth_s None: there is nothing to compare with yet, so that a kernel of any speed and scratch will do.
        """
        kernel, verdict = self._load(candidate)
        if kernel is None:
            return Attempted(verdict)
        self._drop_packed(kernel)
        if worth_s is not None and kernel.workspace_bytes > scratch_allowance(self.problem):
            return Attempted(Verdict("unsupported", _greedy(kernel, self.problem)), kernel.packing)
        try:
            times_s = self._rough_times(kernel, worth_s)
        except BaseException as error:  # SystemExit too is the candidate's; see blame
            self._mend()
            return Attempted(blame(error, "running", "crashed"), kernel.packing)
        packing_s = self._packing_s.get(kernel.packing or "", 0.0)
        result = Attempted(None, kernel.packing, packing_s, kernel.workspace_bytes, times_s)
        if worth_s is None or min(times_s) <= worth_s:
            result.verdict = self._checked[candidate.id] = self._verify(kernel, self._need_draws()[:1], _GLANCE_S)
            if (
                self._pace is not None
                and result.verdict.ok
                and candidate.backend != BASELINE_BACKEND
                and len(times_s) > 2
            ):
                self._pace.offer(self._once(kernel), min(times_s))
        return result

    def confirm(self, candidate: Candidate) -> Confirmed:
        """Check against every draw, and at other M; the first draw only if ``attempt`` has not done so here."""
        kernel, verdict = self._load(candidate)
        if kernel is None:
            return Confirmed(verdict)
        self._drop_packed(kernel)
        first = self._checked.get(candidate.id)
        if first is None:
            first = self._verify(kernel, self._need_draws()[:1])
        rest = first if not first.ok else self._verify(kernel, self._need_draws()[1:])
        if rest.ok:
            rows = self._judged(kernel, lambda run: self._need_rows().verify(run, candidate, _ROWS_PATIENCE_S))
            rest = msgspec.structs.replace(rest, worst=max(rest.worst, rows.worst)) if rows.ok else rows
        if not rest.ok:
            return Confirmed(rest)
        both_exact = first.kind == rest.kind == "exact"
        detail = first.detail or rest.detail
        worst = max(first.worst, rest.worst)
        return Confirmed(Verdict("exact" if both_exact else "within_bound", detail, worst))

    def recheck(self, track: Track, raced: Raced, seed: int) -> dict[str, Verdict]:
        """What became wrong of the raced kernels that may be served: the leader, each packing's best and what won its
        layout's duel, and the fastest of ATen's."""
        placed = [row for row in raced.placed if row.sample is not None and row.stage != "failed"]
        of_aten = [row for row in placed if row.id.startswith(f"{BASELINE_BACKEND}/")]
        baseline = min(of_aten, key=lambda row: row.sample.median_s if row.sample else math.inf, default=None)
        duelled = [name for layout in raced.layouts.values() for name in (layout.candidate, layout.baseline)]
        names = [raced.leader, *raced.groups.values(), *duelled, baseline.id if baseline is not None else None]
        kernels = (track.raced_kernel(name) for name in dict.fromkeys(names) if name is not None)
        return recheck(self.problem, kernels, seed)

    def track(
        self, candidates: list[Candidate], marker_fd: int | None, hot: bool = False, conditions: Mapping[str, str] = {}
    ) -> Track:
        """Everything a race needs, loaded and packed; what checking held on to is let go first.

        hot: one operand set, which stays in the cache as far as it fits. conditions: what else Samples are to say.

        Raises WorkerError when a confirmed candidate cannot be loaded again.
        """
        self._draws, self._rows, self._packed, self._flush, self._pace = None, None, {}, None, None
        kernels = {}
        for candidate in candidates:
            kernel, verdict = self._load(candidate)
            if kernel is None:
                raise WorkerError(f"{candidate.id} was confirmed but cannot be loaded again: {verdict.detail}")
            kernels[candidate.id] = kernel
        return Track(
            kernels, self.problem, self.target, self._seed, marker_fd,
            hot=hot, conditions=conditions, latency=self._latency, machine=self._machine,
        )  # fmt: skip

    def _need_draws(self) -> tuple[Draw, ...]:
        if self._draws is None:
            self._draws = prepare(self.problem, self._seed, device=self.target.torch_device)
        return self._draws

    def _need_rows(self) -> OtherRows:
        if self._rows is None:
            self._rows = OtherRows(self.problem, self._need_draws())
        return self._rows

    def _need_flush(self) -> Flush:
        if self._flush is None:
            self._flush = Flush(self.problem, self.target)
        return self._flush

    def _load(self, candidate: Candidate) -> tuple[Kernel | None, Verdict]:
        artifact = _artifact(self.problem, candidate, self.target)
        if isinstance(artifact, Verdict):
            return None, artifact
        try:
            return backends.get(candidate.backend).load(artifact, self.problem), Verdict("exact")
        except BaseException as error:  # SystemExit too is the candidate's; see blame
            return None, blame(error, "loading", "build_failed")

    def _verify(self, kernel: Kernel, draws: tuple[Draw, ...], patience_s: float = _PATIENCE_S) -> Verdict:
        return self._judged(kernel, lambda run: verify(run, self.problem, draws, patience_s))

    def _judged(self, kernel: Kernel, judge: Callable[[Run], Verdict]) -> Verdict:
        """The Verdict of ``judge`` on a kernel, whose own exceptions are Verdicts too."""

        def run(inputs: Inputs, out: Tensor) -> None:
            kernel.run(inputs.a, self._operand(kernel, inputs), inputs.aux, out)

        try:
            verdict = judge(run)
        except BaseException as error:  # SystemExit too is the candidate's; see blame
            verdict = blame(error, "running", "crashed")
        if not verdict.ok:
            self._mend()
        return verdict

    def _mend(self) -> None:
        """Make anew what a bad kernel may have written into, so that the next one is not judged by it."""
        self._packed = {}
        drawn = self._draws is not None and any(draw.touched() for draw in self._draws)
        if drawn or (self._rows is not None and self._rows.touched()):
            self._draws, self._rows = None, None

    def _drop_packed(self, kernel: Kernel) -> None:
        """Let go of B in other layouts than this kernel's, before it takes memory of its own."""
        self._packed = {key: b for key, b in self._packed.items() if key[0] == kernel.packing}

    def _rough_times(self, kernel: Kernel, worth_s: float | None) -> tuple[float, ...]:
        if self._gpu is None:
            return rough_times(self._once(kernel), self._need_flush(), worth_s, self._pace)
        return rough_gpu_times(self._gpu, self._once(kernel), self._need_flush(), worth_s, self._latency)

    def _once(self, kernel: Kernel) -> Callable[[], None]:
        """One call on the first draw, for rough timing; into guarded memory, since it has not been checked yet."""
        inputs = self._need_draws()[0].inputs
        problem = self.problem
        _, out = guarded(problem, inputs.a.device, 0)  # ``out`` is a view: it keeps the guards alive
        if packs_each_call(kernel, problem):
            return lambda: kernel.run(inputs.a, kernel.pack(inputs.b), inputs.aux, out)
        b = self._operand(kernel, inputs)
        return lambda: kernel.run(inputs.a, b, inputs.aux, out)

    def _operand(self, kernel: Kernel, inputs: Inputs) -> Any:
        """B as the kernel wants it. A constant B is packed once for candidates of one layout in a row."""
        if kernel.packing is None:
            return inputs.b
        if packs_each_call(kernel, self.problem):
            return kernel.pack(inputs.b)
        source = inputs.b if inputs.source is None else inputs.source
        key = kernel.packing, id(source)
        if key not in self._packed:
            start = time.perf_counter()
            self._packed[key] = kernel.pack(source)
            if self._gpu is not None:
                self._gpu.synchronize()
            self._packing_s.setdefault(kernel.packing, time.perf_counter() - start)
        return self._packed[key]


def build(problem: Problem, candidate: Candidate, target: Target) -> Built:
    """Build a candidate, for whoever loads it later (in another process)."""
    artifact = _artifact(problem, candidate, target)
    if isinstance(artifact, Verdict):
        return Built(artifact)
    return Built(None, artifact.digest, None if artifact.path is None else str(artifact.path))


def _artifact(problem: Problem, candidate: Candidate, target: Target) -> Artifact | Verdict:
    try:
        return backends.get(candidate.backend).build(problem, candidate, target)
    except BaseException as error:  # SystemExit too is the candidate's; see blame
        return blame(error, "building", "build_failed")


def _greedy(kernel: Kernel, problem: Problem) -> str:
    needs, allowed = kernel.workspace_bytes >> 20, scratch_allowance(problem) >> 20
    return f"it needs {needs} MB of scratch; tuning this problem allows {allowed} MB, since other candidates need less"


def blame(error: BaseException, doing: str, kind: Any) -> Verdict:
    """The Verdict for what a candidate raised. KeyboardInterrupt is the user's, and passes through."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    text = f"{type(error).__name__} while {doing}: {error}"[:2000]
    if isinstance(error, UnsupportedError):
        return Verdict("unsupported", text)
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
        return Verdict("out_of_memory", text)
    return Verdict(kind, text)
