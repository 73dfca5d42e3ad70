"""Comparisons of what gemmtune puts into a model with what was there, on two random rows."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.problem import Problem
from .quantized_tensor import QuantizedTensor

log = logging.getLogger("gemmtune")


def same_product(weight: Tensor, form: QuantizedTensor, problem: Problem) -> bool:
    """Whether F.linear by torchao's ``weight`` and by gemmtune's ``form`` agree on two random rows. The norm of their
    difference may be 5% of the norm of torchao's result."""
    x = _random_rows(problem).to(weight.dtype).to(weight.device)
    name = f"a {type(weight).__name__}"
    return _agree(name, lambda: functional.linear(x, weight), lambda: functional.linear(x, form))


def computes_same(original: nn.Module, module: nn.Module, problem: Problem) -> bool:
    """Whether ``module`` computes what ``original`` does. The original was recognised as a weight-only linear by its
    attributes or by an adapter, and may compute something else.

    The two are compared on two random rows. The norm of their difference may be 5% of the norm of the original's
    result, because the original may round its weight to the activations' dtype.
    """
    device = next(t.device for t in (*original.parameters(False), *original.buffers(False)))
    x = _random_rows(problem).to(getattr(torch, problem.a.dtype)).to(device)
    return _agree(type(original).__name__, lambda: original(x), lambda: module(x))


def _random_rows(problem: Problem) -> Tensor:
    return torch.randn(2, problem.k, generator=torch.Generator().manual_seed(0))


def _agree(name: str, compute_expected: Callable[[], Tensor], compute: Callable[[], Tensor]) -> bool:
    try:
        expected, actual = compute_expected().double(), compute().double()
    except (RuntimeError, TypeError, ValueError) as error:
        log.debug("%s could not be compared: %s", name, error)
        return False
    return expected.shape == actual.shape and bool((expected - actual).norm() <= 0.05 * expected.norm())
