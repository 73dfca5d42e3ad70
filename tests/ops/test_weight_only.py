"""Which modules are taken for weight-only linears."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gemmtune.ops.weight_only import WeightOnly, recognise, register_weight_only


def module(**tensors: object) -> nn.Module:
    made = nn.Module()
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            made.register_buffer(name, value)
        else:
            setattr(made, name, value)
    return made


W8, W4 = torch.zeros(6, 64, dtype=torch.int8), torch.zeros(6, 32, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("found", "bits", "group", "transposed"),
    [
        (module(weight=W8, scales=torch.ones(6)), 8, None, False),
        (module(weight=W8, scale=torch.ones(6, 4)), 8, 16, True),
        (module(weight=W8, scales=torch.ones(4, 6)), 8, 16, False),
        (module(weight=W4, scales=torch.ones(2, 6), zeros=torch.ones(2, 6), group_size=32), 4, 32, False),
        (module(weight=W4, scales=torch.ones(6), group_size=64), 4, None, False),
    ],
)
def test_recognised(found: nn.Module, bits: int, group: int | None, transposed: bool) -> None:
    held = recognise(found)
    assert held is not None
    assert (held.bits, held.group_size, held.transposed_scale) == (bits, group, transposed)
    assert tuple(held.scale.shape) == ((6,) if group is None else (64 // group, 6))
    assert (held.zero_point is None) == (not hasattr(found, "zeros"))


@pytest.mark.parametrize(
    "other",
    [
        nn.Linear(4, 4),
        nn.Embedding(4, 4),
        module(weight=W8),
        module(weight=W8, scales=torch.ones(7)),
        module(weight=W8, scales=torch.ones(6, dtype=torch.int32)),
        module(weight=W4, scales=torch.ones(2, 6)),
        module(weight=W8[0], scales=torch.ones(6)),
        module(weight=W8, scales=torch.ones(6), zeros=torch.ones(1)),
    ],
)
def test_left_alone(other: nn.Module) -> None:
    assert recognise(other) is None


def test_adapters_come_first() -> None:
    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("packed", W8.clone())

    class Child(Theirs):
        pass

    assert recognise(Theirs()) is None
    register_weight_only(Theirs, lambda m: WeightOnly(m.packed, torch.ones(6), names={"weight": "packed"}))  # type: ignore[arg-type]
    held = recognise(Child())
    assert held is not None
    assert held.names == {"weight": "packed"}
    with pytest.raises(TypeError, match=r"subclass of torch\.nn\.Module"):
        register_weight_only(int, lambda m: None)  # type: ignore[arg-type]
