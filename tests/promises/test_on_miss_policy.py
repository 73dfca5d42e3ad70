"""Tests that the policy on-miss tunes a missing problem, through both modules that export ``policy``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gemmtune
from gemmtune import dispatch


@pytest.mark.parametrize("policy", [gemmtune.policy, dispatch.policy], ids=["gemmtune", "gemmtune.dispatch"])
def test_a_miss_under_the_policy_on_miss_starts_tuning(
    policy: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned_m: list[int] = []
    monkeypatch.setattr("gemmtune.tuning.api.tune_missing", lambda problem, device: tuned_m.append(problem.m))
    with policy("on-miss"):
        gemmtune.linear(torch.randn(3, 4), torch.randn(5, 4))
    gemmtune.linear(torch.randn(300, 4), torch.randn(5, 4))
    assert tuned_m == [3]
