"""Every test starts with an empty store of its own and the default policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmtune.core.decision import Verdict
from gemmtune.dispatch import RUNTIME, policy
from gemmtune.store import MemoryStore


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    """The store that the ops of this test see."""
    monkeypatch.setenv("GEMMTUNE_STORE", str(tmp_path / "store.db"))
    store = MemoryStore()
    policy("cached")
    RUNTIME.refresh(store)
    yield store
    policy("cached")
    RUNTIME.refresh(store)


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that nobody tuned count as verified: for tests that count runs, or whose devices are simulated."""
    monkeypatch.setattr(RUNTIME, "verify_hook", lambda *_: Verdict("exact"))
    monkeypatch.setattr(RUNTIME._loader, "_verified", {})
