"""gemmtune finds, proves and serves the fastest correct matrix multiply for every shape a model uses."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import GemmtuneError, KernelError, PackedWeightError, StoreError, UnsupportedError, WorkerError

if TYPE_CHECKING:
    from . import fuse, nn
    from .api import tune
    from .backends.base import PackedWeight
    from .dispatch import current_target, policy, refresh
    from .integrations.optimize import Handle, optimize
    from .integrations.record import Recording, record
    from .integrations.weight_only import WeightOnly, register_weight_only
    from .ops import addmm, bmm, linear, mm
    from .packing import pack, unpack
    from .quantized import int_mm, mixed_mm, scaled_mm

__version__ = "0.1.0"

__all__ = [
    "GemmtuneError", "Handle", "KernelError", "PackedWeight", "PackedWeightError", "Recording", "StoreError",
    "UnsupportedError", "WeightOnly", "WorkerError", "addmm", "bmm", "current_target", "fuse", "int_mm", "linear",
    "mixed_mm", "mm", "nn", "optimize", "pack", "policy", "record", "refresh", "register_weight_only", "scaled_mm",
    "tune", "unpack",
]  # fmt: skip

# Imported when first used: the command line answers `--help` without torch, and the ops come without the tuner.
_HOMES = {
    "addmm": "ops", "bmm": "ops", "linear": "ops", "mm": "ops", "int_mm": "quantized", "mixed_mm": "quantized",
    "scaled_mm": "quantized", "pack": "packing", "unpack": "packing", "PackedWeight": "backends.base",
    "policy": "dispatch", "tune": "api", "refresh": "dispatch", "current_target": "dispatch",
    "Handle": "integrations", "optimize": "integrations", "record": "integrations", "Recording": "integrations",
    "register_weight_only": "integrations", "WeightOnly": "integrations",
}  # fmt: skip
_ROOMS = ("fuse", "nn")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
