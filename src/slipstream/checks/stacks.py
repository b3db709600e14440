"""The places of threads: their stacks, and the line of the user's script.

Of this process, and of others, whose frames somebody has read (``dumps``).
"""

from __future__ import annotations

import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_PACKAGE = str(Path(__file__).parents[1])
_SESSION = str(Path(__file__).parents[1] / "session" / "session.py")
_OTHERS = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))
_PYTHON = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3\.\d+/|/debugpy/|/helpers/pydev/")
"""Of any interpreter, as that of another process may be another one; debuggers of editors, too."""
_EXCHANGING = ("/torch/distributed/", f"{_PACKAGE}/transport/", f"{_PACKAGE}/parallel/dims.py")
_LOADING = ("/torch/utils/data/", f"{_PACKAGE}/data/")
_ASKING = re.compile(r"/python3\.\d+t?/(pdb|bdb|code)\.py$|/IPython/|/pydevd\.py$")
"""Files of debuggers and consoles, which wait for a person where the script has called them; where
they have called the script, they run it."""

INNERMOST = 6
"""Frames among which an exchange is found: FSDP's outer ones are there in a forward, too."""
DEPTH = 64
"""Frames of a stack that are kept, the innermost ones."""


class Frame(NamedTuple):
    """A call of a stack: the file of its code, the line it is at, and the function's name."""

    file: str
    line: int
    name: str


class CallSite(NamedTuple):
    """The place of the thread that trains, mostly the main one.

    Attributes:
        line: of the user's script: ``train.py:41 in load``; empty: in none.
        verb: of the session that it has called: ``backward``; empty: none.
        exchanging: whether it is in an exchange, of slipstream or the script's own.
        loading: whether it asks for data.
        asking: whether it waits for a person, in a debugger.
        key: differs where the place does.
    """

    line: str
    verb: str
    exchanging: bool
    loading: bool
    asking: bool
    key: int


def main_place(thread: threading.Thread | None = None) -> CallSite:
    """Look where the main thread is now, or another one."""
    looked_at = thread or threading.main_thread()
    return place_of(_frames(sys._current_frames().get(looked_at.ident or 0)))


def place_of(frames: Iterable[Frame]) -> CallSite:
    """Find where a thread is, from its frames, the innermost first."""
    line = verb = ""
    exchanging = loading = asking = False
    key = 0
    for depth, frame in enumerate(frames):
        file = frame.file
        key = hash((key, frame))
        if depth < INNERMOST:
            exchanging = exchanging or any(part in file for part in _EXCHANGING)
        loading = loading or any(part in file for part in _LOADING)
        asking = asking or (not line and _ASKING.search(file) is not None)
        if file == _SESSION:
            verb = frame.name
        if not line and is_script(file):
            line = f"{short(file)}:{frame.line} in {frame.name}"
    return CallSite(line, verb, exchanging, loading, asking, key)


def all_stacks() -> dict[str, list[str]]:
    """The stacks of all threads by name, the innermost frame last, with their lines of source."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {}
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        entries = traceback.extract_stack(frame)[-DEPTH:]
        name = names.get(ident, f"thread {ident}")  # of a thread that Python has not made
        stacks[name] = [shown(Frame(e.filename, e.lineno or 0, e.name), e.line) for e in entries]
    return stacks


def shown(frame: Frame, source: str | None) -> str:
    """A frame as a line of a stack, with its line of source."""
    return f"{short(frame.file)}:{frame.line} in {frame.name}: {source}"


def is_script(file: str) -> bool:
    """Whether code is the user's: not Python's, slipstream's, torch's or of another package."""
    return not file.startswith((_PACKAGE, "<", *_OTHERS)) and not _PYTHON.search(file)


def short(file: str) -> str:
    """The end of a path: enough to find it."""
    return "/".join(Path(file).parts[-1 if is_script(file) else -3 :])


def _frames(frame: FrameType | None) -> Iterator[Frame]:
    while frame is not None:
        yield Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
