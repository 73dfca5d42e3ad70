"""What is built for a store's decisions lies in that store's artifacts, and is loaded from there."""

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
from helpers.serving import evidence, serve

PROBLEM = Problem("mm", 5, 24, 32, Operand("float32"), Operand("float32"), "float32")
GOOD = Candidate.make("toy", "good", kind="good")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiler of toys, under its name."""
    monkeypatch.setitem(backends._PLUGINS, "toy", toy_compiler.ENTRY_POINT)
    backends.get.cache_clear()
    yield
    backends.get.cache_clear()


def built(directory: Path) -> list[str]:
    return sorted(os.listdir(directory)) if directory.exists() else []


@pytest.mark.usefixtures("toy")
def test_builders_and_workers_leave_artifacts_with_the_tuners_store(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "elsewhere" / "mine.db")
    tuner = Tuner(current_cpu(), ("toy",), store)
    with closing(tuner._new_pool()) as pool:
        made = pool.builders(PROBLEM, [GOOD], current_cpu())[GOOD.id]
        hands = pool.worker()
        hands.open(PROBLEM, 0)
        other = Candidate.make("toy", "good", kind="good", built_by="the worker")
        attempted = hands.attempt(other)
    assert isinstance(made, Artifact)
    assert made.path is not None
    assert made.path.parent == tmp_path / "elsewhere" / "mine.artifacts"
    assert attempted.verdict is None or attempted.verdict.ok
    assert len(built(made.path.parent)) == 2
    assert built(tmp_path / "store.artifacts") == []


@pytest.mark.usefixtures("toy")
def test_a_worker_in_this_process_does_too_and_changes_nothing_here(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "mine.db")
    with closing(Tuner(current_cpu(), ("toy",), store, isolate=False)._new_pool()) as pool:
        hands = pool.worker()
        hands.open(PROBLEM, 0)
        hands.attempt(GOOD)
    assert len(built(tmp_path / "mine.artifacts")) == 1
    assert artifacts_directory() == tmp_path / "store.artifacts"
    assert built(artifacts_directory()) == []


@pytest.mark.usefixtures("toy")
def test_serving_loads_from_the_store_in_use_and_stores_do_not_mix(tmp_path: Path) -> None:
    torch.set_num_threads(torch.get_num_threads())
    places: list[tuple[Store, Path]] = [
        (SqliteStore(tmp_path / "one.db"), tmp_path / "one.artifacts"),
        (SqliteStore(tmp_path / "two.db"), tmp_path / "two.artifacts"),
        (MemoryStore(), tmp_path / "store.artifacts"),  # the default store's
    ]
    for count, (store, directory) in enumerate(places):
        serve(store, PROBLEM, evidence(GOOD, 0.1), chosen=GOOD)  # type: ignore[arg-type]
        RUNTIME.refresh(store)
        kernel = RUNTIME.kernel_for(PROBLEM)
        assert kernel is not None
        assert kernel.candidate == GOOD
        assert [len(built(place)) for _, place in places] == [1] * (count + 1) + [0] * (2 - count)
        assert directory.exists()


def test_gpu_backends_build_and_look_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def recipe(*_: object) -> tuple[str, Callable[[], bytes]]:
        return "ab" * 32, lambda: made.append(1) or b"a cubin"  # type: ignore[func-returns-value]

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
        assert len(made) == count
    assert backend.artifact(PROBLEM, GOOD, H200) is None


def test_artifacts_on_a_file_system_that_may_only_be_read_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemmtune.store import Artifacts

    def read_only(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    artifacts = Artifacts(tmp_path / "artifacts")
    path = artifacts.put("ab" * 32, b"a cubin")
    monkeypatch.setattr(os, "utime", read_only)
    assert artifacts.get("ab" * 32) == path
