"""Constructors of epilogue steps: axes inferred from shapes, and errors."""

from __future__ import annotations

import pytest
import torch

from gemmtune import fuse
from gemmtune.core.checks import DtypeError, ShapeError


@pytest.mark.parametrize(
    ("shape", "axis", "bound"),
    [((), "tensor", ()), ((1,), "tensor", ()), ((5,), "col", (5,)), ((1, 5), "col", (5,)), ((3, 1), "row", (3,)),
     ((3, 5), "full", (3, 5))],
)  # fmt: skip
def test_axis_is_inferred_by_broadcasting(shape: tuple[int, ...], axis: str, bound: tuple[int, ...]) -> None:
    step, tensor = fuse.resolve(fuse.add(torch.ones(shape), value=2.0), 3, 5)
    assert (step.kind, step.axis, step.dtype, step.value) == ("add", axis, "float32", 2.0)
    assert tensor is not None
    assert tuple(tensor.shape) == bound


def test_residual_with_leading_sizes_is_flattened() -> None:
    _, tensor = fuse.resolve(fuse.add(torch.ones(2, 3, 5)), 6, 5)
    assert tensor is not None
    assert tuple(tensor.shape) == (6, 5)


def test_keys_of_steps_without_tensors() -> None:
    kinds = [fuse.relu(), fuse.gelu(), fuse.gelu("tanh"), fuse.silu(), fuse.clamp(0, 1), fuse.cast(torch.int8)]
    assert [fuse.resolve(bound, 2, 3)[0].key for bound in kinds] == [
        "relu", "gelu", "gelu_tanh", "silu", "clamp(0.0,1.0)", "cast.int8"
    ]  # fmt: skip
    assert fuse.resolve(fuse.scale(3), 2, 3)[0].key == "scale.tensor*3.0"


def test_invalid_arguments_raise_errors() -> None:
    with pytest.raises(ShapeError, match=r"does not broadcast to the output \[3, 5\]"):
        fuse.resolve(fuse.add(torch.ones(4)), 3, 5)
    with pytest.raises(ShapeError, match=r"axis 'row' of a 3x5 output has 3 element"):
        fuse.resolve(fuse.scale(torch.ones(5), axis="row"), 3, 5)
    with pytest.raises(TypeError, match="expected a Tensor; got float"):
        fuse.add(1.0)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="complex and sparse"):
        fuse.mul(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="a Tensor or a number; got str"):
        fuse.scale("2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lo <= hi"):
        fuse.clamp(1, 0)
    with pytest.raises(ValueError, match="'none' or 'tanh'"):
        fuse.gelu("erf")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected one of .*; got torch.int64"):
        fuse.cast(torch.int64)
