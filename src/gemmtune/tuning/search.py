"""The registry of search strategies that ``tune(search=...)`` knows by name; ``searcher.py`` has their contract."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.candidate import Candidate
from .local_search import LocalSearch
from .searcher import Searcher, SearcherFactory, SearchOptions


def _local(candidates: Sequence[Candidate], options: SearchOptions) -> Searcher:
    settings = options.profile.search
    return LocalSearch(candidates, first=options.first, seed=options.seed, limit=options.limit, **settings)


_BUILTIN: dict[str, SearcherFactory] = {"local": _local}
_REGISTERED: dict[str, SearcherFactory] = {}


def register(name: str, factory: SearcherFactory) -> None:
    """Add a strategy. factory: called with the legal candidates, ATen's first, and SearchOptions, once for each
    Problem.

    Registering a name again replaces that strategy. Raises ValueError for a built-in name.
    """
    if name in _BUILTIN:
        raise ValueError(f"a search strategy cannot be called {name!r}: gemmtune has one of that name")
    _REGISTERED[name] = factory


def names() -> tuple[str, ...]:
    """Return the names of all strategies."""
    return (*_BUILTIN, *_REGISTERED)


def get(name: str) -> SearcherFactory:
    """Return the strategy called ``name``. Raises ValueError naming the known ones."""
    factory = _BUILTIN.get(name) or _REGISTERED.get(name)
    if factory is None:
        raise ValueError(f"unknown search strategy {name!r}; known strategies: {', '.join(names())}")
    return factory
