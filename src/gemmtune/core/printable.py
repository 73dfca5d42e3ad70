"""Text that others wrote, fit for a terminal or a log: nothing in it acts, everything in it can be seen."""

from __future__ import annotations


def visible(text: str) -> str:
    """``text`` in one line; characters that do not print as Python writes them: ``\\x1b``, ``\\n``, ``\\u202e``.

    Names, ids and reasons in a store or an export may come from anybody. An escape sequence among them would act on the
    reader's terminal, a newline forge a line of ours, an override of the direction hide what is there.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
