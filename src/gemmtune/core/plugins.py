"""Modules from outside that register families, oracles, templates and ops when they are imported.

A worker process is told their names and imports them before it looks at a Problem.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

_MODULES: dict[str, None] = {}


def add(module: str) -> None:
    """Remember a module that registers something when it is imported."""
    _MODULES[module] = None


def modules() -> list[str]:
    """Return the names of all such modules, in the order in which they were added."""
    return list(_MODULES)


def load(names: Iterable[str]) -> None:
    """Import the modules. Raises what importing them raises."""
    for name in names:
        importlib.import_module(name)
        add(name)
