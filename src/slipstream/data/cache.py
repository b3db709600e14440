"""Samples that were read once are kept, for later epochs and for the other ranks of the host.

On LMDB (`pip install 'slipstream[cache]'`): a file that processes map into memory. Readers never
wait, one process writes at a time, and a process that is killed leaves the file intact.

[Note: What is kept]
Epochs read every sample once, in an order of their own. So the sample that was used last is the one
that is needed last, and nothing that is kept makes room for another sample: what comes first stays,
until the cache is full. Caches of other datasets make room, the oldest first, unless a process uses
them.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import io
import os
import pickle
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from slipstream.errors import DataError, ModelError
from slipstream.strategy import Cache, Row

MEMORY = Path("/dev/shm")
FOLDER = "slipstream-samples"
IN_USE = "in-use"
"""A file that is locked as long as a process uses the cache beside it."""
LOOKED_AT = 8
"""Samples that tell a dataset from another one of its class and length."""
RESERVE = 1.25
"""Free space that is asked for, for each byte that may be kept: batches need some, too."""
FULL = 0.98
"""The part of the limit from which on a cache counts as full."""
LONGEST_NAME = 500  # bytes; LMDB takes 511


def cached(
    dataset: Dataset[Any],
    config: Cache = Cache(),  # noqa: B008 - frozen
    key: str = "",
) -> CachedDataset:
    """Keep the samples of a map-style dataset, as it gives them the first time.

    Args:
        dataset: gives the same sample each time it is asked for it; draw random numbers (for
            augmentations) from what it gives, not in it.
        config: where samples are kept, and how many bytes of them.
        key: what tells this dataset from others; empty: its class, its length and some samples.

    Exactness: bitwise.

    Raises:
        ModelError: lmdb is not installed, or the dataset has no length or no samples, or gives
            different samples for the same index, or is told its epoch.
        DataError: there is no room.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.arange(3))
        >>> kept = cached(data, Cache(gigabytes=0.01))
        >>> kept[0], kept.report_rows()[0].value
        ((tensor(0),), '1 of 3 samples')
        >>> kept.close()
    """
    return CachedDataset(dataset, config, key)


def cached_loader(loader: Any, config: Cache) -> tuple[DataLoader[Any], CachedDataset]:
    """A loader like another one, whose dataset keeps its samples; and that dataset.

    Raises:
        ModelError, DataError: as `cached`; or the loader is no ``DataLoader`` over a map-style
            dataset.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        what = type(getattr(loader, "dataset", loader)).__name__
        raise ModelError(
            f"data.cache keeps the samples of a map-style dataset in a torch DataLoader; this is a "
            f"{what}: give a DataLoader over a map-style dataset, or leave data.cache out"
        )
    dataset = cached(loader.dataset, config)
    other = copy.copy(loader)  # of its class, with its samplers
    other.__dict__.update(dataset=dataset, _iterator=None)  # a DataLoader refuses to be set these
    return other, dataset


class CachedDataset(Dataset[Any]):
    """What `cached` returns; attributes that it lacks are those of the dataset.

    Worker processes get a copy, which uses the same cache.
    """

    def __init__(self, dataset: Dataset[Any], config: Cache, key: str = "") -> None:
        if find_spec("lmdb") is None:
            raise ModelError(
                "data.cache keeps samples in LMDB, which is not installed; pip install "
                "'slipstream[cache]'"
            )
        if not isinstance(dataset, Sized):
            raise ModelError(
                f"data.cache asks a dataset for samples by their index, and "
                f"{type(dataset).__name__} has no length; leave data.cache out"
            )
        if hasattr(dataset, "set_epoch"):
            raise ModelError(
                f"data.cache: {type(dataset).__name__} has set_epoch, so its samples change with "
                "the epoch; keep what it reads with slipstream.data.cache.cached(), or leave "
                "data.cache out"
            )
        if "/" in key:
            raise ModelError(f"data.cache: key {key!r}; allowed: a name without /")
        self._dataset: Any = dataset
        self._limit = int(config.gigabytes * 2**30)
        self._root = _root(config)
        # A larger limit would grow the file under those that have it open.
        self._path = self._root / f"{key or fingerprint(dataset)}-{_boot()}-{self._limit >> 20}M"
        self._store: _Store | None = None
        self._closed = False
        self._open()
        self._end = weakref.finalize(self, _leave, self._path, self._root, os.getpid())

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        if self._closed or not isinstance(index, int | str | np.integer):
            return self._dataset[index]
        number = index if isinstance(index, str) else int(index)
        store, name = self._open(), repr(number).encode()
        if len(name) > LONGEST_NAME:
            name = hashlib.sha256(name).digest()
        kept = store.get(name)
        if kept is not None:
            return pickle.loads(kept)
        sample = self._dataset[index]
        store.put(name, sample)
        return sample

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle ask for these before __init__ has run
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __copy__(self) -> CachedDataset:
        return self  # one user of its store

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None, "_end": None}

    def close(self) -> None:
        """Leave the cache: from now on samples are read each time. In memory the last process
        removes what is kept. close() is idempotent."""
        self._end()
        self._store, self._closed = None, True

    def report_rows(self) -> list[Row]:
        """How many samples are kept, and where."""
        if self._store is None:
            return [Row("cache", "closed", "")]
        full = "; it is full: the others are read each time" if self._store.is_full else ""
        value = f"{self._store.count} of {len(self)} samples"
        return [Row("cache", value, f"in {self._root}{full}")]

    def _open(self) -> _Store:
        if self._store is None or self._store.pid != os.getpid():
            self._store = _Store.of(self._path, self._limit)
        return self._store


