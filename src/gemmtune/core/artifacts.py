"""``Artifacts``: a directory of built kernels, addressed by the digest of their inputs.

A file's name is ``KEY.CONTENT``. KEY is the digest of its inputs (source, config, compiler, target). CONTENT is the
SHA-256 of its bytes, so that one rename publishes both, and a changed byte is detected before the file is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .errors import StoreError
from .files import sweep, sync_directory, write_whole

log = logging.getLogger("gemmtune")

MAX_BYTES = 2 << 30
_KEY = re.compile(r"[0-9a-f]{16,128}")
_NAME = re.compile(r"(?P<key>[0-9a-f]{16,128})\.(?P<content>[0-9a-f]{64})")
_CHUNK = 1 << 20
_SAMPLE = 64  # files from whose sizes the total is estimated, unless it may exceed the limit


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    key: str
    content: str
    used: int
    size: int


class Artifacts:
    """A directory of artifacts that only the user can access, with at most ``max_bytes`` bytes.

    The first ``put`` creates it. The least recently used files are evicted first. Many processes and threads can use it
    at once. A directory that other users can access, or that belongs to another user, is rejected: anyone who can write
    to it could run code in this process.
    """

    def __init__(self, directory: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be positive; got {max_bytes!r}")
        self.directory = Path(directory).absolute()
        self.max_bytes = max_bytes
        self._warned = False

    @classmethod
    def beside(cls, store_path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> Artifacts:
        """Return the artifacts of a store file: ``store.artifacts`` for ``store.db``."""
        return cls(Path(store_path).with_suffix(".artifacts"), max_bytes=max_bytes)

    def put(self, key: str, body: bytes) -> Path:
        """Store ``body`` under ``key``, the hex digest of its inputs. Returns its path; it is durable on return.

        Evicts the least recently used files and removes temporary files of dead processes. Raises StoreError when the
        directory cannot be written or is accessible to other users, or when ``body`` is larger than ``max_bytes``.
        """
        _check_key(key)
        if len(body) > self.max_bytes:
            raise StoreError(f"an artifact of {len(body)} bytes is larger than all may be ({self.max_bytes} bytes)")
        path = self.directory / f"{key}.{hashlib.sha256(body).hexdigest()}"
        try:
            self._make_directory()
            sweep(self.directory)
            write_whole(path, body)
            self._evict(path)
        except OSError as error:
            raise StoreError(f"cannot write the artifacts in {self.directory}: {error}") from error
        return path

    def get(self, key: str) -> Path | None:
        """Return the path of the file stored under ``key``, whose bytes were just verified; None when there is none.

        A damaged file is removed and counts as a miss. A directory or file that other users can write, or that cannot
        be read, also counts as a miss, with one warning. Another process may evict the file before the caller loads it;
        the caller must treat that as a miss, too.
        """
        _check_key(key)
        try:
            if not os.path.lexists(self.directory):
                return None
            self._check_directory()
            names = [name for name in os.listdir(self.directory) if name.startswith(f"{key}.")]
            for entry in sorted(self._entries(names), key=lambda entry: -entry.used):
                if self._verify_content(entry):
                    with contextlib.suppress(OSError):  # a read-only file system
                        os.utime(entry.path)
                    return entry.path
        except FileNotFoundError:
            return None  # another process evicted it
        except (OSError, StoreError) as error:
            self._warn(f"cannot read the artifacts in {self.directory}: {error}; going on without them")
        return None

    def _make_directory(self) -> None:
        if not os.path.lexists(self.directory):
            self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # another process was first
                self.directory.mkdir(mode=0o700)
            sync_directory(self.directory.parent)
        self._check_directory()

    def _check_directory(self) -> None:
        """Raise StoreError unless the path is a directory (not a link) that only the user owns and can access."""
        status = os.lstat(self.directory)
        if not stat.S_ISDIR(status.st_mode):
            raise StoreError(f"{self.directory} is not a directory; remove it, and it is made anew")
        if status.st_uid != os.geteuid():
            raise StoreError(f"{self.directory} belongs to user {status.st_uid}, who could put any code there")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise StoreError(f"{self.directory} is open to other users; see what is in it, then `chmod 700` it")

    def _entries(self, names: Iterable[str]) -> list[_Entry]:
        """Return the entries of those names that are artifacts'. Each file needs a system call: pass few names."""
        entries = []
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            with contextlib.suppress(FileNotFoundError):  # another process evicted it
                path = self.directory / name
                status = path.lstat()
                entries.append(_Entry(path, match["key"], match["content"], status.st_mtime_ns, status.st_size))
        return entries

    def _verify_content(self, entry: _Entry) -> bool:
        """Whether the digest of the file's bytes equals that in its name; if not, the file is removed."""
        try:
            handle = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if os.path.islink(entry.path):
                self._remove(entry, "it is a link")
                return False
            raise error
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                self._remove(entry, "it is not a file that only the user can write")
                return False
            digest = hashlib.sha256()
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        if digest.hexdigest() != entry.content:
            self._remove(entry, "its bytes have changed")
            return False
        return True

    def _remove(self, entry: _Entry, why: str) -> None:
        self._warn(f"damaged artifact {entry.path}: {why}; it is removed and counts as a miss")
        with contextlib.suppress(OSError):
            os.unlink(entry.path)

    def _evict(self, protected: Path) -> None:
        """Remove the least recently used files, except ``protected``, until the total is within ``max_bytes``.

        Other processes may evict files at the same time.
        """
        names = os.listdir(self.directory)
        if len(names) > _SAMPLE:
            sample_bytes = sum(entry.size for entry in self._entries(names[:_SAMPLE]))
            if (
                2 * sample_bytes * len(names) < _SAMPLE * self.max_bytes
            ):  # half of the limit at most, in case sizes are uneven
                return
        entries = sorted(self._entries(names), key=lambda entry: entry.used)
        total = sum(entry.size for entry in entries)
        for entry in entries:
            if total <= self.max_bytes:
                return
            if entry.path != protected:
                entry.path.unlink(missing_ok=True)
                total -= entry.size

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s", text)


def _check_key(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise ValueError(f"an artifact's key is a digest of 16 to 128 hex digits; got {key!r}")
