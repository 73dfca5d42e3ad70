"""Weights in the layout of ``_weight_int4pack_mm`` are read without knowing the layout."""

from __future__ import annotations

import pytest
import torch

from gemmtune.ops import int4pack
from helpers.int4_tiles import fake_convert, fake_int4pack_mm
from helpers.int4pack import int4_weight


def test_nibbles_and_signed_are_inverse() -> None:
    values = torch.randint(-8, 8, (5, 12), dtype=torch.int8)
    assert torch.equal(int4pack.signed(int4pack.nibbles(values)), values)


@pytest.mark.parametrize(("n", "k", "group"), [(16, 32, 32), (48, 1280, 128), (64, 2048, 64)])
def test_integers_of_the_layout_for_cpus(n: int, k: int, group: int) -> None:
    weight = int4_weight(n, k, group=group)
    integers = int4pack.unpacked_integers(weight.packed, group, weight.scales_and_zeros, k)
    assert integers.dtype == torch.int8
    assert torch.equal(integers.int() + 8, weight.integers)


def test_integers_of_the_layout_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4pack, "weight_int4pack_mm", fake_int4pack_mm)
    integers = torch.randint(0, 16, (16, 1024), dtype=torch.uint8)
    packed = fake_convert((integers[:, ::2] << 4) | integers[:, 1::2], 8)
    scales_and_zeros = torch.rand(8, 16, 2).bfloat16()
    assert torch.equal(int4pack.unpacked_integers(packed, 128, scales_and_zeros, 1024).to(torch.uint8) + 8, integers)


@pytest.mark.parametrize("group", [32, 128])
def test_zero_points_give_the_values_of_scales_and_zeros(group: int) -> None:
    weight = int4_weight(32, 128, group=group)
    scales = int4pack.zero_points(weight.scales_and_zeros)
    assert scales is not None
    scale, zero_point = (tensor.double().repeat_interleave(group, 0).t() for tensor in scales)
    values = (weight.integers.double() - zero_point) * scale
    torch.testing.assert_close(values, weight.values, rtol=1e-5, atol=1e-7)


def test_weight_with_a_scale_of_zero_has_no_zero_points() -> None:
    weight = int4_weight(32, 128)
    weight.scales_and_zeros[1, 5, 0] = 0
    assert int4pack.zero_points(weight.scales_and_zeros) is None
