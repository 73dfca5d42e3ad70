"""Frames: what is sent in pieces arrives whole, and nonsense is refused."""

from __future__ import annotations

import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmtune.core.decision import Verdict
from gemmtune.workers.protocol import (
    Attempt,
    Attempted,
    FrameReader,
    Open,
    Race,
    Ready,
    Setup,
    decode_reply,
    decode_request,
    write_frame,
)

REQUESTS = [
    Setup({"device": "cpu"}, {"x": "m:C"}), Open({"m": 1}, 3, 9), Attempt({"backend": "x"}, 0.5), Race([], 1.0, 2),
]  # fmt: skip


@given(st.lists(st.integers(1, 50), max_size=40))
def test_frames_in_pieces(cuts: list[int]) -> None:
    read, write = os.pipe()
    for request in REQUESTS:
        write_frame(write, request)
    os.close(write)
    data = b""
    while piece := os.read(read, 1 << 16):
        data += piece
    os.close(read)
    frames, got = FrameReader(), []
    for cut in [*cuts, len(data)]:
        frames.feed(data[:cut])
        data = data[cut:]
        while (body := frames.next()) is not None:
            got.append(decode_request(body))
    assert got == REQUESTS


def test_replies_round_trip() -> None:
    for reply in (Ready(5), Attempted(None, times_s=(1.0,)), Attempted(Verdict("hung", "2 s"), "p", 0.1, 7)):
        assert decode_reply(msgspec.json.encode(reply)) == reply


def test_an_absurd_length_is_refused() -> None:
    frames = FrameReader()
    frames.feed(b"\xff\xff\xff\xff")
    with pytest.raises(ValueError, match="a frame of"):
        frames.next()


@pytest.mark.parametrize("body", [b"", b"{}", b'{"type":"Exec"}', b'{"type":"Ready","bytes":"5"}', b"[1]"])
def test_nonsense_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_reply(body)
