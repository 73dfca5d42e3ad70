"""The error for wrong usage of the command line."""

from __future__ import annotations

from typing import NoReturn

import typer

from ..core.printable import visible


def fail_usage(message: str) -> NoReturn:
    """Raise typer's error for wrong usage, which prints ``message`` on stderr and exits with code 2."""
    raise typer.BadParameter(visible(message))
