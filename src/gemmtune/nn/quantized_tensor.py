"""``QuantizedTensor``: a quantised weight that gemmtune's kernels serve, instead of one of torchao's tensor subclasses.

It is a PackedTensor whose packed weight has scales, or whose quantised weight is not packed. ``F.linear`` by it
quantises the activations as torchao's format says, and runs ``mixed_mm``, ``int_mm`` or ``scaled_mm``. Every other
function reads dequantised values. ``original()`` returns torchao's tensor again, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import fuse
from ..backends.aten.steps import dtype_name
from ..core.errors import PackedWeightError
from ..core.problem import Problem, Quant
from ..core.torch_compat import make_wrapper_subclass, to_copy
from ..core.weights import PackedWeight, QuantWeight
from ..dispatch.torch_state import in_transform, is_autocast_on
from ..ops import int4pack, torchao_formats
from ..ops.int_mm import int_mm
from ..ops.mixed_mm import mixed_mm
from ..ops.packing import pack, unpack
from ..ops.scaled_mm import scaled_mm
from ..ops.torchao_formats import QuantizedWeight, inner_tensors
from .packed_ops import LIBRARY, fields_of, packed_fields, untraced
from .packed_products import needs_operator
from .packed_tensor import PackedTensor, can_stay_packed
from .packed_writes import written_tensors

_aten = torch.ops.aten
_compiling = torch.compiler.is_compiling


class QuantizedTensor(PackedTensor):
    """A constant quantised weight [N, K], with the shape and device of the weight and the dtype that it has when it is
    dequantised.

    "The source" is torchao's tensor that it was made from.

    parts: the tensors of the packed weight (or the raw ones); then, for ``int_mm`` and ``scaled_mm``, the weight's
    scales; then the raw integers [N, K], if a weight for ``int_mm`` is kept in both forms; then the source's inner
    tensors, except that of its integers. spec: the description of the parts, as JSON.
    template: what is needed to make the source again, as (class, context of ``__tensor_flatten__``, names of the inner
    tensors, name of the inner tensor that has the integers).
    """

    quantized = True
    template: tuple[type[Tensor], Any, tuple[str, ...], str]

    @staticmethod
    def __new__(cls, parts: Sequence[Tensor], spec: str, template: Any) -> QuantizedTensor:
        fields = fields_of(spec)
        result: QuantizedTensor = make_wrapper_subclass(
            cls, (fields["n"], fields["k"]), dtype=getattr(torch, fields["dtype"]), device=parts[0].device
        )
        return result

    def __init__(self, parts: Sequence[Tensor], spec: str, template: Any) -> None:
        super().__init__(parts, spec)
        self.template = template

    @classmethod
    def of_weight(
        cls, weight: QuantizedWeight, packed: PackedWeight | None, *, keeps_raw: bool = False
    ) -> QuantizedTensor:
        """Return ``weight`` as a QuantizedTensor with the tensors of ``packed``; if that is None, with the tensors of
        ``weight`` itself. The tensors are shared.

        keeps_raw: whether a packed weight for ``int_mm`` keeps its raw integers, too, which serve some M.
        """
        parts: list[Tensor]
        fields = _fields(weight.shape, weight.dtype, weight.bits, weight.group_size, weight.zero_point is not None)
        fields["activation"], fields["product"] = weight.activation, weight.product
        fields["autocast"], fields["tiles"] = weight.autocast, weight.tiles
        if packed is None:
            parts = [weight.data]
            if weight.product == "mixed_mm":
                parts += [weight.scale, *([] if weight.zero_point is None else [weight.zero_point])]
        else:
            parts, fields["packed"] = list(packed.data), _packed_fields(packed)
        fields["count"] = len(parts)
        if weight.product != "mixed_mm":
            parts.append(weight.scale.float())
        if keeps_raw:
            fields["raw"] = len(parts)
            parts.append(weight.data)
        source = inner_tensors(weight.source)
        source_class = type(weight.source)
        template = (source_class, weight.source.__tensor_flatten__()[1], tuple(source), weight.data_name)  # type: ignore[attr-defined]
        parts += [tensor for name, tensor in source.items() if name != weight.data_name]
        return cls(parts, json.dumps(fields), template)

    @property
    def packed(self) -> PackedWeight:
        """The PackedWeight. Raises PackedWeightError if the weight is not packed."""
        operand = self.operand
        if not isinstance(operand, PackedWeight):
            raise PackedWeightError("this quantised weight is not packed: it lies as it did")
        return operand

    @property
    def operand(self) -> Tensor | QuantWeight | PackedWeight:
        """The B operand of this weight's product, which shares the weight's memory."""
        cached = self.__dict__.get("_operand")
        if cached is None or cached[0] is not self.packed_0:  # type: ignore[attr-defined]
            cached = self.__dict__["_operand"] = (self.packed_0, operand_of(self.parts, self.spec))  # type: ignore[attr-defined]
        operand: Tensor | QuantWeight | PackedWeight = cached[1]
        return operand

    @property
    def layout_name(self) -> str:
        """The name of the packed layout; ``raw`` for a weight that is not packed."""
        packed = fields_of(self.spec).get("packed")
        return "raw" if packed is None else str(packed["layout"])

    def unpacked(self) -> Tensor:
        """Return the dequantised weight [N, K], in new memory."""
        values: Tensor = torch.ops.gemmtune.dequantize_weight(self.parts, self.spec)
        return values

    def dequantize(self, output_dtype: torch.dtype | None = None) -> Tensor:
        """Return the dequantised weight [N, K]. torchao's tensors have this method too.

        output_dtype: the result's dtype; by default this tensor's.
        """
        values = self.unpacked()
        return values if output_dtype is None else values.to(output_dtype)

    def original(self) -> Tensor:
        """Return torchao's tensor that this weight was made from, with the same bits in new memory."""
        source_class, context, names, data_name = self.template
        rest = iter(self.parts[len(self.parts) - len(names) + 1 :])
        inner = {
            name: _source_data(self.parts, self.spec) if name == data_name else next(rest).clone() for name in names
        }
        result: Tensor = source_class.__tensor_unflatten__(inner, context, self.shape, self.stride())  # type: ignore[attr-defined]
        return result

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.part_names), (self.spec, self.template, self.trainable)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], context: Any, size: Any, stride: Any) -> QuantizedTensor:
        spec, template, trainable = context
        result = QuantizedTensor([inner[f"packed_{index}"] for index in range(len(inner))], spec, template)
        result.trainable = trainable
        return result

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"QuantizedTensor({list(self.shape)}, {self.dtype}, {self.device}, layout={self.layout_name!r}, "
            f"of={self.template[0].__name__})"
        )

    def map_inner(self, change: Callable[[Tensor], Tensor], transposed: bool) -> QuantizedTensor:
        result = QuantizedTensor([change(part) for part in self.parts], self.spec, self.template)
        result.trainable = self.trainable
        return result

    def linear(self, input: Any, bias: Tensor | None = None) -> Tensor:
        """Return ``F.linear`` by this weight, under any mode, transform or autocast that is active."""
        if not isinstance(input, Tensor) or not input.is_floating_point() or input.dim() < 1:
            return functional.linear(input, self.unpacked(), bias)
        if in_transform():  # torch.jit's tracer counts as one: transforms get the dequantised weight
            return functional.linear(input, self.unpacked().to(input.dtype), bias)
        rows = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
        spec = fields_of(self.spec)
        values, scale = torchao_formats.quantize(rows, spec["activation"]) if rows.numel() else (rows, None)
        dtype = input.dtype
        if spec["autocast"] and is_autocast_on(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
            values, bias = values.to(dtype), None if bias is None else bias.to(dtype)
        if _compiling() or needs_operator(values, bias):
            out = torch.ops.gemmtune.quantized_linear(values, scale, self.parts, self.spec, bias, dtype)
        else:
            weight_scale = getattr(self, self.part_names[spec["count"]]) if spec["product"] != "mixed_mm" else None
            out = _multiply(values, scale, self.operand, weight_scale, spec, bias, dtype)
        result: Tensor = out if input.dim() == 2 else out.view(*input.shape[:-1], self.shape[0])
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, QuantizedTensor):
            if func is _aten.copy_.default:
                return first._copy_from(args[1])
            if func is to_copy and not can_stay_packed(first, kwargs or {}):
                return func(first.original(), **(kwargs or {}))  # a move or a cast returns torchao's tensor again
        if func._schema.is_mutable and written_tensors(cls, func, args, kwargs or {}):
            raise PackedWeightError(
                f"{func}: a quantised weight that gemmtune.optimize() serves takes no such write: restore() "
                "the model with the handle that optimize() returned, write, and optimize it again"
            )
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _copy_from(self, values: Tensor) -> Tensor:
        """Do ``copy_`` from a QuantizedTensor or a tensor of the source's class, as ``load_state_dict`` does.

        Raises PackedWeightError for other values, and for values with another kind of scales or activations.
        """
        if isinstance(values, QuantizedTensor):
            values = values.original()
        if type(values) is not self.template[0] or values.shape != self.shape:
            raise PackedWeightError(
                f"copy_(): a quantised weight made from a {self.template[0].__name__} of shape {list(self.shape)} "
                f"takes the values of another such tensor; got a {type(values).__name__} of shape "
                f"{list(values.shape)}. restore() the model, write, and optimize it again"
            )
        try:
            new = packed_like(torchao_formats.read(values), self)
            is_compatible = new.spec == self.spec and len(new.parts) == len(self.parts)
        except torchao_formats.UnknownFormatError as error:
            raise PackedWeightError(f"copy_(): the new weight {error}") from error
        if not is_compatible:
            raise PackedWeightError(
                "copy_(): the new weight has another kind of scales or activations than the one that was optimized: "
                "restore() the model, write, and optimize it again"
            )
        for own, part in zip(self.parts, new.parts, strict=True):
            own.copy_(part)
        return self


