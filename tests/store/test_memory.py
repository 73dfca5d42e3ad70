"""MemoryStore passes the conformance suite of stores."""

from __future__ import annotations

import pytest

from gemmtune.store import MemoryStore
from gemmtune.testing.store_suite import StoreSuite


class TestMemoryStore(StoreSuite):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()
