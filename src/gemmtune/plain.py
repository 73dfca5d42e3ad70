"""What serves when nothing was tuned: plain PyTorch, differentiable, on any device, subclass or transform.

The product rounds to the operands' dtype before the epilogue, as eager PyTorch does (a tuned kernel does not).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import backends
from .backends.aten import padding
from .backends.aten.cuda_narrow import scaled_wide
from .backends.aten.cuda_rules import scaled_hardware, scaled_kinds
from .backends.aten.fusion import addmm_prefix
from .backends.aten.quantized import ScaledMm, dequantize, int8pack, nibbles, scaled_operands
from .backends.aten.steps import apply, dtype_of, finish, wide
from .backends.base import PackedWeight, QuantWeight
from .describe import Call
from .dispatch.guards import special, special_state
from .epilogue import tensor_count

# Beyond this many rows converting the weight pays, because _weight_int8pack_mm reuses nothing between rows.
_INT8PACK_ROWS = 16


def run(call: Call) -> Tensor:
    """The result of a Call, in its own shape."""
    problem = call.problem
    b: Any = call.b
    if isinstance(b, PackedWeight):
        b = backends.get(b.layout.partition(":")[0]).unpack(b)
    dtype = dtype_of(problem.out_dtype)
    if problem.family == "mixed_mm":
        acc, used = _weight_only(call.a, b), 0
    elif problem.family == "int_mm":
        acc, used = _integers(call.a, b), 0
    elif problem.family == "scaled_mm":
        acc, used = _scaled(call, b)
    else:
        acc, used = _floating(call, b)
    rest = problem.epilogue[used:]
    if rest:
        acc = apply(acc.to(wide(acc.dtype)), rest, call.aux[tensor_count(problem.epilogue[:used]) :])
    return finish(acc, dtype).reshape(call.shape)


def _floating(call: Call, b: Tensor) -> tuple[Tensor, int]:
    """The product, with what addmm fuses of the epilogue (one tensor at most); and how many steps that took."""
    problem = call.problem
    if problem.out_dtype not in (problem.a.dtype, *_NARROW):
        width = dtype_of(problem.out_dtype)
        if _widens_itself(call, width):
            return (padding.wide_bmm if problem.family == "bmm" else padding.wide_mm)(call.a, b), 0
        return torch.matmul(call.a.to(width), b.to(width)), 0
    if problem.family == "bmm":
        return torch.bmm(call.a, b), 0
    fused = addmm_prefix(problem)
    if fused.tensors:
        addend = call.aux[0].unsqueeze(-1) if fused.axis == "row" else call.aux[0]
        return torch.addmm(addend, call.a, b, beta=fused.beta, alpha=fused.alpha), fused.steps
    return torch.mm(call.a, b), 0


_NARROW = ("bfloat16", "float16")


def _widens_itself(call: Call, width: torch.dtype) -> bool:
    """Whether a GPU's own product gives its float32 accumulator: of ordinary tensors that want no gradient."""
    if width != torch.float32 or not call.a.is_cuda or call.problem.a.dtype not in _NARROW or special_state():
        return False
    return not any(special(t) or (torch.is_grad_enabled() and t.requires_grad) for t in call.tensors)


def int_product(a: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """What multiplies integers where ``a`` lies: ``torch._int_mm``, whose rules on CUDA are seen to."""
    return padding.int_product if a.is_cuda else torch._int_mm


def _integers(a: Tensor, b: Tensor) -> Tensor:
    if 0 in (*a.shape, *b.shape) or a.is_meta:
        return torch.mm(a.double(), b.double()).to(torch.int32)
    return int_product(a)(a, b)


def _scaled(call: Call, b: Tensor) -> tuple[Tensor, int]:
    """The fp8 product, and how many steps of the epilogue are in it: on GPUs ``torch._scaled_mm`` takes them all where
    it can."""
    a, problem = call.a, call.problem
    if not a.is_cuda or 0 in (*a.shape, *b.shape):
        return torch.mm(a.float(), b.float()), 0
    capability = torch.cuda.get_device_capability(a.device)
    if not ScaledMm.illegal(problem, {}) and not scaled_kinds(problem, capability):
        scale_a, scale_b, bias = scaled_operands(problem, call.aux)
        return padding.scaled_product(a, b, scale_a, scale_b, bias, dtype_of(problem.out_dtype)), len(problem.epilogue)
    if scaled_hardware(problem, capability):
        return torch.mm(a.float(), b.float()), 0
    return scaled_wide(a, b), 0


def _weight_only(a: Tensor, b: QuantWeight) -> Tensor:
    per_channel = b.dtype == "int8" and b.quant.group is None and b.zero_point is None
    if not per_channel:
        return torch.mm(a, dequantize(b, a.dtype))
    if _takes_int8pack(a, b):
        return int8pack(a, b)
    return torch.mm(a, nibbles(b).to(a.dtype)) * b.scale


def _takes_int8pack(a: Tensor, b: QuantWeight) -> bool:
    usual = type(a) is Tensor and a.device.type == "cpu" and a.dtype == b.scale.dtype and a.dtype != torch.float64
    legal = a.shape[1] % 16 == 0 and a.numel() > 0 and b.data.shape[1] > 0 and b.data.t().is_contiguous()
    return usual and legal and a.shape[0] <= _INT8PACK_ROWS
