"""What a GPU is doing besides: its clock, and what holds it back, by NVML (nvidia-ml-py, imported only here)."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from .machine import Weather, clock_moved

# Bits of nvmlDeviceGetCurrentClocksEventReasons. An idle GPU, and clocks that somebody has set, hold nothing back.
_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


@dataclass(frozen=True, slots=True)
class CudaWeather(Weather):
    """One moment of a GPU. frequency: of its multiprocessors, in MHz. throttle: what slows it down, in words."""

    throttle: tuple[str, ...] = ()

    def differs(self, other: Weather) -> str:
        """What changed between the two, in words: the clock by more than 5%, or something new that slows it down."""
        after = other.throttle if isinstance(other, CudaWeather) else ()
        new = [reason for reason in after if reason not in self.throttle]
        return f"slowed down by {', '.join(new)}" if new else clock_moved(self, other)

    def words(self) -> dict[str, str]:
        """For a Sample's conditions."""
        found = {"clock": f"{self.frequency:.0f} MHz"} if self.frequency else {}
        return found | ({"throttle": ", ".join(self.throttle)} if self.throttle else {})


class CudaMachine:
    """A GPU as NVML sees it. nvml: the module ``pynvml``, initialised; handle: the device's."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def weather(self) -> CudaWeather:
        """Now. What cannot be read stays unknown."""
        nvml = self._nvml
        try:
            frequency = float(nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM))
        except nvml.NVMLError:
            frequency = 0.0
        return CudaWeather(frequency=frequency, throttle=self._throttle())

    def _throttle(self) -> tuple[str, ...]:
        nvml = self._nvml
        ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        ask = ask or nvml.nvmlDeviceGetCurrentClocksThrottleReasons  # its name before driver 535
        try:
            mask = int(ask(self._handle))
        except nvml.NVMLError:
            return ()
        return tuple(words for bit, words in _REASONS.items() if mask & bit)


def cuda_machine(device: torch.device) -> CudaMachine | None:
    """The machine of a CUDA device; None without nvidia-ml-py, or where NVML does not know the device."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a package of the same module name warns that it is obsolete
            nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid  # indices differ under CUDA_VISIBLE_DEVICES
        return CudaMachine(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except (nvml.NVMLError, AttributeError):
        return None
