"""The ops. A new op is a module of its own and a line here; ops from outside call ``register``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.problem import Problem
from . import addmm, bmm, int_mm, linear, mixed_mm, mm, scaled_mm
from .spec import OpSpec

_BUILTIN = (mm.SPEC, linear.SPEC, addmm.SPEC, bmm.SPEC, int_mm.SPEC, mixed_mm.SPEC, scaled_mm.SPEC)

OPS: dict[str, OpSpec] = {}
# From a function of PyTorch's to the Problem of a call of it; ``record()`` reads this.
DESCRIBERS: dict[Any, Callable[..., Problem | None]] = {}


def register(spec: OpSpec) -> None:
    """Add an op. ``record()`` sees the functions in ``spec.records`` from then on.

    Registering a name again replaces that op. Raises ValueError for the name of a built-in op, and for a function that
    another op records.
    """
    if spec.name in {builtin.name for builtin in _BUILTIN}:
        raise ValueError(f"an op cannot be called {spec.name!r}: gemmtune has an op of that name")
    former = OPS.get(spec.name)
    taken = [function for function in spec.records if function in DESCRIBERS]
    if former is not None:
        taken = [function for function in taken if function not in former.records]
    if taken:
        raise ValueError(f"{spec.name}: another op records {', '.join(map(str, taken))}")
    if former is not None:
        for function in former.records:
            del DESCRIBERS[function]
    _add(spec)


def _add(spec: OpSpec) -> None:
    OPS[spec.name] = spec
    DESCRIBERS.update(spec.records)


for _spec in _BUILTIN:
    _add(_spec)
