"""gemmtune finds, proves and serves the fastest correct matrix multiply for every shape a model uses."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import fuse
from .backends.base import PackedWeight
from .errors import GemmtuneError, KernelError, PackedWeightError, StoreError, UnsupportedError, WorkerError
from .ops import addmm, bmm, linear, mm
from .pack import pack, unpack
from .quantized import int_mm, mixed_mm, scaled_mm

if TYPE_CHECKING:
    from . import nn
    from .api import policy, tune
    from .dispatch import current_target, refresh
    from .integrations.optimize import Handle, optimize
    from .integrations.record import Recording, record
    from .integrations.weight_only import WeightOnly, register_weight_only

__version__ = "0.1.0"

__all__ = [
    "GemmtuneError", "Handle", "KernelError", "PackedWeight", "PackedWeightError", "Recording", "StoreError",
    "UnsupportedError", "WeightOnly", "WorkerError", "addmm", "bmm", "current_target", "fuse", "int_mm", "linear",
    "mixed_mm", "mm", "nn", "optimize", "pack", "policy", "record", "refresh", "register_weight_only", "scaled_mm",
    "tune", "unpack",
]  # fmt: skip

# Imported when first used, so that importing gemmtune costs little more than importing torch.
_LATER = {
    "Handle": "integrations", "optimize": "integrations", "record": "integrations",
    "register_weight_only": "integrations", "policy": "api", "tune": "api", "refresh": "dispatch",
    "current_target": "dispatch", "Recording": "integrations", "WeightOnly": "integrations",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "nn":
        return importlib.import_module(f"{__name__}.nn")
    if name in _LATER:
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
