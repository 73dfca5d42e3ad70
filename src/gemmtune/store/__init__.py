"""Stores of decisions. ``open_store()`` returns the default one."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ..core.artifacts import Artifacts
from ..core.paths import default_path
from .base import Store
from .lease import Lease
from .memory import MemoryStore
from .sqlite import SqliteStore

__all__ = ["Artifacts", "Lease", "MemoryStore", "SqliteStore", "Store", "default_path", "open_store"]


def open_store(path: str | os.PathLike[str] | None = None) -> Store:
    """Return the store at ``path``, by default at ``default_path()``. No file is read or created before its first use.

    Returns a MemoryStore for ``":memory:"``, and also when the default path can be neither read nor written; the
    ``gemmtune`` logger then gets a warning. A ``path`` argument is used without this check, and writing to the store
    raises StoreError when the path is not writable.
    """
    chosen = default_path() if path is None else Path(path).expanduser()
    if str(chosen) == ":memory:":
        return MemoryStore()
    if path is None and not _usable(chosen):
        logging.getLogger("gemmtune").warning(
            "the store %s cannot be written: decisions will be forgotten when this process ends; "
            "set GEMMTUNE_STORE to a path that can be", chosen
        )  # fmt: skip
        return MemoryStore()
    return SqliteStore(chosen)


def _usable(path: Path) -> bool:
    """Whether the file exists, or its nearest existing parent is a writable directory."""
    if os.path.exists(path):
        return os.path.isfile(path)
    parent = next(folder for folder in path.absolute().parents if os.path.exists(folder))
    return parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
