"""Search strategies of plug-ins: registered by name, and run by the tuner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

import gemmtune
from gemmtune.core import devices
from gemmtune.core.candidate import Candidate
from gemmtune.core.target import Target, current_cpu
from gemmtune.core.workloads import build
from gemmtune.store import MemoryStore
from gemmtune.tuning import search
from gemmtune.tuning.searcher import Searcher, SearchOptions
from gemmtune.tuning.tuner import Budget, Tuner


class FirstFewSearch:
    """Strategy that tries ATen's candidates and the first two others, in their order."""

    def __init__(self, candidates: Sequence[Candidate], options: SearchOptions) -> None:
        aten = [candidate for candidate in candidates if candidate.backend == "aten"]
        others = [candidate for candidate in candidates if candidate.backend != "aten"]
        self.options = options
        self._waiting = [*aten, *others[:2]][: options.limit]
        self.told: dict[str, float | None] = {}

    def ask(self) -> list[Candidate] | None:
        return [self._waiting.pop(0)] if self._waiting else None

    def tell(self, candidate_id: str, seconds: float | None) -> None:
        self.told[candidate_id] = seconds

    @property
    def left(self) -> int:
        return len(self._waiting)

    @property
    def likely(self) -> list[Candidate]:
        return list(self._waiting)


@pytest.fixture
def strategies() -> Iterator[list[FirstFewSearch]]:
    """Register the strategy, and return the list of its instances."""
    instances: list[FirstFewSearch] = []

    def factory(candidates: Sequence[Candidate], options: SearchOptions) -> Searcher:
        instances.append(FirstFewSearch(candidates, options))
        return instances[-1]

    search.register("first-few", factory)
    yield instances
    search._REGISTERED.clear()


@pytest.fixture(scope="module")
def target() -> Target:
    return replace(current_cpu(), threads=1)


def test_registered_strategy_selects_the_candidates(target: Target, strategies: list[FirstFewSearch]) -> None:
    problem = build(4, 32, 64, "fp32")
    tuner = Tuner(
        target, ["native"], MemoryStore(), Budget(seconds=8.0, candidates=5), isolate=False, seed=7, search="first-few"
    )
    (decision,) = tuner.tune([(problem, 1)])
    (strategy,) = strategies
    assert strategy.options == SearchOptions(first=[], seed=7, limit=5, profile=devices.get("cpu").profile)
    assert len(strategy.told) == 5
    tried = {row.id for row in decision.evidence if row.stage not in ("untried", "illegal")}
    assert tried <= set(strategy.told)
    assert any(seconds is not None for seconds in strategy.told.values())


def test_tune_accepts_the_name_of_a_strategy(strategies: list[FirstFewSearch], own_store: MemoryStore) -> None:
    gemmtune.tune(build(4, 32, 64, "fp32"), budget=1.0, store=own_store, backends=["native"], search="first-few")
    assert len(strategies) == 1


def test_unknown_and_taken_names_raise_value_error(target: Target) -> None:
    with pytest.raises(ValueError, match="unknown search strategy 'nope'; known strategies: local"):
        Tuner(target, ["aten"], MemoryStore(), search="nope")
    with pytest.raises(ValueError, match="gemmtune has one of that name"):
        search.register("local", FirstFewSearch)
    assert search.names() == ("local",)
