"""Fixtures of the sessions that make plans."""

from __future__ import annotations

import pytest

from gemmtune.store import MemoryStore
from gemmtune.tuning import weight_session
from helpers.plans import FakeTime, use_fake_time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """Replace the time by a clock that only simulated kernels advance, and let calls of kernels cost the host
    nothing."""
    monkeypatch.setattr(weight_session, "SERVING_S", 0.0)
    return use_fake_time(monkeypatch)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()
