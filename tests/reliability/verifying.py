"""Checks of verification: planted faults are rejected on every kind of problem, and correct kernels are accepted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gemmtune import backends
from gemmtune.backends.base import Kernel
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Verdict
from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem, Quant
from gemmtune.core.target import Target, current_cpu
from gemmtune.testing import hostile
from gemmtune.testing.problems import random_problem
from gemmtune.verify.inputs import Inputs
from gemmtune.verify.reference_cases import ReferenceCase
from gemmtune.verify.verify import Run, make_reference_cases, verify

from .checks import Outcome, check

COL = Layout("col")
E4M3 = Operand("float8_e4m3fn")


# --- planted faults ---------------------------------------------------------------------------------------------


def _problems(m: int, n: int, k: int) -> Iterator[Problem]:
    """Yield problems of every family and dtype, without an epilogue and with one whose order matters."""
    for dtype in ("float32", "bfloat16", "float16"):
        steps = (Step("bias", "col", "float32"), Step("scale", "tensor", value=0.5))
        plain = Problem("mm", m, n, k, Operand(dtype), Operand(dtype, COL, constant=True), dtype)
        yield plain
        yield replace(plain, epilogue=steps)
        yield replace(plain, b=Operand(dtype), a=Operand(dtype, Layout("row", k + 5)))
        yield Problem("bmm", m, n, k, Operand(dtype), Operand(dtype), dtype, batch=2)
    exact = Problem("int_mm", m, n, k, Operand("int8"), Operand("int8", COL, constant=True), "int32", acc="int32")
    scales = (Step("scale", "col", "float32"), Step("scale", "row", "float32"))
    yield from (exact, replace(exact, out_dtype="int8", epilogue=(*scales, Step("bias", "col", "float32"))))
    yield replace(exact, out_dtype="float32", epilogue=(*scales, Step("bias", "col", "float32")))
    for dtype, quant in (("int8", Quant()), ("int4", Quant(32, "bfloat16", True))):
        b = Operand(dtype, COL, constant=True, quant=quant)
        yield Problem("mixed_mm", m, n, k, Operand("bfloat16"), b, "bfloat16")
    tensors = (Step("scale", "row", "float32"), Step("scale", "col", "float32"), Step("bias", "col", "bfloat16"))
    yield Problem("scaled_mm", m, n, k, E4M3, replace(E4M3, layout=COL), "bfloat16", tensors)


def _changes_results(fault: str, problem: Problem, test_cases: tuple[ReferenceCase, ...]) -> bool:
    """Return whether a fault changes the results of a problem, so that it must be rejected. An epilogue of one step has
    no other order, and integers have no NaN."""
    if fault in ("reversed epilogue", "NaN swallowed"):
        runs = hostile.FAULTY_KERNELS[fault](problem), hostile.correct(problem)
        return any(not _equal(*(_output_of(run, problem, test_case) for run in runs)) for test_case in test_cases)
    # In int8 outputs, 0.2% is within half a step for all but a few elements, which it changes by one: only the mean of
    # many elements distinguishes it from rounding.
    return not (fault == "x1.002" and problem.out_dtype == "int8")


def _output_of(run: Run, problem: Problem, test_case: ReferenceCase) -> Tensor:
    """Return the output of a kernel for one test case."""
    shape = (problem.batch, problem.m, problem.n) if problem.family == "bmm" else (problem.m, problem.n)
    out = torch.zeros(shape, dtype=getattr(torch, problem.out_dtype))
    run(test_case.inputs, out)
    return out


def _equal(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are equal; NaN equals NaN."""
    return torch.equal(x.double().nan_to_num(1e300), y.double().nan_to_num(1e300))


@check(
    "planted wrong kernels (dropped K tail, one element, one 8x8 block 10% off, x1.002, swapped stride, no write, "
    "partial write, write past the end, race, stale buffer, wrong epilogue order, NaN swallowed; and four more), "
    "every family and dtype, K from 64 to 16384",
    "all rejected",
)
def planted_faults(full: bool) -> Outcome:
    shapes = [(16, 96, k) for k in ((64, 1024, 16384) if full else (64,))]
    shapes += [(64, 256, 4096), (33, 77, 129)] if full else []
    planted: Counter[str] = Counter()
    passed = []
    for seed, (m, n, k) in enumerate(shapes):
        for problem in _problems(m, n, k):
            for repeat in range(3 if full else 1):
                _verify_faults(problem, 10 * seed + repeat, planted, passed)
    total = planted.total()
    return Outcome(
        f"{total - len(passed)} of {total} rejected ({len(planted)} faults)",
        not passed and len(planted) == len(hostile.FAULTY_KERNELS),
        {"planted": dict(planted), "passed": passed},
    )


