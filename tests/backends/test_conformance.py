"""The conformance suite, over every backend there is."""

from __future__ import annotations

import functools

import pytest
import torch

from gemmtune import backends
from gemmtune.backends.base import Backend
from gemmtune.problem import Problem
from gemmtune.testing import toy_compiler
from gemmtune.testing.backend_suite import BackendSuite
from gemmtune.workloads import linear_problem


@functools.cache
def leaks_nan(dtype: torch.dtype) -> bool:
    """Whether torch.mm carries NaN from one row of A into the row before it: oneDNN's bf16 kernels do on CPUs that have
    AVX512 and no bf16 instructions (seen with torch 2.9 to 2.15), where K is no multiple of their vectors."""
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
    """A backend from outside, that builds something."""

    @pytest.fixture
    def backend(self, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Backend:
        monkeypatch.setenv("GEMMTUNE_STORE", str(tmp_path / "store.db"))
        monkeypatch.setattr(toy_compiler, "KINDS", ("good",))
        return toy_compiler.ToyCompiler()

    @pytest.fixture
    def problems(self) -> list[Problem]:
        return [linear_problem(m, 8, 16, dtype) for m in (1, 5) for dtype in ("float32", "bfloat16")]
