"""Atomic writes of files (to a temporary file that is synced and renamed), and removal of abandoned temporary files."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from pathlib import Path

from .owner import Owner, this_process

# .NAME.OWNER.TOKEN.tmp: the owner tells whether a process is still writing the file.
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<owner>[^.]+)\.[0-9a-f]{16}\.tmp", re.DOTALL)
_MAX_NAME = 100  # characters of NAME: a file name may have 255 bytes, including owner and token
# A temporary file of a process that cannot be examined (of another machine or an earlier boot) is abandoned after that.
STALE_S = 3600.0


def write_whole(path: Path, body: bytes, mode: int = 0o600) -> None:
    """Write a file atomically: at any time, also after a crash, readers see the former or the complete new file.

    mode: permissions before the umask; by default only the user may read the file. Raises OSError, and removes the
    temporary file.
    """
    temporary = path.with_name(f".{path.name[:_MAX_NAME]}.{this_process().text}.{secrets.token_hex(8)}.tmp")
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
    """Make creations, renamings and removals in a directory durable (survive a power cut). Raises OSError."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    except PermissionError:
        return  # the directory is writable, but not readable
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does not support it
            raise
    finally:
        os.close(handle)


def sweep(folder: Path, name: str | None = None) -> int:
    """Remove the temporary files of dead processes. Returns their number. Raises OSError.

    name: only the temporary files of this file; None: of all files in the folder.
    """
    swept = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _TEMPORARY.fullmatch(entry.name) if entry.name.startswith(".") else None
            if match is None or (name is not None and match["name"] != name[:_MAX_NAME]):
                continue
            with contextlib.suppress(
                OSError
            ):  # another process may remove it first; another user's may not be removable
                if _abandoned(match["owner"], entry.stat(follow_symlinks=False).st_mtime):
                    os.unlink(entry)
                    swept += 1
    return swept


def _abandoned(owner: str, modified: float) -> bool:
    writer = Owner.parse(owner)
    return (writer is not None and writer.dead) or time.time() - modified > STALE_S
