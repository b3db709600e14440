"""Thousands of steps, codecs and transports taking turns: do the ranks stay bit for bit the same?

    python -m benchmarks.soak --steps 10000 --json benchmarks/results/soak.json

One model, four ranks, each with data of its own. Codecs change, and with them the transport, the
split, how many batches an update has, and whether the loss is scaled; what one codec has not sent,
a later session of the same codec and transport goes on with. Gradients overflow on one rank or
another. After every turn the parameters and the optimizer's state are compared: one bit of
difference ends the run, and so does a number that is not finite.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn

import slipstream
from benchmarks.cases import as_ranks
from benchmarks.record import finish
from benchmarks.turns import joined_ranks

CODECS: dict[str, object] = {
    "dense": None,
    "bf16": {"kind": "half"},
    "fp16": {"kind": "half", "dtype": "fp16"},
    "int8": {"kind": "int8"},
    "int8, fed back": {"kind": "int8", "rounding": "stochastic", "error_feedback": True},
    "onebit": {"kind": "onebit", "start_step": 0},
    "powersgd": {"kind": "powersgd", "start_step": 5},
    "dgc": {"kind": "dgc", "density": 0.01, "warmup_steps": 8, "clip": 10.0},
    "by name": {
        "kind": "by_name",
        "rules": [
            {"match": "*.bias", "codec": {"kind": "half"}},
            {"match": "*", "codec": {"kind": "onebit", "start_step": 0}},
        ],
    },
}
TRANSPORTS: dict[str, object] = {
    "flat": "flat",
    "direct": "direct",
    "sharded": "sharded",
    "sharded, a third replicated": {"kind": "sharded", "replicated": 1 / 3},
    "shared_memory": "shared_memory",
    "hierarchical": "hierarchical",
}
REFUSED = {("dgc", "sharded"), ("dgc", "sharded, a third replicated")}
"""DGC applies momentum to whole gradients."""
SPLITS: tuple[dict[str, object], ...] = (
    {"kind": "by_bytes"},
    {"kind": "per_layer"},
    {"kind": "single"},
    {"kind": "by_bytes", "megabytes": 0.01},
)
FORGIVING = ("int8, fed back", "onebit", "powersgd", "dgc", "by name")
"""Codecs that must survive an overflow even if the loss is not scaled, and so skip that update."""

TURN = 50
"""Updates under one codec and split."""


@dataclass
class Soak:
    """The model, and what each codec has left for its next turn on a transport."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    left: dict[tuple[str, str], dict[str, Any]]
    skipped: int = 0
    overflows: int = 0

    def turn(self, number: int, codec: str, transport: str) -> None:
        """Some updates under one codec; the same settings on all ranks, other data on each."""
        chance = random.Random(number)
        accumulate = chance.choice((1, 1, 2))
        scale = chance.choice((1.0, 1024.0))
        strategy = {
            "gradients": {
                "codec": CODECS[codec], "transport": TRANSPORTS[transport],
                "split": chance.choice(SPLITS), "accumulate": accumulate,
                "overlap": chance.random() < 0.8,
            },
            # the ranks prove now and then that they are alike: a false alarm would end the run
            "checks": {"nonfinite": "skip", "every": 10},
        }  # fmt: skip
        with slipstream.accelerate(self.model, self.optimizer, None, strategy) as session:
            if (codec, transport) in self.left:
                session.load_state_dict(self.left[codec, transport])
            for step in range(TURN * accumulate):
                poisoned = chance.random() < 0.02
                victim = chance.randrange(dist.get_world_size())
                loss = self.loss() * scale
                forgives = codec in FORGIVING and transport != "hierarchical"  # one host: codec off
                if poisoned and dist.get_rank() == victim and (scale > 1 or forgives):
                    loss = loss * float("inf")
                    self.overflows += 1
                if (step + 1) % accumulate:
                    with session.no_sync():
                        session.backward(loss, loss_scale=scale)
                else:
                    session.backward(loss, loss_scale=scale)
                session.step()
            self.left[codec, transport] = session.state_dict()
            self.skipped += session.skipped

    def loss(self) -> torch.Tensor:
        """A batch of this rank's own random stream; the model learns to sort it."""
        rows = torch.randn(16, 64)
        found: torch.Tensor = nn.functional.mse_loss(self.model(rows), rows.sort(1).values[:, :10])
        return found

    def digest(self) -> str:
        """Of all bits that must be the same everywhere."""
        state = self.optimizer.state_dict()["state"].values()
        kept = [value for entry in state for value in entry.values() if torch.is_tensor(value)]
        found = hashlib.sha256()
        for tensor in [*self.model.parameters(), *kept]:
            found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


@joined_ranks()
def measure(args: argparse.Namespace) -> None:
    """What one rank does; rank 0 writes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 96), nn.ReLU(), nn.Linear(96, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    torch.manual_seed(1000 + dist.get_rank())
    soak, start = Soak(model, optimizer, {}), time.perf_counter()
    pairs = cycle([pair for pair in product(CODECS, TRANSPORTS) if pair not in REFUSED])
    console = Console(stderr=True, quiet=dist.get_rank() != 0)
    turns = max(args.steps // TURN, 1)
    for number in track(range(turns), "soak", console=console):
        codec, transport = next(pairs)
        soak.turn(number, codec, transport)
        digests: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, soak.digest())
        if len(set(digests)) > 1:
            raise SystemExit(f"turn {number}, {codec}, {transport}: ranks differ: {digests}")
        if not all(p.isfinite().all() for p in model.parameters()):
            raise SystemExit(f"turn {number}, {codec}, {transport}: not finite")
    overflows = torch.tensor(soak.overflows)
    dist.all_reduce(overflows)
    if dist.get_rank() == 0:
        entry = {
            "ranks": dist.get_world_size(),
            "turns": turns,
            "updates": turns * TURN,
            "codecs": list(CODECS),
            "transports": list(TRANSPORTS),
            "overflows": int(overflows),
            "skipped": soak.skipped,
            "seconds": round(time.perf_counter() - start, 1),
        }
        finish(args.json, "soak", entry)


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000, help="updates in all")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    return as_ranks(measure, args, ranks=args.ranks, keep_memory=False)


if __name__ == "__main__":
    sys.exit(main())
