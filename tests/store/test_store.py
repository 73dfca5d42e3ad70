"""open_store: the kind of store and its path."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmtune.store import MemoryStore, SqliteStore, default_path, open_store


def test_environment_variable_sets_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMTUNE_STORE", str(tmp_path / "my.db"))
    store = open_store()
    assert isinstance(store, SqliteStore)
    assert store.path == tmp_path / "my.db"


def test_argument_overrides_the_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMTUNE_STORE", str(tmp_path / "my.db"))
    store = open_store(tmp_path / "other.db")
    assert isinstance(store, SqliteStore)
    assert store.path == tmp_path / "other.db"


def test_default_path_is_in_xdg_data_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GEMMTUNE_STORE", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_path() == tmp_path / "gemmtune" / "store.db"


def test_memory_path_opens_a_memory_store() -> None:
    assert isinstance(open_store(":memory:"), MemoryStore)


def test_unwritable_default_path_opens_a_memory_store_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GEMMTUNE_STORE", str(tmp_path / "file" / "store.db"))
    assert isinstance(open_store(), MemoryStore)
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize("mode", [0o644, 0o755])
def test_memory_when_a_file_has_the_name_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """An executable file passes the check of permissions that a directory has to pass."""
    (tmp_path / "file").touch(mode)
    monkeypatch.setenv("GEMMTUNE_STORE", str(tmp_path / "file" / "store.db"))
    assert isinstance(open_store(), MemoryStore)


def test_named_path_is_used_without_a_check(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert isinstance(open_store(tmp_path / "file" / "store.db"), SqliteStore)
