"""The folder of a run's checkpoints: which are there, which are whole, and which go.

A checkpoint is written under another name and renamed when it is complete, with a manifest that
has the size and the CRC-32 of each of its files. Nothing here communicates or knows of tensors.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from zlib import crc32

from slipstream.errors import CheckpointError, warn

MANIFEST = "manifest.json"
IN_USE = "in-use"
"""A file that the process of a run has locked, and says who that is."""
VERSION = 1
ATTEMPTS = 100
"""To lock that file, where others remove it meanwhile."""
_HELD: dict[tuple[int, Path], tuple[IO[str], int]] = {}
"""Files that a process has locked, which is this one or its parent, and how many hold each."""
_NAME = re.compile(r"update-(\d{8,})(?:\.(\d+))?")
_WRITING, _REMOVED, _BROKEN = "writing-", "removed-", "broken-"
_LEFT = re.compile(rf"{_WRITING}\d{{8,}}|{_REMOVED}{_NAME.pattern}")
_PIECE = 1 << 22
"""Bytes that are read at once: zlib computes without the interpreter's lock meanwhile."""

Sums = dict[str, tuple[int, int]]
"""Size and CRC-32 of files, by name."""


class BrokenCheckpoint(CheckpointError):
    """A checkpoint that is not as it was written, and why."""


@dataclass(frozen=True)
class Folder:
    """The checkpoints of one run.

    Example:
        >>> Folder(Path("runs/a")).temporary(200).as_posix()
        'runs/a/writing-00000200'
    """

    path: Path

    def claim(self) -> IO[str] | None:
        """Keep the folder for this process, until `release`; None: its file system has no locks.

        Raises:
            CheckpointError: a process of this machine has it. Of another one there is a warning
                alone: it may be gone, which some file systems learn late.
        """
        path = self.path / IN_USE
        here = os.getpid(), path
        if here in _HELD:  # a lock is the process's: the first to close the file would drop it
            file, holders = _HELD[here]
            _HELD[here] = file, holders + 1
            return file
        for _ in range(ATTEMPTS):
            try:
                file = path.open("a+")
            except OSError:  # it can be read alone
                return None
            try:
                # of the process, not of the file: children that are forked do not hold it
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_there(file, path):
                    with suppress(OSError):  # the disk is full
                        file.truncate(0)
                        file.write(f"{_boot()}\nprocess {os.getpid()} on {platform.node()}")
                        file.flush()
                    _HELD[here] = file, 1
                    return file
                file.close()  # removed meanwhile
            except BlockingIOError:
                with file:
                    file.seek(0)
                    boot, _, who = file.read().partition("\n")
                words = (
                    f"{who or 'another process'} uses the folder {self.path} for its checkpoints"
                )
                if boot == _boot():
                    raise CheckpointError(
                        f"{words}, and two runs would spoil each other's; end it, name another "
                        "folder, or read one of them by slipstream.checkpoint.read(path)"
                    ) from None
                warn(f"{words}, or its host is gone: two runs would spoil each other's")
                return None
            except OSError:
                file.close()
                return None
        return None

    def release(self, claim: IO[str]) -> None:
        """Leave the folder to others, unless another holder in this process still uses it."""
        path = self.path / IN_USE
        _, holders = _HELD.pop((os.getpid(), path), (claim, 1))
        if holders > 1:
            _HELD[os.getpid(), path] = claim, holders - 1
            return
        with suppress(OSError):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # what a full disk has not taken
            claim.close()

    def complete(self) -> list[Path]:
        """List what has been renamed, the oldest first; whether all is whole is for `check`."""
        there = self.path.iterdir() if self.path.is_dir() else ()
        return sorted((path for path in there if _NAME.fullmatch(path.name)), key=_age)

    def temporary(self, updates: int) -> Path:
        """Name for a checkpoint that is being written; the same on all ranks."""
        return self.path / f"{_WRITING}{updates:08}"

    def commit(self, temporary: Path, updates: int, keep: int) -> Path:
        """Give a checkpoint that is complete its name, then remove all but the newest ``keep``.

        A run that counts less than the one that it goes on from, as it has fewer ranks, say, gets
        names behind those that are there.
        """
        _sync(temporary)
        there = self.complete()
        updates = max([updates, *map(updates_of, there)])
        name = f"update-{updates:08}"
        taken = [_age(path)[1] for path in there if updates_of(path) == updates]
        final = self.path / (f"{name}.{max(taken) + 1}" if taken else name)
        temporary.rename(final)
        _sync(self.path)
        for old in self.complete()[:-keep]:
            self._remove(old)
        return final

    def sweep(self) -> None:
        """Remove what a run has left that was killed while it wrote."""
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if _LEFT.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def set_aside(self, path: Path) -> None:
        """Rename one that is not whole, so that it does not count any more; its files stay."""
        other = path.with_name(_BROKEN + path.name)
        number = 1
        while other.exists():
            number += 1
            other = path.with_name(f"{_BROKEN}{path.name}-{number}")
        path.rename(other)

    def _remove(self, path: Path) -> None:
        # renamed first: one that is half removed must not be taken for one that is torn
        gone = path.with_name(_REMOVED + path.name)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def updates_of(path: Path) -> int:
    """The number of updates after which a checkpoint was made.

    Example:
        >>> updates_of(Path("runs/a/update-00000200.1"))
        200
    """
    return _age(path)[0]


