"""Files of traces: of two sessions that are open at a time, as a GAN has them, none overwrites that
of the other; and a word where none is written."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from weakref import WeakSet

_tracers: WeakSet[object] = WeakSet()
_written: set[Path] = set()  # since there was none of them


def begin(tracer: object) -> None:
    """Keep apart what this tracer writes and what others write that are there meanwhile."""
    if not _tracers:
        _written.clear()
    _tracers.add(tracer)


def end(tracer: object) -> None:
    """This tracer writes no more."""
    _tracers.discard(tracer)


def new_path(folder: Path) -> Path:
    """The next name in a folder: ``trace.json``, then ``trace-2.json``."""
    names = (f"trace-{n}.json" if n > 1 else "trace.json" for n in count(1))
    path = next(folder / name for name in names if folder / name not in _written)
    _written.add(path)
    return path


def say_lost(rank: int) -> None:
    """Say, on one rank, that a trace was begun and is not written."""
    if rank == 0:
        print(
            "slipstream: no trace is written: the run has ended before its last update "
            "(trace.steps), and without a session.close() in which all ranks gather it, before "
            "the process group is destroyed",
            file=sys.stderr,
        )
