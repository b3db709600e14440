"""The page of the report: HTML around plots, tables and findings, complete in one file.

Never fetches anything: script and style are inside, and the page forbids itself the rest. All text
is escaped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from slipstream.advisor.findings import Finding
from slipstream.report.look import FAINT, LINE, LOOKS, PAPER, TEXT, Unit
from slipstream.report.plots import FONT, Figure
from slipstream.strategy.yaml import format_yaml

_MARKS = {"problem": "&#10005;", "warning": "!", "note": "i", "good": "&#10003;"}
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
)
_CONFIG = {"displayModeBar": False, "responsive": True}
_STYLE = f"""
:root {{ color-scheme: light; }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: #f3f5f7; color: {TEXT}; font: 15px/1.5 {FONT}; }}
main {{ max-width: 1240px; margin: 0 auto; padding: 28px 20px 60px; }}
h1 {{ font-size: 26px; margin: 0 0 2px; }}
h2 {{ font-size: 19px; margin: 0 0 4px; }}
h3 {{ font-size: 15px; margin: 22px 0 4px; }}
p {{ margin: 4px 0 10px; }}
.faint {{ color: {FAINT}; }}
section, .cards > div {{ background: {PAPER}; border: 1px solid {LINE}; border-radius: 8px; }}
section {{ padding: 18px 20px; margin-top: 18px; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin-top: 18px; }}
.cards > div {{ padding: 10px 14px; }}
.cards b {{ display: block; font-size: 20px; line-height: 1.3; overflow-wrap: anywhere; }}
.cards b.long {{ font-size: 15px; }}
.cards small {{ color: {FAINT}; display: block; }}
.key {{ display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 6px 0; padding: 0;
  font-size: 13px; }}
.key li {{ list-style: none; display: flex; align-items: center; gap: 6px; }}
.key i {{ width: 14px; height: 14px; border-radius: 3px; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 14px; min-width: 50%; margin: 8px 0; }}
th, td {{ text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid {LINE};
  vertical-align: top; }}
th {{ color: {FAINT}; font-weight: 600; }}
td.number, th.number {{ text-align: right; }}
td.number {{ font-variant-numeric: tabular-nums; white-space: nowrap; }}
tr.strong td {{ font-weight: 700; }}
pre {{ background: #f3f5f7; border-radius: 6px; padding: 8px 12px; margin: 6px 0 2px;
  overflow-x: auto; font-size: 13px; user-select: all; }}
.finding {{ border-left: 5px solid; padding: 2px 0 2px 14px; margin: 14px 0; }}
.finding h3 {{ margin: 0; }}
.finding p {{ margin: 2px 0; }}
.finding .mark {{ display: inline-block; min-width: 22px; padding: 0 7px; border-radius: 11px;
  color: {PAPER}; font-size: 13px; font-weight: 700; text-align: center; margin-right: 6px; }}
.problem {{ border-color: #b3261e; }} .problem .mark {{ background: #b3261e; }}
.warning {{ border-color: #b35900; }} .warning .mark {{ background: #b35900; }}
.note {{ border-color: #0072b2; }} .note .mark {{ background: #0072b2; }}
.good {{ border-color: #007a5a; }} .good .mark {{ background: #007a5a; }}
@media (max-width: 640px) {{ main {{ padding: 16px 8px; }} section {{ padding: 14px 12px; }} }}
@media print {{ body {{ background: {PAPER}; }} section {{ break-inside: avoid; }} }}
"""


def page(title: str, subtitle: str, cards: Iterable[tuple[str, str, str]], body: str) -> str:
    """The document; a card is a caption, a value and a remark."""
    shown = "".join(_card(*card) for card in cards)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<header><h1>{escape(title)}</h1><p class="faint">{escape(subtitle)}</p>'
        f'<div class="cards">{shown}</div></header>\n{body}\n</main>\n</body>\n</html>\n'
    )


def section(name: str, title: str, remark: str, *content: str) -> str:
    """A part of the page, which links may name by ``name``."""
    said = f'<p class="faint">{escape(remark)}</p>' if remark else ""
    inside = "\n".join(content)
    return f'<section id="{name}">\n<h2>{escape(title)}</h2>\n{said}\n{inside}\n</section>\n'


def heading(text: str, remark: str = "") -> str:
    """A title inside a section, and a remark below it."""
    said = f'<p class="faint">{escape(remark)}</p>' if remark else ""
    return f"<h3>{escape(text)}</h3>{said}"


def key(kinds: Iterable[str]) -> str:
    """What the colours mean."""
    items = "".join(
        f'<li><i style="background:{LOOKS[kind].colour}"></i>{LOOKS[kind].name}</li>'
        for kind in kinds
    )
    return f'<ul class="key">{items}</ul>'


def plot(name: str, figure: Figure, *, with_library: bool) -> str:
    """A plot; one of a page brings plotly's script, which all of them need."""
    from plotly.io import to_html

    drawn = to_html(
        figure,
        config=_CONFIG,
        include_plotlyjs=with_library,
        full_html=False,
        validate=False,
        div_id=f"plot-{name}",
    )
    return str(drawn)


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: Collection[int] = (0,),
    last_strong: bool = False,
) -> str:
    """A table of text; all columns but ``words`` hold numbers."""
    right = [column not in words for column in range(len(headings))]
    cells = [[escape(cell) for cell in row] for row in rows]
    return _table(headings, right, cells, last_strong=last_strong)


def findings_list(findings: Iterable[Finding], iteration: float) -> str:
    """Findings in the order given; gains also as a share of ``iteration`` seconds."""
    return "\n".join(_finding(finding, iteration) for finding in findings)


def trials_table(trials: Sequence[Mapping[str, Any]]) -> str:
    """The log of a tuner: every run, and every candidate that was not run, with the reason."""
    seconds = [t[name] for t in trials for name in ("predicted", "measured") if t.get(name)]
    unit = Unit.of(max(seconds, default=0.0))
    headings = ("strategy", f"predicted, {unit.name}", f"measured, {unit.name}", "status", "why")
    return _table(headings, (False, True, True, False, False), [_trial(t, unit) for t in trials])


def _card(caption: str, value: str, remark: str) -> str:
    long = ' class="long"' * (len(value) > 16)
    return (
        f"<div><small>{escape(caption)}</small><b{long}>{escape(value)}</b>"
        f"<small>{escape(remark)}</small></div>"
    )


def _finding(finding: Finding, iteration: float) -> str:
    gain = ""
    if finding.gain > 0:
        share = f", {finding.gain / iteration:.1%}" if iteration > 0 else ""
        saved = f"saves about {Unit.of(finding.gain)(finding.gain)} an iteration{share}"
        gain = f"<p><b>{saved}</b></p>"
    patch = f"<pre>{escape(format_yaml(plain(finding.patch)))}</pre>" if finding.patch else ""
    return (
        f'<article class="finding {finding.severity}"><h3><span class="mark">'
        f"{_MARKS[finding.severity]} {finding.severity}</span> {escape(finding.where)}</h3>"
        f"<p>{escape(finding.evidence)}</p><p>{escape(finding.advice)}</p>{gain}{patch}</article>"
    )


def _trial(trial: Mapping[str, Any], unit: Unit) -> list[str]:
    """The cells of one run; its strategy unfolds."""

    def number(name: str) -> str:
        value = trial.get(name)
        return "" if value is None else f"{value * unit.scale:,.{unit.digits}f}"

    name = escape(str(trial["name"]))
    if trial.get("strategy"):
        settings = escape(format_yaml(plain(trial["strategy"])))
        name = f"<details><summary>{name}</summary><pre>{settings}</pre></details>"
    spread = f" &plusmn; {number('spread')}" if trial.get("spread") else ""
    status, reason = (escape(str(trial.get(key) or "")) for key in ("status", "reason"))
    return [name, number("predicted"), number("measured") + spread, status, reason]


def plain(value: Any) -> Any:
    """Mappings as ``dict`` and sequences as ``list``, all the way down: what YAML writes."""
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _table(
    headings: Sequence[str],
    right: Sequence[bool],
    rows: Iterable[Sequence[str]],
    *,
    last_strong: bool = False,
) -> str:
    """Cells are HTML; ``right`` says which columns hold numbers."""
    kinds = [' class="number"' if number else "" for number in right]
    lines = [
        [f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)] for row in rows
    ]
    titles = [
        f"<th{kind}>{escape(title)}</th>" for kind, title in zip(kinds, headings, strict=True)
    ]
    body = [f"<tr>{''.join(line)}</tr>" for line in lines]
    if last_strong:
        body[-1] = body[-1].replace("<tr>", '<tr class="strong">', 1)
    return (
        f'<div class="wide"><table><thead><tr>{"".join(titles)}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
