"""The work on one Problem: build, load, pack, check, time, race. It runs in a worker, or in this process for tests."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from .. import backends
from ..backends.base import Artifact, Kernel
from ..backends.location import artifacts_in
from ..core import plugins
from ..core.candidate import Candidate
from ..core.decision import Verdict
from ..core.errors import UnsupportedError, WorkerError
from ..core.problem import Dim, Problem
from ..core.target import Target
from ..timing import devices as device_timing
from ..timing.devices import DeviceTiming
from ..timing.eviction import can_evict, evict
from ..timing.flush import Flush
from ..timing.machine import CpuPinning
from ..timing.outcome import LeaderUpdate, RaceResult
from ..timing.race_operands import BASELINE_BACKEND, RaceOperands, packs_each_call, scratch_allowance
from ..timing.size_sweep import SizesTimed, SizeSweep
from ..verify.inputs import Inputs, operand_bytes
from ..verify.recheck import recheck
from ..verify.reference_cases import ReferenceCase, case_for_rows, make_reference_cases
from ..verify.row_stack import RowCountVerifier
from ..verify.verify import Run, allowed_rounding, guarded, verify
from .limits import limit_memory, lower_priority
from .orphans import kill_descendants
from .protocol import (
    AlgorithmsNamed,
    Attempt,
    Attempted,
    Build,
    Built,
    Confirm,
    Confirmed,
    NameAlgorithms,
    Open,
    Race,
    Ready,
    Reply,
    Request,
    Setup,
    SizedCandidate,
    SizesVerified,
    TimeSizes,
    VerifySizes,
)  # fmt: skip

_MIN_RACE_SHARE = 0.3  # share of a race's budget that the race gets even when preparing operands took it all

Progress = Callable[[LeaderUpdate], None]

# Seconds for repeating a kernel on one test case, to see whether its output repeats: when it is screened, and before it
# is eligible.
_SCREEN_REPEAT_S, _CONFIRM_REPEAT_S = 20e-3, 0.1
_BATCH_CASES = 2  # of the test cases of a batch: a uniform one, and one with special rows and columns
_GROUP_ROWS = 1024  # of the test cases of several M, which are in memory together
_ROWS_PATIENCE_S = 25e-3  # seconds for a candidate's calls at other M and the comparisons there, beyond the first call


class ContextLost(WorkerError):
    """The loss of this process's device context through a kernel. Every later call fails in this process, and would not
    in a new one."""


class RequestHandler:
    """A handler of requests, one at a time.

    progress: called with messages during a race. marker_fd: see ``timing.RaceOperands``; None in the user's process,
    where no parent reads it after a crash.
    """

    def __init__(self, progress: Progress, marker_fd: int | None = None) -> None:
        self._progress, self._marker_fd = progress, marker_fd
        self._timing: DeviceTiming | None = None
        self._job: ProblemSession | None = None
        self._kept: dict[str, ProblemSession] = {}  # by the key of the problem, while another one is open
        self._artifacts: Path | None = None
        self._pins = CpuPinning()

    def answer(self, request: Request) -> Reply:
        """Carry out a request and return the reply.

        A candidate's failure is a Verdict in the reply; an exception from this method is no candidate's fault. Raises
        ContextLost when the device cannot be used any more.
        """
        try:
            with artifacts_in(self._artifacts):
                reply = self._answer(request)
        except Exception as error:  # any error may come from a lost context
            self._check_context(f"{type(error).__name__}: {error}")
            raise
        if isinstance(reply, Attempted | Confirmed) and reply.verdict is not None and not reply.verdict.ok:
            self._check_context(reply.verdict.detail)
        if isinstance(reply, SizesVerified) and not reply.verdict.ok:
            self._check_context(reply.verdict.detail)
        if isinstance(reply, RaceResult | SizesTimed) and reply.faults:
            self._check_context("; ".join(verdict.detail for verdict in reply.faults.values()))
        return reply

    def _leave_job(self, request: Open, problem: Problem) -> ProblemSession | None:
        """Drop the sessions that a request to open a problem does not keep, and return the one that it resumes, if it
        is still in memory."""
        if self._job is not None:
            self._kept[self._job.problem.key] = self._job
        self._job = None
        resumed = self._kept.get(problem.key) if request.resumes else None
        self._kept = {key: job for key, job in self._kept.items() if key in request.keep and key != problem.key}
        return resumed

    def _check_context(self, happened: str) -> None:
        """Raise ContextLost if the device's context is lost, with ``happened`` in its message."""
        if self._timing is not None and (fault := self._timing.fault()):
            raise ContextLost(f"the device's context is lost ({fault}): {happened}")

    def _answer(self, request: Request) -> Reply:
        match request:
            case Setup():
                target = Target.from_dict(request.target)
                self._artifacts = None if request.artifacts is None else Path(request.artifacts)
                plugins.load(request.modules)
                for name, location in request.guests.items():
                    backends.register(name, location)
                torch.set_num_threads(target.threads)
                self._timing = device_timing.of(target, request.latency)
                if request.warm:
                    self._timing.warm_up()
                return Ready()
            case Open():
                problem, timing = Problem.from_dict(request.problem), self._require_timing()
                resumed = self._leave_job(request, problem)  # frees operands before allocating this problem's
                if resumed is not None:
                    resumed.discard_damaged()  # the kernels of the other problem may be bad
                # A race reads the machine's state since this object was made, the time in which candidates are tried.
                self._timing = timing = resumed.timing if resumed else device_timing.of(timing.target, timing.latency)
                self._limit(timing, request.memory)
                self._job = resumed or ProblemSession(problem, timing, request.seed)
                return Ready(operand_bytes(problem))
            case Attempt():
                attempted = self._require_job().attempt(Candidate.from_dict(request.candidate), request.cutoff_s)
                attempted.verdict = self._kill_orphans() or attempted.verdict
                return attempted
            case Confirm():
                confirmed = self._require_job().confirm(Candidate.from_dict(request.candidate))
                return Confirmed(self._kill_orphans() or confirmed.verdict)
            case Build():
                lower_priority(request.niceness)
                limit_memory(request.memory)
                candidate = Candidate.from_dict(request.candidate)
                return build(Problem.from_dict(request.problem), candidate, self._require_timing().target)
            case Race():
                candidates = [Candidate.from_dict(item) for item in request.candidates]
                started = time.perf_counter()
                conditions = {"pinned": self._pins.words} if self._pins.words else {}
                prepared = self._require_job().prepare_race(candidates, self._marker_fd, request.hot, conditions)
                remaining_s = max(
                    _MIN_RACE_SHARE * request.budget_s, request.budget_s - (time.perf_counter() - started)
                )
                raced = prepared.race(remaining_s, request.seed, self._progress, request.earlier_s)
                raced.faults = self._require_job().recheck(prepared, raced, request.seed)
                self._kill_orphans()
                return raced
            case TimeSizes():
                timed = self._require_job().time_sizes(request, self._marker_fd)
                self._kill_orphans()
                return timed
            case VerifySizes():
                verified = self._require_job().verify_sizes(request)
                verified.verdict = self._kill_orphans() or verified.verdict
                return verified
            case NameAlgorithms():
                return self._require_job().name_algorithms(request)

    def _limit(self, timing: DeviceTiming, memory: int) -> None:
        """Limit this process to the memory allowed, on the device that runs the kernels, and on a CPU to the least busy
        cores."""
        if timing.limit_memory(memory):
            return
        limit_memory(memory)
        if self._marker_fd is not None:  # a worker process, not the user's
            self._pins.choose(timing.target.threads)

    def _kill_orphans(self) -> Verdict | None:
        """Kill the processes that a candidate started and did not end, and return its Verdict; None when there were
        none, or in the user's process."""
        count = kill_descendants() if self._marker_fd is not None else 0
        return Verdict("crashed", f"it left {count} child process(es) running") if count else None

    def _require_timing(self) -> DeviceTiming:
        if self._timing is None:
            raise WorkerError("the worker was given a problem before a target; send Setup first")
        return self._timing

    def _require_job(self) -> ProblemSession:
        if self._job is None:
            raise WorkerError("the worker was given a candidate before a problem; send Open first")
        return self._job


