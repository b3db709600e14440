"""Result files are written as a whole: who reads finds the old content or the new, never a part."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from zlib import crc32


def write_whole(path: str | Path, content: bytes | str, *, durable: bool = True) -> None:
    """Write a file; text in UTF-8. It keeps its permissions, and a link its target.

    The content goes to another file of the same folder first, which then takes the place of this
    one; those that killed processes have left of it are removed, where the file system has locks. A
    device or a pipe is written to as it is.

    Args:
        durable: also after a crash of the machine the old content or the new one is there.

    Raises:
        OSError: it cannot be written; the old content is still there.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     write_whole(f"{folder}/a.txt", "new")
        ...     [path.name for path in Path(folder).iterdir()]
        ['a.txt']
    """
    with whole_file(path, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole_file(path: str | Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Like `write_whole`, for content that is written piece by piece; an error leaves the old
    content."""
    target = Path(os.path.realpath(path))
    mode = _mode(target)
    if mode is not None and not stat.S_ISREG(mode):
        with target.open("wb") as opened:
            yield opened
        return
    _remove_left(target)
    part, made = _new_part(target)
    try:
        with made as opened:
            if mode is not None:
                os.fchmod(opened.fileno(), stat.S_IMODE(mode))
            yield opened
            opened.flush()
            if durable:
                os.fsync(opened.fileno())
        part.replace(target)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def _prefix(target: Path) -> str:
    """The beginning of the names of a file's parts: a checksum, as its own name may already be as
    long as names can be."""
    return f".slipstream-{crc32(os.fsencode(target.name)):08x}-"


def _new_part(target: Path) -> tuple[Path, IO[bytes]]:
    """A file that is locked as long as it is written."""
    while True:
        part = target.with_name(f"{_prefix(target)}{secrets.token_hex(8)}.part")
        opened = part.open("xb")
        with suppress(OSError):  # of a file system without locks
            fcntl.flock(opened, fcntl.LOCK_EX)
        if part.exists():  # not by its links, which some file systems do not count
            return part, opened
        opened.close()  # removed before it was locked


def _remove_left(target: Path) -> None:
    """Remove what is not locked: whoever has written it was killed."""
    for left in target.parent.glob(f"{_prefix(target)}*.part"):
        with suppress(OSError), left.open("rb") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def _mode(path: Path) -> int | None:
    """Kind and permissions of a file; None: there is none."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
