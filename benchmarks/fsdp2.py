"""FSDP2 as torch exchanges, and with slipstream's reduce-scatter, coded and not: time, bytes, loss.

    python -m benchmarks.fsdp2 --rate 1gbit --json fsdp2-1gbit.json

Every variant trains a GPT-2 of its own from the same weights on the same text. A turn is
``--updates`` updates of one variant; all take turns in one run, in an order that is shuffled every
round. "Kept": parameters stay whole between forward and backward. Each rank is one emulated host;
what it sends is read off the counters of its interface. The losses are those of text that nobody
trains on, after all updates.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.baselines import fsdp_units
from benchmarks.cases import as_ranks, share_cores
from benchmarks.iteration import quartiles
from benchmarks.record import arguments, finish
from benchmarks.turns import joined_ranks, seconds_of, take_turns
from examples import data, models
from slipstream.adapters.fsdp2 import accelerate_fsdp

VOCABULARY, LENGTH, BATCH = 8192, 128, 2
HELD_OUT = 8
"""Batches of each rank, from the end of the text."""
TORCHS = "torch's own"
VARIANTS: Mapping[str, tuple[Mapping[str, object] | None, bool]] = {
    TORCHS: (None, False),
    "dense": ({}, False),
    "dense, no overlap": ({"gradients": {"overlap": False}}, False),
    "half": ({"gradients": {"codec": "half"}}, False),
    "int8": ({"gradients": {"codec": "int8"}}, False),
    "int4": ({"gradients": {"codec": "int4"}}, False),
    f"{TORCHS}, kept": (None, True),
    "dense, kept": ({}, True),
    "int8, kept": ({"gradients": {"codec": "int8"}}, True),
}
"""The strategy of each, None: without slipstream; and whether parameters are kept."""


class Training:
    """One variant: a model that goes on from turn to turn."""

    def __init__(self, name: str, size: str, text: torch.Tensor) -> None:
        strategy, kept = VARIANTS[name]
        torch.manual_seed(0)
        # No dropout: its random numbers would differ from variant to variant.
        self.model = models.gpt2(size, VOCABULARY).eval()
        self.num_bytes = sum(p.nbytes for p in self.model.parameters())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        units = [self.model.get_submodule(path) for path in fsdp_units(self.model)]
        for module in (*units, self.model):
            fully_shard(module, mesh=mesh, reshard_after_forward=not kept)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        exchange = None
        if strategy is not None:
            exchange = accelerate_fsdp(self.model, self.optimizer, strategy)
        self.close: Callable[[], None] = (lambda: None) if exchange is None else exchange.close
        self._batches = batches(text)
        self.sent: list[float] = []

    def turn(self, updates: int) -> float:
        """Seconds an update."""

        def train() -> None:
            for _ in range(updates):
                loss_of(self.model, next(self._batches)).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()

        before = sent_bytes()
        seconds = seconds_of(train)
        self.sent.append((sent_bytes() - before) / updates)
        return seconds / updates

    def held_out(self, text: torch.Tensor) -> float:
        """The mean loss over all ranks."""
        with torch.no_grad():
            own = batches(text)
            losses = [loss_of(self.model, next(own)).item() for _ in range(HELD_OUT)]
        mean = torch.tensor([fmean(losses)])
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def batches(text: torch.Tensor) -> Iterator[torch.Tensor]:
    """This rank's batches, again from the start after the last."""
    rank, world, step = dist.get_rank(), dist.get_world_size(), BATCH * LENGTH
    starts = range(rank * step, len(text) - step + 1, world * step)
    while True:
        for start in starts:
            yield text[start : start + step].view(BATCH, LENGTH)


def sent_bytes() -> int:
    """Bytes that this host has sent: of all its interfaces, loopback included where it is alone."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    sent = {line.split(":")[0].strip(): int(line.split(":")[1].split()[8]) for line in lines}
    return sent.get("eth0", sum(sent.values()))


def measure(args: argparse.Namespace) -> None:
    """What one rank does; rank 0 writes the rows."""
    share_cores(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    tokens = data.stdlib_tokens(VOCABULARY)
    with joined_ranks():
        kept_back = HELD_OUT * dist.get_world_size() * BATCH * LENGTH
        text, other = tokens[:-kept_back], tokens[-kept_back:]
        trainings = {name: Training(name, args.model, text) for name in args.variants}
        seconds = take_turns(
            args.variants,
            lambda name: trainings[name].turn(args.updates),
            args.rounds,
            args.warmup,
        )
        losses = {name: training.held_out(other) for name, training in trainings.items()}
        for training in trainings.values():
            training.close()
        if dist.get_rank() == 0:
            report(args, trainings, seconds, losses)


def report(
    args: argparse.Namespace,
    trainings: Mapping[str, Training],
    seconds: Mapping[str, Sequence[float]],
    losses: Mapping[str, float],
) -> None:
    """Print the table and write the file."""
    rows: list[dict[str, Any]] = []
    first = args.variants[0]
    for name, training in trainings.items():
        ratios = [a / b for a, b in zip(seconds[name], seconds[first], strict=True)]
        rows.append(
            {
                "variant": name,
                "seconds": seconds[name],
                "quartiles": quartiles(seconds[name]),
                "ratio": quartiles(ratios),
                "sent_bytes": median(training.sent),
                "loss": losses[name],
            }
        )
    entry = {key: getattr(args, key) for key in ("model", "nodes", "rate", "rounds")}
    entry["megabytes"] = trainings[first].num_bytes / 2**20
    entry["updates"] = args.updates * (args.rounds + args.warmup)
    finish(args.json, "fsdp2", {**entry, "rows": rows})


def main() -> int:
    """Start the ranks, or be one."""
    parser = arguments(__doc__)
    parser.add_argument("--model", default="mini", help="size of the GPT-2")
    parser.add_argument("--loopback", action="store_true", help="ranks on this host, no links")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--updates", type=int, default=4, help="of a turn")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=1, help="rounds that do not count")
    return as_ranks(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
