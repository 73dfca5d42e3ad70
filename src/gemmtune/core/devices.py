"""Kinds of devices: what serving, verification, timing and worker processes have to know of each.

A kind of device is one ``Device``, registered under the type of its ``torch.device``. Everything above asks the
registry; nothing else compares device types. ``register`` adds a kind from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import memory, plugins
from .errors import UnsupportedError
from .target import Target, current_cpu, current_cuda
from .torch_compat import current_device, empty_cpu, empty_cuda

CPU = torch.device("cpu")

T = TypeVar("T")

# What decisions and loaded kernels are cached under: the host with its number of threads, or a device with its index.
DeviceKey = tuple[str, int]


class TuningProfile(NamedTuple):
    """Constants of tuning that differ between kinds of devices.

    default_s: seconds of tuning for a Problem where the user gives no budget; build time is not counted. race_s: the
    most of them for the race; None: all that remain. max_raced: the most candidates in a race, besides ATen's. retimed:
    the most candidates that are timed a second time before the race. builds_overlap: whether candidates may be built
    while others are timed, since the device's own clock does not notice. search: options of ``LocalSearch``. last_m:
    the largest M of a Plan for all M. tuned_m: the M that are tuned by themselves for it. last_batch, tuned_batches:
    the same of a Plan for all batches. batched_bytes: the most bytes of the operands of a batched product in a default
    range of M or of its batch, unless larger ones are recorded. tuned_m_s: seconds for each tuned M or batch, in place
    of ``default_s``; None: as many. sweep_s: seconds for timing a weight's kernels at other M. slow_m_s: seconds that a
    tuned M may take, with the start of processes and with builds; what all of a weight take beyond shortens the time
    for other M, of which least_sweep_s remain. max_kernels: the most kernels of a Plan's layout, ATen's plain op not
    counted. max_predicted: the most kernels that no tuned M has tried and that are built to be timed at other M.
    load_s: seconds of uninterrupted work after which the device's clock is that of serving; 0.0: its clock does not
    depend on the work before.
    """

    default_s: float = 6.0
    race_s: float | None = None
    max_raced: int = 16
    retimed: int = 24
    builds_overlap: bool = False
    search: Mapping[str, Any] = MappingProxyType({})
    last_m: int = 512
    tuned_m: tuple[int, ...] = (1, 8, 32, 128)
    last_batch: int = 128
    tuned_batches: tuple[int, ...] = (1, 8, 64)
    batched_bytes: int = 128 << 20
    tuned_m_s: float | None = 4.5
    sweep_s: float = 16.0
    slow_m_s: float = 6.0
    least_sweep_s: float = 4.8
    # By the measured times of 65 plans of CPUs, four lose 0.81% in the mean, and as many as it takes (6) 0.76%.
    max_kernels: int = 4
    max_predicted: int = 0
    load_s: float = 0.0


class Device:
    """One kind of device. The methods of this class work for every kind that has a PyTorch device module
    (``torch.get_device_module(type)``), except ``target``.

    type: the type of its ``torch.device``. name: the kind in messages. is_host: whether operands are in the host's
    memory and a call returns when its result is there. dispatch_keys: names of the dispatch keys of its ordinary
    tensors, besides those of CPU and CUDA tensors, which ``core.memory`` knows. aligns_fp16_products: whether its
    matrix units align float16 products by exponent fields (see verify.oracle). profile: constants of tuning. timing:
    ``module:Class`` of its ``timing.devices.DeviceTiming``.
    """

    type: ClassVar[str]
    name: ClassVar[str]
    is_host: ClassVar[bool] = False
    dispatch_keys: ClassVar[tuple[str, ...]] = ()
    aligns_fp16_products: ClassVar[bool] = False
    profile: ClassVar[TuningProfile] = TuningProfile()
    timing: ClassVar[str] = "gemmtune.timing.devices:DeviceTiming"

    @property
    def module(self) -> Any:
        """PyTorch's module for this kind: ``torch.cuda``, for example."""
        return torch.get_device_module(self.type)

    def target(self, device: torch.device, sources: Mapping[str, str]) -> Target:
        """Return the Target of a device. sources: a digest of each backend's source."""
        raise NotImplementedError

    def require(self, device: torch.device) -> None:
        """Raise UnsupportedError unless the device exists in this process."""
        if not self.module.is_available():
            raise UnsupportedError(
                f"there is no {self.name} device that torch can use here; `gemmtune doctor` says what there is"
            )
        count = self.count()
        if device.index is not None and device.index >= count:
            raise UnsupportedError(
                f"there is no {device}: torch sees {count} {self.name} device(s), {self.type}:0 to "
                f"{self.type}:{count - 1}"
            )

    def count(self) -> int:
        """Return the number of devices of this kind in this process."""
        return int(self.module.device_count())

    def index(self, device: torch.device) -> int:
        """Return the device's index, that of the current device where it has none."""
        return int(self.module.current_device()) if device.index is None else device.index

    def current_index(self) -> int:
        """Return the index of the current device of this kind. Called in every call of an op where there are several
        devices."""
        return int(self.module.current_device())

    def key(self, device: torch.device) -> DeviceKey:
        """Return what decisions and loaded kernels are cached under for a device in its present state."""
        return self.type, self.index(device)

    def guard(self, device: torch.device) -> AbstractContextManager[object]:
        """Return a context in which the device is the current one of its kind."""
        guard: AbstractContextManager[object] = self.module.device(device)
        return guard

    def needs_guard(self) -> bool:
        """Whether kernels need ``guard`` around their launches: another device of this kind may be the current one."""
        return self.count() > 1

    def is_capturing(self, device: torch.device) -> bool:
        """Whether the device's current stream is being captured into a graph: nothing may be loaded meanwhile."""
        return False

    def make_lasting(self, device: torch.device, make: Callable[[], T]) -> T:
        """Return ``make()``, called so that tensors which it allocates may outlive the CUDA graphs of Inductor."""
        return make()

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has done all its work."""
        self.module.synchronize(device)

    def free_bytes(self, device: torch.device) -> int:
        """Return the bytes of the device's memory that are free."""
        return int(self.module.mem_get_info(device)[0])

    def allocator(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, current: bool
    ) -> Callable[[], Tensor]:
        """Return a function that allocates an uninitialized tensor. Every call of a served op pays for it.

        current: whether ``device`` is always the current one of its kind when the function is called.
        """
        return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)

    def generator(self, device: torch.device) -> torch.Generator:
        """Return a new generator of random numbers for tensors on the device: the device's own, or a CPU's."""
        return torch.Generator(device)


