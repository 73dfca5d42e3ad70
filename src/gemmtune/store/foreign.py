"""Descriptions of files that are not stores, for the error message when a user names the wrong file."""

from __future__ import annotations

import codecs
import os
from pathlib import Path

_SIGNATURES = {
    b"SQLite format 3\0": "a damaged SQLite database",
    b"\x1f\x8b": "a gzip file",
    b"PK\x03\x04": "a zip file (PyTorch's .pt files are some)",
    b"\x7fELF": "a program or library",
    b"\x89PNG": "a PNG image",
    b"%PDF": "a PDF document",
}


def describe_file(path: Path) -> str:
    """Return a description of a file, from its first bytes. Never raises: an unreadable file has a description, too."""
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError as error:
        return f"a file that cannot be read ({os.strerror(error.errno or 0)})"
    for signature, description in _SIGNATURES.items():
        if head.startswith(signature):
            return description
    if b"gemmtune-decisions" in head:
        return "an export of decisions, which `gemmtune store import` reads"
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # incremental: the last character may be incomplete
    except UnicodeDecodeError:
        return "a binary file that is no database"
    return (
        "a text file" if text.replace("\n", "").replace("\r", "").replace("\t", "").isprintable() else "a binary file"
    )
