"""Tensors -> Problem. Each function checks its operands (``checks``) and returns the Call that dispatch can run.

A weight held by an ``nn.Parameter`` or a PackedWeight is a constant operand when ``constant`` says so; activations
beside a constant weight are described as dense (they are copied when they are not), so that one Plan serves them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import fuse
from ..backends.aten.padding import canonical_strides
from ..core import checks
from ..core.call import Call
from ..core.epilogue import Step
from ..core.problem import Family, Layout, Operand, Order, Problem, Quant
from ..core.weights import PackedWeight, QuantWeight

Weight = Tensor | PackedWeight


def name_of(dtype: torch.dtype) -> str:
    """The name Problems use for a torch dtype."""
    return str(dtype).removeprefix("torch.")


def layout_of(matrix: Tensor, prefer: Order = "row") -> Layout:
    """How the last two dimensions lie in memory; ``prefer`` decides when both orders describe it (a vector)."""
    rows, cols = matrix.shape[-2:]
    slow, fast = matrix.stride()[-2:]
    row = _order("row", rows, cols, slow, fast)
    col = _order("col", cols, rows, fast, slow)
    first, second = (row, col) if prefer == "row" else (col, row)
    return first or second or Layout("strided")


def _order(order: Order, outer: int, inner: int, slow: int, fast: int) -> Layout | None:
    if inner > 1 and fast != 1:
        return None
    if outer <= 1 or slow == inner:
        return Layout(order)
    return Layout(order, slow) if slow > inner else None


def _a_operand(a: Tensor, constant_b: bool) -> Operand:
    return Operand(name_of(a.dtype), Layout() if constant_b else layout_of(a))


def _b_operand(b: Weight, prefer: Order, constant: bool) -> Operand:
    if isinstance(b, PackedWeight):
        return Operand(b.dtype, Layout(_known_order(b.raw_order)), constant=True, quant=b.quant)
    return Operand(name_of(b.dtype), layout_of(b, prefer), constant=constant)


def _known_order(order: str) -> Order:
    return "col" if order == "col" else "row"


def _acc(a: str) -> str:
    return {"float64": "float64", "int8": "int32", "uint8": "int32"}.get(a, "float32")


def _bind(bounds: Sequence[fuse.Bound], m: int, n: int, batch: int | None = None) -> tuple[tuple[Step, ...], Any]:
    """Steps with their axes settled, and their tensors."""
    pairs = [fuse.resolve(bound, m, n, batch) for bound in bounds]
    return tuple(step for step, _ in pairs), tuple(tensor for _, tensor in pairs if tensor is not None)


def steps_of(op: str, epilogue: Sequence[fuse.Bound], *first: fuse.Bound) -> tuple[fuse.Bound, ...]:
    """``first`` and then what the caller passed as epilogue. Raises TypeError for what holds no steps."""
    if isinstance(epilogue, fuse.Bound):
        raise TypeError(f"{op}(): epilogue must be a list of steps made by gemmtune.fuse; got one step alone")
    for bound in epilogue:
        if not isinstance(bound, fuse.Bound):
            raise TypeError(f"{op}(): epilogue must hold steps made by gemmtune.fuse; got {type(bound).__name__}")
    return (*first, *epilogue)


def _same_devices(op: str, a: Tensor, b: Weight, bounds: Sequence[fuse.Bound]) -> None:
    if isinstance(b, PackedWeight) and a.device != b.device and not a.is_meta:
        raise checks.DtypeError(
            f"{op}(): expected all tensors to be on the same device, but the input is on {a.device} and the packed "
            f"weight is on {b.device}"
        )
    checks.same_device(op, ("input", a), ("mat2", b), *((_short(bound), bound.tensor) for bound in bounds))


def _short(bound: fuse.Bound) -> str:
    """What an error calls a step's tensor among the other operands."""
    return bound.name.rpartition(" ")[2] if isinstance(bound, fuse.Argument) else "an epilogue tensor"


def mm(
    a: Tensor, b: Weight, bounds: Sequence[fuse.Bound] = (), out_dtype: torch.dtype | None = None,
    *, op: str = "mm", prefer: Order = "row", constant: bool = False,
) -> Call:  # fmt: skip
    """``epilogue(a[M, K] @ b[K, N])`` for floating a and b of one dtype. Raises what ``checks`` raises."""
    bounds = steps_of(op, bounds)
    checks.matrix(op, "input" if op == "mm" else "mat1", a)
    if not isinstance(b, PackedWeight):
        checks.matrix(op, "mat2", b)
        checks.inner(tuple(a.shape), tuple(b.shape))
        checks.same_dtype(a.dtype, b.dtype)
    else:
        checks.packed_fits(op, b, a.shape[1], (name_of(a.dtype),), quantized=False)
    checks.one_of(op, "the operands' dtype", a.dtype, checks.FLOATS)
    _same_devices(op, a, b, bounds)
    out = checks.out_dtype(op, a.dtype if out_dtype is None else out_dtype, checks.FLOATS)
    return _matrix_call("mm", a, b, bounds, out, prefer, constant)


