"""What checks cost: an iteration watched, looked at and proved, beside one that is not.

    python -m benchmarks.checks --json results/checks.json

The updates of all variants take turns, in an order shuffled each time; ratios are of rounds of 100
updates, one of which is proved where there is a proof. As all sessions are open at once, what the
threads of the heartbeat compute is measured apart.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn

from benchmarks.cases import as_ranks
from benchmarks.iteration import Iterate, accelerated, quartiles
from benchmarks.record import finish
from benchmarks.turns import joined_ranks, slowest
from slipstream.session.session import Session

AnySession = Session[nn.Module, torch.optim.SGD]

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
BEATING = ("slipstream-heartbeat", "slipstream-store")
"""Threads of the heartbeat."""
UPDATES = 100
"""Of a variant in a round: one proof falls into each."""


def training(model: str, checks: dict[str, Any]) -> tuple[Iterate, AnySession]:
    """A training of its own, whose session stays open."""
    layers, width, samples = MODELS[model]
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    own = torch.Generator().manual_seed(dist.get_rank())
    batch = torch.randn(samples, width, generator=own)
    return accelerated(net, lambda model: model(batch).square().mean(), {"checks": checks})


def measured(model: str, rounds: int, console: Console) -> list[dict[str, Any]]:
    """A row of each variant: an update takes turns with those of the others."""
    with ExitStack() as stack:
        variants = {}
        for name, checks in VARIANTS.items():
            variants[name], session = training(model, checks)
            stack.enter_context(session)
        for iterate in variants.values():
            for _ in range(WARM_UP):
                iterate()
        seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
        shuffle = Random(0)  # alike on all ranks
        for _ in track(range(rounds), model, console=console):
            spent = dict.fromkeys(VARIANTS, 0.0)
            for _ in range(UPDATES):
                for name in shuffle.sample([*VARIANTS], len(VARIANTS)):
                    begun = time.perf_counter()
                    variants[name]()
                    spent[name] += time.perf_counter() - begun
            for name, total in spent.items():
                seconds[name].append(total / UPDATES)
    rows = []
    for name, of_rounds in seconds.items():
        ratios = [one / base for one, base in zip(of_rounds, seconds["none"], strict=True)]
        low, middle, high = quartiles(ratios)
        rows.append(
            {
                "model": model,
                "name": name,
                "milliseconds": 1e3 * quartiles(of_rounds)[1],
                "ratio": middle,
                "low": low,
                "high": high,
            }
        )
    return rows


def threads_share(seconds: float = 10.0) -> float:
    """What the threads of the heartbeat compute, as a share of one core, beside a training."""
    iterate, session = training("100 small layers", {"nonfinite": "allow"})
    with session:
        ours = [t for t in threading.enumerate() if t.name in BEATING]
        accounts = [Path(f"/proc/self/task/{thread.native_id}/schedstat") for thread in ours]

        def computed() -> float:
            return sum(int(account.read_text().split()[0]) for account in accounts) / 1e9

        for _ in range(WARM_UP):
            iterate()
        before, begun = computed(), time.perf_counter()
        while slowest(time.perf_counter() - begun) < seconds:
            iterate()
        return (computed() - before) / (time.perf_counter() - begun)


@joined_ranks()
def measure(args: argparse.Namespace) -> None:
    """What one rank does; the first one writes."""
    quiet = Console(stderr=True, quiet=dist.get_rank() != 0)
    rows = [row for model in MODELS for row in measured(model, args.rounds, quiet)]
    thread = slowest(threads_share())
    if dist.get_rank() == 0:
        entry = {
            "ranks": dist.get_world_size(),
            "updates": UPDATES,
            "rounds": args.rounds,
            "thread": thread,
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
