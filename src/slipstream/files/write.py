"""Result files are written as a whole: who reads finds the old content or the new, never a part."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


def write_whole(path: str | Path, content: bytes | str, *, durable: bool = True) -> None:
    """Write a file; text in UTF-8. It keeps its permissions, and a link its target.

    The content goes to another file of the same folder first, which then takes the place of this
    one. A device or a pipe is written to as it is.

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
    part = target.with_name(f".slipstream-{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as opened:
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


def _mode(path: Path) -> int | None:
    """Kind and permissions of a file; None: there is none."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
