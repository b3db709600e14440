"""Tables of whole trainings: what they learn, and how they are fed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.result import Entry, Result, Table, measured_with, one_table, spread, yes


def precision(entry: Entry) -> Result:
    """What 16 bits do to the result of a training, or to its speed."""
    title = f"Precision, {entry['task']}"
    if entry["task"] == "speed":
        words = (
            f"One process with {entry['threads']} threads on a CPU with {entry['instructions']}; a "
            f"BERT of {entry['layers']} layers and {entry['parameters'] / 1e6:.0f} M parameters, "
            f"{entry['batch']} x {entry['length']} words, {entry['rounds']} rounds."
        )
        rows = [(r["name"], f"{r['seconds']:.3f}", *spread(r["times"], 2)) for r in entry["rows"]]
        speeds = ("precision", "median s", "x fp32", "quartiles")
        return one_table(entry, title, words, speeds, rows)
    words = (
        f"{entry['steps']} updates on one process, {entry['seeds']} seeds; allowed: "
        f"{_allowed(entry)} fp32. fp16 is emulated."
    )
    columns = (
        *("precision", _score_of(entry), "deviation of the seeds", "against fp32", "within"),
        "updates skipped",
    )
    scores = [(*_scores(entry, r), f"{r['skipped']:.1f}") for r in entry["rows"]]
    picture = f"![losses on the way](precision-{entry['task']}.png)"
    return one_table(entry, title, words, columns, scores, between=[picture])


def convergence(entry: Entry) -> Result:
    """What each codec does to the result of a training."""
    words = (
        f"{entry['steps']} updates on {entry['ranks']} ranks, {entry['seeds']} seeds; "
        f"allowed: {_allowed(entry)} dense."
    )
    columns = (
        *("codec", _score_of(entry), "deviation of the seeds", "against dense", "within"),
        "MB a step",
    )
    rows = [(*_scores(entry, r), f"{r['megabytes']:.3f}") for r in entry["rows"]]
    picture = f"![losses on the way](convergence-{entry['task']}.png)"
    title = f"Convergence, {entry['task']}"
    return one_table(entry, title, words, columns, rows, between=[picture])


def _gaps_of_seeds(entry: Entry, name: str) -> tuple[str, str]:
    """Median and range of a training's gaps, each to data parallelism from the same seed."""
    ends = {(run["name"], run["seed"]): run["scores"][-1] for run in entry["runs"]}
    dense = entry["rows"][0]["name"]
    gaps = [ends[name, seed] / ends[dense, seed] - 1 for seed in range(entry["seeds"])]
    return f"{median(gaps):+.2%}", f"{min(gaps):+.2%}..{max(gaps):+.2%}"


