"""A self-contained HTML report, made from the store and the files beside it (ceilings and layers)."""

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
    """Write the report on the decisions and plans of one target, or of all, to ``path``. Return the number of decisions
    in it.

    Nothing is written if there are no decisions. Raises GemmtuneError if ``path`` cannot be written; an existing file
    then stays unchanged.
    """
    targets = [target] if target is not None else store.targets()
    groups = [(each_target, decisions) for each_target in targets if (decisions := list(store.decisions(each_target)))]
    if not groups:
        return 0
    ceilings_path = ceilings.ceilings_path(store)
    measured_ceilings = ceilings.load(ceilings_path) if ceilings_path is not None else {}
    origin = str(getattr(store, "path", "a store in memory"))
    plans = {each_target.key: list(store.plans(each_target)) for each_target, _ in groups}
    _write(path, page(groups, measured_ceilings, origin, layers.load(layers.layers_path(store)), plans))
    return sum(len(decisions) for _, decisions in groups)


def _write(path: Path, text: str) -> None:
    try:
        real_path = Path(os.path.realpath(path))  # the target of a symbolic link is replaced, not the link
        write_whole(real_path, text.encode("utf-8", "backslashreplace"), 0o666)
    except OSError as error:
        raise GemmtuneError(f"cannot write the report {path}: {error.strerror or error}") from error
    with contextlib.suppress(OSError):
        sweep(real_path.parent, real_path.name)
