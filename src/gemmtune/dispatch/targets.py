"""The Target of a device of this machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from .. import backends
from ..core import devices
from ..core.target import Target


def target_of(device: str | torch.device, warn: Callable[[str], None]) -> Target:
    """Return the Target that a device's decisions are stored under: this CPU with torch's present number of threads, or
    a GPU (``"cuda"``: the current one), with the sources and the versions of every backend that can be imported.

    warn: called with a line for each backend that cannot be. Raises ValueError for another kind of device,
    UnsupportedError for a GPU that does not exist.
    """
    chosen = torch.device(device)
    kind = devices.get(chosen.type)
    kind.require(chosen)
    sources: dict[str, str] = {}
    versions: dict[str, str] = {}
    for name in backends.names(chosen.type):
        try:
            sources.update(backends.sources([name]))
        except (ImportError, AttributeError) as error:
            warn(f"backend {name} cannot be imported ({error})")
    target = kind.target(chosen, sources)
    for name in sources:
        with suppress(ImportError, AttributeError):
            versions.update(backends.versions(target, [name]))
    return target.with_versions(versions)
