"""The state of a GPU: its clock and what limits the clock, through NVML (nvidia-ml-py, imported only here)."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from .machine import MachineState, describe_clock_change

# Bits of nvmlDeviceGetCurrentClocksEventReasons. The bits for an idle GPU and for clocks set by a user limit nothing.
_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


@dataclass(frozen=True, slots=True)
class CudaState(MachineState):
    """The state of a GPU at one moment. frequency: of its multiprocessors, in MHz. throttle: what limits its clock, in
    words."""

    throttle: tuple[str, ...] = ()

    def differs(self, other: MachineState) -> str:
        """Return the change between the two states, in words: of the clock by more than 5%, or a new reason that limits
        it."""
        after = other.throttle if isinstance(other, CudaState) else ()
        new = [reason for reason in after if reason not in self.throttle]
        return f"slowed down by {', '.join(new)}" if new else describe_clock_change(self, other)

    def words(self) -> dict[str, str]:
        """Return the state as entries for a Sample's conditions."""
        conditions = {"clock": f"{self.frequency:.0f} MHz"} if self.frequency else {}
        return conditions | ({"throttle": ", ".join(self.throttle)} if self.throttle else {})


class CudaMachine:
    """A GPU observed through NVML. nvml: the module ``pynvml``, initialised; handle: the device's."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def read_state(self) -> CudaState:
        """Return the present state. Values that cannot be read stay unknown."""
        nvml = self._nvml
        try:
            frequency = float(nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM))
        except nvml.NVMLError:
            frequency = 0.0
        return CudaState(frequency=frequency, throttle=self._throttle())

    def _throttle(self) -> tuple[str, ...]:
        nvml = self._nvml
        get_reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        # The function's name before driver 535.
        get_reasons = get_reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        try:
            mask = int(get_reasons(self._handle))
        except nvml.NVMLError:
            return ()
        return tuple(words for bit, words in _REASONS.items() if mask & bit)


def cuda_machine(device: torch.device) -> CudaMachine | None:
    """Return the CudaMachine of a CUDA device; None without nvidia-ml-py, or where NVML does not know the device."""
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