def _age(path: Path) -> tuple[int, int]:
    """The updates, and which of several after so many."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def checksum(path: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file."""
    size = value = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            size, value = size + len(piece), crc32(piece, value)
    return size, value


def write_manifest(path: Path, sums: Sums, **facts: int) -> None:
    """Say what is in a checkpoint; it is on the disk when this returns.

    Raises:
        BrokenCheckpoint: a file of another rank is not there.
    """
    for name, (size, _) in sums.items():
        found = (path / name).stat().st_size if (path / name).exists() else None
        if found != size:
            raise BrokenCheckpoint(
                f"rank 0 sees {'nothing' if found is None else f'{found} bytes'} of the {size} "
                f"bytes that another rank has written to {path / name}: the folder must be on a "
                "file system that all ranks share"
            )
    with (path / MANIFEST).open("w") as file:
        json.dump({"version": VERSION, **facts, "files": sums}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> Mapping[str, int]:
    """Read the facts that `write_manifest` got.

    Raises:
        BrokenCheckpoint: it is missing or no manifest.
        OSError: it cannot be read.
    """
    facts, _ = _manifest(path)
    return facts


def check(path: Path, rank: int = 0, ranks: int = 1) -> None:
    """Compare the files of a checkpoint with its manifest; each rank does its share of them.

    Raises:
        BrokenCheckpoint: a file is missing or differs.
        OSError: one cannot be read.
    """
    _, sums = _manifest(path)
    for name in sorted(sums)[rank::ranks]:
        size, value = sums[name]
        try:
            found = checksum(path / name)
        except FileNotFoundError as error:
            raise BrokenCheckpoint(f"{name}: {error.strerror}") from error
        if found[0] != size:
            raise BrokenCheckpoint(f"{name} has {found[0]} bytes instead of {size}")
        if found[1] != value:
            raise BrokenCheckpoint(f"{name} is not what was written: another CRC-32")


def _manifest(path: Path) -> tuple[dict[str, int], Sums]:
    try:
        document = json.loads((path / MANIFEST).read_text())
        sums = {str(name): (int(a), int(b)) for name, (a, b) in document.pop("files").items()}
        facts = {str(key): int(value) for key, value in document.items()}
    except FileNotFoundError as error:
        raise BrokenCheckpoint(f"{MANIFEST}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BrokenCheckpoint(f"{MANIFEST} cannot be read: {error}") from error
    if facts.get("version") != VERSION:
        raise BrokenCheckpoint(f"{MANIFEST} has version {facts.get('version')}, not {VERSION}")
    return facts, sums


def _boot() -> str:
    """The machine, since it was started."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()


def _sync(folder: Path) -> None:
    """Put the names in a folder on the disk, where the file system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some network file systems refuse it for folders
        pass
    finally:
        os.close(handle)


def _is_there(file: IO[str], path: Path) -> bool:
    """Whether an open file is the one of that name, which nobody has removed meanwhile."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
