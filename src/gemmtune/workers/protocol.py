"""What the tuner and a worker say to each other: messages as data, framed as a length and JSON. No pickle."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from ..core.decision import Verdict
from ..timing.clock import Latency
from ..timing.outcome import Leading, Raced

BEAT_S = 1.0  # a worker says that it lives about this often
_LENGTH = 4
MAX_FRAME = 64 << 20


class Setup(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """First request: the target to work for, and backends from outside as name -> ``module:Class``.

    warm: make the target's device ready (builders leave it alone). latency: how a GPU's calls are timed. artifacts: the
    directory for what is built (None: that of the default store).
    """

    target: dict[str, Any]
    guests: dict[str, str] = {}
    warm: bool = False
    latency: Latency = "graph"
    artifacts: str | None = None


class Open(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Take up a problem: make its operands and its oracle. memory: bytes the job may allocate there; 0 = unlimited."""

    problem: dict[str, Any]
    seed: int = 0
    memory: int = 0


class Attempt(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Build, load, pack, time roughly and check quickly. worth_s: slower ones are not worth checking; None: all are."""

    candidate: dict[str, Any]
    worth_s: float | None = None


class Confirm(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Check fully: what makes a candidate eligible."""

    candidate: dict[str, Any]


class Race(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Race confirmed candidates for ``budget_s`` seconds. hot: each call finds its operands in the cache. earlier_s:
    seconds per call measured before, by candidate id."""

    candidates: list[dict[str, Any]]
    budget_s: float
    seed: int = 0
    hot: bool = False
    earlier_s: dict[str, float] = {}


class Build(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Build one candidate and nothing else: no operands are made. memory: as in Open."""

    problem: dict[str, Any]
    candidate: dict[str, Any]
    memory: int = 0


class Ready(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Reply to Setup, Open. bytes: what the operands of the problem take."""

    bytes: int = 0


class Attempted(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Reply to Attempt. verdict: None when it was too slow to be checked. times_s: rough cold times, seconds a call."""

    verdict: Verdict | None
    packing: str | None = None
    packing_s: float = 0.0
    workspace_bytes: int = 0
    times_s: tuple[float, ...] = ()


class Confirmed(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Reply to Confirm."""

    verdict: Verdict


class Built(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Reply to Build. verdict: why there is no artifact; None when there is. path: None when nothing is on disk."""

    verdict: Verdict | None = None
    digest: str = ""
    path: str | None = None


class Alive(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The heartbeat, at any time."""


class Failed(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The request could not be carried out, by no fault of a candidate."""

    detail: str
    memory: bool = False


Request = Setup | Open | Attempt | Confirm | Race | Build
Reply = Ready | Attempted | Confirmed | Raced | Built | Leading | Alive | Failed

_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_replies: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def write_frame(fd: int, message: Request | Reply) -> None:
    """Send one message; blocks until all of it is written. Raises OSError when the other side is gone."""
    frame = memoryview(encode_frame(message))
    while frame:
        frame = frame[os.write(fd, frame) :]


def encode_frame(message: Request | Reply) -> bytes:
    """One message as it travels."""
    body = msgspec.json.encode(message)
    return len(body).to_bytes(_LENGTH, "little") + body


class FrameReader:
    """Collects bytes as they come and gives whole frames back."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data

    def next(self) -> bytes | None:
        """The next whole frame's body, or None. Raises ValueError for a frame no worker would send."""
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


def decode_request(body: bytes) -> Request:
    """Raises msgspec.MsgspecError when malformed."""
    return _requests.decode(body)


def decode_reply(body: bytes) -> Reply:
    """Raises msgspec.MsgspecError when malformed."""
    return _replies.decode(body)
