"""optimize(compare=True) keeps packed weights only if the whole model is no slower with them."""

from __future__ import annotations

import random
import weakref
from typing import Any, ClassVar

import psutil
import pytest
import torch
from torch import Tensor, nn

import gemmtune
from gemmtune.nn import whole_model
from gemmtune.nn.packed_tensor import PackedTensor
from gemmtune.store import MemoryStore
from helpers.tuned_models import Mlp, prepare_model


class FakeClock:
    """Fake clock that only models advance, with seeded noise."""

    def __init__(self) -> None:
        self.now = 0.0
        self._noise = random.Random(0)

    def perf_counter(self) -> float:
        return self.now

    def advance(self, seconds: float, noise: float) -> None:
        """Advance by ``seconds``, with a relative noise of up to ``noise``."""
        self.now += seconds * self._noise.uniform(1 - noise, 1 + noise)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Replace the clock of whole-model comparisons, so that the load of this machine does not matter."""
    monkeypatch.setattr(whole_model, "time", FakeClock())
    fake_clock: FakeClock = whole_model.time  # type: ignore[assignment]
    return fake_clock


class Timed(Mlp):
    """Model that takes ``packed_s`` with packed weights and ``plain_s`` without, in seconds, with 10% noise."""

    packed_s, plain_s = 0.4, 0.1

    def forward(self, x: Tensor) -> Tensor:
        seconds = self.packed_s if isinstance(self.up.weight, PackedTensor) else self.plain_s
        whole_model.time.advance(seconds, noise=0.1)  # type: ignore[attr-defined]
        return super().forward(x)


def test_slower_model_is_restored(own_store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(3, 8)
    model = prepare_model(Timed(), x, own_store)
    expected, weights = model(x), list(model.parameters())
    handle = gemmtune.optimize(model, x, tune=False, compare=True)
    assert handle.swapped == {}
    assert handle.left.keys() == {"up", "down"}
    assert "slower with packed weights" in handle.left["up"]
    assert handle.left["up"] in caplog.text
    assert handle.ratio is not None
    assert handle.ratio[1] > 1.5
    assert all(new is old and type(new) is nn.Parameter for new, old in zip(model.parameters(), weights, strict=True))
    assert torch.equal(model(x), expected)
    assert not model.up._state_dict_hooks


class ByRows(Mlp):
    """Model that is faster with packed weights on three rows and slower on one."""

    packed_s: ClassVar[dict[int, float]] = {3: 0.8, 1: 0.11}
    plain_s: ClassVar[dict[int, float]] = {3: 1.0, 1: 0.1}

    def forward(self, x: Tensor) -> Tensor:
        times = self.packed_s if isinstance(self.up.weight, PackedTensor) else self.plain_s
        whole_model.time.advance(times[len(x)], noise=0.01)  # type: ignore[attr-defined]
        return super().forward(x)


def test_model_slower_on_one_example_is_restored(own_store: MemoryStore) -> None:
    examples = [torch.randn(3, 8), torch.randn(1, 8)]
    model = prepare_model(ByRows(), examples[0], own_store)
    handle = gemmtune.optimize(model, examples, tune=False, compare=True)
    assert handle.swapped == {}
    assert "slower with packed weights on example 2 of 2 (1.1" in handle.left["up"]
    assert handle.ratio is not None
    assert handle.ratio[2] < 0.9
    assert [round(center, 1) for center, _, _ in handle.ratios] == [0.8, 1.1]


def test_loss_within_noise_on_one_example_is_ignored(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByRows, "packed_s", {3: 0.8, 1: 0.102})
    examples = [torch.randn(3, 8), torch.randn(1, 8)]
    model = prepare_model(ByRows(), examples[0], own_store)
    handle = gemmtune.optimize(model, examples, tune=False, compare=True)
    assert set(handle.swapped) == {"up", "down"}


def test_faster_model_stays_packed(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timed, "packed_s", 0.1)
    monkeypatch.setattr(Timed, "plain_s", 0.4)
    x = torch.randn(3, 8)
    model = prepare_model(Timed(), x, own_store)
    handle = gemmtune.optimize(model, x, tune=False, compare=True)
    assert set(handle.swapped) == {"up", "down"}
    assert handle.ratio is not None
    assert handle.ratio[2] < 0.7
    assert "of the whole model" in repr(handle)
    assert isinstance(model.up.weight, PackedTensor)


def test_model_that_cannot_run_again_is_not_timed(own_store: MemoryStore) -> None:
    class Counting(Mlp):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 5:
                raise RuntimeError("the cache is full")
            return super().forward(x)

    x = torch.randn(3, 8)
    model = prepare_model(Counting(), x, own_store)
    handle = gemmtune.optimize(model, x, tune=False, compare=True)
    assert handle.ratio is None
    assert set(handle.swapped) == {"up", "down"}
    assert isinstance(model.up.weight, PackedTensor)
    assert isinstance(model.down.weight, PackedTensor)


def test_model_is_not_timed_without_memory_for_both_forms(
    own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries: list[Any] = []
    monkeypatch.setattr(psutil, "virtual_memory", lambda: queries.append(1) or type("Free", (), {"available": 8}))
    x = torch.randn(3, 8)
    model = prepare_model(Timed(), x, own_store)
    handle = gemmtune.optimize(model, x, tune=False, compare=True)
    assert queries
    assert handle.ratio is None
    assert set(handle.swapped) == {"up", "down"}


def test_weights_with_weak_references_stay_parameters(own_store: MemoryStore) -> None:
    class Referring(Mlp):
        references: ClassVar[list[Any]] = []

        def forward(self, x: Tensor) -> Tensor:
            if isinstance(self.up.weight, PackedTensor):
                self.references.append(weakref.ref(self.down.weight))
            return super().forward(x)

    x = torch.randn(3, 8)
    model = prepare_model(Referring(), x, own_store)
    expected = model(x)
    handle = gemmtune.optimize(model, x, tune=False, compare=True)
    assert handle.ratio is None
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert all(isinstance(model.get_submodule(name).weight, PackedTensor) for name in handle.swapped)
    assert not any(isinstance(model.get_submodule(name).weight, PackedTensor) for name in handle.left)
    handle.restore()
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