def packed_like(weight: QuantizedWeight, like: QuantizedTensor) -> QuantizedTensor:
    """Return ``weight`` as a QuantizedTensor in the forms of ``like``."""
    layout, keeps_raw = like.layout_name, "raw" in fields_of(like.spec)
    packed = None if layout == "raw" else pack_quantized(weight, layout=layout)
    return QuantizedTensor.of_weight(weight, packed, keeps_raw=keeps_raw)


def pack_quantized(weight: QuantizedWeight, *, layout: str, problems: Sequence[Problem] | None = None) -> PackedWeight:
    """Return a quantised weight packed in ``layout``.

    problems: the Problems that it will be multiplied in, as ``m`` of ``gemmtune.pack``. Raises as ``gemmtune.pack``.
    """
    m: dict[str, Any] = {} if problems is None else {"m": list(problems)}
    if weight.product == "int_mm":
        return pack(weight.data, layout=layout, **m)
    return pack(
        weight.data, scale=weight.scale, zero_point=weight.zero_point, bits=weight.bits, group_size=weight.group_size,
        layout=layout, **m,
    )  # fmt: skip


def _fields(shape: Sequence[int], dtype: torch.dtype, bits: int, group: int | None, zero_point: bool) -> dict[str, Any]:
    """Return the fields of the spec of a weight for ``mixed_mm``; specs also have ``count`` (of the B operand's parts)
    and, for a packed weight, ``packed`` (``_packed_fields``) and ``raw`` (the position of the raw integers among the
    parts, if they are kept). shape: [N, K]. zero_point: whether the weight has zero
    points."""
    return {
        "n": shape[0], "k": shape[1], "dtype": dtype_name(dtype), "bits": bits, "group": group, "zero": zero_point,
        "activation": "", "product": "mixed_mm", "autocast": False, "tiles": None,
    }  # fmt: skip


