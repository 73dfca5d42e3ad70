"""tune() and the on-miss policy, with a fake tuner that records its arguments."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from torch import nn

import gemmtune
from gemmtune import backends
from gemmtune.core.decision import Decision
from gemmtune.core.errors import UnsupportedError
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.core.workloads import bmm_problem, linear_problem
from gemmtune.dispatch import RUNTIME, runtime
from gemmtune.store import MemoryStore
from gemmtune.tuning.api import tune_missing, tune_on_device
from gemmtune.tuning.tuner import Tuner
from gemmtune.tuning.turns import Pause, Steps
from helpers.serving import TOY_RUNS, decide, evidence, register, toy


class FakeTuner:
    """Tuner whose decisions are won by the toy kernel, and which records its arguments and its workers."""

    arguments: ClassVar[list[dict[str, Any]]] = []
    workers: ClassVar[list[Any]] = []

    def __init__(self, target: Any, names: Any, store: Any, budget: Any, progress: Any, **options: Any) -> None:
        self.target, self.store = target, store
        FakeTuner.arguments.append({"names": tuple(names), "seconds": budget.seconds, **options})

    def new_pool(self) -> Any:
        return SimpleNamespace(close=lambda: None)

    def tune(self, problems: Iterable[tuple[Problem, int]], pool: Any = None, *, share: float = 1.0) -> list[Decision]:
        FakeTuner.workers.append(pool)
        toy_decisions = [decide(problem, evidence(toy(), 0.1), chosen=toy()) for problem, _ in problems]
        decisions = [msgspec.structs.replace(decision, target_key=self.target.key) for decision in toy_decisions]
        for decision in decisions:
            self.store.put(self.target, decision)
        return decisions


@pytest.fixture(autouse=True)
def fake_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    TOY_RUNS.clear()
    FakeTuner.arguments.clear()
    FakeTuner.workers.clear()
    monkeypatch.setattr("gemmtune.tuning.tuner.Tuner", FakeTuner)


def test_tune_accepts_problems_with_and_without_counts(own_store: MemoryStore) -> None:
    problem = linear_problem(3, 5, 4, "float32", constant=False)
    for argument in (problem, [problem], [(problem, 7)]):
        assert [d.problem_key for d in gemmtune.tune(argument)] == [problem.key]  # type: ignore[arg-type]
    assert own_store.get(gemmtune.current_target(), problem.key) is not None
    gemmtune.linear(torch.randn(3, 4), torch.randn(5, 4))
    assert [(toy().id, 3, 3)] == TOY_RUNS


def test_tune_accepts_a_model_with_example_inputs() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    decisions = gemmtune.tune(model, [torch.randn(3, 4), (torch.randn(1, 4),), {"input": torch.randn(2, 4)}])
    assert sorted(d.problem["m"] for d in decisions) == [1, 1, 2, 2, 3, 3]


def test_config_key_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class FakePlanTuner:
        def __init__(self, *_: Any, config_key: Any, **options: Any) -> None:
            seen.append(config_key)

        def tune(self, problems: Any, m: Any, pool: Any) -> tuple[list[Decision], list[Any]]:
            return [], []

    monkeypatch.setattr("gemmtune.tuning.plan_tuner.PlanTuner", FakePlanTuner)
    gemmtune.tune(linear_problem(1, 5, 4, "float32"), m="all", config_key=abs, store=MemoryStore())
    assert seen == [abs]


def test_batched_products_are_tuned_over_their_batch_and_others_over_m(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    class FakePlanTuner:
        def __init__(self, tuner: Any, *_: Any, dim: str, config_key: Any, **options: Any) -> None:
            self.dim, self.config_key = dim, config_key

        def tune(self, problems: Any, sizes: Any, pool: Any) -> tuple[list[Decision], list[Any]]:
            seen.append((self.dim, self.config_key, sizes, [problem.family for problem, _ in problems]))
            return [], []

    monkeypatch.setattr("gemmtune.tuning.plan_tuner.PlanTuner", FakePlanTuner)
    plain, batched = linear_problem(1, 5, 4, "float32"), bmm_problem(3, 1, 5, 4, "float32")
    store, problems = MemoryStore(), [batched, plain]
    gemmtune.tune(problems, m="all", batch=range(1, 9), config_key="power_of_2", store=store)
    assert seen == [("m", "power_of_2", "all", ["mm"]), ("batch", None, range(1, 9), ["bmm"])]
    seen.clear()
    assert [d.problem["family"] for d in gemmtune.tune(problems, batch="all", store=store)] == ["mm"]
    assert seen == [("batch", None, "all", ["bmm"])]
    seen.clear()
    gemmtune.tune(problems, m="all", store=store)
    assert seen == [("m", None, "all", ["bmm", "mm"])]


@pytest.mark.parametrize(("config_key", "m", "error"), [
    ("power_of_3", "all", ValueError), (8, "all", TypeError), ("exact", None, ValueError), (abs, None, ValueError),
])  # fmt: skip
def test_wrong_config_key_is_refused(config_key: Any, m: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="config_key"):
        gemmtune.tune(linear_problem(1, 5, 4, "float32"), m=m, config_key=config_key)
    assert FakeTuner.arguments == []


def test_options_are_passed_to_the_tuner() -> None:
    other = MemoryStore()
    gemmtune.tune(linear_problem(1, 5, 4, "float32"), budget=2, backends=["aten"], force=True, store=other)
    (arguments,) = FakeTuner.arguments
    assert (arguments["names"], arguments["seconds"], arguments["force"]) == (("aten",), 2.0, True)
    assert len(list(other.decisions())) == 1
    assert RUNTIME.store() is other


def test_further_problems_are_tuned_by_the_same_worker(own_store: MemoryStore) -> None:
    first, *others = [(linear_problem(m, 5, 4, "float32"), 1) for m in (1, 2, 3)]
    batches: list[list[tuple[Problem, int]]] = [others[:1], others[1:], []]
    decisions = tune_on_device([first], "cpu", own_store, more=lambda: batches.pop(0))
    assert [decision.problem["m"] for decision in decisions] == [1, 2, 3]
    assert not batches
    assert len(FakeTuner.workers) == 3
    assert len(set(map(id, FakeTuner.workers))) == 1


def test_invalid_arguments_raise_errors() -> None:
    with pytest.raises(TypeError, match="a model needs example_inputs"):
        gemmtune.tune(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="Problems need none"):
        gemmtune.tune([], torch.ones(2))
    with pytest.raises(TypeError, match=r"expected Problems or \(Problem, count\) pairs; got int"):
        gemmtune.tune([3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="unknown backend 'cublas'"):
        gemmtune.tune([], backends=["cublas"])
    with pytest.raises(TypeError, match="sequence of names"):
        gemmtune.tune([], backends="aten")


def test_on_miss_tunes_once_and_serves() -> None:
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    with gemmtune.policy("on-miss"):
        for _ in range(3):
            torch.testing.assert_close(gemmtune.linear(x, w), torch.nn.functional.linear(x, w))
    assert len(FakeTuner.arguments) == 1
    assert len(TOY_RUNS) == 3


def test_on_miss_serves_pytorch_when_the_tuner_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no worker today")

    monkeypatch.setattr(FakeTuner, "tune", fail)
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    with gemmtune.policy("on-miss"):
        torch.testing.assert_close(gemmtune.linear(x, w), torch.nn.functional.linear(x, w))
    assert "no worker today" in caplog.text


def test_on_miss_does_not_wait_for_another_process(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """ATen serves while another process has the lease; the kernel of its decision serves afterwards."""
    monkeypatch.setattr("gemmtune.tuning.tuner.Tuner", Tuner)
    monkeypatch.setattr("gemmtune.tuning.tuner.Tuner._tune_one", lambda *_: pytest.fail("tuned under another's lease"))
    monkeypatch.setattr("gemmtune.tuning.api.POLL_S", 0.01)
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    problem = linear_problem(3, 5, 4, "float32", constant=False)
    lease = own_store.lease(gemmtune.current_target(), problem.key, 60.0)
    assert lease is not None
    with gemmtune.policy("on-miss"):
        for _ in range(3):
            torch.testing.assert_close(gemmtune.linear(x, w), torch.nn.functional.linear(x, w))
        assert TOY_RUNS == []
        own_store.put(gemmtune.current_target(), decide(problem, evidence(toy(), 0.1), chosen=toy()))
        lease.release()
        deadline = time.monotonic() + 30.0
        while not TOY_RUNS and time.monotonic() < deadline:
            gemmtune.linear(x, w)
            time.sleep(0.01)
    assert (toy().id, 3, 3) in TOY_RUNS


def test_on_miss_tunes_when_the_other_process_releases_its_lease(
    own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned: list[str] = []

    def tune_one(self: Tuner, problem: Problem, *_: object) -> Steps[Decision]:
        yield Pause(seconds=0.0)
        tuned.append(problem.key)
        decision = decide(problem, evidence(toy(), 0.1), chosen=toy())
        own_store.put(gemmtune.current_target(), decision)
        return decision

    monkeypatch.setattr("gemmtune.tuning.tuner.Tuner", Tuner)
    monkeypatch.setattr("gemmtune.tuning.tuner.Tuner._tune_one", tune_one)
    monkeypatch.setattr("gemmtune.tuning.api.POLL_S", 0.01)
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    problem = linear_problem(3, 5, 4, "float32", constant=False)
    lease = own_store.lease(gemmtune.current_target(), problem.key, 60.0)
    assert lease is not None
    with gemmtune.policy("on-miss"):
        gemmtune.linear(x, w)
        assert tuned == []
        lease.release()
        deadline = time.monotonic() + 30.0
        while not TOY_RUNS and time.monotonic() < deadline:
            gemmtune.linear(x, w)
            time.sleep(0.01)
    assert tuned == [problem.key]
    assert own_store.lease_remaining_s(gemmtune.current_target(), problem.key) is None


H200 = Target("cuda", "H200", "9.0", caches=(232448, 0, 62914560), cores=132)
OTHER = Target("cuda", "A100", "8.0", caches=(166912, 0, 41943040), cores=108)


@pytest.fixture
def target_devices(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Simulate GPU Targets, and return the list of devices that ``current_target`` is called with."""
    devices: list[Any] = []
    original = runtime.current_target

    def current_target(device: Any = "cpu") -> Target:
        devices.append(str(device))
        return original() if str(device) == "cpu" else OTHER if str(device) == "cuda:3" else H200

    monkeypatch.setattr(runtime, "current_target", current_target)
    return devices


