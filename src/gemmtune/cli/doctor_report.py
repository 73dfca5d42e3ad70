"""The inspection behind ``gemmtune doctor``: hardware, libraries, backends, tools and the store."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..core.target import Target

_OPENMP = re.compile(r"/[^/\s]*lib(?:gomp|omp|iomp5)[^/\s]*\.so[^/\s]*$")


@dataclass(frozen=True, slots=True)
class BackendState:
    """Whether a backend is available. reason: why it is not; empty if it is."""

    name: str
    available: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA device that torch can use. device: its torch name (``cuda:0``); memory: bytes; cores: multiprocessors."""

    device: str
    name: str
    capability: str
    driver: str
    memory: int
    cores: int
    backends: list[BackendState]


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The results that ``gemmtune doctor`` prints.

    target: the CPU's Target as a dict. cores: number of cores that this process may use. openmp: paths of the OpenMP
    libraries loaded into this process. tools: the path of each build tool, or None. extras: whether each optional
    Python package is installed. store_damage: a description of each damaged record. advice: what to install or change,
    one sentence each.
    """

    python: str
    torch: str
    system: str
    target: dict[str, Any]
    cores: int
    openmp: list[str]
    backends: list[BackendState]
    tools: dict[str, str | None]
    extras: dict[str, bool]
    store_path: str
    store_decisions: int
    store_damage: list[str]
    gpus: list[Gpu] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def examine(store_path: Path | None = None, *, threads: int | None = None) -> DoctorReport:
    """Inspect the machine, the libraries and the store.

    Nothing is changed, except torch's number of threads if ``threads`` is given; a store that does not exist is not
    created.
    """
    import torch

    from .. import dispatch

    if threads is not None:
        torch.set_num_threads(threads)
    target = dispatch.current_target()
    path, decisions, damage = _store_state(store_path)
    report = DoctorReport(
        python=f"{platform.python_version()} ({sys.executable})",
        torch=str(torch.__version__),
        system=f"{platform.system()} {platform.release()} {platform.machine()}, {_libc()}",
        target=target.to_dict(),
        cores=target.cores,
        openmp=openmp_runtimes(),
        backends=backend_states(target),
        tools={name: shutil.which(name) for name in ("make", "c++", "g++", "clang++", "cmake", "ninja")},
        extras={name: importlib.util.find_spec(name) is not None for name in ("plotly", "pytest", "hypothesis")},
        store_path=path,
        store_decisions=decisions,
        store_damage=damage,
        gpus=gpus(),
    )
    report.advice.extend(advice_for(report))
    return report


def _libc() -> str:
    return " ".join(platform.libc_ver()).strip() or "unknown libc"


def gpus() -> list[Gpu]:
    """Return the GPUs that torch can use, with each backend's availability; empty without CUDA."""
    import torch

    from .. import dispatch

    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = f"cuda:{index}"
        target = dispatch.current_target(device)
        driver = dict(target.versions).get("driver", "unknown")
        states = backend_states(target)
        devices.append(Gpu(device, target.name, target.capability, driver, target.memory, target.cores, states))
    return devices


def backend_states(target: Target) -> list[BackendState]:
    """Return the availability of each backend that is registered for the target's type of device."""
    from ..backends import get, names

    states = []
    for name in names(target.device):
        availability = get(name).available(target)
        states.append(BackendState(name, bool(availability), availability.reason))
    return states


def openmp_runtimes(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Return the real paths of the OpenMP runtime libraries loaded into this process.

    More than one is a problem: their threads compete for the cores.
    """
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    paths = {
        match.group(0) for line in lines if (match := re.search(r"/\S.*$", line)) and _OPENMP.search(match.group(0))
    }
    return sorted({os.path.realpath(path) for path in paths})


def _store_state(path: Path | None) -> tuple[str, int, list[str]]:
    from ..store import default_path, open_store

    location = path if path is not None else default_path()
    if not location.exists():
        return str(location), 0, []
    store = open_store(location)
    try:
        return str(location), sum(1 for _ in store.decisions()), store.verify()
    finally:
        store.close()


def advice_for(report: DoctorReport) -> list[str]:
    """Return what the user should install or change, one sentence each; empty if nothing is wrong."""
    advice = [
        f"backend {state.name} is not available: {state.reason}" for state in report.backends if not state.available
    ]
    advice += [
        f"backend {state.name} is not available on {gpu.device}: {state.reason}"
        for gpu in report.gpus
        for state in gpu.backends
        if not state.available
    ]
    if len(report.openmp) > 1:
        advice.append(
            f"{len(report.openmp)} OpenMP runtimes are loaded ({', '.join(report.openmp)}): they fight over the cores "
            "and slow every kernel down; install torch and gemmtune from the same kind of wheel, or build gemmtune here"
        )
    if not any(report.tools[name] for name in ("c++", "g++", "clang++")):
        advice.append(
            "no C++ compiler is on PATH: an installed wheel does not need one, but building from source does "
            "(Debian/Ubuntu: apt install g++; Fedora: dnf install gcc-c++)"
        )
    if not report.tools["make"]:
        advice.append("make is not on PATH: `make demo` and `make test` need it (Debian/Ubuntu: apt install make)")
    threads, cores = report.target["threads"], report.cores
    if threads > cores:
        advice.append(
            f"torch uses {threads} threads but this process may use {cores} cores: set OMP_NUM_THREADS={cores}"
        )
    if not report.extras["plotly"]:
        advice.append("plotly is not installed, so reports have plain plots: pip install 'gemmtune[report]'")
    if report.store_damage:
        advice.append(
            "the store is damaged: `gemmtune store verify` lists it; damaged decisions are tuned again, "
            "a file that cannot be read at all has to be moved away"
        )
    return advice
