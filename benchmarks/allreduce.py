"""How long one all-reduce takes by size and transport, on hosts with several ranks.

    python -m benchmarks.allreduce --nodes 4 --ranks-per-node 2 --numbering permuted --rate 1gbit
    python -m benchmarks.allreduce --nodes 1 --ranks-per-node 2 --transports flat shared_memory

All transports take turns in one run, in an order that is shuffled every round. A turn makes some
all-reduces one after the other, each waited for, between two barriers, and counts as long as on its
slowest rank. Ranks are numbered host by host (contiguous) or host after host (permuted): rank r is
on host r modulo the number of hosts. With one node all ranks share the machine, without a testbed.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.iteration import quartiles, this_module
from benchmarks.record import arguments, finish
from benchmarks.turns import carry, computing, open_transports, seconds_of, take_turns
from slipstream.testbed import Testbed
from slipstream.transport.requests import AllReduce
from slipstream.transport.transport import Transport

KB = 2**10
MOST_IN_A_TURN, BYTES_IN_A_TURN = 40, 64 * 2**20


def measure(args: argparse.Namespace) -> None:
    """What one rank does; rank 0 writes the rows."""
    rows = []
    with open_transports(args.transports) as transports, computing(args.busy):
        for size in args.kilobytes:
            repeats = max(1, min(MOST_IN_A_TURN, BYTES_IN_A_TURN // (size * KB)))
            repeats = 1 if args.nodes > 1 else repeats
            requests = repeats * [AllReduce(torch.zeros(size * KB // 4))]
            turn = partial(seconds_of_each, transports, requests)
            seconds = take_turns(args.transports, turn, args.rounds, args.warmup)
            flat = statistics.median(seconds[args.transports[0]])
            for name, times in seconds.items():
                low, median, high = (1e3 * value for value in quartiles(times))
                figures = {"median": median, "low": low, "high": high}
                figures["gain"] = 1e3 * flat / median
                rows.append({"transport": name, "kilobytes": size, **figures})
        if dist.get_rank() == 0:
            report(args, rows)


def seconds_of_each(
    transports: Mapping[str, Transport], requests: Sequence[AllReduce], name: str
) -> float:
    """Seconds of one request, where each is waited for before the next."""

    def one_by_one() -> None:
        for request in requests:
            carry(transports[name], [request])

    return seconds_of(one_by_one) / len(requests)


def report(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Print the table and write the file: milliseconds, and flat's over them as gain."""
    names = ("nodes", "ranks_per_node", "numbering", "rate", "rounds", "busy")
    entry = {key: getattr(args, key) for key in names}
    finish(args.json, "allreduce", {**entry, "rows": rows})


def start(argv: list[str], args: argparse.Namespace) -> int:
    """Start all ranks; returns the largest of their codes."""
    world = args.nodes * args.ranks_per_node
    command = [sys.executable, "-m", this_module(), *argv]
    with ExitStack() as cleanup:
        bed = cleanup.enter_context(Testbed(args.nodes, args.rate)) if args.nodes > 1 else None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = []
        for rank in range(world):
            host = rank // args.ranks_per_node if args.numbering == "contiguous" else rank
            env = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": str(port)}
            if bed is not None:
                env["MASTER_ADDR"] = bed.nodes[0].address
                processes.append(bed.popen(bed.nodes[host % args.nodes], command, env))
            else:
                env |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
                env |= {"OMP_NUM_THREADS": "1"}
                processes.append(subprocess.Popen(command, env={**os.environ, **env}))
        return max(abs(process.wait()) for process in processes)


def main() -> int:
    """Start the ranks, or be one."""
    parser = arguments(__doc__)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--numbering", choices=("contiguous", "permuted"), default="contiguous")
    parser.add_argument("--kilobytes", nargs="*", type=int, default=[1024, 4096, 16384, 65536])
    parser.add_argument(
        "--transports",
        nargs="*",
        default=["flat", "direct", "hierarchical/direct", "hierarchical/flat"],
        help="a kind, or a kind and what it uses between hosts; compared with the first",
    )
    parser.add_argument("--busy", action="store_true", help="each rank computes meanwhile")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args)
        return 0
    return start(sys.argv[1:], args)


if __name__ == "__main__":
    sys.exit(main())
