"""The worker's side: one process that carries out requests. Its parent may die at any time, and the code that it runs
may do anything.

Forked by ``host``; no other module imports it.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time

import msgspec

from ..backends.base import OVERLAP
from .limits import no_core_dumps
from .prctl import adopt_orphans, die_first
from .protocol import BEAT_S, Alive, Failed, FrameReader, Reply, Request, decode_request, write_frame


class Channel:
    """The pipe to the parent, shared by several threads of one process."""

    def __init__(self, fd: int) -> None:
        self._fd, self._pid, self._lock = fd, os.getpid(), threading.Lock()

    def send(self, reply: Reply) -> None:
        """Send a reply; blocks until it is written. Ends the process when the parent is gone, or when it is a fork of
        the worker.

        A kernel that forks returns twice; the child would reply in the worker's place, and once more later on.
        """
        if os.getpid() != self._pid:
            os._exit(0)
        try:
            with self._lock:
                write_frame(self._fd, reply)
        except BrokenPipeError:
            os._exit(0)


def main(read_fd: int, write_fd: int, marker_fd: int) -> None:
    """Answer requests from ``read_fd`` on ``write_fd`` until the parent closes its end.

    marker_fd: a small shared file in which the race notes the candidate that is running.
    """
    for fd in (read_fd, write_fd, marker_fd):
        os.set_inheritable(fd, False)
    die_first()
    no_core_dumps()
    adopt_orphans()
    # Candidates are timed alone, and whether kernels overlap depends on the work around them.
    os.environ[OVERLAP] = "0"
    channel = Channel(write_fd)
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(read_fd, requests), daemon=True).start()
    threading.Thread(target=_beat, args=(channel,), daemon=True).start()
    _serve(requests, channel, marker_fd)


def _listen(read_fd: int, requests: queue.SimpleQueue[Request]) -> None:
    """Read requests in a thread of its own, so that the parent's death ends this process even during a request."""
    frames = FrameReader()
    while data := os.read(read_fd, 1 << 16):
        frames.feed(data)
        while (body := frames.next()) is not None:
            try:
                requests.put(decode_request(body))
            except msgspec.MsgspecError as error:
                print(f"malformed request: {error}", file=sys.stderr, flush=True)
                os._exit(3)
    os._exit(0)


def _beat(channel: Channel) -> None:
    """Send heartbeats. Each needs the interpreter's lock, so that silence also reveals a thread that holds the lock for
    long."""
    while True:
        channel.send(Alive())
        time.sleep(BEAT_S)


def _serve(requests: queue.SimpleQueue[Request], channel: Channel, marker_fd: int) -> None:
    from .job import ContextLost, RequestHandler  # the host has imported it

    handler = RequestHandler(channel.send, marker_fd)
    while True:
        request = requests.get()
        reply: Reply
        try:
            reply = handler.answer(request)
        except ContextLost as error:  # the parent learns that this process died, and why
            print(error, file=sys.stderr, flush=True)
            os._exit(5)
        except MemoryError as error:
            reply = Failed(f"out of memory: {error}")
        except Exception as error:  # the parent is told of any error
            reply = Failed(f"{type(error).__name__}: {error}")
        channel.send(reply)
