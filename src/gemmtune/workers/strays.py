"""Processes that a candidate left running beside its worker."""

from __future__ import annotations

import contextlib
import os
import sys
import time

import psutil

_LIMIT_S = 1.0


def end_strays() -> int:
    """Kill every living descendant of this process, which must be a worker. Returns how many there were.

    A worker adopts what its children abandon (``prctl.adopt_orphans``), so that daemons are among them. Costs next to
    nothing when there are none. Where they multiply faster than they die, this process gives itself up: its host can
    kill all of its session at one blow.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + _LIMIT_S
    while living := _living():
        if time.monotonic() > deadline:
            print("the candidate's processes multiply", file=sys.stderr, flush=True)
            os._exit(4)
        for process in living:
            with contextlib.suppress(psutil.Error):
                process.kill()
                killed.add(process.pid)
        time.sleep(0.001)
    return len(killed)


def _living() -> list[psutil.Process]:
    """Descendants that still run; those that have ended are taken note of, so that they go away."""
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
