"""Exchange of gradients on a slow network: slipstream beside torch's own ways to train.

    python benchmarks/exchange.py --model resnet50 --nodes 4 --rate 1gbit --json resnet50.json

All variants train the same model side by side in one run, an iteration each in turn, in an order
that is shuffled every round, between barriers; an iteration takes as long as on its slowest rank.
DDP is measured with its default and with seven bucket sizes, all with gradients as bucket views and
a static graph (its faster settings); the one with the smallest median is "DDP, best". --fsdp and
--zero add FSDP2 and ZeRO-1. The bound is max(compute, wire): compute is the iteration without any
exchange, wire = 2 (p - 1) / p * bytes / rate. Without namespaces (no root) use --loopback.

Two kinds of computing. With `--compute cpu` the ranks compute on the cores that the exchange needs
as well. With `--compute accelerator` each layer takes its time by sleeping, as on a host whose
device computes, so that cores are free (accelerator.py; the optimizer's update stays on the cores):

    python benchmarks/exchange.py --compute accelerator --compute-seconds wire \
        --fsdp default keep prefetch --zero 8 --splits default

`--compute-seconds wire` makes an iteration without exchange take the wire time, where a perfect
overlap hides most; a number sets the seconds.

Beside the time stands the memory that a rank needs at most: every variant trains for a few
iterations alone in processes of its own first (peak_memory.py; --no-memory leaves it out).

With --codecs and --hooks, slipstream's codecs take turns with DDP and with torch's own hooks (in
DDP's default buckets or smaller ones; PowerSGD in one bucket, as it crashes on gloo with several):

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from accelerator import Device, shares_of, timed_model
from baselines import (
    DDP_MEGABYTES,
    FSDP,
    HOOKS,
    ddp,
    fsdp2,
    fsdp_units,
    with_hook,
    zero1,
)
from iteration import Iterate, Loss, accelerated, on_loopback, on_testbed, plain, quartiles
from peak_memory import free_bytes, peak_rss, release
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tables import (
    EXCHANGE_COLUMNS,
    computing_in_words,
    exchange_cells,
    save,
)
from torch import nn

from slipstream.session.session import Session
from slipstream.strategy import AutoConfig, OptimalConfig, TransportConfig
from slipstream.testbed import parse_rate
from slipstream.tuner.search_space import MOST, SETTLING, TURNS

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import data
import models

MODELS = ("resnet50", "vgg16", "bert", "swin-t", "gpt2", "resnet-small")
TRANSPORTS: dict[str, object] = {
    variant.model_fields["kind"].default: variant.model_fields["kind"].default
    for variant in get_args(get_args(TransportConfig)[0])
}
TRANSPORTS["sharded, a third replicated"] = {"kind": "sharded", "replicated": 1 / 3}
SPLITS: dict[str, dict[str, object]] = {
    "default": {},
    "by_bytes 2/1/1": {"kind": "by_bytes", "megabytes": 2},
    "by_bytes 8/1/1": {"kind": "by_bytes", "megabytes": 8},
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

KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**28),
}
"""glibc keeps what a rank frees, as the allocators do that one loads for training.

