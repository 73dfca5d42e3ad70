"""A kind of device that lives outside of src/: its Target, tuning, serving, models, and verification."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent


@pytest.mark.parametrize("check", ["target", "tuning", "serving", "model", "wrong"])
def test_a_registered_kind_of_device(check: str, tmp_path: Path) -> None:
    """In a process of its own, because a PyTorch process has one PrivateUse1 backend."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "GEMMTUNE_STORE": str(tmp_path / "store.db")}
    command = [sys.executable, "-m", "helpers.fake_device.checks", check]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
