"""Where backends keep what they build: with the store in use.

A store names the directory of its artifacts (``Store.artifacts_directory``). Who builds or loads for a store does it in
a block of ``artifacts_in``; processes that work for a tuner are told the directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_directory: ContextVar[Path | None] = ContextVar("gemmtune_artifacts", default=None)


@contextmanager
def artifacts_in(directory: Path | None) -> Iterator[None]:
    """Block of this thread in which ``artifacts_directory`` is ``directory``; None: that of the default store."""
    before = _directory.set(directory)
    try:
        yield
    finally:
        _directory.reset(before)


def artifacts_directory() -> Path:
    """Return the directory in which ``Backend.build`` leaves artifacts, and ``Backend.artifact`` looks for them.

    Outside a block of ``artifacts_in`` it is the default store's; where that is a store in memory, one in the user's
    cache directory.
    """
    directory = _directory.get()
    if directory is not None:
        return directory
    from ..store import Artifacts, default_path

    path = default_path()
    if str(path) == ":memory:":
        import platformdirs

        path = Path(platformdirs.user_cache_dir("gemmtune", appauthor=False)) / "store.db"
    return Artifacts.beside(path).directory