def _verify_faults(problem: Problem, seed: int, planted: Counter[str], passed: list[dict[str, Any]]) -> None:
    """Verify a kernel of each fault on one problem, count it, and record those that are accepted."""
    test_cases = make_reference_cases(problem, seed)
    for fault, make in hostile.FAULTY_KERNELS.items():
        if not _changes_results(fault, problem, test_cases):
            continue
        planted[fault] += 1
        verdict = verify(make(problem), problem, test_cases)
        if verdict.ok:
            passed.append({"fault": fault, "problem": problem.key, "seed": seed, "worst": verdict.worst})
        if any(test_case.modified_operand() for test_case in test_cases):
            test_cases = make_reference_cases(problem, seed)


# --- correct kernels --------------------------------------------------------------------------------------------


def _correct_kernels(problem: Problem, target: Target, rng: random.Random) -> Iterator[tuple[str, Run]]:
    """Yield the rounded oracle, and one kernel of each backend that supports the problem."""
    yield "the oracle, rounded", hostile.correct(problem)
    for name in ("aten", "native"):
        backend = backends.get(name)
        if not backend.available(target) or (name == "aten" and _aten_propagates_nan_to_another_row(problem, target)):
            continue
        legal = [item for item in backend.candidates(problem, target) if isinstance(item, Candidate)]
        if legal:
            candidate = rng.choice(legal)
            yield candidate.id, _run_of(backend.load(backend.build(problem, candidate, target), problem))


def _aten_propagates_nan_to_another_row(problem: Problem, target: Target) -> bool:
    """Return whether ATen's product is wrong for NaN, so that verification rejects it correctly.

    On CPUs with AMX, a NaN in a row of A also appears in the previous row of torch 2.13's bf16 product, unless K is a
    multiple of 32.
    """
    return "amx_bf16" in target.isa and problem.a.dtype == problem.b.dtype == "bfloat16" and problem.k % 32 > 0


def _run_of(kernel: Kernel) -> Run:
    """Return a function that runs a loaded kernel, for which ``b`` is packed if the kernel needs that."""

    def run(inputs: Inputs, out: Tensor) -> None:
        b = kernel.pack(inputs.b) if kernel.packing is not None else inputs.b
        kernel.run(inputs.a, b, inputs.aux, out)

    return run


@check(
    "10,000 correct random problems (all families, dtypes, layouts, epilogues; M, N, K from 1 to 200), each with the "
    "oracle rounded to the output's dtype, an ATen kernel and a native one",
    "none rejected",
)
def correct_kernels(full: bool) -> Outcome:
    count = 10_000 if full else 60
    target = replace(current_cpu(), threads=torch.get_num_threads())
    checked: Counter[str] = Counter()
    rejected: list[dict[str, str]] = []
    for seed in range(count):
        rng = random.Random(seed)
        problem = random_problem(rng)
        test_cases = make_reference_cases(problem, seed)
        for name, run in _correct_kernels(problem, target, rng):
            checked[name.partition("/")[0]] += 1
            verdict = _verdict(run, problem, test_cases)
            if not verdict.ok:
                rejected.append({"kernel": name, "problem": problem.key, "seed": str(seed), "verdict": str(verdict)})
    counts = ", ".join(f"{number} {name}" for name, number in checked.items())
    return Outcome(
        f"{len(rejected)} rejected of {checked.total()} ({counts}) on {count} problems",
        not rejected,
        {"checked": dict(checked), "rejected": rejected[:100]},
    )


def _verdict(run: Run, problem: Problem, test_cases: tuple[ReferenceCase, ...]) -> Verdict:
    """Return the verdict on a kernel; an exception counts as a crash."""
    try:
        return verify(run, problem, test_cases)
    except Exception as error:  # a kernel that raises for a legal problem is as faulty as a wrong one
        return Verdict("crashed", f"{type(error).__name__}: {error}")
