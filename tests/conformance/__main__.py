"""python -m tests.conformance [--write] [--rows sharded,flat] [--columns EMA]"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter

from tests.conformance.cell import Verdict
from tests.conformance.habit import all_habits
from tests.conformance.page import PAGE, render
from tests.conformance.rows import every, run_matrix
from tests.conformance.techniques import TECHNIQUES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/conformance.md")
    parser.add_argument("--rows", default="", help="parts of names, with commas between them")
    parser.add_argument("--columns", default="")
    parser.add_argument("--pools", type=int, default=3)
    parser.add_argument("--keep", help="a file to which the cells of each row are added")
    parser.add_argument("-v", action="store_true", help="print every cell")
    given = parser.parse_args()

    def chosen(name: str, parts: str) -> bool:
        return any(part in name for part in parts.split(","))

    techniques = [t for t in TECHNIQUES if chosen(t.name, given.rows)]
    habits = [h for h in all_habits() if chosen(h.name, given.columns)]
    start = time.monotonic()

    def keep(name: str, row: dict[str, Verdict]) -> None:
        if given.keep:
            with open(given.keep, "a") as file:
                file.write(json.dumps([name, row]) + "\n")

    outcomes = run_matrix(techniques, habits, given.pools, keep)
    lines = []
    for technique, habit, verdict in every(outcomes):
        if verdict.outcome == "wrong":
            lines.append(f"- **{technique}** | {habit} | {verdict.text}")
        if given.v:
            print(f"{technique:24} | {habit:50} | {verdict.outcome:10} | {verdict.text[:160]}")
    counts = Counter(verdict.outcome for _, _, verdict in every(outcomes))
    print("\n".join(lines))
    if given.write:
        PAGE.write_text(render(outcomes, habits))
    print(f"{dict(counts)} in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
