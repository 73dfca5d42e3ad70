"""Descriptions of files that are no stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmtune.store.foreign import describe_file


@pytest.mark.parametrize(
    ("content", "description"),
    [
        (b"SQLite format 3\0 and more", "a damaged SQLite database"),
        (b"\x1f\x8b\x08\x00", "a gzip file"),
        (b"PK\x03\x04", "a zip file (PyTorch's .pt files are some)"),
        (b"", "a text file"),
        (b"\x7fELF\x02", "a program or library"),
        (b'{"format": "gemmtune-decisions"}', "an export of decisions, which `gemmtune store import` reads"),
        (b"a line\n\tand another\r\n", "a text file"),
        ("ä".encode() * 2049, "a text file"),
        (b"\xff\xfe\x00", "a binary file that is no database"),
        (b"text\x00", "a binary file"),
    ],
)
def test_first_bytes_tell_the_kind_of_file(tmp_path: Path, content: bytes, description: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert describe_file(path) == description


def test_file_that_cannot_be_opened_is_described_by_the_error(tmp_path: Path) -> None:
    assert describe_file(tmp_path / "absent") == "a file that cannot be read (No such file or directory)"