def test_device_selects_the_target_and_the_backends(target_devices: list[Any], own_store: MemoryStore) -> None:
    problem = linear_problem(3, 5, 4, "bfloat16")
    (decision,) = gemmtune.tune(problem, device="cuda:1", latency="eager")
    assert target_devices[0] == "cuda:1"
    (arguments,) = FakeTuner.arguments
    assert arguments["names"] == backends.names("cuda")
    assert arguments["latency"] == "eager"
    assert own_store.get(H200, problem.key) == decision
    FakeTuner.arguments.clear()
    FakeTuner.workers.clear()
    gemmtune.tune(problem)
    assert FakeTuner.arguments[0]["names"] == backends.names("cpu")
    assert FakeTuner.arguments[0]["latency"] == "graph"
    with pytest.raises(ValueError, match="latency must be 'graph' or 'eager'; got 'now'"):
        gemmtune.tune(problem, latency="now")  # type: ignore[arg-type]


def test_model_is_tuned_for_the_device_it_ran_on_by_default(
    target_devices: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Linear(4, 5), torch.randn(3, 4)
    gemmtune.tune(model, x)
    assert target_devices[0] == "cpu"
    target_devices.clear()
    gemmtune.tune(model, x, device="cuda")
    assert target_devices[0] == "cuda"
    target_devices.clear()
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    recording: Any = importlib.import_module("gemmtune.ops.record")
    monkeypatch.setattr(recording, "_device", lambda args, _: cuda if args[0].shape[0] == 3 else cpu)
    decisions = gemmtune.tune(model, [x, torch.randn(2, 4)])
    assert list(dict.fromkeys(target_devices))[:2] == ["cuda:0", "cpu"]
    assert [decision.problem["m"] for decision in decisions] == [3, 2]


def test_miss_on_a_gpu_is_tuned_for_that_gpu(target_devices: list[Any], own_store: MemoryStore) -> None:
    problem = linear_problem(3, 5, 4, "bfloat16")
    tune_missing(problem, torch.device("cuda", 0))
    assert own_store.get(H200, problem.key) is not None
    assert FakeTuner.arguments[0]["names"] == backends.names("cuda")


def test_gpu_unlike_the_first_raises_unsupported_error(target_devices: list[Any], caplog: Any) -> None:
    problem = linear_problem(3, 5, 4, "bfloat16")
    with pytest.raises(UnsupportedError, match=r"cuda:3 \(A100\) is not like it: set CUDA_VISIBLE_DEVICES"):
        gemmtune.tune(problem, device="cuda:3")
    tune_missing(problem, torch.device("cuda", 3))
    assert "tuning on a miss failed (tuning runs on the first CUDA device" in caplog.text
    assert FakeTuner.arguments == []
