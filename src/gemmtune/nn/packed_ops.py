"""Operators for packed weights, which traced graphs and exported programs contain.

``gemmtune::packed_linear(input, weight, spec, bias, raw)`` computes ``F.linear`` by a packed weight: input [.., K] to
[.., N]. raw: the weight's raw form [N, K], which serves some M, if it is kept too. ``gemmtune::unpack_weight(weight,
spec)`` returns the weight [N, K]. In both, ``weight`` is the list of a PackedWeight's tensors, and ``spec`` has its
other fields (``spec_of``).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..core.torch_compat import check, unsafe_view
from ..core.torch_compat import get_tracing_state as _tracing
from ..core.torch_compat import set_tracing_state as _set_tracing
from ..core.weights import PackedWeight
from ..ops.linear import linear
from ..ops.packing import unpack


def packed_fields(packed: PackedWeight) -> dict[str, Any]:
    """Return the fields of a PackedWeight, without its tensors and its ``quant``."""
    return {
        "layout": packed.layout, "n": packed.n, "k": packed.k, "dtype": packed.dtype, "machine": packed.machine,
        "raw_order": packed.raw_order, "meta": dict(packed.meta),
    }  # fmt: skip


def spec_of(packed: PackedWeight) -> str:
    """Return the fields of a packed floating weight as JSON, without its tensors."""
    return json.dumps(packed_fields(packed))


@functools.lru_cache(maxsize=1024)
def fields_of(spec: str) -> dict[str, Any]:
    """Return the fields in a spec, which is JSON."""
    fields: dict[str, Any] = json.loads(spec)
    return fields


def packed_of(parts: Sequence[Tensor], spec: str, raw: Tensor | None = None) -> PackedWeight:
    """Return the PackedWeight of these tensors. raw: the weight's raw form [N, K], if it is kept too.

    Raises TypeError, ValueError or KeyError for a malformed ``spec``."""
    return PackedWeight(data=tuple(parts), raw=raw, **fields_of(spec))


def strides_of(spec: str) -> tuple[int, int]:
    """Return the strides of the unpacked weight [N, K]: it is dense, in the order of the weight that was packed."""
    fields = fields_of(spec)
    return (fields["k"], 1) if fields["raw_order"] == "col" else (1, fields["n"])


LIBRARY = torch.library.Library("gemmtune", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(  # type: ignore[no-untyped-call]
    "packed_linear(Tensor input, Tensor[] weight, str spec, Tensor? bias, Tensor? raw) -> Tensor"
)
LIBRARY.define("unpack_weight(Tensor[] weight, str spec) -> Tensor")  # type: ignore[no-untyped-call]


@contextmanager
def untraced() -> Iterator[None]:
    """Return a context in which torch.jit's tracer records nothing: it has recorded gemmtune's operator itself."""
    state = _tracing()
    if state is None:
        yield
        return
    _set_tracing(None)
    try:
        yield
    finally:
        _set_tracing(state)


def _run_linear(input: Tensor, weight: Sequence[Tensor], spec: str, bias: Tensor | None, raw: Tensor | None) -> Tensor:
    with untraced():
        return no_view(linear(input, packed_of(weight, spec, raw), bias))


def no_view(result: Tensor) -> Tensor:
    """Return ``result`` as an operator may return it: without a base if it is a view of another tensor."""
    result_without_base: Tensor = unsafe_view(result, result.shape) if result._is_view() else result
    return result_without_base


def _fake_linear(input: Tensor, weight: Sequence[Tensor], spec: str, bias: Tensor | None, raw: Tensor | None) -> Tensor:
    fields = fields_of(spec)
    check(input.shape[-1] == fields["k"], lambda: f"linear(): expected input [.., {fields['k']}]")
    return input.new_empty((*input.shape[:-1], fields["n"]))


def _run_unpack(weight: Sequence[Tensor], spec: str) -> Tensor:
    with untraced():
        raw = unpack(packed_of(weight, spec))
        assert isinstance(raw, Tensor)
        values = raw.contiguous() if strides_of(spec)[1] == 1 else raw.t().contiguous().t()
        return values.clone() if any(_shares_memory(part, values) for part in weight) else values


def _shares_memory(part: Tensor, values: Tensor) -> bool:
    """Whether unpacking has returned memory of the packed tensor itself, as layouts do that store the weight unchanged.
    An operator must not return memory of its arguments."""
    if part.layout is not torch.strided:
        return False
    return part.untyped_storage().data_ptr() == values.untyped_storage().data_ptr() != 0


def _fake_unpack(weight: Sequence[Tensor], spec: str) -> Tensor:
    fields = fields_of(spec)
    dtype = getattr(torch, fields["dtype"])
    return weight[0].new_empty_strided((fields["n"], fields["k"]), strides_of(spec), dtype=dtype)


for _name, _function in (("packed_linear", _run_linear), ("unpack_weight", _run_unpack)):
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("gemmtune::packed_linear", _fake_linear, lib=LIBRARY)
torch.library.register_fake("gemmtune::unpack_weight", _fake_unpack, lib=LIBRARY)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, ctx.spec, bias, _ = inputs
    ctx.save_for_backward(*weight)
    ctx.bias_shape = None if bias is None else bias.shape


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, list[None], None, Tensor | None, None]:
    """Return the gradients of the input and the bias; a packed weight has none."""
    input_grad = bias_grad = None
    weight = list(ctx.saved_tensors)
    if ctx.needs_input_grad[0]:
        input_grad = grad @ torch.ops.gemmtune.unpack_weight(weight, ctx.spec)
    if ctx.bias_shape is not None and ctx.needs_input_grad[3]:
        bias_grad = grad.sum_to_size(ctx.bias_shape)
    return input_grad, [None] * len(weight), None, bias_grad, None


torch.library.register_autograd("gemmtune::packed_linear", _backward, setup_context=_setup, lib=LIBRARY)