class HostDevice(Device):
    """This machine's CPU, with torch's present number of threads."""

    type = "cpu"
    name = "CPU"
    is_host = True
    timing = "gemmtune.timing.devices:HostTiming"

    def target(self, device: torch.device, sources: Mapping[str, str]) -> Target:
        return current_cpu(sources)

    def require(self, device: torch.device) -> None:
        return

    def count(self) -> int:
        return 1

    def current_index(self) -> int:
        return 0

    def key(self, device: torch.device) -> DeviceKey:
        return "cpu", torch.get_num_threads()

    def guard(self, device: torch.device) -> AbstractContextManager[object]:
        return nullcontext()

    def synchronize(self, device: torch.device) -> None:
        return

    def free_bytes(self, device: torch.device) -> int:
        import psutil  # importing it takes 10 ms, which serving need not pay

        return int(psutil.virtual_memory().available)

    def allocator(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, current: bool
    ) -> Callable[[], Tensor]:
        return partial(empty_cpu, shape, strides, dtype)


class CudaDevice(Device):
    """An NVIDIA GPU, or an AMD GPU under ROCm."""

    type = "cuda"
    name = "CUDA"
    aligns_fp16_products = True
    # Times are short and steady: rounds of a race repeat to a few tenths of a percent. A GPU has no other users, as a
    # rule, but its clock may still be rising when the first candidates are timed. Templates list their likeliest
    # candidates first. An H100 of 700 W reaches its power limit after 0.08 to 0.16 s of fp8 products: the same calls
    # then take 12% to 20% longer (heat-h100-20261127.json). In a simulation on the times of 213
    # Decisions ``behind`` leaves out 22% of the candidates, 3% without it; the fastest of one either way
    # (search-behind-h200-20261128.txt). Of the kernels that eight plans of fp8, int8 and int4 weights had timed on an
    # H200 and H100s, the best 8 are 1.3% to 5.9% slower than all in the mean over M, the best 10 0.6% to 3.8%. By the
    # measured times of 72 plans of an H200, nine lose 0.33% and ten 0.32%; the plans have 5.97 and 6.14 in the mean
    # (scripts that were not kept). With nine, 18 later plans had 6.8 (int8 and int4 weights, fp8;
    # every-m-20261129-161209 to -161727): eight keep the mean of all families below 6.
    profile = TuningProfile(
        default_s=3.0, race_s=1.2, max_raced=12, retimed=8, builds_overlap=True,
        search={"seeds": 12, "leaders": 2, "patience": 12, "behind": 1.3},
        last_m=8192, tuned_m=(1, 16, 128, 2048), last_batch=1024, tuned_batches=(1, 16, 128), batched_bytes=2 << 30,
        tuned_m_s=2.2, sweep_s=3.8, slow_m_s=4.0, least_sweep_s=0.8, max_kernels=8, max_predicted=24, load_s=0.2,
    )  # fmt: skip
    timing = "gemmtune.timing.devices:CudaTiming"
    current_index = staticmethod(current_device)

    def target(self, device: torch.device, sources: Mapping[str, str]) -> Target:
        return current_cuda(sources, device.index)

    def is_capturing(self, device: torch.device) -> bool:
        if torch.cuda.current_device() == device.index:
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def make_lasting(self, device: torch.device, make: Callable[[], T]) -> T:
        """Return ``make()``, called without gradients on a thread of its own, on this thread's stream.

        While Inductor's CUDA graphs warm up (``mode="reduce-overhead"``), all that their thread allocates comes from
        the graphs' memory, in which nothing but their results may be in use afterwards.
        """
        stream = torch.cuda.current_stream(device)

        def run() -> T:
            with torch.cuda.stream(stream), torch.no_grad():
                return make()

        with ThreadPoolExecutor(1, "gemmtune-lasting") as executor:
            return executor.submit(run).result()

    def allocator(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, current: bool
    ) -> Callable[[], Tensor]:
        if current or self.count() == 1:
            return partial(empty_cuda, shape, strides, dtype)
        return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