def _packed_fields(packed: PackedWeight) -> dict[str, Any]:
    """Return the fields of a PackedWeight without its tensors."""
    quant = packed.quant
    quant_fields = None if quant is None else [quant.group, quant.scale_dtype, quant.zero_point]
    return {**packed_fields(packed), "quant": quant_fields}


def describe_packed(packed: PackedWeight) -> str:
    """Return the spec of a packed weight-only weight, for the operators ``quantized_linear`` and ``dequantize_weight``.

    Raises TypeError for a weight without scales.
    """
    quant = packed.quant
    if quant is None:
        raise TypeError("expected a packed weight with scales (gemmtune.pack(weight, scale=...)); this one has none")
    bits = 4 if packed.dtype == "int4" else 8
    fields = _fields((packed.n, packed.k), getattr(torch, quant.scale_dtype), bits, quant.group, quant.zero_point)
    return json.dumps({**fields, "packed": _packed_fields(packed), "count": len(packed.data)})


def describe_raw(weight: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int, group_size: int | None) -> str:
    """Return the spec of an unpacked weight-only weight, whose tensors are as ``gemmtune.pack`` takes them."""
    shape = (weight.shape[0], weight.shape[1] * (2 if bits == 4 else 1))
    fields = _fields(shape, scale.dtype, bits, group_size, zero_point is not None)
    return json.dumps({**fields, "count": 2 + (zero_point is not None)})


