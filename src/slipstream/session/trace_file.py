"""Files of traces: of two sessions that are open at a time, as a GAN has them, none overwrites that
of the other; and a word where none is written."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from weakref import WeakKeyDictionary

_written: WeakKeyDictionary[object, set[Path]] = WeakKeyDictionary()
"""By tracer of an open session: the files that it has written."""
_taken: WeakKeyDictionary[object, set[Path]] = WeakKeyDictionary()
"""By tracer of an open session: those, and what others have written that were open meanwhile."""


def begin(tracer: object) -> None:
    """Keep apart what this tracer writes and what others have written, or will, that are there."""
    _taken[tracer] = set[Path]().union(*_written.values())
    _written[tracer] = set()


def end(tracer: object) -> None:
    """The session of this tracer has ended."""
    _written.pop(tracer, None)
    _taken.pop(tracer, None)


def new_path(tracer: object, folder: Path) -> Path:
    """The next name in a folder: ``trace.json``, then ``trace-2.json``."""
    names = (f"trace-{n}.json" if n > 1 else "trace.json" for n in count(1))
    path = next(folder / name for name in names if (folder / name).absolute() not in _taken[tracer])
    _written[tracer].add(path.absolute())
    for taken in _taken.values():
        taken.add(path.absolute())
    return path


def say_lost(rank: int) -> None:
    """Say, on one rank, that a trace was begun and is not written."""
    if rank == 0:
        print(
            "slipstream: no trace is written: the run has ended before trace.steps updates were "
            "recorded. Call session.close() on all ranks, before dist.destroy_process_group(); "
            "after an error ranks do not gather it",
            file=sys.stderr,
        )
