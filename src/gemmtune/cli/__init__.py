"""The command line: ``gemmtune tune | bench | explain | report | store | doctor``. One file a command.

Exit codes: 0 done; 1 nothing valid, failed or interrupted; 2 wrong usage.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_TYPERS_INTERRUPT = 130


def main() -> None:
    """Run the command line and exit with its code."""
    code: str | int | None = 0
    failure = ""
    interrupts = _count_interrupts()
    try:
        _open_standard_streams()
        from .commands import app  # here, so that Ctrl-C while it loads is met too

        app(prog_name="gemmtune")
    except KeyboardInterrupt:
        failure = "interrupted"
    except OSError as error:
        failure = f"standard output: {error.strerror}"  # the commands answer for every other file
    except SystemExit as end:
        code = end.code
        failure = "interrupted" if code == _TYPERS_INTERRUPT else ""
    except Exception:  # libraries make other errors of Ctrl-C, numpy an ImportError
        if not interrupts:
            raise
        failure = "interrupted"
    # What is left is the interpreter's own tidying up, in which Ctrl-C would print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    failure = _flush() or failure
    if failure:
        print(f"error: {failure}", file=sys.stderr)
        code = 1
    sys.exit(code)


def _count_interrupts() -> list[int]:
    """Keep every Ctrl-C from now on in the list that is returned; each still raises KeyboardInterrupt."""
    seen: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not for a job that is to ignore it
        signal.signal(signal.SIGINT, interrupt)
    return seen


def _open_standard_streams() -> None:
    """Point descriptors that the caller closed (``>&-``) at nothing, lest the store's file becomes standard output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")


def _flush() -> str:
    """Write out what stdout holds back; what went wrong, in words (a reader who left, a full disk)."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter would flush again at its end, and complain
        return f"standard output: {error.strerror}"
    return ""
