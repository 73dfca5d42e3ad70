"""The ops while torch.compile traces: PyTorch's own functions, which it can see through, or a graph break."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.aten.steps import apply_steps, round_to_dtype, wide_dtype
from ..core.torch_compat import disable_dynamo
from ..fuse import BoundStep

is_compiling = torch.compiler.is_compiling


@disable_dynamo
def graph_break(op: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """Run an op eagerly: for packed weights and out=, which a graph cannot hold."""
    return op(*args, **options)


def apply_epilogue(product: Tensor, epilogue: Sequence[BoundStep], out_dtype: torch.dtype | None) -> Tensor:
    """Return the epilogue of a product by PyTorch's functions, rounded to ``out_dtype`` (by default the product's)."""
    dtype = product.dtype if out_dtype is None else out_dtype
    if not epilogue:
        return product if product.dtype == dtype else product.to(dtype)
    acc = product.to(wide_dtype(product.dtype))
    for bound in epilogue:
        acc = apply_steps(acc, (bound.step,), () if bound.tensor is None else (bound.tensor,))
    return round_to_dtype(acc, dtype)
