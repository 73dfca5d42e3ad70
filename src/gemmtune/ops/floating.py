"""The floating-point ops: PyTorch's names, arguments and errors; the fastest kernel known for the operands.

Each asks dispatch's table (``launch.serve``) by a short key for what serves operands like its own: PyTorch's own
function or a prepared kernel. Everything else (checks, Problem, Plan) happens when the table has none: ``_first_*``.
Keys have the shape of the first operand only: with it, another's number of elements says as much, and costs less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..core import checks
from ..core.memory import is_subclass, require_memory
from ..core.weights import PackedWeight
from ..dispatch import serve
from ..dispatch.guards import autocasting
from ..dispatch.runtime import RUNTIME
from ..dispatch.serve import Sight
from ..dispatch.specialize import Pair, Serve
from ..fuse import Bound
from . import autograd, describe, dynamo

_threads = torch.get_num_threads
_grad = torch.is_grad_enabled  # the operands' check says whether one requires a gradient, and not whether it gets one
_compiling = torch.compiler.is_compiling
_serve = serve.serve

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
        return dynamo.mm(_mm, input, mat2, out_dtype, epilogue, out)
    key: Any = None
    given: tuple[Any, ...] = (input, mat2)
    checked = given
    try:
        packed = isinstance(mat2, PackedWeight)
        key = ("mm", input.shape, mat2._key if packed else mat2.numel(), _threads(), _grad())  # type: ignore[union-attr]
        if epilogue or out is not None or out_dtype is not None:
            key, given, checked = serve.with_more(key, given, packed, epilogue, out, out_dtype)
        elif packed:
            checked = (input,)
    except (AttributeError, RuntimeError, TypeError):
        key = None  # they are no operands at all, or odd ones
    result = _serve(key, given, checked)
    return _first_mm(Sight(key, given, checked), input, mat2, out_dtype, epilogue, out) if result is None else result


def _mm(a: Tensor, b: Weight, out_dtype: torch.dtype | None, epilogue: Sequence[Bound], out: Tensor | None) -> Tensor:
    checks.tensor("mm", "input", 1, a)
    checks.tensor("mm", "mat2", 2, b, packed=True)
    if isinstance(b, Tensor) and _others(a, b) and not epilogue and out_dtype is None:
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    if out is None:
        a, b = _as_autocast(a, b)
    return serve.execute("mm", describe.mm(a, b, epilogue, out_dtype), out)


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


def _first_mm(
    sight: Sight, a: Tensor, b: Weight, out_dtype: torch.dtype | None, epilogue: Sequence[Bound], out: Tensor | None
) -> Tensor:
    checks.tensor("mm", "input", 1, a)
    checks.tensor("mm", "mat2", 2, b, packed=True)
    plainly = isinstance(b, Tensor) and out is None and out_dtype is None and not epilogue
    if plainly and _others(a, b):  # type: ignore[arg-type]
        return _torchs(sight, torch.mm)
    if not sight.ordinary:
        if plainly and _alike(sight):
            return _unless(torch.mm, sight, lambda: describe.mm(a, b))
        return _mm(a, b, out_dtype, epilogue, out)
    call = describe.mm(a, b, epilogue, out_dtype)
    if out_dtype is not None or epilogue:
        return serve.meet(sight, "mm", call, _pair(call), out=out)
    return serve.meet(
        sight, "mm", call, _pair(call), function=torch.mm, into=_into_mm, differentiate=_grad_mm, out=out
    )  # fmt: skip


def _into_mm(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out=out)


def _torchs(sight: Sight, function: Serve) -> Tensor:
    """What is for PyTorch alone: it serves operands like these in a state like this one (it is right in any)."""
    require_memory(*sight.given)
    generation = RUNTIME.generation
    result = serve.shown(sight.key, function, sight.given)
    serve.keep(sight, function, generation)
    return result


def _unless(function: Serve, sight: Sight, described: Callable[[], object]) -> Tensor:
    """PyTorch's own op, which has to see its operands (transforms, modes, subclasses); where it refuses them, the
    description may know better words for it."""
    try:
        return _torchs(sight, function)
    except Exception:  # PyTorch's words for it, unless the description raises better ones
        described()
        raise


def _alike(sight: Sight) -> bool:
    """Whether the operands are of one device and dtype (of fake tensors PyTorch takes others), and nobody records what
    they are (a subclass's own arithmetic is no Problem)."""
    if sight.key is None or (RUNTIME.observer is not None and not any(map(is_subclass, sight.given))):
        return False
    first = sight.given[0]
    device, dtype = first.device, first.dtype
    return all(tensor.device == device and tensor.dtype == dtype for tensor in sight.given[1:])


def _pair(call: describe.Call) -> Pair:
    """Operands of mm, addmm and bmm as they are; activations beside a constant weight made dense when they are not."""
    if call.problem.b.constant and not call.a.is_contiguous():
        return lambda a, b, *_: (a.contiguous(), b)
    return lambda a, b, *_: (a, b)


def _grad_mm(compute: Serve, a: Tensor, b: Tensor) -> Tensor:
    return autograd.addmm(lambda: compute(a, b), mm, None, a, b, 1, 1)


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
        return dynamo.linear(_linear, input, weight, bias, epilogue, out)
    key: Any = None
    given: tuple[Any, ...] = (input, weight) if bias is None else (input, weight, bias)
    checked = given
    try:
        packed = isinstance(weight, PackedWeight)
        shown: Any = weight._key if packed else weight.numel()  # type: ignore[union-attr]
        key = ("linear", input.shape, shown, bias is None, _threads(), _grad())
        if epilogue or out is not None:
            key, given, checked = serve.with_more(key, given, packed, epilogue, out)
        elif packed:
            checked = (input,) if bias is None else (input, bias)
    except (AttributeError, RuntimeError, TypeError):
        key = None
    result = _serve(key, given, checked)
    return _first_linear(Sight(key, given, checked), input, weight, bias, epilogue, out) if result is None else result


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
    return serve.execute("linear", describe.linear(x, weight, bias, epilogue), out)


def _first_linear(
    sight: Sight, x: Tensor, weight: Weight, bias: Tensor | None, epilogue: Sequence[Bound], out: Tensor | None
) -> Tensor:
    others = _checked_linear(x, weight, bias)
    plainly = isinstance(weight, Tensor) and out is None and not epilogue
    if plainly and others:
        return _torchs(sight, functional.linear)
    if others or not sight.ordinary:
        usual = bias is None or tuple(bias.shape) == tuple(weight.shape[:1])  # others have rules of their own here
        if plainly and usual and _alike(sight):
            return _unless(functional.linear, sight, lambda: describe.linear(x, weight, bias))
        return _linear(x, weight, bias, epilogue, out)
    call = describe.linear(x, weight, bias, epilogue)
    if epilogue or (bias is not None and bias.shape != (call.problem.n,)):
        return serve.meet(sight, "linear", call, _linear_pair(call, x), out=out)
    return serve.meet(
        sight, "linear", call, _linear_pair(call, x), function=functional.linear,
        into=_into_linear if x.dim() == 2 else None, differentiate=_grad_linear, out=out,
    )  # fmt: skip


def _into_linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def _linear_pair(call: describe.Call, x: Tensor) -> Pair:
    packed, flat, rows, k = call.packed is not None, x.dim() == 2, call.problem.m, call.problem.k
    copies = call.problem.b.constant and not call.a.is_contiguous()

    def pair(x: Tensor, weight: Any) -> tuple[Tensor, Any]:
        a = x if flat else x.reshape(rows, k)
        return a.contiguous() if copies else a, weight if packed else weight.t()

    return pair


def _grad_linear(compute: Serve, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    operands = (x, weight) if bias is None else (x, weight, bias)
    return autograd.linear(lambda: compute(*operands), mm, x, weight, bias)


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
            return dynamo.outside(_addmm, input, mat1, mat2, beta, alpha, out)
        return torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha)
    key: Any = None
    given: tuple[Any, ...] = (mat1, mat2, input)
    checked = given
    try:
        packed = isinstance(mat2, PackedWeight)
        shown: Any = mat2._key if packed else mat2.numel()  # type: ignore[union-attr]
        key = ("addmm", input.numel(), mat1.shape, shown, beta, alpha, _threads(), _grad())
        if out is not None:
            key, given, checked = serve.with_more(key, given, packed, (), out)
        elif packed:
            checked = (mat1, input)
    except (AttributeError, RuntimeError, TypeError):
        key = None
    result = _serve(key, given, checked)
    return _first_addmm(Sight(key, given, checked), input, mat1, mat2, beta, alpha, out) if result is None else result


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
    return serve.execute("addmm", describe.addmm(addend, a, b, beta, alpha), out)


def _first_addmm(
    sight: Sight, addend: Tensor, a: Tensor, b: Weight, beta: float, alpha: float, out: Tensor | None
) -> Tensor:
    others = _checked_addmm(addend, a, b, beta, alpha)

    def function(a: Tensor, b: Tensor, addend: Tensor) -> Tensor:
        return torch.addmm(addend, a, b, beta=beta, alpha=alpha)

    def into(out: Tensor, a: Tensor, b: Tensor, addend: Tensor) -> Tensor:
        return torch.addmm(addend, a, b, beta=beta, alpha=alpha, out=out)

    def differentiate(compute: Serve, a: Tensor, b: Tensor, addend: Tensor) -> Tensor:
        return autograd.addmm(lambda: compute(a, b, addend), mm, addend, a, b, beta, alpha)

    plainly = isinstance(b, Tensor) and out is None
    if plainly and others:
        return _torchs(sight, function)
    if others or not sight.ordinary:
        if plainly and _alike(sight):
            return _unless(function, sight, lambda: describe.addmm(addend, a, b, beta, alpha))
        return _addmm(addend, a, b, beta, alpha, out)
    call = describe.addmm(addend, a, b, beta, alpha)
    return serve.meet(
        sight, "addmm", call, _pair(call), function=function, into=into, differentiate=differentiate, out=out
    )  # fmt: skip


def bmm(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``torch.bmm``: [batch, M, K] @ [batch, K, N], one floating dtype. Raises as ``mm``."""
    if _compiling():
        return torch.bmm(input, mat2) if out is None else dynamo.outside(_bmm, input, mat2, out)
    key: Any = None
    given: tuple[Any, ...] = (input, mat2)
    checked = given
    try:
        key = ("bmm", input.shape, mat2.numel(), _threads(), _grad())
        if out is not None:
            key, given, checked = serve.with_more(key, given, False, (), out)
    except (AttributeError, RuntimeError, TypeError):
        key = None
    result = _serve(key, given, checked)
    return _first_bmm(Sight(key, given, checked), input, mat2, out) if result is None else result


def _checked_bmm(a: Tensor, b: Tensor) -> bool:
    checks.tensor("bmm", "input", 1, a)
    checks.tensor("bmm", "mat2", 2, b)
    return _others(a, b)


def _bmm(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    if _checked_bmm(a, b):
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    return serve.execute("bmm", describe.bmm(a, b), out)


def _first_bmm(sight: Sight, a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    others = _checked_bmm(a, b)
    if others and out is None:
        return _torchs(sight, torch.bmm)
    if others or not sight.ordinary:
        if out is None and _alike(sight):
            return _unless(torch.bmm, sight, lambda: describe.bmm(a, b))
        return _bmm(a, b, out)
    call = describe.bmm(a, b)
    return serve.meet(
        sight, "bmm", call, _pair(call), function=torch.bmm, into=_into_bmm, differentiate=_grad_bmm, out=out
    )  # fmt: skip


def _into_bmm(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b, out=out)


def _grad_bmm(compute: Serve, a: Tensor, b: Tensor) -> Tensor:
    return autograd.bmm(lambda: compute(a, b), a, b)
