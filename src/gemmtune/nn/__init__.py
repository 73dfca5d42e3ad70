"""The tensors and modules that ``gemmtune.optimize`` puts into a model: packed weights, and modules that replace
weight-only linears."""

from __future__ import annotations

from .modules import RawLinear, RawWeightOnlyLinear, WeightOnlyLinear
from .packed_tensor import PackedTensor

__all__ = ["PackedTensor", "RawLinear", "RawWeightOnlyLinear", "WeightOnlyLinear"]
