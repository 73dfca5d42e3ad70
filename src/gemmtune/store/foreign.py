"""What a file is that is no store, in words: so that who named the wrong one sees which it was."""

from __future__ import annotations

import codecs
import os
from pathlib import Path

_BEGINNINGS = {
    b"SQLite format 3\0": "a damaged SQLite database",
    b"\x1f\x8b": "a gzip file",
    b"PK\x03\x04": "a zip file (PyTorch's .pt files are some)",
    b"\x7fELF": "a program or library",
    b"\x89PNG": "a PNG image",
    b"%PDF": "a PDF document",
}


def kind_of(path: Path) -> str:
    """The file's kind by its first bytes. Nothing is raised: what cannot be read is said to be so."""
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError as error:
        return f"a file that cannot be read ({os.strerror(error.errno or 0)})"
    for beginning, words in _BEGINNINGS.items():
        if head.startswith(beginning):
            return words
    if b"gemmtune-decisions" in head:
        return "an export of decisions, which `gemmtune store import` reads"
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # whose last character may be cut in two
    except UnicodeDecodeError:
        return "a binary file that is no database"
    return (
        "a text file" if text.replace("\n", "").replace("\r", "").replace("\t", "").isprintable() else "a binary file"
    )
