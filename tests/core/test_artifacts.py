"""Artifacts: integrity, permissions, the size limit, and concurrent processes."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pytest

from gemmtune.core.errors import StoreError
from gemmtune.core.files import STALE_S, write_whole
from gemmtune.core.owner import Owner, this_process
from gemmtune.store import Artifacts


def key(name: object) -> str:
    return hashlib.sha256(str(name).encode()).hexdigest()


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    return Artifacts.beside(tmp_path / "data" / "store.db", max_bytes=1000)


def file_names(artifacts: Artifacts) -> list[str]:
    return sorted(os.listdir(artifacts.directory))


def test_put_and_get_round_trip(artifacts: Artifacts) -> None:
    path = artifacts.put(key("a"), b"code")
    assert artifacts.get(key("a")) == path
    assert path.read_bytes() == b"code"
    assert artifacts.directory.name == "store.artifacts"
    assert file_names(artifacts) == [path.name]


def test_longest_key_is_accepted(artifacts: Artifacts) -> None:
    assert artifacts.put("f" * 128, b"code") == artifacts.get("f" * 128)


def test_miss_creates_no_directory(artifacts: Artifacts) -> None:
    assert artifacts.get(key("a")) is None
    assert not artifacts.directory.exists()


def test_files_are_accessible_to_the_user_only(artifacts: Artifacts) -> None:
    path = artifacts.put(key("a"), b"code")
    assert stat.S_IMODE(artifacts.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "invalid", ["", "../../etc/passwd", "0" * 15, "0" * 129, "A" * 32, "0" * 32 + "\n", "0" * 32 + "/"]
)
def test_keys_that_are_no_hex_digest_raise_value_error(artifacts: Artifacts, invalid: str) -> None:
    with pytest.raises(ValueError, match="hex digits"):
        artifacts.put(invalid, b"")
    with pytest.raises(ValueError, match="hex digits"):
        artifacts.get(invalid)


def test_get_returns_the_newest_artifact_of_a_key(artifacts: Artifacts) -> None:
    os.utime(artifacts.put(key("a"), b"old"), (1, 1))
    newer = artifacts.put(key("a"), b"new")
    assert artifacts.get(key("a")) == newer


def test_damaged_artifact_is_a_miss_and_is_deleted(artifacts: Artifacts, caplog: pytest.LogCaptureFixture) -> None:
    path = artifacts.put(key("a"), b"code")
    path.write_bytes(b"Code")
    assert artifacts.get(key("a")) is None
    assert file_names(artifacts) == []
    assert "its bytes have changed" in caplog.text
    assert artifacts.put(key("a"), b"code") == artifacts.get(key("a"))


def test_older_intact_artifact_serves_after_damage(artifacts: Artifacts) -> None:
    sound = artifacts.put(key("a"), b"sound")
    os.utime(sound, (1, 1))
    artifacts.put(key("a"), b"other").write_bytes(b"")
    assert artifacts.get(key("a")) == sound


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_artifact_that_others_can_write_is_deleted(artifacts: Artifacts, mode: int) -> None:
    artifacts.put(key("a"), b"code").chmod(mode)
    assert artifacts.get(key("a")) is None
    assert file_names(artifacts) == []


def test_symbolic_link_is_deleted_and_its_target_stays(artifacts: Artifacts, tmp_path: Path) -> None:
    path = artifacts.put(key("a"), b"code")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert artifacts.get(key("a")) is None
    assert file_names(artifacts) == []
    assert (tmp_path / "elsewhere").read_bytes() == b"code"


def test_fifo_does_not_block(artifacts: Artifacts) -> None:
    path = artifacts.put(key("a"), b"code")
    path.unlink()
    os.mkfifo(path, 0o600)
    assert artifacts.get(key("a")) is None


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755])
def test_directory_open_to_other_users_raises_store_error(
    artifacts: Artifacts, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    artifacts.put(key("a"), b"code")
    artifacts.directory.chmod(mode)
    with pytest.raises(StoreError, match="open to other users"):
        artifacts.put(key("b"), b"code")
    assert artifacts.get(key("a")) is None
    assert len(caplog.records) == 1


def test_directory_of_another_user_raises_store_error(artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts.put(key("a"), b"code")
    monkeypatch.setattr(os, "geteuid", lambda: artifacts.directory.stat().st_uid + 1)
    with pytest.raises(StoreError, match="belongs to user"):
        artifacts.put(key("b"), b"code")
    assert artifacts.get(key("a")) is None


@pytest.mark.parametrize("kind", ["file", "link"])
def test_file_or_link_as_directory_raises_store_error(artifacts: Artifacts, tmp_path: Path, kind: str) -> None:
    artifacts.directory.parent.mkdir()
    (tmp_path / "real").mkdir(mode=0o700)
    if kind == "file":
        artifacts.directory.write_text("")
    else:
        artifacts.directory.symlink_to(tmp_path / "real")
    with pytest.raises(StoreError, match="not a directory"):
        artifacts.put(key("a"), b"code")
    assert artifacts.get(key("a")) is None


def test_impossible_path_raises_store_error_on_put(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    artifacts = Artifacts(tmp_path / "file" / "artifacts")
    assert artifacts.get(key("a")) is None
    with pytest.raises(StoreError, match="cannot write the artifacts"):
        artifacts.put(key("a"), b"code")


def test_least_recently_used_artifacts_are_evicted_first(artifacts: Artifacts) -> None:
    paths = [artifacts.put(key(n), bytes([n]) * 300) for n in range(3)]
    for age, path in enumerate(paths):
        os.utime(path, (1000 + age, 1000 + age))
    assert artifacts.get(key(0)) is not None  # get updates the time of use: 1 is the oldest
    artifacts.put(key(3), b"3" * 300)
    assert [artifacts.get(key(n)) is not None for n in range(4)] == [True, False, True, True]
    artifacts.put(key(4), b"4" * 1000)
    assert [artifacts.get(key(n)) is not None for n in range(5)] == [False] * 4 + [True]


@pytest.mark.parametrize("large", [False, True])
def test_many_artifacts_stay_within_the_limit(tmp_path: Path, large: bool) -> None:
    """The files are more than one eviction inspects; all of them are inspected once they may exceed the limit."""
    artifacts = Artifacts(tmp_path / "artifacts", max_bytes=30_000 if large else 300_000)
    for n in range(150):
        artifacts.put(key(n), bytes(n % 3 * 200 + 100))
    total = sum(path.stat().st_size for path in artifacts.directory.iterdir())
    assert total <= artifacts.max_bytes
    assert (len(file_names(artifacts)) == 150) == (not large)
    assert artifacts.get(key(149)) is not None


def test_get_inspects_only_the_files_of_its_key(artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(3):
        artifacts.put(key(n), b"code")
    inspected, original = [], Path.lstat
    monkeypatch.setattr(Path, "lstat", lambda path: inspected.append(path) or original(path))
    assert inspected == [artifacts.get(key(1))]


def test_artifact_larger_than_the_limit_raises_store_error(artifacts: Artifacts) -> None:
    artifacts.put(key("a"), b"code")
    with pytest.raises(StoreError, match="larger than all may be"):
        artifacts.put(key("b"), bytes(1001))
    assert artifacts.get(key("a")) is not None


def test_other_files_are_not_evicted(artifacts: Artifacts) -> None:
    artifacts.put(key("a"), b"code")
    (artifacts.directory / "notes.txt").write_bytes(bytes(5000))
    artifacts.put(key("b"), bytes(900))
    artifacts.put(key("c"), bytes(900))
    assert "notes.txt" in file_names(artifacts)
    assert artifacts.get(key("c")) is not None


def make_temporary_file(artifacts: Artifacts, owner: Owner, age_s: float = 0.0) -> Path:
    path = artifacts.directory / f".{key('x')}.{owner.text}.{'0' * 16}.tmp"
    path.write_bytes(b"half")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_temporary_files_of_dead_writers_are_deleted(artifacts: Artifacts) -> None:
    artifacts.put(key("a"), b"code")
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        pass
    owner = this_process()
    stale = [
        make_temporary_file(artifacts, Owner(owner.namespace, process.pid, "1")),
        make_temporary_file(artifacts, Owner(owner.namespace, owner.pid, "1")),  # another process has its pid
        make_temporary_file(artifacts, Owner("elsewhere", 1, "1"), 2 * STALE_S),
    ]
    in_use = [make_temporary_file(artifacts, owner), make_temporary_file(artifacts, Owner("elsewhere", 2, "1"))]
    artifacts.put(key("b"), b"code")
    assert [path.exists() for path in stale] == [False] * 3
    assert [path.exists() for path in in_use] == [True] * 2


def test_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no rename today")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no rename today"):
        write_whole(tmp_path / "file", b"body")
    assert list(tmp_path.iterdir()) == []


def test_owner_round_trips_as_text() -> None:
    owner = this_process()
    assert Owner.parse(owner.text) == owner
    assert not owner.dead
    assert [Owner.parse(text) for text in ("", "a", "a-b", "a-b-c", "-1-2", "a-1-", "a-\u0661-2")] == [None] * 7


def test_concurrent_put_and_get_during_eviction(tmp_path: Path) -> None:
    artifacts, errors = Artifacts(tmp_path / "artifacts", max_bytes=3000), []

    def work(worker: int) -> None:
        try:
            for step in range(30):
                artifacts.put(key((worker, step)), bytes([worker]) * 200)
                artifacts.get(key(((worker + 1) % 4, step)))
        except BaseException as error:  # an exception in a thread does not fail the test
            errors.append(error)

    threads = [Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sum(path.stat().st_size for path in artifacts.directory.iterdir()) <= 3000
    assert all(not name.startswith(".") for name in file_names(artifacts))
