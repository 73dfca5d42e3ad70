"""``Lease``: the exclusive right to tune a problem, so that several processes do not tune the same one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

from ..core.errors import StoreError

log = logging.getLogger("gemmtune")

MAX_TTL_S = 3600.0


class Lease:
    """The exclusive right to tune one problem, for ``ttl_s`` seconds after it was acquired or renewed.

    As a context manager, the lease renews itself in a thread of its own, three times in ``ttl_s`` seconds, and is
    released on exit, also after an exception. When a process dies, other processes on its machine can acquire its
    leases at once, and those on other machines when the time has run out.
    """

    def __init__(self, ttl_s: float, renew: Callable[[], bool], release: Callable[[], None]) -> None:
        self.ttl_s = ttl_s
        self._renew, self._release = renew, release
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def renew(self) -> bool:
        """Extend the lease to ``ttl_s`` seconds from now. False when it was lost or the store is not writable."""
        try:
            return self._renew()
        except StoreError as error:
            log.debug("a lease is not renewed: %s", error)
            return False

    def release(self) -> None:
        """Release the lease. Idempotent. When the store cannot be written, the lease runs out instead."""
        try:
            self._release()
        except StoreError as error:
            log.debug("a lease is not released: %s", error)

    def __enter__(self) -> Lease:
        self._thread = threading.Thread(target=self._renew_periodically, name="gemmtune-lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        try:
            if self._thread is not None:
                self._thread.join()
        finally:
            self.release()

    def _renew_periodically(self) -> None:
        while not self._end.wait(self.ttl_s / 3):
            self.renew()


def check_ttl(ttl_s: float) -> None:
    """Raise ValueError unless 0 < ttl_s <= MAX_TTL_S."""
    if not 0 < ttl_s <= MAX_TTL_S:
        raise ValueError(f"a lease's seconds must be positive and at most {MAX_TTL_S:.0f}; got {ttl_s!r}")


def remaining_s(expires: float, now: float) -> float | None:
    """Return the seconds until ``expires``; None when it has passed, or is beyond MAX_TTL_S (a clock was set back)."""
    seconds = expires - now
    return seconds if 0 < seconds <= MAX_TTL_S else None
