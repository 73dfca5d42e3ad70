"""Modules that replace weight-only linears, and linears whose weight is not packed.

``WeightOnlyLinear`` has a packed weight; its ``state_dict`` has the raw weight under the original's names.
``RawLinear`` and ``RawWeightOnlyLinear`` leave the weight unpacked, for tuned kernels that take it so. All tensors of
these modules are Parameters and buffers, and operators take them as arguments, so that graphs and exported programs
contain them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.checks import GradError
from ..core.errors import PackedWeightError
from ..core.weights import PackedWeight, QuantWeight
from ..dispatch.torch_state import is_autocast_on
from ..ops.linear import linear
from ..ops.mixed_mm import mixed_mm
from ..ops.packing import pack, unpack
from ..ops.weight_only import WeightOnly
from .packed_ops import LIBRARY, no_view, untraced
from .packed_products import needs_operator
from .packed_writes import ReadOnly
from .quantized_tensor import describe_packed, describe_raw, operand_of


class WeightOnlyLinear(nn.Module):
    """A weight-only int8 or int4 linear for inference: packed weight with its scales, floating activations.

    packed: from ``gemmtune.pack(weight, scale=...)``. bias: the original's, or None. names: the original's names of its
    tensors, as ``{"weight": "weight", "scale": "scales", "zero_point": "zeros"}`` (``zero_point`` only if it has one).
    transposed_scale: whether the original's scales are [N, groups].
    """

    bias: Tensor | None

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
        self._set_packed(packed)
        self.names, self.transposed_scale = dict(names), transposed_scale
        if bias is None:
            self.register_parameter("bias", None)
        elif isinstance(bias, nn.Parameter):
            self.register_parameter("bias", bias)
        else:
            self.register_buffer("bias", bias)
        self.eval()

    def _set_packed(self, packed: PackedWeight) -> None:
        """Register the tensors of a packed weight as buffers."""
        self.spec = describe_packed(packed)
        self._parts = [f"packed_{index}" for index in range(len(packed.data))]
        for name, tensor in zip(self._parts, packed.data, strict=True):
            self.register_buffer(name, tensor, persistent=False)  # state_dict() has the raw weight instead

    @property
    def parts(self) -> list[Tensor]:
        """The tensors of the packed weight."""
        return [self._buffers[name] for name in self._parts]  # type: ignore[misc]

    @property
    def packed(self) -> PackedWeight:
        """The packed weight, which shares the memory of the buffers."""
        packed = self.__dict__.get("_packed")
        if packed is None or packed.data[0] is not self._buffers["packed_0"]:
            packed = self.__dict__["_packed"] = operand_of(self.parts, self.spec)
        assert isinstance(packed, PackedWeight)
        return packed

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the cached PackedWeight: a copy (deepcopy, pickle) makes one of its buffers."""
        return {name: value for name, value in self.__dict__.items() if name != "_packed"}

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ dequantised(weight).T + bias``: input [.., in_features], result [.., out_features].

        Raises GradError in training mode.
        """
        if self.training:
            raise GradError(
                "WeightOnlyLinear holds a packed weight and cannot train: call eval() first, or restore() the model "
                "with the handle that gemmtune.optimize() returned"
            )
        flat = input if input.dim() == 2 else input.reshape(-1, self.in_features)
        if torch.compiler.is_compiling() or needs_operator(flat, self.bias):
            product = torch.ops.gemmtune.quantized_linear(flat, None, self.parts, self.spec, self.bias, input.dtype)
        else:
            product = mixed_mm(flat, self.packed, bias=self.bias)
        out: Tensor = product if input.dim() == 2 else product.view(*input.shape[:-1], self.out_features)
        return out

    @property
    def weight(self) -> Tensor:
        """The raw integers [N, K] (int4: [N, ceil(K / 2)]), unpacked at each access. A write to them would be lost, and
        raises PackedWeightError."""
        return ReadOnly.of(self.raw()[self.names["weight"]])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the scales, which casts of the module must not change. Activations may be of any floating
        dtype."""
        assert self.packed.quant is not None
        dtype: torch.dtype = getattr(torch, self.packed.quant.scale_dtype)
        return dtype

    def raw(self) -> dict[str, Tensor]:
        """Return the original module's tensors that are in the packed weight, by the original's names."""
        raw = unpack(self.packed)
        assert isinstance(raw, QuantWeight)
        tensors = {self.names["weight"]: raw.data.t(), self.names["scale"]: self._transposed_scale(raw.scale)}
        if raw.zero_point is not None:
            tensors[self.names["zero_point"]] = self._transposed_scale(raw.zero_point)
        return tensors

    def repack(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the weight by new raw tensors, packed in the same layout.

        tensors: as ``raw`` returns them, of the same shapes and dtypes.
        """
        quant = self.packed.quant
        assert quant is not None
        zero = self.names.get("zero_point")
        packed = pack(
            tensors[self.names["weight"]],
            scale=self._transposed_scale(tensors[self.names["scale"]]),
            zero_point=self._transposed_scale(tensors[zero]) if zero is not None and quant.zero_point else None,
            bits=4 if self.packed.dtype == "int4" else 8,
            group_size=quant.group,
            layout=self.packed.layout,
        )
        self._set_packed(packed)

    def _transposed_scale(self, tensor: Tensor) -> Tensor:
        """Return scales or zero points transposed between the original's orientation and that of ``pack``."""
        return tensor.t().contiguous() if self.transposed_scale and tensor.dim() == 2 else tensor

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, tensor in self.raw().items():
            destination[prefix + name] = tensor
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        current = self.raw()
        new = {name: state_dict[prefix + name] for name in current if prefix + name in state_dict}
        rest = {key: value for key, value in state_dict.items() if key.removeprefix(prefix) not in current}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        missing_keys.extend(prefix + name for name in current if name not in new)
        for name, tensor in new.items():
            if tensor.shape != current[name].shape:
                error_msgs.append(
                    f"size mismatch for {prefix}{name}: copying a param with shape {tensor.shape} from checkpoint, "
                    f"the shape in current model is {current[name].shape}."
                )
                return
        if new:
            self.repack({name: new.get(name, tensor).to(tensor) for name, tensor in current.items()})

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply a move or a cast (``model.to``, ``.half()``) to the module's tensors. Raises PackedWeightError if it
        changes the dtype or device of the packed weight."""
        device = self.packed.device
        probe = fn(torch.zeros((), dtype=self.dtype, device=device))
        if probe.dtype != self.dtype or probe.device != device:
            raise PackedWeightError(
                f"{type(self).__name__} holds a weight packed as {self.dtype} for {device} and cannot become "
                f"{probe.dtype} on {probe.device}: restore() the model, convert it, and optimize it again"
            )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"layout={self.packed.layout}"
        )


def _share_tensors(module: nn.Module, original: nn.Module) -> None:
    """Register the original's Parameters and buffers in a module, under the same names. The two modules share them."""
    for name, parameter in original._parameters.items():
        module.register_parameter(name, parameter)
    for name, buffer in original._buffers.items():
        module.register_buffer(name, buffer, persistent=name not in original._non_persistent_buffers_set)
    module.train(original.training)


def return_tensors(module: nn.Module, original: nn.Module) -> None:
    """Register a module's tensors in the original again: they may have been moved, cast or loaded in the meantime."""
    original._parameters.update({name: module._parameters[name] for name in original._parameters})
    original._buffers.update({name: module._buffers[name] for name in original._buffers})


def _needs_grad(module: nn.Module) -> bool:
    return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters(False))


