"""How a command ends when it is used wrongly."""

from __future__ import annotations

from typing import NoReturn

import typer

from ..core.printable import visible


def usage(message: str) -> NoReturn:
    """Wrong usage: one line on stderr, exit code 2."""
    raise typer.BadParameter(visible(message))