def _matrix_call(
    family: Family, a: Tensor, b: Weight, bounds: Sequence[fuse.Bound], out: torch.dtype, prefer: Order, constant: bool
) -> Call:
    (m, k), n = a.shape, b.shape[1]
    steps, aux = _bind(bounds, m, n)
    weight = _b_operand(b, prefer, constant)
    activations = _a_operand(a, weight.constant)
    problem = Problem(
        family, m, n, k, activations, weight, name_of(out), epilogue=steps, acc=_acc(activations.dtype)
    )  # fmt: skip
    return Call(problem, a, b, aux, (m, n))


def linear(
    x: Tensor, weight: Weight, bias: Tensor | None, bounds: Sequence[fuse.Bound] = (), *, constant: bool = False
) -> Call:
    """``F.linear`` with x [.., K], weight [N, K] (or packed) and any bias ``F.linear`` takes. Raises as ``mm``."""
    packed = isinstance(weight, PackedWeight)
    if x.dim() == 0 or (isinstance(weight, Tensor) and weight.dim() != 2):
        shape = "" if isinstance(weight, PackedWeight) else f" and weight {list(weight.shape)}"
        raise checks.ShapeError(f"linear(): expected input [.., K] and weight [N, K]; got input {list(x.shape)}{shape}")
    rows = x.numel() // x.shape[-1] if x.shape[-1] else _rows(x)
    flat = x if x.dim() == 2 else x.reshape(rows, x.shape[-1])
    b = weight if packed else weight.t()  # type: ignore[union-attr]
    first = () if bias is None else (_bias(bias, (*(x.shape[:-1] or (1,)), b.shape[1])),)
    call = mm(flat, b, steps_of("linear", bounds, *first), op="linear", prefer="col", constant=constant)
    return Call(call.problem, call.a, call.b, call.aux, (*x.shape[:-1], b.shape[1]))


def _rows(x: Tensor) -> int:
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return rows


def _bias(bias: Tensor, shape: tuple[int, ...]) -> fuse.Bound:
    """A bias [N], or one that broadcasts to the result's shape (which has as many dimensions as the input)."""
    checks.tensor("linear", "bias", 3, bias)
    if bias.dim() == 1 and bias.shape[0] == shape[-1]:
        return argument("linear(): bias", fuse.bias(bias))
    if bias.dim() < 2 or bias.dim() == len(shape) == 2:
        return argument("linear(): bias", fuse.add(bias))
    try:
        return argument("linear(): bias", fuse.add(bias.expand(shape).reshape(math.prod(shape[:-1]), shape[-1])))
    except NotImplementedError:  # a subclass without it
        raise
    except RuntimeError as error:
        raise checks.ShapeError(
            f"linear(): a bias of shape {list(bias.shape)} does not broadcast to the result {list(shape)}"
        ) from error


def argument(name: str, bound: fuse.Bound) -> fuse.Bound:
    """The step of a tensor that was given as an argument, which errors are to call by its name."""
    return fuse.Argument(bound.step, bound.tensor, bound.axis, name=name)


def addmm(
    addend: Tensor, a: Tensor, b: Weight, beta: float, alpha: float, *, constant: bool = False, op: str = "addmm"
) -> Call:
    """``beta * addend + alpha * (a @ b)``; the addend broadcasts, and is ignored when beta is 0."""
    if addend.dtype != a.dtype:
        raise checks.DtypeError(
            f"self and mat2 must have the same dtype, but got {name_of(addend.dtype)} and {name_of(a.dtype)}"
        )
    bounds = [] if alpha == 1 else [fuse.scale(float(alpha))]
    if beta != 0:
        n = b.shape[-1]
        column = tuple(addend.shape) in ((n,), (1, n)) and n > 1
        step = fuse.bias(addend.reshape(-1)) if column else fuse.add(addend)
        if beta != 1 or not column:
            step = _weighted(addend, float(beta), column)
        bounds.append(argument(f"{op}(): input", step))
    return mm(a, b, bounds, op=op, constant=constant)


def _weighted(addend: Tensor, beta: float, column: bool) -> fuse.Bound:
    bound = fuse.add(addend, beta)
    if not column:
        return bound
    return fuse.Bound(Step("bias", "col", bound.step.dtype, beta), addend.reshape(-1), "col")


