"""Weights of compiled graphs: merged in place or copied, packed, and written to."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gemmtune.core.devices import HostDevice
from gemmtune.inductor import weight_forms
from gemmtune.inductor.weight_forms import MAX_CHANGES, GroupedScales, MergedWeights, PackedForms
from gemmtune.ops.packing import pack


def linears() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(n, 8), requires_grad=False) for n in (4, 2, 6)]


def test_weights_become_rows_of_one_matrix() -> None:
    weights = linears()
    values = torch.cat([weight.detach().clone() for weight in weights])
    merged = MergedWeights(movable=True).get(weights)
    assert torch.equal(merged, values)
    assert torch.equal(torch.cat(list(weights)), values)
    assert merged.data_ptr() == weights[0].data_ptr()
    assert all(isinstance(weight, nn.Parameter) and weight.is_contiguous() for weight in weights)


def test_writes_to_merged_weights_reach_the_matrix() -> None:
    weights, forms = linears(), MergedWeights(movable=True)
    forms.get(weights)
    weights[1].fill_(7.0)
    assert torch.equal(forms.get(weights)[4:6], torch.full((2, 8), 7.0))
    weights[2].data = torch.zeros(6, 8)  # it leaves the matrix
    assert torch.equal(forms.get(weights)[6:], torch.zeros(6, 8))
    weights[0].add_(1.0)
    assert torch.equal(forms.get(weights)[:4], weights[0])


def test_merged_weights_are_found_by_another_graph() -> None:
    weights = linears()
    merged = MergedWeights(movable=True).get(weights)
    assert MergedWeights(movable=True).get(weights).data_ptr() == merged.data_ptr()
    assert MergedWeights(movable=True).get(weights[:2]).shape == (6, 8)


def test_weight_whose_memory_is_shared_is_not_moved() -> None:
    weights, forms = linears(), MergedWeights(movable=True)
    alias = weights[0].detach()
    address = weights[0].data_ptr()
    assert torch.equal(forms.get(weights), torch.cat(list(weights)))
    assert weights[0].data_ptr() == address
    first = forms.get(weights)
    assert forms.get(weights) is first
    alias.fill_(3.0)  # shares the version counter
    assert torch.equal(forms.get(weights)[:4], torch.full((4, 8), 3.0))


def test_inference_tensors_are_copied_in_every_call() -> None:
    with torch.inference_mode():
        weights = [torch.ones(2, 8), torch.ones(3, 8)]
    forms = MergedWeights(movable=True)
    forms.get(weights)
    with torch.inference_mode():
        weights[0].zero_()
    assert torch.equal(forms.get(weights)[:2], torch.zeros(2, 8))


def test_vectors_are_joined_in_one_dimension() -> None:
    joined = MergedWeights(movable=False).get([torch.ones(1, 3), torch.zeros(1, 2)])
    assert joined.tolist() == [1, 1, 1, 0, 0]


def test_packed_form_is_shared_and_dropped_with_its_weight() -> None:
    weight = nn.Parameter(torch.randn(32, 32), requires_grad=False)
    first, second = PackedForms(), PackedForms()
    packed = pack(weight)
    first.put([weight], packed.layout, packed)
    assert first.get([weight], packed.layout) is packed
    assert second.get([weight], packed.layout) is packed
    weight.add_(1.0)
    assert first.get([weight], packed.layout) is None
    assert second.get([weight], packed.layout) is None
    count = len(weight_forms._PACKED)
    del weight
    gc.collect()
    assert len(weight_forms._PACKED) < count


def test_weight_that_is_written_often_is_known() -> None:
    weight, forms = torch.randn(32, 32), PackedForms()
    for _ in range(MAX_CHANGES + 1):
        assert not forms.changes_often
        forms.put([weight], "a", pack(weight))
        weight.add_(1.0)
    forms.put([weight], "a", pack(weight))
    assert forms.changes_often


def test_inference_tensors_are_not_packed() -> None:
    with torch.inference_mode():
        weight = torch.ones(8, 8)
    with pytest.raises(RuntimeError):
        PackedForms().put([weight], "a", pack(torch.ones(8, 8)))


def test_memory_of_merged_weights_and_scales_may_outlive_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []

    def make_lasting(self: HostDevice, device: torch.device, make: Callable[[], Any]) -> Any:
        made.append(device)
        return make()

    monkeypatch.setattr(HostDevice, "make_lasting", make_lasting)
    weights = linears()
    merged, scales = MergedWeights(movable=True), GroupedScales(torch.float32, 8)
    for _ in range(3):
        merged.get(weights)
        scales.get(weights)
    assert made == [torch.device("cpu")] * 2
    with torch.inference_mode():
        unversioned = [torch.randn(n, 8) for n in (4, 2)]
    MergedWeights(movable=True).get(unversioned)
    assert len(made) == 2, "of which a copy is made in every call, and kept by none"
