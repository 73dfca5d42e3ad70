"""The exceptions gemmtune raises beyond TypeError and ValueError."""

from __future__ import annotations


class GemmtuneError(RuntimeError):
    """Base of every error that is gemmtune's own."""


class UnsupportedError(GemmtuneError):
    """The request is well formed, but nothing here can serve it (it says what could)."""


class PackedWeightError(GemmtuneError, ValueError):
    """A packed weight does not fit the call: another shape, dtype, layout or machine."""


class StoreError(GemmtuneError):
    """The store could not do what was asked of it (never raised on the dispatch path)."""


class StoreBusy(StoreError):
    """Somebody is writing the store, and this reader was not to wait. Serving goes on without it."""


class WorkerError(GemmtuneError):
    """A worker process could not be started or spoke out of turn."""


class KernelError(GemmtuneError):
    """A kernel could not be built, loaded or launched."""
