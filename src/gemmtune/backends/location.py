"""The directory of artifacts that is in use on the current thread; ``artifacts.py`` is the part that backends use.

A store names the directory of its artifacts (``Store.artifacts_directory``). Code that builds or loads for a store runs
inside ``with artifacts_in(directory)``; processes that work for a tuner are sent the directory. This module does not
depend on any store.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_directory: ContextVar[Path | None] = ContextVar("gemmtune_artifacts", default=None)


@contextmanager
def artifacts_in(directory: Path | None) -> Iterator[None]:
    """Return a context manager in which this thread's backends build into ``directory``; None means the directory of
    the default store."""
    token = _directory.set(directory)
    try:
        yield
    finally:
        _directory.reset(token)


def chosen_directory() -> Path | None:
    """Return the directory of the innermost enclosing ``artifacts_in``; None means the directory of the default
    store."""
    return _directory.get()
