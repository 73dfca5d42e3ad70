"""The Target: the machine and the software versions for which a decision is valid.

A change of any field makes every stored decision for the former Target a miss.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

# The CPU features that determine which kernels can run, by Linux's names in /proc/cpuinfo.
ISA_FLAGS = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "avx512vbmi", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """Every property of the machine and its software that can change a kernel's speed or result.

    device: ``cpu`` or ``cuda``. name: the device's name. capability: the CPU's architecture, an NVIDIA GPU's compute
    capability (``9.0``) or an AMD GPU's architecture (``gfx942``). isa: the flags of ISA_FLAGS that a CPU has. caches:
    sizes in bytes: (L1d, L2, L3) per core or chip for a CPU; (shared memory that a thread block may use, 0, L2) for a
    GPU. threads: torch's intra-op threads on a CPU; 1 for a GPU. cores: CPU cores, or a GPU's multiprocessors. memory:
    bytes. versions: of torch, a CPU's BLAS libraries, a GPU's driver and CUDA, and the libraries and compilers on which
    the backends' kernels depend (``Backend.versions``). sources: a digest of each backend's source in gemmtune.
    """

    device: str
    name: str
    capability: str
    isa: tuple[str, ...] = ()
    caches: tuple[int, ...] = ()
    threads: int = 1
    cores: int = 1
    memory: int = 0
    versions: tuple[tuple[str, str], ...] = ()
    sources: tuple[tuple[str, str], ...] = ()
    _key: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        object.__setattr__(self, "_key", hashlib.sha256(text.encode()).hexdigest()[:24])

    @property
    def key(self) -> str:
        """A digest of all fields."""
        return self._key

    def with_versions(self, versions: Mapping[str, str]) -> Target:
        """Return this Target with ``versions`` added or replaced."""
        return replace(self, versions=tuple(sorted({**dict(self.versions), **versions}.items()))) if versions else self

    @property
    def torch_device(self) -> torch.device:
        """The torch device on which operands are allocated."""
        return torch.device(self.device)

    @property
    def is_cpu(self) -> bool:
        """Whether the Target is this machine's CPU, with a number of threads."""
        return self.device == "cpu"

    @property
    def is_amd(self) -> bool:
        """Whether the Target is an AMD GPU, whose capability is the name of an architecture."""
        return self.capability.startswith("gfx")

    @property
    def compute_capability(self) -> tuple[int, int]:
        """The compute capability of an NVIDIA GPU as (major, minor); (0, 0) for an AMD GPU."""
        if self.is_amd:
            return 0, 0
        major, _, minor = self.capability.partition(".")
        return int(major), int(minor or 0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that can be stored as JSON, the inverse of ``from_dict``.

        A field with ``metadata={"later": True}`` is left out at its default, so that Targets of versions without the
        field have equal keys and their decisions still serve.
        """
        data = asdict(self)
        del data["_key"]
        for item in fields(self):
            if item.metadata.get("later") and data[item.name] == item.default:
                del data[item.name]
        for name in ("versions", "sources"):
            data[name] = dict(data[name])
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Target:
        """Build a Target from the data of ``to_dict``. Raises KeyError, TypeError or ValueError for malformed data."""
        values = dict(data)
        for name in ("versions", "sources"):
            values[name] = tuple(sorted((str(k), str(v)) for k, v in values[name].items()))
        values["isa"] = tuple(str(flag) for flag in values["isa"])
        values["caches"] = tuple(int(size) for size in values["caches"])
        return cls(**values)


def current_cpu(sources: Mapping[str, str] | None = None) -> Target:
    """Return the Target of this process's CPU with torch's current thread count. sources: a digest per backend."""
    name, flags, caches, memory = _host()
    return Target(
        device="cpu",
        name=name,
        capability=platform.machine(),
        isa=flags,
        caches=caches,
        threads=torch.get_num_threads(),
        cores=_cores(),
        memory=memory,
        versions=_versions(),
        sources=tuple(sorted((sources or {}).items())),
    )


def current_cuda(sources: Mapping[str, str] | None = None, index: int | None = None) -> Target:
    """Return the Target of a CUDA (or ROCm) device of this process.

    index: the device's index; None: the current device. sources: a digest per backend. Raises torch's RuntimeError when
    there is no such device.
    """
    return replace(
        _gpu(torch.cuda.current_device() if index is None else index), sources=tuple(sorted((sources or {}).items()))
    )


@functools.cache
def _gpu(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or getattr(
        properties, "shared_memory_per_block", 0
    )
    # ROCm's major and minor look like NVIDIA's; its architecture name has features appended: gfx942:sramecc+:xnack-.
    arch = str(properties.gcnArchName).partition(":")[0] if torch.version.hip else ""
    return Target(
        device="cuda",
        name=properties.name,
        capability=arch or f"{properties.major}.{properties.minor}",
        caches=(int(shared), 0, int(getattr(properties, "L2_cache_size", 0))),
        cores=properties.multi_processor_count,
        memory=properties.total_memory,
        versions=_gpu_versions(),
    )


@functools.cache
def _gpu_versions() -> tuple[tuple[str, str], ...]:
    rows = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda), "hip": str(torch.version.hip)}
    rows["driver"] = _driver()
    return tuple(sorted(rows.items()))


def _driver() -> str:
    """Return the NVIDIA driver's version from /proc, else the CUDA version that the driver supports."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        text = ""
    version = next((word for word in text.split() if re.fullmatch(r"\d+\.\d+(\.\d+)?", word)), "")
    if version:
        return version
    try:
        number = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
        return f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    except OSError:
        return "unknown"


@functools.cache
def _host() -> tuple[str, tuple[str, ...], tuple[int, ...], int]:
    info = _cpuinfo()
    vendor = f"{info.get('vendor_id', '')} family {info.get('cpu family', '?')} model {info.get('model', '?')}"
    present = set(info.get("flags", "").split())
    flags = tuple(flag for flag in ISA_FLAGS if flag in present)
    name = f"{info.get('model name', platform.processor() or 'unknown CPU')} ({vendor})"
    return name, flags, _caches(), _memory()


def _cpuinfo() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _caches() -> tuple[int, ...]:
    sizes: dict[int, int] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind = (index / "type").read_text().strip()
            level, size = int((index / "level").read_text()), (index / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        if kind != "Instruction" and size.endswith("K"):
            sizes[level] = int(size[:-1]) * 1024
    return tuple(sizes.get(level, 0) for level in (1, 2, 3))


def _memory() -> int:
    try:
        line = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()[0]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return 0


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    build = torch.__config__.show()
    onednn = next((line.strip(" -") for line in build.splitlines() if "MKL-DNN" in line or "oneDNN" in line), "none")
    blas = next((part for part in build.replace("\n", ", ").split(", ") if part.startswith("BLAS_INFO=")), "none")
    capability = torch.backends.cpu.get_cpu_capability()
    rows = {"torch": str(torch.__version__), "onednn": onednn, "blas": blas, "aten_isa": capability}
    return tuple(sorted(rows.items()))
