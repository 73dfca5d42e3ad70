"""Modules in the place of weight-only linears, and of linears whose weight stays as it lies.

``WeightOnlyLinear`` holds its weight packed; its ``state_dict`` has the raw one under the original's names.
``RawLinear`` and ``RawWeightOnlyLinear`` keep the weight as it lies, for tuned kernels that take it so. All their
tensors are Parameters and buffers, and operators take them as arguments: graphs and exported programs carry them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.checks import GradError
from ..core.errors import PackedWeightError
from ..core.weights import PackedWeight, QuantWeight
from ..dispatch.guards import is_autocast_on
from ..ops.linear import linear
from ..ops.mixed_mm import mixed_mm
from ..ops.packing import pack, unpack
from ..ops.weight_only import WeightOnly
from .packed_ops import LIBRARY, no_view, untraced
from .packed_products import is_for_dispatcher
from .packed_writes import ReadOnly
from .quantized_tensor import describe_packed, describe_raw, operand_of


class WeightOnlyLinear(nn.Module):
    """A weight-only int8 or int4 linear for inference: packed weight with its scales, floating activations.

    packed: from ``gemmtune.pack(weight, scale=...)``. bias: the original's, or None. names: what the original called
    its tensors, as ``{"weight": "weight", "scale": "scales", "zero_point": "zeros"}`` (``zero_point`` only if it has
    one). transposed_scale: whether the original's scales are [N, groups].
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
        self._take(packed)
        self.names, self.transposed_scale = dict(names), transposed_scale
        if bias is None:
            self.register_parameter("bias", None)
        elif isinstance(bias, nn.Parameter):
            self.register_parameter("bias", bias)
        else:
            self.register_buffer("bias", bias)
        self.eval()

    def _take(self, packed: PackedWeight) -> None:
        """Hold the tensors of a packed weight as buffers."""
        self.spec = describe_packed(packed)
        self._parts = [f"packed_{place}" for place in range(len(packed.data))]
        for name, tensor in zip(self._parts, packed.data, strict=True):
            self.register_buffer(name, tensor, persistent=False)  # the state has the raw weight

    @property
    def parts(self) -> list[Tensor]:
        """The tensors of the packed weight."""
        return [self._buffers[name] for name in self._parts]  # type: ignore[misc]

    @property
    def packed(self) -> PackedWeight:
        """The packed weight, which shares the memory of the buffers."""
        made = self.__dict__.get("_packed")
        if made is None or made.data[0] is not self._buffers["packed_0"]:
            made = self.__dict__["_packed"] = operand_of(self.parts, self.spec)
        assert isinstance(made, PackedWeight)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """A copy (deepcopy, pickle) makes its PackedWeight of its own buffers."""
        return {name: value for name, value in self.__dict__.items() if name != "_packed"}

    def forward(self, input: Tensor) -> Tensor:
        """``input @ dequantised(weight).T + bias``, input [.., in_features]. Raises GradError in training mode."""
        if self.training:
            raise GradError(
                "WeightOnlyLinear holds a packed weight and cannot train: call eval() first, or restore() the model "
                "with the handle that gemmtune.optimize() returned"
            )
        flat = input if input.dim() == 2 else input.reshape(-1, self.in_features)
        if torch.compiler.is_compiling() or is_for_dispatcher(flat, self.bias):
            product = torch.ops.gemmtune.quantized_linear(flat, None, self.parts, self.spec, self.bias, input.dtype)
        else:
            product = mixed_mm(flat, self.packed, bias=self.bias)
        out: Tensor = product if input.dim() == 2 else product.view(*input.shape[:-1], self.out_features)
        return out

    @property
    def weight(self) -> Tensor:
        """The raw integers [N, K] (int4: [N, ceil(K / 2)]), unpacked anew at each access. Writes to them would be lost
        and raise PackedWeightError."""
        return ReadOnly.of(self.raw()[self.names["weight"]])

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
        packed = pack(
            tensors[self.names["weight"]],
            scale=self._turn(tensors[self.names["scale"]]),
            zero_point=self._turn(tensors[zero]) if zero is not None and quant.zero_point else None,
            bits=4 if self.packed.dtype == "int4" else 8,
            group_size=quant.group,
            layout=self.packed.layout,
        )
        self._take(packed)

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


