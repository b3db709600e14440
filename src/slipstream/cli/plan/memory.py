"""``slipstream plan --memory``: what a model takes in training, and the largest batch that fits.

Never imports torch: ``_plan_count`` counts, in a process of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.errors import ModelError, StrategyError

COUNT = "slipstream.cli.plan.count"
OPTIMIZERS = ("adamw", "adam", "sgd", "momentum", "adagrad", "rmsprop", "lamb", "lars")
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
_MEANING = (
    "Counted on shapes, before anything trains; with a gradient as large as the largest tensor "
    "that is saved, a rule of thumb. Left out are buffers of libraries and what an allocator "
    "loses. Offload: the last block stays, one is fetched ahead. Products: of matrices (keep "
    "matmul) and convolutions. bf16 and fp16: precision half_weights; autocast saves more."
)


def parse_bytes(text: str) -> int:
    """A size as people write it.

    Raises:
        StrategyError: it is none.

    Example:
        >>> parse_bytes("32GiB"), parse_bytes("500 MB")
        (34359738368, 500000000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(I?)B", text.strip().upper())
    if match is None or not float(match[1]):
        raise StrategyError(f"--memory {text!r}: write a size such as 32GiB, 80GB or 500MiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]])


def plan_memory(
    memory: str, model: str | None, length: int | None, optimizer: str, dtype: str, as_json: bool
) -> None:
    """Count, and print tables or JSON.

    Raises:
        StrategyError: an option is wrong.
        ModelError: the model cannot be counted.
    """
    job = {"memory": parse_bytes(memory), "model": model, "length": length}
    if model is None:
        raise StrategyError("--memory needs --model: bert-large, gpt2 ... or FILE.py:FUNCTION")
    if optimizer not in OPTIMIZERS:
        raise StrategyError(f"--optimizer {optimizer}: allowed: {', '.join(OPTIMIZERS)}")
    if dtype not in ("fp32", "bf16", "fp16"):
        raise StrategyError(f"--dtype {dtype}: allowed: fp32, bf16, fp16")
    told = json.dumps(job | {"optimizer": optimizer, "dtype": dtype})
    with TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        count = [sys.executable, "-m", COUNT, told, str(answer)]
        code = subprocess.run(count, stdout=subprocess.DEVNULL).returncode
        if not answer.exists():
            raise ModelError(
                f"--model {model}: the process that counts ended with code {code}; what it said is "
                "above"
            )
        found = json.loads(answer.read_text())
    if "error" in found:
        raise ModelError(found["error"])
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    console = Console()
    console.print(by_way(found, f"{model}: the largest batch in {memory}"))
    console.print(by_kind(found, optimizer))


def by_way(found: Mapping[str, Any], title: str) -> Table:
    """The largest batch with each way of holding activations, and what takes how much then."""
    table = Table(title=title, title_justify="left", caption=_MEANING, caption_justify="left")
    table.add_column("activations")
    for heading in ("a sample", "largest batch", "against", "activations then", "all then"):
        table.add_column(heading, justify="right")
    state = found["parameters"] + found["gradients"] + found["optimizer"]
    first = found["ways"][0]["batch"]
    for way in found["ways"]:
        batch, own, passing = way["batch"], way["activations"], found["passing"]
        then = own["fixed"] + own["each"] * batch
        every = state + then + passing["fixed"] + passing["each"] * batch
        table.add_row(
            Text(way["name"]),
            size(own["each"]),
            str(batch) if batch else "none",
            f"{batch / first:.1f}x" if first else "-",
            size(then),
            size(every) if batch else f"{size(state)} without any",
        )
    return table


def by_kind(found: Mapping[str, Any], optimizer: str) -> Table:
    """What does not depend on the batch, and what each block saves of a sample."""
    table = Table(title="What takes memory", title_justify="left")
    table.add_column("")
    table.add_column("fixed", justify="right")
    table.add_column("a sample", justify="right")
    table.add_row("parameters, with masters", size(found["parameters"]), "")
    table.add_row("gradients", size(found["gradients"]), "")
    table.add_row(f"state of {optimizer}", size(found["optimizer"]), "")
    table.add_section()
    for (fixed, each), group in groupby(found["blocks"], lambda b: (b["fixed"], b["each"])):
        paths = [block["path"] for block in group]
        name = paths[0] or "outside of blocks"
        if len(paths) > 1:
            name = f"{paths[0]} to {paths[-1]}, each of {len(paths)}"
        table.add_row(Text(name), size(fixed), size(each))
    passing = found["passing"]
    table.add_row("a gradient in backward", size(passing["fixed"]), size(passing["each"]))
    return table


def size(num_bytes: float) -> str:
    """Bytes as people read them.

    Example:
        >>> size(3 * 2**30), size(2**20 * 1.5), size(12), size(0)
        ('3.00 GiB', '1.50 MiB', '12 B', '0')
    """
    if not num_bytes:
        return "0"
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(num_bytes) >= 2**power:
            return f"{num_bytes / 2**power:.2f} {unit}"
    return f"{num_bytes:.0f} B"
