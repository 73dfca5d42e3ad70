"""NVIDIA's libraries by ctypes, and where they are when they came as wheels."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...errors import UnsupportedError


def in_wheels(name: str) -> Iterator[str]:
    """The paths of a shared library in the installed ``nvidia-*`` wheels, which share a namespace."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from map(str, sorted(Path(folder).glob(f"*/lib/{name}")))


def first_of(places: Iterable[str], missing: str, kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """The first shared library that can be loaded. Raises UnsupportedError, in the words ``missing``, when none can."""
    for place in places:
        try:
            return kind(place)
        except OSError:
            continue
    raise UnsupportedError(missing)
