"""The registry of backends, one line each. A backend's package is imported only when ``get`` first returns that
backend."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ..core.weights import layout_owner
from .base import Backend

if TYPE_CHECKING:
    from ..core.target import Target

_BUILTIN = {
    "aten": "aten:AtenBackend",
    "native": "native:NativeBackend",
    "triton": "triton:TritonBackend",
    "cuda": "cuda:CudaBackend",
    "cublaslt": "cublaslt:CublasLtBackend",
}
# Backends whose kernels run on only one kind of device.
_DEVICE_OF = {"native": "cpu", "triton": "cuda", "cuda": "cuda", "cublaslt": "cuda"}
_PLUGINS: dict[str, str] = {}


def names(device: str | None = None) -> tuple[str, ...]:
    """Return the names that users may ask for, ATen first; with a ``device`` (cpu, cuda), the names of the backends
    that may have kernels for it."""
    registered = (*_BUILTIN, *_PLUGINS)
    return (
        registered if device is None else tuple(name for name in registered if _DEVICE_OF.get(name, device) == device)
    )


def register(name: str, entry_point: str) -> None:
    """Add a backend from outside this package. ``entry_point`` is ``module:Class``, importable in worker processes too.

    Registering a name again replaces its backend. Raises ValueError for a built-in name or a malformed entry point.
    """
    module, colon, attribute = entry_point.partition(":")
    if name in _BUILTIN or not name.isidentifier():
        raise ValueError(
            f"a backend cannot be called {name!r}: it must be an identifier other than {', '.join(_BUILTIN)}"
        )
    if not (module and colon and attribute):
        raise ValueError(f"a backend's entry point must read 'module:Class'; got {entry_point!r}")
    _PLUGINS[name] = entry_point
    get.cache_clear()


def plugins() -> dict[str, str]:
    """Return the backends that ``register`` added, as name -> ``module:Class``."""
    return dict(_PLUGINS)


@functools.cache
def get(name: str) -> Backend:
    """Return the backend called ``name``. Raises ValueError, with the known names, for any other."""
    if name not in names():
        raise ValueError(f"unknown backend {name!r}; known backends: {', '.join(names())}")
    builtin = name in _BUILTIN
    module, _, attribute = (_BUILTIN if builtin else _PLUGINS)[name].partition(":")
    package = importlib.import_module(f"{__name__}.{module}" if builtin else module)
    backend: Backend = getattr(package, attribute)()
    return backend


def readers(layout: str, device: str) -> Iterator[str]:
    """Yield the names of the backends for a kind of device whose kernels may take a weight in a packed layout, its
    owner first. The others are imported when they are asked for; one that cannot be is left out."""
    owner = layout_owner(layout)
    if owner in names(device):
        yield owner
    for name in names(device):
        with suppress(ImportError, AttributeError):
            if name != owner and owner in get(name).shared_layouts:
                yield name


def preloaded_modules(device: str) -> list[str]:
    """Return the modules that processes which build or run kernels for a kind of device import first, sorted.

    Not those of plugins: such a process imports the plugins that it is told of (``workers.protocol.Setup``).
    """
    builtin = (name for name in names(device) if name not in plugins())
    return sorted({module for name in builtin for module in get(name).preload})


def versions(target: Target, chosen: Sequence[str] | None = None) -> dict[str, str]:
    """Return the versions, by name, that the kernels of the chosen backends depend on (default: all backends for the
    target's kind of device)."""
    merged: dict[str, str] = {}
    for name in chosen or names(target.device):
        merged.update(get(name).versions(target))
    return merged


def sources(chosen: Sequence[str] | None = None) -> dict[str, str]:
    """Return the source digest of each chosen backend (default: all), by name, for the Target."""
    return {name: get(name).source_digest() for name in chosen or names()}
