"""Artifacts: whole, checked, the user's alone, bounded, whatever other processes do."""

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


def names(artifacts: Artifacts) -> list[str]:
    return sorted(os.listdir(artifacts.directory))


def test_round_trip(artifacts: Artifacts) -> None:
    path = artifacts.put(key("a"), b"code")
    assert artifacts.get(key("a")) == path
    assert path.read_bytes() == b"code"
    assert artifacts.directory.name == "store.artifacts"
    assert names(artifacts) == [path.name]


def test_the_longest_key(artifacts: Artifacts) -> None:
    assert artifacts.put("f" * 128, b"code") == artifacts.get("f" * 128)


def test_a_miss_makes_nothing(artifacts: Artifacts) -> None:
    assert artifacts.get(key("a")) is None
    assert not artifacts.directory.exists()


def test_only_the_user_can_get_at_it(artifacts: Artifacts) -> None:
    path = artifacts.put(key("a"), b"code")
    assert stat.S_IMODE(artifacts.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "bad", ["", "../../etc/passwd", "0" * 15, "0" * 129, "A" * 32, "0" * 32 + "\n", "0" * 32 + "/"]
)
def test_a_key_is_a_digest(artifacts: Artifacts, bad: str) -> None:
    with pytest.raises(ValueError, match="hex digits"):
        artifacts.put(bad, b"")
    with pytest.raises(ValueError, match="hex digits"):
        artifacts.get(bad)


def test_the_newest_under_a_key_is_found(artifacts: Artifacts) -> None:
    os.utime(artifacts.put(key("a"), b"old"), (1, 1))
    newer = artifacts.put(key("a"), b"new")
    assert artifacts.get(key("a")) == newer


def test_damage_is_a_miss_and_goes(artifacts: Artifacts, caplog: pytest.LogCaptureFixture) -> None:
    path = artifacts.put(key("a"), b"code")
    path.write_bytes(b"Code")
    assert artifacts.get(key("a")) is None
    assert names(artifacts) == []
    assert "its bytes have changed" in caplog.text
    assert artifacts.put(key("a"), b"code") == artifacts.get(key("a"))


def test_damage_leaves_an_older_sound_one(artifacts: Artifacts) -> None:
    sound = artifacts.put(key("a"), b"sound")
    os.utime(sound, (1, 1))
    artifacts.put(key("a"), b"other").write_bytes(b"")
    assert artifacts.get(key("a")) == sound


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_goes(artifacts: Artifacts, mode: int) -> None:
    artifacts.put(key("a"), b"code").chmod(mode)
    assert artifacts.get(key("a")) is None
    assert names(artifacts) == []


def test_a_link_goes_and_what_it_links_to_stays(artifacts: Artifacts, tmp_path: Path) -> None:
    path = artifacts.put(key("a"), b"code")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert artifacts.get(key("a")) is None
    assert names(artifacts) == []
    assert (tmp_path / "elsewhere").read_bytes() == b"code"


