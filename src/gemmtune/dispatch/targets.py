"""The Target of a device of this machine, and a device as the current one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

import torch

from .. import backends
from ..core.errors import UnsupportedError
from ..core.target import Target, current_cpu, current_cuda

CPU = torch.device("cpu")
SERVED_DEVICES = ("cpu", "cuda")

# What decisions and loaded kernels are kept under: the CPU with its number of threads, or a GPU with its index.
DeviceKey = tuple[str, int]


def target_of(device: str | torch.device, warn: Callable[[str], None]) -> Target:
    """Return the Target that a device's decisions are stored under: this CPU with torch's present number of threads, or
    a GPU (``"cuda"``: the current one), with the sources and the versions of every backend that can be imported.

    warn: called with a line for each backend that cannot be. Raises ValueError for another kind of device,
    UnsupportedError for a GPU that does not exist.
    """
    chosen = torch.device(device)
    if chosen.type not in SERVED_DEVICES:
        raise ValueError(f"device must be cpu or cuda (cuda:1 ...); got {str(device)!r}")
    if chosen.type == "cuda":
        _require_gpu(chosen)
    sources: dict[str, str] = {}
    versions: dict[str, str] = {}
    for name in backends.names(chosen.type):
        try:
            sources.update(backends.sources([name]))
        except (ImportError, AttributeError) as error:
            warn(f"backend {name} cannot be imported ({error})")
    target = current_cpu(sources) if chosen.type == "cpu" else current_cuda(sources, chosen.index)
    for name in sources:
        with suppress(ImportError, AttributeError):
            versions.update(backends.versions(target, [name]))
    return target.with_versions(versions)


def _require_gpu(device: torch.device) -> None:
    if not torch.cuda.is_available():
        raise UnsupportedError("there is no CUDA device that torch can use here; `gemmtune doctor` says what there is")
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise UnsupportedError(f"there is no {device}: torch sees {count} CUDA device(s), cuda:0 to cuda:{count - 1}")


def device_key(device: torch.device) -> DeviceKey:
    """Return the key of a device in its present state."""
    if device.type == "cpu":
        return "cpu", torch.get_num_threads()
    return device.type, torch.cuda.current_device() if device.index is None else device.index


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a GPU is the current one; for a CPU it does nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
