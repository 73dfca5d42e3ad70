"""The ops. A new op is a module of its own and a line here."""

from __future__ import annotations

from . import addmm, bmm, int_mm, linear, mixed_mm, mm, scaled_mm
from .spec import OpSpec

OPS: tuple[OpSpec, ...] = (
    mm.SPEC, linear.SPEC, addmm.SPEC, bmm.SPEC, int_mm.SPEC, mixed_mm.SPEC, scaled_mm.SPEC,
)  # fmt: skip
