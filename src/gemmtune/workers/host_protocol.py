"""The protocol between the parent and a host: fixed-size messages over a socket, with file descriptors attached."""

from __future__ import annotations

import struct

# parent to host: FORK (with FDS descriptors: requests, replies, marker, log), KILL pid, EXPIRE (in place of a pid,
# the seconds after which the host ends unless a FORK comes before).
# host to parent: STARTED pid (0: it could not fork), in the order of the FORKs; ENDED pid, exit status.
FORK, KILL, EXPIRE, STARTED, ENDED = b"f", b"k", b"x", b"s", b"e"
FDS = 4
PRELOAD = "GEMMTUNE_PRELOAD"  # environment variable of the host: modules to import first, separated by commas

_FORMAT = struct.Struct("<cii")
SIZE = _FORMAT.size


def pack(kind: bytes, pid: int = 0, status: int = 0) -> bytes:
    """Return one encoded message. status: an exit status as ``os.waitstatus_to_exitcode`` returns it."""
    return _FORMAT.pack(kind, pid, status)


def unpack(data: bytes) -> tuple[bytes, int, int]:
    """Return (kind, pid, status). Raises struct.error unless ``data`` is exactly one message."""
    kind, pid, status = _FORMAT.unpack(data)
    return kind, pid, status
