"""What slipstream costs where it can bring nothing: one process, and many small layers on one host.

    python -m benchmarks.overhead --json overhead.json

One process: the plain loop, the same with ``accelerate``, and that with the trace on; the claim is
under 1 % each. Two ranks on loopback: 100 layers ``Linear(64)`` at batch 16 with DDP (gradients as
bucket views, its faster setting) and with slipstream; the claim is not slower. All variants take
turns, in an order that is shuffled every round, so that each round is one observation of every
ratio; where an iteration is short, a turn is several.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.iteration import Iterate, Loss, accelerated, on_loopback, plain, quartiles
from benchmarks.record import finish
from benchmarks.turns import joined_ranks, take_turns
from examples import data, models


def resnet_small() -> tuple[nn.Module, Loss]:
    """A ResNet of four blocks, and the loss of a batch of 16 digits of 32 pixels."""
    torch.manual_seed(0)
    images, labels = data.digits(32)[0][:16]
    return (
        models.resnet_small(),
        lambda model: nn.functional.cross_entropy(model(images).logits, labels),
    )


def small_layers() -> tuple[nn.Module, Loss]:
    """100 layers of 64 x 64, and the loss of a batch of 16."""
    torch.manual_seed(0)
    inputs = torch.randn(16, 64)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(100)))
    return model, lambda model: model(inputs).square().mean()


MODELS = {"resnet-small": resnet_small, "100 x Linear(64)": small_layers}


Variant = Callable[[], AbstractContextManager[Iterate]]
Rows = list[dict[str, Any]]


def in_turn(
    variants: Mapping[str, Variant], rounds: int, repeat: int, title: str
) -> dict[str, list[float]]:
    """Seconds an iteration of every variant in every round, on the slowest rank."""

    def turn(name: str) -> float:
        with variants[name]() as iterate:
            iterate()
            return timed(iterate, repeat)

    gc.collect()
    gc.disable()  # else its pauses fall on whichever variant is running
    seconds = take_turns([*variants], turn, rounds, max(3, rounds // 20), title)
    gc.enable()
    return seconds


def timed(iterate: Iterate, repeat: int) -> float:
    """Seconds an iteration on the slowest rank."""
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    for _ in range(repeat):
        iterate()
    spent = torch.tensor([(time.perf_counter() - start) / repeat], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


def on_one_process(name: str, rounds: int, repeat: int) -> Rows:
    """Plain loop, session, session that records, in turn on the very same model.

    Twins would not do: where their tensors happen to lie in memory makes 2 % of difference.
    """
    model, loss_of = MODELS[name]()
    by_hand = plain(model, loss_of)

    @contextmanager
    def session(strategy: Mapping[str, object]) -> Iterator[Iterate]:
        iterate, session = accelerated(model, loss_of, strategy)
        yield iterate
        with redirect_stderr(io.StringIO()):  # where a trace was written
            session.close()

    with tempfile.TemporaryDirectory() as folder:
        trace = {"trace": {"steps": repeat + 2, "skip": 0, "folder": folder}}
        variants: dict[str, Variant] = {
            "plain loop": lambda: nullcontext(by_hand),
            "accelerate": lambda: session({}),
            "accelerate, traced": lambda: session(trace),
        }
        seconds = in_turn(variants, rounds, repeat, f"{name}, one process")
    return rows(f"{name}, one process", seconds)


@joined_ranks()
def on_two_ranks(rounds: int, repeat: int) -> Rows:
    """Many small layers: DDP and slipstream, one thread a rank."""
    model, loss_of = small_layers()
    ddp = plain(nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), loss_of)
    model, loss_of = small_layers()
    ours, session = accelerated(model, loss_of)
    variants: dict[str, Variant] = {
        "DDP": lambda: nullcontext(ddp),
        "slipstream": lambda: nullcontext(ours),
    }
    title = "100 x Linear(64), 2 ranks"
    seconds = in_turn(variants, rounds, repeat, title)
    session.close()
    return rows(title, seconds)


def rows(part: str, seconds: Mapping[str, list[float]]) -> Rows:
    """The statistics of every variant: seconds an iteration, and ratios to the first, in pairs."""
    first = next(iter(seconds.values()))
    found = []
    for name, values in seconds.items():
        ratios = [value / base for value, base in zip(values, first, strict=True)]
        low, median, high = quartiles(values)
        ratio_low, ratio, ratio_high = quartiles(ratios)
        # Standard error of the median: 1.2533 sigma / sqrt(n), with sigma = IQR / 1.349
        error = 0.929 * (ratio_high - ratio_low) / len(ratios) ** 0.5
        found.append(
            {
                "part": part,
                "name": name,
                "median": median,
                "low": low,
                "high": high,
                "ratio": ratio,
                "ratio_low": ratio_low,
                "ratio_high": ratio_high,
                "ratio_error": error,
            }
        )
    return found


def ranks(args: argparse.Namespace) -> Rows:
    """Start two ranks of this script; what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        if on_loopback(["--rounds", str(args.rounds), "--json", str(path)], 2):
            raise SystemExit("the ranks failed; what they said is above")
        found: Rows = json.loads(path.read_text())
        return found


def main() -> None:
    """Measure both parts, or be a rank of the second."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    if "RANK" in os.environ:
        found = on_two_ranks(args.rounds, repeat=5)
        if os.environ["RANK"] == "0":
            Path(args.json).write_text(json.dumps(found))
        return
    found = on_one_process("resnet-small", args.rounds, repeat=1)
    found += on_one_process("100 x Linear(64)", args.rounds, repeat=5)
    found += ranks(args)
    finish(args.json, "overhead", {"rounds": args.rounds, "rows": found})


if __name__ == "__main__":
    main()
