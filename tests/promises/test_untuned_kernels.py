"""Tests that an untuned packed weight is served only by a kernel that was verified in the serving process."""

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
def no_verified_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RUNTIME._loader, "_verified", {})
    monkeypatch.setattr(RUNTIME, "_warned", set())


@pytest.fixture
def wrong_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every packed native kernel double one element of its output."""
    correct_run = PackedKernel.run

    def run(self: PackedKernel, a: Any, b: Any, aux: Any, out: torch.Tensor) -> None:
        correct_run(self, a, b, aux, out)
        out[-1, -1] *= 2

    monkeypatch.setattr(PackedKernel, "run", run)


@pytest.mark.usefixtures("wrong_kernels")
def test_a_wrong_default_kernel_is_not_served(caplog: pytest.LogCaptureFixture) -> None:
    packed = gemmtune.pack(WEIGHT)
    for _ in range(2):
        torch.testing.assert_close(gemmtune.linear(X, packed), X @ WEIGHT.t())
    assert "failed verification" in caplog.text
    assert "wrong" in caplog.text


def test_a_correct_default_kernel_is_verified_once_and_served(monkeypatch: pytest.MonkeyPatch) -> None:
    verified_ids: list[str] = []
    verify = RUNTIME.verify_hook
    assert verify is not None

    def counting_verify(*args: Any) -> Verdict:
        verified_ids.append(args[0].candidate.id)
        return verify(*args)

    monkeypatch.setattr(RUNTIME, "verify_hook", counting_verify)
    packed = gemmtune.pack(WEIGHT)
    for _ in range(2):
        torch.testing.assert_close(gemmtune.linear(X, packed), X @ WEIGHT.t())
        RUNTIME.refresh()
    assert len(verified_ids) == 1
    assert RUNTIME.kernel_for(gemmtune.ops.packing.problem_of(WEIGHT.t(), 3), packed) is not None


@pytest.mark.usefixtures("wrong_kernels")
def test_a_kernel_with_a_recorded_wrong_verdict_is_not_verified_again(
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


def test_integer_and_weight_only_kernels_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randint(-128, 128, (48, 96), dtype=torch.int8)
    scale = torch.rand(48) + 0.5
    packed_ints = gemmtune.pack(weight)
    packed_weight_only = gemmtune.pack(weight, scale=scale)
    a = torch.randint(-128, 128, (3, 96), dtype=torch.int8)
    assert torch.equal(gemmtune.int_mm(a, packed_ints), (a.double() @ weight.t().double()).int())
    torch.testing.assert_close(
        gemmtune.mixed_mm(X, packed_weight_only), X @ (weight * scale.unsqueeze(1)).t(), rtol=1e-4, atol=1e-3
    )
    assert list(RUNTIME._loader._verified.values()) == [True, True]
