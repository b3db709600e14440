"""How long gradients travel by each transport, in multiples of the wire time, cores free and busy.

    python benchmarks/transports.py --rate 1gbit --json transports-1gbit.json

Every variant is a transport and a size of segments. A turn exchanges ``--megabytes`` in segments of
that size, all announced first and then started one after the other, as a backward pass does. All
variants take turns in one run, in an order that is shuffled every round. "Busy": a thread of every
rank convolves meanwhile, so that each message waits for a core. The wire time is
2 (p - 1) / p * bytes / rate; each rank is one emulated host. Ranks may run on every core: where two
that compute all the time are bound to one core, gloo's ring takes up to twenty times the wire time.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product

import torch
import torch.distributed as dist
from exchange import on_testbed
from iteration import quartiles
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tables import save
from torch import nn

from slipstream.strategy import Gradients
from slipstream.testbed import parse_rate
from slipstream.transport.requests import AllReduce, sent_bytes
from slipstream.transport.transport import make_transport

MB = 2**20
CORES = ("free", "busy")


@dataclass(frozen=True)
class Row:
    """One variant: multiples of the wire time, slowest rank."""

    transport: str
    segment_megabytes: float
    cores: str
    median: float
    low: float
    high: float


@contextmanager
def computing(busy: bool) -> Iterator[None]:
    """Keep a core busy while it lasts."""
    over = threading.Event()
    layer, images = nn.Conv2d(32, 32, 3), torch.ones(4, 32, 64, 64)

    def compute() -> None:
        torch.set_num_threads(1)  # a thread of its own begins with as many as there are cores
        with torch.no_grad():
            while not over.is_set():
                layer(images)

    thread = threading.Thread(target=compute)
    if busy:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if busy:
            thread.join()


def measure(args: argparse.Namespace) -> None:
    """What one rank does; rank 0 writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    transports = {
        name: make_transport(Gradients(transport=name).transport, dist.new_group())
        for name in args.transports
    }
    tensors = {
        size: torch.zeros(round(args.megabytes / size), round(size * MB) // 4)
        for size in args.segments
    }
    variants = list(product(transports, args.segments, CORES))
    seconds: dict[tuple[str, float, str], list[float]] = {variant: [] for variant in variants}
    shuffle = random.Random(0)
    console = Console(stderr=True, quiet=rank != 0)
    for step in track(range(args.warmup + args.rounds), "rounds", console=console):
        for variant in shuffle.sample(variants, len(variants)):
            name, size, cores = variant
            requests = [AllReduce(tensor) for tensor in tensors[size]]
            with computing(cores == "busy"):
                transports[name].prepare(requests)
                dist.barrier()
                start = time.perf_counter()
                works = [work for request in requests for work in transports[name].start(request)]
                for work in works:
                    work.wait()
                spent = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            if step >= args.warmup:
                seconds[variant].append(float(spent))
    if rank == 0:
        rate = parse_rate(args.rate) / 8
        rows = []
        for (name, size, cores), times in seconds.items():
            wire = sum(sent_bytes(AllReduce(t), world) for t in tensors[size]) / rate
            low, median, high = quartiles([spent / wire for spent in times])
            rows.append(Row(name, size, cores, median, low, high))
        Console(width=100).print(table(args, rows))
        if args.json:
            entry = {key: getattr(args, key) for key in ("nodes", "rate", "megabytes", "rounds")}
            save(args.json, "transports", {**entry, "rows": [asdict(row) for row in rows]})
    dist.barrier()
    for transport in transports.values():
        transport.close()
    dist.destroy_process_group()


def table(args: argparse.Namespace, rows: list[Row]) -> Table:
    """What a person reads."""
    drawn = Table(
        title=f"{args.megabytes} MB between {args.nodes} nodes at {args.rate}, in x wire time"
    )
    for heading in ("transport", "segments MB", "cores", "median", "quartiles"):
        drawn.add_column(heading, justify="left" if heading == "transport" else "right")
    for row in sorted(rows, key=lambda r: (r.segment_megabytes, r.cores, r.transport)):
        quarter = f"{row.low:.2f}..{row.high:.2f}"
        size = f"{row.segment_megabytes:g}"
        drawn.add_row(row.transport, size, row.cores, f"{row.median:.2f}", quarter)
    return drawn


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--megabytes", type=int, default=96, help="exchanged in a turn")
    parser.add_argument("--segments", nargs="*", type=float, default=[8.0, 2.0], help="their MB")
    parser.add_argument("--transports", nargs="*", default=["flat", "direct"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args)
        return 0
    return on_testbed(sys.argv[1:], args.nodes, args.rate)


if __name__ == "__main__":
    sys.exit(main())
