"""Products in an ATen graph, as Problems: mm, addmm, bmm, _int_mm, _scaled_mm, and products by int8, int4 and fp8
weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .. import fuse
from ..core.devices import is_host
from ..core.errors import GemmtuneError
from ..core.problem import Dim, Problem
from ..fuse import BoundStep
from ..ops.bmm import describe as describe_bmm
from ..ops.int_mm import describe as describe_int_mm
from ..ops.linear import describe as describe_linear
from ..ops.mixed_mm import describe_product, quant_weight
from ..ops.mm import describe as describe_mm
from ..ops.operands import dtype_name
from ..ops.scaled_mm import describe as describe_scaled_mm
from .dequantized import constant_vector, dequantized_weight, grouped_weight
from .epilogues import Link, links
from .graph_call import Form, GraphCall
from .int4pack_time import operator_s
from .nodes import (
    FLOATS,
    aten,
    is_dynamic,
    meta_tensor,
    sizes_of,
    transposed_source,
    value_of,
    without_views,
)
from .norms import Norm, find_norm

# The M at which the forms of a graph with a symbolic M are compared on a GPU: forms differ most for few rows, and at
# each M kernels serve only where they are faster than PyTorch's operator and a kernel for the steps behind it. So what
# is tuned does not depend on the first call's M.
DYNAMIC_M = 16

# A Problem of these arguments: a, b (or what stands for it), the steps.
Describe = Callable[[Sequence[BoundStep]], Problem]


@dataclasses.dataclass
class Product:
    """A product in a graph.

    node: what computes it. a: the activations' node [M, K] ([batch, M, K]). weights: the nodes behind ``a``
    (``graph_call.Form``). describe: makes the Problem with these steps behind the operator's own. rows, columns: of the
    result; rows may be symbolic. batch: the number of products; it may be symbolic, unless rows are. steps: those that
    belong to the operator itself (a bias, scales). aux: the nodes of their tensors. aux_in_parts: which of them is a
    constant vector of the columns, of which merged products have one after the other. chain: the operations that follow
    (``epilogues.links``). fixed: how many of them, the first ones, belong to the Problem in any case. norm: the norm
    whose result ``a`` is, if the kernel may compute it. rounds_weight: whether eager PyTorch rounds a dequantised
    weight, or its scales, where the Problem does not. torch_s: returns the seconds of PyTorch's operator, or None,
    where it takes part in no race.
    """

    node: fx.Node
    a: fx.Node
    weights: tuple[fx.Node, ...]
    form: Form
    describe: Describe
    rows: Any
    columns: int
    steps: tuple[BoundStep, ...] = ()
    aux: tuple[fx.Node, ...] = ()
    aux_in_parts: int | None = None
    chain: list[Link] = dataclasses.field(default_factory=list)
    fixed: int = 0
    norm: Norm | None = None
    rounds_weight: bool = False
    torch_s: Callable[[], float | None] | None = None
    batch: Any = 1
    _problems: dict[int, Problem] = dataclasses.field(default_factory=dict)

    @property
    def is_dynamic(self) -> bool:
        """Whether M, or the batch, is symbolic."""
        return is_dynamic([self.rows, self.batch])

    @property
    def dim(self) -> Dim:
        """The dimension that may be symbolic."""
        return "batch" if is_dynamic([self.batch]) else "m"

    @property
    def source(self) -> fx.Node:
        """The node whose elements ``a`` has."""
        return without_views(self.a)

    def problem(self, length: int, *, normed: bool = False) -> Problem:
        """Return the Problem with the first ``length`` operations of the chain, whose result has their dtype.

        normed: with the norm in front, which the product must have. Its M is that of the example inputs; ``DYNAMIC_M``
        for a constant weight on a GPU where M is symbolic."""
        if normed:
            problem = self.problem(length)
            assert self.norm is not None
            return dataclasses.replace(problem, epilogue=(*self.norm.steps, *problem.epilogue))
        if length not in self._problems:
            value = value_of(self.end(length))
            assert value is not None
            steps = [step for link in self.chain[self.fixed : length] for step in link.steps]
            problem = dataclasses.replace(self.describe(steps), out_dtype=dtype_name(value.dtype))
            self._problems[length] = problem if self.form == "matrix" else _with_compared_m(problem, self.rows, value)
        return self._problems[length]

    def call(self, length: int, *, normed: bool = False) -> GraphCall:
        """Return the GraphCall with the first ``length`` operations of the chain. normed: as for ``problem``."""
        parts = () if self.form == "matrix" else (self.columns,)
        return GraphCall(self.problem(length, normed=normed), self.form, parts)

    def tensors(self, length: int, *, normed: bool = False) -> tuple[fx.Node, ...]:
        """Return the nodes of the tensors that the epilogue takes with the first ``length`` operations. normed: as for
        ``problem``."""
        chained = [link.aux for link in self.chain[self.fixed : length] if link.aux is not None]
        first = self.norm.tensors if normed and self.norm is not None else ()
        return (*first, *self.aux, *chained)

    def end(self, length: int) -> fx.Node:
        """Return the node whose value the product with the first ``length`` operations has."""
        return self.chain[length - 1].node if length else self.node


def _with_compared_m(problem: Problem, rows: Any, value: Tensor) -> Problem:
    """Return the Problem of a constant weight with the M at which its forms are compared. rows: M in the graph. value:
    the result's fake tensor."""
    is_free = is_dynamic([rows]) and not is_host(value.device.type)
    return problem.with_m(DYNAMIC_M) if is_free else problem


