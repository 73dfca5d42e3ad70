"""Whole files or none: written beside their place, flushed to the disk, renamed; what dead writers left is swept."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from pathlib import Path

from .owner import Owner, this_process

# .NAME.OWNER.TOKEN.tmp: the owner tells whether anybody is still writing it.
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<owner>[^.]+)\.[0-9a-f]{16}\.tmp", re.DOTALL)
_NAME_KEPT = 100  # a file's name may have 255 bytes, owner and token included
# Of a process that nobody here can look at (another machine, an earlier boot), that much age is proof.
STALE_S = 3600.0


def write_whole(path: Path, body: bytes, mode: int = 0o600) -> None:
    """Write a file so that a reader sees the former one or the whole new one, and so does whoever comes after a crash.

    mode: less the umask; by default the user alone may read it. Raises OSError, having left nothing behind.
    """
    temporary = path.with_name(f".{path.name[:_NAME_KEPT]}.{this_process().text}.{secrets.token_hex(8)}.tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # an interrupt too must not leave half a file behind
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)


def sync_directory(folder: Path) -> None:
    """Make what was created, renamed or removed in a directory survive a power cut. Raises OSError."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    except PermissionError:
        return  # one that may be written, but not read
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no such thing
            raise
    finally:
        os.close(handle)


def sweep(folder: Path, name: str | None = None) -> int:
    """Remove the temporary files that dead writers left, of ``name`` alone or all. Returns how many; raises OSError."""
    swept = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _TEMPORARY.fullmatch(entry.name) if entry.name.startswith(".") else None
            if match is None or (name is not None and match["name"] != name[:_NAME_KEPT]):
                continue
            with contextlib.suppress(OSError):  # another process sweeps too; another user's file may have to stay
                if _abandoned(match["owner"], entry.stat(follow_symlinks=False).st_mtime):
                    os.unlink(entry)
                    swept += 1
    return swept


def _abandoned(owner: str, modified: float) -> bool:
    writer = Owner.parse(owner)
    return (writer is not None and writer.dead) or time.time() - modified > STALE_S
