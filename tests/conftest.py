"""Fixtures for all tests: each test has its own empty store and the default policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmtune.core.decision import Verdict
from gemmtune.dispatch import RUNTIME, policy
from gemmtune.store import MemoryStore


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    """Return the store that the ops of this test read."""
    monkeypatch.setenv("GEMMTUNE_STORE", str(tmp_path / "store.db"))
    store = MemoryStore()
    policy("cached")
    RUNTIME.refresh(store)
    yield store
    policy("cached")
    RUNTIME.refresh(store)


@pytest.fixture
def fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile in the test's own cache directory, and without a graph of an earlier test."""
    import torch._dynamo  # here, since most tests compile nothing

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the verification of untuned kernels, for tests that count runs or simulate devices."""
    monkeypatch.setattr(RUNTIME, "verify_hook", lambda *_: Verdict("exact"))
    monkeypatch.setattr(RUNTIME._loader, "_verified", {})