class NoProblemError(ValueError):
    """Raised for a product that no Problem describes; the message says why."""


def find_products(
    graph: fx.Graph, constants: Collection[fx.Node], *, emulate: bool
) -> tuple[list[Product], dict[fx.Node, str]]:
    """Return the products of a graph, in order, and the products that no Problem describes, with the reasons.

    constants: the placeholders of weights, which are the same tensors in every call. emulate: as for
    ``epilogues.links``.
    """
    products, unmatched = [], {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _MATCHERS or _is_empty(node):
            continue
        try:
            product = _MATCHERS[node.target](node, constants)
            if emulate and product.rounds_weight:
                raise NoProblemError("eager PyTorch rounds the dequantised weight or its scales")
            if node.target is not aten.bmm.default:  # Problems of batched products have no epilogue here
                product.chain = links(node, product.columns, emulate=emulate)
            product.problem(product.fixed)
            if not emulate and product.form != "matrix":  # emulated, a norm rounds where eager PyTorch does
                product.norm = _norm_of_rows(product)
            products.append(product)
        except (GemmtuneError, TypeError, ValueError, KeyError) as error:  # PyTorch's own operator stays
            unmatched[node] = str(error)
    return products, unmatched


def _norm_of_rows(product: Product) -> Norm | None:
    """Return the norm whose normalised rows are those of a product's ``a``."""
    norm = find_norm(product.source)
    return norm if norm is not None and list(sizes_of(norm.tensors[0])) == list(sizes_of(product.a)[-1:]) else None


def _is_empty(node: fx.Node) -> bool:
    values = [meta_tensor(arg) for arg in node.args if isinstance(arg, fx.Node)]
    return any(value is None or value.numel() == 0 for value in values)


def _weight_of(b: fx.Node, constants: Collection[fx.Node]) -> fx.Node | None:
    """Return the constant weight [N, K] of which ``b`` is the transpose."""
    source = transposed_source(b)
    return source if source in constants else None


def _linear(node: fx.Node, a: fx.Node, b: fx.Node, bias: fx.Node | None, constants: Collection[fx.Node]) -> Product:
    """Return the Product of floating matrices: by a weight [N, K], or by any matrix b [K, N]."""
    x, matrix, value = _values_of(a, b, node)
    _require_float(x)
    weight = _weight_of(b, constants)
    own, aux = _bias(bias, value)
    if weight is not None:
        stored = meta_tensor(weight)
        assert stored is not None
        if not stored.is_contiguous():
            raise NoProblemError(f"a weight with strides {tuple(stored.stride())}: rows must be dense")

        def describe(steps: Sequence[BoundStep]) -> Problem:
            return describe_linear(x, stored, None, [*own, *steps], constant=True).problem

        parts = _bias_in_parts(own, aux, constants)
        return Product(node, a, (weight,), "linear", describe, value.shape[0], matrix.shape[1], own, aux, parts)
    constant = b in constants
    _require_fixed(b)

    def describe_matrix(steps: Sequence[BoundStep]) -> Problem:
        return describe_mm(x, matrix, None, [*own, *steps], constant=constant).problem

    return Product(node, a, (b,), "matrix", describe_matrix, value.shape[0], matrix.shape[1], own, aux)


def _values_of(a: fx.Node, b: fx.Node, product: fx.Node) -> tuple[Tensor, Tensor, Tensor]:
    """Return the operands' tensors with the sizes of the example inputs, and the result's fake tensor."""
    x, y, value = meta_tensor(a), meta_tensor(b), value_of(product)
    if x is None or y is None or value is None:
        raise NoProblemError("the sizes of an operand are not known while compiling")
    return x, y, value


def _require_float(x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise NoProblemError(f"multiplies {', '.join(map(dtype_name, FLOATS))}; got {dtype_name(x.dtype)}")


def _require_fixed(b: Any) -> None:
    """Raise NoProblemError where a size of b is symbolic."""
    if is_dynamic(sizes_of(b)):
        raise NoProblemError(f"K or N is symbolic: b is {list(sizes_of(b))}")


def _bias(bias: fx.Node | None, value: Tensor) -> tuple[tuple[BoundStep, ...], tuple[fx.Node, ...]]:
    """Return the step of an addmm's first argument and its node."""
    if bias is None:
        return (), ()
    tensor = meta_tensor(bias)
    if tensor is not None and tensor.dim() == 1 and tensor.shape[0] == value.shape[1]:
        return (fuse.bias(tensor),), (bias,)
    if tensor is not None and tuple(sizes_of(bias)) == tuple(value.shape):
        return (fuse.add(tensor),), (bias,)
    raise NoProblemError(f"adds a tensor of shape {list(sizes_of(bias))} to a result of {list(value.shape)}")


def _bias_in_parts(own: tuple[BoundStep, ...], aux: tuple[fx.Node, ...], constants: Collection[fx.Node]) -> int | None:
    """Return ``Product.aux_in_parts`` of a product whose own step and its node are ``_bias``'s."""
    return 0 if aux and aux[0] in constants and own[0].step.kind == "bias" else None


def _mm(node: fx.Node, constants: Collection[fx.Node]) -> Product:
    a, b = _two_arguments(node)
    return (
        _by_grouped_weight(node, a, b, None, constants)
        or _by_dequantized_weight(node, constants)
        or _linear(node, a, b, None, constants)
    )


def _addmm(node: fx.Node, constants: Collection[fx.Node]) -> Product:
    bias, a, b, *rest = _arguments(node)
    if rest or any(value != 1 for value in node.kwargs.values()):
        raise NoProblemError("has an alpha or beta")
    return _by_grouped_weight(node, a, b, bias, constants) or _linear(node, a, b, bias, constants)


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _two_arguments(node: fx.Node) -> tuple[Any, Any]:
    a, b, *rest = _arguments(node)
    if rest or node.kwargs:
        raise NoProblemError("has an output dtype of its own")
    return a, b


def _bmm(node: fx.Node, constants: Collection[fx.Node]) -> Product:
    a, b = _two_arguments(node)
    x, y, value = _values_of(a, b, node)
    _require_float(x)
    batch, rows, _ = value.shape
    if is_dynamic(sizes_of(b)[1:]):
        raise NoProblemError(f"K or N is symbolic: b is {list(sizes_of(b))}")
    if is_dynamic([batch]) and is_dynamic([rows]):
        raise NoProblemError(f"M and the batch are symbolic: the result is {list(value.shape)}")

    def describe(steps: Sequence[BoundStep]) -> Problem:
        return describe_bmm(x, y).problem

    return Product(node, a, (b,), "matrix", describe, rows, y.shape[2], batch=batch)


def _int_mm(node: fx.Node, constants: Collection[fx.Node]) -> Product:
    a, b = _arguments(node)[:2]
    x, matrix, value = _values_of(a, b, node)
    _require_fixed(b)
    weight = _weight_of(b, constants)
    constant = weight is not None

    def describe(steps: Sequence[BoundStep]) -> Problem:
        return describe_int_mm(x, matrix, epilogue=list(steps), constant=constant).problem

    form: Form = "linear" if constant else "matrix"
    weights = (weight,) if weight is not None else (b,)
    return Product(node, a, weights, form, describe, value.shape[0], matrix.shape[1])


def _scaled_mm(node: fx.Node, constants: Collection[fx.Node]) -> Product:
    names = ("mat1", "mat2", "scale_a", "scale_b", "bias", "scale_result", "out_dtype", "use_fast_accum")
    arguments: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if arguments.get("scale_result") is not None or arguments.get("use_fast_accum"):
        raise NoProblemError("scale_result and use_fast_accum are not offered")
    passed = {name: arguments[name] for name in names[:5] if isinstance(arguments.get(name), fx.Node)}
    tensors: dict[str, Any] = {name: meta_tensor(operand) for name, operand in passed.items()}
    value, b = value_of(node), arguments["mat2"]
    if value is None or any(t is None for t in tensors.values()):
        raise NoProblemError("the sizes of an operand are not known while compiling")
    _require_fixed(b)
    tensors["bias"] = tensors.get("bias")

    def describe(steps: Sequence[BoundStep]) -> Problem:
        problem = describe_scaled_mm(**tensors, out_dtype=value.dtype).problem
        resolved, _ = fuse.resolve(steps, problem.m, problem.n)
        return dataclasses.replace(problem, epilogue=(*problem.epilogue, *resolved))

    aux = tuple(passed[name] for name in ("scale_a", "scale_b", "bias") if name in passed)
    weight, (rows, columns) = _weight_of(b, constants), value.shape
    if weight is None or columns == 1:
        return Product(node, arguments["mat1"], (b,), "matrix", describe, rows, columns, (), aux)
    per_column = without_views(aux[1]) in constants and tensors["scale_b"].numel() == columns
    if per_column:
        aux = (aux[0], without_views(aux[1]), *aux[2:])
    parts = 1 if per_column and "bias" not in passed else None
    return Product(node, arguments["mat1"], (weight,), "linear", describe, rows, columns, (), aux, parts)


def _by_dequantized_weight(node: fx.Node, constants: Collection[fx.Node]) -> Product | None:
    """Return the Product of mm(a, b) by a dequantised weight with a scale per output channel; None where b is none."""
    a, b = _arguments(node)[:2]
    dequantized = dequantized_weight(b, constants)
    x, value = meta_tensor(a), value_of(node)
    if dequantized is None or x is None or value is None:
        return None
    stored = meta_tensor(dequantized.data)
    assert stored is not None
    columns, fixed, scale = stored.shape[0], 0, dequantized.scale
    if scale is None:  # linear(x, w.to(x.dtype)) * scale
        chain = links(node, columns)
        position = next((i for i, link in enumerate(chain) if link.steps), None)
        link = None if position is None else chain[position]
        if link is None or link.aux is None or link.steps[-1].step.kind != "scale":
            return None  # scales of rows have another number of elements, and are refused below
        scale, fixed = link.aux, int(position or 0) + 1
    applied, scale = scale, constant_vector(scale, constants, columns)
    vector = None if scale is None else meta_tensor(scale)
    if scale is None or vector is None or not stored.is_contiguous():
        return None
    value_applied = value_of(applied)
    rounds_scale = value_applied is None or value_applied.dtype != vector.dtype
    weight = quant_weight(stored.t(), vector.reshape(-1), None, 8, None, stored.shape[1])

    def describe(steps: Sequence[BoundStep]) -> Problem:
        return describe_product(x, weight, list(steps), constant=True).problem

    product = Product(node, a, (dequantized.data, scale), "weight_only", describe, value.shape[0], columns)
    product.fixed = fixed
    product.rounds_weight = dequantized.scale is not None or rounds_scale
    return product


def _by_grouped_weight(
    node: fx.Node, a: fx.Node, b: fx.Node, bias: fx.Node | None, constants: Collection[fx.Node]
) -> Product | None:
    """Return the Product of a matrix by a dequantised weight with a scale for each group; None where b is none."""
    grouped = grouped_weight(b, constants)
    x, value = meta_tensor(a), value_of(node)
    if grouped is None or x is None or value is None:
        return None
    weights = tuple(each for each in (grouped.data, grouped.scale, grouped.zero_point) if each is not None)
    tensors = [tensor for tensor in map(meta_tensor, weights) if tensor is not None and tensor.is_contiguous()]
    if len(tensors) < len(weights):
        return None
    n, k = tensors[0].shape
    shape = (n,) if grouped.group == k else (-1, n)
    scale, *zero_points = [tensor.reshape(n, -1).t().reshape(shape) for tensor in tensors[1:]]
    weight = quant_weight(tensors[0].t(), scale, zero_points[0] if zero_points else None, 8, grouped.group, k)
    own, aux = _bias(bias, value)

    def describe(steps: Sequence[BoundStep]) -> Problem:
        return describe_product(x, weight, [*own, *steps], constant=True).problem

    parts = _bias_in_parts(own, aux, constants)
    return Product(node, a, weights, "weight_only", describe, value.shape[0], n, own, aux, parts, rounds_weight=True)


def _int4pack_mm(node: fx.Node, constants: Collection[fx.Node]) -> Product:
    """Return the Product by an int4 weight that PyTorch's operator has packed (``ops.int4pack``)."""
    a, packed, group, scales_and_zeros = _arguments(node)
    x, value, data, scales = meta_tensor(a), value_of(node), meta_tensor(packed), meta_tensor(scales_and_zeros)
    if x is None or value is None or data is None or scales is None:
        raise NoProblemError("the sizes of an operand are not known while compiling")
    if packed not in constants or scales_and_zeros not in constants:
        raise NoProblemError("its weight and its scales may change between calls")
    (groups, n, _), k = scales.shape, x.shape[1]
    if groups * group != k or not scales.is_contiguous():
        raise NoProblemError(f"scales of shape {list(scales.shape)} for groups of {group} of K = {k}")
    integers = torch.empty((n, k // 2), dtype=torch.uint8, device="meta")
    numbers = torch.empty((groups, n), device="meta")  # float32, in which zero points have no rounding that counts
    weight = quant_weight(integers.t(), numbers, numbers, 4, group, k)

    def describe(steps: Sequence[BoundStep]) -> Problem:
        return describe_product(x, weight, list(steps), constant=True).problem

    timed = _with_compared_m(describe([]), value.shape[0], value)
    operator = functools.partial(operator_s, timed, tuple(data.shape), data.dtype, scales.dtype, value.device)
    operands = (packed, scales_and_zeros)
    return Product(
        node, a, operands, "int4pack", describe, value.shape[0], n, rounds_weight=True, torch_s=operator
    )  # fmt: skip


def _baddbmm(node: fx.Node, constants: Collection[fx.Node]) -> Product:
    raise NoProblemError("batched products have no epilogue in a graph")


def _packed_by_inductor(node: fx.Node, constants: Collection[fx.Node]) -> Product:
    raise NoProblemError("Inductor has packed the weight")


_MATCHERS: dict[Any, Callable[[fx.Node, Collection[fx.Node]], Product]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten._int_mm.default: _int_mm,
    aten._scaled_mm.default: _scaled_mm,
    aten.baddbmm.default: _baddbmm,
    aten._weight_int8pack_mm.default: _packed_by_inductor,
    aten._weight_int4pack_mm.default: _int4pack_mm,
    aten._weight_int4pack_mm_for_cpu.default: _int4pack_mm,
}
