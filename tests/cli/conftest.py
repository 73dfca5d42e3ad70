"""A store with one decision of each outcome for this machine, and a runner for the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmtune.core.target import Target
from gemmtune.core.workloads import build
from gemmtune.dispatch import current_target
from gemmtune.store import open_store
from helpers import command
from helpers.factories import make_decision, make_legal_decision, make_target


@pytest.fixture
def run() -> command.Run:
    """Run ``gemmtune`` with the given arguments."""
    return command.invoke


@pytest.fixture
def here() -> Target:
    """This machine's Target, as the commands see it."""
    return current_target()


@pytest.fixture
def filled(tmp_path: Path, here: Target) -> Path:
    """A store: for this machine a winner, a tie and a problem with nothing valid; one decision of another machine."""
    path = tmp_path / "store.db"
    store = open_store(path)
    store.put(here, make_decision(build(16, 4096, 4096, "bf16"), "winner", here))
    store.put(here, make_decision(build(1, 4096, 4096, "bf16"), "tie", here))
    store.put(here, make_decision(build(16, 4096, 4096, "int8"), "none_valid", here))
    other = make_target(threads=64, name="Another CPU")
    store.put(other, make_decision(build(4, 512, 512, "fp32"), "winner", other))
    store.close()
    return path


@pytest.fixture
def legal(tmp_path: Path, here: Target) -> Path:
    """A store of three decisions for this machine whose kernels are legal for their problems."""
    path = tmp_path / "legal.db"
    store = open_store(path)
    for m in (1, 4, 16):
        store.put(here, make_legal_decision(build(m, 512, 512, "bf16"), here))
    store.close()
    return path
