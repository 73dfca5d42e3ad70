"""The machine's ceilings for the roofline plot: its memory bandwidth, and the rate at which ATen multiplies.

They are measured once per Target, in under two seconds, and stored in a small JSON file beside the store, so that a
report can be made from files alone. The report states that the ceilings are measured and not from a data sheet.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.files import write_whole

if TYPE_CHECKING:
    from ..core.target import Target
    from ..store.base import Store

_READ_BYTES = 256 << 20
_SIZE = 1024


def read_bandwidth(seconds: float = 0.5) -> float:
    """Return the memory bandwidth in bytes per second, with torch's current number of threads.

    It is measured by summing 256 MB of int64 repeatedly for ``seconds``; the fastest pass counts.
    """
    import torch

    data = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    return _READ_BYTES / _fastest(data.sum, seconds)


def arithmetic(seconds: float = 0.2) -> dict[str, float]:
    """Return the operations per second of ATen's 1024^3 product, by dtype of A (int8: int8 x int8 -> int32).

    Each dtype is measured for ``seconds``; the fastest call counts.
    """
    import torch

    from ..core.torch_compat import int_mm

    rates: dict[str, float] = {}
    for name in ("float32", "bfloat16", "int8"):
        dtype = getattr(torch, name)
        a = torch.ones(_SIZE, _SIZE, dtype=dtype)
        multiply = int_mm if name == "int8" else torch.mm
        rates[name] = 2 * _SIZE**3 / _fastest(lambda a=a, multiply=multiply: multiply(a, a), seconds)  # type: ignore[misc]
    return rates


def _fastest(function: Callable[[], Any], seconds: float) -> float:
    function()
    best, deadline = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        function()
        end = time.perf_counter()
        best = min(best, end - start)
        if end > deadline:
            return best


def ceilings_path(store: Store) -> Path | None:
    """Return the path of the ceilings file of a store; None for a store without a file."""
    path = getattr(store, "path", None)
    return Path(path).with_suffix(".ceilings.json") if path is not None else None


def load(path: Path) -> dict[str, dict[str, float]]:
    """Return the ceilings by Target key; empty if the file is missing or damaged.

    A target's ceilings are ``read`` in bytes per second, and operations per second by name of dtype.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {
            str(key): {str(name): float(rate) for name, rate in rates.items() if float(rate) > 0}
            for key, rates in data["ceilings"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def load_or_measure(path: Path, target: Target) -> dict[str, float]:
    """Return the target's ceilings. If the file has none, measure and write them; an error in writing is ignored."""
    ceilings = load(path)
    if target.key not in ceilings:
        ceilings[target.key] = {"read": read_bandwidth(), **arithmetic()}
        with contextlib.suppress(OSError):
            write_whole(path, json.dumps({"version": 1, "ceilings": ceilings}, indent=1).encode())
    return ceilings[target.key]
