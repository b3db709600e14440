"""Exchange of gradients on a slow network: slipstream beside torch's own ways to train.

    python -m benchmarks.exchange --model resnet50 --nodes 4 --rate 1gbit --json resnet50.json

All variants train the same model side by side in one run, an iteration each in turn, in an order
that is shuffled every round, between barriers; an iteration takes as long as on its slowest rank.
DDP is measured with its default and with seven bucket sizes, all with gradients as bucket views and
a static graph (its faster settings); the one with the smallest median is "DDP, best". --fsdp and
--zero add FSDP2 and ZeRO-1. The bound is max(compute, wire): compute is the iteration without any
exchange, wire = 2 (p - 1) / p * bytes / rate. Without namespaces (no root) use --loopback.

Two kinds of computing. With `--compute cpu` the ranks compute on the cores that the exchange needs
as well. With `--compute accelerator` each layer takes its time by sleeping, as on a host whose
device computes, so that cores are free (accelerator.py; the optimizer's update stays on the cores):

    python -m benchmarks.exchange --compute accelerator --compute-seconds wire \
        --fsdp default keep prefetch --zero 8 --splits default

`--compute-seconds wire` makes an iteration without exchange take the wire time, where a perfect
overlap hides most; a number sets the seconds.

Beside the time stands the memory that a rank needs at most: every variant trains for a few
iterations alone in processes of its own first (peak_memory.py; --no-memory leaves it out).

With --codecs and --hooks, slipstream's codecs take turns with DDP and with torch's own hooks (in
DDP's default buckets or smaller ones; PowerSGD in one bucket, as it crashes on gloo with several):

    python -m benchmarks.exchange --model vgg16 --rate 300mbit --splits default --codecs bf16 int8 \
        --hooks fp16

(torch's bf16 hook refuses to run on gloo.)
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn

from benchmarks.baselines import (
    DDP_MEGABYTES,
    FSDP,
    HOOKS,
    ddp,
    fsdp2,
    with_hook,
    zero1,
)
from benchmarks.cases import (
    CODECS,
    MODELS,
    SPLITS,
    TRANSPORTS,
    Case,
    as_ranks,
    case_of,
    head_of,
    seconds_or_wire,
    share_cores,
    timed_iterations,
    wire_seconds,
)
from benchmarks.iteration import (
    Iterate,
    accelerated,
    plain,
    quartiles,
)
from benchmarks.peak_memory import free_bytes, peak_rss, release
from benchmarks.record import arguments, finish
from benchmarks.turns import joined_ranks
from slipstream.session.session import Session
from slipstream.strategy import AutoConfig, OptimalConfig
from slipstream.tuner.turns import MOST, SETTLING, TURNS

AnySession = Session[nn.Module, torch.optim.SGD]
Variant = tuple[Iterate, AnySession | None]


def variants_of(args: argparse.Namespace, case: Case) -> dict[str, Callable[[], Variant]]:
    """Every variant by its label, to be built."""

    def alone(iterate: Callable[..., Iterate], *more: Any, **options: Any) -> Callable[[], Variant]:
        return lambda: (iterate(*case.make(), *more, **options), None)

    def ours(gradients: Mapping[str, object]) -> Callable[[], Variant]:
        return lambda: accelerated(*case.make(), {"gradients": gradients})

    found = {"no exchange": alone(plain)}
    for graph, megabytes in itertools.product(args.ddp_graph, (None, *args.ddp)):
        label = f"DDP, {megabytes:g} MB" if megabytes else "DDP, default"
        if graph == "dynamic":
            label += ", dynamic graph"
        found[label] = alone(ddp, megabytes, static_graph=graph == "static")
    for kind in args.fsdp:
        found[f"FSDP2, {kind}"] = alone(fsdp2, case.units, kind)
    for megabytes in args.zero:
        found[f"ZeRO-1, {megabytes:g} MB"] = alone(zero1, megabytes)
    for transport, name in itertools.product(
        args.transports, SPLITS if args.splits is None else args.splits
    ):
        label = f"slipstream, {name}" + (f", {transport}" if transport != "flat" else "")
        split = {"split": SPLITS[name]} if SPLITS[name] else {}
        found[label] = ours({"transport": TRANSPORTS[transport], **split})
    for name in args.codecs or ():
        codec, *settings = name.split(" / ")
        coded: dict[str, object] = {"codec": CODECS[codec]}
        for setting in settings:
            if setting in TRANSPORTS:
                coded["transport"] = TRANSPORTS[setting]
            else:
                coded |= {"split": SPLITS[setting]} if SPLITS[setting] else {}
        found[f"slipstream, {name}"] = ours(coded)
    for hook in args.hooks or ():
        found[f"torch, {hook} hook"] = alone(with_hook, hook)
    return found


def measure(args: argparse.Namespace) -> None:
    """What one rank does; rank 0 writes the rows."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if args.cores == "bound":
        share_cores(rank, world)
    case = case_of(args, world)
    wire = wire_seconds(args, case.num_bytes, world)
    build = variants_of(args, case)
    peaks = measure_memory(build, rank) if args.memory or args.only_memory else {}
    with joined_ranks():
        highest = highest_of_all(peaks)
        if args.only_memory:
            write_memory(args, case, highest)
            return
        check_room(highest, world)
        variants: dict[str, Iterate] = {}
        sessions: dict[str, AnySession] = {}
        for label, make in build.items():
            variants[label], session = make()
            if session:
                sessions[label] = session
        if case.device:
            case.device.fit(variants["no exchange"], case.device.seconds)
        for label, session in sessions.items():
            if searches(session):
                for _ in range(MOST * TURNS * (SETTLING + OptimalConfig().steps)):
                    variants[label]()  # it has made its choice before anything is timed
        seconds, cpu = timed_iterations(variants, args.rounds, args.warmup)
        if rank == 0:
            for session in sessions.values():
                if searches(session):
                    print(session.report(), file=sys.stderr)
            collectives = {
                name: sum(segment.num_collectives for segment in session.segments)
                for name, session in sessions.items()
            }
            write(args, case, seconds, cpu, collectives, highest, wire)


