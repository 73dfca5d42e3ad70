"""Processes identified by a tag in their environment, which forks inherit whatever session or parent they move to."""

from __future__ import annotations

import contextlib
import os
import time

import psutil

VARIABLE = "GEMMTUNE_WORKER"  # holds one random word per host, which all its descendants inherit


def tagged(tag: str) -> list[psutil.Process]:
    """Return the living processes of this user that carry ``tag``, without this process."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it ended, or belongs to another user
            process_tag = process.environ().get(VARIABLE) if process.pid != os.getpid() else None
            if process_tag == tag and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def kill_tagged(tag: str, limit_s: float = 2.0) -> int:
    """Kill all processes that carry ``tag``, until there are none or ``limit_s`` seconds have passed. Return how many
    were killed."""
    killed: set[int] = set()
    deadline = time.monotonic() + limit_s
    while processes := tagged(tag):
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
                killed.add(process.pid)
        if time.monotonic() > deadline:
            break
        time.sleep(0.002)
    return len(killed)
