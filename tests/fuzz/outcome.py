"""One file, and what becomes of it."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Literal

from tests.fuzz.kinds import Crash, Kind, quietly, refusal

Outcome = Literal["refused", "refused without a place", "accepted"]
ALSO = {"refused": 0.03, "accepted": 0.2}
"""The part of the files that is given to a command, too, which takes longer."""


def tried(kind: Kind, chance: Random, folder: Path) -> tuple[Outcome, str]:
    """Damage a file, and let all read it; with the words of the refusal.

    Raises:
        Crash: a reader ended with a stack trace.
    """
    path = folder / f"file{chance.choice(kind.suffixes)}"
    if chance.random() < 0.005:
        path = folder  # no file at all
        path = folder / f"folder{chance.choice(kind.suffixes)}"
        path.mkdir(exist_ok=True)
    else:
        path.write_bytes(kind.content(chance))
    with quietly():
        words = refusal(path, lambda: kind.read(path))
        if chance.random() < ALSO["accepted" if words is None else "refused"]:
            again = refusal(path, lambda: kind.commands(path, chance))
            if words is not None and again is None and type(kind).commands is not Kind.commands:
                raise Crash(f"{path}: a command takes what is refused: {words}")
    if list(folder.glob("HACKED")) or Path("HACKED").exists():
        raise Crash(f"{path}: its code was run")
    if words is None:
        return "accepted", ""
    named = kind.names_the_place(words, path)
    return ("refused" if named else "refused without a place"), words
