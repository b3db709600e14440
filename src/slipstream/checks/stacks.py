"""Where the threads of this process are: their stacks, and the line of the user's script."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_PACKAGE = str(Path(__file__).parents[1])
_SESSION = str(Path(__file__).parents[1] / "session" / "session.py")
_OTHERS = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))
_EXCHANGING = ("/torch/distributed/", f"{_PACKAGE}/transport/", f"{_PACKAGE}/parallel/dims.py")
_LOADING = ("/torch/utils/data/", f"{_PACKAGE}/data/")
_ASKING = ("/pdb.py", "/bdb.py", "/code.py", "/IPython/")
"""Files of debuggers and consoles, which wait for a person."""

INNERMOST = 6
"""Frames among which an exchange is found: FSDP's outer ones are there in a forward, too."""
DEPTH = 64
"""Frames of a stack that are kept, the innermost ones."""


class Place(NamedTuple):
    """Where the main thread is.

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


def main_place() -> Place:
    """Where the main thread is now."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    line = verb = ""
    exchanging = loading = asking = False
    key = depth = 0
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        key = hash((key, frame.f_code, frame.f_lineno))
        if depth < INNERMOST:
            exchanging = exchanging or any(part in file for part in _EXCHANGING)
        loading = loading or any(part in file for part in _LOADING)
        asking = asking or file.endswith(_ASKING)
        if file == _SESSION:
            verb = name
        if not line and _is_script(file):
            line = _line(frame)
        frame, depth = frame.f_back, depth + 1
    return Place(line, verb, exchanging, loading, asking, key)


def all_stacks() -> dict[str, list[str]]:
    """The stacks of all threads by name, the innermost frame last, with their lines of source."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {}
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        entries = traceback.extract_stack(frame)[-DEPTH:]
        name = names.get(ident, f"thread {ident}")  # of a thread that Python has not made
        stacks[name] = [f"{_short(e.filename)}:{e.lineno} in {e.name}: {e.line}" for e in entries]
    return stacks


def _is_script(file: str) -> bool:
    return not file.startswith((_PACKAGE, "<", *_OTHERS)) and "site-packages" not in file


def _line(frame: FrameType) -> str:
    code = frame.f_code
    return f"{_short(code.co_filename)}:{frame.f_lineno} in {code.co_name}"


def _short(file: str) -> str:
    """The end of a path: enough to find it."""
    return "/".join(Path(file).parts[-1 if _is_script(file) else -3 :])
