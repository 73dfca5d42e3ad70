"""Comparisons of what gemmtune puts into a model with what was there, on two random rows."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.problem import Problem
from .quantized_tensor import QuantizedTensor

log = logging.getLogger("gemmtune")


def same_product(weight: Tensor, form: QuantizedTensor, problem: Problem) -> bool:
    """Whether F.linear by torchao's ``weight`` and by gemmtune's ``form`` agree on two random rows. The norm of their
    difference may be 5% of the norm of torchao's result."""
    x = torch.randn(2, problem.k, generator=torch.Generator().manual_seed(0)).to(weight.dtype).to(weight.device)
    try:
        expected, actual = functional.linear(x, weight).double(), functional.linear(x, form).double()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        log.debug("a %s could not be compared: %s", type(weight).__name__, error)
        return False
    return expected.shape == actual.shape and bool((expected - actual).norm() <= 0.05 * expected.norm())


def computes_same(original: nn.Module, module: nn.Module, problem: Problem) -> bool:
    """Whether ``module`` computes what ``original`` does. The original was recognised as a weight-only linear by its
    attributes or by an adapter, and may compute something else.

    The two are compared on two random rows. The norm of their difference may be 5% of the norm of the original's
    result, because the original may round its weight to the activations' dtype.
    """
    x = torch.randn(2, problem.k, generator=torch.Generator().manual_seed(0)).to(getattr(torch, problem.a.dtype))
    x = x.to(next(t.device for t in (*original.parameters(False), *original.buffers(False))))
    try:
        expected, actual = original(x).double(), module(x).double()
    except (RuntimeError, TypeError, ValueError) as error:
        log.debug("%s could not be compared: %s", type(original).__name__, error)
        return False
    return expected.shape == actual.shape and bool((expected - actual).norm() <= 0.05 * expected.norm())
