"""``verify``: runs a kernel several times on test cases, into poisoned outputs between guard bytes, and checks it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backends.base import Kernel, Rounding
from ..core.decision import Verdict
from ..core.problem import Problem, bits
from .compare import compare
from .inputs import GUARD, Inputs
from .oracle import INTEGERS
from .reference_cases import ReferenceCase, make_reference_cases

__all__ = ["ReferenceCase", "Run", "make_reference_cases", "verify"]

Run = Callable[[Inputs, Tensor], None]

GUARD_BYTE = 0xA5
INT_POISONS = (0x5B, 0xC4)  # two poison bytes: a correct element cannot equal both of them
_REPEATED_BYTES = 64 << 20  # of outputs that are compared in one operation
_MAX_RUNS = 10  # data races that show in one run of three are missed once in 40 times

RUNS_DIFFER = "repeated runs differ within the bound"


def allowed_rounding(kernel: Kernel) -> Rounding | None:
    """Return the rounding before the last one for which verification allows: that of ATen's kernels that declare it."""
    return kernel.rounding if kernel.candidate.backend == "aten" else None


def verify(
    run: Run,
    problem: Problem,
    cases: Sequence[ReferenceCase],
    time_limit_s: float = 0.1,
    *,
    rounding: Rounding | None = None,
) -> Verdict:
    """Run a kernel on every test case and return the Verdict: exact, within_bound, wrong or unstable.

    run: ``run(inputs, out)`` executes the kernel; exceptions that it raises are propagated. cases: the test cases,
    whose M may differ from the Problem's. time_limit_s: seconds for repeated runs on the first test case.
    rounding: as ``allowed_rounding`` returns it for the kernel.

    The kernel runs at least twice on the first test case, and up to ten times within ``time_limit_s``; on each other
    test case it runs once, or twice when the output dtype is an integer type. The Verdict's ``detail`` says where the
    output is wrong and by how much, or that repeated runs differ within the bound. It is empty when all repeated runs
    gave equal bits."""
    if not cases:
        raise ValueError("verify needs at least one case; make them with make_reference_cases(problem, seed)")
    if rounding is not None:
        cases = [case.with_rounding(problem, rounding) for case in cases]
    worst, repeated = 0.0, ""
    for index, case in enumerate(cases):
        min_runs = 2 if index == 0 or problem.out_dtype in INTEGERS else 1
        findings = _run_and_compare(run, problem.with_m(case.m), case, min_runs, time_limit_s if index == 0 else 0.0)
        worst = max(worst, findings.worst)
        next_case = cases[index + 1] if index + 1 < len(cases) else None
        # The weight is the largest operand: its checksums are compared only after the last test case that uses it.
        check_weight = bool(findings.finding) or next_case is None or next_case.inputs.b is not case.inputs.b
        fault = findings.fault or _modified_operands(case, check_weight)
        description = _describe_case(problem, case)
        if findings.differs and findings.finding and not fault:
            text = f"two runs on the same operands differ, and {findings.finding} ({description})"
            return Verdict("unstable", text, _finite(findings.worst))
        if fault or findings.finding:
            return Verdict("wrong", f"{fault or findings.finding} ({description})", _finite(worst))
        repeated = RUNS_DIFFER if findings.differs else repeated
    if worst == 0.0 and problem.out_dtype in INTEGERS:
        return Verdict("exact", repeated, 0.0)
    return Verdict("within_bound", repeated, worst)


def _describe_case(problem: Problem, case: ReferenceCase) -> str:
    """Return the description of a test case for messages."""
    return f"{case.kind} draw" if case.m == problem.m else f"{case.kind} draw of M = {case.m}"


@dataclass(slots=True)
class _Findings:
    """The results of a kernel's runs on one test case.

    worst: largest error over tolerance. fault: writes outside of the output; empty for none. finding: what is wrong
    with the output; empty for nothing. differs: whether two runs gave different bits.
    """

    worst: float = 0.0
    fault: str = ""
    finding: str = ""
    differs: bool = False