class ProblemSession:
    """The session of one Problem: its operands and oracle, prepared once, and the packed copies of B that are in
    use."""

    def __init__(self, problem: Problem, timing: DeviceTiming, seed: int) -> None:
        self.problem, self.target, self.timing, self._seed = problem, timing.target, timing, seed
        self._test_cases: tuple[ReferenceCase, ...] | None = None
        self._rows: RowCountVerifier | None = None
        self._flush: Flush | None = None
        self._speed_reference = timing.speed_reference(problem)
        self._packed: dict[tuple[str, int], Any] = {}  # by layout and id of the unpacked B
        self._packing_s: dict[str, float] = {}
        self._checked: dict[str, Verdict] = {}
        self._sweep: SizeSweep | None = None
        self._swept: tuple[list[SizedCandidate], int, bool] | None = None  # what ``_sweep`` was made for
        self._unloaded: dict[str, Verdict] = {}  # candidates of ``_sweep`` that could not be loaded
        self._get_test_cases()

    def attempt(self, candidate: Candidate, cutoff_s: float | None = None) -> Attempted:
        """Load and pack a candidate, time a few cold calls, and check it on the first test case unless it is slower
        than ``cutoff_s``.

        cutoff_s None: there is no other time to compare with yet, so that a kernel of any speed and any scratch is
        accepted.
        """
        kernel, verdict = self._load(candidate)
        if kernel is None:
            return Attempted(verdict)
        self._drop_packed(kernel)
        if cutoff_s is not None and kernel.workspace_bytes > scratch_allowance(self.problem):
            return Attempted(Verdict("unsupported", _explain_scratch(kernel, self.problem)), kernel.packing)
        try:
            times_s = self._screening_times(kernel, cutoff_s)
        except BaseException as error:  # SystemExit is the candidate's too; see verdict_of
            self.discard_damaged()
            return Attempted(verdict_of(error, "running", "crashed"), kernel.packing)
        packing_s = self._packing_s.get(kernel.packing or "", 0.0)
        result = Attempted(None, kernel.packing, packing_s, kernel.workspace_bytes, times_s)
        if cutoff_s is None or min(times_s) <= cutoff_s:
            result.verdict = self._checked[candidate.id] = self._verify(
                kernel, self._get_test_cases()[:1], _SCREEN_REPEAT_S
            )
            if (
                self._speed_reference is not None
                and result.verdict.ok
                and candidate.backend != BASELINE_BACKEND
                and len(times_s) > 2
            ):
                self._speed_reference.offer(self._single_call(kernel)[0], min(times_s))
        return result

    def confirm(self, candidate: Candidate) -> Confirmed:
        """Check a candidate on every test case, and at other M; on the first one only if ``attempt`` has not done so in
        this process."""
        kernel, verdict = self._load(candidate)
        if kernel is None:
            return Confirmed(verdict)
        self._drop_packed(kernel)
        first_verdict = self._checked.get(candidate.id)
        if first_verdict is None:
            first_verdict = self._verify(kernel, self._get_test_cases()[:1])
        remaining_verdict = first_verdict if not first_verdict.ok else self._verify(kernel, self._get_test_cases()[1:])
        if remaining_verdict.ok:
            rows_verdict = self._guarded_verdict(
                kernel,
                lambda run: self._get_other_rows().verify(
                    run, candidate, _ROWS_PATIENCE_S, rounding=allowed_rounding(kernel)
                ),
            )
            remaining_verdict = (
                msgspec.structs.replace(remaining_verdict, worst=max(remaining_verdict.worst, rows_verdict.worst))
                if rows_verdict.ok
                else rows_verdict
            )
        if not remaining_verdict.ok:
            return Confirmed(remaining_verdict)
        both_exact = first_verdict.kind == remaining_verdict.kind == "exact"
        detail = first_verdict.detail or remaining_verdict.detail
        worst = max(first_verdict.worst, remaining_verdict.worst)
        return Confirmed(Verdict("exact" if both_exact else "within_bound", detail, worst))

    def recheck(self, operands: RaceOperands, raced: RaceResult, seed: int) -> dict[str, Verdict]:
        """Return the verdicts on raced kernels that have become wrong, by id.

        Rechecked are the kernels that may be served: the leader, each packing's best, both kernels of each layout's
        paired test, and ATen's fastest.
        """
        timed = [row for row in raced.evidence.values() if row.sample is not None and row.stage != "failed"]
        aten_rows = [row for row in timed if row.id.startswith(f"{BASELINE_BACKEND}/")]
        baseline = min(aten_rows, key=lambda row: row.sample.median_s if row.sample else math.inf, default=None)
        tested = [name for layout in raced.layouts.values() for name in (layout.candidate, layout.baseline)]
        names = [raced.leader, *raced.alternatives.values(), *tested, baseline.id if baseline is not None else None]
        kernels = (operands.raced_kernel(name) for name in dict.fromkeys(names) if name is not None)
        return recheck(self.problem, kernels, seed)

    def prepare_race(
        self, candidates: list[Candidate], marker_fd: int | None, hot: bool = False, conditions: Mapping[str, str] = {}
    ) -> RaceOperands:
        """Load and pack everything that a race needs, after freeing the memory that checking used.

        hot: one operand set, which stays in the cache as far as it fits. conditions: what Samples state besides the
        race's own conditions. Raises WorkerError when a confirmed candidate cannot be loaded again.
        """
        self._test_cases, self._rows, self._packed, self._flush, self._speed_reference = None, None, {}, None, None
        self._sweep = None
        kernels = {}
        for candidate in candidates:
            kernel, verdict = self._load(candidate)
            if kernel is None:
                raise WorkerError(f"{candidate.id} was confirmed but cannot be loaded again: {verdict.detail}")
            kernels[candidate.id] = kernel
        return RaceOperands(kernels, self.problem, self.timing, self._seed, marker_fd, hot=hot, conditions=conditions)

    def time_sizes(self, request: TimeSizes, marker_fd: int | None) -> SizesTimed:
        """Time candidates at several M, or batches. Kernels and operands stay in memory for the next request with the
        same candidates.

        A candidate that cannot be loaded is among the reply's faults.
        """
        names = [Candidate.from_dict(item.candidate).id for item in request.candidates]
        swept = request.candidates, request.last, request.hot
        if self._sweep is None or self._swept != swept:
            self._test_cases, self._rows, self._packed, self._sweep = None, None, {}, None
            self._swept, self._unloaded = swept, {}
            kernels = {}
            for name, item in zip(names, request.candidates, strict=True):
                kernel, verdict = self._load_sized(item, request.dim)
                if kernel is None:
                    self._unloaded[name] = verdict
                else:
                    kernel.keep_torch_flags()
                    kernels[name] = kernel
            self._sweep = SizeSweep(
                kernels, self.problem, self.timing, self._seed, marker_fd, last=request.last, dim=request.dim,
                hot=request.hot, numbers={name: position + 1 for position, name in enumerate(names)},
            )  # fmt: skip
        wanted = {m: [names[position] for position in positions] for m, positions in request.sizes.items()}
        timed = self._sweep.time(wanted, request.budget_s, request.load_s)
        timed.faults |= self._unloaded
        return timed

    def verify_sizes(self, request: VerifySizes) -> SizesVerified:
        """Verify a candidate at several M, until it fails at one. M that A's layout does not permit are skipped.

        The kernel runs twice at the first M of each group of M, and once at the others (``verify``).
        """
        self._sweep = None  # its operands' memory may be needed
        kernel, verdict = self._load_sized(request.item, request.dim)
        if kernel is None:
            return SizesVerified(verdict)
        if request.dim == "batch":
            return self._verify_batches(kernel, request.sizes)
        self._drop_packed(kernel)
        worst = 0.0
        for sizes in _groups_of_rows(request.sizes):
            verdict, m = self._verify_group(kernel, sizes)
            if not verdict.ok:
                return SizesVerified(msgspec.structs.replace(verdict, detail=f"M = {m}: {verdict.detail}"), m)
            worst = max(worst, verdict.worst)
        return SizesVerified(Verdict("within_bound", worst=worst))

    def name_algorithms(self, request: NameAlgorithms) -> AlgorithmsNamed:
        """Return the names of the algorithms that a library chooses for a candidate at several M."""
        kernel, _ = self._load_sized(request.item, "m")
        return AlgorithmsNamed(["" if kernel is None else kernel.library_algorithm(m) for m in request.sizes])

    def _verify_batches(self, kernel: Kernel, sizes: Sequence[int]) -> SizesVerified:
        """Verify a kernel that takes its weight unpacked at several batches, on test cases of each, until it fails at
        one."""
        self._test_cases, self._rows, self._packed, worst = None, None, {}, 0.0
        for batch in sizes:
            problem = self.problem.with_size("batch", batch)
            cases = make_reference_cases(problem, self._seed, device=self.target.torch_device)[:_BATCH_CASES]
            verdict = self._verify(kernel, cases, 0.0, problem)
            if not verdict.ok:
                detail = f"batch = {batch}: {verdict.detail}"
                return SizesVerified(msgspec.structs.replace(verdict, detail=detail), batch)
            worst = max(worst, verdict.worst)
        return SizesVerified(Verdict("within_bound", worst=worst))

    def _verify_group(self, kernel: Kernel, sizes: Sequence[int]) -> tuple[Verdict, int]:
        """Return the Verdict on a kernel at several M, and the M at which it fails, if at any."""
        cases = [case for m in sizes if (case := case_for_rows(self.problem, self._get_test_cases(), m)) is not None]
        if not cases:
            return Verdict("within_bound"), 0
        verdict = self._verify(kernel, tuple(cases), 0.0)
        if verdict.ok or len(cases) == 1:
            return verdict, cases[0].m
        singly = (self._verify_group(kernel, [case.m]) for case in cases)
        return next((found for found in singly if not found[0].ok), (verdict, cases[0].m))

    def _load_sized(self, item: SizedCandidate, dim: Dim) -> tuple[Kernel | None, Verdict]:
        return self._load(Candidate.from_dict(item.candidate), self.problem.with_size(dim, item.tuned_m))

    def _get_test_cases(self) -> tuple[ReferenceCase, ...]:
        if self._test_cases is None:
            self._test_cases = make_reference_cases(self.problem, self._seed, device=self.target.torch_device)
        return self._test_cases

    def _get_other_rows(self) -> RowCountVerifier:
        if self._rows is None:
            self._rows = RowCountVerifier(self.problem, self._get_test_cases())
        return self._rows

    def _get_flush(self) -> Flush:
        if self._flush is None:
            self._flush = Flush(self.problem, self.target)
        return self._flush

    def _load(self, candidate: Candidate, problem: Problem | None = None) -> tuple[Kernel | None, Verdict]:
        """Return the loaded kernel, or the Verdict on why there is none. problem: None for the open one."""
        problem = problem or self.problem
        artifact = _artifact(problem, candidate, self.target)
        if isinstance(artifact, Verdict):
            return None, artifact
        try:
            return backends.get(candidate.backend).load(artifact, problem), Verdict("exact")
        except BaseException as error:  # SystemExit is the candidate's too; see verdict_of
            return None, verdict_of(error, "loading", "build_failed")

    def _verify(
        self,
        kernel: Kernel,
        test_cases: tuple[ReferenceCase, ...],
        time_limit_s: float = _CONFIRM_REPEAT_S,
        problem: Problem | None = None,
    ) -> Verdict:
        """Return the Verdict on a kernel of its test cases. problem: theirs; None for the open one."""
        problem = problem or self.problem
        return self._guarded_verdict(
            kernel,
            lambda run: verify(run, problem, test_cases, time_limit_s, rounding=allowed_rounding(kernel)),
        )

    def _guarded_verdict(self, kernel: Kernel, check: Callable[[Run], Verdict]) -> Verdict:
        """Return the Verdict of ``check`` on a kernel; an exception that the kernel raises becomes a Verdict, too."""

        def run(inputs: Inputs, out: Tensor) -> None:
            kernel.run(inputs.a, self._weight_for(kernel, inputs), inputs.aux, out)

        try:
            verdict = check(run)
        except BaseException as error:  # SystemExit is the candidate's too; see verdict_of
            verdict = verdict_of(error, "running", "crashed")
        if not verdict.ok:
            self.discard_damaged()
        return verdict

    def discard_damaged(self) -> None:
        """Discard operands that a bad kernel may have overwritten, so that they are prepared anew before the next
        check."""
        self._packed = {}
        cases_modified = self._test_cases is not None and any(case.modified_operand() for case in self._test_cases)
        if cases_modified or (self._rows is not None and self._rows.has_modified_operands()):
            self._test_cases, self._rows = None, None

    def _drop_packed(self, kernel: Kernel) -> None:
        """Free B in other layouts than this kernel's, before it takes memory of its own."""
        self._packed = {key: b for key, b in self._packed.items() if key[0] == kernel.packing}

    def _screening_times(self, kernel: Kernel, cutoff_s: float | None) -> tuple[float, ...]:
        call, weight = self._single_call(kernel)
        flush = (lambda: evict([weight])) if can_evict(self.target) else self._get_flush()
        return self.timing.screening_times(call, flush, cutoff_s, self._speed_reference)

    def _single_call(self, kernel: Kernel) -> tuple[Callable[[], None], Any]:
        """Return a function that calls the kernel once on the first test case, for its screening time, and the weight
        that it reads.

        The output lies between guard bands, since the kernel has not been checked yet.
        """
        inputs = self._get_test_cases()[0].inputs
        problem = self.problem
        _, out = guarded(problem, inputs.a.device, 0)  # ``out`` is a view, which keeps the guards alive
        if packs_each_call(kernel, problem):
            return lambda: kernel.run(inputs.a, kernel.pack(inputs.b), inputs.aux, out), inputs.b
        b = self._weight_for(kernel, inputs)
        return lambda: kernel.run(inputs.a, b, inputs.aux, out), b

    def _weight_for(self, kernel: Kernel, inputs: Inputs) -> Any:
        """Return B in the kernel's layout. A constant B is packed once for consecutive candidates of one layout."""
        if kernel.packing is None:
            return inputs.b
        if packs_each_call(kernel, self.problem):
            return kernel.pack(inputs.b)
        source = inputs.b if inputs.source is None else inputs.source
        key = kernel.packing, id(source)
        if key not in self._packed:
            start = time.perf_counter()
            self._packed[key] = kernel.pack(source)
            self.timing.synchronize()
            self._packing_s.setdefault(kernel.packing, time.perf_counter() - start)
        return self._packed[key]


