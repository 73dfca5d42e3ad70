"""Bringing gemmtune into models: record what they run, swap their linears."""

from __future__ import annotations

from .optimize import Handle, optimize
from .record import Recording, record
from .weight_only import WeightOnly, register_weight_only

__all__ = ["Handle", "Recording", "WeightOnly", "optimize", "record", "register_weight_only"]
