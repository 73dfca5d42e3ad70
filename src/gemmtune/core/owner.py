"""``Owner``: the identity of the process that owns a lease or a temporary file.

Other processes can tell from it whether the owner is still alive.
"""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Owner:
    """The identity of a process.

    namespace: the boot and the pid namespace in which ``pid`` is valid. started: start time of the process, which
    tells it from a later process with the same pid.
    """

    namespace: str
    pid: int
    started: str

    @property
    def text(self) -> str:
        """The Owner as one word that is valid in a file name; inverse of ``parse``."""
        return f"{self.namespace}-{self.pid}-{self.started}"

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Return the Owner of a ``text``; None when the text is malformed."""
        namespace, _, rest = text.partition("-")
        pid, _, started = rest.partition("-")
        return cls(namespace, int(pid), started) if namespace and started and pid.isascii() and pid.isdigit() else None

    @property
    def dead(self) -> bool:
        """Whether the process has certainly ended. Always False for a process of another boot or pid namespace."""
        return self.namespace == _pid_namespace() and _start_time(self.pid) != self.started


def this_process() -> Owner:
    """Return the Owner of this process. A forked child has another Owner."""
    return Owner(_pid_namespace(), os.getpid(), _start_time(os.getpid()))


@functools.cache
def _pid_namespace() -> str:
    """Return the boot and the pid namespace: containers of one host do not see each other's processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot, namespace = platform.node(), ""
    return "".join(letter for letter in boot + namespace if letter.isalnum()) or "here"


def _start_time(pid: int) -> str:
    """Return a process's start time in the system's unit; empty when the process does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in ("Z", "X") else fields[19]
    except (FileNotFoundError, ProcessLookupError):
        return "" if os.path.exists("/proc/self/stat") else _start_time_without_proc(pid)
    except (OSError, IndexError):
        return "unknown"


def _start_time_without_proc(pid: int) -> str:
    """Return what ``_start_time`` returns, on systems without /proc."""
    import psutil

    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else str(int(process.create_time()))
    except psutil.NoSuchProcess:
        return ""
    except psutil.Error:
        return "unknown"
