"""What a process uses of gemmtune first may be used inside a mode of PyTorch: nothing made then depends on the mode."""

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
def test_ordinary_weights_are_known_wherever_gemmtune_was_first_used(mode: str, run: bool) -> None:
    script = SCRIPT.format(mode=mode, run=run)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "no ordinary tensor" not in ended.stdout
    assert "is on meta" not in ended.stdout
    if run:
        assert "up" in ended.stdout  # left because nothing was tuned, and not because of its weight