A virtual machine may give freed pages back to its host while a rank waits for the network; to get
them again in the next variant's turn made computing take up to 1.6 times as long.
"""


AnySession = Session[nn.Module, torch.optim.SGD]
Variant = tuple[Iterate, AnySession | None]


@dataclass(frozen=True)
class Row:
    """One variant: seconds an iteration (slowest rank), CPU seconds of all, ratios in pairs.

    ``peak_bytes`` are of the rank that needs most; 0 if they were not measured.
    """

    name: str
    median: float
    low: float
    high: float
    exposed: float
    cpu: float
    collectives: int
    to_bound: float
    to_bound_low: float
    to_bound_high: float
    to_best_ddp: float
    to_best_ddp_low: float
    to_best_ddp_high: float
    peak_bytes: int


def make_model(name: str) -> tuple[nn.Module, Loss, int]:
    """The model, a function from it to the loss of a real batch, and its batch size."""
    torch.manual_seed(0)
    inputs, targets = batch_of(name, int(os.environ["RANK"]))
    if name == "bert":
        return (
            models.bert("tiny", 30522),
            lambda m: m(input_ids=inputs, labels=targets).loss,
            len(inputs),
        )
    if name == "gpt2":
        gpt2 = models.gpt2("mini", 8192)
        return gpt2, lambda m: m(input_ids=inputs, labels=targets).loss, len(inputs)
    make: dict[str, Callable[[], nn.Module]] = {
        "resnet50": lambda: models.resnet50(1000),
        "vgg16": lambda: models.vgg16(10),
        "swin-t": lambda: models.swin_t(1000),
        "resnet-small": lambda: models.resnet_small(10),
    }
    return (
        make[name](),
        lambda m: nn.functional.cross_entropy(m(pixel_values=inputs).logits, targets),
        len(inputs),
    )


@cache
def batch_of(name: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of a rank."""
    if name == "bert":
        tokens = data.stdlib_tokens(30522)[: 2 * 128].view(2, 128)
        return data.mask_words(tokens, 30522, torch.Generator().manual_seed(0))
    if name == "gpt2":
        tokens = data.stdlib_tokens(8192)[rank * 256 : (rank + 1) * 256].view(2, 128)
        return tokens, tokens
    size, batch = {
        "resnet50": (128, 2), "vgg16": (64, 8), "swin-t": (224, 1), "resnet-small": (32, 2),
    }[name]  # fmt: skip
    train, _ = data.digits(size)
    pixels, targets = train[rank * batch : (rank + 1) * batch]
    return pixels.clone(), targets.clone()  # not views that keep all images


class Case:
    """What all variants train: a model, and who computes it."""

    def __init__(self, name: str, device: Device | None) -> None:
        self.name = name
        self.device = device
        model, loss_of, self.batch_size = make_model(name)
        self.num_bytes = sum(p.nbytes for p in model.parameters())
        self.units = fsdp_units(model)
        self._shares = shares_of(model, loss_of) if device else {}

    def make(self) -> tuple[nn.Module, Loss]:
        """A new model and a function to its loss."""
        model, loss_of, _ = make_model(self.name)
        if self.device is None:
            return model, loss_of
        seed = int(os.environ["RANK"])
        return timed_model(model, self._shares, self.units, self.device, seed)


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


def wire_seconds(args: argparse.Namespace, num_bytes: int, world: int) -> float:
    """What a ring of all ranks needs to send; 0 on loopback, which has no rate."""
    if args.loopback:
        return 0.0
    return 2 * (world - 1) / world * num_bytes * 8 / parse_rate(args.rate)


def measure(args: argparse.Namespace) -> None:
    """What one rank does; rank 0 writes the rows."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if args.cores == "bound":
        share_cores(rank, world)
    device = Device(0.0) if args.compute == "accelerator" else None
    case = Case(args.model, device)
    wire = wire_seconds(args, case.num_bytes, world)
    wanted = wire if args.compute_seconds == "wire" else float(args.compute_seconds)
    if device:
        device.seconds = wanted
    build = variants_of(args, case)
    peaks = measure_memory(build, rank) if args.memory or args.only_memory else {}
    dist.init_process_group("gloo")
    highest = highest_of_all(peaks)
    if args.only_memory:
        write_memory(args, case, highest)
        dist.destroy_process_group()
        return
    check_room(highest, world)
    variants: dict[str, Iterate] = {}
    sessions: dict[str, AnySession] = {}
    for label, make in build.items():
        variants[label], session = make()
        if session:
            sessions[label] = session
    if device:
        device.fit(variants["no exchange"], wanted)
    for label, session in sessions.items():
        if searches(session):
            for _ in range(MOST * TURNS * (SETTLING + OptimalConfig().steps)):
                variants[label]()  # it has made its choice before anything is timed
    seconds, cpu = take_turns(variants, args.rounds, args.warmup)
    if rank == 0:
        for session in sessions.values():
            if searches(session):
                print(session.report(), file=sys.stderr)
        collectives = {
            name: sum(segment.num_collectives for segment in session.segments)
            for name, session in sessions.items()
        }
        write(args, case, seconds, cpu, collectives, highest, wire)
    dist.barrier()
    dist.destroy_process_group()


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
    drawn = Table("variant", "peak MiB")
    for name, peak in peaks.items():
        drawn.add_row(name, f"{peak / 2**20:.0f}")
    Console().print(drawn)
    if args.json:
        rows = [{"name": name, "peak_bytes": peak} for name, peak in peaks.items()]
        entry = {"model": args.model, "megabytes": case.num_bytes / 2**20, "nodes": args.nodes}
        entry["codecs"] = args.codecs
        save(args.json, "exchange", {"benchmark": "memory", **entry, "rows": rows})


def share_cores(rank: int, ranks: int) -> None:
    """Nodes are machines of one kind: each gets as much of this one's cores as the others.

    The default where ranks compute on these cores. Left to itself, Linux may leave three of four
    ranks on one of two cores for a while, and every exchange waits for those. It has a price: a
    thread that exchanges cannot go to the other core when that is idle, while on a real host no
    other host's computing stands in its way. Ranks that compute without a pause make gloo's ring
    up to twenty times slower then (transports.py). In iterations of a ResNet-50 DDP, flat and
    direct took a tenth less bound than free, and sharded as long: bound is the better setting of
    the rivals.

    Not the default beside an accelerator: cores are idle most of the time, none is short of them,
    and bound ranks took 3 to 8 % longer with gloo's ring (DDP, flat) and no longer with direct. To
    bind them would favour our own.
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


