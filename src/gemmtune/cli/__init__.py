"""The command line: ``gemmtune tune | bench | explain | report | store | doctor``. One file a command.

Exit codes: 0 done; 1 nothing valid, failed or interrupted; 2 wrong usage.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        _open_standard_streams()
        from .commands import app  # here, so that Ctrl-C while it loads is met too

        app(prog_name="gemmtune")
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(1)
    finally:
        # What is left is the interpreter's own tidying up, in which Ctrl-C would print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _flush()


def _open_standard_streams() -> None:
    """Point descriptors that the caller closed (``>&-``) at nothing, lest the store's file becomes standard output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")


def _flush() -> None:
    """Write out what stdout holds back. A reader who left (``| head``) is a failure, not a traceback."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # The interpreter would flush again at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            print(f"error: standard output: {error.strerror}", file=sys.stderr)
        sys.exit(1)