def _groups_of_rows(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield M in groups of up to ``_GROUP_ROWS`` rows together, or of a single M, in their order."""
    group = list[int]()
    for m in sizes:
        if group and sum(group) + m > _GROUP_ROWS:
            yield group
            group = []
        group.append(m)
    if group:
        yield group


def build(problem: Problem, candidate: Candidate, target: Target) -> Built:
    """Build a candidate for another process to load, and compile what its first call there would."""
    artifact = _artifact(problem, candidate, target)
    if isinstance(artifact, Verdict):
        return Built(artifact)
    backend = backends.get(candidate.backend)
    if backend.compiles_in_calls(problem, candidate, target):
        with contextlib.suppress(Exception):  # the first call meets the error, where others than Triton may serve
            backend.compile_early(problem, candidate, target)
    return Built(None, artifact.digest, None if artifact.path is None else str(artifact.path))


def _artifact(problem: Problem, candidate: Candidate, target: Target) -> Artifact | Verdict:
    try:
        return backends.get(candidate.backend).build(problem, candidate, target)
    except BaseException as error:  # SystemExit is the candidate's too; see verdict_of
        return verdict_of(error, "building", "build_failed")


def _explain_scratch(kernel: Kernel, problem: Problem) -> str:
    needs, allowed = kernel.workspace_bytes >> 20, scratch_allowance(problem) >> 20
    return f"it needs {needs} MB of scratch; tuning this problem allows {allowed} MB, since other candidates need less"


def verdict_of(error: BaseException, activity: str, verdict_kind: Any) -> Verdict:
    """Return the Verdict for an exception that a candidate raised. KeyboardInterrupt is the user's, and is raised
    again."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    text = f"{type(error).__name__} while {activity}: {error}"[:2000]
    if isinstance(error, UnsupportedError):
        return Verdict("unsupported", text)
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
        return Verdict("out_of_memory", text)
    return Verdict(verdict_kind, text)
