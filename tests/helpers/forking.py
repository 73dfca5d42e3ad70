"""Fork of this process while another thread has a lock."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager


def passes_in_forked_child(lock: AbstractContextManager[object], check: Callable[[], object]) -> bool:
    """Return whether ``check()`` is true within 20 s in a child that is forked while another thread has the lock.

    A lock that is not reset after the fork would stay locked in the child forever.
    """
    acquired, finished = threading.Event(), threading.Event()

    def hold_lock() -> None:
        with lock:
            acquired.set()
            finished.wait(60)

    thread = threading.Thread(target=hold_lock)
    thread.start()
    acquired.wait()
    try:
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends a child that waits forever
            os._exit(0 if check() else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        finished.set()
        thread.join()
