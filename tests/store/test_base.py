"""The default implementations of Store, for stores from outside that define its abstract methods only."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmtune.core.errors import StoreError
from gemmtune.store import MemoryStore, Store
from gemmtune.testing.store_suite import PROBLEM, TARGET, make_decision, make_plan


class StoreWithoutPlans(MemoryStore):
    """A store with the default implementations of the methods for plans."""

    get_plan = Store.get_plan
    put_plan = Store.put_plan
    plans = Store.plans


def test_store_without_plans_has_none() -> None:
    store = StoreWithoutPlans()
    store.put(TARGET, make_decision())
    assert store.get_plan(TARGET, PROBLEM.plan_key) is None
    assert list(store.plans()) == []
    assert list(store.plans(TARGET)) == []
    assert store.verify() == []


def test_store_without_plans_refuses_one() -> None:
    with pytest.raises(StoreError, match="StoreWithoutPlans keeps no plans"):
        StoreWithoutPlans().put_plan(TARGET, make_plan())


def test_methods_for_plans_are_not_abstract() -> None:
    assert not Store.__abstractmethods__ & {"get_plan", "put_plan", "plans"}


def test_store_without_plans_exports_its_decisions(tmp_path: Path) -> None:
    store = StoreWithoutPlans()
    store.put(TARGET, make_decision())
    assert store.export(tmp_path / "out.json") == 1
    assert '"plans"' not in (tmp_path / "out.json").read_text()
