"""Readers of torchao's quantised tensor subclasses, which return their contents as gemmtune's ops take them.

``read`` recognises the tensor subclasses of torchao 0.18 by their names and attributes; torchao itself is never
imported. The formulas of the activations' quantisation are those of torchao's ``choose_qparams_affine`` and
``quantize_affine`` (int8) and ``_choose_scale_float8`` (float8).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .. import fuse
from ..core.checks import FLOATS
from ..core.memory import why_not_addressable
from ..core.problem import Problem
from ..core.torch_compat import convert_weight_to_int4pack
from ..core.weights import QuantWeight
from . import int_mm, scaled_mm
from .int4pack import nibbles, unpacked_integers, zero_points
from .mixed_mm import describe_product, quant_weight

OpName = Literal["mixed_mm", "int_mm", "scaled_mm"]
# How activations are quantised at each call: not at all; to int8 or float8 by row or by tensor; or to int8 by row with
# a zero point, and then back to floating numbers.
Activation = Literal["", "int8 row", "int8 tensor", "float8 row", "float8 tensor", "int8 row asymmetric"]

_OP_OF: dict[Activation, OpName] = {
    "": "mixed_mm", "int8 row asymmetric": "mixed_mm", "int8 row": "int_mm", "int8 tensor": "int_mm",
    "float8 row": "scaled_mm", "float8 tensor": "scaled_mm",
}  # fmt: skip


class UnknownFormatError(Exception):
    """The error for a quantised weight that gemmtune cannot serve. The message is the reason, as words that follow
    "its weight"."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantised weight [N, K] as gemmtune's ops take it.

    data: int8 [N, K]; uint8 [N, K / 2] with ``bits`` 4; float8 [N, K].
    scale: [N] or, with ``group_size``, [groups, N].
    zero_point: as scale, or None.
    bits: the bits of an element of ``data``, 8 or 4.
    group_size: the elements of K that share a scale; None for one scale per output channel.
    activation: how activations are quantised at each call.
    dtype: that of the dequantised weight.
    source: torchao's tensor that this was read from.
    data_name: the name of the source's inner tensor that has the values of ``data``.
    tiles: (padded N, padded K, the integer that fills the padding) if that inner tensor has the layout of
        ``_weight_int4pack_mm``; else None.
    autocast: whether the product has autocast's dtype while autocast is on, as torchao's own product has. Otherwise it
        has the activations' dtype.
    """

    data: Tensor
    scale: Tensor
    zero_point: Tensor | None
    bits: int
    group_size: int | None
    activation: Activation
    dtype: torch.dtype
    source: Tensor
    data_name: str = "qdata"
    tiles: tuple[int, int, int] | None = None
    autocast: bool = False

    @property
    def product(self) -> OpName:
        """The name of the op that multiplies by this weight."""
        return _OP_OF[self.activation]

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of the weight."""
        return self.data.shape[0], self.data.shape[1] * (2 if self.bits == 4 else 1)

    @property
    def operand(self) -> Tensor | QuantWeight:
        """The B operand [K, N] of this weight's product. For ``mixed_mm`` it includes the scales."""
        if self.product != "mixed_mm":
            return self.data.t()
        return quant_weight(self.data.t(), self.scale, self.zero_point, self.bits, self.group_size, self.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of the source's inner tensors."""
        return sum(tensor.nbytes for tensor in inner_tensors(self.source).values())


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """Return the inner tensors of a wrapper subclass, by name. Raises AttributeError for a tensor without any."""
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names}


def is_from_torchao(tensor: Any) -> bool:
    """Whether a tensor is of one of torchao's classes."""
    return type(tensor).__module__.split(".")[0] == "torchao"


def read(weight: Tensor) -> QuantizedWeight:
    """Return the contents of a weight [N, K] of one of torchao's classes. Raises UnknownFormatError with the reason if
    no op of gemmtune can multiply by it."""
    reader = _READERS.get(type(weight).__name__) if is_from_torchao(weight) else None
    if reader is None:
        raise UnknownFormatError(f"is {why_not_addressable(weight)}")
    try:
        if weight.dim() != 2:
            raise UnknownFormatError(f"has {weight.dim()} dimensions")
        tensors = inner_tensors(weight)
        for name, tensor in tensors.items():
            if why_not_addressable(tensor):
                raise UnknownFormatError(f"has an inner tensor {name} that is {why_not_addressable(tensor)}")
        if weight.dtype not in FLOATS:
            raise UnknownFormatError(f"stands for a weight of {weight.dtype}")
        return reader(weight)
    except AttributeError as error:  # another version of torchao
        raise UnknownFormatError(f"is a {type(weight).__qualname__} that gemmtune does not know ({error})") from error


