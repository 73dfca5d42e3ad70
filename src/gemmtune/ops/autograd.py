"""Gradients of the floating-point ops. A tuned kernel computes the forward; gemmtune.mm (passed in) or torch.bmm
computes the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

Compute = Callable[..., Tensor]  # of an op's operands, in the order of launches
MatrixMultiply = Callable[[Tensor, Tensor], Tensor]


class Linear(Function):
    """The autograd function of ``x @ weight.T + bias``: x [.., K], weight [N, K], bias [N] or None."""

    @staticmethod
    def forward(
        ctx: Any, compute: Compute, mm: MatrixMultiply, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mm = mm
        ctx.bias_shape = None if bias is None else bias.shape
        return compute(x, weight) if bias is None else compute(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        _, _, need_x, need_weight, need_bias = ctx.needs_input_grad
        grad_x = ctx.mm(grad, weight).reshape(x.shape) if need_x else None
        grad_weight = ctx.mm(grad.t(), x.reshape(-1, x.shape[-1])) if need_weight else None
        grad_bias = grad.sum_to_size(ctx.bias_shape) if need_bias else None
        return None, None, grad_x, grad_weight, grad_bias


class Addmm(Function):
    """The autograd function of ``beta * addend + alpha * (a @ b)``, and of mm, whose addend is None."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: Compute,
        mm: MatrixMultiply,
        addend: Tensor | None,
        a: Tensor,
        b: Tensor,
        beta: float,
        alpha: float,
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.mm = mm
        ctx.addend_shape = None if addend is None else addend.shape
        ctx.beta, ctx.alpha = beta, alpha
        return compute(a, b) if addend is None else compute(a, b, addend)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        scaled = grads[0] if ctx.alpha == 1 else grads[0] * ctx.alpha
        _, _, need_addend, need_a, need_b, _, _ = ctx.needs_input_grad
        grad_addend = (grads[0] * ctx.beta).sum_to_size(ctx.addend_shape) if need_addend else None
        grad_a = ctx.mm(scaled, b.t()) if need_a else None
        grad_b = ctx.mm(a.t(), scaled) if need_b else None
        return None, None, grad_addend, grad_a, grad_b, None, None


class Bmm(Function):
    """The autograd function of ``a @ b`` over a batch: a [B, M, K], b [B, K, N]."""

    @staticmethod
    def forward(ctx: Any, compute: Compute, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return compute(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        _, need_a, need_b = ctx.needs_input_grad
        grad_a = torch.bmm(grads[0], b.mT) if need_a else None
        grad_b = torch.bmm(a.mT, grads[0]) if need_b else None
        return None, grad_a, grad_b


def linear(mm: MatrixMultiply, compute: Compute, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``compute`` of the operands, recorded for autograd as ``x @ weight.T + bias``.

    mm: the function with which the backward multiplies.
    """
    out: Tensor = Linear.apply(compute, mm, x, weight, bias)  # type: ignore[no-untyped-call]
    return out


def addmm(
    mm: MatrixMultiply, compute: Compute, addend: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float
) -> Tensor:
    """Return ``compute`` of the operands, recorded for autograd as ``beta * addend + alpha * (a @ b)``; without an
    addend as mm.

    mm: the function with which the backward multiplies.
    """
    out: Tensor = Addmm.apply(compute, mm, addend, a, b, beta, alpha)  # type: ignore[no-untyped-call]
    return out


def bmm(compute: Compute, a: Tensor, b: Tensor) -> Tensor:
    """Return ``compute(a, b)``, recorded for autograd as the batched ``a @ b``."""
    out: Tensor = Bmm.apply(compute, a, b)  # type: ignore[no-untyped-call]
    return out
