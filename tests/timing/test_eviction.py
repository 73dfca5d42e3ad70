"""Removing weights from a CPU's caches: which memory is removed, and that it keeps its contents."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from gemmtune.backends.native import _native
from gemmtune.core.problem import Quant
from gemmtune.core.target import Target
from gemmtune.core.weights import PackedWeight, QuantWeight
from gemmtune.dispatch import current_target
from gemmtune.timing import eviction
from gemmtune.timing.eviction import can_evict, evict

needs_clflushopt = pytest.mark.skipif(not _native.can_evict(), reason="this CPU has no CLFLUSHOPT")


def test_only_a_host_with_the_native_build_can_evict(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_evict(current_target()) == _native.can_evict()
    assert not can_evict(Target("cuda", "a GPU", "x86_64"))
    monkeypatch.setitem(sys.modules, "gemmtune.backends.native._native", None)
    monkeypatch.delattr("gemmtune.backends.native._native", raising=False)
    eviction._can_evict_lines.cache_clear()
    assert not can_evict(current_target())
    monkeypatch.undo()
    eviction._can_evict_lines.cache_clear()


def test_all_memory_of_a_weight_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a view, the whole storage."""
    evicted: dict[int, int] = {}
    monkeypatch.setattr(_native, "evict", lambda address, size: evicted.update({address: size}))
    raw = torch.randn(64, 48)
    evict([raw.t(), raw[3:5]])
    assert evicted == {raw.data_ptr(): 64 * 48 * 4}
    evicted.clear()
    data, scale, zeros = torch.zeros(8, 16, dtype=torch.int8), torch.ones(16), torch.ones(16)
    evict([QuantWeight(data, scale, zeros, 8, Quant(zero_point=True), "int8")])
    assert evicted == {data.data_ptr(): 128, scale.data_ptr(): 64, zeros.data_ptr(): 64}
    evicted.clear()
    evict([PackedWeight("p", (data, zeros), 8, 16, "int8")])
    assert evicted == {data.data_ptr(): 128, zeros.data_ptr(): 64}


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_weights_in_a_layout_of_onednn_have_no_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    evicted: dict[int, int] = {}
    monkeypatch.setattr(_native, "evict", lambda address, size: evicted.update({address: size}))
    weight = torch.randn(64, 32).to_mkldnn()
    evict([weight])
    ((address, size),) = evicted.items()
    assert address
    assert size >= 64 * 32 * 4


@needs_clflushopt
@pytest.mark.parametrize(("offset", "size"), [(0, 4096), (1, 4095), (63, 2), (64, 0), (7, 4000)])
def test_evicted_memory_keeps_its_contents(offset: int, size: int) -> None:
    memory = torch.arange(4096, dtype=torch.int64).to(torch.uint8)
    wanted = memory.clone()
    memory += 1  # lines that have to be written back
    _native.evict(memory.data_ptr() + offset, size)
    assert torch.equal(memory, wanted + 1)
    memory.fill_(7)
    evict([memory])
    assert memory.eq(7).all()


def test_copies_of_a_quantised_weight_are_evicted_each(monkeypatch: pytest.MonkeyPatch) -> None:
    evicted: set[int] = set()
    monkeypatch.setattr(_native, "evict", lambda address, size: evicted.add(address))
    first = QuantWeight(torch.zeros(8, 16, dtype=torch.int8), torch.ones(16), None, 8, Quant(), "int8")
    second = replace(first, data=first.data.clone())
    evict([first, second])
    assert evicted == {first.data.data_ptr(), second.data.data_ptr(), first.scale.data_ptr()}
