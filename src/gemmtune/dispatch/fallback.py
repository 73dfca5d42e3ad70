"""The fallback: a Call by PyTorch's own functions, differentiable, on any device, tensor subclass or transform.

The product rounds to the operands' dtype before the epilogue, as eager PyTorch does (a tuned kernel does not).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends.aten import padding
from ..backends.aten.cpu_rules import int_mm_takes_uint8
from ..backends.aten.cuda_narrow import scaled_wide
from ..backends.aten.cuda_rules import why_fp8_unsupported, why_scales_unsupported
from ..backends.aten.fusion import addmm_prefix
from ..backends.aten.quantized import INT8PACK_ROWS, ScaledMm, dequantize, int8pack, nibbles, scaled_operands
from ..backends.aten.steps import apply_steps, dtype_of, normalize_rows, round_to_dtype, wide_dtype
from ..core.call import Call
from ..core.epilogue import tensor_count
from ..core.torch_compat import int_mm, weight_int8pack_mm
from ..core.weights import QuantWeight
from .torch_state import needs_torch

_WIDE = (torch.float32, torch.float64, torch.int32)  # they are not converted, which would cost a tenth of the call
# A function of a Call's a, b and aux.
FallbackProduct = Callable[[Tensor, Any, Sequence[Tensor]], Tensor]


_PRODUCTS: dict[str, FallbackProduct] = {}


def register(family: str, product: FallbackProduct) -> None:
    """Set the product of an added family (``core.problem.register_family``), as a function of a Call's a, b and aux.

    Without one, a batched family is computed by ``torch.bmm`` and another by ``torch.mm``.
    """
    _PRODUCTS[family] = product


def run_fallback(call: Call) -> Tensor:
    """Return the result of a Call, in the Call's shape."""
    return specialize_fallback(call)(call.a, call.b, call.aux)


def specialize_fallback(call: Call, product: FallbackProduct | None = None) -> FallbackProduct:
    """Return a function of a, b and aux that computes Calls like this one. All that does not depend on the operands'
    values is decided here, once. product: computes the product without a norm and steps, for a b of a form that only
    the caller knows; None: by the Call's family."""
    problem, shape, norm = call.problem, call.shape, call.problem.norm_steps
    if norm:
        count = len(norm)
        behind = specialize_fallback(call._replace(problem=problem.without_norm(), aux=call.aux[count:]), product)
        return lambda a, b, aux: behind(normalize_rows(a, norm, aux[:count]), b, aux[count:])
    multiply, used = _product(call) if product is None else (product, 0)
    rest, taken = problem.epilogue[used:], tensor_count(problem.epilogue[:used])
    dtype, reshaped = dtype_of(problem.out_dtype), len(shape) != len(problem.out_shape)

    def plainly(a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        acc = multiply(a, b, aux)
        if rest:
            acc = apply_steps(acc if acc.dtype in _WIDE else acc.to(wide_dtype(acc.dtype)), rest, aux[taken:])
        result = round_to_dtype(acc, dtype)
        return result.reshape(shape) if reshaped else result

    return plainly


def _product(call: Call) -> tuple[FallbackProduct, int]:
    """Return the product as a function of a, b and aux, and the number of epilogue steps that it includes."""
    family = call.problem.family
    product, used = (
        (_PRODUCTS[family], 0) if family in _PRODUCTS else
        (_weight_only, 0) if family == "mixed_mm"
        else (_integers(call), 0) if family == "int_mm"
        else _scaled(call) if family == "scaled_mm"
        else _floating(call)
    )  # fmt: skip
    if call.packed is None:
        return product, used
    unpack = backends.get(call.packed.owner).unpack
    return lambda a, b, aux: product(a, unpack(b), aux), used


def _floating(call: Call) -> tuple[FallbackProduct, int]:
    """Return the product of floating operands; addmm includes the beginning of the epilogue (one tensor at most)."""
    problem = call.problem
    if problem.out_dtype not in (problem.a.dtype, *_NARROW):
        width = dtype_of(problem.out_dtype)
        if _widens_itself(call, width):
            widening = padding.wide_bmm if problem.is_batched else padding.wide_mm
            return lambda a, b, _: widening(a, b), 0
        return lambda a, b, _: torch.matmul(a.to(width), b.to(width)), 0
    if problem.is_batched:
        return lambda a, b, _: torch.bmm(a, b), 0
    fused = addmm_prefix(problem)
    if not fused.tensors:
        return lambda a, b, _: torch.mm(a, b), 0
    beta, alpha, rows = fused.beta, fused.alpha, fused.axis == "row"

    def added(a: Tensor, b: Tensor, aux: Sequence[Tensor]) -> Tensor:
        return torch.addmm(aux[0].unsqueeze(-1) if rows else aux[0], a, b, beta=beta, alpha=alpha)

    return added, fused.steps


_NARROW = ("bfloat16", "float16")


def _widens_itself(call: Call, width: torch.dtype) -> bool:
    """Whether the GPU's product can return its float32 accumulator: for ordinary tensors without a gradient."""
    if width != torch.float32 or not call.a.is_cuda or call.problem.a.dtype not in _NARROW:
        return False
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors)
    return not needs_grad and not needs_torch(*call.tensors)