def local(entry: Entry) -> Result:
    """What meeting rarely does to a training, or to its speed."""
    if entry["kind"] == "loss":
        digits = entry["task"] == "digits"
        words = (
            f"{entry['steps']} updates on {entry['ranks']} ranks, an eighth of them warm-up; "
            f"{entry['seeds']} seeds. The gap is against data parallelism, at as many samples."
        )
        scores = [
            (
                r["name"],
                *(f"{r[k]:{'.2%' if digits else '.4f'}}" for k in ("score", "deviation")),
                f"{100 * r['gap']:+.2f} points" if digits else f"{r['gap']:+.2%}",
            )
            for r in entry["rows"]
        ]
        columns = ["training", _score_of(entry), "deviation of the seeds", "gap"]
        if entry["seeds"] > 1 and not digits:
            columns += ["median gap of the seeds", "gaps of the seeds"]
            scores = [(*row, *_gaps_of_seeds(entry, row[0])) for row in scores]
        _, _, path = entry["command"].partition("--json ")
        picture = f"![scores on the way]({Path(path).stem}.png)"
        seeds = f", {entry['seeds']} seeds" if entry["seeds"] > 1 else ""
        of_file = Path(path).stem.removeprefix("local-").removeprefix(entry["task"]).strip("-")
        named = f" ({of_file})" if of_file not in ("", str(entry["steps"])) else ""
        title = f"Local, {entry['task']}{named}, {entry['steps']} updates{seeds}"
        return one_table(entry, title, words, columns, scores, between=[picture])
    words = (
        f"{entry['nodes']} emulated hosts at {entry['rate']}, {entry['megabytes']:.1f} MB of "
        f"gradients (on the wire {entry['wire_s']:.2f} s), {entry['rounds']} rounds; computing on "
        f"{'an accelerator' if entry['compute'] == 'accelerator' else 'the same cores'}."
    )
    speeds = [
        (
            *(r["name"], f"{r['median']:.3f}", f"{r['low']:.3f}..{r['high']:.3f}"),
            *(f"{r['gain']:.2f}", f"{r['of_compute']:.2f}", f"{r['sent'] / 2**20:.3f}"),
            f"{r['predicted']:.3f}" if r.get("predicted") else "",
        )
        for r in entry["rows"]
    ]
    headings = (
        *("training", "s an update", "quartiles", "times as fast as the best DDP"),
        *("of the speed without exchange", "MB sent an update", "predicted s"),
    )
    if entry.get("auto"):
        config = entry["auto"]
        chosen = ", ".join(f"{name} {config[name]}" for name in ("steps", "fragments", "delay"))
        words += f" auto chose {chosen}, codec {(config['codec'] or {}).get('kind')}."
    ratios = [r["predicted"] / r["median"] for r in entry["rows"] if r.get("predicted")]
    if ratios:
        off = median(abs(ratio - 1) for ratio in ratios)
        words += f" Predictions of {len(ratios)} settings are {off:.1%} off in the median."
    where = "" if entry["compute"] == "accelerator" else ", the same cores"
    line = ""
    if entry.get("round_trip_ms") or entry.get("loss_percent"):
        line = f", {entry['round_trip_ms']:g} ms, {entry['loss_percent']:g} % lost"
        line += ", hosts set for it" * entry.get("keep_window", False)
    title = f"Local, {entry['model']} at {entry['rate']}{line}{where}"
    return one_table(entry, title, words, headings, speeds)


def local_clock(entry: Entry) -> Result:
    """How far trainings come in the same time."""
    words = (
        f"{entry['nodes']} emulated hosts at {entry['rate']} that compute on their own cores, a "
        f"small language model ({entry['task']}); the last look at the held-out loss within "
        f"{entry['seconds']:.0f} s of training, all that auto measures first included."
    )
    rows = [(r["name"], f"{r['updates']:.0f}", f"{r['loss']:.4f}") for r in entry["rows"]]
    columns = ("training", "updates", "held-out loss")
    _, _, path = entry["command"].partition("--json ")
    picture = f"![loss over the clock]({Path(path).stem}.png)"
    title = f"Local, {entry['task']} over the clock"
    return one_table(entry, title, words, columns, rows, between=[picture])


def unequal(entry: Entry) -> Result:
    """Hosts of which one is slower."""
    words = (
        f"{entry['nodes']} emulated hosts at {entry['rate']}, {entry['model']}, computing beside "
        f"an accelerator for {entry['compute_seconds']:g} s an update, {entry['slower']:g} times "
        f"as long on the first; {entry['updates']} updates of all hosts a turn, "
        f"{entry['rounds']} rounds. "
        f"Without any exchange all hosts together make {entry['sum']:.2f} updates a second."
    )
    rows = [
        (
            *(r["name"], f"{r['rate']:.2f}", f"{r['of_sum']:.2f}"),
            f"{r['low']:.2f}..{r['high']:.2f}",
        )
        for r in entry["rows"]
    ]
    columns = ("training", "updates a second", "of the sum", "quartiles")
    return one_table(entry, "One host at half speed", words, columns, rows)


