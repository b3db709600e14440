"""The HTML of the report: plots, tables and findings, complete in one file.

The page loads nothing: script and style are inside, and a content security policy forbids the rest.
All text is escaped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from slipstream.advisor.findings import Finding
from slipstream.analysis.time_unit import TimeUnit
from slipstream.report.palette import FAINT, LINE, PALETTE, PAPER, TEXT, chart_unit
from slipstream.report.plots import FONT, Figure
from slipstream.strategy.yaml import format_yaml

_MARKS = {"problem": "&#10005;", "warning": "!", "note": "i", "good": "&#10003;"}
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
)
_CONFIG = {"displayModeBar": False, "responsive": True}
_COLOURS = {"text": TEXT, "faint": FAINT, "line": LINE, "paper": PAPER}


class Html(str):
    """Text that is HTML already; all other text is escaped."""


def page(title: str, subtitle: str, cards: Iterable[tuple[str, str, str]], body: str) -> str:
    """The document; a card is a caption, a value and a remark."""
    shown = "".join(_card(*card) for card in cards)
    variables = "".join(f"--{name}: {value}; " for name, value in _COLOURS.items())
    sheet = files("slipstream.report").joinpath("page.css").read_text()
    style = f":root {{ {variables}--font: {FONT}; }}\n{sheet}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        f'<header><h1>{escape(title)}</h1><p class="faint">{escape(subtitle)}</p>'
        f'<div class="cards">{shown}</div></header>\n{body}\n</main>\n</body>\n</html>\n'
    )


def section(name: str, title: str, remark: str, *content: str) -> str:
    """A part of the page; links can refer to ``#name``."""
    inside = "\n".join(content)
    head = f"<h2>{escape(title)}</h2>\n{_remark(remark)}"
    return f'<section id="{name}">\n{head}\n{inside}\n</section>\n'


def heading(text: str, remark: str = "") -> str:
    """A title inside a section, with a remark below it."""
    return f"<h3>{escape(text)}</h3>{_remark(remark)}"


def key(kinds: Iterable[str]) -> str:
    """The legend of the colours."""
    items = "".join(
        f'<li><i style="background:{PALETTE[kind].colour}"></i>{PALETTE[kind].name}</li>'
        for kind in kinds
    )
    return f'<ul class="key">{items}</ul>'


def plot(name: str, figure: Figure, *, with_library: bool) -> str:
    """A plot; exactly one of the page must include plotly's script (``with_library``)."""
    # Imported here: plotly is optional, and slow to import.
    from plotly.io import to_html

    shape: dict[str, Any] = {"full_html": False, "validate": False, "div_id": f"plot-{name}"}
    return str(to_html(figure, config=_CONFIG, include_plotlyjs=with_library, **shape))


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: Collection[int] = (0,),
    totals: bool = False,
) -> str:
    """A table; all columns but ``words`` hold numbers; ``totals``: the last row is bold."""
    kinds = ["" if column in words else ' class="number"' for column in range(len(headings))]

    def cells(tag: str, row: Sequence[str]) -> str:
        texts = (cell if isinstance(cell, Html) else escape(cell) for cell in row)
        return "".join(f"<{tag}{k}>{text}</{tag}>" for k, text in zip(kinds, texts, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    kind = ' class="totals"' * totals
    head = f"<thead><tr>{cells('th', headings)}</tr></thead>"
    return f'<div class="wide"><table{kind}>{head}<tbody>{body}</tbody></table></div>'


def trials_table(trials: Sequence[Mapping[str, Any]]) -> str:
    """The log of a tuner: each run, and each candidate that was not run, with the reason."""
    seconds = [t[name] for t in trials for name in ("predicted", "measured") if t.get(name)]
    unit = chart_unit(max(seconds, default=0.0))
    headings = ("strategy", f"predicted, {unit.name}", f"measured, {unit.name}", "status", "why")
    return table(headings, [_trial(t, unit) for t in trials], words=(0, 3, 4))


def _remark(text: str) -> str:
    return f'<p class="faint">{escape(text)}</p>' if text else ""


def _card(caption: str, value: str, remark: str) -> str:
    long = ' class="long"' * (len(value) > 16)
    return (
        f"<div><small>{escape(caption)}</small><b{long}>{escape(value)}</b>"
        f"<small>{escape(remark)}</small></div>"
    )


def finding_card(finding: Finding, iteration: float) -> str:
    """A finding; its gain also as a share of ``iteration`` seconds."""
    gain = ""
    if finding.gain > 0:
        share = f", {finding.gain / iteration:.1%}" if iteration > 0 else ""
        saved = f"saves about {chart_unit(finding.gain)(finding.gain)} an iteration{share}"
        gain = f"<p><b>{saved}</b></p>"
    patch = f"<pre>{escape(format_yaml(finding.patch))}</pre>" if finding.patch else ""
    return (
        f'<article class="finding {finding.severity}"><h3><span class="mark">'
        f"{_MARKS[finding.severity]} {finding.severity}</span> {escape(finding.where)}</h3>"
        f"<p>{escape(finding.evidence)}</p><p>{escape(finding.advice)}</p>{gain}{patch}</article>"
    )


def _trial(trial: Mapping[str, Any], unit: TimeUnit) -> list[str]:
    """The cells of one trial; a click on its name shows the strategy."""

    def number(name: str) -> str:
        value = trial.get(name)
        return "" if value is None else f"{value * unit.scale:,.{unit.digits}f}"

    name = str(trial["name"])
    if trial.get("strategy"):
        settings = escape(format_yaml(trial["strategy"]))
        details = f"<summary>{escape(name)}</summary><pre>{settings}</pre>"
        name = Html(f"<details>{details}</details>")
    spread = f" \u00b1 {number('spread')}" if trial.get("spread") else ""
    status, reason = (str(trial.get(field) or "") for field in ("status", "reason"))
    return [name, number("predicted"), number("measured") + spread, status, reason]