def int_product(a: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the integer product for ``a``'s device, for operands with canonical strides (``padding``)."""
    if a.is_cuda:
        return padding.int_product
    return int_mm if a.dtype == torch.int8 or int_mm_takes_uint8() else padding.cpu_int_mm


def _integers(call: Call) -> FallbackProduct:
    if _nothing(call) or call.a.is_meta:
        return lambda a, b, _: torch.mm(a.double(), b.double()).to(torch.int32)
    product = padding.int_product if call.a.is_cuda else padding.cpu_int_mm
    return lambda a, b, _: product(a, b)


def _nothing(call: Call) -> bool:
    """Whether a matrix is empty."""
    return 0 in (call.problem.m, call.problem.n, call.problem.k)


def _scaled(call: Call) -> tuple[FallbackProduct, int]:
    """Return the product of fp8 operands. On GPUs ``torch._scaled_mm`` includes the whole epilogue where it can."""
    problem = call.problem
    if not call.a.is_cuda or _nothing(call):
        return _in_float32, 0
    capability = torch.cuda.get_device_capability(call.a.device)
    if not ScaledMm.why_illegal(problem, {}) and not why_scales_unsupported(problem, capability):
        dtype = dtype_of(problem.out_dtype)

        def product(a: Tensor, b: Tensor, aux: Sequence[Tensor]) -> Tensor:
            scale_a, scale_b, bias = scaled_operands(problem, aux)
            return padding.scaled_product(a, b, scale_a, scale_b, bias, dtype)

        return product, len(problem.epilogue)
    if why_fp8_unsupported(problem, capability):
        return _in_float32, 0
    return lambda a, b, _: scaled_wide(a, b), 0


def _in_float32(a: Tensor, b: Tensor, _: Sequence[Tensor]) -> Tensor:
    return torch.mm(a.float(), b.float())


def _weight_only(a: Tensor, b: QuantWeight, _: Sequence[Tensor]) -> Tensor:
    per_channel = b.dtype == "int8" and b.quant.group is None and b.zero_point is None
    if not per_channel:
        return torch.mm(a, dequantize(b, a.dtype))
    if _takes_int8pack(a, b):
        return int8pack(a, b)
    return torch.mm(a, nibbles(b).to(a.dtype)) * b.scale


def _takes_int8pack(a: Tensor, b: QuantWeight) -> bool:
    usual = type(a) is Tensor and a.device.type == "cpu" and a.dtype == b.scale.dtype and a.dtype != torch.float64
    legal = a.shape[1] % 16 == 0 and a.numel() > 0 and b.data.shape[1] > 0 and b.data.t().is_contiguous()
    return usual and legal and a.shape[0] <= INT8PACK_ROWS and weight_int8pack_mm is not None
