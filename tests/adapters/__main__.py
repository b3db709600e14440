"""python -m tests.adapters [--frameworks Trainer] [--habits clip] [--write]: habits with adapters.

With ``--write`` the rows of the page that were not run stay as they were.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import yaml

from tests.adapters.page import PAGE, read, render
from tests.adapters.verdicts import verdicts_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frameworks", default="", help="parts of names, with commas between")
    parser.add_argument("--habits", default="", help="parts of names, with commas between")
    parser.add_argument("--strategy", default="{}", help="YAML; what is apart is then printed")
    parser.add_argument("--write", action="store_true", help="into the page")
    given = parser.parse_args()
    strategy = yaml.safe_load(given.strategy)
    if given.write and strategy:
        parser.error("the page is of the defaults: leave --strategy or --write out")
    found = {}
    with tempfile.TemporaryDirectory(prefix="habits-") as folder:
        for framework, name, verdict in verdicts_of(
            given.frameworks, given.habits, Path(folder), strategy
        ):
            found[framework, name] = verdict
            print(f"{framework:10} | {name:58} | {verdict.outcome:8} | {verdict.text}", flush=True)
            if given.write:  # at once: a run that is broken off keeps what it found
                PAGE.write_text(render(read() | found))


if __name__ == "__main__":
    main()
