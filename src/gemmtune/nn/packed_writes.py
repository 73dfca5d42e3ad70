"""Writes to packed weights: the new values are packed into the same memory, or the write is refused, never lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.errors import GemmtuneError, PackedWeightError
from ..core.torch_compat import (
    DisableTorchDispatch,
    disabled_torch_function_impl,
    make_subclass,
    make_wrapper_subclass,
    tree_map,
)
from ..ops.packing import pack

if TYPE_CHECKING:
    from .packed_tensor import PackedTensor


def written(kind: type[PackedTensor], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[PackedTensor]:
    """The packed tensors (of the class ``kind``) that an operator writes to."""
    targets: list[PackedTensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, kind) and not any(tensor is other for other in targets):
                targets.append(tensor)
    return targets


def store(target: PackedTensor, values: Tensor) -> None:
    """Pack new values into the tensor's own memory, which its other views share. Raises PackedWeightError."""
    if values.shape != target.shape or values.dtype != target.dtype or values.device != target.device:
        raise _cannot_write(target, "with another shape, dtype or device")
    packed = pack(values.t() if target.transposed else values, layout=target.layout_name)
    try:
        for own, new in zip(target.parts, packed.data, strict=True):
            own.copy_(new)
    except RuntimeError as error:
        raise _cannot_write(target, f"({error})") from error


def _cannot_write(target: PackedTensor, how: str) -> PackedWeightError:
    return PackedWeightError(
        f"a weight packed by gemmtune.optimize() as {target.layout_name!r} cannot be written to {how}: restore() the "
        "model with the handle that optimize() returned, write, and optimize it again"
    )


def replace_data(target: PackedTensor, values: Tensor) -> None:
    """``target.data = values``: the very object becomes an ordinary Parameter that shares the memory of ``values``, as
    PyTorch has it. Raises PackedWeightError where that cannot be done."""
    if (
        isinstance(values, type(target))
        and values.parts[0] is target.parts[0]
        and values.transposed == target.transposed
    ):
        return  # what ``weight.data += x`` hands back: the write has arrived
    try:
        swap_tensors(target, nn.Parameter(values.detach(), requires_grad=target.trainable or target.requires_grad))
    except GemmtuneError as error:
        raise _cannot_write(target, f"through .data ({error})") from error


def swap_tensors(tensor: Tensor, other: Tensor) -> None:
    """``torch.utils.swap_tensors``: each becomes what the other was, wherever it is referred to.

    Raises PackedWeightError when something refers to one of them weakly (a compiled graph's guards), or a graph of
    autograd's holds it.
    """
    try:
        torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise PackedWeightError(str(error).partition("\n")[0]) from error


def read_only(values: Tensor) -> Tensor:
    """``values``, a view of an unpacked copy of a packed weight: what writes to it would be lost, and is refused."""
    return ReadOnly.of(values) if type(values) is Tensor else TracedReadOnly(values)


def _refuse_writes(kind: type[Tensor], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, kind):
            raise PackedWeightError(
                f"{func}: this is a view of a weight packed by gemmtune.optimize(), and the write would be lost: "
                "write to the whole weight, or restore() the model first"
            )


class ReadOnly(Tensor):
    """An ordinary tensor that refuses writes."""

    @classmethod
    def of(cls, values: Tensor) -> ReadOnly:
        """A view of ``values``, in the same memory."""
        view: ReadOnly = make_subclass(cls, values.detach())
        return view

    __torch_function__ = disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        _refuse_writes(ReadOnly, func, args, kwargs)
        with DisableTorchDispatch():
            result = func(*tree_map(_ordinary, tuple(args)), **tree_map(_ordinary, dict(kwargs)))
        if getattr(func, "is_view", False):
            return tree_map(lambda t: ReadOnly.of(t) if isinstance(t, Tensor) else t, result)
        return result


def _ordinary(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, ReadOnly) else value


class TracedReadOnly(Tensor):
    """A fake or functional tensor that refuses writes while a graph is traced.

    values: the tensor. It cannot be a ReadOnly, since it is an instance of another subclass.
    """

    @staticmethod
    def __new__(cls, values: Tensor) -> TracedReadOnly:
        view: TracedReadOnly = make_wrapper_subclass(
            cls, values.shape, values.stride(), values.storage_offset(), dtype=values.dtype, device=values.device
        )
        return view

    def __init__(self, values: Tensor) -> None:
        self.traced = values

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TracedReadOnly({list(self.shape)}, {self.dtype}, {self.device})"

    __torch_function__ = disabled_torch_function_impl

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["traced"], None

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], context: None, size: Any, stride: Any) -> TracedReadOnly:
        return TracedReadOnly(inner["traced"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        _refuse_writes(TracedReadOnly, func, args, kwargs)
        result = func(*tree_map(_traced, tuple(args)), **tree_map(_traced, dict(kwargs)))
        if getattr(func, "is_view", False) or func is torch.ops.aten.detach.default:
            return tree_map(lambda t: TracedReadOnly(t) if isinstance(t, Tensor) else t, result)
        return result


def _traced(value: Any) -> Any:
    return value.traced if isinstance(value, TracedReadOnly) else value
