"""NVIDIA's libraries through ctypes: their paths when they were installed as wheels, and the build of a loaded
library."""

from __future__ import annotations

import ctypes
import importlib.util
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...core.errors import UnsupportedError

_NOTES, _BUILD_ID = 4, 3  # PT_NOTE, NT_GNU_BUILD_ID
_MOST_NOTES = 1 << 16  # bytes; larger note segments are skipped


def wheel_libraries(name: str) -> Iterator[str]:
    """Yield the paths of a shared library in the installed ``nvidia-*`` wheels, which share a namespace package."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from map(str, sorted(Path(folder).glob(f"*/lib/{name}")))


def load_first(names: Iterable[str], missing: str, loader: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """Return the first shared library that can be loaded. Raises UnsupportedError with the text ``missing`` when none
    can."""
    for name in names:
        try:
            return loader(name)
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
    """Return the file of the library that a function belongs to; None where it cannot be determined."""
    symbol = _Symbol()
    address_of = ctypes.CDLL(None).dladdr
    address_of.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Symbol)]
    if not address_of(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(symbol)) or not symbol.file:  # type: ignore[arg-type]
        return None
    return Path(symbol.file.decode())


def build_of(path: Path | None) -> str:
    """Return the name of a library's file and an id that distinguishes its build: ``libnvrtc.so.13 (feebac3b...)``.

    The id is the build id that the linker wrote (ELF note NT_GNU_BUILD_ID); without one, the file's size and
    modification time. The result is ``unknown`` where there is no such file.
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
        for entry in range(0, len(entries), entry_size):
            (kind,), (offset,), (size,) = (
                struct.unpack_from(format_, entries, entry + field)
                for format_, field in (("<I", 0), ("<Q", 8), ("<Q", 32))
            )
            if kind == _NOTES and size <= _MOST_NOTES:
                file.seek(offset)
                if build_id := _gnu_build_id(file.read(size)):
                    return build_id
    return ""


def _gnu_build_id(notes: bytes) -> str:
    offset = 0
    while offset + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, offset)
        name_offset, value_offset = offset + 12, offset + 12 + -(-name_size // 4) * 4
        if kind == _BUILD_ID and notes[name_offset : name_offset + name_size] == b"GNU\0":
            return notes[value_offset : value_offset + size].hex()
        offset = value_offset + -(-size // 4) * 4
    return ""
