"""A lease: of several processes that want the same problem tuned, the one that holds it does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

from ..core.errors import StoreError

log = logging.getLogger("gemmtune")

MAX_TTL_S = 3600.0


class Lease:
    """The right to tune one problem, for ``ttl_s`` seconds from taking it and from each renewal.

    As a context manager it renews itself every third of that from a thread of its own, and is released at the end,
    whatever ended it. A process that dies loses its leases at once to others on the same machine, and to those
    elsewhere when the time is up.
    """

    def __init__(self, ttl_s: float, renew: Callable[[], bool], release: Callable[[], None]) -> None:
        self.ttl_s = ttl_s
        self._renew, self._release = renew, release
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def renew(self) -> bool:
        """Hold it for another ``ttl_s`` seconds. False when it was lost, or the store cannot be written."""
        try:
            return self._renew()
        except StoreError as error:
            log.debug("a lease is not renewed: %s", error)
            return False

    def release(self) -> None:
        """Let others have it. Idempotent; a store that cannot be written is left to forget it by itself."""
        try:
            self._release()
        except StoreError as error:
            log.debug("a lease is not released: %s", error)

    def __enter__(self) -> Lease:
        self._thread = threading.Thread(target=self._keep, name="gemmtune-lease", daemon=True)
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

    def _keep(self) -> None:
        while not self._end.wait(self.ttl_s / 3):
            self.renew()


def check_ttl(ttl_s: float) -> None:
    """Raises ValueError unless 0 < ttl_s <= MAX_TTL_S."""
    if not 0 < ttl_s <= MAX_TTL_S:
        raise ValueError(f"a lease's seconds must be positive and at most {MAX_TTL_S:.0f}; got {ttl_s!r}")


def left_s(expires: float, now: float) -> float | None:
    """Seconds until ``expires``; None when that is over, or further off than any lease (a clock was set back)."""
    rest = expires - now
    return rest if 0 < rest <= MAX_TTL_S else None
