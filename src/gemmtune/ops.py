"""The floating-point ops: PyTorch's names, arguments and errors; the fastest kernel known for the operands.

Each looks its operands' shapes, strides and dtypes up in dispatch's table; what it finds is either PyTorch's own
function or a prepared kernel. Everything else (checks, Problem, Plan) happens on the first sight of a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import autograd, checks, describe, launch, traced
from .backends.base import PackedWeight
from .dispatch.guards import autocasting
from .dispatch.runtime import RUNTIME, TABLE
from .fuse import Bound

_lookup = TABLE.get
_threads = torch.get_num_threads
_compiling = torch.compiler.is_compiling

Weight = Tensor | PackedWeight


def mm(
    input: Tensor,
    mat2: Weight,
    *,
    out_dtype: torch.dtype | None = None,
    epilogue: Sequence[Bound] = (),
    out: Tensor | None = None,
) -> Tensor:
    """``torch.mm``: input [M, K] @ mat2 [K, N] (or packed), then the epilogue, then one rounding to ``out_dtype``.

    dtypes: one floating dtype for both (integers go to ``torch.mm`` as they are). out_dtype: a floating dtype, by
    default the input's. Raises TypeError, ShapeError, DtypeError, GradError or PackedWeightError before anything runs.
    """
    if _compiling():
        return traced.mm(_mm, input, mat2, out_dtype, epilogue, out)
    if epilogue or out is not None or out_dtype is not None:
        return _mm(input, mat2, out_dtype, epilogue, out)
    try:
        shown: Any = (
            mat2._key
            if isinstance(mat2, PackedWeight)
            else (mat2.shape, mat2.stride(), mat2.dtype, mat2.is_cpu or mat2.device)
        )
        key = ("mm", input.shape, input.stride(), input.dtype, input.is_cpu or input.device, shown, _threads())
    except (AttributeError, RuntimeError, TypeError):
        return _mm(input, mat2, None, (), None)
    entry = _lookup(key) or _first_mm(key, input, mat2)
    return entry(input, mat2)


def _mm(a: Tensor, b: Weight, out_dtype: torch.dtype | None, epilogue: Sequence[Bound], out: Tensor | None) -> Tensor:
    checks.tensor("mm", "input", 1, a)
    checks.tensor("mm", "mat2", 2, b, packed=True)
    if isinstance(b, Tensor) and _others(a, b) and not epilogue and out_dtype is None:
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    if out is None:
        a, b = _as_autocast(a, b)
    return launch.execute("mm", describe.mm(a, b, epilogue, out_dtype), out)


def _as_autocast(a: Tensor, b: Weight) -> tuple[Tensor, Weight]:
    """Operands in autocast's dtype where it is on. (PyTorch sees the epilogue's multiply too late to decide it; a
    packed weight has one dtype, and out= is not autocast.)"""
    if isinstance(b, PackedWeight) or not autocasting(a.device.type):
        return a, b
    dtype = torch.get_autocast_dtype(a.device.type)
    casts = (torch.float32, torch.bfloat16, torch.float16)
    left, right = (t.to(dtype) if t.dtype in casts else t for t in (a, b))
    return left, right


def _others(*operands: Tensor) -> bool:
    """Whether this is PyTorch's alone: one dtype that Problems do not know (integers, bool), or autocast decides."""
    dtype = operands[0].dtype
    if autocasting(operands[0].device.type):
        return True
    return dtype not in checks.FLOATS and all(operand.dtype == dtype for operand in operands)


def _first_mm(key: Any, a: Tensor, b: Weight) -> launch.Entry:
    checks.tensor("mm", "input", 1, a)
    checks.tensor("mm", "mat2", 2, b, packed=True)
    if isinstance(b, Tensor) and _others(a, b):
        return torch.mm
    call = describe.mm(a, b)
    return _entry(key, call, (a, b), _pair(call), _grad_mm, torch.mm, _described_mm)


def _described_mm(a: Tensor, b: Weight, _: None = None) -> Tensor:
    return launch.execute("mm", describe.mm(a, b))


def _entry(
    key: Any, call: describe.Call, given: tuple[Any, ...], prepare: launch.Prepare, grad: launch.Entry,
    function: launch.Entry, described: launch.Entry,
) -> launch.Entry:  # fmt: skip
    """What serves operands like those ``given`` from now on: a kernel, PyTorch's ``function``, or the general path."""
    generation = RUNTIME.generation
    if RUNTIME.observer is not None or launch.passing(call):
        return described
    if call.packed is not None:
        entry = launch.prepared(call, given, prepare, grad, described) or described
    else:

        def plainly(*operands: Any) -> Tensor:
            return function(*_given(operands))

        entry = launch.prepared(call, given, prepare, grad, plainly) or function
    RUNTIME.remember(key, entry, generation)
    return entry


