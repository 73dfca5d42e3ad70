"""Forks at a bad moment."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager


def child_of_fork_while_held(lock: AbstractContextManager[object], works: Callable[[], object]) -> bool:
    """Whether ``works()`` comes out true, within 20 s, in a child forked while another thread holds the lock, which
    would stay locked in the child for ever."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # a child that waits for ever is ended
            os._exit(0 if works() else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        done.set()
        holder.join()
