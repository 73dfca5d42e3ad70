"""Where NVIDIA's libraries are when they came as wheels."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path


def in_wheels(name: str) -> Iterator[str]:
    """The paths of a shared library in the installed ``nvidia-*`` wheels, which share a namespace."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from map(str, sorted(Path(folder).glob(f"*/lib/{name}")))
