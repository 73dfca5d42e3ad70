"""``PackedTensor``: a weight that is stored packed and behaves like the tensor that it was packed from.

It is a wrapper subclass of Tensor, as torchao's formats are. A product by it (``F.linear``, ``matmul``, ``mm``,
``addmm``) runs the packed kernel. Its transpose is a PackedTensor too. Every other function reads its unpacked values,
and a function that writes to it has the new values packed. The packed tensors are its inner tensors, so
``torch.compile``, ``torch.export``, AOTInductor, ``make_fx``, pickle and deepcopy support it.
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
from ..ops.products import FUNCTIONS, OPERATORS, is_transpose, product_of
from .packed_ops import fields_of, packed_of, spec_of, strides_of
from .packed_products import multiply, multiply_below_autograd
from .packed_writes import as_read_only, repack, replace_data, swap_tensors, written_tensors

__all__ = ["PackedTensor", "packed_of", "spec_of", "swap_tensors"]

_aten = torch.ops.aten
# Operators that may return their argument itself. In inference mode they reach ``__torch_dispatch__`` undecomposed.
_COMPOSED = frozenset(
    {_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device, _aten.to.other, _aten.contiguous.default}
)
_compiling = torch.compiler.is_compiling
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_SET_REQUIRES_GRAD = Tensor.requires_grad.__set__  # type: ignore[attr-defined]


class PackedTensor(Tensor):
    """A constant floating weight [N, K] in packed form, with the shape, dtype and device of the unpacked weight.

    parts: the tensors of a PackedWeight. spec: its other fields as JSON (``spec_of``). raw: the unpacked weight [N, K],
    which is kept beside the packed form if something besides its product reads it, or if products are faster by it at
    some M; each M is then served by the faster form (``dispatch.forms``). transposed: whether this is the
    weight's transpose, of shape [K, N], as ``matmul``, ``mm`` and ``addmm`` take it. trainable: whether the weight
    required a gradient before it was packed. The packed weight does not, because its integers cannot; a product by it
    while gradients are on raises GradError.
    """

    spec: str
    part_names: list[str]
    transposed: bool = False
    raw_weight: Tensor | None = None
    quantized = False  # whether products go through the subclass's own ``linear``
    trainable: bool = False

    @staticmethod
    def __new__(
        cls, parts: Sequence[Tensor], spec: str, raw: Tensor | None = None, transposed: bool = False
    ) -> PackedTensor:
        fields = fields_of(spec)
        order = -1 if transposed else 1
        result: PackedTensor = make_wrapper_subclass(
            cls, (fields["n"], fields["k"])[::order], strides_of(spec)[::order],
            dtype=getattr(torch, fields["dtype"]), device=parts[0].device,
        )  # fmt: skip
        return result

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
        """Return a PackedWeight of a floating weight as a PackedTensor that shares its tensors.

        transposed: whether to return the weight's transpose, of shape [K, N]. Raises TypeError for a quantised weight.
        """
        if packed.quant is not None:
            raise TypeError("PackedTensor.of(): expected a packed floating weight; this one is quantised")
        return cls(packed.data, spec_of(packed), raw, transposed)

    @property
    def parts(self) -> list[Tensor]:
        """The tensors of the packed weight."""
        return [getattr(self, name) for name in self.part_names]

    @property
    def packed(self) -> PackedWeight:
        """The PackedWeight, which shares the memory of this tensor."""
        result: PackedWeight | None = self.__dict__.get("_packed")
        if result is None or result.data[0] is not self.packed_0:  # type: ignore[attr-defined]
            result = packed_of(self.parts, self.spec, self.raw_weight)
            self.__dict__["_packed"] = result
        return result

    @property
    def layout_name(self) -> str:
        """The name of the packed layout."""
        return str(fields_of(self.spec)["layout"])

    def unpacked(self) -> Tensor:
        """Return the values as an ordinary tensor of this shape. Its memory is new, unless the raw weight is kept."""
        values: Tensor = (
            torch.ops.gemmtune.unpack_weight(self.parts, self.spec) if self.raw_weight is None else self.raw_weight
        )
        return values.t() if self.transposed else values

    def original(self) -> Tensor:
        """Return a copy of the weight in the form that it had before it was packed, with its present values: what a
        ``state_dict`` has for this weight."""
        values = self.unpacked().detach()
        return values if self.raw_weight is None else values.clone()

    def map_inner(self, change: Callable[[Tensor], Tensor], transposed: bool) -> PackedTensor:
        """Return a new weight whose inner tensors are the results of ``change`` on those of this one.

        transposed: whether the new weight has shape [K, N].
        """
        parts = [change(part) for part in self.parts]
        result = PackedTensor(
            parts, self.spec, None if self.raw_weight is None else change(self.raw_weight), transposed
        )
        result.trainable = self.trainable
        return result

    def linear(self, input: Any, bias: Tensor | None = None) -> Tensor:
        """Return ``F.linear`` by this weight, under any mode, transform or autocast that is active."""
        return multiply(input, self, bias)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [*self.part_names, *([] if self.raw_weight is None else ["raw_weight"])]
        return names, (self.spec, len(self.part_names), self.transposed, self.trainable)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], context: Any, size: Any, stride: Any) -> PackedTensor:
        spec, count, transposed, trainable = context
        parts = [inner[f"packed_{position}"] for position in range(count)]
        result = PackedTensor(parts, spec, inner.get("raw_weight"), transposed)
        result.trainable = trainable
        return result

    def _stable_hash_for_caching(self) -> str:
        """Return this weight's part of the key under which the compiler's cache on disk stores graphs."""
        names, context = self.__tensor_flatten__()
        tensors = [(name, getattr(self, name)) for name in names]
        described = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
        return hashlib.sha256(repr((type(self).__qualname__, context, described)).encode()).hexdigest()

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
                args[0].trainable = False  # from now on the user's own setting counts
            if func is Tensor.numpy:
                return _as_numpy(args[0], **(kwargs or {}))
            if func is Tensor.tolist:
                return args[0].unpacked().tolist()
            if func is Tensor.share_memory_:  # torch's own takes the address of memory, and a wrapper has no memory
                for name in args[0].__tensor_flatten__()[0]:
                    getattr(args[0], name).share_memory_()
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
            if func in (_aten.clone.default, to_copy) and can_stay_packed(first, kwargs):
                return first.map_inner(torch.clone, first.transposed)
            if is_transpose(func, args) and not first.quantized:
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
        targets = [] if not func._schema.is_mutable else written_tensors(PackedTensor, func, args, kwargs)
        unpacked_of = {id(tensor): tensor.original() for tensor in targets}  # a raw form keeps its values until repack

        def unwrap(value: Any) -> Any:
            """Return the unpacked values of a PackedTensor, and any other value itself."""
            if not isinstance(value, PackedTensor):
                return value
            return unpacked_of[id(value)] if id(value) in unpacked_of else value.unpacked()

        result = func(*tree_map(unwrap, tuple(args)), **tree_map(unwrap, dict(kwargs)))
        for target in targets:
            repack(target, unpacked_of[id(target)])
            if target is not first:  # torch counts the writes to the first argument alone, not those to a list's
                count_writes((target,))
        if targets:
            target_of = {id(unpacked_of[id(target)]): target for target in targets}
            return tree_map(lambda t: target_of.get(id(t), t), result)
        if getattr(func, "is_view", False):
            return tree_map(lambda t: as_read_only(t) if isinstance(t, Tensor) else t, result)
        return result


def _view_of(tensor: PackedTensor, transposed: bool) -> PackedTensor:
    """Return a view of the weight, of shape [K, N] if ``transposed``, else [N, K]."""
    if torch.is_inference_mode_enabled() and not tensor.is_inference():
        with torch.inference_mode(False):  # as in PyTorch, a view is an inference tensor if its base is one
            return _view_of(tensor, transposed)
    view = tensor.map_inner(lambda part: part, transposed)
    if "_packed" in tensor.__dict__:
        view.__dict__["_packed"] = tensor.__dict__["_packed"]
    return view


def can_stay_packed(tensor: PackedTensor, kwargs: Mapping[str, Any]) -> bool:
    """Whether a copy has the weight's dtype, device and strides, so that it may stay packed. kwargs: those of
    ``_to_copy`` or ``clone``."""
    dtype, device, format = kwargs.get("dtype"), kwargs.get("device"), kwargs.get("memory_format")
    if format not in (None, torch.preserve_format) and not (
        format is torch.contiguous_format and _is_contiguous(tensor)
    ):
        return False
    return dtype in (None, tensor.dtype) and (device is None or torch.device(device) == tensor.device)


def _is_contiguous(tensor: PackedTensor) -> bool:
    """Whether the unpacked weight is contiguous."""
    return tensor.quantized or (strides_of(tensor.spec)[1] == 1) != tensor.transposed


def _as_numpy(tensor: PackedTensor, **kwargs: Any) -> Any:
    """Return the unpacked values as a read-only numpy array. kwargs: those of ``Tensor.numpy``."""
    array = tensor.unpacked().detach().numpy(**kwargs)
    array.setflags(write=False)  # a write would be lost
    return array
