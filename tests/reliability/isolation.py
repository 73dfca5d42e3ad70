"""Running part of a check in a process of its own, so that a crash or a hang is a finding."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


def apart(function: Callable[..., None], *args: Any, limit_s: float) -> Any:
    """What ``function(*args, replies)`` sends; None when it died or took longer than ``limit_s``."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(*args, there))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(limit_s) else None
    except EOFError:
        return None
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
        here.close()
