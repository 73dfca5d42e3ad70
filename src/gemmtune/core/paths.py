"""The default paths of gemmtune's files."""

from __future__ import annotations

import os
from pathlib import Path


def default_path() -> Path:
    """Return the path $GEMMTUNE_STORE, or ``store.db`` in the user's data directory when it is not set."""
    path = os.environ.get("GEMMTUNE_STORE")
    if path:
        return Path(path).expanduser()
    import platformdirs

    return Path(platformdirs.user_data_dir("gemmtune", appauthor=False)) / "store.db"