_BUILTIN: dict[str, Device] = {"cpu": HostDevice(), "cuda": CudaDevice()}
_DEVICES = dict(_BUILTIN)
for _device in _BUILTIN.values():
    memory.add_device(_device.type, _device.dispatch_keys)


def register(device: Device, module: str) -> None:
    """Add a kind of device. module: the module that registers it, which worker processes import.

    Registering a type again replaces its Device. Raises ValueError for a built-in type.
    """
    if device.type in _BUILTIN:
        raise ValueError(f"gemmtune has a Device for {device.type}; a kind from outside needs a type of its own")
    memory.add_device(device.type, device.dispatch_keys)
    _DEVICES[device.type] = device
    plugins.add(module)


def names() -> tuple[str, ...]:
    """Return the types of all kinds of devices, the CPU's first."""
    return tuple(_DEVICES)


def get(type: str) -> Device:
    """Return the Device for a type (of a torch.device, or a Target's). Raises ValueError for an unknown type."""
    device = _DEVICES.get(type)
    if device is None:
        raise ValueError(f"device must be {' or '.join(_DEVICES)} (cuda:1 ...); got {type!r}")
    return device


def is_served(device: torch.device) -> bool:
    """Whether gemmtune has kernels for this kind of device."""
    return device.type in _DEVICES


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured into a graph: nothing may be loaded meanwhile."""
    return is_served(device) and get(device.type).is_capturing(device)


def make_lasting(device: torch.device, make: Callable[[], T]) -> T:
    """Return ``make()``, called so that tensors which it allocates may outlive the CUDA graphs of Inductor; while a
    graph is captured, as it is."""
    if not is_served(device) or is_capturing(device):
        return make()
    return get(device.type).make_lasting(device, make)


def is_host(type: str) -> bool:
    """Whether kernels for devices of a type run on the host. False for a type that this process does not know."""
    return type in _DEVICES and _DEVICES[type].is_host
