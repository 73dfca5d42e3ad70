"""Tests that a process may use gemmtune for the first time under a PyTorch mode: later results do not depend on it."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import torch
from torch import nn
import gemmtune

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 128)

    def forward(self, x):
        return self.up(x)

model, x = Model().eval(), torch.randn(2, 64)
with {mode}:
    handle = gemmtune.optimize(model, x, tune=False) if {run} else None
    from gemmtune.core.memory import why_not_addressable
print(handle.left if handle else "", why_not_addressable(model.up.weight), why_not_addressable(x))
"""


@pytest.mark.parametrize(
    ("mode", "run"),
    [("torch.inference_mode()", True), ("torch.no_grad()", True), ("torch.device('meta')", False)],
    ids=["inference_mode", "no_grad", "meta device"],
)
def test_an_ordinary_weight_is_addressable_after_a_first_use_under_a_mode(mode: str, run: bool) -> None:
    script = SCRIPT.format(mode=mode, run=run)
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert "no ordinary tensor" not in process.stdout
    assert "is on meta" not in process.stdout
    if run:
        assert "up" in process.stdout  # its reason is that nothing was tuned, not its weight
