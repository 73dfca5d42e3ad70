"""Processes by the tag in their environment, which forks inherit whatever session or parent they move to."""

from __future__ import annotations

import contextlib
import os
import time

import psutil

VARIABLE = "GEMMTUNE_WORKER"  # holds one random word a host, for all that descends from it


def tagged(tag: str) -> list[psutil.Process]:
    """The living processes of this user that carry ``tag``. This process is never among them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it ended, or is somebody else's
            carried = process.environ().get(VARIABLE) if process.pid != os.getpid() else None
            if carried == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def sweep(tag: str, limit_s: float = 2.0) -> int:
    """Kill all that carry ``tag``, until there are none or ``limit_s`` seconds have passed. Returns how many died."""
    killed: set[int] = set()
    deadline = time.monotonic() + limit_s
    while left := tagged(tag):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
                killed.add(process.pid)
        if time.monotonic() > deadline:
            break
        time.sleep(0.002)
    return len(killed)
