"""What checks cost: an iteration watched, looked at and proved, beside one that is not.

    python -m benchmarks.checks --json results/checks.json

Each turn trains every variant for some updates, in an order of its own; the updates of a turn
contain the proofs that fall into them. Ratios are of turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn

import slipstream
from benchmarks.cases import as_ranks
from benchmarks.iteration import quartiles
from benchmarks.record import finish
from benchmarks.turns import joined_ranks

VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"timeout": None, "nonfinite": "allow"},
    "heartbeat": {"nonfinite": "allow"},
    "finite": {"timeout": None},
    "both (the default)": {},
    "both, a proof each 100": {"every": 100},
}
MODELS = {"100 small layers": (100, 32, 16), "8 large layers": (8, 1024, 64)}
"""Layers, their width, and samples of a rank."""
WARM_UP = 20
UPDATES = 200
"""Of a variant in a turn."""


def seconds_of(model: str, checks: dict[str, Any]) -> float:
    """Of an update."""
    layers, width, samples = MODELS[model]
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    batch = torch.randn(samples, width)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with slipstream.accelerate(net, optimizer, None, {"checks": checks}) as session:

        def updates(count: int) -> None:
            for _ in range(count):
                session.backward(session.model(batch).square().mean())
                session.step()

        updates(WARM_UP)
        dist.barrier()
        begun = time.perf_counter()
        updates(UPDATES)
        dist.barrier()
        return (time.perf_counter() - begun) / UPDATES


@joined_ranks()
def measure(args: argparse.Namespace) -> None:
    """What one rank does; the first one writes."""
    quiet = Console(stderr=True, quiet=dist.get_rank() != 0)
    rows = []
    for model in MODELS:
        turns: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for number in track(range(args.rounds), model, console=quiet):
            for name in Random(number).sample([*VARIANTS], len(VARIANTS)):  # alike on all ranks
                turns[name].append(seconds_of(model, VARIANTS[name]))
        for name, seconds in turns.items():
            ratios = [one / base for one, base in zip(seconds, turns["none"], strict=True)]
            low, middle, high = quartiles(ratios)
            milliseconds = 1e3 * quartiles(seconds)[1]
            rows.append(
                {
                    "model": model,
                    "name": name,
                    "milliseconds": milliseconds,
                    "ratio": middle,
                    "low": low,
                    "high": high,
                }
            )
    if dist.get_rank() == 0:
        entry = {
            "ranks": dist.get_world_size(),
            "updates": UPDATES,
            "rounds": args.rounds,
            "rows": rows,
        }
        finish(args.json, "checks", entry)


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    return as_ranks(measure, args, ranks=args.ranks, keep_memory=False)


if __name__ == "__main__":
    sys.exit(main())
