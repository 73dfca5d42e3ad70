"""Text in the report: what others wrote is shown, and neither marks up nor acts."""

from __future__ import annotations

import html

from ..core.printable import visible


def escape(text: str) -> str:
    """``text`` for HTML, in elements and attributes alike; characters that do not print can be seen."""
    return html.escape(visible(text))
