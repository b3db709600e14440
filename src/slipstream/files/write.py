"""Result files are written as a whole: who reads finds the old content or the new, never a part."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path


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
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    mode = _mode(target)
    if mode is not None and not stat.S_ISREG(mode):
        target.write_bytes(data)
        return
    part = target.with_name(f".slipstream-{secrets.token_hex(8)}.part")
    try:
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(file, "wb") as opened:
            if mode is not None:
                os.fchmod(file, stat.S_IMODE(mode))
            opened.write(data)
            opened.flush()
            if durable:
                os.fsync(file)
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
