"""Requests of a worker to the Linux kernel. Each does nothing and returns False on other systems."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
from pathlib import Path

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(parent: int) -> bool:
    """Have this process killed when the thread that forked it ends. ``parent``: the process that must be its parent
    now.

    This works however either process ends or hangs, where the end of a pipe is noticed only by a process that reads it.
    """
    succeeded = _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the request
        os._exit(0)
    return succeeded


def adopt_orphans() -> bool:
    """Become the parent of every descendant whose own parent ends, so that daemons cannot escape."""
    return _prctl(_SET_CHILD_SUBREAPER, 1)


def die_first() -> bool:
    """Make this process the first choice of the kernel's out-of-memory killer."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    except OSError:
        return False
    return True


def _prctl(option: int, value: int) -> bool:
    call = _libc_prctl()
    return call is not None and call(option, value, 0, 0, 0) == 0


@functools.cache
def _libc_prctl() -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    function: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), "prctl", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    return function