def bmm(a: Tensor, b: Tensor) -> Call:
    """``torch.bmm`` of [batch, M, K] and [batch, K, N]."""
    for name, value in (("batch1", a), ("batch2", b)):
        if value.dim() != 3:
            raise checks.ShapeError(f"{name} must be a 3D tensor")
    batch, m, k = a.shape
    if (b.shape[0], b.shape[1]) != (batch, k):
        raise checks.ShapeError(
            f"Expected size for first two dimensions of batch2 tensor to be: [{batch}, {k}] but got: "
            f"[{b.shape[0]}, {b.shape[1]}]."
        )
    checks.same_dtype(a.dtype, b.dtype)
    checks.one_of("bmm", "the operands' dtype", a.dtype, checks.FLOATS)
    checks.same_device("bmm", ("input", a), ("mat2", b))
    dtype = name_of(a.dtype)
    operands = (Operand(dtype, layout_of(a)), Operand(dtype, layout_of(b)))
    problem = Problem("bmm", m, b.shape[2], k, *operands, dtype, batch=batch, acc=_acc(dtype))
    return Call(problem, a, b, (), (batch, m, b.shape[2]))


_INT_OUTPUTS = (torch.int32, torch.int8, torch.uint8, torch.float32, torch.bfloat16, torch.float16)


def int_mm(
    a: Tensor, b: Weight, bounds: Sequence[fuse.Bound] = (), out_dtype: torch.dtype | None = None,
    *, constant: bool = False,
) -> Call:  # fmt: skip
    """int8 or uint8 [M, K] @ int8 [K, N] -> int32, or what the epilogue and out_dtype make of it."""
    bounds = steps_of("int_mm", bounds)
    checks.matrix("int_mm", "self", a)
    checks.one_of("int_mm", "self's dtype", a.dtype, (torch.int8, torch.uint8))
    if isinstance(b, PackedWeight):
        checks.packed_fits("int_mm", b, a.shape[1], ("int8",), quantized=False)
    else:
        checks.matrix("int_mm", "mat2", b)
        checks.one_of("int_mm", "mat2's dtype", b.dtype, (torch.int8,))
        checks.inner(tuple(a.shape), tuple(b.shape))
    _same_devices("int_mm", a, b, bounds)
    a, b = canonical_strides(a), b if isinstance(b, PackedWeight) else canonical_strides(b)
    out = checks.out_dtype("int_mm", torch.int32 if out_dtype is None else out_dtype, _INT_OUTPUTS)
    return _matrix_call("int_mm", a, b, bounds, out, "col", constant)


def mixed_mm(
    a: Tensor, b: QuantWeight | PackedWeight, bounds: Sequence[fuse.Bound] = (),
    out_dtype: torch.dtype | None = None, *, constant: bool = False,
) -> Call:  # fmt: skip
    """Floating [M, K] @ a weight-only operand. Raises as ``mm``."""
    bounds = steps_of("mixed_mm", bounds)
    checks.matrix("mixed_mm", "mat1", a)
    checks.one_of("mixed_mm", "mat1's dtype", a.dtype, checks.FLOATS)
    if isinstance(b, PackedWeight):
        checks.packed_fits("mixed_mm", b, a.shape[1], ("int8", "int4", "float8_e4m3fn"), quantized=True)
        weight, n = _b_operand(b, "col", True), b.n
    else:
        checks.inner(tuple(a.shape), (b.k, b.data.shape[1]))
        weight = Operand(b.dtype, layout_of(b.data, "col"), constant=constant, quant=b.quant)
        n = b.data.shape[1]
        checks.same_device("mixed_mm", ("mat1", a), ("mat2", b.data), ("scale", b.scale), ("zero_point", b.zero_point))
    _same_devices("mixed_mm", a, b if isinstance(b, PackedWeight) else b.data, bounds)
    out = checks.out_dtype("mixed_mm", a.dtype if out_dtype is None else out_dtype, checks.FLOATS)
    steps, aux = _bind(bounds, a.shape[0], n)
    left = _a_operand(a, weight.constant)
    problem = Problem("mixed_mm", a.shape[0], n, a.shape[1], left, weight, name_of(out), steps, acc=_acc(left.dtype))
    return Call(problem, a, b, aux, (a.shape[0], n))


