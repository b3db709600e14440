"""The demo's result in a terminal: the gain, a chart of the iterations, tables, and why."""

from __future__ import annotations

from statistics import median

from rich.console import Group
from rich.table import Table
from rich.text import Text

from slipstream.analysis.compact_table import compact
from slipstream.cli.demo.chart import bar_chart
from slipstream.cli.demo.codec_choice import NONE, WORTHWHILE
from slipstream.cli.demo.measured import (
    ALONE,
    DDP,
    EXACT,
    LOCAL,
    LOSSY,
    ROUNDING,
    Measured,
    gain,
    headline,
)
from slipstream.report.alternation import Alternation, TimedTraining, TrainingKind

KINDS: dict[str, TrainingKind] = {
    DDP: "baseline",
    EXACT: "exact",
    LOSSY: "lossy",
    LOCAL: "lossy",
    ALONE: "floor",
}


def alternation(measured: Measured) -> Alternation:
    """The trainings as the charts show them."""
    names = {
        DDP: f"DDP, {measured.ddp_megabytes} MB buckets",
        LOSSY: f"slipstream, {measured.codec} (lossy)",
        LOCAL: f"{LOCAL} (lossy)",
    }
    trainings = []
    for name in (*measured.trainings, ALONE):
        times = "" if name in (DDP, ALONE) else f"{gain(measured, name).times:.2f}x"
        of_page = KINDS[name], measured.seconds[name], times, learned(measured, name)
        trainings.append(TimedTraining(names.get(name, name), *of_page))
    return Alternation(headline(measured), trainings)


def result(measured: Measured, width: int) -> Group:
    """All of it, ``width`` columns wide at most."""
    return Group(
        Text(headline(measured), style="bold"),
        Text(),
        *chart(measured, width),
        Text(),
        table(measured),
        exactness(measured),
        Text(),
        predictions(measured),
    )


def chart(measured: Measured, width: int) -> tuple[Text, Text, Text]:
    """The iterations of each training, under a title and over a key."""
    count = len(measured.seconds[DDP])
    title = f"{measured.model} on {measured.nodes} {measured.network}: {count} iterations of each"
    key = "├┼┤: quartiles and median; x: DDP's time over this one, median of pairs"
    drawing = bar_chart(alternation(measured).trainings, width)
    return Text(f"{title}, in turn"), drawing, Text(key, style="dim")


def table(measured: Measured) -> Table:
    """Tabulate what each training exchanges, and what it learned."""
    names = measured.trainings
    alone = median(measured.seconds[ALONE])
    coded = [f"{measured.codec}, lossy"] if LOSSY in names else []
    headings = ["", DDP, "exact", *coded, "local, lossy"]
    table = compact("", *headings, left=[""])
    exposed = (median(measured.seconds[name]) - alone for name in names)
    table.add_row("exposed exchange", *map(_seconds, exposed))
    counts = (f"{measured.gradients} -> {measured.exchanges[name]}" for name in names)
    table.add_row("gradients -> exchanges", *counts)
    far = [measured.apart_after_one_step[name] for name in names[1:]]
    table.add_row("from DDP after one step", "", *(f"{one:.0e}" if one else "0" for one in far))
    for heading in ("final loss", "held-out accuracy"):
        table.add_row(heading, *(learned(measured, name)[heading] for name in names))
    return table


def learned(measured: Measured, name: str) -> dict[str, str]:
    """Say how good the model of a training is; nothing for the one that does not exchange."""
    if name == ALONE:
        return {}
    loss, accuracy = measured.final_loss[name], measured.accuracy[name]
    return {"final loss": f"{loss:.4f}", "held-out accuracy": f"{accuracy:.1%}"}


def exactness(measured: Measured) -> Text:
    """Whether the exact training did what DDP did."""
    far = measured.apart_after_one_step[EXACT]
    if not measured.is_exact:
        words = f"NOT exact: {far:.1e} from DDP after one step; rounding is less than {ROUNDING}."
        return Text(words, style="bold red")
    return Text(f"Exact: {'the sums of DDP in another order' if far else 'the bits of DDP'}.")


def predictions(measured: Measured) -> Table:
    """Set predictions of codecs beside their measurements."""
    headings = ("codec", "bytes sent", "exchanges", "predicted", "tried", "in turn", "error")
    table = compact("", *headings, left=["codec"], caption=_chosen(measured))
    medians = {NONE: median(measured.seconds[EXACT])}
    if measured.codec:
        medians[measured.codec] = median(measured.seconds[LOSSY])
    for one in measured.candidates:
        tried, seconds = (of.get(one.codec) for of in (measured.tried, medians))
        name = f"none: exact, {measured.transport}" if one.codec == NONE else one.codec
        error = f"{one.predicted / seconds - 1:+.1%}" if seconds else ""
        times = (_seconds(value) for value in (one.predicted, tried, seconds))
        table.add_row(name, f"{one.sent:.1%}", str(one.segments), *times, error)
    return table


def _seconds(value: float | None) -> str:
    return f"{value:.3f} s" if value else ""


def _chosen(measured: Measured) -> str:
    if measured.codec is None:
        return f"No codec runs: none is predicted to save {1 - WORTHWHILE:.0%}."
    return f"{measured.codec} runs: the fastest of those that were tried for a few iterations."
