"""Where gemmtune keeps its files."""

from __future__ import annotations

import os
from pathlib import Path


def default_path() -> Path:
    """$GEMMTUNE_STORE, or ``store.db`` in the user's data directory."""
    named = os.environ.get("GEMMTUNE_STORE")
    if named:
        return Path(named).expanduser()
    import platformdirs

    return Path(platformdirs.user_data_dir("gemmtune", appauthor=False)) / "store.db"
