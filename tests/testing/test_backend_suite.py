"""Conformance suite of backends: each flawed backend fails the test for its flaw."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gemmtune.backends.base import Artifact, Availability, Backend, Kernel
from gemmtune.core.candidate import Candidate, Illegal
from gemmtune.core.errors import KernelError
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target, current_cpu
from gemmtune.core.weights import PackedWeight
from gemmtune.core.workloads import linear_problem
from gemmtune.testing.backend_suite import BackendSuite

PROBLEMS = (linear_problem(5, 24, 16, "float32"), linear_problem(2, 8, 8, "float32", bias=True))


class CorrectKernel(Kernel):
    """Kernel of the backend without a flaw; the template ``packed`` packs the weight row by row."""

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        self.problem, self.candidate = problem, candidate
        self.packing = "plain:rows" if candidate.template == "packed" else None

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        torch.mm(a, b.data[0] if isinstance(b, PackedWeight) else b, out=out)

    def pack(self, b: Any) -> PackedWeight:
        return PackedWeight("plain:rows", (b.contiguous(),), self.problem.n, self.problem.k, self.problem.b.dtype)


class CorrectBackend(Backend):
    """Backend without a flaw, for float32 products without an epilogue."""

    name = "plain"
    kernel: type[CorrectKernel] = CorrectKernel

    def available(self, target: Target) -> Availability:
        return Availability(target.device == "cpu", "" if target.device == "cpu" else "there are no kernels for GPUs")

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        for template in ("plain", "packed"):
            candidate = Candidate.make(self.name, template)
            yield candidate if _takes(problem) else Illegal(candidate, "plain float32 products only")

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        if artifact.candidate.template not in ("plain", "packed") or problem.a.dtype != "float32":
            raise KernelError(f"there is no {artifact.candidate.id}")
        return self.kernel(problem, artifact.candidate)

    def source_digest(self) -> str:
        return "1"

    def default_packing(self, problem: Problem, target: Target) -> Candidate | None:
        return Candidate.make(self.name, "packed") if _takes(problem) else None

    def unpack(self, packed: PackedWeight) -> Any:
        return packed.data[0].t().contiguous().t()


def _takes(problem: Problem) -> bool:
    return problem.a.dtype == problem.b.dtype == "float32" and not problem.epilogue


class Suite(BackendSuite):
    __test__ = False


def run(name: str, backend: Backend) -> None:
    """Run one test of the suite with its fixtures."""
    fixtures = {"backend": backend, "target": replace(current_cpu(), threads=1), "problems": PROBLEMS}
    test = getattr(Suite(), name)
    test(**{parameter: fixtures[parameter] for parameter in inspect.signature(test).parameters})


TESTS = sorted(name for name in dir(BackendSuite) if name.startswith("test_"))


class WithoutReason(CorrectBackend):
    def available(self, target: Target) -> Availability:
        return Availability(target.device == "cpu")


class WithoutDigest(CorrectBackend):
    def source_digest(self) -> str:
        return ""


class ListOfCandidates(CorrectBackend):
    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        return list(super().candidates(problem, target))  # type: ignore[return-value]


class AllIllegal(CorrectBackend):
    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        yield Illegal(Candidate.make(self.name, "plain"), "not today")


class RepeatedCandidates(CorrectBackend):
    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        yield from super().candidates(problem, target)
        yield from super().candidates(problem, target)


class BlankReasons(CorrectBackend):
    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        for item in super().candidates(problem, target):
            yield item._replace(reason=" ") if isinstance(item, Illegal) else item


class AllLegal(CorrectBackend):
    def why_illegal(self, problem: Problem, candidate: Candidate, target: Target) -> str:
        return ""


class ChangingArtifact(CorrectBackend):
    built = 0

    def build(self, problem: Problem, candidate: Candidate, target: Target) -> Artifact:
        self.built += 1
        return Artifact(candidate, str(self.built))


class OtherCandidate(CorrectBackend):
    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        return super().load(artifact._replace(candidate=Candidate.make(self.name, "plain")), problem)


class LoadsAnything(CorrectBackend):
    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        return self.kernel(problem, artifact.candidate)


class IndexErrorOnLoad(CorrectBackend):
    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        if problem.epilogue:
            raise IndexError("list index out of range")
        return super().load(artifact, problem)


class WrongKernel(CorrectKernel):
    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        super().run(a, b, aux, out)
        out[-1, -1] += 1


class FixedRowsKernel(CorrectKernel):
    """Kernel that is correct only for the number of rows that it was loaded for."""

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        super().run(a, b, aux, out)
        out[self.problem.m :] = 0


class UndeclaredWorkspaceKernel(CorrectKernel):
    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        super().run(a, b, aux, out)
        torch.zeros(1 << 22)  # 16 MB of undeclared workspace


def backend_with_kernel(kernel: type[CorrectKernel]) -> Backend:
    return type(f"With{kernel.__name__}", (CorrectBackend,), {"kernel": kernel})()


class InexactUnpack(CorrectBackend):
    def unpack(self, packed: PackedWeight) -> Any:
        return packed.data[0] * 1.0001


class DefaultWithoutPacking(CorrectBackend):
    def default_packing(self, problem: Problem, target: Target) -> Candidate | None:
        return Candidate.make(self.name, "plain") if _takes(problem) else None


FLAWED_BACKENDS = {
    "test_it_is_available_or_says_why_not": WithoutReason(),
    "test_the_backend_has_a_name_and_a_digest_that_stay": WithoutDigest(),
    "test_candidates_come_one_by_one": ListOfCandidates(),
    "test_it_solves_something": AllIllegal(),
    "test_candidates_are_data_with_stable_ids_of_their_own": RepeatedCandidates(),
    "test_what_is_illegal_has_a_reason": BlankReasons(),
    "test_what_is_listed_is_legal_and_nothing_else": AllLegal(),
    "test_building_is_pure": ChangingArtifact(),
    "test_kernels_say_what_they_are": OtherCandidate(),
    "test_what_it_cannot_load_is_refused_by_name": LoadsAnything(),
    "test_what_it_called_illegal_loads_or_is_refused": IndexErrorOnLoad(),
    "test_legal_candidates_are_right": backend_with_kernel(WrongKernel),
    "test_a_kernel_serves_any_number_of_rows": backend_with_kernel(FixedRowsKernel),
    "test_packing_is_undone_bit_for_bit": InexactUnpack(),
    "test_scratch_is_not_more_than_declared": backend_with_kernel(UndeclaredWorkspaceKernel),
    "test_the_default_packing_packs": DefaultWithoutPacking(),
}


def test_each_test_of_the_suite_has_a_flawed_backend() -> None:
    assert sorted(FLAWED_BACKENDS) == TESTS


@pytest.mark.parametrize("name", TESTS)
def test_correct_backend_passes(name: str) -> None:
    run(name, CorrectBackend())


@pytest.mark.parametrize("name", TESTS)
def test_flawed_backend_fails(name: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception, IndexError, NotImplementedError)):
        run(name, FLAWED_BACKENDS[name])
