"""A packed weight that nobody tuned is served by a kernel that was verified first, in the process that it serves."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import gemmtune
from gemmtune.backends.native.kernel import PackedKernel
from gemmtune.core.decision import Verdict
from gemmtune.dispatch import RUNTIME, current_target
from gemmtune.store import MemoryStore

WEIGHT = torch.randn(48, 96)
X = torch.randn(3, 96)


@pytest.fixture(autouse=True)
def nothing_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RUNTIME._loader, "_verified", {})
    monkeypatch.setattr(RUNTIME, "_warned", set())


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every packed native kernel doubles one element of its output."""
    right = PackedKernel.run

    def run(self: PackedKernel, a: Any, b: Any, aux: Any, out: torch.Tensor) -> None:
        right(self, a, b, aux, out)
        out[-1, -1] *= 2

    monkeypatch.setattr(PackedKernel, "run", run)


@pytest.mark.usefixtures("wrong")
def test_a_wrong_default_kernel_is_not_served(caplog: pytest.LogCaptureFixture) -> None:
    packed = gemmtune.pack(WEIGHT)
    for _ in range(2):
        torch.testing.assert_close(gemmtune.linear(X, packed), X @ WEIGHT.t())
    assert "failed verification" in caplog.text
    assert "wrong" in caplog.text


def test_a_right_default_kernel_is_verified_once_and_served(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    verify = RUNTIME.verify_hook
    assert verify is not None

    def counted(*args: Any) -> Verdict:
        asked.append(args[0].candidate.id)
        return verify(*args)

    monkeypatch.setattr(RUNTIME, "verify_hook", counted)
    packed = gemmtune.pack(WEIGHT)
    for _ in range(2):
        torch.testing.assert_close(gemmtune.linear(X, packed), X @ WEIGHT.t())
        RUNTIME.refresh()
    assert len(asked) == 1
    assert RUNTIME.kernel_for(gemmtune.ops.packing.problem_of(WEIGHT.t(), 3), packed) is not None


@pytest.mark.usefixtures("wrong")
def test_a_kernel_remembered_as_wrong_is_not_even_tried(
    own_store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    packed, problem = gemmtune.pack(WEIGHT), gemmtune.ops.packing.problem_of(WEIGHT.t(), 3)
    for candidate in gemmtune.backends.get("native").candidates(problem.with_m(4), current_target()):
        if hasattr(candidate, "id"):
            own_store.remember_failure(current_target(), problem.plan_key, candidate.id, Verdict("wrong"))
    RUNTIME.refresh()
    with caplog.at_level(logging.WARNING, "gemmtune"):
        torch.testing.assert_close(gemmtune.linear(X, packed), X @ WEIGHT.t())
    assert "failed verification" not in caplog.text


def test_integer_and_weight_only_layouts_are_verified_too(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randint(-128, 128, (48, 96), dtype=torch.int8)
    scale = torch.rand(48) + 0.5
    ints = gemmtune.pack(whole)
    weights = gemmtune.pack(whole, scale=scale)
    a = torch.randint(-128, 128, (3, 96), dtype=torch.int8)
    assert torch.equal(gemmtune.int_mm(a, ints), (a.double() @ whole.t().double()).int())
    torch.testing.assert_close(
        gemmtune.mixed_mm(X, weights), X @ (whole * scale.unsqueeze(1)).t(), rtol=1e-4, atol=1e-3
    )
    assert list(RUNTIME._loader._verified.values()) == [True, True]
