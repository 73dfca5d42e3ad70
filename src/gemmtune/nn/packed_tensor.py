"""A weight that is stored packed and behaves as the tensor it was packed from.

``PackedTensor`` is a wrapper subclass of Tensor, as torchao's formats are. Products by one (``F.linear``, ``matmul``,
``mm``, ``addmm``) run the packed kernel, its transpose is one too, every other function reads the unpacked values, and
what writes to it packs the new values again. Its packed tensors are its inner tensors: ``torch.compile``,
``torch.export``, AOTInductor, ``make_fx``, pickle and deepcopy carry them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..core.torch_compat import DisableTorchFunctionSubclass as _PLAIN
from ..core.torch_compat import increment_version as count_writes
from ..core.torch_compat import make_wrapper_subclass, to_copy, tree_map
from ..core.weights import PackedWeight
from ..ops.composites import is_composite, without_override
from ..ops.products import FUNCTIONS, OPERATORS, product_of, transposes
from .packed_ops import fields_of, packed_of, spec_of, strides_of
from .packed_products import multiply, multiply_below_autograd
from .packed_writes import read_only, replace_data, store, swap_tensors, written

__all__ = ["PackedTensor", "packed_of", "spec_of", "swap_tensors"]

_aten = torch.ops.aten
# Operators that may return their argument itself. In inference mode they arrive before they are decomposed.
_COMPOSED = frozenset(
    {_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device, _aten.to.other, _aten.contiguous.default}
)
_compiling = torch.compiler.is_compiling
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_SET_REQUIRES_GRAD = Tensor.requires_grad.__set__  # type: ignore[attr-defined]


class PackedTensor(Tensor):
    """A constant weight [N, K] of a floating dtype, packed. Shape, dtype and device are those of the unpacked weight.

    parts: the tensors of a PackedWeight. spec: what else describes it (``spec_of``). raw: the unpacked weight [N, K],
    where that stays beside the packed form because something else reads it. transposed: whether it is the weight's
    transpose, of shape [K, N], as ``matmul``, ``mm`` and ``addmm`` take it. trainable: whether the weight required a
    gradient before it was packed. The packed one does not, because its integers cannot; a product by it where gradients
    are on is refused.
    """

    spec: str
    part_names: list[str]
    transposed: bool = False
    quantized = False  # whether its own ``linear`` multiplies by it
    trainable: bool = False

    @staticmethod
    def __new__(
        cls, parts: Sequence[Tensor], spec: str, raw: Tensor | None = None, transposed: bool = False
    ) -> PackedTensor:
        fields = fields_of(spec)
        order = -1 if transposed else 1
        made: PackedTensor = make_wrapper_subclass(
            cls, (fields["n"], fields["k"])[::order], strides_of(spec)[::order],
            dtype=getattr(torch, fields["dtype"]), device=parts[0].device,
        )  # fmt: skip
        return made

    def __init__(self, parts: Sequence[Tensor], spec: str, raw: Tensor | None = None, transposed: bool = False) -> None:
        self.spec = spec
        self.transposed = transposed
        self.part_names = [f"packed_{position}" for position in range(len(parts))]
        for name, part in zip(self.part_names, parts, strict=True):
            setattr(self, name, part)
        if raw is not None:
            self.raw_weight = raw

    @classmethod
    def of(cls, packed: PackedWeight, raw: Tensor | None = None, *, transposed: bool = False) -> PackedTensor:
        """Wrap a PackedWeight of a floating weight, whose tensors are shared; or its transpose, of shape [K, N].

        Raises TypeError for a quantised one.
        """
        if packed.quant is not None:
            raise TypeError("PackedTensor.of(): expected a packed floating weight; this one is quantised")
        return cls(packed.data, spec_of(packed), raw, transposed)

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
        return str(fields_of(self.spec)["layout"])

    def unpacked(self) -> Tensor:
        """The values as an ordinary tensor of this shape: new memory, unless the raw weight is kept."""
        kept = self.__dict__.get("raw_weight")
        values: Tensor = torch.ops.gemmtune.unpack_weight(self.parts, self.spec) if kept is None else kept
        return values.t() if self.transposed else values

    def copied(self) -> Tensor:
        """The values as an ordinary tensor of this shape, in memory of its own."""
        values = self.unpacked().detach()
        return values.clone() if "raw_weight" in self.__dict__ else values

    def original(self) -> Tensor:
        """What the weight is without gemmtune, with its values of now, in memory of its own."""
        return self.copied()

    def alike(self, change: Callable[[Tensor], Tensor], transposed: bool) -> PackedTensor:
        """The same weight, or its transpose, with ``change`` applied to every inner tensor."""
        raw = self.__dict__.get("raw_weight")
        parts = [change(part) for part in self.parts]
        made = PackedTensor(parts, self.spec, None if raw is None else change(raw), transposed)
        made.trainable = self.trainable
        return made

    def linear(self, input: Any, bias: Tensor | None = None) -> Tensor:
        """``F.linear`` by this weight, in whatever state this thread is in."""
        return multiply(input, self, bias)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [*self.part_names, *(["raw_weight"] if "raw_weight" in self.__dict__ else [])]
        return names, (self.spec, len(self.part_names), self.transposed, self.trainable)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], context: Any, size: Any, stride: Any) -> PackedTensor:
        spec, count, transposed, trainable = context
        parts = [inner[f"packed_{position}"] for position in range(count)]
        made = PackedTensor(parts, spec, inner.get("raw_weight"), transposed)
        made.trainable = trainable
        return made

    def _stable_hash_for_caching(self) -> str:
        """Under what the compiler's cache on disk knows graphs with this weight."""
        names, context = self.__tensor_flatten__()
        tensors = [(name, getattr(self, name)) for name in names]
        shown = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
        return hashlib.sha256(repr((type(self).__qualname__, context, shown)).encode()).hexdigest()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedTensor({list(self.shape)}, {self.dtype}, {self.device}, layout={self.layout_name!r})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.linear:
            weight = args[1] if len(args) > 1 else (kwargs or {}).get("weight")
            if isinstance(weight, PackedTensor) and not weight.transposed:
                return multiply(*args, **(kwargs or {}))
        product = product_of(FUNCTIONS, func, args, kwargs or {})
        if product is not None:
            weight = product.weight
            if isinstance(weight, PackedTensor) and weight.transposed == product.transposed:
                return multiply(product.input, weight, product.bias)
        if is_composite(func) and not torch.compiler.is_dynamo_compiling():
            return without_override(func)(*args, **(kwargs or {}))
        if not _compiling():
            if func == _SET_DATA:
                return replace_data(args[0], args[1])
            if func in (Tensor.requires_grad_, _SET_REQUIRES_GRAD):
                args[0].trainable = False  # what it was before it was packed no longer counts
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
                return _view_of(first, first.transposed)
            if func in (_aten.clone.default, to_copy) and stays(first, kwargs):
                return first.alike(torch.clone, first.transposed)
            if transposes(func, args) and not first.quantized:
                return _view_of(first, not first.transposed)
        product = product_of(OPERATORS, func, args, kwargs)
        if product is not None:
            weight = product.weight
            if isinstance(weight, PackedTensor) and weight.transposed == product.transposed:
                result = multiply_below_autograd(product, weight)
                if result is not None:
                    return result
        if torch.is_inference_mode_enabled() and func in _COMPOSED:
            return func.decompose(*args, **kwargs)
        targets = [] if not func._schema.is_mutable else written(PackedTensor, func, args, kwargs)
        plain = {id(tensor): tensor.unpacked() for tensor in targets}

        def unwrap(value: Any) -> Any:
            if not isinstance(value, PackedTensor):
                return value
            return plain[id(value)] if id(value) in plain else value.unpacked()

        result = func(*tree_map(unwrap, tuple(args)), **tree_map(unwrap, dict(kwargs)))
        for target in targets:
            store(target, plain[id(target)])
            if target is not first:  # torch counts the writes to the first argument alone, not those to a list's
                count_writes((target,))
        if targets:
            back = {id(plain[id(target)]): target for target in targets}
            return tree_map(lambda t: back.get(id(t), t), result)
        if getattr(func, "is_view", False):
            return tree_map(lambda t: read_only(t) if isinstance(t, Tensor) else t, result)
        return result


