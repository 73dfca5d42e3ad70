"""Fixtures of the tests that need a CUDA device. Those marked ``gpu`` are skipped without one."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def own_artifacts(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the kernels of this run into a new directory."""
    monkeypatch.setenv("GEMMTUNE_STORE", str(tmp_path_factory.getbasetemp() / "store.db"))
