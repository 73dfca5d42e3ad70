"""The policy on-miss tunes what was not tuned, whichever module it is set through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gemmtune
from gemmtune import dispatch


@pytest.mark.parametrize("policy", [gemmtune.policy, dispatch.policy], ids=["gemmtune", "gemmtune.dispatch"])
def test_on_miss_asks_for_tuning(policy: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("gemmtune.tuning.api.tune_missing", lambda problem, device: asked.append(problem.m))
    with policy("on-miss"):
        gemmtune.linear(torch.randn(3, 4), torch.randn(5, 4))
    gemmtune.linear(torch.randn(300, 4), torch.randn(5, 4))
    assert asked == [3]
