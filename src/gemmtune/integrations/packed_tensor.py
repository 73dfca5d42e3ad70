"""A weight that is stored packed and behaves as the tensor it was packed from.

``PackedTensor`` is a wrapper subclass of Tensor, as torchao's formats are. ``F.linear`` by one runs the packed kernel,
every other function reads the unpacked values, and what writes to it packs the new values again. Its packed tensors
are its inner tensors: ``torch.compile``, ``torch.export``, AOTInductor, ``make_fx``, pickle and deepcopy carry them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..backends.base import PackedWeight
from ..backends.memory import is_subclass
from ..checks import GradError
from ..dispatch.guards import autocasting, needs_dispatcher, transformed
from ..errors import GemmtuneError, PackedWeightError
from ..launch import serve
from ..ops import linear
from ..packing import pack, unpack
from ..torch_internals import (
    DisableTorchDispatch,
    check,
    disabled_torch_function_impl,
    make_subclass,
    make_wrapper_subclass,
    to_copy,
    tree_map,
)
from ..torch_internals import DisableTorchFunctionSubclass as _PLAIN
from ..torch_internals import get_tracing_state as _tracing
from ..torch_internals import increment_version as count_writes
from ..torch_internals import set_tracing_state as _set_tracing

_aten = torch.ops.aten
_compiling = torch.compiler.is_compiling
_threads = torch.get_num_threads
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class PackedTensor(Tensor):
    """A constant weight [N, K] of a floating dtype, packed. Shape, dtype and device are those of the unpacked weight.

    parts: the tensors of a PackedWeight. spec: what else describes it (``spec_of``). raw: the unpacked weight, where
    that stays beside the packed form because something else reads it.
    """

    spec: str
    part_names: list[str]

    @staticmethod
    def __new__(cls, parts: Sequence[Tensor], spec: str, raw: Tensor | None = None) -> PackedTensor:
        fields = _fields(spec)
        made: PackedTensor = make_wrapper_subclass(
            cls, (fields["n"], fields["k"]), dtype=getattr(torch, fields["dtype"]), device=parts[0].device
        )
        return made

    def __init__(self, parts: Sequence[Tensor], spec: str, raw: Tensor | None = None) -> None:
        self.spec = spec
        self.part_names = [f"packed_{place}" for place in range(len(parts))]
        for name, part in zip(self.part_names, parts, strict=True):
            setattr(self, name, part)
        if raw is not None:
            self.raw_weight = raw

    @classmethod
    def of(cls, packed: PackedWeight, raw: Tensor | None = None) -> PackedTensor:
        """Wrap a PackedWeight of a floating weight, whose tensors are shared. Raises TypeError for a quantised one."""
        if packed.quant is not None:
            raise TypeError("PackedTensor.of(): expected a packed floating weight; this one is quantised")
        return cls(packed.data, spec_of(packed), raw)

    @property
    def parts(self) -> list[Tensor]:
        """The tensors that hold the packed weight."""
        return [getattr(self, name) for name in self.part_names]

    @property
    def packed(self) -> PackedWeight:
        """The PackedWeight, which shares its memory."""
        made: PackedWeight | None = self.__dict__.get("_packed")
        if made is None or made.data[0] is not self.packed_0:  # type: ignore[attr-defined]
            made = packed_of(self.parts, self.spec)
            self.__dict__["_packed"] = made
        return made

    @property
    def layout_name(self) -> str:
        """The name of the packed layout."""
        return str(_fields(self.spec)["layout"])

    def unpacked(self) -> Tensor:
        """The weight [N, K] as an ordinary tensor: new memory, unless the raw weight is kept."""
        if "raw_weight" in self.__dict__:
            return self.raw_weight
        values: Tensor = torch.ops.gemmtune.unpack_weight(self.parts, self.spec)
        return values

    def copied(self) -> Tensor:
        """The weight [N, K] as an ordinary tensor in memory of its own."""
        values = self.unpacked().detach()
        return values.clone() if "raw_weight" in self.__dict__ else values

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, int]]:
        names = [*self.part_names, *(["raw_weight"] if "raw_weight" in self.__dict__ else [])]
        return names, (self.spec, len(self.part_names))

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], context: tuple[str, int], size: Any, stride: Any
    ) -> PackedTensor:
        spec, count = context
        return PackedTensor([inner[f"packed_{place}"] for place in range(count)], spec, inner.get("raw_weight"))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedTensor({list(self.shape)}, {self.dtype}, {self.device}, layout={self.layout_name!r})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.linear:
            weight = args[1] if len(args) > 1 else (kwargs or {}).get("weight")
            if isinstance(weight, PackedTensor):
                return _linear(*args, **(kwargs or {}))
        if not _compiling():
            if func == _SET_DATA:
                return _replace(args[0], args[1])
            if func is Tensor.numpy:
                return _as_numpy(args[0], **(kwargs or {}))
            if func is Tensor.tolist:
                return args[0].unpacked().tolist()
            if func is Tensor.share_memory_:  # torch's own takes the address of memory that a wrapper has not
                for part in args[0].parts:
                    part.share_memory_()
                return args[0]
        with _PLAIN():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, PackedTensor):
            if func in (_aten.detach.default, _aten.alias.default):
                return _alike(first, lambda part: part)
            if func is _aten.clone.default:
                return _alike(first, torch.clone)
            if func is to_copy and _stays(first, kwargs):
                return _alike(first, torch.clone)
        written = [] if not func._schema.is_mutable else _written(func, args, kwargs)
        plain = {id(tensor): tensor.unpacked() for tensor in written}

        def unwrap(value: Any) -> Any:
            if not isinstance(value, PackedTensor):
                return value
            return plain[id(value)] if id(value) in plain else value.unpacked()

        result = func(*tree_map(unwrap, tuple(args)), **tree_map(unwrap, dict(kwargs)))
        for target in written:
            _store(target, plain[id(target)])
            if target is not first:  # torch counts the writes to the first argument alone, not those to a list's
                count_writes((target,))
        if written:
            back = {id(plain[id(target)]): target for target in written}
            return tree_map(lambda t: back.get(id(t), t), result)
        if getattr(func, "is_view", False):
            return tree_map(lambda t: _ReadOnly.of(t) if isinstance(t, Tensor) else t, result)
        return result


def spec_of(packed: PackedWeight) -> str:
    """What describes a packed floating weight beside its tensors, as JSON."""
    return json.dumps(
        {
            "layout": packed.layout, "n": packed.n, "k": packed.k, "dtype": packed.dtype, "machine": packed.machine,
            "raw_order": packed.raw_order, "meta": dict(packed.meta),
        }
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _fields(spec: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(spec)
    return fields


def packed_of(parts: Sequence[Tensor], spec: str) -> PackedWeight:
    """The PackedWeight of these tensors. Raises TypeError, ValueError or KeyError for a malformed ``spec``."""
    return PackedWeight(data=tuple(parts), **_fields(spec))


def _alike(tensor: PackedTensor, change: Callable[[Tensor], Tensor]) -> PackedTensor:
    raw = tensor.__dict__.get("raw_weight")
    return PackedTensor([change(part) for part in tensor.parts], tensor.spec, None if raw is None else change(raw))


def _stays(tensor: PackedTensor, kwargs: Mapping[str, Any]) -> bool:
    """Whether a conversion keeps dtype and device, so that the weight may stay packed."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    return dtype in (None, tensor.dtype) and (device is None or torch.device(device) == tensor.device)


