"""The rich console that the commands print tables and styled text with."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..core.printable import visible

if TYPE_CHECKING:
    from rich.text import Text


class PlainConsole(Console):
    """A rich console on stdout that prints strings literally: no markup, no emoji codes, no control characters.

    It has 140 columns if stdout is not a terminal, so that tables in logs are not cut. Styles are set by arguments or
    with rich's Text.
    """

    def __init__(self) -> None:
        width = None if sys.stdout.isatty() else 140
        super().__init__(highlight=False, markup=False, emoji=False, width=width)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as rich's Text, with characters that do not print escaped.

        Rich calls this method for every string that it prints, alone or in a table.
        """
        return super().render_str(visible(text), **options)
