"""Hand over what a benchmark found: print it, and write it to a file with day and commit."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

from benchmarks.result import Entry
from benchmarks.tables import TABLES


def arguments(doc: str, rate: str = "1gbit") -> argparse.ArgumentParser:
    """Make the parser of a benchmark on emulated hosts; ``doc``: of its module."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=4, help="emulated hosts, or ranks")
    parser.add_argument("--rate", default=rate)
    parser.add_argument("--json", help="also write the figures to this file")
    return parser


def finish(path: str | None, benchmark: str, found: Entry) -> None:
    """Print what was found; with a path write it there, too.

    Args:
        path: a JSON file; its folder is made.
        benchmark: the module that was run.
        found: plain values.
    """
    head = {
        "benchmark": benchmark,
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in ("torch", "slipstream")},
        "commit": commit(),
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]]),
    }
    entry = {**head, **found}
    TABLES[entry["benchmark"]](entry).show()
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(entry, indent=1) + "\n")


def commit() -> str:
    """The commit of the code that runs; a ``+`` says that it was changed since."""
    git = ["git", "-C", str(Path(__file__).parent)]
    head, changed = (
        subprocess.run([*git, *command.split()], capture_output=True, text=True).stdout.strip()
        for command in ("rev-parse --short HEAD", "status --porcelain -- ../src .")
    )
    return head + "+" * bool(changed)
