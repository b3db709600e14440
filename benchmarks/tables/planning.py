"""Tables of predictions and choices, and of what commands promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.result import Entry, Result, Table, measured_with, one_table, span, yes

LATE = 0.1
"""Part of its time by which a run is late."""


def prediction(entry: Entry) -> Result:
    """Replay and what-if errors of every strategy on every testbed."""
    found, rates = entry["errors"], {row["rate"] for row in entry["rows"]}
    again = "Networks were measured anew after the traces. " * entry.get("calibrated_again", False)
    words = (
        f"{entry['nodes']} nodes, {entry['steps']} recorded iterations of each strategy. Replay: "
        f"median {found['replay_median']:.1%}, worst {found['replay_worst']:.1%}. What-if from the "
        f"default's trace: median {found['what_if_median']:.1%}, worst "
        f"{found['what_if_worst']:.1%}. {again}"
    )
    columns = (
        "model", "rate", "strategy", "measured s", "quartiles", "replay s", "error", "what-if s",
        "error", "tau", "tau of the pairs told apart", "tau measured again",
    )  # fmt: skip
    rows = [
        (
            *(r["model"], r["rate"], r["strategy"], f"{r['measured']:.3f}"),
            *(span(r["low"], r["high"], 3), *_predicted(r, "replay"), *_predicted(r, "what_if")),
            *_orders(entry, r),
        )
        for r in entry["rows"]
    ]
    parts: list[str | Table] = [measured_with(entry, words.rstrip()), Table(columns, rows)]
    if given := entry.get("advice"):
        advices = [
            (
                *(a["model"], a["rate"], a["strategy"], f"{a['promised']:.1%}"),
                *(f"{a['measured']:.1%}", f"{a['low']:.1%}..{a['high']:.1%}"),
            )
            for a in given
        ]
        headings = ("model", "rate", "advice", "promised", "brought", "quartiles")
        parts.append(Table(headings, advices))
    where = f" at {min(rates)}" if len(rates) == 1 else ""
    return Result(f"Prediction{where}, {entry['date']}", parts)


def shared_cores(entry: Entry) -> Result:
    """How many intervals hold where ranks share cores, and what was recommended."""
    words = (
        f"{entry['cores']} cores, {entry['rounds']} rounds. Of the intervals of 80 % of seconds "
        f"{entry['seconds_held']:.0%} hold, of those of ratios {entry['ratios_held']:.0%} (bar: 75 "
        f"to 90 %). Of {entry['recommendations']} recommendations {entry['slower']} measured "
        "slower than the default beyond the noise (bar: none); of all, "
        f"{entry['recommended_others']} were another strategy than the default. Errors, median: "
        f"{entry['error']:.1%} of seconds, {entry['ratio_error']:.1%} of ratios."
    )
    rows = [
        (
            *(row["setup"], row["round"] + 1, row["strategy"]),
            *(f"{1e3 * row['measured']:.0f}", _span(row["interval"], 1e3, 0)),
            *(f"{row['measured_ratio']:.2f}", _span(row["ratio_interval"], 1.0, 2)),
            " ".join(["first"] * row["first"] + ["recommended"] * row["recommended"]),
        )
        for row in entry["rows"]
    ]
    columns = (
        "set-up", "round", "strategy", "measured ms", "80 %", "measured ratio", "80 %", "predicted",
    )  # fmt: skip
    return one_table(entry, "Shared cores", words, columns, rows)


def _span(interval: Sequence[float], unit: float, digits: int) -> str:
    low, high = interval
    return span(low * unit, high * unit, digits)


def _predicted(row: Mapping[str, Any], kind: str) -> tuple[str, str]:
    """Seconds and their error; nothing where none was predicted."""
    seconds = row[kind]
    return (f"{seconds:.3f}", f"{seconds / row['measured'] - 1:+.1%}") if seconds else ("", "")


def _orders(entry: Entry, row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Of a testbed, in the row of its baseline."""
    if row["what_if"]:
        return "", "", ""
    order = entry["orders"][f"{row['model']}, {row['rate']}"]
    known = f"{order['tau_told_apart']:.2f} of {order['num_told_apart']}"
    return f"{order['tau']:.2f}", known, f"{order['tau_again']:.2f}"


def tuner(entry: Entry) -> Result:
    """The tuner's choices against the best of a grid."""
    words = (
        f"{entry['nodes']} nodes at {entry['rate']}, {entry['steps']} recorded iterations in each "
        f"block, the last column from {entry['pairs']} pairs of blocks in alternation."
    )
    rows = [
        (
            *(r["example"], r["chosen"], r["tried"], r["runs"], r["grid"], r["best"]),
            *(f"{r['default_seconds']:.3f}", f"{r['best_seconds']:.3f}", f"{r['ratio']:.3f}"),
            span(r["low"], r["high"], 3),
        )
        for r in entry["rows"]
    ]
    columns = (
        "example", "chosen", "strategies tried", "runs", "grid", "best of the grid", "default s",
        "best s", "chosen / best", "quartiles",
    )  # fmt: skip
    title = f"Tuner{', with codecs' if entry.get('lossy') else ''}"
    return one_table(entry, title, words, columns, rows)


