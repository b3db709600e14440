"""Exchange of gradients on a slow network: slipstream's splits against DistributedDataParallel.

    python benchmarks/exchange.py --model resnet50 --nodes 4 --rate 1gbit --json resnet50.json

All variants train the same model side by side in one run, an iteration each in turn, in an order
that is shuffled every round, between barriers; an iteration takes as long as on its slowest rank.
DDP is measured with its default and with several bucket sizes, all with gradients as bucket views
(its faster setting); the one with the smallest median is "DDP, best". The bound is max(compute,
wire): compute is the iteration without any exchange, wire = 2 (p - 1) / p * bytes / rate. Without
namespaces (no root) use --loopback.

The best of several equal variants looks better than it is. So with --finals the optimal split goes
through that many more rounds against HCCL's default and the winners of the first ones, the best
fixed size and the best DDP: only those rounds compare them.

With --codecs and --hooks, slipstream's codecs take turns with DDP and with torch's own hooks (in
DDP's default buckets; PowerSGD in one bucket, as it crashes on gloo with several):

    python benchmarks/exchange.py --model vgg16 --rate 300mbit --splits default --codecs bf16 int8 \
        --hooks fp16

(torch's bf16 hook refuses to run on gloo.)
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from iteration import Iterate, Loss, accelerated, on_loopback, plain, quartiles
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tables import optimal_in_words, save
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from slipstream.session.session import Session
from slipstream.strategy import Auto, Optimal
from slipstream.testbed import Testbed, parse_rate
from slipstream.tuner.search_space import MOST, SETTLING, TURNS
from slipstream.tuner.significance import median_interval

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import data
import models

OPTIMAL, HCCL = "slipstream, optimal", "slipstream, by_percent 96.54/3.46"
DDP_MEGABYTES = (1, 2, 4, 8, 16, 50)
SPLITS: dict[str, dict[str, object]] = {
    "default": {},
    "by_bytes 2/1/1": {"kind": "by_bytes", "megabytes": 2},
    "by_bytes 4/1/1": {"kind": "by_bytes", "megabytes": 4},
    "by_bytes 16/1/1": {"kind": "by_bytes", "megabytes": 16},
    "by_bytes 25/1/1": {"kind": "by_bytes", "megabytes": 25},
    "by_percent 96.54/3.46": {"kind": "by_percent"},
    "by_layers 10": {"kind": "by_layers", "layers": 10},
    "per_layer": {"kind": "per_layer"},
    "per_gradient": {"kind": "per_gradient"},
    "single": {"kind": "single"},
    "optimal": {"kind": "optimal"},
}


CODECS: dict[str, object] = {
    "bf16": {"kind": "half", "dtype": "bf16"},
    "fp16": {"kind": "half", "dtype": "fp16"},
    "int8": {"kind": "int8"},
    "onebit": {"kind": "onebit", "start_step": 0},
    "dgc": {"kind": "dgc", "warmup_steps": 0},
    "powersgd": {"kind": "powersgd", "rank": 4, "start_step": 0},
    "adaptive onebit": {"kind": "adaptive", "codec": {"kind": "onebit", "start_step": 0}},
}

HOOKS = {
    "fp16": default_hooks.fp16_compress_hook,
    "PowerSGD": powerSGD_hook.powerSGD_hook,
}

KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**28),
}
"""glibc keeps what a rank frees, as the allocators do that one loads for training.

A virtual machine may give freed pages back to its host while a rank waits for the network; to get
them again in the next variant's turn made computing take up to 1.6 times as long.
"""


@dataclass(frozen=True)
class Row:
    """One variant: seconds an iteration (slowest rank), CPU seconds of all, ratios in pairs."""

    name: str
    median: float
    low: float
    high: float
    exposed: float
    cpu: float
    collectives: int
    to_bound: float
    to_best_ddp: float
    to_best_ddp_low: float
    to_best_ddp_high: float


def make_model(name: str) -> tuple[nn.Module, Loss, int]:
    """The model, a function from it to the loss of a real batch, and its batch size."""
    torch.manual_seed(0)
    if name == "bert":
        tokens = data.stdlib_tokens(30522)[: 2 * 128].view(2, 128)
        inputs, labels = data.mask_words(tokens, 30522, torch.Generator().manual_seed(0))
        return (
            models.bert("tiny", 30522),
            lambda m: m(input_ids=inputs, labels=labels).loss,
            len(tokens),
        )
    size, batch = {"resnet50": (128, 2), "vgg16": (64, 8)}[name]
    train, _ = data.digits(size)
    rank = dist.get_rank()
    pixels, targets = train[rank * batch : (rank + 1) * batch]
    model = models.resnet50(1000) if name == "resnet50" else models.vgg16(10)
    return (
        model,
        lambda m: nn.functional.cross_entropy(m(pixel_values=pixels).logits, targets),
        batch,
    )


def ddp(model: nn.Module, megabytes: float | None) -> nn.Module:
    """Under DistributedDataParallel; None is its default (25 MB, first 1 MB)."""
    return nn.parallel.DistributedDataParallel(
        model, bucket_cap_mb=megabytes, gradient_as_bucket_view=True
    )


def with_hook(model: nn.Module, hook: str) -> nn.Module:
    """DDP with one of torch's own communication hooks."""
    wrapped = ddp(model, 1000 if hook == "PowerSGD" else None)
    if hook == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=2
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)  # type: ignore[operator]
    else:
        wrapped.register_comm_hook(None, HOOKS[hook])  # type: ignore[operator]
    return wrapped


