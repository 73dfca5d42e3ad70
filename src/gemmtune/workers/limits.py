"""Limits of a worker process: its memory, its share of the processors, and no core dumps."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def limit_memory(allowance: int) -> None:
    """Let this process allocate ``allowance`` bytes more than it has now; 0 changes nothing.

    RLIMIT_DATA counts private writable memory, so that mapped files (torch's libraries) are free. Beyond the limit an
    allocation fails with an error that costs one candidate, where the kernel's OOM killer might choose any process.
    Does nothing where the platform has no such limit.
    """
    if allowance <= 0:
        return
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = _data_bytes() + allowance
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    except (ImportError, OSError, ValueError):
        return


def lower_priority(niceness: int) -> None:
    """Add ``niceness`` (0 to 19) to this process's niceness, which the processes that it starts inherit. Does nothing
    where the platform has none, or refuses."""
    if niceness:
        with contextlib.suppress(AttributeError, OSError):
            os.nice(niceness)


def no_core_dumps() -> None:
    """Disable core dumps of this process: a dump may hold gigabytes, and the parent waits for it."""
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    except (ImportError, OSError, ValueError):
        return


def _data_bytes() -> int:
    """Return the private writable memory of this process (VmData) in bytes. Raises OSError or ValueError without
    /proc."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/self/status has no VmData")
