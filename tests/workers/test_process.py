"""One worker's pipes, without a worker: answers, deadlines, silence, and a parent that is kept from reading."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from gemmtune.timing.outcome import LeaderUpdate
from gemmtune.workers import process as process_module
from gemmtune.workers.heartbeat import Heartbeat
from gemmtune.workers.process import Lost, Process
from gemmtune.workers.protocol import Alive, Ready, Setup, write_frame
from gemmtune.workers.worker import ignore


class Stage:
    """A Host that keeps the worker's ends of the pipes for the test to play its part."""

    def __init__(self) -> None:
        self.over: str | None = None
        self.ends = 0

    def fork(self, process: Process, fds: list[int]) -> None:
        self.requests, self.replies, self.marker, self.log = (os.dup(fd) for fd in fds)
        process.pid = os.getpid()

    def ended(self, process: Process) -> str | None:
        return self.over

    def end(self, process: Process) -> None:
        self.ends += 1

    def close(self) -> None:
        for fd in (self.requests, self.replies, self.marker, self.log):
            os.close(fd)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture
def process(stage: Stage) -> Iterator[Process]:
    process = Process(stage, 30.0)  # type: ignore[arg-type]
    yield process
    process.close()
    process.close()
    assert stage.ends >= 1


def test_an_answer_that_is_there_at_the_deadline_counts(stage: Stage, process: Process) -> None:
    for _ in range(100):
        write_frame(stage.replies, Alive())
    write_frame(stage.replies, Ready(7))
    assert process.reply(0.0, ignore) == Ready(7)


def test_what_was_sent_before_the_end_counts(stage: Stage, process: Process) -> None:
    write_frame(stage.replies, Ready(7))
    stage.over = "the worker exited with status 0"
    assert process.reply(1.0, ignore) == Ready(7)
    with pytest.raises(Lost, match="exited with status 0"):
        process.reply(1.0, ignore)


def test_progress_without_end_is_no_answer(stage: Stage, process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_LAST_CALL_S", 0.05)
    stop = threading.Event()

    def chatter() -> None:
        while not stop.is_set():
            write_frame(stage.replies, LeaderUpdate("a", 1.0, 1.0))

    thread = threading.Thread(target=chatter, daemon=True)
    thread.start()
    seen: list[LeaderUpdate] = []
    try:
        with pytest.raises(Lost, match=r"no answer within 0\.1 s") as caught:
            process.reply(0.1, seen.append)
    finally:
        stop.set()
        os.set_blocking(stage.replies, False)
        while thread.is_alive():
            process._pump(0.01)
    assert caught.value.verdict.kind == "hung"
    assert seen


def test_what_it_printed_is_told_and_kept_short(stage: Stage, process: Process) -> None:
    os.write(stage.log, b"x" * 20_000 + b" the reason")
    stage.over = "the worker exited with status 1"
    with pytest.raises(Lost, match=r"it printed: x+ the reason$") as caught:
        process.reply(1.0, ignore)
    assert len(caught.value.verdict.detail) < 1100


def test_a_process_that_reads_nothing_does_not_block_its_parent(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "_SEND_S", 0.05)
    with pytest.raises(BlockingIOError):
        process.send(Setup({"filler": "x" * (1 << 20)}))


def test_the_silence_of_the_busy_is_borne_longer_than_that_of_the_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    class Account:
        def __init__(self, pid: int) -> None: ...

        def status(self) -> str:
            return status

        def cpu_times(self) -> object:
            return SimpleNamespace(user=used, system=0.0)

    monkeypatch.setattr(psutil, "Process", Account)
    pulse = Heartbeat(30.0)
    status, used = "sleeping", 0.0
    assert pulse.fault(1, 1000.0) == ""  # never heard from: it is starting
    pulse.beat(0.0)
    assert pulse.fault(1, 1.0) == ""
    for now in range(3, 30):  # a native call with the interpreter's lock
        used = 0.9 * now
        assert pulse.fault(1, float(now)) == ""
    assert "no sign of life for 31 s" in pulse.fault(1, 31.0)
    pulse.beat(100.0)
    assert pulse.fault(1, 103.0) == ""
    assert pulse.fault(1, 112.0) == ""
    assert "not computing (sleeping)" in pulse.fault(1, 114.0)
    status = "running"  # and gets no processor: the machine's fault
    assert pulse.fault(1, 114.0) == ""
    status = "stopped"
    assert "stopped (SIGSTOP)" in pulse.fault(1, 102.5)
