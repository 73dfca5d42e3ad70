"""Packing constant weights into the layout their Plan's kernels share, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends.base import Backend, Kernel
from ..core import checks
from ..core.candidate import Candidate, Illegal
from ..core.errors import KernelError, UnsupportedError
from ..core.memory import is_subclass, require
from ..core.problem import Problem
from ..core.weights import PackedWeight, QuantWeight
from ..dispatch.portfolio import rank_packings
from ..dispatch.runtime import RUNTIME, current_target
from ..dispatch.targets import device_guard
from .int_mm import describe as describe_int_mm
from .mixed_mm import describe_product, quant_weight
from .mm import describe as describe_mm

_COMMON_ROWS = (1, 16, 64)


def pack(
    weight: Tensor,
    *,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    m: int | Sequence[int] | Sequence[Problem] = _COMMON_ROWS,
    layout: str | None = None,
) -> PackedWeight:
    """Pack a constant weight [N, K], as ``linear`` takes it, for ``linear``, ``mm``, ``int_mm`` or ``mixed_mm``.

    weight: floating; int8 for int_mm; with ``scale`` ([N] or [groups, N]) int8 or float8_e4m3fn, or uint8
    [N, ceil(K / 2)] with ``bits=4``, for mixed_mm. m: the numbers of rows it will meet (or whole Problems), which
    decide between layouts. layout: force one by name. By default the layout of the weight's Plan in the store, else
    what a backend for its device has as its default (on CPUs the native one). The packed weight stays on the weight's
    device. Raises TypeError, DtypeError or ShapeError for a bad weight (TypeError for tensor subclasses and for tensors
    without memory, whose values are not where kernels would read them), UnsupportedError when nothing here packs it so.
    """
    if layout is not None and not isinstance(layout, str):
        raise TypeError(f"pack(): layout must be a str or None, not {type(layout).__name__}")
    raw = operand(weight, scale, zero_point, bits, group_size)
    problems = _problems(raw, m)
    if not problems:
        raise ValueError("pack(): m must name at least one number of rows")
    if layout is not None and isinstance(raw, QuantWeight):
        # A layout may be one that only kernels for other activations than of the scales' dtype read.
        problems += [problem_of(raw, problems[0].m, dtype) for dtype in (torch.bfloat16, torch.float32, torch.float16)]
    refused: list[str] = []
    kernel = _kernel(problems, layout, weight.device, refused)
    if kernel is None:
        raise UnsupportedError(_nothing_packs(problems[0], layout, refused))
    with device_guard(weight.device):
        return kernel.pack(raw)


def unpack(packed: PackedWeight) -> Tensor | QuantWeight:
    """The weight again, bit for bit: a Tensor [N, K], or for weight-only operands a QuantWeight whose ``data`` is
    [K, N] (or [ceil(K / 2), N])."""
    if not isinstance(packed, PackedWeight):
        raise TypeError(f"unpack(): expected a PackedWeight, not {type(packed).__name__}")
    raw: Tensor | QuantWeight = backends.get(packed.layout.partition(":")[0]).unpack(packed)
    return raw if isinstance(raw, QuantWeight) else raw.t()


def operand(
    weight: Tensor, scale: Tensor | None, zero_point: Tensor | None, bits: int | None, group_size: int | None
) -> Tensor | QuantWeight:
    """The B operand of a weight [N, K]: its transpose, or a QuantWeight. Raises as ``pack``."""
    if isinstance(weight, Tensor) and is_subclass(weight):
        require("pack()", weight=weight)
    checks.tensor("pack", "weight", 1, weight)
    if weight.dim() != 2:
        raise checks.ShapeError(f"pack(): expected a weight [N, K]; got {weight.dim()}-D tensor")
    if weight.device.type not in ("cpu", "cuda"):
        raise checks.DtypeError(f"pack(): only CPU and CUDA weights are packed; this one is on {weight.device}")
    # What packs reads memory: a lazily negated view has to become its values.
    weight = weight.resolve_neg() if weight.is_neg() else weight
    require("pack()", weight=weight)
    weight = weight.detach()
    if scale is None:
        if zero_point is not None or group_size is not None or bits is not None:
            raise TypeError("pack(): zero_point, bits and group_size describe a quantised weight; give its scale too")
        checks.one_of("pack", "weight's dtype", weight.dtype, (*checks.FLOATS, torch.int8))
        return weight.t()
    for name, value in (("scale", scale), ("zero_point", zero_point)):
        if isinstance(value, Tensor) and (is_subclass(value) or not value.is_neg()):
            require("pack()", **{name: value})
    checks.tensor("pack", "scale", 2, scale)
    checks.same_device("pack", ("weight", weight), ("scale", scale), ("zero_point", zero_point))
    width = bits if bits is not None else (4 if weight.dtype == torch.uint8 else 8)
    k = weight.shape[1] * (2 if width == 4 else 1)
    return quant_weight(weight.t(), scale.detach(), zero_point, width, group_size, k)


def _problems(raw: Tensor | QuantWeight, m: int | Sequence[int] | Sequence[Problem]) -> list[Problem]:
    sizes: Iterable[Any] = (m,) if isinstance(m, int | Problem) else m
    return [size if isinstance(size, Problem) else problem_of(raw, size) for size in sizes]


def problem_of(raw: Tensor | QuantWeight, m: int, dtype: torch.dtype | None = None) -> Problem:
    """The Problem of M rows (of ``dtype``, default the weight's or its scales') by a constant operand, no epilogue."""
    if not isinstance(m, int) or isinstance(m, bool) or m < 1:
        raise ValueError(f"pack(): m must be a positive int; got {m!r}")
    if isinstance(raw, QuantWeight):
        return describe_product(
            torch.empty(m, raw.k, dtype=dtype or raw.scale.dtype, device="meta"), _meta(raw), constant=True
        ).problem
    k = raw.shape[0]
    rows = torch.empty(m, k, dtype=raw.dtype, device="meta")
    shape_only = raw.to("meta")
    if raw.dtype == torch.int8:
        return describe_int_mm(rows, shape_only, constant=True).problem
    return describe_mm(rows, shape_only, prefer="col", constant=True).problem


def _meta(raw: QuantWeight) -> QuantWeight:
    zero = None if raw.zero_point is None else raw.zero_point.to("meta")
    return replace(raw, data=raw.data.to("meta"), scale=raw.scale.to("meta"), zero_point=zero)


def _kernel(problems: Sequence[Problem], layout: str | None, device: torch.device, refused: list[str]) -> Kernel | None:
    """A kernel that packs into the wanted layout: the Plan's, a backend's default, or any of that name.

    refused: gets why those that would have could not be loaded.
    """
    if layout is None:
        layout = _planned_layout(problems[0], device)
    target = current_target(device)
    for name in reversed(backends.names(device.type)):
        backend = backends.get(name)
        if layout is not None and layout.partition(":")[0] != name:
            continue
        if not backend.available(target):
            continue
        if layout is None:
            kernel = _default(backend, problems[0], device, refused)
        else:
            kernel = _of_layout(backend, problems, layout, device, refused)
        if kernel is not None:
            return kernel
    return None


def _planned_layout(problem: Problem, device: torch.device) -> str | None:
    if RUNTIME.policy == "off":
        return None
    points = RUNTIME.index(device).points(problem.plan_key)
    return next((name for name in rank_packings(points) if name is not None), None) if points else None


def _default(backend: Backend, problem: Problem, device: torch.device, refused: list[str]) -> Kernel | None:
    candidate = backend.default_packing(problem, current_target(device))
    return None if candidate is None else _load(backend, candidate, problem, device, refused)


def _of_layout(
    backend: Backend, problems: Sequence[Problem], layout: str, device: torch.device, refused: list[str]
) -> Kernel | None:
    """The first kernel of ``backend`` that wants its weight in ``layout`` on ``device``."""
    target = current_target(device)
    for problem in problems:
        for candidate in backend.candidates(problem, target):
            kernel = None if isinstance(candidate, Illegal) else _load(backend, candidate, problem, device, refused)
            if kernel is not None and kernel.packing == layout:
                return kernel
    return None


def _load(
    backend: Backend, candidate: Candidate, problem: Problem, device: torch.device, refused: list[str]
) -> Kernel | None:
    try:
        with device_guard(device), RUNTIME.artifacts():
            return backend.load(backend.build(problem, candidate, current_target(device)), problem)
    except KernelError as error:
        refused.append(f"{candidate.id}: {error}")
        return None


def _nothing_packs(problem: Problem, layout: str | None, refused: Sequence[str]) -> str:
    tried = f" ({len(refused)} of its kernels could not be loaded, the first of them {refused[0]})" if refused else ""
    wanted = "any layout" if layout is None else f"layout {layout!r}"
    return (
        f"no backend here packs a {problem.b.dtype} weight (K = {problem.k}, N = {problem.n}) into {wanted}{tried}; "
        "`gemmtune doctor` says which backends are available. Use the weight as it is"
    )
