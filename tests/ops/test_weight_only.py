"""Recognition of modules as weight-only linears."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gemmtune.ops.weight_only import WeightOnly, recognise, register_weight_only


def make_module(**tensors: object) -> nn.Module:
    result = nn.Module()
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            result.register_buffer(name, value)
        else:
            setattr(result, name, value)
    return result


W8, W4 = torch.zeros(6, 64, dtype=torch.int8), torch.zeros(6, 32, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("linear", "bits", "group", "transposed"),
    [
        (make_module(weight=W8, scales=torch.ones(6)), 8, None, False),
        (make_module(weight=W8, scale=torch.ones(6, 4)), 8, 16, True),
        (make_module(weight=W8, scales=torch.ones(4, 6)), 8, 16, False),
        (make_module(weight=W4, scales=torch.ones(2, 6), zeros=torch.ones(2, 6), group_size=32), 4, 32, False),
        (make_module(weight=W4, scales=torch.ones(6), group_size=64), 4, None, False),
    ],
)
def test_recognise_returns_bits_groups_and_scales(
    linear: nn.Module, bits: int, group: int | None, transposed: bool
) -> None:
    weight_only = recognise(linear)
    assert weight_only is not None
    assert (weight_only.bits, weight_only.group_size, weight_only.transposed_scale) == (bits, group, transposed)
    assert tuple(weight_only.scale.shape) == ((6,) if group is None else (64 // group, 6))
    assert (weight_only.zero_point is None) == (not hasattr(linear, "zeros"))


@pytest.mark.parametrize(
    "other",
    [
        nn.Linear(4, 4),
        nn.Embedding(4, 4),
        make_module(weight=W8),
        make_module(weight=W8, scales=torch.ones(7)),
        make_module(weight=W8, scales=torch.ones(6, dtype=torch.int32)),
        make_module(weight=W4, scales=torch.ones(2, 6)),
        make_module(weight=W8[0], scales=torch.ones(6)),
        make_module(weight=W8, scales=torch.ones(6), zeros=torch.ones(1)),
    ],
)
def test_other_modules_are_not_recognised(other: nn.Module) -> None:
    assert recognise(other) is None


def test_registered_adapter_is_used_for_subclasses() -> None:
    class PackedLinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("packed", W8.clone())

    class Child(PackedLinear):
        pass

    assert recognise(PackedLinear()) is None
    register_weight_only(PackedLinear, lambda m: WeightOnly(m.packed, torch.ones(6), names={"weight": "packed"}))  # type: ignore[arg-type]
    weight_only = recognise(Child())
    assert weight_only is not None
    assert weight_only.names == {"weight": "packed"}
    with pytest.raises(TypeError, match=r"subclass of torch\.nn\.Module"):
        register_weight_only(int, lambda m: None)  # type: ignore[arg-type]
