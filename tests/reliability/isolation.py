"""Calls in a separate process, so that a check reports a crash or a hang instead of ending with it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


def call_in_process(function: Callable[..., None], *args: Any, limit_s: float) -> Any:
    """Return the object that ``function(*args, connection)`` sends; None if its process ends or ``limit_s`` passes."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(*args, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(limit_s) else None
    except EOFError:
        return None
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
        receiver.close()
