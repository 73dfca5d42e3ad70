"""``gemmtune.linear``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import fuse
from ..core import checks
from ..core.call import Call
from ..core.problem import Problem
from ..core.weights import PackedWeight
from ..dispatch.call import TorchFunction
from ..dispatch.specialize import FunctionalFn, OperandAdapter
from ..fuse import BoundStep
from . import autograd
from .dynamo import apply_epilogue, graph_break
from .mm import describe as describe_mm
from .mm import mm
from .operands import Weight, argument, is_constant, is_torchs_alone, needs_copy, steps_of
from .spec import OpSpec


def describe(
    input: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    epilogue: Sequence[BoundStep] = (),
    *,
    constant: bool = False,
) -> Call:
    """Return the Call of ``F.linear`` and the epilogue: input [.., K], weight [N, K] (or packed), any bias that
    ``F.linear`` takes.

    constant: whether weight counts as one. Raises as ``mm.describe``.
    """
    packed = isinstance(weight, PackedWeight)
    if input.dim() == 0 or (isinstance(weight, Tensor) and weight.dim() != 2):
        shape = "" if isinstance(weight, PackedWeight) else f" and weight {list(weight.shape)}"
        raise checks.ShapeError(
            f"linear(): expected input [.., K] and weight [N, K]; got input {list(input.shape)}{shape}"
        )
    rows = input.numel() // input.shape[-1] if input.shape[-1] else math.prod(input.shape[:-1])
    flat = input if input.dim() == 2 else input.reshape(rows, input.shape[-1])
    b = weight if packed else weight.t()  # type: ignore[union-attr]
    n = b.shape[1]
    first = () if bias is None else (_bias_step(bias, (*(input.shape[:-1] or (1,)), n)),)
    steps = steps_of("linear", epilogue, *first)
    call = describe_mm(flat, b, None, steps, op="linear", prefer="col", constant=constant)
    return Call(call.problem, call.a, call.b, call.aux, (*input.shape[:-1], n))


def _bias_step(bias: Tensor, shape: tuple[int, ...]) -> fuse.BoundStep:
    """Return the step of a bias [N], or of one that broadcasts to the result's shape."""
    checks.require_tensor("linear", "bias", 3, bias)
    if bias.dim() == 1 and bias.shape[0] == shape[-1]:
        return argument("linear(): bias", fuse.bias(bias))
    if bias.dim() < 2 or bias.dim() == len(shape) == 2:
        return argument("linear(): bias", fuse.add(bias))
    try:
        return argument("linear(): bias", fuse.add(bias.expand(shape).reshape(math.prod(shape[:-1]), shape[-1])))
    except NotImplementedError:  # a subclass without expand
        raise
    except RuntimeError as error:
        raise checks.ShapeError(
            f"linear(): a bias of shape {list(bias.shape)} does not broadcast to the result {list(shape)}"
        ) from error


def _needs_torch(input: Any, weight: Any, bias: Any, **_: object) -> bool:
    """Whether the call is PyTorch's alone: integers, autocast, or the weight [K] that only F.linear takes."""
    checks.require_tensor("linear", "input", 1, input)
    checks.require_tensor("linear", "weight", 2, weight, packed=True)
    if bias is not None:
        checks.require_tensor("linear", "bias", 3, bias)
    return isinstance(weight, Tensor) and (weight.dim() == 1 or is_torchs_alone(input, weight))


def _linear_out(out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(input, weight.t(), out=out)
    return torch.addmm(bias, input, weight.t(), out=out)


def _with_backward(compute: FunctionalFn, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    operands = (input, weight) if bias is None else (input, weight, bias)
    return autograd.linear(lambda: compute(*operands), mm, input, weight, bias)


_MATRICES = TorchFunction(functional.linear, _linear_out, _with_backward)
_OTHER_SHAPES = TorchFunction(functional.linear, None, _with_backward)


def _torch_function(input: Tensor, weight: Any, bias: Tensor | None, **more: object) -> TorchFunction | None:
    if _needs_torch(input, weight, bias):
        return _OTHER_SHAPES
    columns = (weight.n,) if isinstance(weight, PackedWeight) else tuple(weight.shape[:1])
    if bias is not None and tuple(bias.shape) != columns:
        return None  # PyTorch has rules of its own for other shapes
    return _MATRICES if input.dim() == 2 else _OTHER_SHAPES


def _adapt(call: Call, input: Tensor, **_: object) -> OperandAdapter:
    packed, is_matrix, rows, k = call.packed is not None, input.dim() == 2, call.problem.m, call.problem.k
    copies = needs_copy(call)

    def adapt(input: Tensor, weight: Any) -> tuple[Tensor, Any]:
        a = input if is_matrix else input.reshape(rows, k)
        return a.contiguous() if copies else a, weight if packed else weight.t()

    return adapt


def _trace(input: Tensor, weight: Any, bias: Any, epilogue: Sequence[BoundStep], out: Tensor | None) -> Tensor:
    if isinstance(weight, PackedWeight) or out is not None or (epilogue and input.dim() != 2):
        return graph_break(linear, input, weight, bias, epilogue=epilogue, out=out)
    return apply_epilogue(functional.linear(input, weight, bias), epilogue, None)


def recorded(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Problem:
    """Return the Problem of ``F.linear``; constant when the weight is a Parameter, or a view of one."""
    return describe(input, weight, bias, constant=is_constant(weight)).problem


SPEC = OpSpec(
    name="linear",
    operands=("input", "weight", "bias"),
    describe=describe,
    trace=_trace,
    needs_torch=_needs_torch,
    torch_function=_torch_function,
    adapt=_adapt,
    records={functional.linear: recorded},
    autocasts=True,
)


@SPEC.public
def linear(  # type: ignore[empty-body]
    input: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    epilogue: Sequence[BoundStep] = (),
    out: Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.linear``: input [.., K], weight [N, K] (or packed), bias [N] (or what broadcasts).

    The epilogue sees the result as a matrix [M, N], M the product of input's leading sizes. Raises as ``mm``.
    """
