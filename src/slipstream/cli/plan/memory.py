"""``slipstream plan --memory``: the memory of a training, and the largest batch that fits.

Starts ``count`` as a process, since it imports torch and runs the user's code; draws its numbers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.analysis.compact_table import compact
from slipstream.errors import ModelError, StrategyError

COUNT = "slipstream.cli.plan.count"
# Names of those that count.py makes, which imports torch; this file does not.
OPTIMIZERS = ("adamw", "adam", "sgd", "momentum", "adagrad", "rmsprop", "lamb", "lars")
_MEANING = (
    "Against: the batch of the first line. Activations and total: at the batch; where none fits, "
    "the total is of parameters, gradients and optimizer. Estimated on shapes, before training. A "
    "gradient counts as the largest saved tensor. Not counted: buffers of libraries, and "
    "fragmentation. Offload: the last block stays, one block is prefetched. Products: of matrices "
    "(keep matmul) and convolutions. bf16 and fp16: precision half_weights; autocast saves more."
)
_OF_SPEED = (
    " Samples/s: of all ranks, predicted from the trace: computing is taken to grow with the "
    "batch; the speed with offload or kept products is not known."
)


def parse_bytes(text: str) -> int:
    """Bytes of a size with its unit.

    Raises:
        StrategyError: not a size.

    Example:
        >>> parse_bytes("32GiB"), parse_bytes("500 MB")
        (34359738368, 500000000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(I?)B", text.strip().upper())
    if match is None or not float(match[1]):
        raise StrategyError(f"--memory {text!r}: write a size such as 32GiB, 80GB or 500MiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2]))


Speed = Callable[[int, float], float]
"""From a batch and the part of forward that is recomputed to samples a second."""


@dataclass(frozen=True)
class Estimated:
    """The training whose memory is estimated, as the options say."""

    memory: str
    model: str | None
    length: int | None
    optimizer: str
    dtype: str

    def job(self) -> str:
        """Arguments of the process, as JSON.

        Raises:
            StrategyError: an option has a wrong value.
        """
        memory = parse_bytes(self.memory)
        if self.model is None:
            raise StrategyError("--memory needs --model: bert-large, gpt2 ... or FILE.py:FUNCTION")
        if self.optimizer not in OPTIMIZERS:
            raise StrategyError(f"--optimizer {self.optimizer}: allowed: {', '.join(OPTIMIZERS)}")
        if self.dtype not in ("fp32", "bf16", "fp16"):
            raise StrategyError(f"--dtype {self.dtype}: allowed: fp32, bf16, fp16")
        return json.dumps(asdict(self) | {"memory": memory})


def plan_memory(wanted: Estimated, speed: Speed | None, as_json: bool) -> None:
    """Estimate the memory, and print tables or JSON.

    Raises:
        StrategyError: an option has a wrong value.
        ModelError: the model cannot be built, or does not run.
    """
    argument, model = wanted.job(), wanted.model
    with TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", COUNT, argument, str(answer)]
        code = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        if not answer.exists():
            raise ModelError(
                f"--model {model}: the process that builds it ended with code {code}; its messages "
                "are above"
            )
        document = json.loads(answer.read_text())
    if "error" in document:
        raise ModelError(document["error"])
    if speed is not None:
        _add_speeds(document["techniques"], speed)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    console = Console()
    console.print(by_technique(document, f"{model}: the largest batch in {wanted.memory}"))
    console.print("", by_part(document, wanted.optimizer))


def _add_speeds(techniques: Sequence[dict[str, Any]], speed: Speed) -> None:
    """Samples a second, where it is known what runs again and nothing is offloaded."""
    for technique in techniques:
        batch, share = technique["batch"], technique["recomputed"]
        is_known = batch and share is not None
        technique["samples_per_second"] = speed(batch, share) if is_known else None


def by_technique(document: Mapping[str, Any], title: str) -> Table:
    """The largest batch with each technique for activations, and the memory that it takes."""
    timed = "samples_per_second" in document["techniques"][0]
    table = compact(
        title,
        *("batch", "against", "a sample", "activations", "total"),
        *(["samples/s"] if timed else []),
        "technique",
        left=["technique"],
        caption=_MEANING + (_OF_SPEED if timed else ""),
    )
    state = document["parameters"] + document["gradients"] + document["optimizer"]
    passing = document["passing"]
    first = document["techniques"][0]["batch"]
    for technique in document["techniques"]:
        batch, saved = technique["batch"], technique["activations"]
        activations = saved["fixed"] + saved["each"] * batch
        total = state + activations + passing["fixed"] + passing["each"] * batch
        table.add_row(
            str(batch) if batch else "none",
            f"{batch / first:.1f}x" if first else "-",
            size(saved["each"]),
            size(activations) if batch else "-",
            size(total if batch else state),
            *([_speed(technique["samples_per_second"])] if timed else []),
            Text(technique["name"]),
        )
    return table


def _speed(samples_per_second: float | None) -> str:
    return "-" if samples_per_second is None else f"{samples_per_second:.4g}"


def by_part(document: Mapping[str, Any], optimizer: str) -> Table:
    """The memory that is independent of the batch, and what each block saves of a sample."""
    table = compact("What takes memory", "fixed", "a sample", "part", left=["part"])
    table.add_row(size(document["parameters"]), "", "parameters, with masters")
    table.add_row(size(document["gradients"]), "", "gradients")
    table.add_row(size(document["optimizer"]), "", f"state of {optimizer}")
    table.add_section()
    for (fixed, each), group in groupby(document["blocks"], lambda b: (b["fixed"], b["each"])):
        paths = [block["path"] for block in group]
        name = paths[0] or "outside of blocks"
        if len(paths) > 1:
            name = f"each of {len(paths)}: {paths[0]} .. {paths[-1].rpartition('.')[2]}"
        table.add_row(size(fixed), size(each), Text(name))
    passing = document["passing"]
    table.add_row(size(passing["fixed"]), size(passing["each"]), "a gradient in backward")
    return table


def size(num_bytes: float) -> str:
    """Bytes with a unit.

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