def measure(args: argparse.Namespace) -> None:
    """What one rank does; rank 0 writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    share_cores(rank, world)
    model, loss_of, _ = make_model(args.model)
    variants: dict[str, Iterate] = {"no exchange": plain(model, loss_of)}
    for megabytes in (None, *args.ddp):
        label = f"DDP, {megabytes:g} MB" if megabytes else "DDP, default"
        model, loss_of, _ = make_model(args.model)
        variants[label] = plain(ddp(model, megabytes), loss_of)
    sessions: dict[str, Session[nn.Module, torch.optim.SGD]] = {}
    for transport, name in itertools.product(args.transports, args.splits or SPLITS):
        label = f"slipstream, {name}" + (f", {transport}" if transport != "flat" else "")
        model, loss_of, _ = make_model(args.model)
        settings = {"transport": transport, **({"split": SPLITS[name]} if SPLITS[name] else {})}
        variants[label], sessions[label] = accelerated(model, loss_of, {"gradients": settings})
    for name in args.codecs or ():
        label = f"slipstream, {name}"
        model, loss_of, _ = make_model(args.model)
        codec, _, split_name = name.partition(" / ")
        coded: dict[str, object] = {"codec": CODECS[codec]}
        if split_name:
            coded["split"] = SPLITS[split_name]
        variants[label], sessions[label] = accelerated(model, loss_of, {"gradients": coded})
    for hook in args.hooks or ():
        model, loss_of, _ = make_model(args.model)
        variants[f"torch, {hook} hook"] = plain(with_hook(model, hook), loss_of)
    for label, session in sessions.items():
        if searches(session):
            for _ in range(MOST * TURNS * (SETTLING + Optimal().steps)):
                variants[label]()  # it has made its choice before anything is timed
    seconds, cpu = take_turns(variants, args.rounds, args.warmup)
    finals: dict[str, list[float]] = {}
    if args.finals and OPTIMAL in variants:
        finalists = [OPTIMAL, *rivals(seconds)]
        finals, _ = take_turns({name: variants[name] for name in finalists}, args.finals, 1)
    if rank == 0:
        model, _, _ = make_model(args.model)
        num_bytes = sum(p.nbytes for p in model.parameters())
        for session in sessions.values():
            if searches(session):
                print(session.report(), file=sys.stderr)
        collectives = {
            name: sum(segment.num_collectives for segment in session.segments)
            for name, session in sessions.items()
        }
        write(args, seconds, cpu, collectives, num_bytes, world, finals)
    dist.barrier()
    dist.destroy_process_group()


def searches(session: Session[nn.Module, torch.optim.SGD]) -> bool:
    """Whether it chooses a split or a transport while it trains."""
    gradients = session.strategy.gradients
    return isinstance(gradients.split, Optimal) or isinstance(gradients.transport, Auto)


def share_cores(rank: int, ranks: int) -> None:
    """Nodes are machines of one kind: each gets as much of this one's cores as the others.

    Left to itself, Linux may leave three of four ranks on one of two cores for a while, and every
    exchange waits for those.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, set(cores[rank::ranks]) or {cores[rank % len(cores)]})