def adapters(entry: Entry) -> Result:
    """Scripts of other frameworks, before and after."""
    words = (
        f"The scripts of examples/frameworks, {entry['nodes']} emulated hosts with a rank each, "
        f"{entry['updates']} updates, {entry['rounds']} runs of each in an order shuffled; a small "
        "GPT-2 of 3.2 million parameters. The loss is the mean of the last five of rank 0."
    )
    rows = [
        (
            *(r["framework"], r["script"], r["strategy"]),
            f"{median(r['seconds']):.3f}",
            f"{min(r['seconds']):.3f} .. {max(r['seconds']):.3f}",
            *(f"{r['times_as_fast']:.2f}", f"{r['loss']:.3f}"),
        )
        for r in entry["rows"]
    ]
    columns = (
        *("framework", "script", "strategy"),
        *("s an update", "least .. most", "times as fast", "loss"),
    )
    return one_table(entry, f"Other loops, {entry['rate']}", words, columns, rows)


def checks(entry: Entry) -> Result:
    """Iterations that are watched, looked at and proved."""
    words = (
        f"{entry['ranks']} ranks on the same cores, {entry['updates']} updates of each variant in "
        f"turns a round, {entry['rounds']} rounds. The heartbeat's threads compute for "
        f"{entry['thread']:.2%} of the time."
    )
    rows = [
        (
            *(r["model"], r["name"], f"{r['milliseconds']:.2f}", f"{r['ratio'] - 1:+.1%}"),
            f"{r['low'] - 1:+.1%} .. {r['high'] - 1:+.1%}",
        )
        for r in entry["rows"]
    ]
    columns = ("model", "checks", "ms an update", "more than without", "quartiles")
    return one_table(entry, "Checks", words, columns, rows)


def kills(entry: Entry) -> Result:
    """Trainings that were killed, and ended as if nobody had."""
    words = (
        f"One of {entry['ranks']} ranks gets SIGKILL at a random moment, and both start anew from "
        "the newest checkpoint that is whole. Equal: every loss of every life, and the parameters "
        "at the end, are those of an undisturbed run, bit for bit."
    )
    rows = [(r["setting"], r["kills"], r["torn"], "all") for r in entry["rows"]]
    columns = ("training", "kills", "while a checkpoint was being written", "equal")
    return one_table(entry, "Kills", words, columns, rows)


def wrong_updates(entry: Entry) -> Result:
    """Faults that raise no error by themselves, or none at all."""
    title = f"Wrong updates, {entry['part']}"
    if entry["part"] == "none":
        words = (
            f"Trainings without a fault, a check each {entry['every']} updates; no alarm, which "
            "would have ended this benchmark."
        )
        quiet = [
            (r["model"], r["transport"], r["codec"] or "none", r["updates"], r["warnings"])
            for r in entry["quiet"]
        ]
        columns = ("model", "transport", "codec", "updates", "warnings")
        return one_table(entry, title, words, columns, quiet)
    words = (
        f"A check each {entry['every']} updates; a fault at a random place, rank and update in "
        "each run, the transports by turns. Found: on all ranks, within two checks. Named: the "
        "right rank, and the right segment, tensor or setting. Updates: from the fault until then."
    )
    rows = [
        (
            *(r["fault"], r["model"], ", ".join(r["transports"]), r["runs"], r["found"]),
            *(r["named"], f"{r['median']:g}", r["most"]),
        )
        for r in entry["rows"]
    ]
    headings = (
        "fault", "model", "transports", "runs", "found", "named right", "updates, median", "most",
    )  # fmt: skip
    return one_table(entry, title, words, headings, rows)


def _allowed(entry: Entry) -> str:
    return "0.5 points below" if entry["task"] == "digits" else "2 % above"


def _score_of(entry: Entry) -> str:
    return "held-out accuracy" if entry["task"] == "digits" else "held-out loss"


