"""From an op's arguments to the parts of a Call: operands, layouts, and the epilogue's steps with their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from .. import fuse
from ..core import checks
from ..core.call import Call
from ..core.problem import Layout, Operand, Order, Problem
from ..core.weights import PackedWeight, QuantWeight
from ..dispatch.torch_state import is_autocast_on
from ..fuse import ArgumentStep, BoundStep

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


def b_operand(b: Weight | QuantWeight, prefer: Order, constant: bool) -> Operand:
    """Return the B operand; a PackedWeight is constant. prefer: as for ``layout_of``."""
    if isinstance(b, PackedWeight):
        return Operand(b.dtype, Layout("col" if b.raw_order == "col" else "row"), constant=True, quant=b.quant)
    if isinstance(b, QuantWeight):
        return Operand(b.dtype, layout_of(b.data, prefer), constant=constant, quant=b.quant)
    return Operand(dtype_name(b.dtype), layout_of(b, prefer), constant=constant)


def accumulator_of(a: str) -> str:
    """Return the dtype in which products of A's dtype are summed."""
    return {"float64": "float64", "int8": "int32", "uint8": "int32"}.get(a, "float32")


def matrix_call(
    op: str, a: Tensor, b: Weight | QuantWeight, out: torch.dtype, epilogue: Sequence[BoundStep] = (), *,
    arguments: Mapping[str, BoundStep] = MappingProxyType({}), family: str = "",
    names: tuple[str, str] = ("input", "mat2"), prefer: Order = "row", constant: bool = False,
) -> Call:  # fmt: skip
    """Return the Call of ``epilogue(a[M, K] @ b[K, N])``, whose operands are the op's first two.

    op, names: what errors call the op and these operands. out: the result's dtype. arguments: the steps of the op's
    other arguments, which come before the epilogue, by the argument's name. family: the Problem's; by default the op's
    name. prefer: b's order where both describe it. constant: whether b is a weight. Raises TypeError for an epilogue
    that is no list of steps, DtypeError unless all tensors are on one device, ShapeError for a tensor that does not
    broadcast to [M, N].
    """
    (m, k), n = a.shape, b.shape[1]
    named = [
        ArgumentStep(bound.step, bound.tensor, bound.axis, name=f"{op}(): {name}") for name, bound in arguments.items()
    ]
    bounds = (*named, *_checked(op, epilogue))
    _require_same_device(op, names, a, b, bounds)
    steps, aux = fuse.resolve(bounds, m, n)
    weight, dtype = b_operand(b, prefer, constant), dtype_name(a.dtype)
    # Beside a constant B, A is described as dense, so that one Plan serves all activations; others are copied.
    activations = Operand(dtype, Layout() if weight.constant else layout_of(a))
    problem = Problem(
        family or op, m, n, k, activations, weight, dtype_name(out), epilogue=steps, acc=accumulator_of(dtype)
    )  # fmt: skip
    return Call(problem, a, b, aux, (m, n))


def _checked(op: str, epilogue: Sequence[BoundStep]) -> Sequence[BoundStep]:
    """Return a caller's epilogue. Raises TypeError when it is not a list of steps."""
    if isinstance(epilogue, BoundStep):
        raise TypeError(f"{op}(): epilogue must be a list of steps made by gemmtune.fuse; got one step alone")
    for bound in epilogue:
        if not isinstance(bound, BoundStep):
            raise TypeError(f"{op}(): epilogue must hold steps made by gemmtune.fuse; got {type(bound).__name__}")
    return epilogue


def _require_same_device(
    op: str, names: tuple[str, str], a: Tensor, b: Weight | QuantWeight, bounds: Sequence[BoundStep]
) -> None:
    """Raises DtypeError when A, B and the tensors of the steps are not on one device."""
    if isinstance(b, PackedWeight) and a.device != b.device and not a.is_meta:
        raise checks.DtypeError(
            f"{op}(): expected all tensors to be on the same device, but the input is on {a.device} and the packed "
            f"weight is on {b.device}"
        )
    parts = ((names[1], b.data), ("scale", b.scale), ("zero_point", b.zero_point)) if isinstance(b, QuantWeight) else ()
    tensors = ((_short_name(bound), bound.tensor) for bound in bounds)
    checks.require_same_device(op, (names[0], a), (names[1], b), *parts, *tensors)


def _short_name(bound: BoundStep) -> str:
    """Return the name of a step's tensor in errors that list several operands."""
    return bound.name.rpartition(" ")[2] if isinstance(bound, ArgumentStep) else "an epilogue tensor"


def is_constant(b: Tensor) -> bool:
    """Whether a matrix counts as a weight when it is recorded: a Parameter, or a view of one (``x @ w.t()``)."""
    return isinstance(b, nn.Parameter) or isinstance(getattr(b, "_base", None), nn.Parameter)


def is_torchs_alone(*operands: Tensor) -> bool:
    """Whether only PyTorch can compute a floating-point op: autocast is on, or the operands have one dtype that is in
    no Problem (integers, bool)."""
    if is_autocast_on(operands[0].device.type):
        return True
    dtype = operands[0].dtype
    return dtype not in checks.FLOATS and all(operand.dtype == dtype for operand in operands)
