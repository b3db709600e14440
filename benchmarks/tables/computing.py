"""Tables of what ranks compute and keep."""

from __future__ import annotations

import shlex

from benchmarks.result import (
    Entry,
    Result,
    Table,
    measured_with,
    mebibytes,
    one_table,
    shown,
    span,
    spread,
)


def overhead(entry: Entry) -> Result:
    """The cost where nothing can be gained."""
    rows = [
        (
            *(r["part"], r["name"], f"{1e3 * r['median']:.3f}"),
            *(span(1e3 * r["low"], 1e3 * r["high"], 3), f"{r['ratio']:.4f}"),
            *(f"{r['ratio_error']:.4f}", span(r["ratio_low"], r["ratio_high"], 3)),
        )
        for r in entry["rows"]
    ]
    columns = ("part", "variant", "median ms", "quartiles", "ratio", "+- error", "quartiles")
    return one_table(entry, "Overhead", f"{entry['rounds']} rounds.", columns, rows)


def fusion(entry: Entry) -> Result:
    """Kernels or optimizers beside the plain code that they stand for."""
    rows = [
        (
            *(row["case"], row["variant"]),
            *spread([1e3 * seconds for seconds in row["seconds"]], 2),
            *spread(row["times_as_fast"], 2),
        )
        for row in entry["rows"]
    ]
    columns = ("case", "variant", "median ms", "quartiles", "times as fast", "quartiles")
    words = f"{entry['threads']} threads, {entry['rounds']} rounds."
    _, _, only = entry["command"].partition("--only ")
    only = f" of {shlex.split(only)[0]}" if only else ""
    title = f"{entry['part'].capitalize()}{only} on {entry['device']}"
    return one_table(entry, title, words, columns, rows)


def compiled(entry: Entry) -> Result:
    """torch.compile under data parallelism."""
    words = (
        f"{entry['megabytes']:.0f} MB of gradients, {entry['wire']:.2f} s on the wire, "
        f"{entry['rounds']} rounds."
    )
    rows = [
        (
            *(r["name"], *spread(r["seconds"], 3), f"{r['exposed']:.3f}"),
            *("" if r["hidden"] is None else f"{r['hidden']:.2f}", r["graphs"], r["breaks"]),
        )
        for r in entry["rows"]
    ]
    columns = (
        "variant", "median s", "quartiles", "exposed s", "hidden share", "graphs", "graph breaks",
    )  # fmt: skip
    where = f"{entry['nodes']} ranks, {entry['rate']}"
    title = f"torch.compile, {entry['model']}, {where}"
    return one_table(entry, title, words, columns, rows)


def bubbles(entry: Entry) -> Result:
    """Bubbles of the pipeline schedules, and what two ranks bring."""
    words = (
        f"GPT-2 of {entry['layers']} layers, width {entry['width']}, on {entry['ranks']} ranks of "
        f"one thread over loopback; micro-batches of {entry['samples']} x {entry['length']} words, "
        f"{entry['steps']} steps. The formula assumes stages of equal time and sending that takes "
        "none."
    )
    rows = [
        (
            *(r["schedule"], r["stages_per_rank"], r["micro_batches"]),
            " ".join(f"{100 * share:.0f}" for share in r["bubble"]),
            *(f"{100 * r['ideal']:.0f}", *spread(r["seconds"], 3)),
            f"{r['one_process_s'] / r['seconds'][1]:.2f}",
        )
        for r in entry["rows"]
    ]
    columns = (
        "schedule", "stages a rank", "micro-batches", "bubble by rank %", "formula %", "step s",
        "quartiles", "times one process",
    )  # fmt: skip
    return one_table(entry, "Pipeline", words, columns, rows)


def tensor_parallel(entry: Entry) -> Result:
    """Split layers beside DTensor's."""
    words = (
        f"Milliseconds of forward and backward on {entry['ranks']} ranks of one thread over "
        "loopback, medians: whole on every rank, split by torch's `parallelize_module`, split by "
        "slipstream."
    )
    rows = [
        (
            *(r["module"], f"{1e3 * r['whole'][1]:.2f}", f"{1e3 * r['torch'][1]:.2f}"),
            *spread([1e3 * seconds for seconds in r["slipstream"]], 2),
            f"{r['torch'][1] / r['slipstream'][1]:.2f}",
        )
        for r in entry["rows"]
    ]
    columns = ("module", "whole", "torch", "slipstream", "quartiles", "times as fast as torch")
    return one_table(entry, "Split layers", words, columns, rows)


