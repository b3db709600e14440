"""The commands of docs/tutorial.md, one after the other, and what the terminal said.

    python -m benchmarks.tutorial --json benchmarks/results/tutorial.json

Script and strategy are those of the page. Each command sees what the ones before it have written.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from benchmarks.record import finish

PAGE = Path(__file__).parents[1] / "docs/tutorial.md"
HOSTS = "--nodes 4 --rate 300mbit"
TRACE = "slipstream-trace/trace.json"
COMMANDS = {
    "demo": "slipstream demo",
    "launch": "slipstream launch --nproc 2 train.py",
    "trace": f"slipstream testbed run {HOSTS} --strategy trace.yaml -- train.py",
    "summary": f"slipstream trace summary {TRACE}",
    "advise": f"slipstream trace advise {TRACE}",
    "doctor": f"slipstream doctor network {HOSTS}",
    "plan": f"slipstream plan --trace {TRACE} --cluster cluster.yaml --allow-lossy -o best.yaml",
    "best": "cat best.yaml",
    "best-run": f"slipstream testbed run {HOSTS} --strategy best.yaml -- train.py",
    "tune": f"slipstream tune {HOSTS} --budget 10m --allow-lossy -o tuned.yaml -- train.py",
}
"""By the name of the passage that shows it."""


def files(page: str) -> dict[str, str]:
    """The files that the page shows: its only block of Python, and its only one of YAML."""
    blocks = {kind: re.findall(rf"^```{kind}\n(.*?)^```", page, re.M | re.S) for kind in KINDS}
    return {name: blocks[kind][0] for kind, name in KINDS.items() if len(blocks[kind]) == 1}


KINDS = {"python": "train.py", "yaml": "trace.yaml"}


def said(command: str, folder: Path) -> str:
    """What it prints to the terminal, without what it draws over.

    Raises:
        SystemExit: it fails.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "COLUMNS": "80", "PATH": path}
    run = subprocess.run(
        command, shell=True, cwd=folder, env=environ, capture_output=True, text=True
    )
    if run.returncode:
        raise SystemExit(f"{command}: code {run.returncode}\n{run.stdout}{run.stderr}")
    lines = (line.rstrip() for line in run.stdout.replace(str(folder), ".").splitlines())
    return "\n".join(lines).strip("\n")


def main() -> None:
    """Every command in a folder of its own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="also write what was said to this file")
    args = parser.parse_args()
    console = Console(stderr=True)
    steps: dict[str, dict[str, str | float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in files(PAGE.read_text()).items():
            (folder / file).write_text(text)
        for step, command in COMMANDS.items():
            begin = time.monotonic()
            console.print(f"$ {command}", highlight=False)
            steps[step] = {"command": command, "said": said(command, folder)}
            steps[step]["seconds"] = round(time.monotonic() - begin, 1)
    finish(args.json, "tutorial", {"steps": steps})


if __name__ == "__main__":
    main()
