"""``gemmtune.pack()`` and ``unpack()``: constant weights in the layout that the kernels of their Plan share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends.base import Backend, Kernel
from ..core import checks, devices
from ..core.candidate import Candidate, Illegal
from ..core.errors import KernelError, UnsupportedError
from ..core.memory import is_subclass, require_addressable
from ..core.problem import Problem
from ..core.weights import PackedWeight, QuantWeight
from ..dispatch.runtime import RUNTIME, current_target
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
    """Return a constant weight [N, K] (as ``linear`` takes it) packed for ``linear``, ``mm``, ``int_mm`` or
    ``mixed_mm``, on the weight's device.

    weight: floating; int8 for int_mm; for mixed_mm int8 or float8_e4m3fn, or uint8 [N, ceil(K / 2)] with ``bits=4``.
    scale: [N] or [groups, N], for mixed_mm. zero_point, bits, group_size: as for ``mixed_mm``. m: the numbers of rows
    of the activations that the weight will be multiplied by, or whole Problems; they decide between layouts.
    layout: the name of the layout. By default that of the weight's Plan in the store; without a Plan, the default
    layout of a backend for its device (on CPUs the native one).

    Raises TypeError, DtypeError or ShapeError for a bad weight (TypeError for tensor subclasses and for tensors without
    memory, whose values kernels cannot read by address), and UnsupportedError when no backend can pack it so.
    """
    if layout is not None and not isinstance(layout, str):
        raise TypeError(f"pack(): layout must be a str or None, not {type(layout).__name__}")
    raw = b_operand(weight, scale, zero_point, bits, group_size)
    problems = _problems(raw, m)
    if not problems:
        raise ValueError("pack(): m must name at least one number of rows")
    if layout is not None and isinstance(raw, QuantWeight):
        # Perhaps only kernels for activations of another dtype than the scales' read this layout.
        problems += [problem_of(raw, problems[0].m, dtype) for dtype in (torch.bfloat16, torch.float32, torch.float16)]
    load_errors: list[str] = []
    kernel = _packing_kernel(problems, layout, weight.device, load_errors)
    if kernel is None:
        raise UnsupportedError(_unsupported_message(problems[0], layout, load_errors))
    with devices.get(weight.device.type).guard(weight.device):
        return kernel.pack(raw)


def unpack(packed: PackedWeight) -> Tensor | QuantWeight:
    """Return the weight that was packed, bit for bit: a Tensor [N, K], or for a weight-only operand a QuantWeight with
    ``data`` [K, N] (int4: [ceil(K / 2), N]). Raises TypeError for anything but a PackedWeight."""
    if not isinstance(packed, PackedWeight):
        raise TypeError(f"unpack(): expected a PackedWeight, not {type(packed).__name__}")
    raw: Tensor | QuantWeight = backends.get(packed.owner).unpack(packed)
    return raw if isinstance(raw, QuantWeight) else raw.t()


def b_operand(
    weight: Tensor, scale: Tensor | None, zero_point: Tensor | None, bits: int | None, group_size: int | None
) -> Tensor | QuantWeight:
    """Return the B operand of a weight [N, K]: its transpose, or a QuantWeight. Raises as ``pack``."""
    if isinstance(weight, Tensor) and is_subclass(weight):
        require_addressable("pack()", weight=weight)
    checks.require_tensor("pack", "weight", 1, weight)
    if weight.dim() != 2:
        raise checks.ShapeError(f"pack(): expected a weight [N, K]; got {weight.dim()}-D tensor")
    if not devices.is_served(weight.device):
        kinds = ", ".join(devices.names())
        raise checks.DtypeError(f"pack(): only weights on {kinds} are packed; this one is on {weight.device}")
    # Packing reads memory directly, and a lazily negated view has its values there without the sign.
    weight = weight.resolve_neg() if weight.is_neg() else weight
    require_addressable("pack()", weight=weight)
    weight = weight.detach()
    if scale is None:
        if zero_point is not None or group_size is not None or bits is not None:
            raise TypeError("pack(): zero_point, bits and group_size describe a quantised weight; give its scale too")
        checks.require_dtype("pack", "weight's dtype", weight.dtype, (*checks.FLOATS, torch.int8))
        return weight.t()
    for name, value in (("scale", scale), ("zero_point", zero_point)):
        if isinstance(value, Tensor) and (is_subclass(value) or not value.is_neg()):
            require_addressable("pack()", **{name: value})
    checks.require_tensor("pack", "scale", 2, scale)
    checks.require_same_device("pack", ("weight", weight), ("scale", scale), ("zero_point", zero_point))
    width = bits if bits is not None else (4 if weight.dtype == torch.uint8 else 8)
    k = weight.shape[1] * (2 if width == 4 else 1)
    return quant_weight(weight.t(), scale.detach(), zero_point, width, group_size, k)


def _problems(raw: Tensor | QuantWeight, m: int | Sequence[int] | Sequence[Problem]) -> list[Problem]:
    """Return the Problems that ``m`` of ``pack`` stands for. raw: the B operand."""
    sizes: Iterable[Any] = (m,) if isinstance(m, int | Problem) else m
    return [size if isinstance(size, Problem) else problem_of(raw, size) for size in sizes]


def problem_of(raw: Tensor | QuantWeight, m: int, dtype: torch.dtype | None = None) -> Problem:
    """Return the Problem of activations [m, K] by a constant B operand, without an epilogue.

    dtype: the activations'; by default the weight's, or that of its scales. Raises ValueError for an m that is no
    positive int.
    """
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


def _packing_kernel(
    problems: Sequence[Problem], layout: str | None, device: torch.device, load_errors: list[str]
) -> Kernel | None:
    """Return a kernel that packs into ``layout``; None if no backend has one. For None as the layout, that is a kernel
    of the Plan's layout or, without a Plan, of a backend's default layout.

    load_errors: receives, for each kernel that could not be loaded, its candidate's id and the error.
    """
    if layout is None:
        layout = _planned_layout(problems[0], device)
    else:
        problems = [*problems, *_planned_problems(problems[0], layout, device)]
    target = current_target(device)
    names = reversed(backends.names(device.type)) if layout is None else backends.readers(layout, device.type)
    for name in names:
        backend = backends.get(name)
        if not backend.available(target):
            continue
        if layout is None:
            kernel = _default_kernel(backend, problems[0], device, load_errors)
        else:
            kernel = _kernel_of_layout(backend, problems, layout, device, load_errors)
        if kernel is not None:
            return kernel
    return None


def _planned_layout(problem: Problem, device: torch.device) -> str | None:
    """Return the best layout by the stored decisions; None if no layout beats the raw weight there, if the store has
    no decision, or if the policy is "off"."""
    if RUNTIME.policy == "off":
        return None
    return next((name for name in RUNTIME.index(device).layouts(problem.plan_key) if name is not None), None)


def _planned_problems(problem: Problem, layout: str, device: torch.device) -> list[Problem]:
    """Return the Problem with each M for which a kernel of the layout's Plan was tuned: backends list some layouts'
    kernels for many rows only, and the Plan may still serve all M by one. Empty where the store has no Plan."""
    plan = None if RUNTIME.policy == "off" else RUNTIME.index(device).plan(problem.plan_key, layout)
    if plan is None:
        return []
    entries = [*(interval.entry for interval in plan.intervals), *plan.entries]
    return [problem.with_m(m) for m in dict.fromkeys(entry.m for entry in entries)]


def _default_kernel(backend: Backend, problem: Problem, device: torch.device, load_errors: list[str]) -> Kernel | None:
    """Return the kernel of the backend's default layout; None if it has none, or the kernel cannot be loaded."""
    candidate = backend.default_packing(problem, current_target(device))
    return None if candidate is None else _load(backend, candidate, problem, device, load_errors)


