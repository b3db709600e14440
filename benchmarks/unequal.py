"""One host of several computes at half speed: who waits, and who trains on.

    python -m benchmarks.unequal --json results/unequal.json

The first host's accelerator (accelerator.py) takes twice as long for each layer. Every variant
makes as many updates as all hosts together are asked for, DDP fewer; ``local`` with ``stretch``
leaves to each host how many of them are its own, and ends by ``session.all_updates``. The measure
is the sum of what each host reaches alone, without any exchange.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track

import slipstream
from benchmarks.accelerator import Device
from benchmarks.baselines import wrapped_in_ddp
from benchmarks.cases import MODELS, Case, as_ranks
from benchmarks.iteration import LEARNING_RATE, plain, quartiles
from benchmarks.record import arguments, finish

LOCAL = {"steps": 16, "fragments": 4, "delay": 4, "codec": "int8"}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "DDP": None,
    "local": LOCAL,
    "local, stretch 16": {**LOCAL, "stretch": 16},
    "local, stretch 64": {**LOCAL, "stretch": 64},
}
SLOWER = 2.0
FEW = 6
"""Updates of a host with DDP, which takes long for each."""
WARM_UP = 32
"""Updates of all hosts that are not timed."""


def summed(value: float) -> float:
    """Sum over all hosts."""
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def updates_per_second(case: Case, local: dict[str, Any] | None, updates: int) -> float:
    """Updates of all hosts together in a second."""
    model, loss_of = case.make()
    world = dist.get_world_size()
    if local is None:
        iterate = plain(wrapped_in_ddp(model, 25), loss_of)
        iterate()
        return world * FEW / _seconds(lambda: _times(iterate, FEW))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    with slipstream.accelerate(model, optimizer, None, {"local": local}) as session:

        def until(all_updates: int) -> None:
            while session.all_updates < all_updates:
                session.backward(loss_of(session.model))
                session.step()

        until(WARM_UP)
        before = session.all_updates
        spent = _seconds(lambda: until(before + updates))
        return (session.all_updates - before) / spent


def _times(iterate: Callable[[], None], count: int) -> None:
    for _ in range(count):
        iterate()


def _seconds(work: Callable[[], None]) -> float:
    """Seconds until the last host has done it."""
    dist.barrier()
    begun = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begun


def measure(args: argparse.Namespace) -> None:
    """What one host does; the first one writes."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = Device(args.compute_seconds)
    case = Case(args.model, device)
    dist.init_process_group("gloo")
    device.fit(plain(*case.make()), args.compute_seconds)
    if rank == 0:
        device.seconds += (SLOWER - 1) * args.compute_seconds
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    sums: list[float] = []
    alone = plain(*case.make())
    quiet = Console(stderr=True, quiet=rank != 0)
    for number in track(range(args.rounds), "rounds", console=quiet):
        _times(alone, 2)
        begun = time.perf_counter()
        _times(alone, 8)
        sums.append(summed(8 / (time.perf_counter() - begun)))
        for name in Random(number).sample([*VARIANTS], len(VARIANTS)):  # alike on all ranks
            rates[name].append(updates_per_second(case, VARIANTS[name], args.updates))
    if rank == 0:
        rows = []
        for name, values in rates.items():
            low, middle, high = quartiles(
                [one / whole for one, whole in zip(values, sums, strict=True)]
            )
            rows.append(
                {
                    "name": name,
                    "rate": median(values),
                    "of_sum": middle,
                    "low": low,
                    "high": high,
                }
            )
        entry = {
            "model": args.model,
            "nodes": world,
            "rate": args.rate,
            "slower": SLOWER,
            "compute_seconds": args.compute_seconds,
            "updates": args.updates,
            "rounds": args.rounds,
            "sum": median(sums),
            "rows": rows,
        }
        finish(args.json, "unequal", entry)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Start the hosts, or be one."""
    parser = arguments(__doc__, "300mbit")
    parser.add_argument("--model", choices=MODELS, default="bert")
    parser.add_argument("--compute-seconds", type=float, default=0.2, help="of an update")
    parser.add_argument("--updates", type=int, default=256, help="of all hosts, in a turn")
    parser.add_argument("--rounds", type=int, default=3)
    return as_ranks(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