def searches(session: AnySession) -> bool:
    """Whether it chooses a split or a transport while it trains."""
    gradients = session.strategy.gradients
    return isinstance(gradients.split, OptimalConfig) or isinstance(gradients.transport, AutoConfig)


def measure_memory(build: Mapping[str, Callable[[], Variant]], rank: int) -> dict[str, int]:
    """The peak of each variant, in bytes of this rank."""
    release()
    console = Console(stderr=True, quiet=rank != 0)
    return {
        label: peak_rss(lambda make=make: make()[0], turn)  # type: ignore[misc]
        for turn, (label, make) in enumerate(track(build.items(), "peak memory", console=console))
    }


def check_room(peaks: Mapping[str, int], world: int) -> None:
    """Refuse variants that have no room side by side, as far as their peaks are known."""
    needed = world * sum(peak - min(peaks.values()) / 2 for peak in peaks.values())
    if needed > free_bytes():
        raise SystemExit(
            f"{len(peaks)} variants side by side on {world} ranks need about "
            f"{needed / 2**30:.0f} GiB of memory, {free_bytes() / 2**30:.0f} are free; "
            "choose fewer by --ddp, --fsdp, --zero, --splits, --transports, or --no-memory and "
            "--only-memory in a run of its own"
        )


def highest_of_all(peaks: Mapping[str, int]) -> dict[str, int]:
    """The peaks of the rank that needs most."""
    most = torch.tensor([*peaks.values()], dtype=torch.int64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return dict(zip(peaks, most.tolist(), strict=True))


def write_memory(args: argparse.Namespace, case: Case, peaks: Mapping[str, int]) -> None:
    """On rank 0 print the peaks; with --json write them too."""
    if dist.get_rank():
        return
    rows = [{"name": name, "peak_bytes": peak} for name, peak in peaks.items()]
    entry = {"model": args.model, "megabytes": case.num_bytes / 2**20, "nodes": args.nodes}
    entry["codecs"] = args.codecs
    finish(args.json, "exchange", {"benchmark": "memory", **entry, "rows": rows})


def write(
    args: argparse.Namespace,
    case: Case,
    seconds: dict[str, list[float]],
    cpu: dict[str, list[float]],
    collectives: dict[str, int],
    peaks: dict[str, int],
    wire: float,
) -> None:
    """Print the table; with --json write it too.

    A row has seconds of an iteration on the slowest rank, CPU seconds of all, ratios in pairs, and
    the peak bytes of the rank that needs most; 0 if they were not measured.
    """
    compute = statistics.median(seconds["no exchange"])
    bound = max(compute, wire)
    with_ddp = [n for n in seconds if n.startswith("DDP")]
    best = min(with_ddp, key=lambda n: statistics.median(seconds[n]))
    rows = []
    for name, values in seconds.items():
        low, median, high = quartiles(values)
        ratios = quartiles([a / b for a, b in zip(values, seconds[best], strict=True)])
        rows.append(
            {
                "name": name + (" (DDP, best)" if name == best else ""),
                "median": median,
                "low": low,
                "high": high,
                "exposed": median - compute,
                "cpu": statistics.median(cpu[name]),
                "collectives": collectives.get(name, 0),
                "to_bound": median / bound,
                "to_bound_low": low / bound,
                "to_bound_high": high / bound,
                "to_best_ddp": ratios[1],
                "to_best_ddp_low": ratios[0],
                "to_best_ddp_high": ratios[2],
                "peak_bytes": peaks.get(name, 0),
            }
        )
    entry: dict[str, Any] = {
        **head_of(args, case),
        "codecs": args.codecs or [],
        "cores": args.cores,
        "compute": args.compute,
        "compute_seconds": args.compute_seconds if case.device else None,
        "device_s": case.device.seconds if case.device else None,
        "compute_s": compute,
        "wire_s": wire,
        "bound_s": bound,
    }
    finish(args.json, "exchange", {**entry, "rows": rows, "seconds": seconds})


def main() -> int:
    """Start the ranks, or be one."""
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument(
        "--compute",
        choices=("cpu", "accelerator"),
        default="cpu",
        help="who computes: the cores that exchange, too; or a device, which leaves them free",
    )
    parser.add_argument(
        "--compute-seconds",
        type=seconds_or_wire,
        default="wire",
        help="of an iteration without exchange on the accelerator; default: wire, the wire time",
    )
    parser.add_argument(
        "--cores",
        choices=("bound", "free"),
        help="whether each rank stays on its share of the cores; default: bound where ranks "
        "compute on them, free beside an accelerator",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--splits", nargs="*", choices=list(SPLITS), help="default: all")
    parser.add_argument(
        "--transports",
        nargs="*",
        default=["flat"],
        choices=list(TRANSPORTS),
        help="each with every split",
    )
    parser.add_argument("--ddp", nargs="*", type=float, default=DDP_MEGABYTES, help="DDP's buckets")
    parser.add_argument(
        "--ddp-graph",
        nargs="+",
        default=["static"],
        choices=("static", "dynamic"),
        help="DDP with static_graph=True, or without",
    )
    parser.add_argument(
        "--fsdp",
        nargs="*",
        default=[],
        choices=list(FSDP),
        help="FSDP2, too. " + "; ".join(f"{kind}: {words}" for kind, words in FSDP.items()),
    )
    parser.add_argument(
        "--zero", nargs="*", type=float, default=[], help="ZeRO-1 with DDP's buckets of so many MB"
    )
    parser.add_argument(
        "--codecs", nargs="*", help=f"{', '.join(CODECS)}; or 'bf16 / SPLIT / TRANSPORT'"
    )
    parser.add_argument("--hooks", nargs="*", choices=HOOKS, help="DDP with torch's hooks, too")
    parser.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure each variant's peak memory first, alone",
    )
    parser.add_argument("--only-memory", action="store_true", help="peak memory, and no times")
    parser.add_argument("--loopback", action="store_true", help="without emulated links")
    args = parser.parse_args()
    args.cores = args.cores or ("bound" if args.compute == "cpu" else "free")
    if args.compute == "accelerator" and args.loopback and args.compute_seconds == "wire":
        parser.error("--compute-seconds: loopback has no rate, so no wire time; give the seconds")
    return as_ranks(measure, args)


if __name__ == "__main__":
    sys.exit(main())
