"""Who holds a lease or made a temporary file: a process, named so that others can tell whether it still lives."""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Owner:
    """A process. place: the boot and the set of processes that ``pid`` counts in; started: tells reused pids apart."""

    place: str
    pid: int
    started: str

    @property
    def text(self) -> str:
        """One word, fit for a file's name; ``parse`` reads it back."""
        return f"{self.place}-{self.pid}-{self.started}"

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """The Owner that ``text`` names; None when it names none."""
        place, _, rest = text.partition("-")
        pid, _, started = rest.partition("-")
        return cls(place, int(pid), started) if place and started and pid.isascii() and pid.isdigit() else None

    @property
    def dead(self) -> bool:
        """Whether it is certain that the process is gone. What happens at another place, nobody here can know."""
        return self.place == _place() and _started(self.pid) != self.started


def this_process() -> Owner:
    """The Owner that this process is (after a fork, the child is another)."""
    return Owner(_place(), os.getpid(), _started(os.getpid()))


@functools.cache
def _place() -> str:
    """The boot and the pid namespace: one host's containers do not see each other's processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot, space = platform.node(), ""
    return "".join(letter for letter in boot + space if letter.isalnum()) or "here"


def _started(pid: int) -> str:
    """When a process started, in whatever unit the system has; empty when it is not there (or only its corpse)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in ("Z", "X") else fields[19]
    except (FileNotFoundError, ProcessLookupError):
        return "" if os.path.exists("/proc/self/stat") else _started_elsewhere(pid)
    except (OSError, IndexError):
        return "unknown"


def _started_elsewhere(pid: int) -> str:
    """The same on systems without /proc."""
    import psutil

    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else str(int(process.create_time()))
    except psutil.NoSuchProcess:
        return ""
    except psutil.Error:
        return "unknown"
