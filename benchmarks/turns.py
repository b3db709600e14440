"""Variants that take turns, and what the benchmarks of single exchanges share."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn

from slipstream.strategy import Strategy
from slipstream.transport.requests import Request
from slipstream.transport.transport import Transport, make_transport

Variant = TypeVar("Variant")


def take_turns(
    variants: Sequence[Variant],
    turn: Callable[[Variant], float],
    rounds: int | Callable[[float], int],
    warmup: int,
    title: str = "rounds",
) -> dict[Variant, list[float]]:
    """Seconds of each variant's turns on the slowest rank, in an order shuffled every round.

    Args:
        variants: the same on all ranks.
        turn: carries a variant out; returns the seconds on this rank.
        rounds: turns of each variant that count; or how many, from the seconds of the warm-up.
        warmup: turns before that.
        title: of the progress bar.
    """
    seconds: dict[Variant, list[float]] = {variant: [] for variant in variants}
    shuffle, begun = random.Random(0), time.perf_counter()

    def each() -> Iterator[tuple[Variant, float]]:
        for variant in shuffle.sample(variants, len(variants)):
            yield variant, slowest(turn(variant))

    for _ in range(warmup):
        list(each())
    count = rounds if isinstance(rounds, int) else rounds(slowest(time.perf_counter() - begun))
    quiet = dist.is_initialized() and dist.get_rank() != 0
    for _ in track(range(count), title, console=Console(stderr=True, quiet=quiet)):
        for variant, spent in each():
            seconds[variant].append(spent)
    return seconds


def slowest(seconds: float) -> float:
    """Of all ranks; of this process where there are none."""
    if not dist.is_initialized():
        return seconds
    most = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def seconds_of(call: Callable[[], object]) -> float:
    """Behind a barrier, where there are ranks."""
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextmanager
def joined_ranks() -> Iterator[None]:
    """Join the ranks that torchrun's variables describe, over gloo and with a thread each; where
    none has failed, they leave together."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    yield
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def open_transports(names: Sequence[str]) -> Iterator[dict[str, Transport]]:
    """By name, each on a group of its own, on a rank that torchrun's variables describe.

    A name is a kind, or a kind and what it uses between hosts: ``hierarchical/flat``.
    """
    with joined_ranks():
        transports = {}
        for name in names:
            kind, _, between = name.partition("/")
            config = {"kind": kind, "between": between} if between else kind
            strategy = Strategy.load({"gradients": {"transport": config}})
            transports[name] = make_transport(strategy.gradients.transport, dist.new_group())
        yield transports
        dist.barrier()
        for transport in transports.values():
            transport.close()


def carry(transport: Transport, requests: Sequence[Request]) -> None:
    """Start all, and wait for all."""
    for work in [work for request in requests for work in transport.start(request)]:
        work.wait()


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