def _share(module: nn.Module, original: nn.Module) -> None:
    """Give a module the original's very Parameters and buffers, under their names."""
    for name, parameter in original._parameters.items():
        module.register_parameter(name, parameter)
    for name, buffer in original._buffers.items():
        module.register_buffer(name, buffer, persistent=name not in original._non_persistent_buffers_set)
    module.train(original.training)


def _give_back(module: nn.Module, original: nn.Module) -> None:
    """Hand the tensors to the original again: they may have been moved, cast or loaded since."""
    original._parameters.update({name: module._parameters[name] for name in original._parameters})
    original._buffers.update({name: module._buffers[name] for name in original._buffers})


def _wants_grad(module: nn.Module) -> bool:
    return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters(False))


class RawLinear(nn.Linear):
    """``nn.Linear`` through ``gemmtune.linear``; trains as the original does.

    original: the module whose Parameters it shares.
    """

    layout = "raw"

    def __init__(self, original: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = original.in_features, original.out_features
        _share(self, original)

    def forward(self, input: Tensor) -> Tensor:
        """The original's result, by the kernel that was tuned for these rows."""
        if torch.compiler.is_compiling() and not (_wants_grad(self) or is_autocast_on(input.device.type)):
            result: Tensor = torch.ops.gemmtune.tuned_linear(input, self.weight, self.bias)
            return result
        return linear(input, self.weight, self.bias)

    def give_back(self, original: nn.Module) -> None:
        """Hand the Parameters to the original again."""
        _give_back(self, original)


class RawWeightOnlyLinear(nn.Module):
    """A weight-only linear through ``gemmtune.mixed_mm``.

    original: the module whose tensors it shares. held: what ``recognise`` found in it, its scales not transposed.
    """

    layout = "raw"
    bias: Tensor | None

    def __init__(self, original: nn.Module, held: WeightOnly) -> None:
        super().__init__()
        self.in_features, self.out_features = held.weight.shape[1] * (2 if held.bits == 4 else 1), held.weight.shape[0]
        _share(self, original)
        if "bias" not in self._parameters and "bias" not in self._buffers:
            self.register_parameter("bias", None)
        self.names, self.bits, self.group_size = dict(held.names), held.bits, held.group_size
        self.spec = describe_raw(held.weight, held.scale, held.zero_point, held.bits, held.group_size)

    def forward(self, input: Tensor) -> Tensor:
        """The original's result, by the kernel that was tuned for these rows."""
        flat = input if input.dim() == 2 else input.reshape(-1, self.in_features)
        tensors = [getattr(self, self.names[name]) for name in ("weight", "scale", "zero_point") if name in self.names]
        if torch.compiler.is_compiling() or is_for_dispatcher(flat, self.bias):
            product = torch.ops.gemmtune.quantized_linear(flat, None, tensors, self.spec, self.bias, input.dtype)
        else:
            product = mixed_mm(
                flat, tensors[0].t(), *tensors[1:], bits=self.bits, group_size=self.group_size, bias=self.bias
            )
        out: Tensor = product if input.dim() == 2 else product.view(*input.shape[:-1], self.out_features)
        return out

    def give_back(self, original: nn.Module) -> None:
        """Hand the tensors to the original again."""
        _give_back(self, original)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


LIBRARY.define("tuned_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor")  # type: ignore[no-untyped-call]


def _run_tuned(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with untraced():
        return no_view(linear(input, weight, bias))


def _fake_tuned(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("tuned_linear", _run_tuned, _device)  # type: ignore[no-untyped-call]
torch.library.register_fake("gemmtune::tuned_linear", _fake_tuned, lib=LIBRARY)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, bias = inputs
    ctx.save_for_backward(weight)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
    """Gradients of the input and the bias; ``forward`` takes another way where the weight wants one."""
    (weight,) = ctx.saved_tensors
    input_grad = grad @ weight if ctx.needs_input_grad[0] else None
    bias_grad = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
    return input_grad, None, bias_grad


torch.library.register_autograd("gemmtune::tuned_linear", _backward, setup_context=_setup, lib=LIBRARY)
