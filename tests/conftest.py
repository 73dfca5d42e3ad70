"""Every test starts with an empty store of its own and the default policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