def times(entry: Entry) -> Result:
    """The promised times."""
    rows = [
        (
            *(r["name"], f"{r['median']:.3f}", span(r["low"], r["high"], 3)),
            *(f"{r['limit']:g}", yes(r["within"])),
        )
        for r in entry["rows"]
    ]
    columns = ("operation", "median s", "quartiles", "limit s", "within")
    words = f"Seconds, {entry['rounds']} rounds."
    return one_table(entry, "Promised times", words, columns, rows)


def scale_out(entry: Entry) -> Result:
    """Predictions beside public measurements, the worst first."""
    gpus, slow, large = entry["transformers"], entry["slow"], entry["megascale"]
    machine = ", ".join(f"{name} {value:.4g}" for name, value in gpus["machine"].items())
    systems = "; ".join(
        f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in numbers.items())
        for name, numbers in large["systems"].items()
    )
    shares = ", ".join(
        f"{name} {one['reached']:.0%} of the link and {one['alone_ms']:.1f} ms alone"
        for name, one in slow["algorithms"].items()
    )
    took = entry["simulated"]
    bars = [
        ("median error at 512 GPUs", f"{gpus['median_512']:.1%}", "8%", gpus["median_512"] < 0.08),
        ("tau of the 512-GPU rows", f"{gpus['tau_512']:.2f}", "0.8", gpus["tau_512"] >= 0.8),
        ("tau of all rows", f"{gpus['tau_all']:.2f}", "0.8", gpus["tau_all"] >= 0.8),
        ("median error at 200 Mbit/s", f"{slow['median_slow']:.1%}", "10%",
         slow["median_slow"] <= 0.1),
        (f"seconds to simulate {took['strategies']} strategies on {took['ranks']:,} ranks",
         f"{took['seconds']:.1f}", "60", took["seconds"] < 60),
    ]  # fmt: skip
    further = [
        (f"further rows, {name}", f"{found['median_further']:.1%}", bar, "")
        for name, found, bar in (("GPUs", gpus, "8%"), ("TCP", slow, "10%"))
        if "median_further" in found
    ]
    if "tau_further" in gpus:
        further.append(("further rows, tau", f"{gpus['tau_further']:.2f}", "0.8", ""))
    return Result(
        f"Scale-out, {entry['date']}",
        [
            measured_with(entry, "Predictions of published runs, which nothing was fitted on."),
            Table(
                ("promise", "found", "bar", "within"),
                [*((*bar[:3], yes(bar[3])) for bar in bars), *further],
            ),
            f"Transformers on A100, fitted on runs of up to 256 GPUs: {machine}. Each of these "
            f"left out of its fit: median {gpus['left_out_median']:.1%}. At 512 GPUs: median "
            f"{gpus['median_512']:.1%}, worst {gpus['worst_512']:.1%}. {late_runs(gpus)}",
            published(gpus["rows"]),
            f"30.8 million parameters over shaped TCP, fitted on 5 Gbit/s: {shares}. At 200 "
            f"Mbit/s: median {slow['median_slow']:.1%}, worst {slow['worst_slow']:.1%}.",
            published(slow["rows"]),
            f"175 billion parameters, each system fitted on 256 and 512 GPUs ({systems}), the rest "
            "of the machine by its data sheet; micro-batches of 1 without recomputation are "
            "assumed, as the paper names neither. On "
            f"768 to 12,288 GPUs: median {large['median_larger']:.1%}, worst "
            f"{large['worst_larger']:.1%}.",
            published(large["rows"]),
        ],
    )


def late_runs(found: Mapping[str, Any]) -> str:
    """Say why the order at 512 GPUs is not the predicted one."""
    errors = [row["error"] for row in found["rows"] if row["kind"] == "predicted"]
    late = [1 / (1 + error) - 1 for error in errors if error < -LATE]
    early = sum(error > LATE for error in errors)
    return (
        f"{len(late)} of these {len(errors)} runs took {min(late):.0%} to {max(late):.0%} longer "
        f"than predicted, {early} were {LATE:.0%} shorter. Of most of their sizes others, with a "
        "smaller or larger micro-batch, were not late, so no law of sizes orders them: even "
        f"fitted on these rows themselves, tau is {found['tau_512_fitted_on_themselves']:.2f}."
    )


