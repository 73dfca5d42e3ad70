"""Escaping of untrusted text for terminals and logs."""

from __future__ import annotations


def visible(text: str) -> str:
    """Return ``text`` in one line, with unprintable characters as Python escapes: ``\\x1b``, ``\\n``, ``\\u202e``.

    Names, ids and reasons in a store or an export are untrusted. An escape sequence would control the reader's
    terminal, a newline would forge a line of gemmtune's output, and a bidirectional override would hide text.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
