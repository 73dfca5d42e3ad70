"""The registry: one line a backend. Rooms are imported only when a backend is asked for."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .base import Backend

if TYPE_CHECKING:
    from ..core.target import Target

_ROOMS = {
    "aten": "aten:AtenBackend",
    "native": "native:NativeBackend",
    "triton": "triton:TritonBackend",
    "cuda": "cuda:CudaBackend",
    "cublaslt": "cublaslt:CublasLtBackend",
}
# Rooms whose kernels run on one kind of device alone.
_HOMES = {"native": "cpu", "triton": "cuda", "cuda": "cuda", "cublaslt": "cuda"}
_GUESTS: dict[str, str] = {}


def names(device: str | None = None) -> tuple[str, ...]:
    """The names users may ask for, ATen first; with a ``device`` (cpu, cuda) those that may have kernels for it."""
    everyone = (*_ROOMS, *_GUESTS)
    return everyone if device is None else tuple(name for name in everyone if _HOMES.get(name, device) == device)


def register(name: str, place: str) -> None:
    """Add a backend from outside this package: ``place`` is ``module:Class``, importable in worker processes too.

    Registering a name again replaces it. Raises ValueError for a built-in name or a malformed place.
    """
    module, colon, attribute = place.partition(":")
    if name in _ROOMS or not name.isidentifier():
        raise ValueError(
            f"a backend cannot be called {name!r}: it must be an identifier other than {', '.join(_ROOMS)}"
        )
    if not (module and colon and attribute):
        raise ValueError(f"a backend's place must read 'module:Class'; got {place!r}")
    _GUESTS[name] = place
    get.cache_clear()


def guests() -> dict[str, str]:
    """The backends that ``register`` added, as name -> ``module:Class``."""
    return dict(_GUESTS)


@functools.cache
def get(name: str) -> Backend:
    """The backend called ``name``. Raises ValueError naming the known ones."""
    if name not in names():
        raise ValueError(f"unknown backend {name!r}; known backends: {', '.join(names())}")
    own = name in _ROOMS
    module, _, attribute = (_ROOMS if own else _GUESTS)[name].partition(":")
    room = importlib.import_module(f"{__name__}.{module}" if own else module)
    backend: Backend = getattr(room, attribute)()
    return backend


def versions(target: Target, chosen: Sequence[str] | None = None) -> dict[str, str]:
    """Return what the kernels of each backend for the target's kind of device depend on, by name."""
    found: dict[str, str] = {}
    for name in chosen or names(target.device):
        found.update(get(name).versions(target))
    return found


def sources(chosen: Sequence[str] | None = None) -> dict[str, str]:
    """The source digest of each backend, for the Target."""
    return {name: get(name).source_digest() for name in chosen or names()}
