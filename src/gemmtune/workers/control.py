"""What the parent and a host say to each other: fixed messages over a socket, file descriptors beside them."""

from __future__ import annotations

import struct

# parent to host: FORK (with FDS descriptors: requests, replies, marker, log), KILL pid.
# host to parent: STARTED pid (0: it could not fork), in the order of the FORKs; ENDED pid, exit status.
FORK, KILL, STARTED, ENDED = b"f", b"k", b"s", b"e"
FDS = 4
PRELOAD = "GEMMTUNE_PRELOAD"  # the host's environment: modules to import first, with commas between

_FORMAT = struct.Struct("<cii")
SIZE = _FORMAT.size


def pack(kind: bytes, pid: int = 0, status: int = 0) -> bytes:
    """One message. status: as ``os.waitstatus_to_exitcode`` gives it."""
    return _FORMAT.pack(kind, pid, status)


def unpack(data: bytes) -> tuple[bytes, int, int]:
    """(kind, pid, status). Raises struct.error for anything that is not one message."""
    kind, pid, status = _FORMAT.unpack(data)
    return kind, pid, status
