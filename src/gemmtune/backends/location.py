"""The directory of artifacts that is in use; ``artifacts.py`` is for backends.

A store names the directory of its artifacts (``Store.artifacts_directory``). Who builds or loads for a store does it in
a block of ``artifacts_in``; processes that work for a tuner are told the directory. Nothing here knows a store.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_directory: ContextVar[Path | None] = ContextVar("gemmtune_artifacts", default=None)


@contextmanager
def artifacts_in(directory: Path | None) -> Iterator[None]:
    """Block of this thread in which backends build into ``directory``; None: that of the default store."""
    before = _directory.set(directory)
    try:
        yield
    finally:
        _directory.reset(before)


def chosen_directory() -> Path | None:
    """Return the directory of the innermost block of ``artifacts_in``; None: that of the default store."""
    return _directory.get()
