"""The exceptions that gemmtune raises in addition to TypeError and ValueError."""

from __future__ import annotations


class GemmtuneError(RuntimeError):
    """The base class of gemmtune's errors."""


class UnsupportedError(GemmtuneError):
    """A valid request that nothing on this machine can serve. The message says what could serve it."""


class PackedWeightError(GemmtuneError, ValueError):
    """A packed weight whose shape, dtype, layout or machine does not match the call."""


class StoreError(GemmtuneError):
    """A failed operation of a store. Dispatch never raises it."""


class StoreBusy(StoreError):
    """A read that was abandoned because another process is writing the store. Dispatch continues without the store."""


class WorkerError(GemmtuneError):
    """A worker process that could not be started, or that violated the protocol."""


class KernelError(GemmtuneError):
    """A kernel that could not be built, loaded or launched."""
