"""``gemmtune.linear``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import fuse
from ..core import checks
from ..core.call import Call
from ..core.problem import Problem
from ..core.weights import PackedWeight
from ..dispatch.specialize import TorchFunction
from ..fuse import BoundStep
from . import autograd
from .dynamo import apply_epilogue, graph_break
from .mm import describe as describe_mm
from .mm import mm
from .operands import Weight, is_constant, is_torchs_alone
from .spec import OpSpec
from .torch_linear import torch_linear


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
    if input.dim() == 0 or (isinstance(weight, Tensor) and weight.dim() != 2):
        shape = "" if isinstance(weight, PackedWeight) else f" and weight {list(weight.shape)}"
        raise checks.ShapeError(
            f"linear(): expected input [.., K] and weight [N, K]; got input {list(input.shape)}{shape}"
        )
    flatten = None if input.dim() == 2 else methodcaller("reshape", math.prod(input.shape[:-1]), input.shape[-1])
    a = input if flatten is None else flatten(input)
    b, transpose = (weight, None) if isinstance(weight, PackedWeight) else (weight.t(), Tensor.t)
    n = b.shape[1]
    arguments = {} if bias is None else {"bias": _bias_step(bias, (*(input.shape[:-1] or (1,)), n))}
    call = describe_mm(a, b, None, epilogue, op="linear", arguments=arguments, prefer="col", constant=constant)
    return call._replace(shape=(*input.shape[:-1], n), adapt_a=flatten, adapt_b=transpose)


def _bias_step(bias: Tensor, shape: tuple[int, ...]) -> fuse.BoundStep:
    """Return the step of a bias [N], or of one that broadcasts to the result's shape."""
    checks.require_tensor("linear", "bias", 3, bias)
    if bias.dim() == 1 and bias.shape[0] == shape[-1]:
        return fuse.bias(bias)
    if bias.dim() < 2 or bias.dim() == len(shape) == 2:
        return fuse.add(bias)
    try:
        return fuse.add(bias.expand(shape).reshape(math.prod(shape[:-1]), shape[-1]))
    except NotImplementedError:  # a subclass without expand
        raise
    except RuntimeError as error:
        raise checks.ShapeError(
            f"linear(): a bias of shape {list(bias.shape)} does not broadcast to the result {list(shape)}"
        ) from error


def _linear_out(out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(input, weight.t(), out=out)
    return torch.addmm(bias, input, weight.t(), out=out)


_MATRICES = TorchFunction(torch_linear, _linear_out, partial(autograd.linear, mm))
_OTHER_SHAPES = _MATRICES._replace(out=None)


def _torch_function(input: Any, weight: Any, bias: Any, **_: object) -> TorchFunction | None:
    """Return F.linear. It is required for integers, autocast, and the weight [K] that only F.linear takes."""
    checks.require_tensor("linear", "input", 1, input)
    checks.require_tensor("linear", "weight", 2, weight, packed=True)
    if bias is not None:
        checks.require_tensor("linear", "bias", 3, bias)
    if isinstance(weight, Tensor) and (weight.dim() == 1 or is_torchs_alone(input, weight)):
        return _OTHER_SHAPES._replace(required=True)
    columns = (weight.n,) if isinstance(weight, PackedWeight) else tuple(weight.shape[:1])
    if bias is not None and tuple(bias.shape) != columns:
        return None  # PyTorch has rules of its own for other shapes
    return _MATRICES if input.dim() == 2 else _OTHER_SHAPES


def _trace(input: Tensor, weight: Any, bias: Any, epilogue: Sequence[BoundStep], out: Tensor | None) -> Tensor:
    if isinstance(weight, PackedWeight) or out is not None or (epilogue and input.dim() != 2):
        return graph_break(linear, input, weight, bias, epilogue=epilogue, out=out)
    return apply_epilogue(torch_linear(input, weight, bias), epilogue, None)


def recorded(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Problem:
    """Return the Problem of ``F.linear``; constant when the weight is a Parameter, or a view of one."""
    return describe(input, weight, bias, constant=is_constant(weight)).problem


SPEC = OpSpec(
    name="linear",
    operands=("input", "weight", "bias"),
    describe=describe,
    trace=_trace,
    torch_function=_torch_function,
    raw="raw",
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
