"""Products by a PackedTensor, from torch functions and from operators, under any mode, transform or autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from ..core.checks import GradError
from ..core.memory import is_subclass
from ..dispatch.cache import lookup
from ..dispatch.torch_state import in_dispatch_mode, in_transform, is_autocast_on
from ..ops.linear import linear

if TYPE_CHECKING:
    from ..ops.products import Product
    from .packed_tensor import PackedTensor

_compiling = torch.compiler.is_compiling
_threads = torch.get_num_threads


def multiply(input: Any, weight: PackedTensor, bias: Tensor | None = None) -> Tensor:
    """Return ``F.linear(input, weight, bias)``, with ``weight.t()`` for a transposed weight: input [.., K], bias [N] or
    None.

    Raises GradError if gradients are on and the weight requires one, and what F.linear raises.
    """
    if torch.is_grad_enabled() and (weight.trainable or weight.requires_grad):
        raise GradError(
            "linear(): the weight required grad when gemmtune.optimize() packed it, and its packed form has no "
            "gradient: wrap the call in torch.no_grad(), call model.requires_grad_(False) before optimize(), or "
            "restore() the model to train it"
        )
    if weight.quantized:
        return weight.linear(input, bias)
    if _compiling():
        return _autocast(input, weight, bias, _op) if is_autocast_on(input.device.type) else _op(input, weight, bias)
    if in_transform():  # torch.jit's tracer counts as one: transforms get the unpacked weight
        return _unpacked_linear(input, weight, bias)
    try:
        packed = weight.packed
    except TypeError:  # the weight's parts are fake tensors (Dynamo of torch 2.10 and 2.11)
        return _autocast(input, weight, bias, _op) if is_autocast_on(input.device.type) else _op(input, weight, bias)
    try:  # the key of ops.linear's cache: looking it up here saves that call
        key = (input.shape, "linear", packed._key, bias is None, _threads(), torch.is_grad_enabled())
    except (AttributeError, RuntimeError):
        return _unpacked_linear(input, weight, bias)  # the input is no tensor: PyTorch raises its own error
    args = (input, packed) if bias is None else (input, packed, bias)
    result = lookup(key, args, (input,) if bias is None else (input, bias))
    if result is not None:
        return result
    if not isinstance(input, Tensor):
        return _unpacked_linear(input, weight, bias)
    if is_autocast_on(input.device.type):
        return _autocast(input, weight, bias, _packed_linear)
    return _packed_linear(input, weight, bias)


def multiply_below_autograd(product: Product, weight: PackedTensor) -> Tensor | None:
    """Return the result of an operator's product by a packed weight, for ``__torch_dispatch__``, which runs below
    autograd and autocast. None if the packed kernel does not take the operands."""
    input, bias = product.input, product.bias
    for tensor in (input, bias):
        packed = isinstance(tensor, type(weight))
        if tensor is not None and (packed or tensor.dtype != weight.dtype or tensor.device != weight.device):
            return None
    with torch.no_grad():  # the operands may still require grad, and the caller's autograd takes care of that
        if weight.quantized:
            return weight.linear(input, bias)
        if in_dispatch_mode() or in_transform() or _is_subclassed(input) or _is_subclassed(bias):
            return _op(input, weight, bias)
        return linear(input, weight.packed, bias)


def _unpacked_linear(input: Any, weight: PackedTensor, bias: Tensor | None) -> Tensor:
    """Return the product by the unpacked weight, from PyTorch."""
    values = weight.unpacked()
    return functional.linear(input, values.t() if weight.transposed else values, bias)


def _packed_linear(input: Tensor, weight: PackedTensor, bias: Tensor | None) -> Tensor:
    """Return the packed kernel's product. It goes through an operator if ``needs_operator``."""
    return _op(input, weight, bias) if needs_operator(input, bias) else linear(input, weight.packed, bias)


def needs_operator(input: Tensor, bias: Tensor | None) -> bool:
    """Whether a product of these operands must be a torch operator: a mode or a tensor subclass has to see it, or
    autograd has to differentiate it."""
    if _is_subclassed(input) or _is_subclassed(bias) or in_dispatch_mode():
        return True
    return torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad))


def _is_subclassed(tensor: Tensor | None) -> bool:
    return tensor is not None and is_subclass(tensor)


def _op(input: Tensor, weight: PackedTensor, bias: Tensor | None) -> Tensor:
    """Return the product by the operator ``gemmtune::packed_linear``."""
    packed_linear: Callable[..., Tensor] = torch.ops.gemmtune.packed_linear
    return packed_linear(input, weight.parts, weight.spec, bias, weight.raw_weight)


def _autocast(input: Tensor, weight: PackedTensor, bias: Tensor | None, product: Callable[..., Tensor]) -> Tensor:
    """Return ``product`` with the operands converted to autocast's dtype. If the weight has another dtype, which the
    packed kernel cannot convert, or the input is no floating tensor, return PyTorch's product."""
    device_type, dtype = input.device.type, torch.get_autocast_dtype(input.device.type)
    if weight.dtype != dtype or not input.is_floating_point():
        return _unpacked_linear(input, weight, bias)
    with torch.autocast(device_type, enabled=False):
        converted_input = input.to(dtype)
        converted_bias = None if bias is None else bias.to(dtype)
        return product(converted_input, weight, converted_bias)
