"""MemoryStore passes the conformance suite of stores."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmtune.core.decision import Verdict
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


def test_lost_lease_is_neither_renewed_nor_released_for_its_next_owner() -> None:
    store = MemoryStore()
    lost = store.lease(TARGET, "p", 1e-9)
    assert lost is not None
    held = store.lease(TARGET, "p", 60.0)
    assert held is not None
    assert store.lease(TARGET, "p", 60.0) is None
    assert lost.renew() is False
    lost.release()
    assert store.lease_remaining_s(TARGET, "p") is not None
    assert held.renew() is True
    held.release()
    held.release()
    assert store.lease_remaining_s(TARGET, "p") is None
    assert held.renew() is False


def test_pruning_deletes_the_failures_of_other_targets_alone() -> None:
    store, other = MemoryStore(), replace(TARGET, threads=7)
    for target in (TARGET, other):
        store.put(target, make_decision(target=target))
        store.remember_failure(target, "p", "x", Verdict("crashed"))
    assert store.prune(older_than_s=1e12) == 0
    assert store.targets() == sorted((TARGET, other), key=lambda target: target.key)
    assert store.prune(keep=[TARGET]) == 1
    assert store.targets() == [TARGET]
    assert store.all_failures(TARGET) == {"p": {"x": Verdict("crashed")}}
    assert store.all_failures(other) == {}
    assert store.prune(older_than_s=0.0) == 1
    assert store.failures(TARGET, "p") == {"x": Verdict("crashed")}


def test_decision_of_another_target_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=f"was made for target {TARGET.key}, not "):
        MemoryStore().put(replace(TARGET, threads=7), make_decision())
