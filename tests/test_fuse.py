"""Constructors of epilogue steps: axes inferred from shapes, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gemmtune import fuse
from gemmtune.core.checks import DtypeError, ShapeError
from gemmtune.core.epilogue import Step


def resolve(bound: fuse.BoundStep, m: int, n: int, batch: int | None = None) -> tuple[Step, Tensor | None]:
    """Return the Step and the tensor, if it has one, of an epilogue of one step."""
    (step,), tensors = fuse.resolve([bound], m, n, batch)
    return step, (tensors[0] if tensors else None)


@pytest.mark.parametrize(
    ("shape", "axis", "bound"),
    [((), "tensor", ()), ((1,), "tensor", ()), ((1, 1), "tensor", ()), ((5,), "col", (5,)), ((1, 5), "col", (5,)),
     ((3, 1), "row", (3,)), ((3, 5), "full", (3, 5))],
)  # fmt: skip
def test_axis_is_inferred_by_broadcasting(shape: tuple[int, ...], axis: str, bound: tuple[int, ...]) -> None:
    step, tensor = resolve(fuse.add(torch.ones(shape), value=2.0), 3, 5)
    assert (step.kind, step.axis, step.dtype, step.value) == ("add", axis, "float32", 2.0)
    assert tensor is not None
    assert tuple(tensor.shape) == bound


@pytest.mark.parametrize(
    ("shape", "axis", "bound"),
    [((1,), "tensor", ()), ((5,), "col", (5,)), ((3, 1), "full", (2, 3, 5)), ((2, 1, 1), "full", (2, 3, 5)),
     ((3, 5), "full", (2, 3, 5)), ((2, 3, 5), "full", (2, 3, 5))],
)  # fmt: skip
def test_axis_of_a_batch_is_a_column_or_the_whole_output(
    shape: tuple[int, ...], axis: str, bound: tuple[int, ...]
) -> None:
    values = torch.randn(shape)
    step, tensor = resolve(fuse.mul(values), 3, 5, batch=2)
    assert (step.kind, step.axis) == ("mul", axis)
    assert tensor is not None
    assert tuple(tensor.shape) == bound
    assert torch.equal(tensor.expand(2, 3, 5), values.expand(2, 3, 5))


def test_axis_given_by_the_caller_is_kept() -> None:
    for bound, axis in ((fuse.bias(torch.ones(1)), "col"), (fuse.scale(torch.ones(1), axis="row"), "row")):
        step, tensor = resolve(bound, 1, 1)
        assert step.axis == axis
        assert tensor is not None
        assert tuple(tensor.shape) == (1,)
    step, tensor = resolve(fuse.scale(torch.ones(3, 1), axis="row"), 3, 5)
    assert (step.kind, step.axis) == ("scale", "row")
    assert tensor is not None
    assert tuple(tensor.shape) == (3,)


def test_tag_tells_steps_of_other_axes_apart() -> None:
    tensor = torch.ones(3)
    assert fuse.bias(tensor).tag == "bias.col.float32/col"
    assert fuse.add(tensor, 0.5).tag == "add.full.float32*0.5/None"
    assert fuse.scale(tensor, axis="row").tag == "scale.row.float32/row"
    assert fuse.relu().tag == "relu/None"


def test_residual_with_leading_sizes_is_flattened() -> None:
    residual = torch.randn(2, 3, 5)
    _, tensor = resolve(fuse.add(residual), 6, 5)
    assert tensor is not None
    assert torch.equal(tensor, residual.reshape(6, 5))


@pytest.mark.parametrize(
    ("shape", "batch"),
    [((2, 3, 1), None), ((4, 3, 5), None), ((2, 3, 5), 3), ((1, 2, 3, 5), 2), ((6, 5), 2)],
)
def test_residual_that_does_not_broadcast_raises_shape_error(shape: tuple[int, ...], batch: int | None) -> None:
    with pytest.raises(ShapeError, match=r"^fuse\.add\(\): a tensor of shape .* does not broadcast"):
        resolve(fuse.add(torch.ones(shape)), 6 if batch is None else 3, 5, batch)


def test_tensors_of_several_steps_are_in_their_order() -> None:
    bias, residual = torch.ones(5), torch.ones(3, 5)
    steps, tensors = fuse.resolve([fuse.bias(bias), fuse.relu(), fuse.add(residual)], 3, 5)
    assert [(step.kind, step.axis) for step in steps] == [("bias", "col"), ("relu", "full"), ("add", "full")]
    assert [tensor.data_ptr() for tensor in tensors] == [bias.data_ptr(), residual.data_ptr()]
    assert fuse.resolve([], 3, 5) == ((), ())


def test_keys_of_steps_without_tensors() -> None:
    kinds = [fuse.relu(), fuse.gelu(), fuse.gelu("tanh"), fuse.silu(), fuse.clamp(0, 1), fuse.cast(torch.int8)]
    resolved = [resolve(bound, 2, 3) for bound in kinds]
    assert [step.key for step, _ in resolved] == [
        "relu", "gelu", "gelu_tanh", "silu", "clamp(0.0,1.0)", "cast.int8"
    ]  # fmt: skip
    assert all(tensor is None for _, tensor in resolved)
    assert resolve(fuse.scale(3), 2, 3)[0].key == "scale.tensor*3.0"
    assert resolve(fuse.clamp(2, 2), 2, 3)[0].key == "clamp(2.0,2.0)"
    assert resolve(fuse.clamp(), 2, 3)[0].key == "clamp(-inf,inf)"


class WithoutExpand(Tensor):
    """A tensor subclass that implements no operators."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.expand:
            raise NotImplementedError("no expand")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclass_without_expand_says_so_itself() -> None:
    with pytest.raises(NotImplementedError, match="no expand"):
        resolve(fuse.add(torch.ones(3, 5).as_subclass(WithoutExpand)), 3, 5)


def test_invalid_arguments_raise_errors() -> None:
    with pytest.raises(ShapeError, match=r"does not broadcast to the output \[3, 5\]"):
        resolve(fuse.add(torch.ones(4)), 3, 5)
    with pytest.raises(ShapeError, match=r"axis 'row' of a 3x5 output has 3 element"):
        resolve(fuse.scale(torch.ones(5), axis="row"), 3, 5)
    with pytest.raises(ShapeError, match=r"^fuse\.bias\(\): a tensor for axis 'col' of a 3x5 output has 5 element"):
        resolve(fuse.bias(torch.ones(1)), 3, 5)
    with pytest.raises(TypeError, match="expected a Tensor; got float"):
        fuse.add(1.0)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="complex and sparse"):
        fuse.mul(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(DtypeError, match=r"complex and sparse .* got torch\.float32, torch\.sparse_coo"):
        fuse.mul(torch.ones(2).to_sparse())
    for value in ("2", True, None):
        with pytest.raises(TypeError, match=f"a Tensor or a number; got {type(value).__name__}"):
            fuse.scale(value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lo <= hi"):
        fuse.clamp(1, 0)
    with pytest.raises(ValueError, match="lo <= hi"):
        fuse.clamp(float("nan"), 0)
    with pytest.raises(ValueError, match="'none' or 'tanh'"):
        fuse.gelu("erf")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected one of .*; got torch.int64"):
        fuse.cast(torch.int64)
