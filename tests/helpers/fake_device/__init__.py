"""A kind of device from outside of gemmtune: ``fake``, whose memory is the host's and whose operators run on the CPU.

Importing this module builds device.cpp (7 s, once), makes ``fake`` PyTorch's PrivateUse1 backend and registers a
``Device`` for it. A process can do so once, and PyTorch's accelerator is then ``fake``: tests import it in a process of
their own.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import types
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from gemmtune.core import devices
from gemmtune.core.target import Target

TYPE = "fake"


class FakeDevice(devices.Device):
    """The kind of device. Its tensors have addresses in the host's memory, which only ATen's candidates need not
    know."""

    type = TYPE
    name = "fake"
    dispatch_keys = ("PrivateUse1", "AutogradPrivateUse1", "AutocastPrivateUse1")
    profile = devices.TuningProfile(default_s=2.0)

    def target(self, device: torch.device, sources: Mapping[str, str]) -> Target:
        versions = (("torch", str(torch.__version__)),)
        return Target(
            TYPE, "a device in the host's memory", "1", memory=1 << 30, versions=versions,
            sources=tuple(sorted(sources.items())),
        )  # fmt: skip

    def free_bytes(self, device: torch.device) -> int:
        return 1 << 30

    def generator(self, device: torch.device) -> torch.Generator:
        return torch.Generator()


class _Module(types.ModuleType):
    """PyTorch's module for the device, as ``torch.cuda`` is for CUDA."""

    synchronizations = 0

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def device(self, device: object) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self, device: object = None) -> None:
        self.synchronizations += 1


def _library() -> Path:
    """Return the path of the compiled device.cpp."""
    source, torch_folder = Path(__file__).with_name("device.cpp"), Path(torch.__file__).parent
    digest = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"gemmtune-fake-device-{os.getuid()}-{digest}.so"
    if not library.exists():
        include, libraries = torch_folder / "include", torch_folder / "lib"
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = [
            os.environ.get("CXX", "c++"), "-O1", "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(unfinished),
            f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}", f"-L{libraries}", "-ltorch",
            "-ltorch_cpu", "-lc10",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        unfinished.rename(library)
    return library


MODULE = _Module(TYPE)
torch.ops.load_library(_library())
torch.utils.rename_privateuse1_backend(TYPE)
torch._register_device_module(TYPE, MODULE)
torch.utils.generate_methods_for_privateuse1_backend()
devices.register(FakeDevice(), __name__)
