"""Tests that verification finds each kind of fault that a kernel can have before a decision is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gemmtune import backends
from gemmtune.backends.base import Artifact, Availability, Backend, Kernel
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Verdict
from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem, Quant
from gemmtune.core.target import Target
from gemmtune.dispatch import current_target
from gemmtune.testing import hostile, lapsing
from gemmtune.testing.faults import FAULTS
from gemmtune.testing.lapsing import LAPSES, LapsingKernel
from gemmtune.timing import devices
from gemmtune.timing.race_operands import RaceOperands
from gemmtune.verify.inputs import Inputs
from gemmtune.verify.oracle import reference, to_integer
from gemmtune.verify.recheck import recheck
from gemmtune.verify.reference_cases import case_for_rows
from gemmtune.verify.row_counts import other_row_counts
from gemmtune.verify.verify import make_reference_cases, verify
from gemmtune.workers.job import ProblemSession
from gemmtune.workers.local_worker import LocalWorker

COL = Layout("col")
TARGET = Target("cpu", "small cache", "x86_64", caches=(32 << 10, 1 << 16, 1 << 18), threads=1)


def linear(m: int, n: int, k: int, dtype: str = "float32", epilogue: tuple[Step, ...] = ()) -> Problem:
    return Problem("mm", m, n, k, Operand(dtype), Operand(dtype, COL, constant=True), dtype, epilogue)


def integers(m: int, n: int, k: int, a: str, out: str = "int32", epilogue: tuple[Step, ...] = ()) -> Problem:
    return Problem("int_mm", m, n, k, Operand(a), Operand("int8", COL, constant=True), out, epilogue, acc="int32")


def weight_only(m: int, n: int, k: int, dtype: str, quant: Quant) -> Problem:
    weight = Operand(dtype, COL, constant=True, quant=quant)
    return Problem("mixed_mm", m, n, k, Operand("bfloat16"), weight, "bfloat16")


SCALES = (Step("scale", "row", "float32"), Step("scale", "col", "float32"))
PROBLEMS = [
    linear(16, 96, 64),
    linear(1, 96, 8192),
    linear(16, 96, 64, "bfloat16", (Step("bias", "col", "bfloat16"),)),
    linear(1, 96, 64, "bfloat16"),
    linear(16, 96, 64, "float16"),
    linear(16, 96, 64, "float32", (Step("scale", "tensor", "float32"), Step("add", "full", "float32"))),
    replace(linear(8, 40, 64, "bfloat16"), family="bmm", batch=3, b=Operand("bfloat16")),
    integers(16, 96, 2048, "int8"),
    integers(1, 96, 2048, "uint8"),
    integers(16, 96, 64, "int8", "int8", (*SCALES, Step("bias", "col", "float32"))),
    weight_only(16, 96, 64, "int8", Quant(None, "float32", True)),
    weight_only(1, 96, 128, "int4", Quant(32, "bfloat16", True)),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_with_this_fault_is_rejected(fault: str) -> None:
    tried = 0
    for problem in PROBLEMS:
        if not FAULTS[fault].applies(problem):
            continue
        for seed in (0, 1):
            test_cases, tried = make_reference_cases(problem, seed), tried + 1
            assert not verify(FAULTS[fault].make(problem), problem, test_cases, 0.0).ok, problem.key
    assert tried


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_a_correct_kernel_is_accepted_at_every_number_of_rows(problem: Problem) -> None:
    test_cases = make_reference_cases(problem, 0)
    assert verify(hostile.correct(problem), problem, test_cases, 0.0).ok
    for m in other_row_counts(problem, Candidate.make("any", "kernel", bm=16)):
        test_case = case_for_rows(problem, test_cases, m)
        assert test_case is not None
        assert test_case.m == m
        assert verify(hostile.correct(problem), problem, (test_case,), 0.0).ok, m


def test_a_kernel_that_overwrites_the_expected_results_is_rejected() -> None:
    problem = linear(4, 40, 32)
    test_cases = make_reference_cases(problem, 0)

    def run(inputs: Inputs, out: Tensor) -> None:
        out.zero_()
        for test_case in test_cases:
            test_case.value.zero_()
            test_case.tolerance.fill_(1.0)

    verdict = verify(run, problem, test_cases)
    assert verdict.kind == "wrong"
    assert "far beyond its output" in verdict.detail


def test_the_oracle_rounds_ties_to_even_and_nan_to_zero() -> None:
    """Every step of this arithmetic is exact, so that only the even neighbour is correct."""
    steps = (Step("scale", "col", "float32"),)
    problem = integers(1, 4, 1, "int8", "int8", steps)
    a, b = torch.tensor([[1]], dtype=torch.int8), torch.tensor([[1, 3, -3, 5]], dtype=torch.int8)
    oracle = reference(problem, a, b, (torch.tensor([0.5, 0.5, 0.5, float("nan")]),))
    assert to_integer(oracle.value, "int8").tolist() == [[0, 2, -2, 0]]
    assert (oracle.magnitude[:, :3] == 0).all()


def test_the_bound_is_infinite_if_a_cast_within_the_epilogue_may_overflow() -> None:
    """The largest float16 is 65504: a kernel that rounds at the cast has infinity, a kernel in float32 has a number."""
    steps = (Step("cast", dtype="float16"), Step("scale", "tensor", value=0.001))
    problem = replace(linear(1, 1, 1, "float32"), epilogue=steps)
    oracle = reference(problem, torch.tensor([[300.0]]), torch.tensor([[300.0]]))
    assert oracle.magnitude.isinf().all()
    oracle = reference(problem, torch.tensor([[200.0]]), torch.tensor([[300.0]]))
    assert oracle.magnitude.isfinite().all()


# --- other numbers of rows ---------------------------------------------------------------------------------------


class OneCandidateBackend(Backend):
    """Backend with one candidate, which is wrong for outputs of ``wrong_m`` rows only."""

    name = "one"
    wrong_m = 0

    def available(self, target: Target) -> Availability:
        return Availability(True)

    def candidates(self, problem: Problem, target: Target) -> Any:
        yield Candidate.make(self.name, "product", bm=16)

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        wrong_m = self.wrong_m

        class Product(Kernel):
            candidate = artifact.candidate

            def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
                torch.mm(a, b, out=out)
                if out.shape[0] == wrong_m:
                    out[-1] = 0

        kernel = Product()
        kernel.problem = problem
        return kernel

    def source_digest(self) -> str:
        return "one"


@pytest.mark.parametrize("wrong_m", [1, 2, 15, 17, 33])
def test_a_kernel_that_is_wrong_at_another_number_of_rows_is_not_eligible(
    wrong_m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneCandidateBackend, "wrong_m", wrong_m)
    monkeypatch.setattr(backends, "get", lambda name: OneCandidateBackend())
    monkeypatch.setattr("gemmtune.workers.job._ROWS_PATIENCE_S", 10.0)
    job = ProblemSession(linear(32, 40, 64), devices.of(TARGET), 0)
    candidate = Candidate.make("one", "product", bm=16)
    attempted = job.attempt(candidate).verdict
    assert attempted is not None
    assert attempted.ok
    verdict = job.confirm(candidate).verdict
    assert verdict.kind == "wrong"
    assert f"M = {wrong_m}" in verdict.detail


# --- after the race ----------------------------------------------------------------------------------------------


def faults_after_race(problem: Problem, lapse: str, packed: bool) -> dict[str, Verdict]:
    """Race a correct kernel and one with a lapse, and return the faults that the recheck finds."""
    kernels = [LapsingKernel(problem, "", packed), LapsingKernel(problem, lapse, packed)]
    race_operands = RaceOperands(
        {kernel.candidate.id: kernel for kernel in kernels}, problem, devices.of(TARGET), 0, None
    )
    race_operands.race(0.2, 0, lambda leading: None)
    return recheck(problem, [race_operands.raced_kernel(kernel.candidate.id) for kernel in kernels], 1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("m", [1, 24])
@pytest.mark.parametrize("lapse", LAPSES)
def test_a_kernel_that_becomes_wrong_in_its_race_is_found_by_the_recheck(
    lapse: str, m: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0])  # the time of loading, for a kernel that becomes wrong after a second
    monkeypatch.setattr(lapsing, "now", lambda: next(times, 2.0))
    problem = linear(m, 64, 48)
    faults = faults_after_race(problem, lapse, packed)
    assert list(faults) == [LapsingKernel(problem, lapse, packed).candidate.id]
    (verdict,) = faults.values()
    assert verdict.kind == "wrong"
    assert "right before the race, wrong after it" in verdict.detail


@pytest.mark.parametrize("wrong_m", [1, 2, 17, 31])
def test_a_kernel_that_becomes_wrong_at_another_m_is_found_by_the_recheck(
    wrong_m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemmtune.verify.recheck.ROWS_TIME_LIMIT_S", 10.0)
    problem = linear(24, 64, 48)
    kernel = LapsingKernel(problem)
    race_operands = RaceOperands({kernel.candidate.id: kernel}, problem, devices.of(TARGET), 0, None)
    race_operands.race(0.05, 0, lambda leading: None)
    correct_compute = kernel._compute
    monkeypatch.setattr(
        kernel, "_compute", lambda a, b, out: correct_compute(a, b, out) if out.shape[0] != wrong_m else out.fill_(1e6)
    )
    faults = recheck(problem, [race_operands.raced_kernel(kernel.candidate.id)], 1)
    assert f"M = {wrong_m}" in faults[kernel.candidate.id].detail


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.family != "scaled_mm"], ids=lambda problem: problem.key)
def test_real_kernels_pass_the_recheck(problem: Problem) -> None:
    target = current_target()
    kernels: dict[str, Kernel] = {}
    for name in ("aten", "native"):
        backend = backends.get(name)
        if backend.available(target):
            listed = [item for item in backend.candidates(problem, target) if isinstance(item, Candidate)][:3]
            kernels |= {item.id: backend.load(backend.build(problem, item, target), problem) for item in listed}
    race_operands = RaceOperands(kernels, problem, devices.of(target), 0, None)
    race_operands.race(0.1, 0, lambda leading: None)
    assert recheck(problem, [race_operands.raced_kernel(name) for name in kernels], 1) == {}


class IdleBackend(OneCandidateBackend):
    """Backend whose kernel does nothing if it was called on the same addresses before."""

    name = "idle"

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        kernel = LapsingKernel(problem, "idle at known addresses")
        kernel.candidate = artifact.candidate
        return kernel


def test_the_race_result_of_a_worker_names_the_wrong_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    get_backend = backends.get
    monkeypatch.setattr(backends, "get", lambda name: IdleBackend() if name == "idle" else get_backend(name))
    idle = Candidate.make("idle", "product", bm=16)
    with LocalWorker(current_target()) as worker:
        worker.open(linear(8, 512, 512), 0)  # long enough to lose on a busy machine, too
        result = worker.race([Candidate.make("aten", "mm"), idle], 0.2, 0)
    assert result.leader == idle.id
    assert set(result.faults) == {idle.id}
