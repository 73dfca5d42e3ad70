"""Writes to packed weights. The new values are packed into the same memory, or the write raises; none is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

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

_Tensor = TypeVar("_Tensor", bound=Tensor)


def written_tensors(cls: type[_Tensor], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Tensor]:
    """Return the arguments that an operator writes to and that are tensors of class ``cls``, each once."""
    targets: list[_Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, cls) and not any(tensor is other for other in targets):
                targets.append(tensor)
    return targets


def repack(target: PackedTensor, values: Tensor) -> None:
    """Pack new values into the memory of ``target``, which its views share, and copy them into its raw form if that is
    kept.

    Raises PackedWeightError for values of another shape, dtype or device, and where their packed form does not fit.
    """
    if values.shape != target.shape or values.dtype != target.dtype or values.device != target.device:
        raise _cannot_write(target, "with another shape, dtype or device")
    matrix = values.t() if target.transposed else values
    packed = pack(matrix, layout=target.layout_name)
    try:
        for own, new in zip(target.parts, packed.data, strict=True):
            own.copy_(new)
        if target.raw_weight is not None:
            target.raw_weight.copy_(matrix)
    except RuntimeError as error:
        raise _cannot_write(target, f"({error})") from error


def _cannot_write(target: PackedTensor, how: str) -> PackedWeightError:
    """Return the error for a write that is impossible. how: the manner of the write, or the reason in brackets."""
    return PackedWeightError(
        f"a weight packed by gemmtune.optimize() as {target.layout_name!r} cannot be written to {how}: restore() the "
        "model with the handle that optimize() returned, write, and optimize it again"
    )


def replace_data(target: PackedTensor, values: Tensor) -> None:
    """Do ``target.data = values``: as in PyTorch, ``target`` stays the same object, and becomes an ordinary Parameter
    that shares the memory of ``values``. Raises PackedWeightError where that is impossible."""
    if (
        isinstance(values, type(target))
        and values.parts[0] is target.parts[0]
        and values.transposed == target.transposed
    ):
        return  # ``weight.data += x`` assigns the result at the end, and has written it to this weight before
    try:
        swap_tensors(target, nn.Parameter(values.detach(), requires_grad=target.trainable or target.requires_grad))
    except GemmtuneError as error:
        raise _cannot_write(target, f"through .data ({error})") from error


def swap_tensors(tensor: Tensor, other: Tensor) -> None:
    """Swap two tensors in place with ``torch.utils.swap_tensors``, for everything that refers to them.

    Raises PackedWeightError when something has a weak reference to one of them (as a compiled graph's guards do), or
    when an autograd graph refers to one.
    """
    try:
        torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise PackedWeightError(str(error).partition("\n")[0]) from error


def as_read_only(values: Tensor) -> Tensor:
    """Return ``values`` as a tensor that refuses writes. It is a view of an unpacked copy of a packed weight, where
    writes would be lost."""
    return ReadOnly.of(values) if type(values) is Tensor else TracedReadOnly(values)


def _refuse_writes(cls: type[Tensor], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises PackedWeightError where an operator writes to an argument of class ``cls``."""
    if written_tensors(cls, func, args, kwargs):
        raise PackedWeightError(
            f"{func}: this is a view of a weight packed by gemmtune.optimize(), and the write would be lost: "
            "write to the whole weight, or restore() the model first"
        )


class ReadOnly(Tensor):
    """An ordinary tensor that refuses writes."""

    @classmethod
    def of(cls, values: Tensor) -> ReadOnly:
        """Return a read-only view of ``values``."""
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
            result = func(*tree_map(_as_ordinary, tuple(args)), **tree_map(_as_ordinary, dict(kwargs)))
        if getattr(func, "is_view", False):
            return tree_map(lambda t: ReadOnly.of(t) if isinstance(t, Tensor) else t, result)
        return result


def _as_ordinary(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, ReadOnly) else value


class TracedReadOnly(Tensor):
    """A wrapper of a fake or functional tensor that refuses writes while a graph is traced.

    values: the wrapped tensor. ReadOnly cannot be used for it, because it is an instance of another subclass already.
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
        result = func(*tree_map(_unwrap, tuple(args)), **tree_map(_unwrap, dict(kwargs)))
        if getattr(func, "is_view", False) or func is torch.ops.aten.detach.default:
            return tree_map(lambda t: TracedReadOnly(t) if isinstance(t, Tensor) else t, result)
        return result


def _unwrap(value: Any) -> Any:
    return value.traced if isinstance(value, TracedReadOnly) else value