def test_a_fifo_does_not_hang(artifacts: Artifacts) -> None:
    path = artifacts.put(key("a"), b"code")
    path.unlink()
    os.mkfifo(path, 0o600)
    assert artifacts.get(key("a")) is None


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755])
def test_a_directory_that_is_open_to_others_is_refused(
    artifacts: Artifacts, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    artifacts.put(key("a"), b"code")
    artifacts.directory.chmod(mode)
    with pytest.raises(StoreError, match="open to other users"):
        artifacts.put(key("b"), b"code")
    assert artifacts.get(key("a")) is None
    assert len(caplog.records) == 1


def test_somebody_elses_directory_is_refused(artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts.put(key("a"), b"code")
    monkeypatch.setattr(os, "geteuid", lambda: artifacts.directory.stat().st_uid + 1)
    with pytest.raises(StoreError, match="belongs to user"):
        artifacts.put(key("b"), b"code")
    assert artifacts.get(key("a")) is None


@pytest.mark.parametrize("to", ["file", "link"])
def test_what_is_no_directory_is_refused(artifacts: Artifacts, tmp_path: Path, to: str) -> None:
    artifacts.directory.parent.mkdir()
    (tmp_path / "real").mkdir(mode=0o700)
    if to == "file":
        artifacts.directory.write_text("")
    else:
        artifacts.directory.symlink_to(tmp_path / "real")
    with pytest.raises(StoreError, match="not a directory"):
        artifacts.put(key("a"), b"code")
    assert artifacts.get(key("a")) is None


def test_a_place_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    artifacts = Artifacts(tmp_path / "file" / "artifacts")
    assert artifacts.get(key("a")) is None
    with pytest.raises(StoreError, match="cannot write the artifacts"):
        artifacts.put(key("a"), b"code")


def test_the_least_recently_used_go_first(artifacts: Artifacts) -> None:
    paths = [artifacts.put(key(n), bytes([n]) * 300) for n in range(3)]
    for age, path in enumerate(paths):
        os.utime(path, (1000 + age, 1000 + age))
    assert artifacts.get(key(0)) is not None  # used just now: 1 is the oldest
    artifacts.put(key(3), b"3" * 300)
    assert [artifacts.get(key(n)) is not None for n in range(4)] == [True, False, True, True]
    artifacts.put(key(4), b"4" * 1000)
    assert [artifacts.get(key(n)) is not None for n in range(5)] == [False] * 4 + [True]


@pytest.mark.parametrize("large", [False, True])
def test_many_are_bounded_too(tmp_path: Path, large: bool) -> None:
    """More than are looked at one by one: all are, once they may be too much."""
    artifacts = Artifacts(tmp_path / "artifacts", max_bytes=30_000 if large else 300_000)
    for n in range(150):
        artifacts.put(key(n), bytes(n % 3 * 200 + 100))
    total = sum(path.stat().st_size for path in artifacts.directory.iterdir())
    assert total <= artifacts.max_bytes
    assert (len(names(artifacts)) == 150) == (not large)
    assert artifacts.get(key(149)) is not None


def test_finding_one_of_many_looks_at_no_other(artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(3):
        artifacts.put(key(n), b"code")
    looked, real = [], Path.lstat
    monkeypatch.setattr(Path, "lstat", lambda path: looked.append(path) or real(path))
    assert looked == [artifacts.get(key(1))]


def test_too_large_for_all_of_it(artifacts: Artifacts) -> None:
    artifacts.put(key("a"), b"code")
    with pytest.raises(StoreError, match="larger than all may be"):
        artifacts.put(key("b"), bytes(1001))
    assert artifacts.get(key("a")) is not None


def test_other_files_are_left_alone(artifacts: Artifacts) -> None:
    artifacts.put(key("a"), b"code")
    (artifacts.directory / "notes.txt").write_bytes(bytes(5000))
    artifacts.put(key("b"), bytes(900))
    artifacts.put(key("c"), bytes(900))
    assert "notes.txt" in names(artifacts)
    assert artifacts.get(key("c")) is not None


def temporary(artifacts: Artifacts, owner: Owner, age_s: float = 0.0) -> Path:
    path = artifacts.directory / f".{key('x')}.{owner.text}.{'0' * 16}.tmp"
    path.write_bytes(b"half")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_what_dead_writers_left_is_swept(artifacts: Artifacts) -> None:
    artifacts.put(key("a"), b"code")
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        pass
    here = this_process()
    dead = [
        temporary(artifacts, Owner(here.place, process.pid, "1")),
        temporary(artifacts, Owner(here.place, here.pid, "1")),  # its pid is another process's now
        temporary(artifacts, Owner("elsewhere", 1, "1"), 2 * STALE_S),
    ]
    living = [temporary(artifacts, here), temporary(artifacts, Owner("elsewhere", 2, "1"))]
    artifacts.put(key("b"), b"code")
    assert [path.exists() for path in dead] == [False] * 3
    assert [path.exists() for path in living] == [True] * 2


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no rename today")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no rename today"):
        write_whole(tmp_path / "file", b"body")
    assert list(tmp_path.iterdir()) == []


def test_an_owner_reads_back() -> None:
    here = this_process()
    assert Owner.parse(here.text) == here
    assert not here.dead
    assert [Owner.parse(text) for text in ("", "a", "a-b", "a-b-c", "-1-2", "a-1-", "a-\u0661-2")] == [None] * 7


def test_threads_put_and_get_while_the_oldest_go(tmp_path: Path) -> None:
    artifacts, errors = Artifacts(tmp_path / "artifacts", max_bytes=3000), []

    def work(worker: int) -> None:
        try:
            for step in range(30):
                artifacts.put(key((worker, step)), bytes([worker]) * 200)
                artifacts.get(key(((worker + 1) % 4, step)))
        except BaseException as error:  # a thread cannot raise to the test: it is collected
            errors.append(error)

    threads = [Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sum(path.stat().st_size for path in artifacts.directory.iterdir()) <= 3000
    assert all(not name.startswith(".") for name in names(artifacts))
