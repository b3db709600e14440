"""Compressors between hosts, of all ranks in one process: the plain reference of what they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from slipstream.codecs import HostsCompressor
from slipstream.strategy import HalfConfig, PlainCodecConfig
from slipstream.transport.hosts import Rails
from slipstream.transport.requests import (
    BetweenHosts,
    ExchangeSteps,
    ReduceInHosts,
    Request,
    SpreadInHosts,
)
from tests.codecs.compressors import CONFIGS, SHAPES, carry_out, shares, sum_kept

# Ranks by host.
NODES: Mapping[str, Sequence[Sequence[int]]] = {
    "2 x 1": [[0], [1]],
    "3 x 1": [[0], [1], [2]],
    "2 x 2": [[0, 1], [2, 3]],
    "2 x 2, permuted": [[0, 2], [1, 3]],
    "2 x 3, permuted": [[0, 3, 5], [1, 2, 4]],
    "3 x 2": [[0, 1], [2, 3], [4, 5]],
    "2 + 1": [[0, 1], [2]],
    "1 + 3": [[0], [1, 2, 3]],
    "3 + 2 + 1, permuted": [[0, 3, 5], [1, 4], [2]],
}

CODECS = {
    name: CONFIGS[name]
    for name in (
        *("int8", "int8, feedback", "int8, stochastic, feedback", "int4", "onebit", "topk", "dgc"),
    )
} | {"bf16": HalfConfig(), "dgc, warm-up": CONFIGS["dgc, warm-up"], "powersgd": CONFIGS["powersgd"]}

FED_BACK = [name for name in CODECS if name not in ("bf16", "int8")]


class HostsTeam:
    """The compressors of all ranks of some hosts for one bucket, and exchanges of theirs."""

    def __init__(
        self,
        config: PlainCodecConfig,
        nodes: Sequence[Sequence[int]],
        shapes: Sequence[Sequence[int]] = SHAPES,
    ) -> None:
        self.nodes, self.shapes = nodes, shapes
        self.ranks = sum(map(len, nodes))
        parameters = [torch.zeros(*shape) for shape in shapes]
        self.compressors = [
            HostsCompressor(
                config, parameters, Rails.of(nodes, rank), num_flags=len(shapes) + 1, seed=3
            )
            for rank in range(self.ranks)
        ]
        self.size = sum(p.numel() for p in parameters)

    def gradients(self, seed: int) -> list[torch.Tensor]:
        return shares(self.size, self.ranks, seed)

    def sums(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of each host, in rank order."""
        return [summed([gradients[rank] for rank in node]) for node in self.nodes]

    def exchange(
        self,
        gradients: Sequence[torch.Tensor],
        step: int = 0,
        counts: bool = True,
        forget: Sequence[int] = (),
    ) -> list[torch.Tensor]:
        """What each rank gets; ``flags``: what became of the flags (rank r raised flag r)."""
        values, self.flags = [], []
        for rank, (compressor, gradient) in enumerate(
            zip(self.compressors, gradients, strict=True)
        ):
            value, flags = filled(compressor, gradient, rank)
            values.append(value)
            self.flags.append(flags)
        triples = zip(self.compressors, values, self.flags, strict=True)
        run_on_hosts([compressor.exchange(v, f, step) for compressor, v, f in triples], self.nodes)
        for compressor in self.compressors:
            compressor.forget(forget)
            if counts:
                compressor.commit()
            else:
                compressor.rollback()
        return [value[: self.size] for value in values]

    def kept(self) -> torch.Tensor:
        """What all ranks together have not sent yet."""
        return sum_kept(self.compressors, self.shapes)


def filled(
    compressor: HostsCompressor, gradient: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's gradients as a bucket holds them, and its flags."""
    values = torch.zeros(compressor.num_values, dtype=compressor.works_in)
    values[: len(gradient)] = gradient
    flags = torch.zeros(compressor.num_flags, dtype=torch.uint8)
    flags[rank % (compressor.num_flags - 1)] = 1
    return values, flags


def summed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One added after the other."""
    total = tensors[0].clone()
    for other in tensors[1:]:
        total += other
    return total


def run_on_hosts(exchanges: Sequence[ExchangeSteps], nodes: Sequence[Sequence[int]]) -> None:
    """Carry out the exchanges of all ranks: a request when all ranks that it needs have come.

    A rank that waits on several rails goes on when all of them are done.
    """
    rails = Rails.of(nodes, 0).members
    pending: dict[int, Request] = {}
    waiting: dict[int, dict[int, Request]] = {}

    def advance(ranks: Sequence[int]) -> None:
        for rank in ranks:
            pending.pop(rank, None)
            if (request := next(exchanges[rank], None)) is not None:
                pending[rank] = request
                if isinstance(request, BetweenHosts):
                    waiting[rank] = dict(request.requests)

    advance(range(len(exchanges)))
    while pending:
        progress = False
        for node in nodes:
            here = [pending.get(rank) for rank in node]
            if all(isinstance(request, ReduceInHosts | SpreadInHosts) for request in here):
                in_host([request for request in here if request])
                advance(node)
                progress = True
        for rail, members in enumerate(rails):
            if all(rail in waiting.get(rank, {}) for rank in members):
                carry_out([waiting[rank].pop(rail) for rank in members])
                progress = True
                for rank in members:
                    if not waiting[rank]:
                        del waiting[rank]
                        advance([rank])
        assert progress, f"ranks wait for each other: {pending}"


def in_host(requests: Sequence[Request]) -> None:
    """Sum or copy the shares of a host's ranks; share i is that of rank i modulo their number."""
    first = requests[0]
    assert isinstance(first, ReduceInHosts | SpreadInHosts)
    assert len({(type(r), tuple(r.borders)) for r in requests}) == 1, requests
    for rail, (start, stop) in enumerate(pairwise(first.borders)):
        shares = [request.tensor[start:stop] for request in requests]
        own = shares[rail % len(shares)]
        if isinstance(first, ReduceInHosts):
            own.copy_(summed(shares))
            continue
        for share in shares:
            share.copy_(own)