def operand_of(parts: Sequence[Tensor], spec: str) -> Tensor | QuantWeight | PackedWeight:
    """Return the B operand in the parts of a weight, which shares their memory."""
    fields = fields_of(spec)
    if "packed" in fields:
        packed = dict(fields["packed"])
        quant = packed.pop("quant")
        return PackedWeight(
            data=tuple(parts[: fields["count"]]), quant=None if quant is None else Quant(*quant),
            raw=parts[fields["raw"]] if "raw" in fields else None, **packed,
        )  # fmt: skip
    if fields["product"] != "mixed_mm":
        return parts[0].t()
    zero = parts[2] if fields["zero"] else None
    quant = Quant(fields["group"], dtype_name(parts[1].dtype), zero is not None)
    stored = "int4" if fields["bits"] == 4 else dtype_name(parts[0].dtype)
    return QuantWeight(parts[0].t(), parts[1], zero, fields["k"], quant, stored)


def _integers(parts: Sequence[Tensor], spec: str) -> Tensor:
    """Return a copy of the source's integers (or float8 numbers) [N, K]."""
    operand = operand_of(parts, spec)
    raw = unpack(operand) if isinstance(operand, PackedWeight) else operand
    data = raw.data.t() if isinstance(raw, QuantWeight) else (raw if isinstance(operand, PackedWeight) else raw.t())
    return int4pack.signed(data) if fields_of(spec)["bits"] == 4 else data.clone()


def _source_data(parts: Sequence[Tensor], spec: str) -> Tensor:
    """Return a copy of the source's inner tensor that has the integers."""
    integers, tiles = _integers(parts, spec), fields_of(spec)["tiles"]
    return integers if tiles is None else torchao_formats.as_tiles(integers, tuple(tiles))


