"""Built kernels on disk: cubins (code objects for AMD), each with a Header that describes its launch."""

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
# The argument of kernels that use programmatic dependent launch (PDL), and its flags: B_EARLY allows the kernel to read
# B before the preceding kernel has ended; NEXT_LATE lets the next kernel begin only when a block is nearly done
# (skinny.cu).
PDL_ARGUMENT = "following"
B_EARLY, NEXT_LATE = 1, 2


class Tma(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The parameters of one TMA descriptor (tensor map), as cuTensorMapEncodeTiled takes them."""

    swizzle: int
    element: int
    dtype: int
    block: tuple[int, ...]


class Header(msgspec.Struct, forbid_unknown_fields=True):
    """The description of how to launch one of an artifact's cubins.

    size: bytes of the cubin. arguments: the names of the arguments that are passed, in order; ``scratch`` unused
    pointers follow them. descriptors: the TMA descriptors by argument. waits: whether the kernel itself waits for the
    preceding kernel, so that it may begin before that one ends. lanes: threads of a warp. arch: the AMD architecture
    that the kernel is for, or empty. split: the blocks that share K, where an artifact's kernels differ in it.
    """

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
    split: int = 1


def encode_kernel(header: Header, cubin: bytes) -> bytes:
    """Return one kernel of an artifact as bytes: the length of its Header's JSON, the JSON, then its cubin."""
    text = msgspec.json.encode(header)
    return len(text).to_bytes(_LENGTH, "little") + text + cubin


def decode_kernels(artifact: bytes) -> list[tuple[Header, bytes]]:
    """Return an artifact's kernels in launch order, as pairs of Header and cubin. Raises KernelError for malformed
    bytes."""
    kernels, offset = [], 0
    while offset < len(artifact):
        cubin_start = offset + _LENGTH + int.from_bytes(artifact[offset : offset + _LENGTH], "little")
        try:
            header = msgspec.json.decode(artifact[offset + _LENGTH : cubin_start], type=Header)
        except msgspec.MsgspecError as error:
            raise KernelError(f"an artifact of GPU kernels is malformed: {error}") from error
        offset = cubin_start + header.size
        kernels.append((header, artifact[cubin_start:offset]))
    if not kernels or offset != len(artifact):
        raise KernelError(f"an artifact of GPU kernels is malformed: {len(artifact)} bytes where {offset} belong")
    return kernels


@functools.cache
def digest_of(folder: Path) -> str:
    """Return a short hash of the sources in a backend's folder and in this package, which the GPU backends share."""
    paths = (path for directory in (folder, Path(__file__).parent) for path in directory.iterdir())
    sources = sorted(path for path in paths if path.suffix in (".py", ".cu"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def artifacts() -> Artifacts:
    """Return the artifacts of the store in use."""
    return _artifacts_of(artifacts_directory())


@functools.cache
def _artifacts_of(directory: Path) -> Artifacts:
    return Artifacts(directory)
