"""The samples in one folder, as one process sees them.

[Note: What is kept]
Epochs read every sample once, in an order of their own. So the sample that was used last is the one
that is needed last, and nothing that is kept makes room for another sample: what comes first stays,
until the cache is full. Caches of other datasets make room, the oldest first, unless a process uses
them.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path
from typing import IO, Any

from slipstream.data.pickled import pickled
from slipstream.errors import DataError

MEMORY = Path("/dev/shm")
IN_USE = "in-use"
"""A file that is locked as long as a process uses the cache beside it."""
RESERVE = 1.25
"""Free space that is asked for, for each byte that may be kept: batches need some, too."""
FULL = 0.98
"""The part of the limit from which on a cache counts as full."""

_open_here: dict[Path, SampleStore] = {}
"""Those of this process: LMDB allows one for each file."""


def opened(path: Path) -> SampleStore | None:
    """The one that this process has open, if it has."""
    store = _open_here.get(path)
    return store if store is not None and store.pid == os.getpid() else None


class SampleStore:
    """The samples in one folder, as this process sees them."""

    @classmethod
    def of(cls, path: Path, limit: int) -> SampleStore:
        """The one of this process, which gets one more user."""
        store = _open_here.get(path)
        if store is not None and store.pid != os.getpid():  # forked: its locks are the parent's
            store._samples.close()
            store = None
        if store is None:
            store = _open_here[path] = cls(path, limit)
            if multiprocessing.parent_process() is not None:  # it ends without atexit
                Finalize(None, store.end, exitpriority=0)
        store._users += 1
        return store

    def __init__(self, path: Path, limit: int) -> None:
        import lmdb

        self.pid, self._path, self._users, self._refuses = os.getpid(), path, 0, False
        self._full_error, self._error = lmdb.MapFullError, lmdb.Error
        # Not synchronous: what a crash of the machine leaves, the next boot does not use. No spare
        # transactions: a forked child would end that of its parent.
        options: dict[str, Any] = {"sync": False, "metasync": False, "readahead": False}
        options |= {"max_readers": 1024, "max_spare_txns": 0}
        try:
            with _alone_in(path.parent):
                path.mkdir(exist_ok=True)
                self._lock = (path / IN_USE).open("ab")
                fcntl.flock(self._lock, fcntl.LOCK_SH)
                try:
                    if not (path / "data.mdb").exists():
                        _make_room(path, int(limit * RESERVE))
                    self._samples = lmdb.open(str(path), map_size=limit, **options)
                    self._samples.reader_check()  # those of killed processes
                except BaseException:
                    _remove_unused(path, self._lock)
                    raise
        except (OSError, lmdb.Error) as error:
            raise DataError(f"data.cache cannot use {path}: {error}") from error
        self._limit = limit

    @property
    def count(self) -> int:
        return int(self._samples.stat()["entries"])

    @property
    def is_full(self) -> bool:
        """Whether hardly a page is left, or a sample has found no room."""
        used = self._samples.info()["last_pgno"] * self._samples.stat()["psize"]
        return self._refuses or used > FULL * self._limit

    def get(self, name: bytes) -> bytes | None:
        with self._samples.begin() as transaction:
            found: bytes | None = transaction.get(name)
            return found

    def put(self, name: bytes, sample: Any) -> None:
        if self._refuses:
            return
        value = pickled(sample)
        try:
            with self._samples.begin(write=True) as transaction:
                transaction.put(name, value, overwrite=False)
        except self._full_error:
            self._refuses = True
        except self._error as error:
            if shutil.disk_usage(self._path).free > 2**20 + len(value):
                raise DataError(f"data.cache cannot write to {self._path}: {error}") from error
            self._refuses = True  # the disk is full

    def leave(self) -> None:
        """One user less; the last one closes it, and removes what is in memory."""
        self._users -= 1
        if not self._users:
            self.end()

    def end(self) -> None:
        """Close it, whoever uses it; idempotent."""
        if _open_here.get(self._path) is not self or self.pid != os.getpid():
            return
        del _open_here[self._path]
        self._samples.close()
        if not self._path.is_relative_to(MEMORY):
            self._lock.close()
            return
        with _alone_in(self._path.parent):
            _remove_unused(self._path, self._lock)


@contextmanager
def _alone_in(root: Path) -> Iterator[None]:
    """No other process opens or removes a cache meanwhile. Makes the folder, for this user alone:
    what is kept is code to whoever reads it.

    Raises:
        PermissionError: it is another user's.
    """
    while True:
        root.parent.mkdir(parents=True, exist_ok=True)  # outside: nobody removes that one
        try:
            root.mkdir(mode=0o700, exist_ok=True)
            if root.stat().st_uid != os.getuid():
                words = "belongs to another user; give another data.cache.folder"
                raise PermissionError(f"{root} {words}")
            lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        except (FileExistsError, FileNotFoundError):
            if os.path.lexists(root) and not root.is_dir():
                raise
            continue  # its last user has removed it since
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_at(root, lock):
                yield
                if not any(root.iterdir()):
                    root.rmdir()
                return
        finally:
            os.close(lock)


def _is_at(root: Path, folder: int) -> bool:
    try:
        return os.path.samestat(os.stat(folder), root.stat())
    except FileNotFoundError:
        return False


def _remove_unused(path: Path, lock: IO[bytes]) -> None:
    """Remove a cache unless another process uses it, and close its lock."""
    if _is_alone(lock):
        shutil.rmtree(path, ignore_errors=True)
    lock.close()


def _is_alone(lock: IO[bytes]) -> bool:
    """Whether no other process uses the folder."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_room(path: Path, num_bytes: int) -> None:
    """Remove caches of other datasets that nobody uses, the oldest first, until there is room.

    Raises:
        OSError: there is none.
    """
    others = [other for other in path.parent.iterdir() if other.is_dir() and other != path]
    for other in sorted(others, key=lambda other: other.stat().st_mtime):
        if shutil.disk_usage(path).free >= num_bytes:
            return
        _remove_unused(other, (other / IN_USE).open("ab"))
    free = shutil.disk_usage(path).free
    if free < num_bytes:
        raise OSError(
            f"{num_bytes / 2**30:.2f} GiB are asked for, {free / 2**30:.2f} GiB are free; set "
            "data.cache.gigabytes to less, or another data.cache.folder"
        )
