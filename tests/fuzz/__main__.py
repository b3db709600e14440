"""Damage as many files as are asked for, of all kinds; print what became of them.

python -m tests.fuzz 10000
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random

from tests.fuzz.kinds import KINDS, Crash
from tests.fuzz.outcome import tried

COLUMNS = ("refused", "refused without a place", "accepted", "crash")


def main(count: int, seed: int, names: list[str]) -> int:
    """Return how many files crashed a reader, or were refused without a place."""
    bad, total = 0, Counter[str]()
    kinds = [kind for kind in KINDS if not names or kind.name in names]
    print(f"{'kind':12}{'files':>8}" + "".join(f"{c:>25}" for c in COLUMNS) + f"{'seconds':>10}")
    for kind in kinds:
        with tempfile.TemporaryDirectory() as root:
            folder, good = Path(root, "bad"), Path(root, "good")
            folder.mkdir()
            good.mkdir()
            made, found, began = kind(good), Counter[str](), time.monotonic()
            for number in range(count // len(kinds)):
                at = f"{seed}/{kind.name}/{number}"
                try:
                    outcome, words = tried(made, Random(at), folder)
                except Crash as error:
                    outcome, words = "crash", str(error)
                    if found["crash"] < 5:
                        traceback.print_exception(error.__cause__ or error, limit=-3)
                found[outcome] += 1
                if outcome not in ("refused", "accepted") and found[outcome] < 8:
                    print(f"{at}: {outcome}: {words}", file=sys.stderr)
                    keep = Path(tempfile.gettempdir(), "fuzz-" + at.replace("/", "-"))
                    if (folder / f"file{made.suffixes[0]}").exists():
                        shutil.copy(folder / f"file{made.suffixes[0]}", keep)
            total += found
            bad += found["crash"] + found["refused without a place"]
            _row(kind.name, found, time.monotonic() - began)
    _row("all", total, 0.0)
    return bad


def _row(name: str, found: Counter[str], seconds: float) -> None:
    cells = "".join(f"{found[column]:>25}" for column in COLUMNS)
    print(f"{name:12}{found.total():>8}{cells}{seconds:>10.0f}", flush=True)


if __name__ == "__main__":
    number, *others = sys.argv[1:]
    seed = int(others.pop(0)) if others and others[0].isdecimal() else 0
    sys.exit(main(int(number), seed, others) > 0)