_stores: dict[Path, _Store] = {}
"""Those of this process: LMDB allows one for each file."""


def _leave(path: Path, root: Path, pid: int) -> None:
    """One user of a store less."""
    store = _stores.get(path)
    if store is not None and store.pid == pid == os.getpid():
        store.leave(remove=root.is_relative_to(MEMORY))


class _Store:
    """The samples in one folder, as this process sees them."""

    @classmethod
    def of(cls, path: Path, limit: int) -> _Store:
        """The one of this process, which gets one more user."""
        store = _stores.get(path)
        if store is not None and store.pid != os.getpid():  # forked: its locks are the parent's
            store._samples.close()
            store = None
        if store is None:
            store = _stores[path] = cls(path, limit)
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

    def leave(self, remove: bool) -> None:
        """One user less; the last one closes it."""
        self._users -= 1
        if self._users:
            return
        del _stores[self._path]
        self._samples.close()
        if not remove:
            self._lock.close()
            return
        with _alone_in(self._path.parent):
            _remove_unused(self._path, self._lock)


class _Pickler(pickle.Pickler):
    """Tensors by their own values: torch's pickle keeps the whole storage of a view."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.requires_grad or value.device.type != "cpu":
            return NotImplemented
        if value.layout is not torch.strided or value.is_quantized or value.is_conj():
            return NotImplemented
        if value.dtype not in _IN_NUMPY | _NOT_IN_NUMPY:
            return NotImplemented
        values = value.contiguous()
        if value.dtype in _NOT_IN_NUMPY:
            values = values.view(-1).view(torch.uint8)
        return _tensor, (values.numpy().copy(), value.dtype, value.shape)


_NOT_IN_NUMPY = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
_IN_NUMPY = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip


def _tensor(values: npt.NDArray[Any], dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    found = torch.from_numpy(values)
    return found if found.dtype == dtype else found.view(dtype).view(shape)


def pickled(sample: Any) -> bytes:
    """A sample as bytes; equal samples give equal bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(sample)
    return buffer.getvalue()


def fingerprint(dataset: Any) -> str:
    """A name for what a dataset gives: its class, its length and a few of its samples.

    Raises:
        ModelError: it gives different samples for the same index, or none.
    """
    size, kind = len(dataset), type(dataset)
    dataset = copy.copy(dataset)  # a file that it opens when first read from is not the workers'
    if not size:
        raise ModelError(f"data.cache: {kind.__qualname__} has no samples")
    digest = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__} {size}".encode())
    for index in sorted({size * part // LOOKED_AT for part in range(LOOKED_AT)}):
        once, again = (pickled(dataset[index]) for _ in range(2))
        if once != again:
            raise ModelError(
                f"data.cache: {kind.__qualname__} gives another sample {index} each time, so it "
                "draws random numbers; keep what it reads with slipstream.data.cache.cached(), and "
                "draw from that"
            )
        digest.update(once)
    return f"{kind.__qualname__}-{digest.hexdigest()[:16]}"


def _root(config: Cache) -> Path:
    if config.folder is not None:
        return Path(config.folder) / FOLDER
    parent = MEMORY if config.to == "memory" else Path(tempfile.gettempdir())
    return parent / f"{FOLDER}-{os.getuid()}"


def _boot() -> str:
    """Tells this boot of the machine from others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


@contextmanager
def _alone_in(root: Path) -> Iterator[None]:
    """No other process opens or removes a cache meanwhile. Makes the folder, for this user alone:
    what is kept is code to whoever reads it.

    Raises:
        PermissionError: it is another user's.
    """
    while True:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.stat().st_uid != os.getuid():
            raise PermissionError(f"{root} belongs to another user; give another data.cache.folder")
        lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if root.exists() and os.stat(lock).st_ino == root.stat().st_ino:
                yield
                if not any(root.iterdir()):
                    root.rmdir()
                return
        finally:
            os.close(lock)


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