def _kernel_of_layout(
    backend: Backend, problems: Sequence[Problem], layout: str, device: torch.device, load_errors: list[str]
) -> Kernel | None:
    """Return the first kernel of ``backend`` on ``device`` that takes its weight in ``layout``; None if it has none."""
    target = current_target(device)
    for problem in problems:
        for candidate in backend.candidates(problem, target):
            kernel = None if isinstance(candidate, Illegal) else _load(backend, candidate, problem, device, load_errors)
            if kernel is not None and kernel.packing == layout:
                return kernel
    return None


def _load(
    backend: Backend, candidate: Candidate, problem: Problem, device: torch.device, load_errors: list[str]
) -> Kernel | None:
    """Build and load a candidate. On a KernelError append it to ``load_errors`` and return None."""
    try:
        with devices.get(device.type).guard(device), RUNTIME.artifacts():
            return backend.load(backend.build(problem, candidate, current_target(device)), problem)
    except KernelError as error:
        load_errors.append(f"{candidate.id}: {error}")
        return None


def _unsupported_message(problem: Problem, layout: str | None, load_errors: Sequence[str]) -> str:
    """Return the message of the UnsupportedError that no backend packs a weight into ``layout``."""
    failed = (
        f" ({len(load_errors)} of its kernels could not be loaded, the first of them {load_errors[0]})"
        if load_errors
        else ""
    )
    wanted = "any layout" if layout is None else f"layout {layout!r}"
    return (
        f"no backend here packs a {problem.b.dtype} weight (K = {problem.k}, N = {problem.n}) into {wanted}{failed}; "
        "`gemmtune doctor` says which backends are available. Use the weight as it is"
    )
