"""Modules in the place of weight-only linears, and of linears whose weight stays as it lies.

``WeightOnlyLinear`` holds its weight packed; its ``state_dict`` has the raw one under the original's names.
``RawLinear`` and ``RawWeightOnlyLinear`` keep the weight as it lies, for tuned kernels that take it so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..backends.base import PackedWeight, QuantWeight
from ..checks import GradError
from ..dispatch.guards import autocasting
from ..errors import PackedWeightError
from ..ops import linear
from ..packing import pack, unpack
from ..quantized import mixed_mm
from . import graph
from .weight_only import WeightOnly


class WeightOnlyLinear(nn.Module):
    """A weight-only int8 or int4 linear for inference: packed weight with its scales, floating activations.

    packed: from ``gemmtune.pack(weight, scale=...)``. bias: the original's, or None. names: what the original called
    its tensors, as ``{"weight": "weight", "scale": "scales", "zero_point": "zeros"}`` (``zero_point`` only if it has
    one). transposed_scale: whether the original's scales are [N, groups].
    """

    bias: Tensor | None
    packed: PackedWeight

    def __init__(
        self,
        packed: PackedWeight,
        bias: Tensor | None = None,
        *,
        names: Mapping[str, str],
        transposed_scale: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = packed.k, packed.n
        self.packed = packed
        self.names, self.transposed_scale = dict(names), transposed_scale
        self._device_type = packed.device.type
        if bias is None:
            self.register_parameter("bias", None)
        elif isinstance(bias, nn.Parameter):
            self.register_parameter("bias", bias)
        else:
            self.register_buffer("bias", bias)
        self.handle = graph.register(self)
        self.eval()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy (deepcopy, pickle) is a module of its own in compiled graphs too."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.handle = graph.register(self)

    def forward(self, input: Tensor) -> Tensor:
        """``input @ dequantised(weight).T + bias``, input [.., in_features]. Raises GradError in training mode."""
        if self.training:
            raise GradError(
                "WeightOnlyLinear holds a packed weight and cannot train: call eval() first, or restore() the model "
                "with the handle that gemmtune.optimize() returned"
            )
        if torch.compiler.is_compiling() and not autocasting(self._device_type):
            return graph.call(input, self.handle, self.out_features)
        return self.compute(input)

    def compute(self, input: Tensor) -> Tensor:
        """The product itself, input [.., in_features]; ``forward`` has checked that it may be asked for."""
        if input.dim() == 2:
            return mixed_mm(input, self.packed, bias=self.bias)
        flat = input.reshape(-1, input.shape[-1]) if input.numel() else input.new_empty((0, input.shape[-1]))
        return mixed_mm(flat, self.packed, bias=self.bias).view(*input.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """The raw integers [N, K] (int4: [N, ceil(K / 2)]), unpacked anew at each access."""
        return self.raw()[self.names["weight"]]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that casts are checked against: activations come in any floating dtype, so only the scales' is
        kept."""
        assert self.packed.quant is not None
        dtype: torch.dtype = getattr(torch, self.packed.quant.scale_dtype)
        return dtype

    def raw(self) -> dict[str, Tensor]:
        """The tensors of the original module that the packed weight stands for, by their names there."""
        raw = unpack(self.packed)
        assert isinstance(raw, QuantWeight)
        tensors = {self.names["weight"]: raw.data.t(), self.names["scale"]: self._turn(raw.scale)}
        if raw.zero_point is not None:
            tensors[self.names["zero_point"]] = self._turn(raw.zero_point)
        return tensors

    def repack(self, tensors: Mapping[str, Tensor]) -> None:
        """Take new raw tensors (of the same shapes and dtypes) and pack them in the same layout."""
        quant = self.packed.quant
        assert quant is not None
        zero = self.names.get("zero_point")
        self.packed = pack(
            tensors[self.names["weight"]],
            scale=self._turn(tensors[self.names["scale"]]),
            zero_point=self._turn(tensors[zero]) if zero is not None and quant.zero_point else None,
            bits=4 if self.packed.dtype == "int4" else 8,
            group_size=quant.group,
            layout=self.packed.layout,
        )

    def _turn(self, tensor: Tensor) -> Tensor:
        return tensor.t().contiguous() if self.transposed_scale and tensor.dim() == 2 else tensor

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, tensor in self.raw().items():
            destination[prefix + name] = tensor
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        held = self.raw()
        given = {name: state_dict[prefix + name] for name in held if prefix + name in state_dict}
        rest = {key: value for key, value in state_dict.items() if key.removeprefix(prefix) not in held}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        missing_keys.extend(prefix + name for name in held if name not in given)
        for name, tensor in given.items():
            if tensor.shape != held[name].shape:
                error_msgs.append(
                    f"size mismatch for {prefix}{name}: copying a param with shape {tensor.shape} from checkpoint, "
                    f"the shape in current model is {held[name].shape}."
                )
                return
        if given:
            self.repack({name: given.get(name, tensor).to(tensor) for name, tensor in held.items()})

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves and casts (``model.to``, ``.half()``): the packed weight follows only if it stays as it is."""
        place = self.packed.device
        probe = fn(torch.zeros((), dtype=self.dtype, device=place))
        if probe.dtype != self.dtype or probe.device != place:
            raise PackedWeightError(
                f"{type(self).__name__} holds a weight packed as {self.dtype} for {place} and cannot become "
                f"{probe.dtype} on {probe.device}: restore() the model, convert it, and optimize it again"
            )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"layout={self.packed.layout}"
        )


class _Raw(nn.Module):
    """What both modules with raw weights share: they hold the original's very Parameters and buffers."""

    layout = "raw"
    bias: Tensor | None

    def __init__(self, original: nn.Module, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        for name, parameter in original._parameters.items():
            self.register_parameter(name, parameter)
        kept = original._non_persistent_buffers_set
        for name, buffer in original._buffers.items():
            self.register_buffer(name, buffer, persistent=name not in kept)
        self.handle = graph.register(self)
        self.train(original.training)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy (deepcopy, pickle) is a module of its own in compiled graphs too."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.handle = graph.register(self)

    def compute(self, input: Tensor) -> Tensor:
        """The product itself, input [.., in_features]."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        """The original's result, by the kernel that was tuned for these rows."""
        wants = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters(False))
        if torch.compiler.is_compiling() and not (wants or autocasting(input.device.type)):
            return graph.call(input, self.handle, self.out_features)
        return self.compute(input)

    def give_back(self, original: nn.Module) -> None:
        """Hand the tensors to the original again: they may have been moved, cast or loaded since."""
        original._parameters.update({name: self._parameters[name] for name in original._parameters})
        original._buffers.update({name: self._buffers[name] for name in original._buffers})

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class RawLinear(_Raw):
    """``nn.Linear`` through ``gemmtune.linear``; trains as the original does.

    original: the module whose Parameters it shares.
    """

    weight: Tensor

    def __init__(self, original: nn.Linear) -> None:
        super().__init__(original, original.in_features, original.out_features)

    def compute(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class RawWeightOnlyLinear(_Raw):
    """A weight-only linear through ``gemmtune.mixed_mm``.

    original: the module whose tensors it shares. held: what ``recognise`` found in it, its scales not transposed.
    """

    def __init__(self, original: nn.Module, held: WeightOnly) -> None:
        k = held.weight.shape[1] * (2 if held.bits == 4 else 1)
        super().__init__(original, k, held.weight.shape[0])
        if "bias" not in self._parameters and "bias" not in self._buffers:
            self.register_parameter("bias", None)
        self.names, self.bits, self.group_size = dict(held.names), held.bits, held.group_size

    def compute(self, input: Tensor) -> Tensor:
        flat = input if input.dim() == 2 else input.reshape(-1, self.in_features)
        zero = self.names.get("zero_point")
        weight, scale = getattr(self, self.names["weight"]), getattr(self, self.names["scale"])
        product = mixed_mm(
            flat, weight.t(), scale, None if zero is None else getattr(self, zero), bits=self.bits,
            group_size=self.group_size, bias=self.bias,
        )  # fmt: skip
        return product if input.dim() == 2 else product.view(*input.shape[:-1], self.out_features)