def _scores(entry: Entry, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Accuracies in percent and points, losses as they are."""
    digits = entry["task"] == "digits"
    gap = f"{100 * row['gap']:+.2f} points" if digits else f"{row['gap']:+.2%}"
    score, deviation = (f"{row[k]:{'.2%' if digits else '.4f'}}" for k in ("score", "deviation"))
    return row["codec"], score, deviation, gap, yes(row["within"])


def large_batch(entry: Entry) -> Result:
    """Small batches, and batches sixteen times as large, over as many epochs."""
    words = (
        "Three seeds; each optimizer at the best of its seven learning rates, chosen on other data "
        "and seeds."
    )
    rows = [
        (
            *(r["task"], r["optimizer"], r["batch"], r["updates"], f"{r['chosen']:g}"),
            f"{fmean(r['accuracies']):.1%}",
            f"{min(r['accuracies']):.1%}..{max(r['accuracies']):.1%}",
            f"{100 * r['gap']:+.1f} points",
        )
        for r in entry["rows"]
    ]
    columns = (
        "task", "optimizer", "batch", "updates", "learning rate", "held-out accuracy", "seeds",
        "against the small batch",
    )  # fmt: skip
    picture = "![accuracy on the way](large-batch.png)"
    return one_table(entry, "Large batches", words, columns, rows, between=[picture])


def loading(entry: Entry) -> Result:
    """Epochs by how their batches are loaded."""
    words = (
        f"Digits, batches of {entry['batch']}, {entry['workers']} workers or threads, "
        f"{entry['rounds']} rounds; times as fast as the DataLoader of the same round."
    )
    rows = [
        (
            *(r["network"], r["variant"], *spread([1e3 * s for s in r["seconds"]], 1)),
            *(*spread(r["to_plain"], 2), *spread(r["to_persistent"], 2), f"{r['waited']:.1%}"),
        )
        for r in entry["rows"]
    ]
    columns = (
        "network", "variant", "ms an epoch", "quartiles", "x workers", "quartiles", "x persistent",
        "quartiles", "waited",
    )  # fmt: skip
    return one_table(entry, "Loading batches", words, columns, rows)


def balance(entry: Entry) -> Result:
    """How evenly ranks compute, by how samples of different lengths are dealt."""
    words = (
        f"{entry['ranks']} ranks on one host, {entry['batch']} samples each on average, functions "
        "of the standard library, a small BERT; idle: the share of the ranks' time in which they "
        "would wait for the slowest, predicted by tokens, or the fitted cost, and measured by "
        f"ranks that compute in turn; {entry['rounds']} rounds."
    )
    rows = [
        (
            *(r["variant"], *(f"{r[name]:.1%}" for name in ("predicted", "padding", "idle"))),
            *(*spread(r["tokens_per_second"], 0), *spread(r["to_random"], 2)),
        )
        for r in entry["rows"]
    ]
    columns = (
        "dealt", "idle, predicted", "padding", "idle, measured", "tokens/s", "quartiles",
        "x random padded", "quartiles",
    )  # fmt: skip
    unequal = [
        (r["variant"], f"{r['tokens_per_second']:.0f}", f"{r['to_sum']:.2f}", r["speeds"])
        for r in entry["unequal"]
    ]
    parts: list[str | Table] = [
        measured_with(entry, words),
        Table(columns, rows),
        "One of the ranks may use half as much of a core as the others. *x the sum*: tokens a "
        "second over the sum of what each rank reached while the others waited.",
        Table(("strategy", "tokens/s", "x the sum", "speeds"), unequal),
    ]
    return Result(f"Samples dealt to ranks, {entry['date']}", parts)


def soak(entry: Entry) -> Result:
    """Whether ranks stayed the same."""
    words = (
        f"{entry['updates']} updates on {entry['ranks']} ranks, {entry['turns']} turns of "
        f"{len(entry['codecs'])} codecs ({', '.join(entry['codecs'])}) on "
        f"{len(entry['transports'])} transports ({', '.join(entry['transports'])}), "
        f"{entry['overflows']} gradients made infinite, {entry['skipped']} updates skipped: "
        "parameters and the optimizer's state bit-equal on all ranks and finite after every "
        f"turn. `{entry['command']}`"
    )
    return Result(f"Soak, {entry['date']}", [words])
