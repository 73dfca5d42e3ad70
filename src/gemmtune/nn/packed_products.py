"""Products by a packed weight, as torch functions and as operators, in whatever state the thread is in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from ..core.checks import GradError
from ..core.memory import is_subclass
from ..dispatch.cache import lookup
from ..dispatch.guards import in_dispatch_mode, in_transform, is_autocast_on
from ..ops.linear import linear

if TYPE_CHECKING:
    from ..ops.products import Product
    from .packed_tensor import PackedTensor

_compiling = torch.compiler.is_compiling
_threads = torch.get_num_threads


def multiply(input: Any, weight: PackedTensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` by the [N, K] that ``weight`` is or is the transpose of; input [.., K], bias [N] or None.

    Raises GradError where the weight requires a gradient, and what F.linear raises.
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
    if in_transform():  # jit's tracer among them: they see an ordinary weight
        return _unpacked(input, weight, bias)
    try:
        packed = weight.packed
    except TypeError:  # its parts are fake tensors (Dynamo of torch 2.10 and 2.11)
        return _autocast(input, weight, bias, _op) if is_autocast_on(input.device.type) else _op(input, weight, bias)
    try:  # what ops.linear looks up, a call earlier
        key = ("linear", input.shape, packed._key, bias is None, _threads(), torch.is_grad_enabled())
    except (AttributeError, RuntimeError):
        return _unpacked(input, weight, bias)  # PyTorch's words for what is no tensor
    given = (input, packed) if bias is None else (input, packed, bias)
    result = lookup(key, given, (input,) if bias is None else (input, bias))
    if result is not None:
        return result
    if not isinstance(input, Tensor):
        return _unpacked(input, weight, bias)
    if is_autocast_on(input.device.type):
        return _autocast(input, weight, bias, _product)
    return _product(input, weight, bias)


def multiply_below_autograd(product: Product, weight: PackedTensor) -> Tensor | None:
    """The product that an operator asked for at ``__torch_dispatch__``, where autograd and autocast have done their
    part; None where the packed kernel does not take its operands."""
    input, bias = product.input, product.bias
    for tensor in (input, bias):
        packed = isinstance(tensor, type(weight))
        if tensor is not None and (packed or tensor.dtype != weight.dtype or tensor.device != weight.device):
            return None
    with torch.no_grad():  # the operands may require grad still, which the caller's autograd sees to
        if weight.quantized:
            return weight.linear(input, bias)
        if in_dispatch_mode() or in_transform() or _is_subclassed(input) or _is_subclassed(bias):
            return _op(input, weight, bias)
        return linear(input, weight.packed, bias)


def _unpacked(input: Any, weight: PackedTensor, bias: Tensor | None) -> Tensor:
    values = weight.unpacked()
    return functional.linear(input, values.t() if weight.transposed else values, bias)


def _product(input: Tensor, weight: PackedTensor, bias: Tensor | None) -> Tensor:
    """The packed kernel, as an operator where something has to see it or to differentiate it."""
    return _op(input, weight, bias) if is_for_dispatcher(input, bias) else linear(input, weight.packed, bias)


def is_for_dispatcher(input: Tensor, bias: Tensor | None) -> bool:
    """Whether something has to see a product by these operands, or to differentiate it: it must be an operator then."""
    if _is_subclassed(input) or _is_subclassed(bias) or in_dispatch_mode():
        return True
    return torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad))


def _is_subclassed(tensor: Tensor | None) -> bool:
    return tensor is not None and is_subclass(tensor)


def _op(input: Tensor, weight: PackedTensor, bias: Tensor | None) -> Tensor:
    packed_linear: Callable[..., Tensor] = torch.ops.gemmtune.packed_linear
    return packed_linear(input, weight.parts, weight.spec, bias)


def _autocast(input: Tensor, weight: PackedTensor, bias: Tensor | None, product: Callable[..., Tensor]) -> Tensor:
    """``product`` in autocast's dtype, where the weight has it; the packed kernel multiplies no other."""
    kind, dtype = input.device.type, torch.get_autocast_dtype(input.device.type)
    if weight.dtype != dtype or not input.is_floating_point():
        return _unpacked(input, weight, bias)
    with torch.autocast(kind, enabled=False):
        rounded = input.to(dtype)
        shift = None if bias is None else bias.to(dtype)
        return product(rounded, weight, shift)
