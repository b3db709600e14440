"""Tables of what travels between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.result import (
    Entry,
    Result,
    Table,
    measured_with,
    mebibytes,
    one_table,
    span,
    spread,
    yes,
)


def exchange(entry: Entry) -> Result:
    """Every variant of one model against the best DDP and the bound."""
    codecs = set(entry.get("codecs") or ())
    what = " with codecs" if codecs else ""
    if codecs and codecs <= {"bf16", "fp16"}:
        what = " with 16-bit codecs"
    if any(row["name"] == "FSDP2, default" for row in entry["rows"]):
        what = " beside FSDP2 in all settings"
    columns = (
        "variant", "median s", "quartiles", "exposed s", "CPU s", "peak MiB", "exchanges",
        "x bound", "quartiles", "x best DDP", "quartiles",
    )  # fmt: skip
    words = (
        f"{entry['megabytes']:.0f} MB of gradients, {entry['nodes']} nodes at {entry['rate']}, "
        f"{entry['rounds']} rounds, {computing_in_words(entry)}. Compute {entry['compute_s']:.3f} "
        f"s, wire {entry['wire_s']:.3f} s, bound {entry['bound_s']:.3f} s."
    )
    title = f"Exchange{beside(entry)}{what}, {entry['model']} at {entry['rate']}"
    rows = [_exchange_row(row, entry["bound_s"]) for row in entry["rows"]]
    return one_table(entry, title, words, columns, rows)


def _exchange_row(row: Mapping[str, Any], bound: float) -> list[str]:
    low, high = (row.get(f"to_bound_{end}", row[end] / bound) for end in ("low", "high"))
    return [
        row["name"], f"{row['median']:.3f}", span(row["low"], row["high"], 3),
        f"{row['exposed']:.3f}", f"{row['cpu']:.2f}", mebibytes(row.get("peak_bytes")),
        str(row["collectives"] or ""), f"{row['to_bound']:.2f}", span(low, high, 2),
        f"{row['to_best_ddp']:.3f}", span(row["to_best_ddp_low"], row["to_best_ddp_high"], 3),
    ]  # fmt: skip


def on_accelerator(entry: Entry) -> bool:
    """Whether cores were free beside the computing; files of old say nothing."""
    return bool(entry.get("compute") == "accelerator")


def beside(entry: Entry) -> str:
    """The words of a title for it."""
    return " beside an accelerator" if on_accelerator(entry) else ""


def computing_in_words(entry: Entry) -> str:
    """Who computed, in a few words."""
    cores = {"bound": ", each rank bound to its share of the cores", "free": ""}
    where = cores[entry.get("cores", "bound")]
    if not on_accelerator(entry):
        return f"computing on the cores that exchange{where}"
    as_wire = " as long as the wire" if entry["compute_seconds"] == "wire" else ""
    return f"an emulated accelerator computing{as_wire}, cores free for the exchange{where}"


def memory(entry: Entry) -> Result:
    """The peak memory of every variant of an exchange."""
    coded = " with codecs" if entry.get("codecs") else ""
    words = (
        f"{entry['megabytes']:.0f} MB of gradients, {entry['nodes']} ranks; each variant alone in "
        "its processes."
    )
    rows = [(row["name"], mebibytes(row["peak_bytes"])) for row in entry["rows"]]
    title = f"Peak memory{coded}, {entry['model']}"
    return one_table(entry, title, words, ("variant", "peak MiB"), rows)


def auto(entry: Entry) -> Result:
    """What `auto` kept, and every exact choice."""
    words = (
        f"{entry['megabytes']:.0f} MB of gradients, {entry['nodes']} ranks at {entry['rate']}, "
        f"{computing_in_words(entry)}; {entry['rounds']} rounds of the grid."
    )
    rows = [
        (row["name"] + " (kept)" * (row["name"] == entry["kept"]), *spread(row["quartiles"], 3))
        for row in entry["rows"]
    ]
    columns = ("choice", "median s", "quartiles")
    title = f"Auto{beside(entry)}, {entry['model']} at {entry['rate']}"
    return one_table(entry, title, words, columns, rows, between=[auto_in_words(entry)])


def auto_in_words(entry: Entry) -> str:
    """What the search kept, after how many updates, and how good that is."""
    against = "the best of the grid"
    if entry["finals"]:
        middle, quartiles = spread(entry["ratio"], 3)
        known = "..".join(f"{end:.3f}" for end in entry["interval"])
        interval = f", 95 % interval of the median {known}" if known else ""
        found = f"{entry['best']}: {middle} (quartiles {quartiles}{interval})"
        against = f"in {entry['finals']} rounds against {found}"
    kept = f"Kept after {entry['updates']} updates: {entry['kept']}; {against}."
    if not entry["losses"]:
        return f"{kept} An emulated accelerator learns nothing: no losses to compare."
    differences = entry["differences"]
    return (
        f"{kept} The losses of {len(entry['losses']['auto'])} updates differ from those of the "
        f"default strategy by at most {differences['auto']:.1e} of them, those of `direct`, which "
        f"sums in another order, by {differences['direct']:.1e}."
    )


def transports(entry: Entry) -> Result:
    """The exchange alone, by transport, size of segments, and whether cores are free."""
    words = (
        f"{entry['megabytes']} MB between {entry['nodes']} nodes, nothing else: in multiples of "
        f"the wire time. {entry['rounds']} rounds."
    )
    by_size = sorted(
        entry["rows"], key=lambda r: (r["segment_megabytes"], r["cores"], r["transport"])
    )
    rows = [
        (
            *(f"{r['segment_megabytes']:g}", r["cores"], r["transport"]),
            *(f"{r['median']:.2f}", span(r["low"], r["high"], 2)),
        )
        for r in by_size
    ]
    columns = ("segments MB", "cores", "transport", "median", "quartiles")
    return one_table(entry, f"Transports at {entry['rate']}", words, columns, rows)


def fsdp2(entry: Entry) -> Result:
    """FSDP2 with torch's collectives and with ours: time, bytes and loss of each variant."""
    words = (
        f"GPT-2 ({entry['model']}, {entry['megabytes']:.1f} MB) on {entry['nodes']} nodes: seconds "
        f"of an update, the MB that a node sends in it, by the counters of its interface, and the "
        f"held-out loss after {entry['updates']} updates. {entry['rounds']} rounds."
    )
    first = entry["rows"][0]
    rows = [
        (
            *(r["variant"], *spread(r["quartiles"], 3)),
            *spread((1 / ratio for ratio in reversed(r["ratio"])), 2),
            *(f"{r['sent_bytes'] / 1e6:.1f}", f"{r['sent_bytes'] / first['sent_bytes']:.2f}"),
            f"{r['loss']:.4f}",
        )
        for r in entry["rows"]
    ]
    columns = (
        *("variant", "s", "quartiles", f"times as fast as {first['variant']}", "quartiles"),
        *("MB sent", "times its bytes", "loss"),
    )
    return one_table(entry, f"FSDP2 at {entry['rate']}", words, columns, rows)


