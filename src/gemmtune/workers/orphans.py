"""Removal of the processes that a candidate started in its worker and did not end."""

from __future__ import annotations

import contextlib
import os
import sys
import time

import psutil

_LIMIT_S = 1.0


def kill_descendants() -> int:
    """Kill every living descendant of this process, which must be a worker. Return how many there were.

    A worker adopts the orphans of its children (``prctl.adopt_orphans``), so that daemons are among its descendants.
    The call costs next to nothing when there are none. When processes multiply faster than they die, this process
    exits: its host can kill its whole session at once.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + _LIMIT_S
    while processes := _living_descendants():
        if time.monotonic() > deadline:
            print("the candidate's processes multiply", file=sys.stderr, flush=True)
            os._exit(4)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
                killed.add(process.pid)
        time.sleep(0.001)
    return len(killed)


def _living_descendants() -> list[psutil.Process]:
    """Return the descendants that still run; zombies are reaped."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []
    living = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
            else:
                os.waitpid(process.pid, os.WNOHANG)
    return living
