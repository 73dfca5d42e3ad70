"""Escaping of text in the report, which may come from other people's models, stores and exports."""

from __future__ import annotations

import html

from ..core.printable import visible


def escape(text: str) -> str:
    """Return ``text`` escaped for HTML elements and attributes. Characters that do not print are written as escapes."""
    return html.escape(visible(text))