def allreduce(entry: Entry) -> Result:
    """One all-reduce by size and transport, on hosts with several ranks."""
    several = entry["nodes"] > 1
    where = f"{entry['numbering']} at {entry['rate']}" if several else "one host"
    words = (
        f"Milliseconds on the slowest rank, {entry['rounds']} rounds, cores "
        f"{'busy' if entry['busy'] else 'free'}."
    )
    first = entry["rows"][0]["transport"]
    rows = [
        (
            *(r["kilobytes"], r["transport"], f"{r['median']:.2f}"),
            *(span(r["low"], r["high"], 2), f"{r['gain']:.2f}"),
        )
        for r in entry["rows"]
    ]
    columns = ("KB", "transport", "median", "quartiles", f"times as fast as {first}")
    shape = f"{entry['nodes']} x {entry['ranks_per_node']} ranks"
    return one_table(entry, f"One all-reduce, {shape}, {where}", words, columns, rows)


def operators(entry: Entry) -> Result:
    """Operators of slipstream.comm beside the bare calls."""
    rows = entry["rows"]
    columns = (
        "operator", "size", "pass", "bare", "quartiles", "by hand", "slipstream", "quartiles",
        "within", "with check",
    )  # fmt: skip
    words = (
        f"Microseconds on {entry['ranks']} ranks over loopback, medians. Bare: the calls of "
        "torch.distributed that move the same data; by hand: these in the least autograd.Function; "
        "within: at most 5 % or 20 microseconds above the bare calls, as "
        f"{sum(row['within'] for row in rows)} of {len(rows)} are."
    )
    alone = (
        "Python alone, with collectives that return at once, on the slower of the ranks. Within: "
        "the forward pass at most 20 microseconds above the bare call; both passes, which are two "
        "operators and a run of autograd, at most 20 an operator above those by hand."
    )
    parts: list[str | Table] = [
        measured_with(entry, words),
        Table(columns, [*map(_operator_row, rows)]),
        alone,
        Table(columns[:-1], [_operator_row(row)[:-1] for row in entry["alone"]]),
    ]
    return Result(f"Operators between ranks, {entry['date']}", parts)


def _operator_row(row: Mapping[str, Any]) -> Sequence[str]:
    """In microseconds."""
    found = {
        way: spread([1e6 * seconds for seconds in row[way]], 0) if row.get(way) else ("", "")
        for way in ("bare", "by hand", "ours", "checked")
    }
    names = (row["operator"], row["size"], row["pass"])
    hand, checked = found["by hand"][0], found["checked"][0]
    return (*names, *found["bare"], hand, *found["ours"], yes(row["within"]), checked)
