"""``gemmtune::product``: the operator that stands for a product in a graph until Inductor lowers it to a CallSite."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .call_site import CallSite
from .graph_call import GraphCall

LIBRARY = torch.library.Library("gemmtune", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("product(Tensor a, Tensor[] operands, str call) -> Tensor")  # type: ignore[no-untyped-call]


@functools.lru_cache(maxsize=256)
def _site(text: str) -> CallSite:
    return CallSite(text)


def _shape(a: Tensor, call: GraphCall) -> tuple[Any, ...]:
    return (*a.shape[:-1], call.problem.columns)


def _run(a: Tensor, operands: Sequence[Tensor], call: str) -> Tensor:
    """Compute the product eagerly, as graphs do that are interpreted."""
    site = _site(call)
    out = torch.empty(_shape(a, site.call), dtype=site.call.out_dtype, device=a.device)
    dense = a.contiguous() if site.call.problem.b.constant else a
    site(dense, *operands, out=out)
    return out


def _fake(a: Tensor, operands: Sequence[Tensor], call: str) -> Tensor:
    described = _described(call)
    return a.new_empty(_shape(a, described), dtype=described.out_dtype)


@functools.lru_cache(maxsize=1024)
def _described(text: str) -> GraphCall:
    return GraphCall.from_json(text)


LIBRARY.impl("product", _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("gemmtune::product", _fake, lib=LIBRARY)
product: Any = torch.ops.gemmtune.product.default