def _given(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Operands without an absent last one (bias)."""
    return operands if operands[-1] is not None else operands[:-1]


def _pair(call: describe.Call) -> launch.Prepare:
    """Operands of mm and bmm as they are; activations beside a constant weight made dense when they are not."""
    if call.problem.b.constant and not call.a.is_contiguous():
        return lambda a, b, extra: (a.contiguous(), b, () if extra is None else (extra,))
    return lambda a, b, extra: (a, b, () if extra is None else (extra,))


def _grad_mm(compute: launch.Entry, a: Tensor, b: Weight, _: None) -> Tensor:
    if isinstance(b, PackedWeight):
        checks.no_grad_for("mm", "a packed weight", a)
        return compute(a, b, None)
    return autograd.addmm(lambda: compute(a, b, None), None, a, b, 1, 1)


def linear(
    input: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    epilogue: Sequence[Bound] = (),
    out: Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.linear``: input [.., K], weight [N, K] (or packed), bias [N] (or what broadcasts).

    The epilogue sees the result as a matrix [M, N], M the product of input's leading sizes. Raises as ``mm``.
    """
    if _compiling():
        return traced.linear(_linear, input, weight, bias, epilogue, out)
    if epilogue or out is not None:
        return _linear(input, weight, bias, epilogue, out)
    try:
        shown: Any = (
            weight._key if isinstance(weight, PackedWeight)
            else (weight.shape, weight.stride(), weight.dtype, weight.is_cpu or weight.device)
        )  # fmt: skip
        key: Any = (
            ("linear", input.shape, input.stride(), input.dtype, input.is_cpu or input.device, shown, _threads())
            if bias is None
            else ("linear", input.shape, input.stride(), input.dtype, input.is_cpu or input.device, shown, _threads(),
                  bias.shape, bias.stride(), bias.dtype, bias.is_cpu or bias.device)
        )  # fmt: skip
    except (AttributeError, RuntimeError, TypeError):
        return _linear(input, weight, bias, (), None)
    entry = _lookup(key) or _first_linear(key, input, weight, bias)
    return entry(input, weight, bias)


def _checked_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    """Check the operands' kinds; whether they are for PyTorch alone (integers, or the odd shapes F.linear takes)."""
    checks.tensor("linear", "input", 1, x)
    checks.tensor("linear", "weight", 2, weight, packed=True)
    if bias is not None:
        checks.tensor("linear", "bias", 3, bias)
    return isinstance(weight, Tensor) and (weight.dim() == 1 or _others(x, weight))


def _linear(x: Tensor, weight: Weight, bias: Tensor | None, epilogue: Sequence[Bound], out: Tensor | None) -> Tensor:
    if _checked_linear(x, weight, bias) and isinstance(weight, Tensor) and not epilogue:
        result = functional.linear(x, weight, bias)
        return result if out is None else out.copy_(result)
    if out is None:
        x, weight = _as_autocast(x, weight)
    return launch.execute("linear", describe.linear(x, weight, bias, epilogue), out)


def _first_linear(key: Any, x: Tensor, weight: Weight, bias: Tensor | None) -> launch.Entry:
    if _checked_linear(x, weight, bias):
        return functional.linear
    call = describe.linear(x, weight, bias)
    if bias is None or (tuple(bias.shape) == (call.problem.n,) and bias.is_contiguous()):
        given = (x, weight, bias)
        return _entry(key, call, given, _linear_operands(call, x), _grad_linear, functional.linear, _described_linear)
    return _described_linear


def _described_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    return launch.execute("linear", describe.linear(x, weight, bias))


def _linear_operands(call: describe.Call, x: Tensor) -> launch.Prepare:
    packed, flat, rows, k = call.packed is not None, x.dim() == 2, call.problem.m, call.problem.k
    copies = call.problem.b.constant and not call.a.is_contiguous()

    def prepare(x: Tensor, weight: Any, bias: Tensor | None) -> tuple[Tensor, Any, Sequence[Tensor]]:
        a = x if flat else x.reshape(rows, k)
        if copies:
            a = a.contiguous()
        return a, weight if packed else weight.t(), () if bias is None else (bias,)

    return prepare


def _grad_linear(compute: launch.Entry, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    if isinstance(weight, PackedWeight):
        checks.no_grad_for("linear", "a packed weight", x, bias)
        return compute(x, weight, bias)
    return autograd.linear(lambda: compute(x, weight, bias), x, weight, bias)


def addmm(
    input: Tensor,
    mat1: Tensor,
    mat2: Weight,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """``torch.addmm``: ``beta * input + alpha * (mat1 @ mat2)``; input broadcasts to [M, N], and is ignored (NaN
    and all) when beta is 0. Raises as ``mm``."""
    if _compiling():
        if isinstance(mat2, PackedWeight) or out is not None:
            return traced.outside(_addmm, input, mat1, mat2, beta, alpha, out)
        return torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha)
    if out is not None:
        return _addmm(input, mat1, mat2, beta, alpha, out)
    try:
        weight: Any = (
            mat2._key
            if isinstance(mat2, PackedWeight)
            else (mat2.shape, mat2.stride(), mat2.dtype, mat2.is_cpu or mat2.device)
        )
        key: Any = (
            "addmm", input.shape, input.stride(), input.dtype, input.is_cpu or input.device, mat1.shape, mat1.stride(),
            mat1.dtype, mat1.is_cpu or mat1.device, weight, beta, alpha, _threads(),
        )  # fmt: skip
        entry = _lookup(key)
    except (AttributeError, RuntimeError, TypeError):
        return _addmm(input, mat1, mat2, beta, alpha, None)
    entry = entry or _first_addmm(key, input, mat1, mat2, beta, alpha)
    return entry(mat1, mat2, input)


def _checked_addmm(addend: Tensor, a: Tensor, b: Weight, beta: float, alpha: float) -> bool:
    checks.tensor("addmm", "input", 1, addend)
    checks.tensor("addmm", "mat1", 2, a)
    checks.tensor("addmm", "mat2", 3, b, packed=True)
    for name, value in (("beta", beta), ("alpha", alpha)):
        if not isinstance(value, int | float):
            raise TypeError(f"addmm(): {name} must be a number, not {type(value).__name__}")
    return isinstance(b, Tensor) and _others(a, b, addend)


def _addmm(addend: Tensor, a: Tensor, b: Weight, beta: float, alpha: float, out: Tensor | None) -> Tensor:
    if _checked_addmm(addend, a, b, beta, alpha) and isinstance(b, Tensor):
        result = torch.addmm(addend, a, b, beta=beta, alpha=alpha)
        return result if out is None else out.copy_(result)
    return launch.execute("addmm", describe.addmm(addend, a, b, beta, alpha), out)


def _first_addmm(key: Any, addend: Tensor, a: Tensor, b: Weight, beta: float, alpha: float) -> launch.Entry:
    def plainly(a: Tensor, b: Any, addend: Tensor) -> Tensor:
        return torch.addmm(addend, a, b, beta=beta, alpha=alpha)

    def described(a: Tensor, b: Weight, addend: Tensor) -> Tensor:
        return launch.execute("addmm", describe.addmm(addend, a, b, beta, alpha))

    def differentiate(compute: launch.Entry, a: Tensor, b: Weight, addend: Tensor) -> Tensor:
        if isinstance(b, PackedWeight):
            checks.no_grad_for("addmm", "a packed weight", a, addend)
            return compute(a, b, addend)
        return autograd.addmm(lambda: compute(a, b, addend), addend, a, b, beta, alpha)

    if _checked_addmm(addend, a, b, beta, alpha):
        return plainly
    call = describe.addmm(addend, a, b, beta, alpha)
    if len(call.aux) == 1 and call.aux[0].shape == addend.shape and addend.is_contiguous():
        return _entry(key, call, (a, b, addend), _pair(call), differentiate, plainly, described)
    return described


def bmm(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``torch.bmm``: [batch, M, K] @ [batch, K, N], one floating dtype. Raises as ``mm``."""
    if _compiling():
        return torch.bmm(input, mat2) if out is None else traced.outside(_bmm, input, mat2, out)
    if out is not None:
        return _bmm(input, mat2, out)
    try:
        key = (
            "bmm", input.shape, input.stride(), input.dtype, input.is_cpu or input.device, mat2.shape, mat2.stride(),
            mat2.dtype, mat2.is_cpu or mat2.device, _threads(),
        )  # fmt: skip
    except (AttributeError, RuntimeError, TypeError):
        return _bmm(input, mat2, None)
    entry = _lookup(key) or _first_bmm(key, input, mat2)
    return entry(input, mat2)


def _checked_bmm(a: Tensor, b: Tensor) -> bool:
    checks.tensor("bmm", "input", 1, a)
    checks.tensor("bmm", "mat2", 2, b)
    return _others(a, b)


def _bmm(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    if _checked_bmm(a, b):
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    return launch.execute("bmm", describe.bmm(a, b), out)


def _first_bmm(key: Any, a: Tensor, b: Tensor) -> launch.Entry:
    if _checked_bmm(a, b):
        return torch.bmm
    call = describe.bmm(a, b)
    return _entry(key, call, (a, b), _pair(call), _grad_bmm, torch.bmm, lambda a, b, _=None: _bmm(a, b, None))


def _grad_bmm(compute: launch.Entry, a: Tensor, b: Tensor, _: None) -> Tensor:
    return autograd.bmm(lambda: compute(a, b, None), a, b)
