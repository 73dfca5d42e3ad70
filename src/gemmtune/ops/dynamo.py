"""The ops while torch.compile is tracing: plain PyTorch that it can see through, or a step out of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..backends.aten.steps import apply, finish, wide
from ..core.torch_compat import disable_dynamo
from ..core.weights import PackedWeight
from ..fuse import Bound

is_compiling = torch.compiler.is_compiling


@disable_dynamo
def outside(function: Callable[..., Tensor], *operands: Any) -> Tensor:
    """Run ``function`` eagerly: a graph break, for what a graph cannot hold (packed weights, out=)."""
    return function(*operands)


def mm(op: Callable[..., Tensor], a: Tensor, b: Any, out_dtype: Any, epilogue: Sequence[Bound], out: Any) -> Tensor:
    """``ops.mm`` for a tracer; ``op`` is its eager form."""
    if isinstance(b, PackedWeight) or out is not None:
        return outside(op, a, b, out_dtype, epilogue, out)
    return _tail(torch.mm(a, b), epilogue, out_dtype)


def linear(op: Callable[..., Tensor], x: Tensor, weight: Any, bias: Any, epilogue: Sequence[Bound], out: Any) -> Tensor:
    """``ops.linear`` for a tracer."""
    if isinstance(weight, PackedWeight) or out is not None or (epilogue and x.dim() != 2):
        return outside(op, x, weight, bias, epilogue, out)
    return _tail(functional.linear(x, weight, bias), epilogue, None)


def _tail(product: Tensor, epilogue: Sequence[Bound], out_dtype: torch.dtype | None) -> Tensor:
    dtype = product.dtype if out_dtype is None else out_dtype
    if not epilogue:
        return product if product.dtype == dtype else product.to(dtype)
    acc = product.to(wide(product.dtype))
    for bound in epilogue:
        acc = apply(acc, (bound.step,), () if bound.tensor is None else (bound.tensor,))
    return finish(acc, dtype)
