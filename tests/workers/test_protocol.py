"""Frames: messages sent in pieces are reassembled, and malformed ones raise errors."""

from __future__ import annotations

import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmtune.core.decision import Verdict
from gemmtune.timing.size_sweep import SizesTimed
from gemmtune.workers.protocol import (
    AlgorithmsNamed,
    Attempt,
    Attempted,
    FrameReader,
    NameAlgorithms,
    Open,
    Race,
    Ready,
    Setup,
    SizedCandidate,
    SizesVerified,
    TimeSizes,
    VerifySizes,
    decode_reply,
    decode_request,
    write_frame,
)

SIZED = SizedCandidate({"backend": "x"}, 8)
REQUESTS = [
    Setup({"device": "cpu"}, {"x": "m:C"}), Open({"m": 1}, 3, 9), Attempt({"backend": "x"}, 0.5), Race([], 1.0, 2),
    TimeSizes([SIZED], {1: [0], 64: []}, 512, 0.5, 3, True), VerifySizes(SIZED, [3, 1, 512]),
    NameAlgorithms(SIZED, [64, 65]),
]  # fmt: skip


@given(st.lists(st.integers(1, 50), max_size=40))
def test_frames_sent_in_pieces_are_reassembled(cuts: list[int]) -> None:
    read, write = os.pipe()
    for request in REQUESTS:
        write_frame(write, request)
    os.close(write)
    data = b""
    while piece := os.read(read, 1 << 16):
        data += piece
    os.close(read)
    frames, requests = FrameReader(), []
    for cut in [*cuts, len(data)]:
        frames.feed(data[:cut])
        data = data[cut:]
        while (body := frames.next()) is not None:
            requests.append(decode_request(body))
    assert requests == REQUESTS


def test_replies_round_trip() -> None:
    wrong = Verdict("wrong", "M = 3", 2.0)
    for reply in (
        Ready(5), Attempted(None, times_s=(1.0,)), Attempted(Verdict("hung", "2 s"), "p", 0.1, 7),
        SizesTimed({1: {"a": 1e-6}, 64: {}}, {1: 0.01, 64: 0.0}, {"b": wrong}, {"c": "no memory"}),
        SizesVerified(wrong, 3), AlgorithmsNamed(["a", ""]),
    ):  # fmt: skip
        assert decode_reply(msgspec.json.encode(reply)) == reply


def test_too_long_a_frame_raises_value_error() -> None:
    frames = FrameReader()
    frames.feed(b"\xff\xff\xff\xff")
    with pytest.raises(ValueError, match="a frame of"):
        frames.next()


@pytest.mark.parametrize("body", [b"", b"{}", b'{"type":"Exec"}', b'{"type":"Ready","bytes":"5"}', b"[1]"])
def test_malformed_replies_raise_msgspec_error(body: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_reply(body)