def take_turns(
    variants: Mapping[str, Iterate], rounds: int, warmup: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each variant's iterations on the slowest rank, and CPU seconds of all ranks.

    A turn is two iterations, of which the second counts: the first finds in the caches what other
    variants have left there, which in a training of its own it would not.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    shuffle = random.Random(0)
    console = Console(stderr=True, quiet=dist.get_rank() != 0)
    for step in track(range(warmup + rounds), f"{len(variants)} variants", console=console):
        for name in shuffle.sample(list(variants), len(variants)):
            variants[name]()
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            variants[name]()
            spent = torch.tensor([time.perf_counter() - start])
            used = torch.tensor([time.process_time() - cpu_start])
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            dist.all_reduce(used)
            if step >= warmup:
                seconds[name].append(float(spent))
                cpu[name].append(float(used))
    return seconds, cpu


def rivals(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """The best fixed size, HCCL's default and the best DDP; the same on all ranks."""

    def best(names: Iterable[str]) -> list[str]:
        known = list(names)
        return [min(known, key=lambda name: statistics.median(seconds[name]))] if known else []

    fixed = (name for name in seconds if name == "slipstream, default" or "by_bytes" in name)
    ddp_sizes = (name for name in seconds if name.startswith("DDP"))
    return [*best(fixed), *(name for name in seconds if name == HCCL), *best(ddp_sizes)]


def write(
    args: argparse.Namespace,
    seconds: dict[str, list[float]],
    cpu: dict[str, list[float]],
    collectives: dict[str, int],
    num_bytes: int,
    world: int,
    finals: dict[str, list[float]],
) -> None:
    """Print the table; with --json write it too."""
    compute = statistics.median(seconds["no exchange"])
    rate = parse_rate(args.rate) if not args.loopback else None
    wire = 2 * (world - 1) / world * num_bytes * 8 / rate if rate else 0.0
    bound = max(compute, wire)
    best = min(
        (n for n in seconds if n.startswith("DDP")), key=lambda n: statistics.median(seconds[n])
    )
    rows = []
    for name, values in seconds.items():
        low, median, high = quartiles(values)
        ratios = quartiles([a / b for a, b in zip(values, seconds[best], strict=True)])
        rows.append(
            Row(
                name=name + (" (DDP, best)" if name == best else ""),
                median=median,
                low=low,
                high=high,
                exposed=median - compute,
                cpu=statistics.median(cpu[name]),
                collectives=collectives.get(name, 0),
                to_bound=median / bound,
                to_best_ddp=ratios[1],
                to_best_ddp_low=ratios[0],
                to_best_ddp_high=ratios[2],
            )
        )
    entry: dict[str, Any] = {
        "model": args.model,
        "megabytes": num_bytes / 2**20,
        "nodes": args.nodes,
        "rate": "loopback" if args.loopback else args.rate,
        "rounds": args.rounds,
        "codecs": args.codecs or [],
        "compute_s": compute,
        "wire_s": wire,
        "bound_s": bound,
    }
    Console(width=150).print(table(entry, rows))
    if OPTIMAL in seconds:
        entry["finals"] = args.finals
        entry["optimal"] = optimal_against(finals or seconds, rivals(seconds))
        Console(width=150).print(optimal_in_words(entry["optimal"]))
    if args.json:
        raw = {"rows": [asdict(r) for r in rows], "seconds": seconds, "final_seconds": finals}
        save(args.json, "exchange", {**entry, **raw})


def optimal_against(
    seconds: Mapping[str, Sequence[float]], names: Sequence[str]
) -> dict[str, dict[str, list[float]]]:
    """The time of the optimal split over that of each rival, in pairs of a round."""
    found = {}
    for name in names:
        ratios = [a / b for a, b in zip(seconds[OPTIMAL], seconds[name], strict=True)]
        interval = median_interval(ratios)
        found[name] = {"quartiles": list(quartiles(ratios)), "interval": list(interval or ())}
    return found


def table(entry: dict[str, object], rows: Sequence[Row]) -> Table:
    """What a person reads."""
    drawn = Table(
        title=f"{entry['model']}: {entry['megabytes']:.0f} MB of gradients, {entry['nodes']} nodes "
        f"at {entry['rate']}; compute {entry['compute_s']:.3f} s, wire {entry['wire_s']:.3f} s",
    )
    for heading in (
        "variant", "median s", "quartiles", "exposed s", "CPU s", "all-reduces", "x bound",
        "x best DDP", "quartiles",
    ):  # fmt: skip
        drawn.add_column(heading, justify="left" if heading == "variant" else "right")
    for r in rows:
        drawn.add_row(
            r.name, f"{r.median:.3f}", f"{r.low:.3f}..{r.high:.3f}", f"{r.exposed:.3f}",
            f"{r.cpu:.2f}", str(r.collectives or ""), f"{r.to_bound:.2f}", f"{r.to_best_ddp:.3f}",
            f"{r.to_best_ddp_low:.3f}..{r.to_best_ddp_high:.3f}",
        )  # fmt: skip
    return drawn


def on_testbed(argv: Sequence[str], nodes: int, rate: str) -> int:
    """Run this script on every node of a testbed."""
    with Testbed(nodes=nodes, rate=rate) as bed:
        return bed.run(
            [
                [
                    "env",
                    f"RANK={node.index}",
                    f"WORLD_SIZE={nodes}",
                    f"MASTER_ADDR={bed.nodes[0].address}",
                    "MASTER_PORT=29500",
                    sys.executable,
                    os.path.abspath(sys.argv[0]),
                    *argv,
                ]
                for node in bed.nodes
            ]
        )


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=("resnet50", "vgg16", "bert"), default="resnet50")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--finals", type=int, default=0, help="rounds of the optimal split alone")
    parser.add_argument("--splits", nargs="*", choices=list(SPLITS), help="default: all")
    parser.add_argument("--transports", nargs="*", default=["flat"], help="each with every split")
    parser.add_argument("--ddp", nargs="*", type=float, default=DDP_MEGABYTES, help="DDP's buckets")
    parser.add_argument("--codecs", nargs="*", help=f"{', '.join(CODECS)}; or 'bf16 / SPLIT'")
    parser.add_argument("--hooks", nargs="*", choices=HOOKS, help="DDP with torch's hooks, too")
    parser.add_argument("--loopback", action="store_true", help="without emulated links")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args)
        return 0
    os.environ.update(KEEP_MEMORY)
    if args.loopback:
        return on_loopback(__file__, sys.argv[1:], args.nodes)
    return on_testbed(sys.argv[1:], args.nodes, args.rate)


if __name__ == "__main__":
    sys.exit(main())
