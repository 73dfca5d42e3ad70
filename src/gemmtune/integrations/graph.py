"""Packed modules inside torch.compile's graphs: one opaque op that calls back into the module, so that no graph breaks.

``gemmtune::packed_module(input, handle, out_features)``: input [.., K] -> [.., out_features] of the input's dtype. The
handle names a live module of this process; it is part of the traced graph, as the module's identity is of its guards.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor


class Computes(Protocol):
    """What a handle stands for."""

    def compute(self, input: Tensor) -> Tensor: ...


_LIBRARY = torch.library.Library("gemmtune", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("packed_module(Tensor input, int handle, int out_features) -> Tensor")  # type: ignore[no-untyped-call]
_handles = itertools.count(1)
_modules: weakref.WeakValueDictionary[int, Computes] = weakref.WeakValueDictionary()


def register(module: Computes) -> int:
    """A handle for a module, valid while the module lives."""
    handle = next(_handles)
    _modules[handle] = module
    return handle


def _run(input: Tensor, handle: int, out_features: int) -> Tensor:
    return _modules[handle].compute(input)


def _shape(input: Tensor, handle: int, out_features: int) -> Tensor:
    return input.new_empty((*input.shape[:-1], out_features))


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("packed_module", _run, _device)  # type: ignore[no-untyped-call]
torch.library.register_fake("gemmtune::packed_module", _shape, lib=_LIBRARY)


def call(input: Tensor, handle: int, out_features: int) -> Tensor:
    """The op, for a module's forward while torch.compile traces it."""
    out: Tensor = torch.ops.gemmtune.packed_module(input, handle, out_features)
    return out
