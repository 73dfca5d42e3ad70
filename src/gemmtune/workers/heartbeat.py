"""The heartbeat of a worker: whether a silent worker is still computing, judged by its heartbeat and the kernel's
accounts.

A native call may hold the interpreter's lock for its whole run, and no heartbeat is sent until it returns. Silence
alone therefore proves little before a call has had longer than any may take (``Limits.silence_s``). A silent process
that uses no processor time is not computing, and a process that was stopped (SIGSTOP) does not continue by itself.
"""

from __future__ import annotations

import psutil

from .protocol import BEAT_S

STOPPED_S = 2.0 * BEAT_S  # single heartbeats are lost on a busy machine
_IDLE_SHARE = 1 / 3  # share of the allowed silence, for a process that computes nothing
_IDLE_CPU = 0.01  # processors used; a process that uses less is idle


class Heartbeat:
    """The heartbeat of one worker: ``beat`` records a sign of life, ``fault`` judges the silence since. Times are
    ``time.monotonic``'s."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._last_beat: float | None = None
        # (time, processor seconds used by then) early in this silence.
        self._idle_since: tuple[float, float] | None = None

    @property
    def started(self) -> bool:
        """Whether any heartbeat was received."""
        return self._last_beat is not None

    def beat(self, now: float) -> None:
        self._last_beat, self._idle_since = now, None

    def fault(self, pid: int, now: float) -> str:
        """Return why the silence of process ``pid`` means that it must end, in words; empty while it may be
        computing."""
        if self._last_beat is None:
            return ""
        silence_s = now - self._last_beat
        if silence_s > self._silence_s:
            return f"no sign of life for {silence_s:.0f} s"
        if silence_s < STOPPED_S:
            return ""
        try:
            process = psutil.Process(pid)
            status, times = process.status(), process.cpu_times()
        except psutil.Error:  # it is ending: ``Host.ended`` reports that
            return ""
        if status == psutil.STATUS_STOPPED:
            return f"it is stopped (SIGSTOP), for {silence_s:.0f} s"
        return self._idle_fault(times.user + times.system, status, silence_s, now)

    def _idle_fault(self, used_s: float, status: str, silence_s: float, now: float) -> str:
        if self._idle_since is None:
            self._idle_since = (now, used_s)
        since, used_before_s = self._idle_since
        idle_s = now - since
        is_waiting = status != psutil.STATUS_RUNNING  # a runnable process that gets no processor is not at fault
        if idle_s < _IDLE_SHARE * self._silence_s or not is_waiting or used_s - used_before_s > _IDLE_CPU * idle_s:
            return ""
        return f"no sign of life for {silence_s:.0f} s, and it is not computing ({status})"