class RawLinear(nn.Linear):
    """An ``nn.Linear`` that calls ``gemmtune.linear``. It trains as the original does.

    original: the module whose Parameters it shares.
    """

    layout = "raw"

    def __init__(self, original: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = original.in_features, original.out_features
        _share_tensors(self, original)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``F.linear`` of the input, from the kernel that was tuned for this number of rows."""
        if torch.compiler.is_compiling() and not (_needs_grad(self) or is_autocast_on(input.device.type)):
            result: Tensor = torch.ops.gemmtune.tuned_linear(input, self.weight, self.bias)
            return result
        return linear(input, self.weight, self.bias)


class RawWeightOnlyLinear(nn.Module):
    """A weight-only linear that calls ``gemmtune.mixed_mm``.

    original: the module whose tensors it shares. weight_only: the original's description by ``recognise``, with scales
    that are not transposed.
    """

    layout = "raw"
    bias: Tensor | None

    def __init__(self, original: nn.Module, weight_only: WeightOnly) -> None:
        super().__init__()
        self.in_features, self.out_features = (
            weight_only.weight.shape[1] * (2 if weight_only.bits == 4 else 1),
            weight_only.weight.shape[0],
        )
        _share_tensors(self, original)
        if "bias" not in self._parameters and "bias" not in self._buffers:
            self.register_parameter("bias", None)
        self.names, self.bits, self.group_size = dict(weight_only.names), weight_only.bits, weight_only.group_size
        self.spec = describe_raw(
            weight_only.weight, weight_only.scale, weight_only.zero_point, weight_only.bits, weight_only.group_size
        )

    def forward(self, input: Tensor) -> Tensor:
        """Return the original's result, from the kernel that was tuned for this number of rows."""
        flat = input if input.dim() == 2 else input.reshape(-1, self.in_features)
        tensors = [getattr(self, self.names[name]) for name in ("weight", "scale", "zero_point") if name in self.names]
        if torch.compiler.is_compiling() or needs_operator(flat, self.bias):
            product = torch.ops.gemmtune.quantized_linear(flat, None, tensors, self.spec, self.bias, input.dtype)
        else:
            product = mixed_mm(
                flat, tensors[0].t(), *tensors[1:], bits=self.bits, group_size=self.group_size, bias=self.bias
            )
        out: Tensor = product if input.dim() == 2 else product.view(*input.shape[:-1], self.out_features)
        return out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


LIBRARY.define("tuned_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor")  # type: ignore[no-untyped-call]


def _run_tuned(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with untraced():
        return no_view(linear(input, weight, bias))


def _fake_tuned(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


LIBRARY.impl("tuned_linear", _run_tuned, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("gemmtune::tuned_linear", _fake_tuned, lib=LIBRARY)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, bias = inputs
    ctx.save_for_backward(weight)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
    """Return the gradients of the input and the bias. The weight has none here: where it requires one,
    ``RawLinear.forward`` does not call this operator."""
    (weight,) = ctx.saved_tensors
    input_grad = grad @ weight if ctx.needs_input_grad[0] else None
    bias_grad = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
    return input_grad, None, bias_grad


torch.library.register_autograd("gemmtune::tuned_linear", _backward, setup_context=_setup, lib=LIBRARY)
