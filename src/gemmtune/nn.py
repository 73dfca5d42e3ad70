"""The modules ``gemmtune.optimize`` puts into a model, under the names users would look for."""

from __future__ import annotations

from .integrations.modules import Linear, WeightOnlyLinear

__all__ = ["Linear", "WeightOnlyLinear"]
