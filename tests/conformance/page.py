"""docs/conformance.md: the matrix as tables, one for each section of habits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase

from tests.conformance.cell import Verdict
from tests.conformance.habit import SECTIONS, Habit
from tests.conformance.rows import Outcomes, every
from tests.conformance.techniques import TECHNIQUES

PAGE = Path(__file__).parents[2] / "docs/conformance.md"
COMMAND = "python -m tests.conformance --write"

TITLES = {
    "state": "State of the optimizer, groups",
    "parameters": "Parameters",
    "copies": "Averages and copies",
    "autograd": "Hooks, derivatives, modes",
    "updates": "Between two updates",
    "windows": "Windows of accumulation",
    "optimizers": "Optimizers, schedules, scales",
    "loading": "Loaders",
    "sessions": "Sessions",
    "faults": "Exceptions that a script catches, to go on",
}

HEAD = """\
# Conformance: every technique under every habit

Each technique was trained on two ranks beside each habit of users below, three or four updates of a
tiny model on a CPU, and compared with plain torch in one process on the batches of all ranks: the
parameters, the buffers and what the habit looks at. `{command}`
makes this page; the suite runs some of its rows and fails where a cell of theirs is wrong.
The same for scripts of other frameworks: [conformance of the adapters](adapters-conformance.md).

- `=` **equal**: within what the technique promises. Exact ones to {exact}, as far as the order of
  sums goes in fp32; lossy ones within the bound beside their name, a part of the way that
  parameters have gone.
- `R1` **refused**: an error of slipstream on every rank, before the first wrong number. The
  [list of errors](#errors) has its words.
- `a` **not applicable**: declared beforehand, [with the reason](#not-applicable).
- **X** **wrong**: known, and still to be mended.

{total} cells: {counts}. Techniques whose rows were not run whole yet: {open}.
"""


def render(outcomes: Outcomes, habits: Sequence[Habit]) -> str:
    """The page of these rows; techniques without one are named at its head."""
    counts = Counter(verdict.outcome for _, _, verdict in every(outcomes))
    order = ("equal", "refused", "not applicable", "wrong")
    still_open = ", ".join(t.name for t in TECHNIQUES if t.name not in outcomes) or "none"
    words = ", ".join(f"{counts[outcome]} {outcome}" for outcome in order)
    total = sum(counts.values())
    head = HEAD.format(command=COMMAND, exact="2e-5", total=total, counts=words, open=still_open)
    errors, reasons = _Notes("R"), _Notes("")
    parts = [head, *(_section(s, outcomes, habits, errors, reasons) for s in SECTIONS)]
    parts.append("## Errors\n\n" + errors.listed())
    parts.append("## Not applicable\n\n" + reasons.listed())
    return "\n".join(part.rstrip() + "\n" for part in parts)


def read(habits: Sequence[Habit]) -> Outcomes:
    """The rows of the page as it is, the inverse of `render`; of these habits."""
    texts = dict(re.findall(r"^- `(\w+)` (.*)$", PAGE.read_text(), re.M))
    shown = {t.name if t.bound is None else f"{t.name} {t.bound:.0%}": t.name for t in TECHNIQUES}
    found: dict[str, dict[str, Verdict]] = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        numbered = re.findall(r"^\d+\. (.*)$", part, re.M)
        for line in re.findall(r"^\| (.*) \|$", part, re.M):
            name, *marks = map(str.strip, line.split(" | "))
            if name in shown and len(marks) == len(numbered):
                row = found.setdefault(shown[name], {})
                row |= {h: _verdict(m, texts) for h, m in zip(numbered, marks, strict=True)}
    names = {habit.name for habit in habits}
    return {name: row for name, row in found.items() if names <= row.keys()}


def _verdict(mark: str, texts: Mapping[str, str]) -> Verdict:
    text = texts.get(mark, "").replace("\\|", "|").replace("\\<", "<")
    kinds = {"=": "equal", "**X**": "wrong"}
    return Verdict(kinds.get(mark, "refused" if mark[0] == "R" else "not applicable"), text)


class _Notes:
    """Texts with numbers or letters, in the order in which they come up."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._texts = prefix, dict[str, str]()

    def mark(self, text: str) -> str:
        count = len(self._texts)
        new = f"{self._prefix}{count + 1}" if self._prefix else ascii_lowercase[count]
        return self._texts.setdefault(text, new)

    def listed(self) -> str:
        return "".join(f"- `{mark}` {text}\n" for text, mark in self._texts.items())


def _section(
    section: str, outcomes: Outcomes, habits: Sequence[Habit], errors: _Notes, reasons: _Notes
) -> str:
    inside = [habit for habit in habits if habit.section == section]
    lines = [f"## {TITLES[section]}", ""]
    lines += [f"{number}. {habit.name}" for number, habit in enumerate(inside, 1)]
    shown = {t.name: t.name if t.bound is None else f"{t.name} {t.bound:.0%}" for t in TECHNIQUES}
    width = max(map(len, shown.values()))
    cells = [str(number) for number in range(1, len(inside) + 1)]
    lines += ["", _row("technique".ljust(width), cells), _row("-" * width, ["---"] * len(inside))]
    for name, row in outcomes.items():
        marks = [_mark(row[habit.name], errors, reasons) for habit in inside]
        lines.append(_row(shown[name].ljust(width), marks))
    return "\n".join(lines) + "\n"


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | " + " | ".join(cell.ljust(3) for cell in cells) + " |"


def _mark(verdict: Verdict, errors: _Notes, reasons: _Notes) -> str:
    if verdict.outcome == "equal":
        return "="
    if verdict.outcome == "refused":
        return errors.mark(words_of(verdict.text))
    if verdict.outcome == "not applicable":
        return reasons.mark(verdict.text)
    return "**X**"


def words_of(text: str) -> str:
    """An error's words on a page: one line, nothing that differs from run to run."""
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")
    text = re.sub(r"/tmp/\S+", "/tmp/...", text)
    text = re.sub(r"rank \d of", "rank 0 of", text)  # of whichever rank it was
    return re.sub(r"0x[0-9a-f]+", "0x...", text)
