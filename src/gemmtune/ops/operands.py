"""From an op's arguments to the parts of a Call: operands, layouts, and the epilogue's steps with their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import fuse
from ..core import checks
from ..core.call import Call
from ..core.epilogue import Step
from ..core.problem import Layout, Operand, Order, Problem
from ..core.weights import PackedWeight
from ..dispatch.guards import is_autocast_on
from ..dispatch.specialize import OperandAdapter

Weight = Tensor | PackedWeight


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that Problems use for a torch dtype."""
    return str(dtype).removeprefix("torch.")


def layout_of(matrix: Tensor, prefer: Order = "row") -> Layout:
    """Return the layout of the last two dimensions. prefer: the order where both describe them (a vector)."""
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


def a_operand(a: Tensor, constant_b: bool) -> Operand:
    """Return the A operand. Beside a constant B it is described as dense, so that one Plan serves all activations;
    other activations are copied."""
    return Operand(dtype_name(a.dtype), Layout() if constant_b else layout_of(a))


def b_operand(b: Weight, prefer: Order, constant: bool) -> Operand:
    """Return the B operand of a matrix or a PackedWeight (which is constant). prefer: as for ``layout_of``."""
    if isinstance(b, PackedWeight):
        return Operand(b.dtype, Layout(_known_order(b.raw_order)), constant=True, quant=b.quant)
    return Operand(dtype_name(b.dtype), layout_of(b, prefer), constant=constant)


def _known_order(order: str) -> Order:
    return "col" if order == "col" else "row"


def accumulator_of(a: str) -> str:
    """Return the dtype in which products of A's dtype are summed."""
    return {"float64": "float64", "int8": "int32", "uint8": "int32"}.get(a, "float32")


def bind_steps(
    bounds: Sequence[fuse.BoundStep], m: int, n: int, batch: int | None = None
) -> tuple[tuple[Step, ...], Any]:
    """Return the steps for an output [M, N] (or [batch, M, N]), and their tensors in the shapes of the steps' axes."""
    pairs = [fuse.resolve(bound, m, n, batch) for bound in bounds]
    return tuple(step for step, _ in pairs), tuple(tensor for _, tensor in pairs if tensor is not None)


def steps_of(op: str, epilogue: Sequence[fuse.BoundStep], *first: fuse.BoundStep) -> tuple[fuse.BoundStep, ...]:
    """Return ``first`` and then the caller's epilogue. Raises TypeError when it is not a list of steps."""
    if isinstance(epilogue, fuse.BoundStep):
        raise TypeError(f"{op}(): epilogue must be a list of steps made by gemmtune.fuse; got one step alone")
    for bound in epilogue:
        if not isinstance(bound, fuse.BoundStep):
            raise TypeError(f"{op}(): epilogue must hold steps made by gemmtune.fuse; got {type(bound).__name__}")
    return (*first, *epilogue)


def require_same_device(op: str, a: Tensor, b: Weight, bounds: Sequence[fuse.BoundStep]) -> None:
    """Raises DtypeError when A, B and the epilogue's tensors are not on one device."""
    if isinstance(b, PackedWeight) and a.device != b.device and not a.is_meta:
        raise checks.DtypeError(
            f"{op}(): expected all tensors to be on the same device, but the input is on {a.device} and the packed "
            f"weight is on {b.device}"
        )
    checks.require_same_device(op, ("input", a), ("mat2", b), *((short_name(bound), bound.tensor) for bound in bounds))


def short_name(bound: fuse.BoundStep) -> str:
    """Return the name of a step's tensor in errors that list several operands."""
    return bound.name.rpartition(" ")[2] if isinstance(bound, fuse.ArgumentStep) else "an epilogue tensor"


def matrix_call(
    family: str,
    a: Tensor,
    b: Weight,
    bounds: Sequence[fuse.BoundStep],
    out: torch.dtype,
    prefer: Order,
    constant: bool,
) -> Call:
    """Return the Call of ``epilogue(a[M, K] @ b[K, N])``. out: the result's dtype. constant: whether b is a weight."""
    (m, k), n = a.shape, b.shape[1]
    steps, aux = bind_steps(bounds, m, n)
    weight = b_operand(b, prefer, constant)
    activations = a_operand(a, weight.constant)
    problem = Problem(
        family, m, n, k, activations, weight, dtype_name(out), epilogue=steps, acc=accumulator_of(activations.dtype)
    )  # fmt: skip
    return Call(problem, a, b, aux, (m, n))


def argument(name: str, bound: fuse.BoundStep) -> fuse.BoundStep:
    """Return the step of a tensor that is an argument of the op. name: what errors call it, ``linear(): bias``."""
    return fuse.ArgumentStep(bound.step, bound.tensor, bound.axis, name=name)


def is_constant(b: Tensor) -> bool:
    """Whether a matrix counts as a weight when it is recorded: a Parameter, or a view of one (``x @ w.t()``)."""
    return isinstance(b, nn.Parameter) or isinstance(getattr(b, "_base", None), nn.Parameter)


def needs_copy(call: Call) -> bool:
    """Whether the activations are copied because they lie beside a constant B and are not dense."""
    return call.problem.b.constant and not call.a.is_contiguous()


def matrix_adapter(call: Call, **_: object) -> OperandAdapter:
    """Return the adapter of ops whose operands are matrices: a and b as they are, a made dense where it must be."""
    if needs_copy(call):
        return lambda a, b, *_: (a.contiguous(), b)
    return lambda a, b, *_: (a, b)


def is_torchs_alone(*operands: Tensor) -> bool:
    """Whether only PyTorch can compute a floating-point op: autocast is on, or the operands have one dtype that is in
    no Problem (integers, bool)."""
    if is_autocast_on(operands[0].device.type):
        return True
    dtype = operands[0].dtype
    return dtype not in checks.FLOATS and all(operand.dtype == dtype for operand in operands)
