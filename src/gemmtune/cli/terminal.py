"""Where the commands' text leaves for the terminal. All that they print for people goes through here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..core.printable import visible

if TYPE_CHECKING:
    from rich.text import Text


class PlainConsole(Console):
    """A rich console on stdout for which strings are text: no markup, no emoji codes, nothing that acts.

    140 columns when stdout is not a terminal, so that tables in logs stay whole. Styles are arguments, or Text of ours.
    """

    def __init__(self) -> None:
        width = None if sys.stdout.isatty() else 140
        super().__init__(highlight=False, markup=False, emoji=False, width=width)

    def render_str(self, text: str, **options: Any) -> Text:
        """What rich makes Text of every string with, whether printed by itself or in a table."""
        return super().render_str(visible(text), **options)
