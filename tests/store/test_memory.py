"""MemoryStore passes the conformance suite of stores."""

from __future__ import annotations

import pytest

from gemmtune.store import MemoryStore
from gemmtune.testing.store_suite import TARGET, StoreSuite, make_decision, make_plan


class TestMemoryStore(StoreSuite):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()


def test_records_of_exactly_the_given_age_are_not_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    store.put(TARGET, make_decision(created=1000.0))
    store.put_plan(TARGET, make_plan(created=1000.0))
    monkeypatch.setattr("time.time", lambda: 1500.0)
    assert store.prune(older_than_s=500.0) == 0
    assert len(list(store.plans())) == 1
    assert store.prune(older_than_s=499.0) == 1
    assert list(store.plans()) == []
