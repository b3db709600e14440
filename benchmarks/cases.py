"""Models, splits, transports and codecs that benchmarks of whole iterations share."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.accelerator import Device, shares_of, timed_model
from benchmarks.baselines import fsdp_units
from benchmarks.iteration import Iterate, Loss, on_loopback, on_testbed
from benchmarks.turns import seconds_of, take_turns
from examples import data, models
from slipstream.strategy import TransportConfig
from slipstream.testbed import Distance, parse_rate

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


def case_of(args: argparse.Namespace, world: int) -> Case:
    """The model, and the device that computes it, if not the cores."""
    device = Device(0.0) if args.compute == "accelerator" else None
    case = Case(args.model, device)
    if device:
        wire = wire_seconds(args, case.num_bytes, world)
        device.seconds = wire if args.compute_seconds == "wire" else float(args.compute_seconds)
    return case


def on_one_host(args: argparse.Namespace) -> bool:
    """Whether ranks run without emulated links, which not every benchmark offers."""
    return bool(getattr(args, "loopback", False))


def head_of(
    args: argparse.Namespace, case: Case, *, without_links: str = "loopback"
) -> dict[str, Any]:
    """The first values of an entry: who trained what, and where."""
    return {
        "model": args.model,
        "megabytes": case.num_bytes / 2**20,
        "nodes": args.nodes,
        "rate": without_links if on_one_host(args) else args.rate,
        "rounds": args.rounds,
    }


def wire_seconds(args: argparse.Namespace, num_bytes: int, world: int) -> float:
    """What a ring of all ranks needs to send; 0 on loopback, which has no rate."""
    if on_one_host(args):
        return 0.0
    return 2 * (world - 1) / world * num_bytes * 8 / parse_rate(args.rate)


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


def seconds_or_wire(text: str) -> str:
    """An argument of --compute-seconds."""
    if text != "wire" and not float(text) > 0:
        raise ValueError(text)
    return text


def as_ranks(
    measure: Callable[[argparse.Namespace], None],
    args: argparse.Namespace,
    distance: Distance | None = None,
    *,
    ranks: int | None = None,
    keep_memory: bool = True,
) -> int:
    """Start this module as the ranks, or be one; its exit status.

    Args:
        measure: what a rank does.
        args: say how many nodes there are, and what links them.
        distance: between the emulated hosts.
        ranks: of this host, whatever ``args`` say.
        keep_memory: as KEEP_MEMORY does.
    """
    if "RANK" in os.environ:
        measure(args)
        return 0
    if keep_memory:
        os.environ.update(KEEP_MEMORY)
    if ranks is not None:
        return on_loopback(sys.argv[1:], ranks)
    if on_one_host(args):
        return on_loopback(sys.argv[1:], args.nodes)
    return on_testbed(sys.argv[1:], args.nodes, args.rate, distance)


def timed_iterations(
    variants: Mapping[str, Iterate], rounds: int, warmup: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of an iteration on the slowest rank, and CPU seconds of all ranks together.

    An iteration of the same variant, which is not timed, precedes each: caches and connections are
    its own then.
    """
    cpu: dict[str, list[float]] = {name: [] for name in variants}

    def turn(name: str) -> float:
        variants[name]()
        start = time.process_time()
        spent = seconds_of(variants[name])
        cpu[name].append(time.process_time() - start)
        return spent

    seconds = take_turns([*variants], turn, rounds, warmup, f"{len(variants)} variants")
    used = torch.tensor([cpu[name][warmup:] for name in variants])
    dist.all_reduce(used)
    return seconds, dict(zip(variants, used.tolist(), strict=True))