def recompute(entry: Entry) -> Result:
    """Time and memory of blocks that are computed again."""
    model = entry.get("model", "BERT-Large")
    parts: list[str | Table] = [f"`{shown(entry)}`"]
    if (part := entry.get("batch")) is not None:
        parts.append(
            "BERT-Large, 512 tokens, eager attention, one sample: a forward keeps "
            f"{mebibytes(part['plain_bytes'])} MiB, with every block computed again "
            f"{mebibytes(part['kept_bytes'])} MiB, {part['ratio']:.1f} times less; "
            f"{part['ratio_with_a_block']:.1f} times, where the one block that is being "
            f"computed again counts ({mebibytes(part['block_bytes'])} MiB a sample)."
        )
    else:
        parts.append(
            f"{model}, {entry['runs']} iterations of each in turns on the CPU; MiB: by how "
            "much a process grows at most in forward and backward."
        )
        rows = [
            (
                *(r["way"], mebibytes(r["peak"]), f"{r['seconds'][1]:.3f}"),
                *(*spread(r["ratio"], 2), *spread(r["to_torch"], 3)),
            )
            for r in entry["rows"]
        ]
        columns = ("way", "MiB", "median s", "x kept", "quartiles", "x torch's", "quartiles")
        parts.append(Table(columns, rows))
    return Result(f"Recompute, {model}, {entry['date']}", parts)


def offload(entry: Entry) -> Result:
    """Bytes of a sample, time on the CPU, and batches on a GPU, with recomputation and offload."""
    parts: list[str | Table] = [measured_with(entry)]
    if (part := entry.get("bytes")) is not None:
        first = part["rows"][0]["measured_batch"]
        rows = [
            (
                *(r["name"], mebibytes(r["saved_each"]), r["estimated_batch"]),
                *(mebibytes(r["measured_each"]), r["measured_batch"]),
                f"{r['measured_batch'] / first:.1f}",
            )
            for r in part["rows"]
        ]
        parts += [
            "BERT-Large, 512 tokens, eager attention, AdamW, fp32: what is saved of a sample, as "
            "counted on shapes; by how much a process grows for a sample in forward and backward, "
            f"as measured; and the batches that follow for {part['limit'] / 2**30:.0f} GiB.",
            Table(("variant", "saved MiB", "batch", "measured MiB", "batch", "times"), rows),
        ]
    if (part := entry.get("time")) is not None:
        width, layers, heads, length = part["shape"]
        timed = [
            (
                *(r["name"], *spread(r["seconds"], 3), *spread(r["ratio"], 3)),
                *(mebibytes(r["peak"]), mebibytes(r.get("peak_with_files"))),
            )
            for r in part["rows"]
        ]
        columns = (
            "variant", "median s", "quartiles", "ratio", "quartiles", "peak MiB", "with files MiB",
        )  # fmt: skip
        parts += [
            f"BERT of {layers} layers, width {width}, {heads} heads, {length} tokens, batch "
            f"{part['batch']} on the CPU, {part['rounds']} rounds; offload to disk; peak: by how "
            "much the process grows in forward and backward; with files: with the system's cache "
            "of files, in which what was written may still lie. torch's `save_on_cpu` moves "
            "nothing where all is on the CPU; beside it stand the hooks of torch's tutorial, a "
            "file for each saved tensor.",
            Table(columns, timed),
        ]
    if (part := entry.get("cuda")) is not None:
        parts += [
            f"BERT-Large, 512 tokens, bf16 autocast, {part['gpu']} limited to "
            f"{part['limit'] / 2**30:.0f} GiB: the largest batch, and sequences a second with it.",
            Table(
                ("variant", "batch", "sequences/s", "quartiles"),
                [(r["name"], r["batch"], *spread(r["speed"], 2)) for r in part["rows"]],
            ),
        ]
    return Result(f"Recompute and offload, {entry['date']}", parts)
