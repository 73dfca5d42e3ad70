"""Conformance suite for all backends; GPU backends run the half of it that needs no GPU."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from gemmtune import backends
from gemmtune.backends.base import Backend
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.core.workloads import linear_problem
from gemmtune.testing import toy_compiler
from gemmtune.testing.backend_suite import BackendSuite, CandidateSuite
from gemmtune.testing.problems import random_problem
from helpers.gpus import A100, H200, MI300X, PROBLEM_OF_DTYPE


@functools.cache
def leaks_nan(dtype: torch.dtype) -> bool:
    """Return whether torch.mm writes NaN from one row of A into the row before it.

    oneDNN's bf16 kernels do so on CPUs that have AVX512 and no bf16 instructions (seen with torch 2.9 to 2.15), where K
    is no multiple of their vectors.
    """
    a, b = torch.randn(57, 34).to(dtype), torch.randn(34, 64).to(dtype)
    a[28] = torch.nan
    return torch.mm(a, b).isnan().any(1).nonzero().flatten().tolist() != [28]


class TestAten(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return backends.get("aten")

    def excuse(self, problem: Problem) -> str:
        half = problem.a.dtype in ("bfloat16", "float16") and leaks_nan(getattr(torch, problem.a.dtype))
        return "torch.mm itself carries NaN from row to row on this CPU" if half and problem.k % 32 else ""


class TestNative(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return backends.get("native")


class TestToyCompiler(BackendSuite):
    """Suite for a plug-in backend whose candidates are built."""

    @pytest.fixture
    def backend(self, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Backend:
        monkeypatch.setenv("GEMMTUNE_STORE", str(tmp_path / "store.db"))
        monkeypatch.setattr(toy_compiler, "KINDS", ("good",))
        return toy_compiler.ToyCompiler()

    @pytest.fixture
    def problems(self) -> list[Problem]:
        return [linear_problem(m, 8, 16, dtype) for m in (1, 5) for dtype in ("float32", "bfloat16")]


class GpuCandidates(CandidateSuite):
    """Suite for the backend ``name`` on an H200, with small random problems and problems of models' sizes."""

    __test__ = False
    name: str

    @pytest.fixture
    def backend(self) -> Backend:
        return backends.get(self.name)

    @pytest.fixture
    def target(self) -> Target:
        return H200

    @pytest.fixture
    def problems(self) -> list[Problem]:
        return [*(random_problem(random.Random(i)) for i in range(20)), *PROBLEM_OF_DTYPE.values()]


class TestTriton(GpuCandidates):
    __test__, name = True, "triton"

    @pytest.fixture(params=[H200, A100, MI300X], ids=lambda gpu: gpu.name)
    def target(self, request: pytest.FixtureRequest) -> Target:
        return request.param


class TestCuda(GpuCandidates):
    __test__, name = True, "cuda"


class TestCublasLt(GpuCandidates):
    __test__, name = True, "cublaslt"


class TestAtenOnAGpu(GpuCandidates):
    __test__, name = True, "aten"
