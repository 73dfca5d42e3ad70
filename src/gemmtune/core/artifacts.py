"""Built kernels on disk, by the digest of everything that went into them.

A file is ``KEY.CONTENT``: KEY names its inputs (source, config, compiler, target), CONTENT is the SHA-256 of its bytes,
so that one rename puts both in place and a changed byte is seen before anything is loaded.
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
_SAMPLE = 64  # files whose sizes say what all of them come to, unless it may be too much


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    key: str
    content: str
    used: int
    size: int


class Artifacts:
    """A directory that only the user can write, bounded to ``max_bytes``: the least recently used files go first.

    Made at the first ``put``. Safe for many processes and threads at once. A directory that others can write, or that
    is somebody else's, is refused: whoever can write it could run code here.
    """

    def __init__(self, directory: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be positive; got {max_bytes!r}")
        self.directory = Path(directory).absolute()
        self.max_bytes = max_bytes
        self._warned = False

    @classmethod
    def beside(cls, store_path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> Artifacts:
        """The artifacts that go with a store file: ``store.db`` has ``store.artifacts``."""
        return cls(Path(store_path).with_suffix(".artifacts"), max_bytes=max_bytes)

    def put(self, key: str, body: bytes) -> Path:
        """Keep ``body`` under ``key``, the hex digest of everything that went into it; durable when this returns.

        Evicts what was used least recently, and sweeps what dead writers left. Raises StoreError when the directory
        cannot be written, is not the user's alone, or ``body`` is larger than everything may be.
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
        """The file put under ``key``, its bytes checked just now, or None.

        A damaged file is removed and counts as a miss. So does (with a warning, once) a directory or file that is not
        the user's alone or cannot be read. Another process may evict the file before it is loaded: a miss as well.
        """
        _check_key(key)
        try:
            if not os.path.lexists(self.directory):
                return None
            self._check_directory()
            names = [name for name in os.listdir(self.directory) if name.startswith(f"{key}.")]
            for entry in sorted(self._entries(names), key=lambda entry: -entry.used):
                if self._sound(entry):
                    with contextlib.suppress(OSError):  # a file system that may only be read
                        os.utime(entry.path)
                    return entry.path
        except FileNotFoundError:
            return None  # evicted in between
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
        """Raises StoreError unless it is a directory (no link to one) that is the user's alone."""
        status = os.lstat(self.directory)
        if not stat.S_ISDIR(status.st_mode):
            raise StoreError(f"{self.directory} is not a directory; remove it, and it is made anew")
        if status.st_uid != os.geteuid():
            raise StoreError(f"{self.directory} belongs to user {status.st_uid}, who could put any code there")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise StoreError(f"{self.directory} is open to other users; see what is in it, then `chmod 700` it")

    def _entries(self, names: Iterable[str]) -> list[_Entry]:
        """Those of the names that are artifacts'. Looks at each file: of thousands, ask for a few."""
        found = []
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            with contextlib.suppress(FileNotFoundError):  # evicted in between
                path = self.directory / name
                status = path.lstat()
                found.append(_Entry(path, match["key"], match["content"], status.st_mtime_ns, status.st_size))
        return found

    def _sound(self, entry: _Entry) -> bool:
        """Whether the file's bytes are those that its name says; if not, it is removed."""
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

    def _evict(self, keep: Path) -> None:
        """Remove the least recently used until all fit, whatever another process evicts meanwhile."""
        names = os.listdir(self.directory)
        if len(names) > _SAMPLE:
            some = sum(entry.size for entry in self._entries(names[:_SAMPLE]))
            if 2 * some * len(names) < _SAMPLE * self.max_bytes:  # there is room, however uneven they are
                return
        entries = sorted(self._entries(names), key=lambda entry: entry.used)
        total = sum(entry.size for entry in entries)
        for entry in entries:
            if total <= self.max_bytes:
                return
            if entry.path != keep:
                entry.path.unlink(missing_ok=True)
                total -= entry.size

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s", text)


def _check_key(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise ValueError(f"an artifact's key is a digest of 16 to 128 hex digits; got {key!r}")