def _multiply(
    rows: Tensor, row_scale: Tensor | None, operand: Any, weight_scale: Tensor | None, fields: Mapping[str, Any],
    bias: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the product [M, N], of ``dtype``, of activations and a weight.

    rows, row_scale: activations [M, K] and their scales, as ``torchao_formats.quantize`` returns them. operand: the
    weight, as ``operand_of`` returns it. weight_scale: the weight's scales, which are not in the operand of ``int_mm``
    and ``scaled_mm``; None for ``mixed_mm``. fields: those of the weight's spec.
    """
    if row_scale is None:
        if not isinstance(operand, QuantWeight):
            return mixed_mm(rows, operand, bias=bias)
        return mixed_mm(
            rows, operand.data, operand.scale, operand.zero_point, bits=fields["bits"], group_size=fields["group"],
            bias=bias,
        )  # fmt: skip
    assert weight_scale is not None
    if fields["product"] == "scaled_mm":
        shape = (1, -1) if weight_scale.numel() > 1 else (1,)
        return scaled_mm(rows, operand, row_scale, weight_scale.reshape(shape), bias, out_dtype=dtype)
    axis: Any = "row" if row_scale.numel() == rows.shape[0] else "tensor"
    steps = [fuse.scale(row_scale.reshape(-1), axis=axis), fuse.scale(weight_scale, axis="col")]
    if bias is not None:
        steps.append(fuse.bias(bias))
    return int_mm(rows, operand, out_dtype=dtype, epilogue=steps)


# --- operators ---------------------------------------------------------------------------------------------------

LIBRARY.define(  # type: ignore[no-untyped-call]
    "quantized_linear(Tensor rows, Tensor? row_scale, Tensor[] weight, str spec, Tensor? bias, ScalarType dtype)"
    " -> Tensor"
)
LIBRARY.define("dequantize_weight(Tensor[] weight, str spec) -> Tensor")  # type: ignore[no-untyped-call]


def _run_linear(
    rows: Tensor, row_scale: Tensor | None, weight: Sequence[Tensor], spec: str, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    with untraced():
        fields = fields_of(spec)
        weight_scale = weight[fields["count"]] if fields["product"] != "mixed_mm" else None
        return _multiply(rows, row_scale, operand_of(weight, spec), weight_scale, fields, bias, dtype)


def _fake_linear(
    rows: Tensor, row_scale: Tensor | None, weight: Sequence[Tensor], spec: str, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return rows.new_empty((rows.shape[0], fields_of(spec)["n"]), dtype=dtype)


def _run_dequantize(weight: Sequence[Tensor], spec: str) -> Tensor:
    with untraced():
        fields, operand = fields_of(spec), operand_of(weight, spec)
        raw: Any = unpack(operand) if isinstance(operand, PackedWeight) else operand
        dtype = getattr(torch, fields["dtype"])
        if not isinstance(raw, QuantWeight):
            integers = raw if isinstance(operand, PackedWeight) else raw.t()
            product: Tensor = integers.float() * weight[fields["count"]].reshape(-1, 1)
            return product.to(dtype)
        data, scale, zero = raw.data.t(), raw.scale.float(), raw.zero_point
        values = (int4pack.signed(data) if fields["bits"] == 4 else data).float()
        shift = 8.0 if fields["bits"] == 4 else 0.0
        group = fields["group"] or fields["k"]

        def spread_groups(t: Tensor) -> Tensor:  # [N] or [groups, N] to [N, K]
            return t.reshape(-1, fields["n"]).t().repeat_interleave(group, 1)[:, : fields["k"]]

        if zero is not None:
            values = values - spread_groups(zero.float() - shift)
        return (values * spread_groups(scale)).to(dtype)


def _fake_dequantize(weight: Sequence[Tensor], spec: str) -> Tensor:
    fields = fields_of(spec)
    return weight[0].new_empty((fields["n"], fields["k"]), dtype=getattr(torch, fields["dtype"]))


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("quantized_linear", _run_linear, _device)  # type: ignore[no-untyped-call]
    LIBRARY.impl("dequantize_weight", _run_dequantize, _device)  # type: ignore[no-untyped-call]
torch.library.register_fake("gemmtune::quantized_linear", _fake_linear, lib=LIBRARY)
torch.library.register_fake("gemmtune::dequantize_weight", _fake_dequantize, lib=LIBRARY)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, _, weight, ctx.spec, bias, _ = inputs
    ctx.save_for_backward(*weight)
    ctx.has_bias, ctx.dtype = bias is not None, rows.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, list[None], None, Tensor | None, None]:
    """Return the gradients of floating rows and of the bias; the weight has none."""
    weight = list(ctx.saved_tensors)
    rows_grad = bias_grad = None
    if ctx.needs_input_grad[0]:
        rows_grad = grad @ torch.ops.gemmtune.dequantize_weight(weight, ctx.spec).to(grad.dtype)
    if ctx.has_bias and ctx.needs_input_grad[4]:
        bias_grad = grad.sum(0)
    return rows_grad, None, [None] * len(weight), None, bias_grad, None


torch.library.register_autograd("gemmtune::quantized_linear", _backward, setup_context=_setup, lib=LIBRARY)
