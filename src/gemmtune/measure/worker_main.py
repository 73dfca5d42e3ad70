"""The worker's side: one process that does jobs for a parent it does not trust to live, with code it does not trust.

Started by ``worker.Worker``; never imported by anything else.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading

import msgspec

from .protocol import Failed, FrameReader, Leading, Reply, Request, decode_request, write_frame


def main(read_fd: int, write_fd: int, marker_fd: int) -> None:
    """Answer requests from ``read_fd`` on ``write_fd`` until the parent closes its end.

    marker_fd: a small shared file where the race notes which candidate is running.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    for fd in (read_fd, write_fd, marker_fd):
        os.set_inheritable(fd, False)
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(read_fd, requests), daemon=True).start()
    _serve(requests, write_fd, marker_fd)


def _listen(read_fd: int, requests: queue.SimpleQueue[Request]) -> None:
    """Reads in a thread of its own, so that a parent's death ends this process even in the middle of a job."""
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


def _serve(requests: queue.SimpleQueue[Request], write_fd: int, marker_fd: int) -> None:
    from .job import Desk  # loads torch: after the parent's death is watched for

    def progress(leading: Leading) -> None:
        write_frame(write_fd, leading)

    desk = Desk(progress, marker_fd)
    while True:
        request = requests.get()
        reply: Reply
        try:
            reply = desk.answer(request)
        except MemoryError as error:
            reply = Failed(f"out of memory: {error}", memory=True)
        except Exception as error:  # the parent hears what happened, whatever it was
            reply = Failed(f"{type(error).__name__}: {error}")
        write_frame(write_fd, reply)
