"""The protocol between the tuner and a worker: messages are data, framed as a length and JSON. No pickle."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec

from ..core.decision import Verdict
from ..core.problem import Dim
from ..timing.clock import Latency
from ..timing.outcome import LeaderUpdate, RaceResult
from ..timing.size_sweep import SizesTimed

BEAT_S = 1.0  # seconds between two heartbeats of a worker
_LENGTH = 4
MAX_FRAME = 64 << 20


class Setup(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The first request: the Target, registered backends as name -> ``module:Class`` in ``guests``, and modules from
    outside to import.

    warm: initialise the target's device (builders leave it alone). latency: how a GPU's calls are timed. artifacts: the
    directory for built files (None: that of the default store).
    """

    target: dict[str, Any]
    guests: dict[str, str] = {}
    modules: list[str] = []
    warm: bool = False
    latency: Latency = "graph"
    artifacts: str | None = None


class Open(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Request to open a problem: to prepare its operands and its oracle, unless it ``resumes`` a session that is still
    in memory. memory: bytes that the worker may allocate for it; 0 = unlimited. keep: keys of the problems whose
    sessions stay in memory."""

    problem: dict[str, Any]
    seed: int = 0
    memory: int = 0
    keep: list[str] = []
    resumes: bool = False


class Attempt(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Request to build, load and pack a candidate, measure its screening time and check it quickly.

    cutoff_s: slower candidates are not checked; None: all are.
    """

    candidate: dict[str, Any]
    cutoff_s: float | None = None


class Confirm(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Request to check a candidate fully, which makes it eligible."""

    candidate: dict[str, Any]


class Race(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Request to race confirmed candidates for ``budget_s`` seconds.

    hot: each call has its operands in the cache. earlier_s: seconds per call measured before, by candidate id.
    """

    candidates: list[dict[str, Any]]
    budget_s: float
    seed: int = 0
    hot: bool = False
    earlier_s: dict[str, float] = {}


class SizedCandidate(msgspec.Struct, forbid_unknown_fields=True):
    """A candidate that serves several M, and the M of the Problem that it is loaded for. In a request over the batch,
    these are batches."""

    candidate: dict[str, Any]
    tuned_m: int


class TimeSizes(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Request to time candidates at several M of the open problem, or at several batches.

    dim: "batch" where what is called M here is the batch. sizes: by M, the positions in ``candidates`` of those to
    time. last: the largest M of all such requests. budget_s: seconds for all of them. hot: each call has its operands
    in the cache. load_s: seconds for which the candidates keep the device busy before they are timed at an M.
    """

    candidates: list[SizedCandidate]
    sizes: dict[int, list[int]]
    last: int
    budget_s: float
    seed: int = 0
    hot: bool = False
    load_s: float = 0.0
    dim: Dim = "m"


class VerifySizes(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Request to verify a candidate at several M of the open problem, or several batches, in the given order."""

    item: SizedCandidate
    sizes: list[int]
    dim: Dim = "m"


class NameAlgorithms(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Request for the names of the algorithms that a library chooses for a candidate at several M."""

    item: SizedCandidate
    sizes: list[int]


class Build(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Request to build one candidate and nothing else: no operands are prepared. memory: as in Open. niceness: added to
    the process's."""

    problem: dict[str, Any]
    candidate: dict[str, Any]
    memory: int = 0
    niceness: int = 0


class Ready(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Reply to Setup and Open. bytes: the size of the problem's operands."""

    bytes: int = 0


class Attempted(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Reply to Attempt. verdict: None when the candidate was too slow to be checked. times_s: cold screening times in
    seconds per call."""

    verdict: Verdict | None
    packing: str | None = None
    packing_s: float = 0.0
    workspace_bytes: int = 0
    times_s: tuple[float, ...] = ()


class Confirmed(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Reply to Confirm: the verdict of the full check."""

    verdict: Verdict


class SizesVerified(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Reply to VerifySizes. verdict: that of all M together, or of the first at which the kernel failed, ``failed_m``
    (0: none)."""

    verdict: Verdict
    failed_m: int = 0


class AlgorithmsNamed(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Reply to NameAlgorithms: a name for each M, empty where no library chooses or the choice is not known."""

    names: list[str]


class Built(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Reply to Build. verdict: why there is no artifact; None when there is one. path: None when nothing is on disk."""

    verdict: Verdict | None = None
    digest: str = ""
    path: str | None = None


class Alive(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The heartbeat, sent at any time."""


class Failed(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Reply that the request could not be carried out, by no fault of a candidate."""

    detail: str


Request = Setup | Open | Attempt | Confirm | Race | TimeSizes | VerifySizes | NameAlgorithms | Build
Reply = (
    Ready | Attempted | Confirmed | RaceResult | SizesTimed | SizesVerified | AlgorithmsNamed | Built | LeaderUpdate
    | Alive | Failed
)  # fmt: skip

# Decode the body of a frame. They raise msgspec.MsgspecError when it is malformed.
decode_request: Callable[[bytes], Request] = msgspec.json.Decoder(Request).decode
decode_reply: Callable[[bytes], Reply] = msgspec.json.Decoder(Reply).decode


def write_frame(fd: int, message: Request | Reply) -> None:
    """Send one message; blocks until all of it is written. Raises OSError when the other side is gone."""
    frame = memoryview(encode_frame(message))
    while frame:
        frame = frame[os.write(fd, frame) :]


def encode_frame(message: Request | Reply) -> bytes:
    """Return one message as a frame."""
    body = msgspec.json.encode(message)
    return len(body).to_bytes(_LENGTH, "little") + body


class FrameReader:
    """A buffer that collects received bytes and returns complete frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data

    def next(self) -> bytes | None:
        """Return the next complete frame's body, or None. Raises ValueError for a frame larger than any worker
        sends."""
        if len(self._data) < _LENGTH:
            return None
        length = int.from_bytes(self._data[:_LENGTH], "little")
        if length > MAX_FRAME:
            raise ValueError(f"a frame of {length} bytes")
        if len(self._data) < _LENGTH + length:
            return None
        body = bytes(self._data[_LENGTH : _LENGTH + length])
        del self._data[: _LENGTH + length]
        return body
