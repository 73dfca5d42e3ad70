"""MemoryStore keeps the contract of every store."""

from __future__ import annotations

import pytest

from gemmtune.store import MemoryStore
from gemmtune.testing.store_suite import StoreSuite


class TestMemoryStore(StoreSuite):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()
