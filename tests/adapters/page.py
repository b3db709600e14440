"""docs/adapters-conformance.md: habits of users beside the adapters, as a table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.adapters.verdicts import Verdict, habits
from tests.conformance.page import words_of

PAGE = Path(__file__).parents[2] / "docs/adapters-conformance.md"
COMMAND = "python -m tests.adapters --write"
FRAMEWORKS = ("Accelerate", "Trainer", "Lightning", "Fabric")

Verdicts = dict[tuple[str, str], Verdict]
"""By framework and habit."""

HEAD = """\
# Conformance of the adapters: what people do beside them

Each habit is a script of a framework, run on two ranks of a CPU by the framework alone, under its
DistributedDataParallel, and with the [adapter](adapters.md) and no setting: losses, norms, metrics,
rates, parameters and what the habit looks at. The comparison rounds nothing. `{command}`
makes this page, and the suite runs some of its cells again. What each technique does beside such
habits is in [conformance](conformance.md).

- `=` **equal**, bit for bit.
- `R1` **refused**: an error on every rank, before the first wrong number. The
  [list of errors](#errors) has its words.
- `F1` **fails** [with the framework alone](#fails-with-the-framework-alone), too.
- nothing: it is no habit with this framework, or was not tried.

{total} cells: {counts}.

The Trainer and Lightning evaluate the module inside DDP's wrapper: each rank with the running
statistics (batch norm) of its own last batch. With a session all ranks have the first rank's, as
where a script calls the wrapper. The comparison gives the Trainer's ranks the first one's, too.

"""


def render(verdicts: Mapping[tuple[str, str], Verdict]) -> str:
    """The page; habits of several frameworks come first, those of one by name."""
    counts = Counter(verdict.outcome for verdict in verdicts.values())
    words = ", ".join(f"{counts[o]} {o}" for o in ("equal", "refused", "fails", "wrong"))
    lines = [HEAD.format(command=COMMAND, total=len(verdicts), counts=words)]
    lines += ["| habit | " + " | ".join(FRAMEWORKS) + " |\n", "| --- |" + " --- |" * 4 + "\n"]
    notes: dict[str, dict[str, str]] = {"R": {}, "F": {}}
    for name in _names():
        cells = [verdicts.get((framework, name)) for framework in FRAMEWORKS]
        marks = " | ".join("" if cell is None else _mark(cell, notes) for cell in cells)
        lines.append(f"| {name} | {marks} |\n")
    lines.append("\n## Errors\n\n")
    lines += [f"- `{mark}` {text}\n" for text, mark in notes["R"].items()]
    lines.append("\n## Fails with the framework alone\n\n")
    lines += [f"- `{mark}` {text}\n" for text, mark in notes["F"].items()]
    return "".join(lines)


def read() -> Verdicts:
    """The verdicts of the page as it is, the inverse of `render`."""
    page = PAGE.read_text() if PAGE.exists() else ""
    texts = dict(re.findall(r"^- `([RF]\d+)` (.*)$", page, re.M))
    found: Verdicts = {}
    for line in re.findall(r"^\| (.*) \|$", page, re.M):
        name, *marks = (cell.strip() for cell in re.split(r" \|(?: |$)", line))
        for framework, mark in zip(FRAMEWORKS, marks, strict=False):
            if mark and name in habits().get(framework, {}):
                kind = {"=": "equal", "R": "refused", "F": "fails"}.get(mark[0], "wrong")
                found[framework, name] = Verdict(kind, texts.get(mark, ""))
    return found


def _names() -> Iterator[str]:
    of = habits()
    names = [*dict.fromkeys(name for framework in FRAMEWORKS for name in of[framework])]
    yield from sorted(names, key=lambda name: (-sum(name in own for own in of.values()), name))


def _mark(verdict: Verdict, notes: dict[str, dict[str, str]]) -> str:
    if verdict.outcome in ("equal", "wrong"):
        return "=" if verdict.outcome == "equal" else "**X**"
    kind = "R" if verdict.outcome == "refused" else "F"
    own = notes[kind]
    return own.setdefault(words_of(verdict.text), f"{kind}{len(own) + 1}")