def write(
    args: argparse.Namespace,
    case: Case,
    seconds: dict[str, list[float]],
    cpu: dict[str, list[float]],
    collectives: dict[str, int],
    peaks: dict[str, int],
    wire: float,
) -> None:
    """Print the table; with --json write it too."""
    compute = statistics.median(seconds["no exchange"])
    bound = max(compute, wire)
    with_ddp = [n for n in seconds if n.startswith("DDP")]
    best = min(with_ddp, key=lambda n: statistics.median(seconds[n]))
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
                to_bound_low=low / bound,
                to_bound_high=high / bound,
                to_best_ddp=ratios[1],
                to_best_ddp_low=ratios[0],
                to_best_ddp_high=ratios[2],
                peak_bytes=peaks.get(name, 0),
            )
        )
    entry: dict[str, Any] = {
        "model": args.model,
        "megabytes": case.num_bytes / 2**20,
        "nodes": args.nodes,
        "rate": "loopback" if args.loopback else args.rate,
        "rounds": args.rounds,
        "codecs": args.codecs or [],
        "cores": args.cores,
        "compute": args.compute,
        "compute_seconds": args.compute_seconds if case.device else None,
        "device_s": case.device.seconds if case.device else None,
        "compute_s": compute,
        "wire_s": wire,
        "bound_s": bound,
    }
    console = Console(width=150)
    console.print(table(entry, rows))
    if args.json:
        raw = {"rows": [asdict(r) for r in rows], "seconds": seconds}
        save(args.json, "exchange", {**entry, **raw})


def table(entry: Mapping[str, Any], rows: Sequence[Row]) -> Table:
    """What a person reads."""
    drawn = Table(
        title=f"{entry['model']}: {entry['megabytes']:.0f} MB of gradients, {entry['nodes']} nodes "
        f"at {entry['rate']}; {computing_in_words(entry)}: compute {entry['compute_s']:.3f} s, "
        f"wire {entry['wire_s']:.3f} s, bound {entry['bound_s']:.3f} s"
    )
    for heading in EXCHANGE_COLUMNS:
        drawn.add_column(heading, justify="left" if heading == "variant" else "right")
    for r in rows:
        drawn.add_row(*exchange_cells(asdict(r)))
    return drawn


def seconds_or_wire(text: str) -> str:
    """An argument of --compute-seconds."""
    if text != "wire" and not float(text) > 0:
        raise ValueError(text)
    return text


def as_ranks(measure: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """Start this script as the ranks, or be one; its exit status."""
    if "RANK" in os.environ:
        measure(args)
        return 0
    os.environ.update(KEEP_MEMORY)
    if args.loopback:
        return on_loopback(sys.argv[0], sys.argv[1:], args.nodes)
    return on_testbed(sys.argv[1:], args.nodes, args.rate)


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
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
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    args.cores = args.cores or ("bound" if args.compute == "cpu" else "free")
    if args.compute == "accelerator" and args.loopback and args.compute_seconds == "wire":
        parser.error("--compute-seconds: loopback has no rate, so no wire time; give the seconds")
    return as_ranks(measure, args)


if __name__ == "__main__":
    sys.exit(main())