def published(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Published runs, and what was predicted of them."""
    cells = [
        (
            *(row["name"], f"{row['measured']:.4g}", f"{row['predicted']:.4g}"),
            *(f"{row['error']:+.1%}", row["kind"]),
        )
        for row in rows
    ]
    return Table(("run", "measured s", "predicted s", "error", "how"), cells)


def blame(entry: Entry) -> Result:
    """How often the rank that began a failure is named."""
    cases = dict.fromkeys(f"{row['fault']}, {row['place']}" for row in entry["rows"])
    words = (
        f"Runs in which the launcher names the rank that began it, {entry['at_once']} at a time."
    )
    rows = [(r["place"], r["fault"], f"{r['right']} of {r['runs']}") for r in entry["rows"]]
    title = f"Blame, {'; '.join(cases)}"
    return one_table(entry, title, words, ("place", "fault", "right"), rows)


def faults(entry: Entry) -> Result:
    """How each fault ends."""
    words = (
        f"Three ranks, {entry['at_once']} runs at a time. Seconds from the fault until the others, "
        "or the watch, have ended; right: runs in which they name the rank that began, and no "
        "other; left: processes, in all runs."
    )
    setups = ", ".join(dict.fromkeys(row["setup"].partition(",")[0] for row in entry["rows"]))
    return _faults(entry, f"Faults, {setups}", words)


def network_faults(entry: Entry) -> Result:
    """How each fault of the network ends."""
    words = (
        f"Three emulated hosts of one rank each, {entry['at_once']} runs at a time. Seconds from "
        "the fault until the last rank, or its watch, has ended; right: runs in which the other "
        "two name the rank that was cut off, or in which all ranks train on and none is named; "
        "left: processes, in all runs."
    )
    return _faults(entry, "Faults of the network", words)


def _faults(entry: Entry, title: str, words: str) -> Result:
    rows = [
        (
            *(r["setup"], r["fault"], r["runs"], _seconds(r["seconds"]), _seconds(r["longest"])),
            *(_right(r), r["left"], _says(r)),
        )
        for r in entry["rows"]
    ]
    columns = ("setup", "fault", "runs", "seconds", "longest", "right", "left", "it says")
    return one_table(entry, title, words, columns, rows)


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}"


def _right(row: Mapping[str, Any]) -> str:
    ends = {"named": "", "harmless": " go on", "unseen": " go on"}
    return f"{row['right']} of {row['runs']}{ends[row['kind']]}"


def _says(row: Mapping[str, Any]) -> str:
    if row["says"]:
        return str(row["says"])
    return {"named": "", "harmless": "nothing, no harm is done", "unseen": "nothing: not seen"}[
        row["kind"]
    ]


def lost_hosts(entry: Entry) -> Result:
    """What became of a run that lost a host to each fault."""
    words = (
        f"{entry['hosts']} emulated hosts, {entry['updates']} updates. {same_bits(entry)} Seconds "
        "are counted from the fault to the first word of a launcher, and to the next update."
    )
    rows = [
        (
            *(r["fault"], r["host"], f"{r['to_error']:.1f}", f"{r['to_training']:.1f}"),
            *(r["again"], given_anew(r["anew"], entry["hosts"])),
        )
        for r in entry["rows"]
    ]
    columns = (
        "fault", "host", "s to the error", "s to training", "updates done again",
        "command given anew",
    )  # fmt: skip
    return one_table(entry, "Lost hosts", words, columns, rows)


def tutorial(entry: Entry) -> Result:
    """How long each command of the tutorial took."""
    rows = [(f"`{s['command']}`", f"{s['seconds']:.0f}") for s in entry["steps"].values()]
    words = "The commands of docs/tutorial.md, in order; what they print stands there."
    return one_table(entry, "Tutorial", words, ("command", "s"), rows)


def same_bits(entry: Entry) -> str:
    """Whether a disturbed run has ended as the undisturbed one, in a sentence."""
    undisturbed, disturbed = entry["digests"]
    if len(undisturbed) == 1 and undisturbed == disturbed and entry["same_losses"]:
        return (
            f"All {entry['losses']:,} losses of its ranks, those of updates that were done again "
            "included, and the parameters at the end have the bits of the undisturbed run."
        )
    return "**It has not the bits of the undisturbed run.**"


def given_anew(hosts: Sequence[str], every: int) -> str:
    """Where the command was given anew, in words."""
    if not hosts:
        return "no"
    return "on all hosts" if len(hosts) == every else f"on {', '.join(hosts)}"


def replan(entry: Entry) -> Result:
    """Trainings whose links change: what is noticed, what it costs, and what follows."""
    jitter, ratios = entry["noise"], entry["cost"]
    nodes, rate, slow, rounds = (entry[name] for name in ("nodes", "rate", "slow", "rounds"))
    words = (
        f"{entry['model']} beside an emulated accelerator on {nodes} nodes, whose links carry "
        f"{rate}, then {slow}, then {rate} again; {rounds} rounds in turn after each change. "
        f"Watching, where nothing changes: {median(ratios):.3f} times as long (in "
        f"{len(ratios)} turns {min(ratios):.3f} to {max(ratios):.3f}). Links that jitter, "
        f"{jitter['updates']} updates: {jitter['searches']} searches."
    )
    rows = [_replanned(row) for row in entry["rows"]]
    columns = (
        "links now", "updates until noticed", "updates of the search", "kept", "a new run keeps",
        "before", "seconds", "of the new run", "as before", "searched again / new run",
        "within 5 %",
    )  # fmt: skip
    drawn = [
        (
            *(hour["name"], f"{hour['hours']:.0f}", len(hour["searches"])),
            *(f"{sum(hour['searches']) / len(hour['searches']):.2f}", max(hour["searches"])),
            *(_latest(hour["seen"]), sum(one is None for one in hour["seen"])),
        )
        for hour in entry["hours"]
    ]
    headings = (
        "noise that is drawn", "hours", "draws", "searches, mean", "searches, most",
        "updates until a tenth of the speed is noticed, most", "not noticed",
    )  # fmt: skip
    tables = Table(columns, rows), Table(headings, drawn)
    return Result(f"Replan, {entry['date']}", [measured_with(entry, words), *tables])


def _replanned(row: Mapping[str, Any]) -> tuple[object, ...]:
    seconds, choices = row["seconds"], row["choices"]
    names = ("searched again", "planned so", "as before")
    again, planned, before = (median(seconds[name]) for name in names)
    ratio = again / planned
    return (
        *(row["rate"], row["noticed"], row["searched"], *(choices[name] for name in names)),
        *(f"{again:.3f}", f"{planned:.3f}", f"{before:.3f}", f"{ratio:.3f}", yes(ratio <= 1.05)),
    )


def _latest(updates: Sequence[int | None]) -> object:
    return max((one for one in updates if one is not None), default="")


def time_to_loss(entry: Entry) -> Result:
    """Predicted and measured times to losses, every row, those that an interval misses marked."""
    found = entry["figures"]
    words = (
        f"{entry['ranks']} ranks; a calibration of {entry['calibration']} updates, losses of the "
        f"baseline after 3 and 4 times as many, in a run of {entry['updates']}; {entry['rounds']} "
        f"turns of each strategy at each rate. Kendall's tau {_tau(found['tau'])} of "
        f"{found['pairs']} pairs told apart ({_tau(found['tau_forecast'])} where plan forecasts "
        f"the seconds); the predicted first takes at most {_regret(found['regret'])} the best, "
        f"what is recommended at most {_regret(found['regret_of_choice'])} it; "
        f"{_part(found['holds'])} of the measured times lie in their interval of 80 %, and "
        f"{_part(found['holds_ratio'])} of those over the baseline's."
    )
    columns = (
        "task", "rate", "times the calibration", "strategy", "updates", "predicted", "s",
        "predicted s", "in it", "over the baseline's", "predicted", "in it", "plan's s",
        "updates by noise scale",
    )  # fmt: skip
    rows = [
        (
            *(r["task"], r["rate"], r["times"], r["strategy"], _number(r["updates"][1])),
            *(_bounds(r["predicted_updates"]), _number(r["time"][1]), _bounds(r["predicted_time"])),
            _held(r, r["time"][1], r["predicted_time"]),
            f"{r['measured_ratio']:.2f}" if r["reached"] else "",
            *(_bounds(r["ratio"], 2), _held(r, r["measured_ratio"], r["ratio"])),
            _number(r["forecast"]) if r["forecast"] else "",
            _bounds(r["noise_scale"]) if r["noise_scale"] else "",
        )
        for r in entry["rows"]
    ]
    choices = [(where, name) for where, name in entry["chosen"].items()]
    parts: list[str | Table] = [measured_with(entry, words), Table(columns, rows)]
    parts.append(Table(("task, rate, times", "recommended"), choices))
    return Result(f"Time to loss, {entry['date']}", parts)


def _tau(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def _part(value: float | None) -> str:
    return "an unknown part" if value is None else f"{value:.0%}"


def _regret(part: float | None) -> str:
    return "an unknown time more than" if part is None else f"{part:.1%} more than"


def _number(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _bounds(values: Sequence[float | None], digits: int | None = None) -> str:
    low, middle, high = (
        "never" if v is None else _number(v) if digits is None else f"{v:.{digits}f}"
        for v in values
    )
    return f"{middle} ({low}..{high})"


def _held(row: Mapping[str, Any], value: float, bounds: Sequence[float | None]) -> str:
    """Whether a measured value lies in its interval; nothing where it was not reached."""
    low, _, high = bounds
    inside = row["reached"] and (low or 0) <= value and (high is None or value <= high)
    return yes(inside) if row["reached"] else ""