def _view_of(tensor: PackedTensor, transposed: bool) -> PackedTensor:
    """The weight or its transpose, in the same memory."""
    if torch.is_inference_mode_enabled() and not tensor.is_inference():
        with torch.inference_mode(False):  # as PyTorch has it: a view is an inference tensor if its base is one
            return _view_of(tensor, transposed)
    view = tensor.alike(lambda part: part, transposed)
    if "_packed" in tensor.__dict__:
        view.__dict__["_packed"] = tensor.__dict__["_packed"]
    return view


def stays(tensor: PackedTensor, kwargs: Mapping[str, Any]) -> bool:
    """Whether a copy keeps dtype, device and strides, so that the weight may stay packed."""
    dtype, device, format = kwargs.get("dtype"), kwargs.get("device"), kwargs.get("memory_format")
    if format not in (None, torch.preserve_format) and not (format is torch.contiguous_format and _dense(tensor)):
        return False
    return dtype in (None, tensor.dtype) and (device is None or torch.device(device) == tensor.device)


def _dense(tensor: PackedTensor) -> bool:
    return tensor.quantized or (strides_of(tensor.spec)[1] == 1) != tensor.transposed


def _as_numpy(tensor: PackedTensor, **kwargs: Any) -> Any:
    array = tensor.unpacked().detach().numpy(**kwargs)
    array.setflags(write=False)  # a write would be lost
    return array
