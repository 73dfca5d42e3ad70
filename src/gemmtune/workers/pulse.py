"""Is a worker that has gone silent still working? Found out from its heartbeat and the kernel's accounts.

A native call may keep the interpreter's lock for all of its run, and no heartbeat leaves until it returns. So silence
alone proves little before a call has had longer than any may take (``Limits.silence_s``); a silent process that uses no
processor either is not computing, and one that was stopped (SIGSTOP) will not go on by itself.
"""

from __future__ import annotations

import psutil

from .protocol import BEAT_S

STOPPED_S = 2.0 * BEAT_S  # beats are lost one at a time on a busy machine
_IDLE_SHARE = 1 / 3  # of the allowed silence, for a process that does nothing
_IDLE_CPU = 0.01  # processors used: less is nothing


class Pulse:
    """Heard from at ``beat``; ``fault`` says what is wrong with the silence since. Times are ``time.monotonic``'s."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._heard: float | None = None
        self._since: tuple[float, float] | None = None  # (when, processor seconds by then) early in this silence

    @property
    def started(self) -> bool:
        """Whether it was ever heard from."""
        return self._heard is not None

    def beat(self, now: float) -> None:
        self._heard, self._since = now, None

    def fault(self, pid: int, now: float) -> str:
        """Why the silence of process ``pid`` is its end, in words; empty while it may be working."""
        if self._heard is None:
            return ""
        silent = now - self._heard
        if silent > self._silence_s:
            return f"no sign of life for {silent:.0f} s"
        if silent < STOPPED_S:
            return ""
        try:
            process = psutil.Process(pid)
            status, times = process.status(), process.cpu_times()
        except psutil.Error:  # it is ending: that is found out elsewhere
            return ""
        if status == psutil.STATUS_STOPPED:
            return f"it is stopped (SIGSTOP), for {silent:.0f} s"
        return self._idle(times.user + times.system, status, silent, now)

    def _idle(self, used_s: float, status: str, silent: float, now: float) -> str:
        if self._since is None:
            self._since = (now, used_s)
        when, before = self._since
        still = now - when
        waiting = status != psutil.STATUS_RUNNING  # one that would run but gets no processor is not at fault
        if still < _IDLE_SHARE * self._silence_s or not waiting or used_s - before > _IDLE_CPU * still:
            return ""
        return f"no sign of life for {silent:.0f} s, and it is not computing ({status})"
