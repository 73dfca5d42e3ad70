"""The modules ``gemmtune.optimize`` puts into a model, under the names users would look for."""

from __future__ import annotations

from .integrations.modules import Linear, RawLinear, RawWeightOnlyLinear, WeightOnlyLinear

__all__ = ["Linear", "RawLinear", "RawWeightOnlyLinear", "WeightOnlyLinear"]
