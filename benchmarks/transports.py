"""How long gradients travel by each transport, in multiples of the wire time, cores free and busy.

    python -m benchmarks.transports --rate 1gbit --json transports-1gbit.json

Every variant is a transport and a size of segments. A turn exchanges ``--megabytes`` in segments of
that size, all announced first and then started one after the other, as a backward pass does. All
variants take turns in one run, in an order that is shuffled every round. "Busy": a thread of every
rank convolves meanwhile, so that each message waits for a core. The wire time is
2 (p - 1) / p * bytes / rate; each rank is one emulated host. Ranks may run on every core: where two
that compute all the time are bound to one core, gloo's ring takes up to twenty times the wire time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import product

import torch
import torch.distributed as dist

from benchmarks.cases import as_ranks
from benchmarks.iteration import quartiles
from benchmarks.record import arguments, finish
from benchmarks.turns import carry, computing, open_transports, seconds_of, take_turns
from slipstream.testbed import parse_rate
from slipstream.transport.requests import AllReduce, sent_bytes

MB = 2**20
CORES = ("free", "busy")

Variant = tuple[str, float, str]
"""A transport, megabytes of a segment, one of ``CORES``."""


def measure(args: argparse.Namespace) -> None:
    """What one rank does; rank 0 writes the rows."""
    tensors = {
        size: torch.zeros(round(args.megabytes / size), round(size * MB) // 4)
        for size in args.segments
    }

    with open_transports(args.transports) as transports:

        def turn(variant: Variant) -> float:
            name, size, cores = variant
            requests = [AllReduce(tensor) for tensor in tensors[size]]
            with computing(cores == "busy"):
                transports[name].prepare(requests)
                return seconds_of(lambda: carry(transports[name], requests))

        variants = list(product(args.transports, args.segments, args.cores))
        seconds = take_turns(variants, turn, args.rounds, args.warmup)
        if dist.get_rank() == 0:
            report(args, seconds, tensors)


def report(
    args: argparse.Namespace,
    seconds: Mapping[Variant, Sequence[float]],
    tensors: Mapping[float, torch.Tensor],
) -> None:
    """Print the table and write the file: multiples of the wire time on the slowest rank."""
    rate, rows = parse_rate(args.rate) / 8, []
    for (name, size, cores), times in seconds.items():
        wire = sum(sent_bytes(AllReduce(t), args.nodes) for t in tensors[size]) / rate
        low, median, high = quartiles([spent / wire for spent in times])
        variant = {"transport": name, "segment_megabytes": size, "cores": cores}
        rows.append({**variant, "median": median, "low": low, "high": high})
    entry = {key: getattr(args, key) for key in ("nodes", "rate", "megabytes", "rounds")}
    finish(args.json, "transports", {**entry, "rows": rows})


def main() -> int:
    """Start the ranks, or be one."""
    parser = arguments(__doc__)
    parser.add_argument("--megabytes", type=int, default=96, help="exchanged in a turn")
    parser.add_argument("--segments", nargs="*", type=float, default=[8.0, 2.0], help="their MB")
    parser.add_argument("--transports", nargs="*", default=["flat", "direct"])
    parser.add_argument("--cores", nargs="*", choices=CORES, default=CORES)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=1)
    return as_ranks(measure, parser.parse_args(), keep_memory=False)


if __name__ == "__main__":
    sys.exit(main())
