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


def test_zero_points_are_transposed_with_the_scales() -> None:
    scale, zero = torch.rand(6, 2), torch.rand(6, 2)
    weight_only = recognise(make_module(weight=W4, scale=scale, zero_points=zero, groupsize=32))
    assert weight_only is not None
    assert weight_only.transposed_scale
    assert torch.equal(weight_only.scale, scale.t())
    assert weight_only.scale.is_contiguous()
    assert weight_only.zero_point is not None
    assert torch.equal(weight_only.zero_point, zero.t())
    assert weight_only.names == {"weight": "weight", "scale": "scale", "zero_point": "zero_points"}


def test_scales_by_group_are_kept_as_they_are() -> None:
    scale, bias = torch.rand(4, 6), torch.rand(6)
    weight_only = recognise(make_module(weight=W8, weight_scale=scale, bias=bias))
    assert weight_only is not None
    assert weight_only.weight.data_ptr() == W8.data_ptr()
    assert weight_only.scale.data_ptr() == scale.data_ptr()
    assert weight_only.bias is not None
    assert weight_only.bias.data_ptr() == bias.data_ptr()
    assert weight_only.zero_point is None
    assert weight_only.names == {"weight": "weight", "scale": "weight_scale"}


def test_attribute_that_is_no_tensor_is_not_taken() -> None:
    weight_only = recognise(make_module(weight=W8, scales=1.0, scale=torch.rand(6), zeros=True, bias=True))
    assert weight_only is not None
    assert weight_only.names == {"weight": "weight", "scale": "scale"}
    assert weight_only.bias is None


@pytest.mark.parametrize(
    ("scale", "group", "expected"),
    [
        ((6, 4), None, 16),
        ((6, 5), None, 13),
        ((6, 7), None, 10),
        ((6, 7), 10, 10),
        ((6, 4), 16, 16),
        ((6, 4), 32, None),
        ((6, 4), 0, None),
        ((6, 4), -16, None),
        ((6, 0), None, None),
        ((6, 23), None, None),
        ((5, 4), None, None),
        ((1, 6, 4), None, None),
        ((6, 1), None, 64),
        ((6, 1), 128, 128),
    ],
)
def test_group_size_fits_the_number_of_scales(scale: tuple[int, ...], group: int | None, expected: int | None) -> None:
    sizes = {} if group is None else {"group_size": group}
    weight_only = recognise(make_module(weight=W8, scales=torch.ones(scale), **sizes))
    assert (None if weight_only is None else weight_only.group_size) == expected
    assert (weight_only is None) == (expected is None)


def test_square_weight_has_its_scales_by_row() -> None:
    weight = torch.zeros(4, 4, dtype=torch.int8)
    weight_only = recognise(make_module(weight=weight, scales=torch.ones(4, 4)))
    assert weight_only is not None
    assert (weight_only.transposed_scale, weight_only.group_size) == (True, 1)


class Marked(Tensor):
    """A tensor subclass without any behaviour of its own."""


@pytest.mark.parametrize(
    "other",
    [
        make_module(weight=W8.float(), scales=torch.ones(6)),
        make_module(weight=W8.as_subclass(Marked), scales=torch.ones(6)),
        make_module(weight=W8, scales=torch.ones(6).as_subclass(Marked)),
        make_module(weight=W8, scales=[1.0] * 6),
        make_module(weight=[[1]], scales=torch.ones(6)),
        make_module(weight=W4, scales=torch.ones(6)),
        make_module(weight=W4, scales=torch.ones(6), group_size="64"),
        make_module(weight=W8, scales=torch.ones(6, 4), zeros=torch.ones(4, 6)),
    ],
)
def test_attributes_of_other_types_are_not_recognised(other: nn.Module) -> None:
    assert recognise(other) is None


def test_modules_of_gemmtune_are_not_recognised() -> None:
    module = make_module(weight=W8, scales=torch.ones(6))
    module.__class__ = type("Own", (nn.Module,), {"__module__": "gemmtune.nn.modules"})
    assert recognise(module) is None


def test_adapter_may_decline_a_module() -> None:
    class Declined(nn.Module):
        weight, scales = W8, torch.ones(6)

    assert recognise(Declined()) is not None
    register_weight_only(Declined, lambda m: None)
    assert recognise(Declined()) is None
    with pytest.raises(TypeError, match=r"subclass of torch\.nn\.Module; got Declined\("):
        register_weight_only(Declined(), lambda m: None)  # type: ignore[arg-type]
