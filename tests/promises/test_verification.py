"""Nothing wrong is served: each kind of fault that a kernel can have is found before its decision is made."""

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
from gemmtune.workers.worker import LocalWorker

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
def test_a_fault_of_this_kind_is_found(fault: str) -> None:
    tried = 0
    for problem in PROBLEMS:
        if not FAULTS[fault].applies(problem):
            continue
        for seed in (0, 1):
            draws, tried = make_reference_cases(problem, seed), tried + 1
            assert not verify(FAULTS[fault].make(problem), problem, draws, 0.0).ok, problem.key
    assert tried


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_a_right_kernel_is_accepted_at_every_number_of_rows(problem: Problem) -> None:
    draws = make_reference_cases(problem, 0)
    assert verify(hostile.correct(problem), problem, draws, 0.0).ok
    for m in other_row_counts(problem, Candidate.make("any", "kernel", bm=16)):
        draw = case_for_rows(problem, draws, m)
        assert draw is not None
        assert draw.m == m
        assert verify(hostile.correct(problem), problem, (draw,), 0.0).ok, m


def test_a_kernel_that_writes_over_the_expected_results_is_found() -> None:
    problem = linear(4, 40, 32)
    draws = make_reference_cases(problem, 0)

    def run(inputs: Inputs, out: Tensor) -> None:
        out.zero_()
        for draw in draws:
            draw.value.zero_()
            draw.tolerance.fill_(1.0)

    verdict = verify(run, problem, draws)
    assert verdict.kind == "wrong"
    assert "far beyond its output" in verdict.detail


def test_ties_are_rounded_to_even_and_nan_becomes_zero() -> None:
    """Where every step of the arithmetic is exact nothing but the even neighbour is right."""
    steps = (Step("scale", "col", "float32"),)
    problem = integers(1, 4, 1, "int8", "int8", steps)
    a, b = torch.tensor([[1]], dtype=torch.int8), torch.tensor([[1, 3, -3, 5]], dtype=torch.int8)
    oracle = reference(problem, a, b, (torch.tensor([0.5, 0.5, 0.5, float("nan")]),))
    assert to_integer(oracle.value, "int8").tolist() == [[0, 2, -2, 0]]
    assert (oracle.magnitude[:, :3] == 0).all()


def test_rounding_to_a_narrow_type_within_the_epilogue_may_overflow_or_not() -> None:
    """float16 ends at 65504: a kernel that rounds there has infinity, one that keeps its precision has not."""
    steps = (Step("cast", dtype="float16"), Step("scale", "tensor", value=0.001))
    problem = replace(linear(1, 1, 1, "float32"), epilogue=steps)
    oracle = reference(problem, torch.tensor([[300.0]]), torch.tensor([[300.0]]))
    assert oracle.magnitude.isinf().all()
    oracle = reference(problem, torch.tensor([[200.0]]), torch.tensor([[300.0]]))
    assert oracle.magnitude.isfinite().all()


# --- other numbers of rows ---------------------------------------------------------------------------------------


class OneKernel(Backend):
    """A backend with one candidate, which is right but for outputs of ``wrong_m`` rows."""

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
    monkeypatch.setattr(OneKernel, "wrong_m", wrong_m)
    monkeypatch.setattr(backends, "get", lambda name: OneKernel())
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
    """The faults of an honest kernel and one with a lapse, checked after a race of the two."""
    kernels = [LapsingKernel(problem, "", packed), LapsingKernel(problem, lapse, packed)]
    track = RaceOperands({kernel.candidate.id: kernel for kernel in kernels}, problem, devices.of(TARGET), 0, None)
    track.race(0.2, 0, lambda leading: None)
    return recheck(problem, [track.raced_kernel(kernel.candidate.id) for kernel in kernels], 1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("m", [1, 24])
@pytest.mark.parametrize("lapse", LAPSES)
def test_a_kernel_that_was_right_before_its_race_only_is_found_after_it(
    lapse: str, m: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0])  # a kernel that turns wrong after a second: that was when it was loaded
    monkeypatch.setattr(lapsing, "now", lambda: next(times, 2.0))
    problem = linear(m, 64, 48)
    faults = faults_after_race(problem, lapse, packed)
    assert list(faults) == [LapsingKernel(problem, lapse, packed).candidate.id]
    (verdict,) = faults.values()
    assert verdict.kind == "wrong"
    assert "right before the race, wrong after it" in verdict.detail


@pytest.mark.parametrize("wrong_m", [1, 2, 17, 31])
def test_a_kernel_that_became_wrong_at_another_m_is_found_after_its_race(
    wrong_m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemmtune.verify.recheck.ROWS_TIME_LIMIT_S", 10.0)
    problem = linear(24, 64, 48)
    kernel = LapsingKernel(problem)
    track = RaceOperands({kernel.candidate.id: kernel}, problem, devices.of(TARGET), 0, None)
    track.race(0.05, 0, lambda leading: None)
    honest = kernel._compute
    monkeypatch.setattr(
        kernel, "_compute", lambda a, b, out: honest(a, b, out) if out.shape[0] != wrong_m else out.fill_(1e6)
    )
    faults = recheck(problem, [track.raced_kernel(kernel.candidate.id)], 1)
    assert f"M = {wrong_m}" in faults[kernel.candidate.id].detail


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.family != "scaled_mm"], ids=lambda problem: problem.key)
def test_kernels_that_are_right_stay_right_after_their_race(problem: Problem) -> None:
    target = current_target()
    kernels: dict[str, Kernel] = {}
    for name in ("aten", "native"):
        backend = backends.get(name)
        if backend.available(target):
            listed = [item for item in backend.candidates(problem, target) if isinstance(item, Candidate)][:3]
            kernels |= {item.id: backend.load(backend.build(problem, item, target), problem) for item in listed}
    track = RaceOperands(kernels, problem, devices.of(target), 0, None)
    track.race(0.1, 0, lambda leading: None)
    assert recheck(problem, [track.raced_kernel(name) for name in kernels], 1) == {}


class Idle(OneKernel):
    """A backend whose kernel does nothing where it has been called on the same addresses before."""

    name = "idle"

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        kernel = LapsingKernel(problem, "idle at known addresses")
        kernel.candidate = artifact.candidate
        return kernel


def test_a_worker_tells_which_of_the_raced_kernels_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    own = backends.get
    monkeypatch.setattr(backends, "get", lambda name: Idle() if name == "idle" else own(name))
    idle = Candidate.make("idle", "product", bm=16)
    with LocalWorker(current_target()) as worker:
        worker.open(linear(8, 64, 64), 0)
        result = worker.race([Candidate.make("aten", "mm"), idle], 0.2, 0)
    assert result.leader == idle.id
    assert set(result.faults) == {idle.id}