def _run_and_compare(run: Run, problem: Problem, case: ReferenceCase, min_runs: int, time_limit_s: float) -> _Findings:
    """Run a kernel at least ``min_runs`` times on a test case, and more within ``time_limit_s`` while nothing is wrong.

    The duration of the first run, which may include initialization, does not count. Outputs of later runs are compared
    in batches.
    """
    frame, first = _run_guarded(run, problem, case, 0)
    findings = _Findings(fault=_overwritten_guards(problem, frame, case.offset))
    findings.worst, findings.finding = compare(problem, case, first)
    run_count, start = 1, time.perf_counter()
    while run_count < min_runs or (run_count < _MAX_RUNS and not (findings.fault or findings.finding)):
        elapsed_s = time.perf_counter() - start
        per_run_s = elapsed_s / max(run_count - 1, 1)
        count = (
            1 if run_count == 1 else min(int((time_limit_s - elapsed_s) / max(per_run_s, 1e-9)), _MAX_RUNS - run_count)
        )
        if run_count >= min_runs and (elapsed_s >= time_limit_s or count < 1):
            break
        count = max(1, min(count, _REPEATED_BYTES // frame.numel()))
        outputs = [_run_guarded(run, problem, case, number % 2) for number in range(run_count, run_count + count)]
        _compare_repeated(problem, case, (frame, first), outputs, findings, run_count)
        run_count += count
    return findings


def _compare_repeated(
    problem: Problem,
    case: ReferenceCase,
    first: tuple[Tensor, Tensor],
    outputs: Sequence[tuple[Tensor, Tensor]],
    findings: _Findings,
    run_count: int,
) -> None:
    """Compare the outputs of repeated runs with the first one and update ``findings``.

    first, outputs: (frame, output) of runs. run_count: number of runs before those of ``outputs``.
    """
    frames = torch.stack([frame for frame, _ in outputs])
    if torch.equal(frames, first[0].expand_as(frames)):  # including the guards, which are intact in the first
        return
    for number, (frame, out) in enumerate(outputs, run_count):
        findings.fault = findings.fault or _overwritten_guards(problem, frame, case.offset)
        if same_bits(first[1], out):
            continue
        gap, finding = compare(problem, case, out)
        findings.worst, findings.finding, findings.differs = max(findings.worst, gap), findings.finding or finding, True
        findings.fault = findings.fault or (unwritten(problem, first[1], out) if number == 1 else "")


def _modified_operands(case: ReferenceCase, weight: bool) -> str:
    """Return which operands or oracle results the kernel modified, in words; empty for none.

    weight: whether B is checked, too.
    """
    modified = case.modified_operand(weight)
    if "the oracle's" in modified:
        return f"it wrote far beyond its output, where verification keeps what it compares with: {modified}"
    return f"it wrote into its inputs, or just beside them: {modified}" if modified else ""


# --- running into guarded memory --------------------------------------------------------------------------------


def _run_guarded(run: Run, problem: Problem, case: ReferenceCase, poison: int) -> tuple[Tensor, Tensor]:
    """Run a kernel once. Returns (frame, output) of ``guarded``."""
    frame, out = guarded(problem, case.inputs.a.device, poison, case.offset)
    run(case.inputs, out)
    return frame, out


def guarded(problem: Problem, device: torch.device, poison: int, offset: int = 0) -> tuple[Tensor, Tensor]:
    """Allocate a poisoned output between guards. Returns (frame, out): the bytes of both, and the output in them.

    poison: 0 for NaN (integers: a byte), 1 for the largest number (integers: another byte). No element is correct with
    both. offset: distance in elements of the output's start from an aligned address.
    """
    size = bits(problem.out_dtype) // 8
    batch = problem.batch if problem.is_batched else 1
    slow, fast = (problem.columns, problem.m) if problem.out.order == "col" else (problem.m, problem.columns)
    lead = problem.out.ld or max(fast, 1)
    length = 2 * GUARD + (batch * slow * lead + offset) * size
    frame = torch.full((length,), GUARD_BYTE, dtype=torch.uint8, device=device)
    body = _body(frame, offset * size).view(getattr(torch, problem.out_dtype))
    strides = (1, lead) if problem.out.order == "col" else (lead, 1)
    shape = (batch, problem.m, problem.columns)
    out = body.as_strided(shape, (slow * lead, *strides), body.storage_offset())
    if problem.out_dtype in INTEGERS:
        body.view(torch.uint8).fill_(INT_POISONS[poison])
    else:
        out.fill_(poison_value(out, poison))
    if fast < lead:
        _gaps(problem, frame, offset).fill_(GUARD_BYTE)
    return frame, out if problem.is_batched else out[0]


def _body(frame: Tensor, skipped: int) -> Tensor:
    """Return the bytes between the guards without the first ``skipped``."""
    return frame[GUARD + skipped : frame.numel() - GUARD]


def _gaps(problem: Problem, frame: Tensor, offset: int) -> Tensor:
    """Return the bytes between the rows (or columns) of the output: [rows, gap]."""
    size = bits(problem.out_dtype) // 8
    fast = problem.m if problem.out.order == "col" else problem.columns
    lead = problem.out.ld or max(fast, 1)
    return _body(frame, offset * size).view(-1, lead * size)[:, fast * size :]


def _overwritten_guards(problem: Problem, frame: Tensor, offset: int) -> str:
    start = GUARD + offset * bits(problem.out_dtype) // 8
    regions = {"before": frame[:start], "after": frame[frame.numel() - GUARD :]}
    if frame.numel() > start + GUARD:
        regions["between the rows of"] = _gaps(problem, frame, offset)
    if bool((torch.cat([memory.reshape(-1) for memory in regions.values()]) == GUARD_BYTE).all()):
        return ""  # the usual case: one device synchronization instead of three
    for name, memory in regions.items():
        changed = int((memory != GUARD_BYTE).sum())
        if changed:
            return f"{changed} bytes {name} the output were overwritten"
    return ""


def poison_value(out: Tensor, which: int) -> float:
    """Return the poison of a floating-point output: NaN for 0, the dtype's largest number for 1."""
    return math.nan if which == 0 else float(torch.finfo(out.dtype).max)


def unwritten(problem: Problem, first: Tensor, second: Tensor) -> str:
    """Return how many elements still contain the poison of both runs, in words; empty for none.

    first, second: outputs of two runs with the poisons 0 and 1.
    """
    if problem.out_dtype not in INTEGERS:
        poisoned = first.isnan() & (second == poison_value(second, 1))
    else:
        poisoned = torch.ones_like(first, dtype=torch.bool)
        for out, byte in zip((first, second), INT_POISONS, strict=True):
            poisoned &= out == torch.full((out.element_size(),), byte, dtype=torch.uint8, device=out.device).view(
                out.dtype
            )
    count = int(poisoned.sum())
    return f"{count} elements of the output were never written" if count else ""


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, apart from NaN payloads."""
    return torch.equal(x, y) or torch.equal(torch.nan_to_num(x.double()), torch.nan_to_num(y.double()))


def _finite(x: float) -> float:
    return x if math.isfinite(x) else 1e30
