"""Write benchmarks/results/README.md: the tables of every JSON file that lies beside it.

python benchmarks/tables.py
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from claims import missing

from slipstream.testbed import parse_rate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
HEAD = """# Results

Written by `python benchmarks/tables.py` from the JSON files in this folder; those of the exchange
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


def save(path: str, benchmark: str, entry: Mapping[str, Any]) -> None:
    """Write what a benchmark found, with day, versions, commit and the command that found it."""
    head = {
        "benchmark": benchmark,
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in ("torch", "slipstream")},
        "commit": COMMIT,
        "command": shlex.join(["python", f"benchmarks/{benchmark}.py", *sys.argv[1:]]),
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({**head, **entry}, indent=1) + "\n")


def commit() -> str:
    """The commit of the code that runs; a ``+`` says that it was changed since."""
    git = ["git", "-C", str(Path(__file__).parent)]
    head, changed = (
        subprocess.run([*git, *command.split()], capture_output=True, text=True).stdout.strip()
        for command in ("rev-parse --short HEAD", "status --porcelain -- ../src *.py")
    )
    return head + "+" * bool(changed)


COMMIT = commit()  # of when the benchmark began: hours later there may be another one


EXCHANGE_COLUMNS = (
    "variant", "median s", "quartiles", "exposed s", "CPU s", "peak MiB", "exchanges", "x bound",
    "quartiles", "x best DDP", "quartiles",
)  # fmt: skip


def exchange(entry: Mapping[str, Any]) -> str:
    """The table of one model: every variant against the best DDP and the bound."""
    codecs = set(entry.get("codecs") or ())
    what = " with codecs" if codecs else ""
    if codecs and codecs <= {"bf16", "fp16"}:
        what = " with 16-bit codecs"
    if any(row["name"] == "FSDP2, default" for row in entry["rows"]):
        what = " beside FSDP2 in all settings"
    who = " beside an accelerator" if _on_accelerator(entry) else ""
    lines = [
        f"## Exchange{who}{what}, {entry['model']} at {entry['rate']}, {entry['date']}",
        "",
        f"{entry['megabytes']:.0f} MB of gradients, {entry['nodes']} nodes at {entry['rate']}, "
        f"{entry['rounds']} rounds, {computing_in_words(entry)}. Compute "
        f"{entry['compute_s']:.3f} s, wire {entry['wire_s']:.3f} s, bound "
        f"{entry['bound_s']:.3f} s. torch {_versions(entry)}. `{entry['command']}`",
        "",
        *_header(*EXCHANGE_COLUMNS),
        *(_row(*exchange_cells(row)) for row in _with_bounds(entry)),
    ]
    return "\n".join(lines)


def exchange_cells(row: Mapping[str, Any]) -> list[str]:
    """What the columns show."""
    peak = row.get("peak_bytes")
    return [
        row["name"], f"{row['median']:.3f}", f"{row['low']:.3f}..{row['high']:.3f}",
        f"{row['exposed']:.3f}", f"{row['cpu']:.2f}", f"{peak / 2**20:.0f}" if peak else "",
        str(row["collectives"] or ""), f"{row['to_bound']:.2f}",
        f"{row['to_bound_low']:.2f}..{row['to_bound_high']:.2f}", f"{row['to_best_ddp']:.3f}",
        f"{row['to_best_ddp_low']:.3f}..{row['to_best_ddp_high']:.3f}",
    ]  # fmt: skip


def computing_in_words(entry: Mapping[str, Any]) -> str:
    """Who computed, in a few words."""
    cores = {"bound": ", each rank bound to its share of the cores", "free": ""}
    where = cores[entry.get("cores", "bound")]
    if not _on_accelerator(entry):
        return f"computing on the cores that exchange{where}"
    as_wire = " as long as the wire" if entry["compute_seconds"] == "wire" else ""
    return f"an emulated accelerator computing{as_wire}, cores free for the exchange{where}"


def _on_accelerator(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("compute") == "accelerator")  # files of old say nothing


