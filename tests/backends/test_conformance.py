"""The conformance suite, over every backend there is."""

from __future__ import annotations

import pytest

from gemmtune import backends
from gemmtune.backends.base import Backend
from gemmtune.problem import Problem
from gemmtune.testing import toy_compiler
from gemmtune.testing.backend_suite import BackendSuite
from gemmtune.workloads import linear_problem


class TestAten(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return backends.get("aten")


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
