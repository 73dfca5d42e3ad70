"""Where backends keep what they build: with the store in use (``location.py``)."""

from __future__ import annotations

from pathlib import Path

from ..core.artifacts import Artifacts
from ..core.paths import default_path
from .location import chosen_directory


def artifacts_directory() -> Path:
    """Return the directory in which ``Backend.build`` leaves artifacts, and ``Backend.artifact`` looks for them.

    Outside a block of ``location.artifacts_in`` it is the default store's; where that is a store in memory, one in the
    user's cache directory.
    """
    directory = chosen_directory()
    if directory is not None:
        return directory
    path = default_path()
    if str(path) == ":memory:":
        import platformdirs

        path = Path(platformdirs.user_cache_dir("gemmtune", appauthor=False)) / "store.db"
    return Artifacts.beside(path).directory
