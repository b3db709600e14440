"""Draw diagnoses: the verdict in a sentence, each that is not well, and a line for all that is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence

from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from slipstream.health.diagnosis import Diagnosis

FIGURES = ("links",)
"""Checks whose figures are shown even if all is well."""
STYLES = {"wrong": "bold red", "warning": "yellow", "unknown": "cyan", "ok": "green"}


def exit_code(diagnoses: Sequence[Diagnosis]) -> int:
    """Return 1 if one is wrong, else 0."""
    return int(any(found.status == "wrong" for found in diagnoses))


def as_json(diagnoses: Sequence[Diagnosis], facts: BaseModel) -> str:
    """All diagnoses, and the facts that they are about, as JSON."""
    found = [one.model_dump(mode="json") for one in diagnoses]
    return json.dumps({"diagnoses": found, "facts": facts.model_dump(mode="json")}, indent=2)


def draw(
    subject: str, diagnoses: Sequence[Diagnosis], hosts: Collection[str], *, verbose: bool
) -> Group:
    """Draw diagnoses for a terminal of 80 columns.

    Args:
        subject: what was judged, such as the name of a host.
        diagnoses: the worst first.
        hosts: all that were judged; a diagnosis says which it is about, unless it is all.
        verbose: whether those that are well are listed, too.
    """
    parts: list[RenderableType] = [Text(verdict(subject, diagnoses), style="bold")]
    well = [found for found in diagnoses if found.status == "ok"]
    for found in diagnoses:
        if found.status != "ok":
            parts += [Text(), *_drawn(found, hosts)]
    if well and verbose:
        parts += [Text(), _listed(well, hosts)]
    elif well:
        if figures := [found for found in well if found.check in FIGURES]:
            parts += [Text(), _listed(figures, hosts)]
        others = [found for found in well if found not in figures]
        names = dict.fromkeys(f.read if f.read.startswith("no ") else f.check for f in others)
        parts += [Text(), Text(f"well: {', '.join(names)}", style=STYLES["ok"])]
    return Group(*parts)


def verdict(subject: str, diagnoses: Sequence[Diagnosis]) -> str:
    """Sum up in a sentence.

    Example:
        >>> verdict("node0", [])
        'node0 is well.'
    """
    count = Counter(found.status for found in diagnoses)
    wrong, warnings, unknown = count["wrong"], count["warning"], count["unknown"]
    said = [f"{wrong} thing{'s are' if wrong > 1 else ' is'} wrong"] if wrong else []
    said += [f"{warnings} warning{'s' * (warnings > 1)}"] if warnings else []
    said += [f"{unknown} could not be checked"] if unknown else []
    if not said:
        return f"{subject} {'are' if ' ' in subject else 'is'} well."
    return (
        f"{subject}: {', '.join(said)}."
        if wrong
        else f"{subject}: nothing is wrong, {', '.join(said)}."
    )


def _drawn(found: Diagnosis, all_hosts: Collection[str]) -> list[RenderableType]:
    hosts = "" if len(all_hosts) == 1 else f" on {_named(found.hosts, all_hosts)}"
    head = Text.assemble((f"{found.status:8}", STYLES[found.status]), f" {found.check}{hosts}")
    table = Table.grid(padding=(0, 1))
    table.add_column(width=8, no_wrap=True)
    table.add_column()
    for name, text in {"read": found.read, "healthy": found.healthy, "fix": found.fix}.items():
        table.add_row(name, Text(text))
    return [head, Padding(table, (0, 0, 0, 2))]


def _listed(well: Sequence[Diagnosis], all_hosts: Collection[str]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for found in well:
        some = len(found.hosts) < len(all_hosts)
        hosts = f" ({_named(found.hosts, all_hosts)})" if some else ""
        table.add_row(Text("ok", style=STYLES["ok"]), found.check, Text(found.read + hosts))
    return table


def _named(hosts: Sequence[str], all_hosts: Collection[str]) -> str:
    """Hosts, of many the first ones and how many more.

    Example:
        >>> _named([f"node{index}" for index in range(9)], "")
        'node0, node1, node2, node3, node4 and 4 more'
    """
    if len(hosts) == len(all_hosts):
        return "all hosts"
    more = len(hosts) - 5
    return ", ".join(hosts[:5]) + (f" and {more} more" if more > 0 else "")
