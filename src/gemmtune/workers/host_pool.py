"""Hosts that several users share, and that this process keeps for a while after a tuning, for the next one.

Starting a host takes seconds, most of them for importing torch (4.1 s beside an H200,
benchmarks/results/host-start-h200-20261128.txt; 5.3 to 6.7 s where a tuning started two at once). Tunings often follow
one another: those of a model's graphs, those of several models, and those that the policy "on-miss" asks for.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from .process import Host, HostSettings

KEPT_S = 60.0  # seconds after which an unused host ends
_MARGIN_S = 5.0  # a host is not taken in the last of these seconds: it might end just then
MOST_KEPT = 2  # a tuning has one for its worker and its builders; two where these import other modules first


class _Kept(NamedTuple):
    host: Host
    until: float  # by time.monotonic()


class HostPool:
    """The hosts in use, and those that are kept for later users, at most ``most``. Several threads may use it.

    A host that is taken from it has the settings that a new one would have: the environment, ``sys.path``, the current
    directory and the processors. One that is kept ends by itself when nobody takes it, and with this process.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._users: dict[Host, int] = {}  # the number of users of each host in use
        self._kept: list[_Kept] = []
        self._of_parent: list[Host] = []

    def take(self, preload: Sequence[str]) -> Host:
        """Return a host that imports the modules ``preload``: one that others use or that was kept, else a new one.

        Raises WorkerError when no process can be spawned.
        """
        settings = HostSettings.now(preload)
        with self._lock:
            self._end_useless()
            in_use = next((host for host in self._users if host.alive and host.settings == settings), None)
            kept = next((kept for kept in self._kept if kept.host.settings == settings), None)
            if in_use is None and kept is not None:
                self._kept.remove(kept)
                in_use = kept.host
            host = in_use or Host(preload)
            self._users[host] = self._users.get(host, 0) + 1
        return host

    def put_back(self, host: Host) -> None:
        """Take note that a user of a host is done. The host of no other user is kept for ``KEPT_S`` seconds, or closed:
        if it has ended, has a worker left or has forked none, since it may still be importing torch."""
        with self._lock:
            users = self._users.pop(host, 1) - 1
            if users:
                self._users[host] = users
                return
        if not self._most or not host.end_unless_used(KEPT_S):
            host.close()
            return
        with self._lock:
            self._kept.append(_Kept(host, time.monotonic() + KEPT_S - _MARGIN_S))
            self._end_useless()

    def close(self) -> None:
        """End the hosts that are kept."""
        with self._lock:
            for kept in self._kept:
                kept.host.close()
            self._kept.clear()

    def after_fork(self) -> None:
        """Leave the hosts to the process that this one was forked from."""
        self._lock = threading.Lock()
        # Not freed: their destructors would look for the parent's processes.
        self._of_parent += [*self._users, *(kept.host for kept in self._kept)]
        self._users, self._kept = {}, []

    def _end_useless(self) -> None:
        """End the hosts that ended or soon will, and the oldest where there are too many. The caller holds the lock."""
        now = time.monotonic()
        useful = [kept for kept in self._kept if kept.host.alive and now < kept.until][-self._most :]
        for kept in self._kept:
            if kept not in useful:
                kept.host.close()
        self._kept = useful


HOST_POOL = HostPool()
atexit.register(HOST_POOL.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=HOST_POOL.after_fork)
