"""A self-contained HTML report, made from the store (and the ceilings kept beside it) alone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import GemmtuneError
from ..core.files import sweep, write_whole
from . import ceilings, layers
from .page import page

if TYPE_CHECKING:
    from ..core.target import Target
    from ..store.base import Store

__all__ = ["write_report"]


def write_report(store: Store, path: Path, *, target: Target | None = None) -> int:
    """Write the report on one target's decisions (or on all) to ``path``; returns how many it shows.

    Nothing is written when there is nothing to show. Raises GemmtuneError when ``path`` cannot be written; what was
    there before is there still.
    """
    targets = [target] if target is not None else store.targets()
    groups = [(owner, decisions) for owner in targets if (decisions := list(store.decisions(owner)))]
    if not groups:
        return 0
    place = ceilings.beside(store)
    known = ceilings.load(place) if place is not None else {}
    origin = str(getattr(store, "path", "a store in memory"))
    _write(path, page(groups, known, origin, layers.load(layers.beside(store))))
    return sum(len(decisions) for _, decisions in groups)


def _write(path: Path, text: str) -> None:
    try:
        place = Path(os.path.realpath(path))  # not the link itself, where one leads to the report
        write_whole(place, text.encode("utf-8", "backslashreplace"), 0o666)
    except OSError as error:
        raise GemmtuneError(f"cannot write the report {path}: {error.strerror or error}") from error
    with contextlib.suppress(OSError):
        sweep(place.parent, place.name)