# --- products ----------------------------------------------------------------------------------------------------


def _linear(input: Any, weight: PackedTensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` by a packed weight, in whatever state this thread is in."""
    if torch.is_grad_enabled() and weight.requires_grad:
        raise GradError(
            "linear(): the weight was packed by gemmtune.optimize() and requires grad, but its packed form has no "
            "gradient: wrap the call in torch.no_grad(), call model.requires_grad_(False) before optimize(), or "
            "restore() the model to train it"
        )
    if _compiling():
        return _autocast(input, weight, bias) if autocasting(input.device.type) else _op(input, weight, bias)
    if transformed():  # jit's tracer among them: they see an ordinary weight
        return functional.linear(input, weight.unpacked(), bias)
    packed = weight.packed
    try:  # what ops.linear looks up, a call earlier
        key = ("linear", input.shape, packed._key, bias is None, _threads(), torch.is_grad_enabled())
    except (AttributeError, RuntimeError):
        return functional.linear(input, weight.unpacked(), bias)  # PyTorch's words for what is no tensor
    given = (input, packed) if bias is None else (input, packed, bias)
    result = serve(key, given, (input,) if bias is None else (input, bias))
    if result is not None:
        return result
    if not isinstance(input, Tensor):
        return functional.linear(input, weight.unpacked(), bias)
    if autocasting(input.device.type):
        return _autocast(input, weight, bias)
    return _product(input, weight, bias)


def _product(input: Tensor, weight: PackedTensor, bias: Tensor | None) -> Tensor:
    """The packed kernel, as an operator where something has to see it or to differentiate it."""
    visible = _is_subclassed(input) or _is_subclassed(bias) or needs_dispatcher()
    if visible or (torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad))):
        return _op(input, weight, bias)
    return linear(input, weight.packed, bias)


def _is_subclassed(tensor: Tensor | None) -> bool:
    return tensor is not None and is_subclass(tensor)


def _op(input: Tensor, weight: PackedTensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.gemmtune.packed_linear(input, weight.parts, weight.spec, bias)
    return out


def _autocast(input: Tensor, weight: PackedTensor, bias: Tensor | None) -> Tensor:
    """Autocast's dtype is served where the weight has it; the packed kernel multiplies no other."""
    kind, dtype = input.device.type, torch.get_autocast_dtype(input.device.type)
    if weight.dtype != dtype or not input.is_floating_point():
        return functional.linear(input, weight.unpacked(), bias)
    with torch.autocast(kind, enabled=False):
        rounded = input.to(dtype)
        shift = None if bias is None else bias.to(dtype)
        return _op(rounded, weight, shift) if _compiling() else _product(rounded, weight, shift)


_LIBRARY = torch.library.Library("gemmtune", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("packed_linear(Tensor input, Tensor[] weight, str spec, Tensor? bias) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.define("unpack_weight(Tensor[] weight, str spec) -> Tensor")  # type: ignore[no-untyped-call]


@contextmanager
def _untraced() -> Iterator[None]:
    """Hide from jit's tracer what an operator of ours does inside: it has recorded the operator itself."""
    state = _tracing()
    if state is None:
        yield
        return
    _set_tracing(None)
    try:
        yield
    finally:
        _set_tracing(state)


def _run_linear(input: Tensor, weight: Sequence[Tensor], spec: str, bias: Tensor | None) -> Tensor:
    with _untraced():
        return linear(input, packed_of(weight, spec), bias)


def _fake_linear(input: Tensor, weight: Sequence[Tensor], spec: str, bias: Tensor | None) -> Tensor:
    fields = _fields(spec)
    check(input.shape[-1] == fields["k"], lambda: f"linear(): expected input [.., {fields['k']}]")
    return input.new_empty((*input.shape[:-1], fields["n"]))


def _run_unpack(weight: Sequence[Tensor], spec: str) -> Tensor:
    with _untraced():
        raw = unpack(packed_of(weight, spec))
        assert isinstance(raw, Tensor)
        return raw.contiguous()


def _fake_unpack(weight: Sequence[Tensor], spec: str) -> Tensor:
    fields = _fields(spec)
    return weight[0].new_empty((fields["n"], fields["k"]), dtype=getattr(torch, fields["dtype"]))


for _device in ("CPU", "CUDA", "MkldnnCPU"):
    _LIBRARY.impl("packed_linear", _run_linear, _device)  # type: ignore[no-untyped-call]
    _LIBRARY.impl("unpack_weight", _run_unpack, _device)  # type: ignore[no-untyped-call]
torch.library.register_fake("gemmtune::packed_linear", _fake_linear, lib=_LIBRARY)
torch.library.register_fake("gemmtune::unpack_weight", _fake_unpack, lib=_LIBRARY)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, ctx.spec, bias = inputs
    ctx.save_for_backward(*weight)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, list[None], None, Tensor | None]:
    """Gradients of the input and the bias; a packed weight has none."""
    input_grad = bias_grad = None
    weight = list(ctx.saved_tensors)
    if ctx.needs_input_grad[0]:
        input_grad = grad @ torch.ops.gemmtune.unpack_weight(weight, ctx.spec)
    if ctx.has_bias and ctx.needs_input_grad[3]:
        bias_grad = grad.reshape(-1, grad.shape[-1]).sum(0)
    return input_grad, [None] * len(weight), None, bias_grad


torch.library.register_autograd("gemmtune::packed_linear", _backward, setup_context=_setup, lib=_LIBRARY)


# --- writes ------------------------------------------------------------------------------------------------------


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[PackedTensor]:
    """The packed tensors that an operator writes to."""
    found: list[PackedTensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, PackedTensor) and not any(tensor is other for other in found):
                found.append(tensor)
    return found


def _store(target: PackedTensor, values: Tensor) -> None:
    """Pack new values into the tensor's own memory, which its other views share."""
    if values.shape != target.shape or values.dtype != target.dtype or values.device != target.device:
        raise _cannot_write(target, "with another shape, dtype or device")
    packed = pack(values, layout=target.layout_name)
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


def _replace(target: PackedTensor, values: Tensor) -> None:
    """``target.data = values``: the very object becomes an ordinary Parameter that shares the memory of ``values``, as
    PyTorch has it. Raises PackedWeightError where that cannot be done."""
    if isinstance(values, PackedTensor) and values.packed_0 is target.packed_0:  # type: ignore[attr-defined]
        return  # what ``weight.data += x`` hands back: the write has arrived
    try:
        swap_tensors(target, nn.Parameter(values.detach(), requires_grad=target.requires_grad))
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


def _as_numpy(tensor: PackedTensor, **kwargs: Any) -> Any:
    array = tensor.unpacked().detach().numpy(**kwargs)
    array.setflags(write=False)  # a write would be lost
    return array


class _ReadOnly(Tensor):
    """A view of an unpacked copy of a packed weight: what writes to it would be lost, and is refused."""

    @classmethod
    def of(cls, values: Tensor) -> _ReadOnly:
        made: _ReadOnly = make_subclass(cls, values.detach())
        return made

    __torch_function__ = disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, _ReadOnly):
                raise PackedWeightError(
                    f"{func}: this is a view of a weight packed by gemmtune.optimize(), and the write would be lost: "
                    "write to the whole weight, or restore() the model first"
                )
        with DisableTorchDispatch():
            result = func(*tree_map(_ordinary, tuple(args)), **tree_map(_ordinary, dict(kwargs)))
        if getattr(func, "is_view", False):
            return tree_map(lambda t: _ReadOnly.of(t) if isinstance(t, Tensor) else t, result)
        return result


def _ordinary(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, _ReadOnly) else value
