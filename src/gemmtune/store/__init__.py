"""Where decisions are kept: ``open_store()`` gives the one that the environment names."""

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
    """The store at ``path``; by default the one ``default_path`` names. Nothing is read or made until it is used.

    ``":memory:"`` gives a MemoryStore. So does a default place that can be neither written nor read (a warning through
    the ``gemmtune`` logger says so); a path that was asked for by argument is taken as it is, and writing it raises
    StoreError when it cannot be done.
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
    """Whether the file is there, or its nearest existing parent is a directory that can be written."""
    if os.path.exists(path):
        return os.path.isfile(path)
    parent = next(folder for folder in path.absolute().parents if os.path.exists(folder))
    return parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
