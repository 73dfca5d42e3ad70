"""Stores with decisions for this machine, and a runner of the command line."""

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
def run() -> command.CommandRunner:
    """Return the function that runs ``gemmtune`` with its arguments."""
    return command.invoke


@pytest.fixture
def target() -> Target:
    """Return this machine's Target, as the commands use it."""
    return current_target()


@pytest.fixture
def store_path(tmp_path: Path, target: Target) -> Path:
    """Return a store with three decisions for this machine (winner, tie, none valid) and one for another machine."""
    path = tmp_path / "store.db"
    store = open_store(path)
    store.put(target, make_decision(build(16, 4096, 4096, "bf16"), "winner", target))
    store.put(target, make_decision(build(1, 4096, 4096, "bf16"), "tie", target))
    store.put(target, make_decision(build(16, 4096, 4096, "int8"), "none_valid", target))
    other = make_target(threads=64, name="Another CPU")
    store.put(other, make_decision(build(4, 512, 512, "fp32"), "winner", other))
    store.close()
    return path


@pytest.fixture
def legal_store_path(tmp_path: Path, target: Target) -> Path:
    """Return a store of three decisions for this machine whose candidates are legal for their problems."""
    path = tmp_path / "legal.db"
    store = open_store(path)
    for m in (1, 4, 16):
        store.put(target, make_legal_decision(build(m, 512, 512, "bf16"), target))
    store.close()
    return path
