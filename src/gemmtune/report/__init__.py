"""A self-contained HTML report, made from the store (and the ceilings kept beside it) alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from . import ceilings
from .page import page

if TYPE_CHECKING:
    from ..store.base import Store
    from ..target import Target

__all__ = ["write_report"]


def write_report(store: Store, path: Path, *, target: Target | None = None) -> int:
    """Write the report on one target's decisions (or on all) to ``path``; returns how many it shows.

    Nothing is written when there is nothing to show. Raises OSError when ``path`` cannot be written.
    """
    targets = [target] if target is not None else store.targets()
    groups = [(owner, decisions) for owner in targets if (decisions := list(store.decisions(owner)))]
    if not groups:
        return 0
    place = ceilings.beside(store)
    known = ceilings.load(place) if place is not None else {}
    origin = str(getattr(store, "path", "a store in memory"))
    path.write_text(page(groups, known, origin), encoding="utf-8")
    return sum(len(decisions) for _, decisions in groups)