def _with_bounds(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows with the spread of their ratio to the bound, which files of old lack."""
    bound = entry["bound_s"]
    return [
        {"to_bound_low": r["low"] / bound, "to_bound_high": r["high"] / bound, **r}
        for r in entry["rows"]
    ]


def _ratio(rival: str, found: Mapping[str, Sequence[float]]) -> str:
    low, median, high = found["quartiles"]
    known = "..".join(f"{end:.3f}" for end in found["interval"])
    interval = f", 95 % interval of the median {known}" if known else ""
    return f"{rival}: {median:.3f} (quartiles {low:.3f}..{high:.3f}{interval})"


def overhead(entry: Mapping[str, Any]) -> str:
    """The cost where nothing can be gained."""
    lines = [
        f"## Overhead, {entry['date']}",
        "",
        f"{entry['rounds']} rounds. torch {_versions(entry)}. `{entry['command']}`",
        "",
        *_header("part", "variant", "median ms", "quartiles", "ratio", "+- error", "quartiles"),
    ]
    for r in entry["rows"]:
        lines.append(
            _row(
                r["part"], r["name"], f"{1e3 * r['median']:.3f}",
                f"{1e3 * r['low']:.3f}..{1e3 * r['high']:.3f}", f"{r['ratio']:.4f}",
                f"{r['ratio_error']:.4f}", f"{r['ratio_low']:.3f}..{r['ratio_high']:.3f}",
            )
        )  # fmt: skip
    return "\n".join(lines)


def fusion(entry: Mapping[str, Any]) -> str:
    """Kernels or optimizers beside the plain code that they stand for."""
    lines = [
        f"## {entry['part'].capitalize()} on {entry['device']}, {entry['date']}",
        "",
        f"{entry['threads']} threads, {entry['rounds']} rounds. torch {_versions(entry)}. "
        f"`{entry['command']}`",
        "",
        *_header("case", "variant", "median ms", "quartiles", "times as fast", "quartiles"),
    ]
    for row in entry["rows"]:
        low, median, high = (f"{1e3 * seconds:.2f}" for seconds in row["seconds"])
        less, ratio, more = (f"{r:.2f}" for r in row["times_as_fast"])
        quarter = (f"{low}..{high}", ratio, f"{less}..{more}")
        lines.append(_row(row["case"], row["variant"], median, *quarter))
    return "\n".join(lines)


COMPILED_COLUMNS = (
    "variant", "median s", "quartiles", "exposed s", "hidden share", "graphs", "graph breaks",
)  # fmt: skip


def compiled_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of what torch.compile brings under data parallelism."""
    low, median, high = (f"{seconds:.3f}" for seconds in row["seconds"])
    hidden = "" if row["hidden"] is None else f"{row['hidden']:.2f}"
    counts = (str(row["graphs"]), str(row["breaks"]))
    return (row["name"], median, f"{low}..{high}", f"{row['exposed']:.3f}", hidden, *counts)


def compiled(entry: Mapping[str, Any]) -> str:
    """torch.compile under data parallelism."""
    lines = [
        f"## torch.compile, {entry['model']}, {entry['nodes']} ranks, {entry['rate']}, "
        f"{entry['date']}",
        "",
        f"{entry['megabytes']:.0f} MB of gradients, {entry['wire']:.2f} s on the wire, "
        f"{entry['rounds']} rounds. torch {_versions(entry)}. `{entry['command']}`",
        "",
        *_header(*COMPILED_COLUMNS),
    ]
    return "\n".join([*lines, *(_row(*compiled_cells(row)) for row in entry["rows"])])


def memory(entry: Mapping[str, Any]) -> str:
    """The peak memory of every variant of an exchange."""
    coded = " with codecs" if entry.get("codecs") else ""
    lines = [
        f"## Peak memory{coded}, {entry['model']}, {entry['date']}",
        "",
        f"{entry['megabytes']:.0f} MB of gradients, {entry['nodes']} ranks; each variant alone in "
        f"its processes. torch {_versions(entry)}. `{entry['command']}`",
        "",
        *_header("variant", "peak MiB"),
    ]
    lines += [_row(r["name"], f"{r['peak_bytes'] / 2**20:.0f}") for r in entry["rows"]]
    return "\n".join(lines)


def prediction(entry: Mapping[str, Any]) -> str:
    """Replay and what-if errors of every strategy on every testbed."""
    found, rates = entry["errors"], {row["rate"] for row in entry["rows"]}
    where = f" at {min(rates)}" if len(rates) == 1 else ""
    again = "Networks were measured anew after the traces. " * entry.get("calibrated_again", False)
    lines = [
        f"## Prediction{where}, {entry['date']}",
        "",
        f"{entry['nodes']} nodes, {entry['steps']} recorded iterations of each strategy. Replay: "
        f"median {found['replay_median']:.1%}, worst {found['replay_worst']:.1%}. What-if from the "
        f"default's trace: median {found['what_if_median']:.1%}, worst "
        f"{found['what_if_worst']:.1%}. {again}torch {_versions(entry)}. `{entry['command']}`",
        "",
        *_header(
            "model", "rate", "strategy", "measured s", "quartiles", "replay s", "error",
            "what-if s", "error", "tau", "tau of the pairs told apart", "tau measured again",
        ),
    ]  # fmt: skip
    for r in entry["rows"]:
        replay, what_if = r["replay"], r["what_if"]
        lines.append(
            _row(
                r["model"], r["rate"], r["strategy"], f"{r['measured']:.3f}",
                f"{r['low']:.3f}..{r['high']:.3f}",
                f"{replay:.3f}" if replay else "",
                f"{replay / r['measured'] - 1:+.1%}" if replay else "",
                f"{what_if:.3f}" if what_if else "",
                f"{what_if / r['measured'] - 1:+.1%}" if what_if else "",
                *_orders(entry, r),
            )
        )  # fmt: skip
    return "\n".join([*lines, *_advices(entry.get("advice", ()))])


def _advices(given: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the first advice on each testbed promised and brought, in parts of an iteration."""
    if not given:
        return []
    lines = ["", *_header("model", "rate", "advice", "promised", "brought", "quartiles")]
    for a in given:
        gains = f"{a['promised']:.1%}", f"{a['measured']:.1%}", f"{a['low']:.1%}..{a['high']:.1%}"
        lines.append(_row(a["model"], a["rate"], a["strategy"], *gains))
    return lines


def _orders(entry: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Of a testbed, in the row of its baseline."""
    if row["what_if"]:
        return "", "", ""
    order = entry["orders"][f"{row['model']}, {row['rate']}"]
    known = f"{order['tau_told_apart']:.2f} of {order['num_told_apart']}"
    return f"{order['tau']:.2f}", known, f"{order['tau_again']:.2f}"


def auto(entry: Mapping[str, Any]) -> str:
    """What `auto` kept, and every exact choice."""
    who = " beside an accelerator" if _on_accelerator(entry) else ""
    lines = [
        f"## Auto{who}, {entry['model']} at {entry['rate']}, {entry['date']}",
        "",
        f"{entry['megabytes']:.0f} MB of gradients, {entry['nodes']} ranks at {entry['rate']}, "
        f"{computing_in_words(entry)}; {entry['rounds']} rounds of the grid. torch "
        f"{_versions(entry)}. `{entry['command']}`",
        "",
        auto_in_words(entry),
        "",
        *_header("choice", "median s", "quartiles"),
    ]
    for row in entry["rows"]:
        low, middle, high = row["quartiles"]
        kept = " (kept)" if row["name"] == entry["kept"] else ""
        lines.append(_row(row["name"] + kept, f"{middle:.3f}", f"{low:.3f}..{high:.3f}"))
    return "\n".join(lines)


def auto_in_words(entry: Mapping[str, Any]) -> str:
    """What the search kept, after how many updates, and how good that is."""
    against = "the best of the grid"
    if entry["finals"]:
        found = {"quartiles": entry["ratio"], "interval": entry["interval"]}
        against = f"in {entry['finals']} rounds against {_ratio(entry['best'], found)}"
    kept = f"Kept after {entry['updates']} updates: {entry['kept']}; {against}."
    if not entry["losses"]:
        return f"{kept} An emulated accelerator learns nothing: no losses to compare."
    differences = entry["differences"]
    return (
        f"{kept} The losses of {len(entry['losses']['auto'])} updates differ from those of the "
        f"default strategy by at most {differences['auto']:.1e} of them, those of `direct`, which "
        f"sums in another order, by {differences['direct']:.1e}."
    )


def tuner(entry: Mapping[str, Any]) -> str:
    """The tuner's choices against the best of a grid."""
    lines = [
        f"## Tuner{', with codecs' if entry.get('lossy') else ''}, {entry['date']}",
        "",
        f"{entry['nodes']} nodes at {entry['rate']}, {entry['steps']} recorded iterations in each "
        f"block, the last column from {entry['pairs']} pairs of blocks in alternation. torch "
        f"{_versions(entry)}. `{entry['command']}`",
        "",
        *_header(
            "example", "chosen", "strategies tried", "runs", "grid", "best of the grid",
            "default s", "best s", "chosen / best", "quartiles",
        ),
    ]  # fmt: skip
    for r in entry["rows"]:
        lines.append(
            _row(
                r["example"], r["chosen"], r["tried"], r["runs"], r["grid"], r["best"],
                f"{r['default_seconds']:.3f}", f"{r['best_seconds']:.3f}", f"{r['ratio']:.3f}",
                f"{r['low']:.3f}..{r['high']:.3f}",
            )
        )  # fmt: skip
    return "\n".join(lines)


def precision(entry: Mapping[str, Any]) -> str:
    """What 16 bits do to the result of a training, or to its speed."""
    title = f"## Precision, {entry['task']}, {entry['date']}"
    versions = f"torch {_versions(entry)}. `{entry['command']}`"
    if entry["task"] == "speed":
        head = (
            f"One process with {entry['threads']} threads on a CPU with {entry['instructions']}; a "
            f"BERT of {entry['layers']} layers and {entry['parameters'] / 1e6:.0f} M parameters, "
            f"{entry['batch']} x {entry['length']} words, {entry['rounds']} rounds. {versions}"
        )
        lines = [title, "", head, "", *_header("precision", "median s", "x fp32", "quartiles")]
        for r in entry["rows"]:
            low, middle, high = r["times"]
            lines.append(
                _row(r["name"], f"{r['seconds']:.3f}", f"{middle:.2f}", f"{low:.2f}..{high:.2f}")
            )
        return "\n".join(lines)
    digits = entry["task"] == "digits"
    allowed = "0.5 points below" if digits else "2 % above"
    lines = [
        title,
        "",
        f"{entry['steps']} updates on one process, {entry['seeds']} seeds; allowed: {allowed} "
        f"fp32. fp16 is emulated. {versions}",
        "",
        f"![losses on the way](precision-{entry['task']}.png)",
        "",
        *_header(
            "precision", "held-out accuracy" if digits else "held-out loss",
            "deviation of the seeds", "against fp32", "within", "updates skipped",
        ),
    ]  # fmt: skip
    for r in entry["rows"]:
        gap = f"{100 * r['gap']:+.2f} points" if digits else f"{r['gap']:+.2%}"
        score = f"{r['score']:.2%}" if digits else f"{r['score']:.4f}"
        deviation = f"{r['deviation']:.2%}" if digits else f"{r['deviation']:.4f}"
        within = "yes" if r["within"] else "**no**"
        lines.append(_row(r["codec"], score, deviation, gap, within, f"{r['skipped']:.1f}"))
    return "\n".join(lines)


def convergence(entry: Mapping[str, Any]) -> str:
    """What each codec does to the result of a training."""
    digits = entry["task"] == "digits"
    lines = [
        f"## Convergence, {entry['task']}, {entry['date']}",
        "",
        f"{entry['steps']} updates on {entry['ranks']} ranks, {entry['seeds']} seeds; "
        f"allowed: {'0.5 points below' if digits else '2 % above'} dense. torch "
        f"{_versions(entry)}. `{entry['command']}`",
        "",
        f"![losses on the way](convergence-{entry['task']}.png)",
        "",
        *_header(
            "codec", "held-out accuracy" if digits else "held-out loss", "deviation of the seeds",
            "against dense", "within", "MB a step",
        ),
    ]  # fmt: skip
    for r in entry["rows"]:
        score, deviation = r["score"], r["deviation"]
        lines.append(
            _row(
                r["codec"], f"{score:.2%}" if digits else f"{score:.4f}",
                f"{deviation:.2%}" if digits else f"{deviation:.4f}",
                f"{100 * r['gap']:+.2f} points" if digits else f"{r['gap']:+.2%}",
                "yes" if r["within"] else "**no**", f"{r['megabytes']:.3f}",
            )
        )  # fmt: skip
    return "\n".join(lines)


def large_batch(entry: Mapping[str, Any]) -> str:
    """Small batches, and batches sixteen times as large, over as many epochs."""
    lines = [
        f"## Large batches, {entry['date']}",
        "",
        "Three seeds; each optimizer at the best of its seven learning rates, chosen on other data "
        f"and seeds. torch {_versions(entry)}. `{entry['command']}`",
        "",
        "![accuracy on the way](large-batch.png)",
        "",
        *_header(
            "task", "optimizer", "batch", "updates", "learning rate", "held-out accuracy", "seeds",
            "against the small batch",
        ),
    ]  # fmt: skip
    for r in entry["rows"]:
        found = r["accuracies"]
        lines.append(
            _row(
                r["task"], r["optimizer"], r["batch"], r["updates"], f"{r['chosen']:g}",
                f"{fmean(found):.1%}", f"{min(found):.1%}..{max(found):.1%}",
                f"{100 * r['gap']:+.1f} points",
            )
        )  # fmt: skip
    return "\n".join(lines)


OPERATOR_COLUMNS = (
    "operator", "size", "pass", "bare", "quartiles", "by hand", "slipstream", "quartiles", "within",
    "with check",
)  # fmt: skip


def operators(entry: Mapping[str, Any]) -> str:
    """Operators of slipstream.comm beside the bare calls."""
    rows = entry["rows"]
    lines = [
        f"## Operators between ranks, {entry['date']}",
        "",
        f"Microseconds on {entry['ranks']} ranks over loopback, medians. Bare: the calls of "
        "torch.distributed that move the same data; by hand: these in the least autograd.Function; "
        "within: at most 5 % or 20 microseconds above the bare calls, as "
        f"{sum(row['within'] for row in rows)} of {len(rows)} are. "
        f"torch {_versions(entry)}. `{entry['command']}`",
        "",
        *_header(*OPERATOR_COLUMNS),
        *(_row(*operator_cells(row)) for row in rows),
        "",
        "Python alone, with collectives that return at once, on the slower of the ranks. Within: "
        "the forward pass at most 20 microseconds above the bare call; both passes, which are two "
        "operators and a run of autograd, at most 20 an operator above those by hand.",
        "",
        *_header(*OPERATOR_COLUMNS[:-1]),
        *(_row(*operator_cells(row)[:-1]) for row in entry["alone"]),
    ]
    return "\n".join(lines)


def bubbles(entry: Mapping[str, Any]) -> str:
    """Bubbles of the pipeline schedules, and what two ranks bring."""
    lines = [
        f"## Pipeline, {entry['date']}",
        "",
        f"GPT-2 of {entry['layers']} layers, width {entry['width']}, on {entry['ranks']} ranks of "
        f"one thread over loopback; micro-batches of {entry['samples']} x {entry['length']} words, "
        f"{entry['steps']} steps. The formula assumes stages of equal time and sending that takes "
        f"none. torch {_versions(entry)}. `{entry['command']}`",
        "",
        *_header(
            "schedule", "stages a rank", "micro-batches", "bubble by rank %", "formula %",
            "step s", "quartiles", "times one process",
        ),
    ]  # fmt: skip
    for r in entry["rows"]:
        low, median, high = r["seconds"]
        lines.append(
            _row(
                r["schedule"], r["stages_per_rank"], r["micro_batches"],
                " ".join(f"{100 * share:.0f}" for share in r["bubble"]), f"{100 * r['ideal']:.0f}",
                f"{median:.3f}", f"{low:.3f}..{high:.3f}", f"{r['one_process_s'] / median:.2f}",
            )
        )  # fmt: skip
    return "\n".join(lines)


def times(entry: Mapping[str, Any]) -> str:
    """The promised times."""
    lines = [
        f"## Promised times, {entry['date']}",
        "",
        f"Seconds, {entry['rounds']} rounds. torch {_versions(entry)}. `{entry['command']}`",
        "",
        *_header("operation", "median s", "quartiles", "limit s", "within"),
    ]
    for r in entry["rows"]:
        lines.append(
            _row(
                r["name"], f"{r['median']:.3f}", f"{r['low']:.3f}..{r['high']:.3f}",
                f"{r['limit']:g}", "yes" if r["within"] else "**no**",
            )
        )  # fmt: skip
    return "\n".join(lines)


def transports(entry: Mapping[str, Any]) -> str:
    """The exchange alone, by transport, size of segments, and whether cores are free."""
    lines = [
        f"## Transports at {entry['rate']}, {entry['date']}",
        "",
        f"{entry['megabytes']} MB between {entry['nodes']} nodes, nothing else: in multiples of "
        f"the wire time. {entry['rounds']} rounds. torch {_versions(entry)}. "
        f"`{entry['command']}`",
        "",
        *_header("segments MB", "cores", "transport", "median", "quartiles"),
    ]
    rows = sorted(entry["rows"], key=lambda r: (r["segment_megabytes"], r["cores"], r["transport"]))
    for r in rows:
        spread = f"{r['low']:.2f}..{r['high']:.2f}"
        size = f"{r['segment_megabytes']:g}"
        lines.append(_row(size, r["cores"], r["transport"], f"{r['median']:.2f}", spread))
    return "\n".join(lines)


def allreduce(entry: Mapping[str, Any]) -> str:
    """One all-reduce by size and transport, on hosts with several ranks."""
    several = entry["nodes"] > 1
    where = f"{entry['numbering']} at {entry['rate']}" if several else "one host"
    first = entry["rows"][0]["transport"]
    lines = [
        f"## One all-reduce, {entry['nodes']} x {entry['ranks_per_node']} ranks, {where}, "
        f"{entry['date']}",
        "",
        f"Milliseconds on the slowest rank, {entry['rounds']} rounds, cores "
        f"{'busy' if entry['busy'] else 'free'}. torch {_versions(entry)}. "
        f"`{entry['command']}`",
        "",
        *_header("KB", "transport", "median", "quartiles", f"times as fast as {first}"),
    ]
    for r in entry["rows"]:
        spread, gain = f"{r['low']:.2f}..{r['high']:.2f}", f"{r['gain']:.2f}"
        size = str(r["kilobytes"])
        lines.append(_row(size, r["transport"], f"{r['median']:.2f}", spread, gain))
    return "\n".join(lines)


def tensor_parallel(entry: Mapping[str, Any]) -> str:
    """Split layers beside DTensor's."""
    lines = [
        f"## Split layers, {entry['date']}",
        "",
        f"Milliseconds of forward and backward on {entry['ranks']} ranks of one thread over "
        "loopback, medians: whole on every rank, split by torch's `parallelize_module`, split by "
        f"slipstream. torch {_versions(entry)}. `{entry['command']}`",
        "",
        *_header("module", "whole", "torch", "slipstream", "quartiles", "times as fast as torch"),
    ]
    for r in entry["rows"]:
        low, median, high = (1e3 * seconds for seconds in r["slipstream"])
        whole, torchs = 1e3 * r["whole"][1], 1e3 * r["torch"][1]
        lines.append(
            _row(
                r["module"], f"{whole:.2f}", f"{torchs:.2f}", f"{median:.2f}",
                f"{low:.2f}..{high:.2f}", f"{torchs / median:.2f}",
            )
        )  # fmt: skip
    return "\n".join(lines)


def recompute(entry: Mapping[str, Any]) -> str:
    """Time and memory of blocks that are computed again."""
    model = entry.get("model", "BERT-Large")
    lines = [f"## Recompute, {model}, {entry['date']}", "", f"`{entry['command']}`", ""]
    if (part := entry.get("batch")) is not None:
        return "\n".join(
            [
                *lines,
                "BERT-Large, 512 tokens, eager attention, one sample: a forward keeps "
                f"{part['plain_bytes'] / 2**20:.0f} MiB, with every block computed again "
                f"{part['kept_bytes'] / 2**20:.0f} MiB, {part['ratio']:.1f} times less; "
                f"{part['ratio_with_a_block']:.1f} times, where the one block that is being "
                f"computed again counts ({part['block_bytes'] / 2**20:.0f} MiB a sample).",
            ]
        )
    lines += [
        f"{entry['model']}, {entry['runs']} iterations of each in turns on the CPU; MiB: by how "
        "much a process grows at most in forward and backward.",
        "",
        *_header("way", "MiB", "median s", "x kept", "quartiles", "x torch's", "quartiles"),
    ]
    for r in entry["rows"]:
        kept, torchs = r["ratio"], r["to_torch"]
        lines.append(
            _row(
                r["way"], f"{r['peak'] / 2**20:.0f}", f"{r['seconds'][1]:.3f}", f"{kept[1]:.2f}",
                f"{kept[0]:.2f}..{kept[2]:.2f}", f"{torchs[1]:.3f}",
                f"{torchs[0]:.3f}..{torchs[2]:.3f}",
            )
        )  # fmt: skip
    return "\n".join(lines)


def offload(entry: Mapping[str, Any]) -> str:
    """Bytes of a sample, time on the CPU, and batches on a GPU, with recomputation and offload."""
    lines = [
        f"## Recompute and offload, {entry['date']}",
        "",
        f"torch {_versions(entry)}. `{entry['command']}`",
    ]
    if (part := entry.get("bytes")) is not None:
        lines += [
            "",
            "BERT-Large, 512 tokens, eager attention, AdamW, fp32: what is saved of a sample, as "
            "counted on shapes; by how much a process grows for a sample in forward and backward, "
            f"as measured; and the batches that follow for {part['limit'] / 2**30:.0f} GiB.",
            "",
            *_header("variant", "saved MiB", "batch", "measured MiB", "batch", "times"),
        ]
        lines += [
            _row(
                r["name"], f"{r['saved_each'] / 2**20:.0f}", r["estimated_batch"],
                f"{r['measured_each'] / 2**20:.0f}", r["measured_batch"],
                f"{r['measured_batch'] / part['rows'][0]['measured_batch']:.1f}",
            )
            for r in part["rows"]
        ]  # fmt: skip
    if (part := entry.get("time")) is not None:
        width, layers, heads, length = part["shape"]
        lines += [
            "",
            f"BERT of {layers} layers, width {width}, {heads} heads, {length} tokens, batch "
            f"{part['batch']} on the CPU, {part['rounds']} rounds; offload to disk; peak: by how "
            "much the process grows in forward and backward; with files: with the system's cache "
            "of files, in which what was written may still lie. torch's `save_on_cpu` moves "
            "nothing where all is on the CPU; beside it stand the hooks of torch's tutorial, a "
            "file for each saved tensor.",
            "",
            *_header(
                "variant", "median s", "quartiles", "ratio", "quartiles", "peak MiB",
                "with files MiB",
            ),
        ]  # fmt: skip
        for r in part["rows"]:
            (low, median, high), (ratio_low, ratio, ratio_high) = r["seconds"], r["ratio"]
            lines.append(
                _row(
                    r["name"], f"{median:.3f}", f"{low:.3f}..{high:.3f}", f"{ratio:.3f}",
                    f"{ratio_low:.3f}..{ratio_high:.3f}", f"{r['peak'] / 2**20:.0f}",
                    f"{files / 2**20:.0f}" if (files := r.get("peak_with_files")) else "",
                )
            )  # fmt: skip
    if (part := entry.get("cuda")) is not None:
        lines += [
            "",
            f"BERT-Large, 512 tokens, bf16 autocast, {part['gpu']} limited to "
            f"{part['limit'] / 2**30:.0f} GiB: the largest batch, and sequences a second with it.",
            "",
            *_header("variant", "batch", "sequences/s", "quartiles"),
        ]
        for r in part["rows"]:
            low, median, high = r["speed"]
            lines.append(_row(r["name"], r["batch"], f"{median:.2f}", f"{low:.2f}..{high:.2f}"))
    return "\n".join(lines)


def operator_cells(row: Mapping[str, Any]) -> list[str]:
    """What the columns show, in microseconds."""
    found = {
        way: [f"{1e6 * seconds:.0f}" for seconds in row.get(way, ())]
        for way in ("bare", "by hand", "ours", "checked")
    }
    middle = {way: quartiles[1] if quartiles else "" for way, quartiles in found.items()}
    spread = {way: "..".join(quartiles[::2]) for way, quartiles in found.items()}
    return [
        row["operator"], row["size"], row["pass"], middle["bare"], spread["bare"],
        middle["by hand"], middle["ours"], spread["ours"], "yes" if row["within"] else "**no**",
        middle["checked"],
    ]  # fmt: skip


def loading(entry: Mapping[str, Any]) -> str:
    """Epochs by how their batches are loaded."""
    lines = [
        f"## Loading batches, {entry['date']}",
        "",
        f"Digits, batches of {entry['batch']}, {entry['workers']} workers or threads, "
        f"{entry['rounds']} rounds; times as fast as the DataLoader of the same round. torch "
        f"{_versions(entry)}. `{entry['command']}`",
        "",
        *_header(
            "network", "variant", "ms an epoch", "quartiles", "x workers", "quartiles",
            "x persistent", "quartiles", "waited",
        ),
    ]  # fmt: skip
    for r in entry["rows"]:
        seconds = [1e3 * each for each in r["seconds"]]
        plain, kept = r["to_plain"], r["to_persistent"]
        lines.append(
            _row(
                r["network"], r["variant"], f"{seconds[1]:.1f}",
                f"{seconds[0]:.1f}..{seconds[2]:.1f}",
                f"{plain[1]:.2f}", f"{plain[0]:.2f}..{plain[2]:.2f}", f"{kept[1]:.2f}",
                f"{kept[0]:.2f}..{kept[2]:.2f}", f"{r['waited']:.1%}",
            )
        )  # fmt: skip
    return "\n".join(lines)


def balance(entry: Mapping[str, Any]) -> str:
    """How evenly ranks compute, by how samples of different lengths are dealt."""
    lines = [
        f"## Samples dealt to ranks, {entry['date']}",
        "",
        f"{entry['ranks']} ranks on one host, {entry['batch']} samples each on average, functions "
        "of the standard library, a small BERT; idle: the share of the ranks' time in which they "
        "would wait for the slowest, predicted by tokens, or the fitted cost, and measured by "
        f"ranks that compute in turn; {entry['rounds']} rounds. torch {_versions(entry)}. "
        f"`{entry['command']}`",
        "",
        *_header(
            "dealt", "idle, predicted", "padding", "idle, measured", "tokens/s", "quartiles",
            "x random padded", "quartiles",
        ),
    ]  # fmt: skip
    for r in entry["rows"]:
        speed, ratio = r["tokens_per_second"], r["to_random"]
        lines.append(
            _row(
                r["variant"], f"{r['predicted']:.1%}", f"{r['padding']:.1%}", f"{r['idle']:.1%}",
                f"{speed[1]:.0f}", f"{speed[0]:.0f}..{speed[2]:.0f}", f"{ratio[1]:.2f}",
                f"{ratio[0]:.2f}..{ratio[2]:.2f}",
            )
        )  # fmt: skip
    lines += [
        "",
        "One of the ranks may use half as much of a core as the others. *x the sum*: tokens a "
        "second over the sum of what each rank reached while the others waited.",
        "",
        *_header("strategy", "tokens/s", "x the sum", "speeds"),
        *(
            _row(r["variant"], f"{r['tokens_per_second']:.0f}", f"{r['to_sum']:.2f}", r["speeds"])
            for r in entry["unequal"]
        ),
    ]
    return "\n".join(lines)


def blame(entry: Mapping[str, Any]) -> str:
    """How often the rank that began a failure is named."""
    cases = dict.fromkeys(f"{row['fault']}, {row['place']}" for row in entry["rows"])
    return "\n".join(
        [
            f"## Blame, {'; '.join(cases)}, {entry['date']}",
            "",
            "Runs in which the launcher names the rank that began it, "
            f"{entry['at_once']} at a time. torch {_versions(entry)}. `{entry['command']}`",
            "",
            *_header("place", "fault", "right"),
            *(_row(r["place"], r["fault"], f"{r['right']} of {r['runs']}") for r in entry["rows"]),
        ]
    )


def soak(entry: Mapping[str, Any]) -> str:
    """Whether ranks stayed the same."""
    return "\n".join(
        [
            f"## Soak, {entry['date']}",
            "",
            f"{entry['updates']} updates on {entry['ranks']} ranks, {entry['turns']} turns of "
            f"{len(entry['codecs'])} codecs ({', '.join(entry['codecs'])}) on "
            f"{len(entry['transports'])} transports ({', '.join(entry['transports'])}), "
            f"{entry['overflows']} gradients made infinite, {entry['skipped']} updates skipped: "
            "parameters and the optimizer's state bit-equal on all ranks and finite after every "
            "turn. "
            f"`{entry['command']}`",
        ]
    )


def _versions(entry: Mapping[str, Any]) -> str:
    """What was measured: torch, and the commit where the result names it."""
    torch: str = entry["versions"]["torch"]
    return f"{torch}, commit {entry['commit']}" if "commit" in entry else torch


def _header(*names: str) -> list[str]:
    return [_row(*names), _row(*["---"] * len(names))]


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def speed_picture(found: Sequence[Mapping[str, Any]]) -> Figure:
    """How many times as fast as the best DDP: a panel a model and rate, a bar a codec or hook."""
    from matplotlib.figure import Figure  # every rank of every benchmark imports this file

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


GAINS = ("<!-- gains: written by benchmarks/tables.py -->\n", "<!-- /gains -->")
EXACT = {
    "flat": "slipstream, default",
    "direct": "slipstream, default, direct",
    "sharded": "slipstream, default, sharded",
    "sharded, a third replicated": "slipstream, default, sharded, a third replicated",
}
"""Columns of that table, and rows of the results."""


def gains(every: Sequence[Mapping[str, Any]]) -> str:
    """The table of docs/sharding.md: exact strategies, times as fast as the best DDP, by model."""
    found = [
        entry
        for entry in every
        if entry["benchmark"] == "exchange"
        and entry["rate"] != "loopback"
        and set(EXACT.values()) <= {row["name"] for row in entry["rows"]}
    ]
    lines = _header("computing", "model", "link", "best DDP", *EXACT)
    for entry in sorted(found, key=lambda e: (not _on_accelerator(e), e["rate"], e["model"])):
        rows = {row["name"]: row for row in entry["rows"]}
        [best] = (row["median"] for name, row in rows.items() if name.endswith("(DDP, best)"))
        ratios = (
            (1 / row["to_best_ddp"], 1 / row["to_best_ddp_high"], 1 / row["to_best_ddp_low"])
            for row in map(rows.__getitem__, EXACT.values())
        )
        cells = (f"{ratio:.2f} ({low:.2f}..{high:.2f})" for ratio, low, high in ratios)
        who = "an accelerator" if _on_accelerator(entry) else "the same cores"
        link = f"[{entry['rate']}](../benchmarks/results/README.md#{_anchor(exchange(entry))})"
        lines.append(_row(who, entry["model"], link, f"{best:.2f} s", *cells))
    return "\n".join(lines) + "\n"


def _anchor(text: str) -> str:
    """What a heading is linked by, on GitHub."""
    heading = text.splitlines()[0].removeprefix("## ").lower()
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


def with_gains(page: str, every: Sequence[Mapping[str, Any]]) -> str:
    """A page with its table written anew."""
    begin, end = GAINS
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + gains(every) + end + after


def results() -> list[dict[str, Any]]:
    """All results, by the names of their files."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]


def rendered(every: Sequence[Mapping[str, Any]]) -> str:
    """All tables."""
    render = {
        "allreduce": allreduce,
        "auto": auto,
        "blame": blame,
        "bubbles": bubbles,
        "compiled": compiled,
        "convergence": convergence,
        "balance": balance,
        "loading": loading,
        "exchange": exchange,
        "fusion": fusion,
        "large_batch": large_batch,
        "memory": memory,
        "offload": offload,
        "recompute": recompute,
        "operators": operators,
        "overhead": overhead,
        "precision": precision,
        "prediction": prediction,
        "soak": soak,
        "tensor_parallel": tensor_parallel,
        "times": times,
        "transports": transports,
        "tuner": tuner,
    }
    parts = [HEAD]
    for entry in every:
        parts += [render[entry["benchmark"]](entry), *([entry["note"]] if "note" in entry else [])]
    if _coded(every):
        parts.insert(1, "![times as fast as DDP, by codec](codecs.png)")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _coded(every: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Exchanges with codecs beside torch's hooks, on links."""
    return [
        entry
        for entry in every
        if entry["benchmark"] == "exchange"
        and entry.get("codecs")
        and entry["rate"] != "loopback"
        and not _on_accelerator(entry)
        and any(row["name"].startswith("torch") for row in entry["rows"])
    ]


def main() -> None:
    """Render every result."""
    every, root = results(), RESULTS.parents[1]
    if coded := _coded(every):
        speed_picture(coded).savefig(RESULTS / "codecs.png")
    (RESULTS / "README.md").write_text(rendered(every))
    sharding = root / "docs/sharding.md"
    sharding.write_text(with_gains(sharding.read_text(), every))
    for claim in missing([root / "README.md", *root.glob("docs/*.md")], every):
        print(f"README.md or a page in docs should say: {claim}")


if __name__ == "__main__":
    main()
