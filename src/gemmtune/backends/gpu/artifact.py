"""Built kernels on disk: cubins (AMD's are code objects), each with what launching it takes."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Annotated

import msgspec

from ...core.artifacts import Artifacts
from ...core.errors import KernelError
from ..artifacts import artifacts_directory

_LENGTH = 4
# The argument of kernels that wait for the one before them, and what it comes to: B may be read until then; the next
# kernel is to begin when a block is nearly done (skinny.cu).
FOLLOWING = "following"
B_EARLY, NEXT_LATE = 1, 2


class Tma(msgspec.Struct, forbid_unknown_fields=True):
    """One TMA descriptor as cuTensorMapEncodeTiled wants it."""

    swizzle: int
    element: int
    dtype: int
    block: tuple[int, ...]


class Header(msgspec.Struct, forbid_unknown_fields=True):
    """What launching one of an artifact's cubins takes. size: bytes of the cubin; arguments: the names of those that
    are passed, in order, before ``scratch`` pointers that are not used; descriptors: of TMA, by argument; waits:
    whether the kernel itself waits for the one before it, and so may begin before that ends; lanes: threads of a warp;
    arch: the AMD architecture that it is for, or empty."""

    name: str
    size: Annotated[int, msgspec.Meta(ge=0)]
    shared: int
    warps: int
    arguments: tuple[str, ...]
    scratch: int
    descriptors: dict[str, Tma] = {}
    waits: bool = False
    lanes: int = 32
    arch: str = ""


def packed(header: Header, cubin: bytes) -> bytes:
    """One kernel of an artifact: its Header (as JSON, with its length before it) and its cubin."""
    text = msgspec.json.encode(header)
    return len(text).to_bytes(_LENGTH, "little") + text + cubin


def unpack(artifact: bytes) -> list[tuple[Header, bytes]]:
    """An artifact's kernels, in the order of launching: Header and cubin. Raises KernelError when it is none."""
    found, at = [], 0
    while at < len(artifact):
        start = at + _LENGTH + int.from_bytes(artifact[at : at + _LENGTH], "little")
        try:
            header = msgspec.json.decode(artifact[at + _LENGTH : start], type=Header)
        except msgspec.MsgspecError as error:
            raise KernelError(f"an artifact of GPU kernels is malformed: {error}") from error
        at = start + header.size
        found.append((header, artifact[start:at]))
    if not found or at != len(artifact):
        raise KernelError(f"an artifact of GPU kernels is malformed: {len(artifact)} bytes where {at} belong")
    return found


@functools.cache
def digest_of(folder: Path) -> str:
    """A short hash of a backend's sources and of what is shared here."""
    there = (path for place in (folder, Path(__file__).parent) for path in place.iterdir())
    names = sorted(path for path in there if path.suffix in (".py", ".cu"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in names)).hexdigest()[:16]


def artifacts() -> Artifacts:
    """The artifacts of the store in use."""
    return _artifacts_of(artifacts_directory())


@functools.cache
def _artifacts_of(directory: Path) -> Artifacts:
    return Artifacts(directory)