def quantized(
    data: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int, group_size: int | None, k: int
) -> QuantWeight:
    """Check and wrap a weight-only operand: int8 or float8_e4m3fn [K, N], or uint8 [ceil(K / 2), N] with bits=4; scale
    [N] or [groups, N]. float8 takes no zero point. Raises TypeError, DtypeError, ShapeError or ValueError."""
    if bits not in (4, 8):
        raise ValueError(f"mixed_mm(): bits must be 8 or 4; got {bits!r}")
    checks.matrix("mixed_mm", "mat2", data)
    allowed = (torch.int8, torch.float8_e4m3fn) if bits == 8 else (torch.uint8,)
    checks.one_of("mixed_mm", f"mat2's dtype (bits={bits})", data.dtype, allowed)
    rows = k if bits == 8 else -(-k // 2)
    if data.shape[0] != rows:
        held = data.shape[0] if bits == 8 else 2 * data.shape[0]
        raise checks.ShapeError(f"mixed_mm(): mat1 has K = {k}, and mat2 {list(data.shape)} holds K = {held}")
    if group_size is not None and (isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1):
        raise ValueError(f"mixed_mm(): group_size must be a positive int or None; got {group_size!r}")
    group = None if group_size is None or group_size >= k else group_size
    scale = _scales("scale", 3, scale, data.shape[1], group, k)
    checks.one_of("mixed_mm", "scale's dtype", scale.dtype, checks.FLOATS)
    if zero_point is not None:
        if data.dtype == torch.float8_e4m3fn:
            raise ValueError("mixed_mm(): float8 weights have scales and no zero point; leave zero_point out")
        zero_point = _scales("zero_point", 4, zero_point, data.shape[1], group, k)
        if zero_point.is_floating_point() and zero_point.dtype != scale.dtype:
            raise checks.DtypeError(
                f"mixed_mm(): expected zero_point to be of scale's dtype {scale.dtype} or integers; "
                f"got {zero_point.dtype}"
            )
        zero_point = zero_point.to(scale.dtype)
    quant = Quant(group, name_of(scale.dtype), zero_point is not None)
    dtype = "int4" if bits == 4 else name_of(data.dtype)
    return QuantWeight(data, scale, zero_point, k, quant, dtype)


def _scales(name: str, position: int, value: Any, n: int, group: int | None, k: int) -> Tensor:
    checks.tensor("mixed_mm", name, position, value)
    tensor: Tensor = value
    wanted = (n,) if group is None else (-(-k // group), n)
    if tuple(tensor.shape) not in (wanted, (1, *wanted) if group is None else wanted):
        raise checks.ShapeError(f"mixed_mm(): expected {name} of shape {list(wanted)}; got {list(tensor.shape)}")
    return tensor.resolve_neg().reshape(wanted).contiguous()


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, scale_result: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Call:  # fmt: skip
    """``torch._scaled_mm``: fp8 operands, float32 scales per tensor, or per row of a and column of b."""
    op = "scaled_mm"
    for name, value in (("mat1", a), ("mat2", b)):
        checks.matrix(op, name, value)
        checks.one_of(op, f"{name}'s dtype", value.dtype, checks.FLOAT8)
    checks.inner(tuple(a.shape), tuple(b.shape))
    allowed = (*checks.FLOAT8, torch.float32, torch.bfloat16, torch.float16)
    out = checks.out_dtype(op, a.dtype if out_dtype is None else out_dtype, allowed)
    m, n = a.shape[0], b.shape[1]
    checks.tensor(op, "scale_a", 3, scale_a)
    checks.tensor(op, "scale_b", 4, scale_b)
    per_column = scale_b.numel() != 1
    bounds = [_scale("scale_a", scale_a, m, "row", per_column), _scale("scale_b", scale_b, n, "col", per_column)]
    if bias is not None:
        checks.tensor(op, "bias", 5, bias)
        bounds.append(argument(f"{op}(): bias", fuse.bias(bias)))
    if scale_result is not None:
        checks.tensor(op, "scale_result", 6, scale_result)
    if scale_result is not None and out_dtype in checks.FLOAT8:
        # As torch._scaled_mm on CPU (2.13): it divides, and only when an fp8 out_dtype was asked for by name.
        reciprocal = fuse.scale(scale_result.float().reciprocal(), axis="tensor")
        bounds.append(argument(f"{op}(): scale_result", reciprocal))
    checks.same_device(op, ("mat1", a), ("mat2", b), *((_short(bound), bound.tensor) for bound in bounds))
    return _matrix_call("scaled_mm", a, b, bounds, out, "col", False)


def _scale(name: str, value: Tensor, size: int, axis: Any, together: bool) -> fuse.Bound:
    checks.one_of("scaled_mm", f"{name}'s dtype", value.dtype, (torch.float32,))
    if value.numel() == 1 and not (together and size == 1):
        return argument(f"scaled_mm(): {name}", fuse.scale(value, axis="tensor"))
    if value.numel() != size:
        raise checks.ShapeError(f"scaled_mm(): expected {name} with 1 or {size} elements; got {list(value.shape)}")
    return argument(f"scaled_mm(): {name}", fuse.scale(value.reshape(-1), axis=axis))
