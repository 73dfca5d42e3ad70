"""What lets a test on a CPU run the code in front of a launch of ``backends/triton/jit_kernel.py``."""

from __future__ import annotations

import pytest
import torch

from gemmtune.backends.triton import jit_kernel
from gemmtune.backends.triton.jit_kernel import JitKernel


class OnGpu(torch.Tensor):
    """A tensor on the CPU that says that it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def pretend_that_triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Triton be installed, not broken, and the CPU the current device. The test replaces ``launch``."""
    monkeypatch.setattr(JitKernel, "_broken", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # the number of a tensor on the CPU
    monkeypatch.setattr(jit_kernel, "triton_version", lambda: "3.6.0")
