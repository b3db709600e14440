"""Sentences of README and docs that hold figures, written from the results.

`tests/test_benchmarks.py` looks each of them up there. After a new result
``python benchmarks/tables.py`` prints those that it does not find there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Entries = Sequence[Mapping[str, Any]]


def claims(every: Entries) -> list[str]:
    """The sentences.

    Args:
        every: all results.
    """
    return [
        *_rivals(_of("exchange", every)),
        *_codecs(_of("exchange", every)),
        *_convergence(_of("convergence", every)),
        *_recompute(_of("recompute", every)),
        *_operators(_of("operators", every)),
        *_prediction(_of("prediction", every)),
    ]


def missing(pages: Iterable[Path], every: Entries) -> list[str]:
    """Those that no page holds, however its lines are broken."""
    text = " ".join(word for page in pages for word in page.read_text().split())
    return [claim for claim in claims(every) if claim not in text]


def _of(benchmark: str, every: Entries) -> list[Mapping[str, Any]]:
    return [entry for entry in every if entry["benchmark"] == benchmark]


def _span(values: Sequence[float], digits: int = 2) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def _rivals(exchanges: Entries) -> Iterator[str]:
    rows = [row for entry in exchanges for row in entry["rows"]]
    sharded = [r["to_best_ddp"] for r in rows if r["name"].startswith(("FSDP2, keep", "ZeRO-1"))]
    default, prefetch = (
        row["to_best_ddp"]
        for name in ("FSDP2, default", "FSDP2, prefetch")
        for row in rows
        if row["name"] == name
    )
    yield (
        f"FSDP2 that keeps parameters and ZeRO-1 take {_span(sharded, 1)} times as long as DDP on "
        f"gloo (tables above); FSDP2 with its defaults {default:.1f} times, with prefetch "
        f"{prefetch:.1f} "
    )


def _codecs(exchanges: Entries) -> Iterator[str]:
    speeds: dict[str, list[float]] = {"bf16": [], "int8": [], "powersgd": []}
    for entry in exchanges:
        if entry["rate"] not in ("1gbit", "300mbit"):
            continue
        for row in entry["rows"]:
            name = row["name"].removeprefix("slipstream, ")
            if name in speeds:
                speeds[name].append(1 / row["to_best_ddp"])
    half, int8, powersgd = map(_span, speeds.values())
    yield f"bf16 is {half} times as fast, int8 {int8} times, PowerSGD {powersgd} times"


def _convergence(trainings: Entries) -> Iterator[str]:
    [text] = (entry for entry in trainings if entry["task"] == "text")
    gaps = {row["codec"]: 100 * row["gap"] for row in text["rows"]}
    usual = [gaps[name] for name in ("bf16", "fp16", "int8", "onebit", "powersgd")]
    yield (
        f"after {text['steps']} updates of a language model the held-out loss is {_span(usual)} % "
        "above dense gradients for bf16, fp16, int8, onebit and PowerSGD with default settings, "
        f"and for DGC {gaps['dgc']:.1f} % above SGD with dense gradients"
    )
    early = gaps["onebit, from step 100"]
    yield f"One-bit gradients from update 100 instead of 1000 lose {early:.1f} %."


def _recompute(runs: Entries) -> Iterator[str]:
    rows = [row for run in runs for row in run.get("rows", ()) if row["way"] == "every block"]
    kept, torchs = ([row[name][1] for row in rows] for name in ("ratio", "to_torch"))
    yield (
        f"Recomputing every block takes {_span(kept)} times the time of keeping everything, and "
        f"{_span(torchs)} times that of torch's checkpoint"
    )


def _operators(runs: Entries) -> Iterator[str]:
    rows = [row for run in runs for row in run["rows"]]
    large = [row["within"] for row in rows if row["size"] == "16 MB"]
    small = [row["within"] for row in rows if row["size"] != "16 MB"]
    yield (
        f"up to 1 MB {sum(small)} of {len(small)} rows are within 5 % or 20 µs of them, at 16 MB "
        f"{sum(large)} of {len(large)}"
    )


def _prediction(runs: Entries) -> Iterator[str]:
    """Of the runs that measured advice, too."""
    runs = [run for run in runs if run.get("advice")]
    rows = [row for run in runs for row in run["rows"] if row["what_if"] is not None]
    off = [100 * abs(row["what_if"] / row["measured"] - 1) for row in rows]
    every = [advice for run in runs for advice in run["advice"]]
    given = [advice for advice in every if advice["promised"]]
    promised, brought = ([100 * one[name] for one in given] for name in ("promised", "measured"))
    yield f"{median(off):.1f} % off (median; worst {max(off):.1f} %) on {len(every)} testbeds"
    yield (
        f"`advise` promised {_span(promised, 1)} % on {len(given)} of them and brought "
        f"{_span(brought, 1)} %"
    )
