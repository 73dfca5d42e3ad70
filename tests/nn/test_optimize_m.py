"""optimize(m=...) and the plans for ranges of M that a store has."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemmtune
from gemmtune.dispatch import RUNTIME, PlanEntry, current_target
from gemmtune.store import MemoryStore
from helpers.plans import SimulatedKernel, planted_plan
from helpers.serving import TOY_RUNS, plan_of_toys, register, toy
from helpers.tuned_models import Mlp, prepare_model

optimize_module: Any = importlib.import_module("gemmtune.nn.optimize")


@pytest.mark.parametrize(("m", "error"), [
    ("most", ValueError), (range(0, 4), ValueError), (range(1, 9, 2), ValueError), ([], ValueError), ([0], ValueError),
    (3.5, TypeError), (["4"], TypeError),
])  # fmt: skip
@pytest.mark.parametrize("tune", [True, False])
def test_wrong_m_is_refused_before_the_model_runs(
    m: Any, error: type[Exception], tune: bool, own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Mlp().eval()
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(error, match=r"\bM\b|m must be"):
        gemmtune.optimize(model, torch.randn(3, 8), m=m, tune=tune)


@pytest.mark.parametrize(
    ("options", "m"),
    [({}, "all"), *(({"m": m}, m) for m in (None, "all", range(1, 65), [4, 32]))],
)
def test_tune_gets_m(options: dict[str, Any], m: Any, own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[Any] = []

    def fake_tune(problems: Any, **options: Any) -> list[Any]:
        received.append((sorted(problem.m for problem, _ in problems), options["m"]))
        return []

    monkeypatch.setattr(importlib.import_module("gemmtune.tuning.api"), "tune", fake_tune)
    gemmtune.optimize(Mlp().eval(), [torch.randn(3, 8), torch.randn(5, 8)], **options)
    assert received == [([3, 3, 5, 5], m)]


@pytest.mark.parametrize(("config_key", "options", "error"), [
    ("power_of_3", {}, ValueError), (64, {}, TypeError), ("exact", {"m": None}, ValueError),
    (lambda m: m / 2, {"m": range(1, 9)}, TypeError), (lambda m: m, {}, ValueError),
])  # fmt: skip
def test_wrong_config_key_is_refused_before_the_model_runs(
    config_key: Any, options: dict[str, Any], error: type[Exception], own_store: MemoryStore
) -> None:
    model = Mlp().eval()
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(error, match="config_key"):
        gemmtune.optimize(model, torch.randn(3, 8), config_key=config_key, **options)


@pytest.mark.parametrize("config_key", [None, "exact", "power_of_2", abs])
def test_tune_gets_config_key(config_key: Any, own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[Any] = []

    def fake_tune(problems: Any, **options: Any) -> list[Any]:
        received.append(options["config_key"])
        return []

    monkeypatch.setattr(importlib.import_module("gemmtune.tuning.api"), "tune", fake_tune)
    gemmtune.optimize(Mlp().eval(), torch.randn(3, 8), m=range(1, 65), config_key=config_key)
    assert received == [config_key]


def store_plans(model: nn.Module, x: Tensor, store: MemoryStore, serves_m: tuple[int, int]) -> None:
    """Store a plan for each weight that ``model(x)`` multiplies by, in which packed toy kernels serve."""
    with gemmtune.record() as recording:
        model(x)
    for problem, _ in recording.problems:
        kernel = SimulatedKernel(toy("other"), lambda m: 1e-7 * m, "toy:other")
        plan = planted_plan(
            problem, [kernel], {"toy:other": [(*serves_m, kernel)]}, list(serves_m),
            target_key=gemmtune.current_target().key,
        )  # fmt: skip
        store.put_plan(gemmtune.current_target(), plan)


def test_layout_of_the_stored_plan_is_used(own_store: MemoryStore) -> None:
    """At the M of the example another layout was the fastest."""
    x = torch.randn(3, 8)
    model = prepare_model(Mlp(), x, own_store)
    store_plans(model, x, own_store, (1, 64))
    expected = {rows: model(torch.ones(rows, 8)) for rows in (1, 40)}
    handle = gemmtune.optimize(model, x, tune=False)
    assert set(handle.swapped.values()) == {"toy:other"}
    for rows, values in expected.items():
        TOY_RUNS.clear()
        torch.testing.assert_close(model(torch.ones(rows, 8)), values, rtol=1e-4, atol=1e-5)
        assert [run[::2] for run in TOY_RUNS] == [(toy("other").id, rows)] * 2


@pytest.mark.parametrize(("is_host", "has_plan"), [(False, True), (True, True), (False, False)])
def test_kernels_of_plans_are_preloaded_on_a_gpu(
    is_host: bool, has_plan: bool, own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA graphs may be captured at any M of a plan."""
    x = torch.randn(3, 8)
    model = prepare_model(Mlp(), x, own_store)
    if has_plan:
        store_plans(model, x, own_store, (1, 64))
    loaded: list[tuple[int, str | None]] = []
    monkeypatch.setattr(optimize_module, "is_host", lambda device: is_host)
    monkeypatch.setattr(RUNTIME, "preload", lambda problem, packing, device: loaded.append((problem.n, packing)))
    handle = gemmtune.optimize(model, x, tune=False)
    assert len(handle.swapped) == 2
    expected = [(8, "toy:other"), (16, "toy:other")] if has_plan and not is_host else []
    assert sorted(loaded) == expected


@pytest.mark.parametrize(("device", "bias"), [("cuda", False), ("cuda", True), ("cpu", False)])
def test_the_librarys_kernels_of_raw_weights_are_loaded_on_a_gpu(
    device: str, bias: bool, own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those for the M that PyTorch's op serves by the plan; here all M of one of its intervals."""
    register()
    layer = nn.Linear(8, 16, bias=bias)
    problem = gemmtune.ops.linear.describe(torch.randn(3, 8), layer.weight, layer.bias, constant=True).problem
    own_store.put_plan(current_target(), plan_of_toys(problem))
    RUNTIME.refresh(own_store)
    plan = RUNTIME.index().plan(problem.plan_key, None)
    assert plan is not None
    plain = plan._replace(intervals=tuple(i._replace(entry=PlanEntry(i.first, None)) for i in plan.intervals[:1]))
    index = SimpleNamespace(plan=lambda key, packing: plain if (key, packing) == (problem.plan_key, None) else None)
    monkeypatch.setattr(RUNTIME, "index", lambda device: index)
    loaded: list[tuple[list[int], tuple[int, ...]]] = []
    monkeypatch.setattr(
        optimize_module, "load_chosen_kernels", lambda p, sizes, b: loaded.append((sizes, tuple(b.shape)))
    )
    site = SimpleNamespace(device=torch.device(device), weight=layer.weight, transposed=False)
    optimize_module._load_library_kernels(problem, site)  # type: ignore[arg-type]
    first, last, _ = plain.intervals[0]
    assert loaded == ([(list(range(first, last + 1)), (8, 16))] if device == "cuda" and not bias else [])