def _scales(values: Tensor, n: int, k: int, block: Any) -> tuple[Tensor, int | None]:
    """Return the scales or zero points of blocks as [N] or [groups, N], and the group size (None for [N]).

    values: one for each block. n, k: the weight's. block: (rows, columns) of a block. Raises UnknownFormatError for
    other blocks than rows of the weight, parts of a row, or the whole weight.
    """
    rows, columns = (int(size) for size in block)
    if rows in (n, 1) and columns == k:
        return values.reshape(-1).expand(n).contiguous(), None
    if rows == 1 and 0 < columns < k and k % columns == 0:
        return values.reshape(n, k // columns).t().contiguous(), columns
    raise UnknownFormatError(f"has a scale for each block of {rows}x{columns} elements")


def _int8(weight: Any) -> QuantizedWeight:
    n, k = weight.shape
    scale, group = _scales(weight.scale, n, k, weight.block_size)
    zero_points = weight.zero_point
    if zero_points is not None and bool(zero_points.any()):
        raise UnknownFormatError("has zero points")
    for name in ("act_pre_scale", "act_quant_scale", "act_quant_zero_point"):
        if getattr(weight, name, None) is not None:
            raise UnknownFormatError(f"has an {name}, a scale of the activations that was chosen beforehand")
    activation: Activation = ""
    if weight.act_quant_kwargs is not None:
        activation = _int8_activation(weight.act_quant_kwargs)
        if group is not None:
            raise UnknownFormatError("has scales by groups, and its activations are quantised to int8")
    return QuantizedWeight(weight.qdata, scale, None, 8, group, activation, weight.dtype, weight)


def _int8_activation(options: Any) -> Activation:
    """Return how the activations of an ``Int8Tensor`` are quantised. options: its ``act_quant_kwargs``."""
    if getattr(options, "reduce_range", False):
        raise UnknownFormatError("has activations quantised to 7 bits (reduce_range)")
    if options.mapping_type.name != "SYMMETRIC":
        raise UnknownFormatError("has activations quantised to int8 with a zero point")
    return "int8 row" if _is_by_row(options.granularity) else "int8 tensor"


def _is_by_row(granularity: Any) -> bool:
    """Whether activations are quantised by row; False: by tensor. Raises UnknownFormatError for anything else."""
    name = type(granularity).__name__
    if name == "PerRow" and getattr(granularity, "dim", -1) == -1:
        return True
    if name != "PerTensor":
        raise UnknownFormatError(f"has activations quantised by {granularity}")
    return False


def _intx(weight: Any) -> QuantizedWeight:
    n, k = weight.shape
    scale, group = _scales(weight.scale, n, k, weight.block_size)
    zero_points, _ = _scales(weight.zero_point, n, k, weight.block_size)
    quantization = weight.activation_quantization
    if quantization is not None and getattr(quantization, "value", quantization) != "int8_asym_per_token":
        raise UnknownFormatError(f"has activations quantised by {quantization}")
    zero_point = zero_points.to(scale.dtype) if bool(zero_points.any()) else None
    width = int(str(weight.target_dtype).removeprefix("torch.int"))
    data, bits = weight.qdata, 8
    if width <= 4 and k % 2 == 0:
        data, bits = nibbles(data), 4
        zero_point = None if zero_point is None else zero_point + 8
    activation: Activation = "" if quantization is None else "int8 row asymmetric"
    return QuantizedWeight(data, scale, zero_point, bits, group, activation, weight.dtype, weight, autocast=True)


_INNER_TILES = 8  # of torchao's calls of ``_convert_weight_to_int4pack``


def _int4_tiles(weight: Any) -> QuantizedWeight:
    n, k = weight.shape
    if weight.act_pre_scale is not None:
        raise UnknownFormatError("has an act_pre_scale, a scale of the activations that was chosen beforehand")
    group = int(weight.block_size[-1])
    pairs = weight.scale_and_zero  # [groups, N, 2], of the padded weight: w = (q - 8) * scale + zero
    padded_n, padded_k = weight.qdata.shape[0] * 8, weight.qdata.shape[1] * 16 * _INNER_TILES
    values = unpacked_integers(weight.qdata, group, pairs, padded_k)
    scales = None if k % group else zero_points(pairs[: k // group, :n])
    if scales is None:
        raise UnknownFormatError("has a scale of 0, or a last group that is shorter than the others")
    tiles = (padded_n, padded_k, int(values[-1, -1]) + 8)
    values = values[:n, :k].contiguous()
    if not torch.equal(as_tiles(values, tiles), weight.qdata):
        raise UnknownFormatError("has a padding that differs from element to element")
    return QuantizedWeight(nibbles(values), *scales, 4, group, "", weight.dtype, weight, tiles=tiles)


def as_tiles(values: Tensor, tiles: tuple[int, int, int]) -> Tensor:
    """Return int8 [N, K] of -8 to 7 in the layout of ``_weight_int4pack_mm``: int32 [padded N / 8, padded K / 128, 32,
    4]. tiles: as in ``QuantizedWeight``."""
    rows, columns, fill = tiles
    padded = values.new_full((rows, columns), fill, dtype=torch.uint8)
    padded[: values.shape[0], : values.shape[1]] = (values + 8).to(torch.uint8)
    packed: Tensor = convert_weight_to_int4pack((padded[:, ::2] << 4) | padded[:, 1::2], _INNER_TILES)
    return packed


def _float8(weight: Any) -> QuantizedWeight:
    n, k = weight.shape
    if weight.qdata.dtype != torch.float8_e4m3fn:
        raise UnknownFormatError(f"is {weight.qdata.dtype}; gemmtune's kernels take float8_e4m3fn")
    options = weight.act_quant_kwargs
    scale, group = _scales(weight.scale, n, k, weight.block_size)
    if options is None:
        return QuantizedWeight(weight.qdata, scale, None, 8, group, "", weight.dtype, weight, autocast=True)
    if getattr(options, "hp_value_lb", None) is not None or getattr(options, "hp_value_ub", None) is not None:
        raise UnknownFormatError("has bounds for its activations (hp_value_lb, hp_value_ub)")
    if options.float8_dtype != weight.qdata.dtype:
        raise UnknownFormatError(f"has activations of {options.float8_dtype}")
    if group is not None:
        raise UnknownFormatError("is float8 with scales by groups, and its activations are quantised")
    by_row = _is_by_row(options.granularity)
    if by_row != (weight.scale.numel() > 1):
        raise UnknownFormatError("is float8 with scales by row, and its activations by tensor, or the other way round")
    if not by_row:
        scale = weight.scale.reshape(1)
    activation: Activation = "float8 row" if by_row else "float8 tensor"
    return QuantizedWeight(weight.qdata, scale.float(), None, 8, None, activation, weight.dtype, weight)


_READERS: dict[str, Callable[[Any], QuantizedWeight]] = {
    "Int8Tensor": _int8,
    "IntxUnpackedToInt8Tensor": _intx,
    "Int4TilePackedTo4dTensor": _int4_tiles,
    "Float8Tensor": _float8,
}


# --- activations -------------------------------------------------------------------------------------------------


def quantize(rows: Tensor, activation: Activation) -> tuple[Tensor, Tensor | None]:
    """Return activations [M, K] as the product takes them, and their scales: float32 [M, 1], [1], or None.

    Symmetric int8: scale = max |x| / 127.5, at least 2**-23, and x / scale is rounded to -128 .. 127. float8 (e4m3):
    scale = max |x| / 448. ``int8 row asymmetric``: the result is the floating numbers that the int8 values represent.
    The arithmetic is in torchao's dtypes, so that the integers are torchao's. Quantised activations have no gradient.
    """
    if activation == "":
        return rows, None
    rows = rows.detach()  # rounding has no gradient, here as in torchao
    if activation == "int8 row asymmetric":
        return _through_int8(rows), None
    size = rows.abs()
    largest = size.amax(1, keepdim=True) if activation.endswith(" row") else size.amax().reshape(1)
    if activation.startswith("int8"):
        scale = (largest / 127.5).clamp_(min=torch.finfo(torch.float32).eps).float()
        return (rows * (1.0 / scale)).round_().clamp_(-128, 127).to(torch.int8), scale
    scale = (largest / 448.0).float().clamp_(min=torch.finfo(torch.float32).tiny)  # torchao has NaN for a row of zeros
    return (rows.float() / scale).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def _through_int8(rows: Tensor) -> Tensor:
    """Return rows quantised to int8, with one scale and zero point per row, and dequantised again."""
    low, high = rows.amin(1, keepdim=True).clamp_(max=0), rows.amax(1, keepdim=True).clamp_(min=0)
    scale = ((high - low) / 255.0).clamp_(min=torch.finfo(rows.dtype).smallest_normal)
    zero_points = (-128 - torch.round(low / scale)).clamp_(-128, 127)
    values = (torch.round(rows * (1.0 / scale)) + zero_points).clamp_(-128, 127)
    return (values - zero_points) * scale


def problem(rows: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Problem:
    """Return the Problem of activations [.., K] by a quantised weight. Raises as the op that multiplies by it."""
    flat = rows.detach().reshape(-1, rows.shape[-1])
    values, scale = quantize(flat, weight.activation)
    operand = weight.operand
    steps = () if bias is None else (fuse.bias(bias),)
    if isinstance(operand, QuantWeight):
        return describe_product(values, operand, steps, constant=True).problem
    assert scale is not None
    if weight.product == "scaled_mm":
        columns = weight.scale.reshape((1, -1) if weight.scale.numel() > 1 else (1,))
        return scaled_mm.describe(values, operand, scale, columns, bias, None, rows.dtype).problem
    axis: Any = "row" if scale.numel() == flat.shape[0] else "tensor"
    scales = (fuse.scale(scale.reshape(-1), axis=axis), fuse.scale(weight.scale.float(), axis="col"))
    return int_mm.describe(values, operand, rows.dtype, (*scales, *steps), constant=True).problem
