"""The directory that backends write their artifacts to: it belongs to the store in use (``location.py``)."""

from __future__ import annotations

from pathlib import Path

from ..core.artifacts import Artifacts
from ..core.paths import default_path
from .location import chosen_directory


def artifacts_directory() -> Path:
    """Return the directory to which ``Backend.build`` writes artifacts and in which ``Backend.artifact`` looks for
    them.

    Outside ``location.artifacts_in`` it is the directory of the default store. If the default store is in memory, it is
    a directory in the user's cache directory.
    """
    directory = chosen_directory()
    if directory is not None:
        return directory
    path = default_path()
    if str(path) == ":memory:":
        import platformdirs

        path = Path(platformdirs.user_cache_dir("gemmtune", appauthor=False)) / "store.db"
    return Artifacts.beside(path).directory
