"""The command line: ``gemmtune tune | bench | explain | report | store | doctor``. Each command has its own module.

Exit codes: 0 success; 1 no valid candidate, failure or interruption; 2 wrong usage.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_TYPER_INTERRUPT_CODE = 130


def main() -> None:
    """Run the command line and exit with its code."""
    code: str | int | None = 0
    failure = ""
    interrupts = _record_interrupts()
    try:
        _open_standard_streams()
        from .commands import app  # in here, so that Ctrl-C during the import is handled too

        app(prog_name="gemmtune")
    except KeyboardInterrupt:
        failure = "interrupted"
    except OSError as error:
        failure = f"standard output: {error.strerror}"  # the commands handle errors of all other files
    except SystemExit as exit_:
        code = exit_.code
        failure = "interrupted" if code == _TYPER_INTERRUPT_CODE else ""
    except Exception:  # libraries turn KeyboardInterrupt into other errors, numpy into an ImportError
        if not interrupts:
            raise
        failure = "interrupted"
    # From here on only the interpreter's shutdown runs, in which Ctrl-C would print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    failure = _flush_stdout() or failure
    if failure:
        print(f"error: {failure}", file=sys.stderr)
        code = 1
    sys.exit(code)


def _record_interrupts() -> list[int]:
    """Install a SIGINT handler and return the list that it appends each signal to.

    The handler still raises KeyboardInterrupt. It is not installed if the process ignores SIGINT.
    """
    interrupts: list[int] = []

    def record_interrupt(signal_number: int, frame: FrameType | None) -> None:
        interrupts.append(signal_number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job ignores SIGINT
        signal.signal(signal.SIGINT, record_interrupt)
    return interrupts


def _open_standard_streams() -> None:
    """Open the null device for each of descriptors 0 to 2 that the caller closed (``>&-``).

    Otherwise the store's file could get descriptor 1 and become standard output.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")


def _flush_stdout() -> str:
    """Flush stdout. Return a description of the error (a closed pipe, a full disk), or an empty string."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise the interpreter's own flush at exit fails noisily
        return f"standard output: {error.strerror}"
    return ""
