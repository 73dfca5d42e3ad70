"""Pipes of a worker process without a worker: replies, deadlines, missing heartbeats, and a blocked pipe."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from gemmtune.timing.outcome import LeaderUpdate
from gemmtune.workers import process as process_module
from gemmtune.workers.contract import ignore
from gemmtune.workers.heartbeat import Heartbeat
from gemmtune.workers.process import Lost, Process
from gemmtune.workers.protocol import Alive, Ready, Setup, write_frame


class FakeHost:
    """Fake Host that keeps the worker's ends of the pipes, so that the test can act as the worker."""

    def __init__(self) -> None:
        self.exit_reason: str | None = None
        self.end_calls = 0

    def fork(self, process: Process, fds: list[int]) -> None:
        self.requests, self.replies, self.marker, self.log = (os.dup(fd) for fd in fds)
        process.pid = os.getpid()

    def ended(self, process: Process) -> str | None:
        return self.exit_reason

    def end(self, process: Process) -> None:
        self.end_calls += 1

    def close(self) -> None:
        for fd in (self.requests, self.replies, self.marker, self.log):
            os.close(fd)


@pytest.fixture
def host() -> Iterator[FakeHost]:
    host = FakeHost()
    yield host
    host.close()


@pytest.fixture
def process(host: FakeHost) -> Iterator[Process]:
    process = Process(host, 30.0)  # type: ignore[arg-type]
    yield process
    process.close()
    process.close()
    assert host.end_calls >= 1


def test_reply_in_the_pipe_at_the_deadline_is_returned(host: FakeHost, process: Process) -> None:
    for _ in range(100):
        write_frame(host.replies, Alive())
    write_frame(host.replies, Ready(7))
    assert process.reply(0.0, ignore) == Ready(7)


def test_reply_sent_before_the_exit_is_returned(host: FakeHost, process: Process) -> None:
    write_frame(host.replies, Ready(7))
    host.exit_reason = "the worker exited with status 0"
    assert process.reply(1.0, ignore) == Ready(7)
    with pytest.raises(Lost, match="exited with status 0"):
        process.reply(1.0, ignore)


def test_endless_progress_messages_are_no_reply(
    host: FakeHost, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "_LAST_CALL_S", 0.05)
    stop = threading.Event()

    def send_progress() -> None:
        while not stop.is_set():
            write_frame(host.replies, LeaderUpdate("a", 1.0, 1.0))

    thread = threading.Thread(target=send_progress, daemon=True)
    thread.start()
    updates: list[LeaderUpdate] = []
    try:
        with pytest.raises(Lost, match=r"no answer within 0\.1 s") as error:
            process.reply(0.1, updates.append)
    finally:
        stop.set()
        os.set_blocking(host.replies, False)
        while thread.is_alive():
            process._pump(0.01)
    assert error.value.verdict.kind == "hung"
    assert updates


def test_error_has_the_end_of_the_workers_output(host: FakeHost, process: Process) -> None:
    os.write(host.log, b"x" * 20_000 + b" the reason")
    host.exit_reason = "the worker exited with status 1"
    with pytest.raises(Lost, match=r"it printed: x+ the reason$") as error:
        process.reply(1.0, ignore)
    assert len(error.value.verdict.detail) < 1100


@pytest.mark.parametrize("is_gone", [False, True])
def test_send_to_a_worker_that_does_not_read_or_is_gone_returns(
    process: Process, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    monkeypatch.setattr(process_module, "_SEND_S", 0.05)
    if is_gone:
        process.close()
    start = time.monotonic()
    process.send(Setup({"filler": "x" * (1 << 20)}))
    assert time.monotonic() - start < 1.0


def test_missing_heartbeats_are_tolerated_longer_from_a_busy_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeProcess:
        def __init__(self, pid: int) -> None: ...

        def status(self) -> str:
            return status

        def cpu_times(self) -> object:
            return SimpleNamespace(user=cpu_s, system=0.0)

    monkeypatch.setattr(psutil, "Process", FakeProcess)
    heartbeat = Heartbeat(30.0)
    status, cpu_s = "sleeping", 0.0
    assert heartbeat.fault(1, 1000.0) == ""  # no heartbeat yet: the worker is starting
    heartbeat.beat(0.0)
    assert heartbeat.fault(1, 1.0) == ""
    for now in range(3, 30):  # a native call that keeps the GIL
        cpu_s = 0.9 * now
        assert heartbeat.fault(1, float(now)) == ""
    assert "no sign of life for 31 s" in heartbeat.fault(1, 31.0)
    heartbeat.beat(100.0)
    assert heartbeat.fault(1, 103.0) == ""
    assert heartbeat.fault(1, 112.0) == ""
    assert "not computing (sleeping)" in heartbeat.fault(1, 114.0)
    status = "running"  # runnable without CPU time: the machine is loaded
    assert heartbeat.fault(1, 114.0) == ""
    status = "stopped"
    assert "stopped (SIGSTOP)" in heartbeat.fault(1, 102.5)
