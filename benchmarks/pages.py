"""Write the page of results, its pictures, and the passages of README and docs that quote results.

    python -m benchmarks.pages

A passage stands between two comments, which no reader sees:

    <!-- quote: NAME -->a sentence or a table that `quotes` makes<!-- / -->
    <!-- table: FILE | columns | rows -->some columns of a table of results<!-- / -->

`tests/test_benchmarks.py` fails where one of them is not what the results say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.quotes import QUOTES, Results
from benchmarks.result import Entry, Table
from benchmarks.tables import TABLES
from benchmarks.tables.exchanges import on_accelerator
from slipstream.testbed import parse_rate

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
HEAD = """# Results

Written by `python -m benchmarks.pages` from the JSON files in this folder; those of the exchange
hold every single measurement. Two CPU cores shared by all ranks; links emulated by `slipstream
testbed`. Beside an accelerator: each layer takes its time by sleeping, as on a host whose device
computes, so cores are free for the exchange; elsewhere the ranks compute on these two cores. Peak
MiB: resident memory of a rank at most, with all of Python and torch, alone in its process. Ratios
are medians of the ratios of one round, with their quartiles: below 1 is faster.
The bound is max(compute, wire), where the wire is what a ring of all ranks must send at the link's
rate. Kendall's tau compares the order of predictions with that of measurements: 1 is the same
order, -1 the opposite one; pairs are told apart where the 95 % intervals of the two measured
medians do not overlap; "measured again" is the tau of two measurements of the same strategies.
"""
PASSAGE = re.compile(r"<!-- (quote|table): (.+?) -->.*?<!-- / -->", re.S)


def results() -> Results:
    """All results, by the names of their files."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def rendered(every: Results) -> str:
    """The page of results."""
    parts = [HEAD]
    if _coded(every):
        parts.append("![times as fast as DDP, by codec](codecs.png)")
    for entry in every.values():
        parts += [TABLES[entry["benchmark"]](entry).markdown]
        parts += [entry["note"]] if "note" in entry else []
    return "\n\n".join(part.strip() for part in parts) + "\n"


def filled(page: str, every: Results) -> str:
    """A page with its passages written anew.

    Raises:
        KeyError: a passage that nothing makes.
    """

    def passage(match: re.Match[str]) -> str:
        kind, what = match[1], match[2]
        text = QUOTES[what](every) if kind == "quote" else _table(what, every)
        block = "\n\n" if "\n" in text else ""
        return f"<!-- {kind}: {what} -->{block}{text}{block}<!-- / -->"

    return PASSAGE.sub(passage, page)


def _table(what: str, every: Results) -> str:
    """Columns, and rows whose first cells match, of the first table of a result that has them."""
    file, columns, *rest = (part.strip() for part in what.split("|"))
    pattern = "|".join(rest)
    wanted = [column.strip() for column in columns.split(";")]
    result = TABLES[every[file]["benchmark"]](every[file])
    found = [p for p in result.parts if isinstance(p, Table) and {*wanted} <= {*p.columns}]
    table = found[0]
    places: list[int] = []
    for name in wanted:  # a heading that is there twice belongs to the column before it
        known = [place for place, column in enumerate(table.columns) if column == name]
        places.append(next((place for place in known if places and place > places[-1]), known[0]))
    rows = [
        [row[place] for place in places]
        for row in table.rows
        if re.search(pattern, ", ".join(map(str, row[:3])))
    ]
    assert rows, f"{what}: no such row"
    link = f"[{result.title}](../benchmarks/results/README.md#{result.anchor})"
    return f"{Table(wanted, rows).markdown}\n\n{link}"


def speed_picture(found: list[Entry]) -> Figure:
    """How many times as fast as the best DDP: a panel a model and rate, a bar a codec or hook."""
    rates = sorted({entry["rate"] for entry in found}, key=parse_rate)
    models = sorted({entry["model"] for entry in found})
    size = (4.4 * len(models), 3.6 * len(rates) + 0.4)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    grid = figure.subplots(len(rates), len(models), squeeze=False, sharex="row")
    for axes, (rate, model) in zip(grid.flat, product(rates, models), strict=True):
        rows = [
            row
            for entry in found
            if (entry["rate"], entry["model"]) == (rate, model)
            for row in entry["rows"]
            if row["name"].startswith("torch")
            or row["name"].removeprefix("slipstream, ") in entry["codecs"]
        ]
        if not rows:
            axes.set_axis_off()
            continue
        names = [row["name"].removeprefix("slipstream, ") for row in rows]
        speeds = [1 / row["to_best_ddp"] for row in rows]
        colours = ["#2a6f97" if row["name"].startswith("slip") else "#b0b7bd" for row in rows]
        axes.axvline(1, color="black", linewidth=0.8)
        bars = axes.barh(names, speeds, color=colours)
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8, bbox=paper)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title(f"{model}, {rate}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("times as fast as DDP with its best buckets", fontsize=11)
    return figure


def _coded(every: Results) -> list[Entry]:
    """Exchanges with codecs beside torch's hooks, on links."""
    return [
        entry
        for entry in every.values()
        if entry["benchmark"] == "exchange"
        and entry.get("codecs")
        and entry["rate"] != "loopback"
        and not on_accelerator(entry)
        and any(row["name"].startswith("torch") for row in entry["rows"])
    ]


def pages() -> Mapping[Path, str]:
    """Every page that quotes results, as it is."""
    return {
        path: path.read_text() for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
    }


def main() -> None:
    """Render every result, and fill every page."""
    every = results()
    if coded := _coded(every):
        speed_picture(coded).savefig(RESULTS / "codecs.png")
    (RESULTS / "README.md").write_text(rendered(every))
    for path, page in pages().items():
        if (new := filled(page, every)) != page:
            path.write_text(new)
            print(f"{path.relative_to(ROOT)}: passages written anew")


if __name__ == "__main__":
    main()
