"""The machine's ceilings for the roofline: how fast it reads memory, how fast ATen multiplies.

Measured once per Target in under two seconds and kept in a small JSON file beside the store, so that a report can be
made from files alone. They are measured ceilings, not data-sheet ones: the report says so.
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
    """Bytes a second this process reads with torch's present threads: summing 256 MB of int64, best of many passes."""
    import torch

    data = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    return _READ_BYTES / _fastest(data.sum, seconds)


def arithmetic(seconds: float = 0.2) -> dict[str, float]:
    """Operations a second of ATen's 1024^3 product by the activation's dtype (int8: int8 x int8 -> int32)."""
    import torch

    from ..core.torch_compat import int_mm

    rates: dict[str, float] = {}
    for name in ("float32", "bfloat16", "int8"):
        dtype = getattr(torch, name)
        a = torch.ones(_SIZE, _SIZE, dtype=dtype)
        multiply = int_mm if name == "int8" else torch.mm
        rates[name] = 2 * _SIZE**3 / _fastest(lambda a=a, multiply=multiply: multiply(a, a), seconds)  # type: ignore[misc]
    return rates


def _fastest(action: Callable[[], Any], seconds: float) -> float:
    action()
    best, deadline = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        action()
        end = time.perf_counter()
        best = min(best, end - start)
        if end > deadline:
            return best


def beside(store: Store) -> Path | None:
    """The file that goes with a store; None for a store without a file."""
    path = getattr(store, "path", None)
    return Path(path).with_suffix(".ceilings.json") if path is not None else None


def load(path: Path) -> dict[str, dict[str, float]]:
    """Ceilings by Target key: ``read`` in bytes/s, every other name a dtype in operations/s. Damage reads as none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {
            str(key): {str(name): float(rate) for name, rate in rates.items() if float(rate) > 0}
            for key, rates in data["ceilings"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def ensure(path: Path, target: Target) -> dict[str, float]:
    """This target's ceilings, measured now if the file has none. A file that cannot be written is left alone."""
    known = load(path)
    if target.key not in known:
        known[target.key] = {"read": read_bandwidth(), **arithmetic()}
        with contextlib.suppress(OSError):
            write_whole(path, json.dumps({"version": 1, "ceilings": known}, indent=1).encode())
    return known[target.key]
