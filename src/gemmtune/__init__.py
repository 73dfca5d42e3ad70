"""gemmtune finds, proves and serves the fastest correct matrix multiply for every shape a model uses."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .core.errors import GemmtuneError, KernelError, PackedWeightError, StoreError, UnsupportedError, WorkerError

if TYPE_CHECKING:
    from . import fuse, inductor, nn
    from .core.weights import PackedWeight
    from .dispatch import current_target, policy, refresh
    from .inductor.backend import compile
    from .nn.changes import Handle
    from .nn.optimize import optimize
    from .ops.addmm import addmm
    from .ops.bmm import bmm
    from .ops.int_mm import int_mm
    from .ops.linear import linear
    from .ops.mixed_mm import mixed_mm
    from .ops.mm import mm
    from .ops.packing import pack, unpack
    from .ops.record import Recording, record
    from .ops.scaled_mm import scaled_mm
    from .ops.weight_only import WeightOnly, register_weight_only
    from .tuning.api import tune

__version__ = "0.1.0"

__all__ = [
    "GemmtuneError", "Handle", "KernelError", "PackedWeight", "PackedWeightError", "Recording", "StoreError",
    "UnsupportedError", "WeightOnly", "WorkerError", "addmm", "bmm", "compile", "current_target", "fuse", "inductor",
    "int_mm", "linear", "mixed_mm", "mm", "nn", "optimize", "pack", "policy", "record", "refresh",
    "register_weight_only", "scaled_mm", "tune", "unpack",
]  # fmt: skip

# Imported when first used: the command line answers `--help` without torch, and the ops come without the tuner.
_MODULE_OF = {
    "addmm": "ops.addmm", "bmm": "ops.bmm", "linear": "ops.linear", "mm": "ops.mm",
    "int_mm": "ops.int_mm", "mixed_mm": "ops.mixed_mm", "scaled_mm": "ops.scaled_mm",
    "pack": "ops.packing", "unpack": "ops.packing", "PackedWeight": "core.weights",
    "record": "ops.record", "Recording": "ops.record",
    "register_weight_only": "ops.weight_only", "WeightOnly": "ops.weight_only",
    "policy": "dispatch", "refresh": "dispatch", "current_target": "dispatch",
    "compile": "inductor.backend", "tune": "tuning.api", "Handle": "nn.changes", "optimize": "nn.optimize",
}  # fmt: skip
_SUBMODULES = ("fuse", "inductor", "nn")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
