"""python -m tests.conformance [--write] [--rows sharded,flat] [--columns EMA]

With ``--write`` the other rows and columns of the page stay as they were.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.conformance.cell import Verdict
from tests.conformance.habit import Habit, all_habits
from tests.conformance.page import PAGE, read, render
from tests.conformance.rows import Outcomes, every, run_matrix
from tests.conformance.techniques import TECHNIQUES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/conformance.md")
    parser.add_argument("--rows", default="", help="parts of names, with commas between them")
    parser.add_argument("--columns", default="")
    parser.add_argument("--pools", type=int, default=3)
    parser.add_argument(
        "--keep", help="a file to which each row is added; rows that it has are not run again"
    )
    parser.add_argument("-v", action="store_true", help="print every cell")
    given = parser.parse_args()

    def chosen(name: str, parts: str) -> bool:
        return any(part in name for part in parts.split(","))

    habits = [h for h in all_habits() if chosen(h.name, given.columns)]
    kept = kept_rows(given.keep, [habit.name for habit in habits])
    wanted = [t for t in TECHNIQUES if chosen(t.name, given.rows)]
    start = time.monotonic()

    def keep(name: str, row: dict[str, Verdict]) -> None:
        if given.keep:
            with open(given.keep, "a") as file:
                file.write(json.dumps([name, row]) + "\n")

    missing = [t for t in wanted if t.name not in kept]
    outcomes = kept | run_matrix(missing, habits, given.pools, keep)
    outcomes = {t.name: outcomes[t.name] for t in wanted}
    lines = []
    for technique, habit, verdict in every(outcomes):
        if verdict.outcome == "wrong":
            lines.append(f"- **{technique}** | {habit} | {verdict.text}")
        if given.v:
            print(f"{technique:24} | {habit:50} | {verdict.outcome:10} | {verdict.text[:160]}")
    counts = Counter(verdict.outcome for _, _, verdict in every(outcomes))
    print("\n".join(lines))
    if given.write:
        PAGE.write_text(render(with_the_rest(outcomes, habits), all_habits()))
    print(f"{dict(counts)} in {time.monotonic() - start:.0f} s")


def with_the_rest(outcomes: Outcomes, habits: Sequence[Habit]) -> Outcomes:
    """The rows of the page, where these cells take the place of those that were there."""
    others = [habit for habit in all_habits() if habit not in habits]
    before, names = read(others), {habit.name for habit in all_habits()}
    whole = {t.name: before.get(t.name, {}) | outcomes.get(t.name, {}) for t in TECHNIQUES}
    return {name: row for name, row in whole.items() if names <= row.keys()}


def kept_rows(file: str | None, habits: list[str]) -> Outcomes:
    """The rows of a file that have all of these habits, the newest of each name."""
    if not file or not Path(file).exists():
        return {}
    rows = map(json.loads, Path(file).read_text().splitlines())
    whole = {name: row for name, row in rows if row.keys() >= {*habits}}
    return {n: {h: Verdict(*row[h]) for h in habits} for n, row in whole.items()}


if __name__ == "__main__":
    main()
