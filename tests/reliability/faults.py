"""Checks of verification: kernels that are wrong for some operands only, and kernels that become wrong in the race."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem, Quant
from gemmtune.core.target import Target
from gemmtune.testing import lapsing
from gemmtune.testing.faults import FAULTS
from gemmtune.testing.lapsing import LAPSES, LapsingKernel
from gemmtune.timing import devices
from gemmtune.timing.race_operands import RaceOperands
from gemmtune.verify.recheck import recheck
from gemmtune.verify.verify import make_reference_cases, verify

from .checks import Outcome, check

COL = Layout("col")
TRIES = 20
SMALL = Target("cpu", "small cache", "x86_64", caches=(32 << 10, 1 << 16, 1 << 18), threads=1)


def _dense(m: int, n: int, k: int) -> Iterator[Problem]:
    """Yield float problems of several dtypes, layouts and epilogues."""
    for dtype in ("float32", "bfloat16", "float16"):
        plain = Problem("mm", m, n, k, Operand(dtype), Operand(dtype, COL, constant=True), dtype)
        yield from (plain, replace(plain, b=Operand(dtype), a=Operand(dtype, Layout("row", k + 5))))
        yield replace(plain, epilogue=(Step("bias", "col", dtype), Step("relu")))
        yield replace(plain, epilogue=(Step("scale", "row", "float32"), Step("add", "full", dtype)))
        yield replace(plain, epilogue=(Step("scale", "tensor", "float32"), Step("add", "row", "float32")))
        yield Problem("bmm", m, n, k, Operand(dtype), Operand(dtype, COL), dtype, batch=3)


def _quantized(m: int, n: int, k: int) -> Iterator[Problem]:
    """Yield integer, weight-only and fp8 problems."""
    scales = (Step("scale", "col", "float32"), Step("scale", "row", "float32"))
    for a in ("int8", "uint8"):
        exact = Problem("int_mm", m, n, k, Operand(a), Operand("int8", COL, constant=True), "int32", acc="int32")
        yield from (exact, replace(exact, b=Operand("int8", COL)))
        yield replace(exact, out_dtype="int8", epilogue=(*scales, Step("bias", "col", "float32")))
        yield replace(exact, out_dtype="int8", epilogue=scales[:1])
    for dtype, b, quant in (
        ("bfloat16", "int8", Quant()),
        ("float32", "int8", Quant(None, "float32", True)),
        ("bfloat16", "int4", Quant(32, "bfloat16", True)),
        ("float16", "int4", Quant(32, "float16", True)),
    ):
        weight = Operand(b, COL, constant=True, quant=quant)
        yield Problem("mixed_mm", m, n, k, Operand(dtype), weight, dtype)
    e4m3 = Operand("float8_e4m3fn")
    tensors = (Step("scale", "row", "float32"), Step("scale", "col", "float32"), Step("bias", "col", "bfloat16"))
    yield Problem("scaled_mm", m, n, k, e4m3, replace(e4m3, layout=COL), "bfloat16", tensors)


@check(
    "faults that only some operands show (values beyond 1e4, float16 or tf32 operands, sums that saturate, alignment "
    "of every operand, batch strides, NaN and infinities, scales, zero points, ties), each on every problem that it "
    "changes, M = 1 to 33, K = 64 to 8192, 20 seeds each",
    "all rejected",
)
def faults_of_some_operands(full: bool) -> Outcome:
    shapes = [(1, 96, 1024), (16, 96, 64), (33, 77, 130), (2, 160, 2048)] if full else [(16, 96, 64)]
    tried: Counter[str] = Counter()
    passed: list[dict[str, str]] = []
    problems = [p for shape in shapes for make in (_dense, _quantized) for p in make(*shape)]
    if full:  # where the bound is widest
        problems.append(Problem("mm", 4, 64, 8192, Operand("float32"), Operand("float32", COL, True), "float32"))
    for problem in problems:
        for seed in range(TRIES if full else 1):
            test_cases = make_reference_cases(problem, seed)
            for name, fault in FAULTS.items():
                if fault.applies(problem):
                    tried[name] += 1
                    if verify(fault.make(problem), problem, test_cases, 0.0).ok:
                        passed.append({"fault": name, "problem": problem.key, "seed": str(seed)})
    fewest = min(tried.values()) if len(tried) == len(FAULTS) else 0
    return Outcome(
        f"{tried.total() - len(passed)} of {tried.total()} rejected ({len(tried)} kinds, each at least {fewest} times)",
        not passed and (not full or fewest >= TRIES),
        {"tried": dict(tried), "passed": passed[:100]},
    )


def _is_found_by_recheck(lapse: str, problem: Problem, packed: bool, seed: int) -> bool:
    """Return whether the recheck after a race finds exactly the kernel with the lapse, and not the correct kernel."""
    kernels = [LapsingKernel(problem, "", packed), LapsingKernel(problem, lapse, packed)]
    race_operands = RaceOperands(
        {kernel.candidate.id: kernel for kernel in kernels}, problem, devices.of(SMALL), seed, None
    )
    race_operands.race(0.15, seed, lambda leading: None)
    faults = recheck(problem, [race_operands.raced_kernel(kernel.candidate.id) for kernel in kernels], seed)
    return list(faults) == [kernels[1].candidate.id]


@check(
    "kernels that are right until they race (results or weights kept by address, wrong from some call on, every 13th "
    "call, after a second, idle on known operands or outputs), raw and packed weights, M = 1 and 24, 20 seeds each",
    "all found after the race, no honest kernel beside them",
)
def lapses_after_the_race(full: bool) -> Outcome:
    tried: Counter[str] = Counter()
    missed = []
    original_now = lapsing.now
    try:
        for lapse in LAPSES:
            for seed in range(TRIES if full else 1):
                m, packed = (1, 24)[seed % 2], seed % 4 > 1
                problem = Problem("mm", m, 64, 48, Operand("float32"), Operand("float32", COL, True), "float32")
                times = iter([0.0])
                lapsing.now = lambda times=times: next(times, 2.0)  # type: ignore[misc, assignment]
                tried[lapse] += 1
                if not _is_found_by_recheck(lapse, problem, packed, seed):
                    missed.append({"lapse": lapse, "m": m, "packed": packed, "seed": seed})
    finally:
        lapsing.now = original_now
    return Outcome(
        f"{tried.total() - len(missed)} of {tried.total()} found ({len(tried)} kinds)",
        not missed,
        {"tried": dict(tried), "missed": missed},
    )
