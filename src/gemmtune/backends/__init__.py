"""The registry: one line a backend. Rooms are imported only when a backend is asked for."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence

from .base import Backend

_ROOMS = {
    "aten": "aten:AtenBackend",
    "native": "native:NativeBackend",
}


def names() -> tuple[str, ...]:
    """The names users may ask for, ATen first."""
    return tuple(_ROOMS)


@functools.cache
def get(name: str) -> Backend:
    """The backend called ``name``. Raises ValueError naming the known ones."""
    if name not in _ROOMS:
        raise ValueError(f"unknown backend {name!r}; known backends: {', '.join(_ROOMS)}")
    module, _, attribute = _ROOMS[name].partition(":")
    room = importlib.import_module(f"{__name__}.{module}")
    backend: Backend = getattr(room, attribute)()
    return backend


def sources(chosen: Sequence[str] | None = None) -> dict[str, str]:
    """The source digest of each backend, for the Target."""
    return {name: get(name).source_digest() for name in chosen or names()}
