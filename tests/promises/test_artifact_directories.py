"""Tests that kernels are built into, and loaded from, the artifacts directory of the store that is tuned or served."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from gemmtune import backends
from gemmtune.backends.artifacts import artifacts_directory
from gemmtune.backends.base import Artifact
from gemmtune.backends.cuda import CudaBackend
from gemmtune.backends.location import artifacts_in
from gemmtune.core.candidate import Candidate
from gemmtune.core.problem import Operand, Problem
from gemmtune.core.target import current_cpu
from gemmtune.dispatch import RUNTIME
from gemmtune.store import MemoryStore, SqliteStore, Store
from gemmtune.testing import toy_compiler
from gemmtune.tuning.tuner import Tuner
from helpers.gpus import H200
from helpers.serving import evidence, store_decision

PROBLEM = Problem("mm", 5, 24, 32, Operand("float32"), Operand("float32"), "float32")
GOOD = Candidate.make("toy", "good", kind="good")


@pytest.fixture
def toy_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the toy compiler as the backend ``toy``."""
    monkeypatch.setitem(backends._PLUGINS, "toy", toy_compiler.ENTRY_POINT)
    backends.get.cache_clear()
    yield
    backends.get.cache_clear()


def file_names(directory: Path) -> list[str]:
    """Return the sorted names of a directory's files; none when there is no such directory."""
    return sorted(os.listdir(directory)) if directory.exists() else []


@pytest.mark.usefixtures("toy_backend")
def test_builders_and_workers_write_artifacts_beside_the_tuners_store(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "elsewhere" / "mine.db")
    tuner = Tuner(current_cpu(), ("toy",), store)
    with closing(tuner.new_pool()) as pool:
        artifact = pool.builders(PROBLEM, [GOOD], current_cpu())[GOOD.id]
        worker = pool.worker()
        worker.open(PROBLEM, 0)
        other = Candidate.make("toy", "good", kind="good", built_by="the worker")
        attempted = worker.attempt(other)
    assert isinstance(artifact, Artifact)
    assert artifact.path is not None
    assert artifact.path.parent == tmp_path / "elsewhere" / "mine.artifacts"
    assert attempted.verdict is None or attempted.verdict.ok
    assert len(file_names(artifact.path.parent)) == 2
    assert file_names(tmp_path / "store.artifacts") == []


@pytest.mark.usefixtures("toy_backend")
def test_a_worker_in_this_process_writes_beside_the_tuners_store_only(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "mine.db")
    with closing(Tuner(current_cpu(), ("toy",), store, isolate=False).new_pool()) as pool:
        worker = pool.worker()
        worker.open(PROBLEM, 0)
        worker.attempt(GOOD)
    assert len(file_names(tmp_path / "mine.artifacts")) == 1
    assert artifacts_directory() == tmp_path / "store.artifacts"
    assert file_names(artifacts_directory()) == []


@pytest.mark.usefixtures("toy_backend")
def test_serving_builds_in_the_directory_of_the_store_in_use_alone(tmp_path: Path) -> None:
    torch.set_num_threads(torch.get_num_threads())
    stores: list[tuple[Store, Path]] = [
        (SqliteStore(tmp_path / "one.db"), tmp_path / "one.artifacts"),
        (SqliteStore(tmp_path / "two.db"), tmp_path / "two.artifacts"),
        (MemoryStore(), tmp_path / "store.artifacts"),  # the default store's
    ]
    for count, (store, directory) in enumerate(stores):
        store_decision(store, PROBLEM, evidence(GOOD, 0.1), chosen=GOOD)  # type: ignore[arg-type]
        RUNTIME.refresh(store)
        kernel = RUNTIME.kernel_for(PROBLEM)
        assert kernel is not None
        assert kernel.candidate == GOOD
        assert [len(file_names(other)) for _, other in stores] == [1] * (count + 1) + [0] * (2 - count)
        assert directory.exists()


def test_a_gpu_backend_builds_and_looks_up_artifacts_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[int] = []

    def recipe(*_: object) -> tuple[str, Callable[[], bytes]]:
        return "ab" * 32, lambda: builds.append(1) or b"a cubin"  # type: ignore[func-returns-value]

    backend = CudaBackend()
    monkeypatch.setattr(backend, "_recipe", recipe)
    for count, name in enumerate(("one", "two"), start=1):
        with artifacts_in(tmp_path / name):
            assert backend.artifact(PROBLEM, GOOD, H200) is None
            artifact = backend.build(PROBLEM, GOOD, H200)
            assert backend.artifact(PROBLEM, GOOD, H200) == artifact
            assert backend.build(PROBLEM, GOOD, H200) == artifact
        assert artifact.path is not None
        assert artifact.path.parent == tmp_path / name
        assert len(builds) == count
    assert backend.artifact(PROBLEM, GOOD, H200) is None


def test_an_artifact_on_a_read_only_file_system_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gemmtune.store import Artifacts

    def read_only(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    artifacts = Artifacts(tmp_path / "artifacts")
    path = artifacts.put("ab" * 32, b"a cubin")
    monkeypatch.setattr(os, "utime", read_only)
    assert artifacts.get("ab" * 32) == path
