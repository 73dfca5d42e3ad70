"""NVIDIA's libraries by ctypes: where they are when they came as wheels, and which build a loaded one is."""

from __future__ import annotations

import ctypes
import importlib.util
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...core.errors import UnsupportedError

_NOTES, _BUILD_ID = 4, 3  # PT_NOTE, NT_GNU_BUILD_ID
_MOST_NOTES = 1 << 16  # bytes


def in_wheels(name: str) -> Iterator[str]:
    """The paths of a shared library in the installed ``nvidia-*`` wheels, which share a namespace."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from map(str, sorted(Path(folder).glob(f"*/lib/{name}")))


def first_of(places: Iterable[str], missing: str, kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """The first shared library that can be loaded. Raises UnsupportedError, in the words ``missing``, when none can."""
    for place in places:
        try:
            return kind(place)
        except OSError:
            continue
    raise UnsupportedError(missing)


class _Symbol(ctypes.Structure):
    """Dl_info (dlfcn.h)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def file_of(function: object) -> Path | None:
    """Return the file that a function of a loaded library is from; None where that cannot be found."""
    found = _Symbol()
    address_of = ctypes.CDLL(None).dladdr
    address_of.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Symbol)]
    if not address_of(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(found)) or not found.file:  # type: ignore[arg-type]
        return None
    return Path(found.file.decode())


def build_of(path: Path | None) -> str:
    """Return the name of a library's file and what tells it from other builds: ``libnvrtc.so.13 (feebac3b...)``.

    That is the build id that its linker wrote (ELF note NT_GNU_BUILD_ID); without one, the file's size and the time of
    its last change. ``unknown`` where there is no such file.
    """
    try:
        if path is None:
            return "unknown"
        status = path.stat()
        return f"{path.name} ({_build_id(path) or f'{status.st_size}-{status.st_mtime_ns}'})"
    except OSError:
        return "unknown"


def _build_id(path: Path) -> str:
    """Return the build id of a 64-bit ELF file, or empty (ELF-64 object file format, program headers and notes)."""
    with path.open("rb") as file:
        head = file.read(64)
        if head[:6] != b"\x7fELF\x02\x01":
            return ""
        table, (entry_size, count) = struct.unpack_from("<Q", head, 32)[0], struct.unpack_from("<HH", head, 54)
        file.seek(table)
        entries = file.read(entry_size * count)
        for at in range(0, len(entries), entry_size):
            (kind,), (offset,), (size,) = (
                struct.unpack_from(form, entries, at + place) for form, place in (("<I", 0), ("<Q", 8), ("<Q", 32))
            )
            if kind == _NOTES and size <= _MOST_NOTES:
                file.seek(offset)
                if found := _gnu_build_id(file.read(size)):
                    return found
    return ""


def _gnu_build_id(notes: bytes) -> str:
    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, at)
        name_at, value_at = at + 12, at + 12 + -(-name_size // 4) * 4
        if kind == _BUILD_ID and notes[name_at : name_at + name_size] == b"GNU\0":
            return notes[value_at : value_at + size].hex()
        at = value_at + -(-size // 4) * 4
    return ""
